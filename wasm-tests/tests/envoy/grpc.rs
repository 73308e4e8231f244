//! gRPC callers get HTTP 200 with a `grpc-status`, over HTTP/2 as a gRPC client speaks it.

use portcullis_wasm_tests::{Answer, Call, Envelope, GatewayPlan, Http2, Reply, development_service};
use serde_json::{Value, json};

use crate::world::{World, strict};

fn grpc(envelope: &Envelope) -> Call {
    Call::post("/service.Name/Method", b"\0\0\0\0\0".to_vec())
        .header("content-type", "application/grpc+proto")
        .header("te", "trailers")
        .envelope(envelope)
}

#[track_caller]
fn refused_with(answer: &Answer, status: &str, class: &str) {
    assert_eq!(answer.status, 200, "{answer:?}");
    let field = |name: &str| answer.header(name).or_else(|| answer.trailer(name)).map(str::to_owned);
    assert_eq!(field("grpc-status").as_deref(), Some(status), "{answer:?}");
    assert!(
        field("grpc-message").is_some_and(|message| !message.is_empty()),
        "{answer:?}"
    );
    assert!(
        answer
            .header("content-type")
            .is_some_and(|kind| kind.starts_with("application/grpc")),
        "{answer:?}"
    );
    assert_eq!(answer.header("x-portcullis-class"), Some(class), "{answer:?}");
    assert!(answer.body.is_empty(), "{:?}", answer.text());
}

async fn world(rules: impl Into<Value>, capacity: Value) -> World {
    World::with(rules, development_service(capacity), GatewayPlan::upstream_http2).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_admitted_call_passes_with_its_trailers() {
    let mut world = world("contract-limits", Value::Null).await;
    let trailers = vec![("grpc-status".to_owned(), "0".to_owned())];
    world.upstream.reply(Reply {
        headers: vec![("content-type".into(), "application/grpc".into())],
        trailers,
        ..Reply::default()
    });
    let client = Http2::open(world.gateway.address()).await;
    let answer = client.call(&grpc(&Envelope::owner("o").requests("owner", 1))).await;
    assert_eq!((answer.status, answer.trailer("grpc-status")), (200, Some("0")));
    assert_eq!(
        (world.upstream.hits(), world.upstream.last().body),
        (1, b"\0\0\0\0\0".to_vec())
    );
    let denied = client.call(&grpc(&Envelope::owner("o").requests("owner", 1))).await;
    refused_with(&denied, "8", "quota_exhausted");
    assert_eq!(world.upstream.hits(), 1);
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn each_status_has_its_grpc_status() {
    let mut world = world("operator-admission", json!({"lanes": {"full": {"requests": 0}}})).await;
    let client = Http2::open(world.gateway.address()).await;
    let blocked = client.call(&grpc(&Envelope::owner("o").requests("owner", 0))).await;
    refused_with(&blocked, "8", "quota_exhausted");
    refused_with(
        &client.call(&grpc(&Envelope::owner("o").with("lane", "full"))).await,
        "14",
        "capacity_exhausted",
    );
    refused_with(
        &client.call(&grpc(&Envelope::default())).await,
        "14",
        "envelope_missing",
    );
    refused_with(
        &client.call(&grpc(&Envelope::owner("o").requests("owner", "x"))).await,
        "14",
        "envelope_malformed",
    );
    assert_eq!(world.upstream.hits(), 0);
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unavailable_decision_is_grpc_unavailable() {
    let mut world = world(strict(), Value::Null).await;
    world.service.kill();
    let client = Http2::open(world.gateway.address()).await;
    let degraded = client.call(&grpc(&Envelope::owner("o").requests("owner", 3))).await;
    refused_with(&degraded, "14", "decision_unavailable");
    assert_eq!(world.upstream.hits(), 0);
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_type_that_only_begins_alike_is_no_grpc() {
    let world = world("contract-limits", Value::Null).await;
    let envelope = Envelope::owner("o").requests("owner", 0);
    for kind in ["application/json", "application/x-grpc", "text/plain"] {
        let call = Call::post("/", "{}").header("content-type", kind).envelope(&envelope);
        crate::expect::refused(&world.gateway.call(&call).await, crate::expect::RATE_LIMITED);
    }
    assert_eq!(world.upstream.hits(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn grpc_web_which_envoy_takes_for_plain_http_gets_its_status_too() {
    let mut world = world("contract-limits", Value::Null).await;
    let envelope = Envelope::owner("o").requests("owner", 0);
    for kind in [
        "application/grpc-web",
        "application/grpc-web+proto",
        "application/grpc-web-text",
    ] {
        let call = Call::post("/pkg.Service/Call", "\0\0\0\0\0")
            .header("content-type", kind)
            .envelope(&envelope);
        let denied = world.gateway.call(&call).await;
        assert_eq!(denied.status, 200, "{denied:?}");
        let is_text = kind.ends_with("-text");
        assert!(
            denied
                .body
                .starts_with(if is_text { b"gAAAAE" } else { b"\x80\0\0\0D" }),
            "{denied:?}"
        );
        assert_eq!(denied.header("grpc-status"), Some("8"), "{denied:?}");
        assert_eq!(denied.header("content-type"), Some(kind), "{denied:?}");
        assert_eq!(
            denied.header("x-portcullis-class"),
            Some("quota_exhausted"),
            "{denied:?}"
        );
    }
    assert_eq!(world.upstream.hits(), 0);
    world.gateway.assert_sound();
}
