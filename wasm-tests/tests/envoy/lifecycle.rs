//! Requests of every shape pass through: one reply each, nothing lost, nothing added.

use std::time::Duration;

use portcullis_wasm_tests::{
    Call, Connection, Decision, Envelope, GatewayPlan, Http2, Reply, development_service, filter_module,
};
use serde_json::{Value, json};

use crate::expect::{RATE_LIMITED, refused, served};
use crate::world::{Scripted, World, strict};

fn limited(limit: u64) -> Envelope {
    Envelope::owner("o").requests("owner", limit)
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_on_one_connection_are_decided_one_by_one() {
    let mut world = World::start(strict(), Value::Null).await;
    let call = Call::post("/", "body").envelope(&limited(2));
    let mut connection = Connection::open(world.gateway.address()).await;
    served(&connection.call(&call).await);
    served(&connection.call(&call).await);
    refused(&connection.call(&call).await, RATE_LIMITED);
    let other = Call::get("/").envelope(&Envelope::owner("other").requests("owner", 2));
    served(&connection.call(&other).await);
    assert_eq!(world.upstream.hits(), 3);
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn pipelined_requests_get_an_answer_each() {
    let mut world = World::start(strict(), Value::Null).await;
    let call = Call::get("/").envelope(&limited(2));
    let mut connection = Connection::open(world.gateway.address()).await;
    connection.send(&call.bytes().repeat(3)).await;
    served(&connection.answer("GET").await);
    served(&connection.answer("GET").await);
    refused(&connection.answer("GET").await, RATE_LIMITED);
    assert_eq!(world.upstream.hits(), 2);
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn head_is_answered_without_a_body_admitted_and_denied() {
    let mut world = World::start(strict(), Value::Null).await;
    let call = Call::new("HEAD", "/").envelope(&limited(1));
    let mut connection = Connection::open(world.gateway.address()).await;
    assert_eq!(connection.call(&call).await.status, 200);
    let denied = connection.call(&call).await;
    assert_eq!(
        (denied.status, denied.header("x-portcullis-class")),
        (429, Some("quota_exhausted"))
    );
    assert!(denied.retry_after().is_some());
    served(
        &connection
            .call(&Call::get("/").envelope(&Envelope::owner("p").requests("owner", 1)))
            .await,
    );
    assert_eq!(world.upstream.hits(), 2);
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_204_and_an_empty_body_pass() {
    let mut world = World::start(strict(), Value::Null).await;
    let call = Call::get("/").envelope(&limited(10).concurrency("owner", 1));
    for status in [204, 200, 404] {
        world.upstream.reply(Reply {
            status,
            body: String::new(),
            ..Reply::default()
        });
        portcullis_wasm_tests::until("the slot", portcullis_wasm_tests::DEADLINE, async || {
            let answer = world.gateway.call(&call).await;
            assert!(answer.status == status || answer.status == 429, "{answer:?}");
            (answer.status == status).then(|| assert!(answer.body.is_empty()))
        })
        .await;
    }
    assert_eq!(world.upstream.hits(), 3);
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstreams_own_error_is_not_ours() {
    let world = World::start(strict(), Value::Null).await;
    for status in [429, 500, 503] {
        let headers = vec![
            ("x-portcullis-class".into(), "forged".into()),
            ("retry-after".into(), "7".into()),
        ];
        world.upstream.reply(Reply {
            status,
            headers,
            body: "its own".into(),
            ..Reply::default()
        });
        let answer = world.gateway.call(&Call::get("/").envelope(&limited(10))).await;
        assert_eq!((answer.status, answer.text().as_str()), (status, "its own"));
        assert_eq!(answer.header("x-portcullis-class"), None);
        assert_eq!(answer.header("retry-after"), Some("7"));
    }
    assert_eq!(world.upstream.hits(), 3);
    assert_eq!(world.gateway.counter("portcullis_rejected_quota_exhausted").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_sent_while_the_decision_is_out_arrives_whole() {
    for while_paused in [false, true] {
        let slow = Decision::AdmitAfter(Duration::from_millis(80));
        let change = |plan: GatewayPlan| if while_paused { plan.body_while_paused() } else { plan };
        let mut world = Scripted::with(strict(), slow, change).await;
        let body: Vec<u8> = (0..400_000_u32).flat_map(u32::to_le_bytes).take(600_000).collect();
        served(
            &world
                .gateway
                .call(&Call::post("/", body.clone()).envelope(&limited(5)))
                .await,
        );
        assert_eq!(world.upstream.hits(), 1);
        assert!(world.upstream.last().body == body, "the body changed");
        world.gateway.assert_sound();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_denied_body_goes_nowhere() {
    let deny = Decision::Deny(json!({"code": "RATE_LIMITED", "gate": "contract", "retry_after_s": 41}));
    let mut world = Scripted::start(strict(), deny).await;
    let denied = world
        .gateway
        .call(&Call::post("/", vec![b'b'; 50_000]).envelope(&limited(5)))
        .await;
    assert_eq!(refused(&denied, RATE_LIMITED), 41);
    assert_eq!(world.upstream.hits(), 0);
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn http2_streams_share_a_connection_and_keep_their_trailers() {
    let mut world = World::with(strict(), development_service(Value::Null), GatewayPlan::upstream_http2).await;
    world.upstream.reply(Reply {
        trailers: vec![("x-checksum".into(), "1".into())],
        ..Reply::default()
    });
    let client = Http2::open(world.gateway.address()).await;
    let call = Call::post("/", "body").envelope(&limited(10)).trailer("x-end", "yes");
    let (first, second, third) = tokio::join!(client.call(&call), client.call(&call), client.call(&call));
    for answer in [first, second, third] {
        served(&answer);
        assert_eq!(answer.trailer("x-checksum"), Some("1"));
    }
    assert_eq!(world.upstream.last().trailers["x-end"], "yes");
    let mut statuses = Vec::new();
    for _ in 0..9 {
        statuses.push(client.call(&call).await.status);
    }
    assert_eq!(statuses, [200, 200, 200, 200, 200, 200, 200, 429, 429]);
    assert_eq!(world.upstream.hits(), 10);
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_streams_through_without_waiting() {
    let world = World::start(strict(), Value::Null).await;
    world.upstream.reply(Reply {
        stream: true,
        body: "first".into(),
        ..Reply::default()
    });
    let mut connection = Connection::open(world.gateway.address()).await;
    connection.send(&Call::get("/").envelope(&limited(1)).bytes()).await;
    assert_eq!(connection.answer_head().await, 200);
    assert_eq!(world.upstream.hits(), 1);
    world.upstream.release();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_upstream_frees_its_slot() {
    let service = portcullis_wasm_tests::Service::start(development_service(Value::Null)).await;
    let plan = GatewayPlan::new(strict(), portcullis_wasm_tests::closed_port()).decision(service.address);
    let mut gateway = plan.start().await;
    let call = Call::get("/").envelope(&Envelope::owner("o").concurrency("owner", 1));
    for _ in 0..3 {
        portcullis_wasm_tests::until("the slot", portcullis_wasm_tests::DEADLINE, async || {
            let answer = gateway.call(&call).await;
            let ours = answer.header("x-portcullis-class").is_some();
            (answer.status == 503 && !ours).then_some(())
        })
        .await;
    }
    gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_denial_shows_the_limit_that_the_service_named() {
    let limit = json!({"scope": "org", "resource": "requests", "limit": 30, "remaining": 0, "reset_ms": 41_000, "window_s": 60});
    let deny = Decision::Deny(json!({"code": "RATE_LIMITED", "gate": "contract", "limit": limit, "retry_after_s": 41}));
    let world = Scripted::start(strict(), deny).await;
    let denied = world.gateway.call(&Call::get("/").envelope(&limited(5))).await;
    assert_eq!(refused(&denied, RATE_LIMITED), 41);
    crate::expect::shows_limit(&denied, "requests", 30, 0);
    assert_eq!(denied.error()["scope"], "org");
    assert_eq!(world.upstream.hits(), 0);
    let (_, line) = world
        .gateway
        .await_log("of the denial", |line| line["class"] == "quota_exhausted")
        .await;
    assert_eq!(
        (&line["code"], &line["gate"]),
        (&json!("RATE_LIMITED"), &json!("contract"))
    );
}

#[test]
fn the_module_is_under_500_kilobytes() {
    let module = filter_module();
    let bytes = module.metadata().expect("the module can be read").len();
    assert!(bytes < 500_000, "{} has {bytes} bytes", module.display());
}
