//! `portcullis drill` is red for every way in which a gateway can look well and not enforce: shadow mode, no store, no filter, a
//! route that is not guarded.

use portcullis_wasm_tests::{GatewayPlan, Service, closed_port};
use serde_json::json;

use crate::drill_world::{BY_UPSTREAM, Drill, Staging, filter, upstream};

#[tokio::test(flavor = "multi_thread")]
async fn the_drill_is_red_where_the_gateway_is_in_shadow_mode() {
    let told = filter("contract-limits", json!({}));
    let shadow = filter("contract-limits", json!({"mode": "shadow"}));
    let staging = Staging::start(&shadow).await;
    let outcome = staging.drill(&told).run().await;
    outcome.is_red();
    let reasons = outcome.reasons("a limit of 0 requests");
    assert!(reasons.contains("status 200, not 429"), "{reasons}");
    assert!(reasons.contains("the upstream saw 1 requests, not 0"), "{reasons}");
    assert_eq!(outcome.row("an envelope with all it needs")["green"], true);
    // Also if the drill is told of the mode: nothing is refused, and that is not what a gateway is for.
    let outcome = staging.drill(&shadow).run().await;
    outcome.is_red();
    let reasons = outcome.reasons("a limit of 0 requests");
    assert!(reasons.contains("shadow mode: nothing is refused"), "{reasons}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_drill_is_red_where_the_store_is_missing() {
    let service = Service::start(json!({"profile": "development", "limiter": null})).await;
    let upstream = upstream().await;
    let filter = filter("contract-limits", json!({"profile": "development"}));
    let plan = GatewayPlan::new("contract-limits", upstream.address)
        .decision(service.address)
        .plugin(filter.clone());
    let gateway = plan.start().await;
    let mut drill = Drill::of(gateway.address(), &filter);
    drill.say("--upstream-header", BY_UPSTREAM);
    let outcome = drill.run().await;
    outcome.is_red();
    let reasons = outcome.reasons("the second request under a limit of 1");
    assert!(reasons.contains("status 200, not 429"), "{reasons}");
    assert_eq!(
        outcome.row("a limit of 0 requests")["green"],
        true,
        "known without a store"
    );

    // And where it is configured and gone, under rules that open that.
    let service = Service::start(json!({
        "profile": "development", "limiter": {"url": format!("redis://{}", closed_port())}
    }))
    .await;
    let plan = GatewayPlan::new("contract-limits", upstream.address)
        .decision(service.address)
        .plugin(filter.clone());
    let gateway = plan.start().await;
    let outcome = Drill::of(gateway.address(), &filter).run().await;
    outcome.is_red();
    outcome.reasons("the second request under a limit of 1");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_drill_is_red_where_the_filter_is_not_in_the_chain() {
    let filter = filter("fail-closed", json!({}));
    let staging = Staging::with(&filter, GatewayPlan::without_filter).await;
    let outcome = staging.drill(&filter).run().await;
    outcome.is_red();
    for probe in [
        "no envelope",
        "a model that is not allowed",
        "a limit of 0 requests",
        "decision does not answer",
    ] {
        let reasons = outcome.reasons(probe);
        assert!(reasons.contains("no header x-portcullis-class"), "{probe}: {reasons}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_drill_is_red_where_the_route_is_not_guarded() {
    let told = filter(
        "contract-limits",
        json!({"routes": [{"path_prefix": "/v1/", "methods": ["GET"]}]}),
    );
    let narrow = filter(
        "contract-limits",
        json!({"routes": [{"path_prefix": "/v2/", "methods": ["GET"]}]}),
    );
    let staging = Staging::start(&narrow).await;
    let outcome = staging.drill(&told).run().await;
    outcome.is_red();
    assert!(outcome.reasons("a limit of 0 requests").contains("status 200, not 429"));
    // Also if the drill is told so.
    let mut drill = staging.drill(&narrow);
    drill.say("--path", "/v1/models");
    let outcome = drill.run().await;
    outcome.is_red();
    let reasons = outcome.reasons("a limit of 0 requests");
    assert!(reasons.contains("no route guards GET /v1/models"), "{reasons}");
}
