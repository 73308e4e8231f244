//! Envoy's own `ext_authz` in the filter's place, as `examples/envoy/ext_authz.yaml` sets it up, before the real service: what
//! a client sees is what the filter would have said, as far as Envoy passes it on.

use portcullis_wasm_tests::{
    Answer, Call, Envelope, Gateway, GatewayPlan, Http2, Service, Upstream, closed_port, development_service,
};
use serde_json::{Value, json};

use crate::backed::{over_redis, patient};
use crate::expect::{DECISION_UNAVAILABLE, RATE_LIMITED, refused, served, shows_limit};
use crate::world::{burst, strict};

struct Native {
    gateway: Gateway,
    service: Service,
    upstream: Upstream,
}

/// `service`, answering `ext_authz` by `rules`.
async fn native(rules: Value, mut service: Value) -> Native {
    service["ext_authz"] = json!({
        "rules": rules, "decision": patient()["decision"], "reply": {"limit_headers": "always"}
    });
    let (upstream, service) = (Upstream::start().await, Service::start(service).await);
    let server = json!({"http_service": {"server_uri": {"timeout": "3s"}}});
    let plan = GatewayPlan::new("contract-limits", upstream.address).decision(service.address);
    let plan = plan.ext_authz(server).patient_connects().upstream_http2();
    Native {
        gateway: plan.start().await,
        service,
        upstream,
    }
}

fn limited(owner: &str, limit: u64) -> Call {
    Call::post("/v1/chat/completions?a=b", "hello").envelope(&Envelope::owner(owner).requests("owner", limit))
}

/// What a refusal says, without what differs from one request to the next.
fn said(answer: &Answer) -> (u16, Value, Vec<Option<String>>) {
    let mut error = answer.error();
    error["request_id"] = Value::Null;
    error["retry_after"] = Value::Null;
    let names = [
        "content-type",
        "x-portcullis-class",
        "x-should-retry",
        "ratelimit-policy",
        "x-ratelimit-limit-requests",
        "x-ratelimit-remaining-requests",
    ];
    let headers = names.map(|name| answer.header(name).map(str::to_owned));
    (answer.status, error, headers.into())
}

#[tokio::test(flavor = "multi_thread")]
async fn thirty_of_thirty_five_pass_and_the_others_are_refused_as_by_the_filter() {
    let native = native(strict(), development_service(Value::Null)).await;
    let answers = burst(native.gateway.address(), &limited("o", 30), 35).await;
    let (passed, denied) = answers.split_at(30);
    for (at, answer) in (1..).zip(passed) {
        served(answer);
        shows_limit(answer, "requests", 30, 30 - at);
    }
    for answer in denied {
        refused(answer, RATE_LIMITED);
        shows_limit(answer, "requests", 30, 0);
    }
    assert_eq!(native.upstream.hits(), 30);
    let seen = native.upstream.last();
    assert_eq!(
        (seen.path.as_str(), seen.body.as_slice()),
        ("/v1/chat/completions?a=b", &b"hello"[..])
    );
    let envelope: Vec<_> = seen
        .headers
        .keys()
        .filter(|name| name.as_str().starts_with("x-admission-"))
        .collect();
    assert!(envelope.is_empty(), "the upstream sees the envelope: {envelope:?}");

    // The filter, before the same service: the same counters, and the same words.
    let plan = GatewayPlan::new(strict(), native.upstream.address).decision(native.service.address);
    let filter = plan.plugin(patient()).patient_connects().upstream_http2().start().await;
    for call in [limited("o", 30), limited("blocked", 0)] {
        let by_filter = filter.call(&call).await;
        assert_eq!(said(&native.gateway.call(&call).await), said(&by_filter));
    }
    assert_eq!(native.upstream.hits(), 30);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_of_the_service_is_a_503_and_nothing_goes_up() {
    let mut native = native(strict(), development_service(Value::Null)).await;
    served(&native.gateway.call(&limited("o", 30)).await);
    native.service.kill();
    for _ in 0..3 {
        refused(&native.gateway.call(&limited("o", 30)).await, DECISION_UNAVAILABLE);
    }
    assert_eq!(native.upstream.hits(), 1);
    native.service.restart().await;
    served(&native.gateway.call(&limited("o", 30)).await);
    native.service.freeze();
    refused(&native.gateway.call(&limited("o", 30)).await, DECISION_UNAVAILABLE);
    native.service.thaw();
    assert_eq!(native.upstream.hits(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_of_the_limiter_is_answered_by_the_rules() {
    let nowhere = over_redis(&format!("redis://{}", closed_port()));
    let closed = native(strict(), nowhere.clone()).await;
    refused(&closed.gateway.call(&limited("o", 30)).await, DECISION_UNAVAILABLE);
    assert_eq!(closed.upstream.hits(), 0);
    let told = |line: &Value| line["class"] == "limiter_unavailable" && line["action"] == "reject";
    closed.service.await_log("of what Envoy does not pass on", told).await;
    let open = native(json!("contract-limits"), nowhere).await;
    served(&open.gateway.call(&limited("o", 30)).await);
    assert_eq!(open.upstream.hits(), 1);
    let bypassed = open
        .service
        .metric(r#"portcullis_ext_authz_total{outcome="bypassed_limiter_unavailable"}"#)
        .await;
    assert!((bypassed - 1.0).abs() < 0.1, "{bypassed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_grpc_call_gets_the_status_that_the_filter_gives() {
    let native = native(strict(), development_service(Value::Null)).await;
    let client = Http2::open(native.gateway.address()).await;
    let call = Call::post("/service.Name/Method", b"\0\0\0\0\0".to_vec())
        .header("content-type", "application/grpc+proto")
        .header("te", "trailers")
        .envelope(&Envelope::owner("o").requests("owner", 0));
    let answer = client.call(&call).await;
    let field = |name: &str| answer.header(name).or_else(|| answer.trailer(name)).map(str::to_owned);
    assert_eq!(
        (
            answer.status,
            field("grpc-status").as_deref(),
            field("grpc-message").as_deref()
        ),
        (200, Some("8"), Some("shared inference rate limit exceeded")),
        "{answer:?}"
    );
    assert_eq!(field("x-portcullis-class").as_deref(), Some("quota_exhausted"));
    assert_eq!(native.upstream.hits(), 0);
}
