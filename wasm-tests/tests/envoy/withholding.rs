//! `pause.withhold` in real Envoy: what a held request lacked is there when it arrives, exactly as without the filter.

use std::collections::BTreeMap;

use portcullis_wasm_tests::{Call, Decision, Envelope, Gateway, GatewayPlan, Upstream};
use serde_json::json;

use crate::backed::patient;
use crate::expect::{DECISION_UNAVAILABLE, RATE_LIMITED, refused, served};
use crate::world::{Scripted, strict};

const WITHHELD: [&str; 4] = ["authorization", "cookie", "x-api-key", "x-raw"];

/// Lines that Envoy keeps in places of their own among those that it does not, some of them twice, in this order.
fn call() -> Call {
    Call::post("/v1/chat", "{}")
        .envelope(&Envelope::owner("o").requests("owner", 3))
        .header("x-first", "1")
        .header("authorization", "Bearer one")
        .header("X-Api-Key", "b")
        .header("cookie", "c=1")
        .header("x-api-key", "a")
        .header("cookie", "d=2")
        .header("x-raw", [0xC0, 0xA7, b' ', b'x'])
        .header("x-api-key", "")
        .header("x-last", "2")
}

/// The newest request's lines by name, each name's in their order, without those that differ from request to request.
fn arrived(upstream: &Upstream) -> BTreeMap<String, Vec<Vec<u8>>> {
    let mut by_name: BTreeMap<String, Vec<Vec<u8>>> = BTreeMap::new();
    for (name, value) in upstream.last().lines {
        by_name.entry(name).or_default().push(value);
    }
    by_name.retain(|name, _| name != "x-request-id" && !name.starts_with("x-admission-"));
    by_name
}

fn withholding(plan: GatewayPlan) -> GatewayPlan {
    plan.plugin(patient()).plugin(json!({"pause": {"withhold": WITHHELD}}))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_held_request_arrives_with_every_line_that_it_came_with() {
    let upstream = Upstream::start().await;
    let plain: Gateway = GatewayPlan::new("contract-limits", upstream.address)
        .without_filter()
        .start()
        .await;
    served(&plain.call(&call()).await);
    let expected = arrived(&upstream);
    assert!(
        expected["x-api-key"].len() > 1 && expected["x-raw"] == [b"\xC0\xA7 x"],
        "{expected:?}"
    );

    let mut world = Scripted::with(strict(), Decision::Admit, withholding).await;
    served(&world.gateway.call(&call()).await);
    assert_eq!((world.upstream.hits(), world.decision.decides().len()), (1, 1));
    assert_eq!(arrived(&world.upstream), expected);
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_the_rules_open_arrives_whole_and_one_that_is_refused_not_at_all() {
    let upstream = Upstream::start().await;
    let plain = GatewayPlan::new("contract-limits", upstream.address)
        .without_filter()
        .start()
        .await;
    served(&plain.call(&call()).await);
    let expected = arrived(&upstream);

    let mut open = Scripted::with("contract-limits", Decision::Status(500), withholding).await;
    served(&open.gateway.call(&call()).await);
    assert_eq!(arrived(&open.upstream), expected);
    open.gateway.assert_sound();

    let mut closed = Scripted::with(strict(), Decision::Status(500), withholding).await;
    refused(&closed.gateway.call(&call()).await, DECISION_UNAVAILABLE);
    closed.decision.behave(Decision::Deny(
        json!({"code": "RATE_LIMITED", "gate": "contract", "retry_after_s": 7}),
    ));
    refused(&closed.gateway.call(&call()).await, RATE_LIMITED);
    assert_eq!(closed.upstream.hits(), 0);
    closed.gateway.assert_sound();
}
