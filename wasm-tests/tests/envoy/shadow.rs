//! Shadow mode decides, charges, counts and logs, and never rejects.

use portcullis_wasm_tests::{Call, Decision, Envelope, development_service};
use serde_json::{Value, json};

use crate::expect::{RATE_LIMITED, refused, served};
use crate::world::{Scripted, World, burst, strict};

#[tokio::test(flavor = "multi_thread")]
async fn over_the_limit_all_pass_and_the_excess_is_counted() {
    let world = World::with("contract-limits", development_service(Value::Null), |plan| {
        plan.plugin(json!({"mode": "shadow"}))
    })
    .await;
    let call = Call::get("/").envelope(&Envelope::owner("o").requests("owner", 30));
    burst(world.gateway.address(), &call, 35).await.iter().for_each(served);
    assert_eq!(world.upstream.hits(), 35);
    world
        .gateway
        .await_metric("portcullis_shadow_rejected_quota_exhausted", 5)
        .await;
    world.gateway.await_metric("portcullis_shadow_requests", 35).await;
    world
        .gateway
        .await_metric("portcullis_enforcing_contract-limits", 0)
        .await;
    assert_eq!(world.gateway.counter("portcullis_rejected_quota_exhausted").await, 0);
    world
        .gateway
        .await_log("of a shadow rejection", |line| line["class"] == "quota_exhausted")
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_shadow_admits_is_charged() {
    let world = World::with("contract-limits", development_service(Value::Null), |plan| {
        plan.listener("shadow", "contract-limits")
            .plugin(json!({"mode": "shadow"}))
    })
    .await;
    let call = Call::get("/").envelope(&Envelope::owner("o").requests("owner", 3));
    for _ in 0..3 {
        served(&world.gateway.call_on("shadow", &call).await);
    }
    refused(&world.gateway.call(&call).await, RATE_LIMITED);
    assert_eq!(world.upstream.hits(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_class_of_failure_is_a_rejection() {
    let mut world = Scripted::with(strict(), Decision::Status(500), |plan| {
        plan.plugin(json!({"mode": "shadow"}))
    })
    .await;
    served(&world.gateway.call(&Call::get("/")).await);
    let owner = || Call::get("/").header("x-admission-owner-id", "o");
    served(
        &world
            .gateway
            .call(&owner().header("x-admission-owner-rate-limit-requests", "+5"))
            .await,
    );
    served(
        &world
            .gateway
            .call(&Call::get("/").header("x-admission-org-rate-limit-requests", "5"))
            .await,
    );
    served(
        &world
            .gateway
            .call(&owner().header("x-admission-owner-rate-limit-requests", "5"))
            .await,
    );
    assert_eq!(world.upstream.hits(), 4);
    world
        .gateway
        .await_metric("portcullis_shadow_rejected_envelope_missing", 1)
        .await;
    world
        .gateway
        .await_metric("portcullis_shadow_rejected_envelope_malformed", 2)
        .await;
    world
        .gateway
        .await_metric("portcullis_shadow_rejected_decision_unavailable", 1)
        .await;
    for class in ["envelope_missing", "envelope_malformed", "decision_unavailable"] {
        assert_eq!(world.gateway.counter(&format!("portcullis_rejected_{class}")).await, 0);
    }
    world.gateway.assert_sound();
}
