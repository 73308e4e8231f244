//! Whatever leaves a limit unchecked is visible: an ERROR or WARN line and an enforcing gauge at 0.

use portcullis_wasm_tests::{Call, Decision, Envelope};
use serde_json::{Value, json};

use crate::expect::{RATE_LIMITED, refused, served};
use crate::world::{Scripted, World, burst};

fn limited(limit: u64) -> Call {
    Call::get("/").envelope(&Envelope::owner("o").requests("owner", limit))
}

fn level_of(line: &Value) -> String {
    line["level"].as_str().unwrap_or_default().to_ascii_uppercase()
}

#[tokio::test(flavor = "multi_thread")]
async fn with_no_limiter_in_development_all_pass_and_it_shows() {
    for (rules, gauge) in [
        ("contract-limits", "portcullis_enforcing_contract-limits"),
        ("operator-admission", "portcullis_enforcing_operator-admission"),
    ] {
        let world = World::with(rules, json!({"profile": "development"}), |plan| plan).await;
        burst(world.gateway.address(), &limited(3), 5)
            .await
            .iter()
            .for_each(served);
        assert_eq!(world.upstream.hits(), 5);
        world.gateway.await_metric(gauge, 0).await;
        assert_eq!(world.service.get("/ready").await.status, 503);
        assert_eq!(world.service.get("/live").await.status, 200);
        let told = world.service.log_lines().iter().any(|line| {
            level_of(line) == "ERROR"
                && line
                    .to_string()
                    .to_lowercase()
                    .contains("contract limits are not enforced")
        });
        assert!(told, "{}", world.service.log());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_limiter_in_memory_the_gauge_is_up_and_ready_still_says_no() {
    let world = World::start("contract-limits", Value::Null).await;
    served(&world.gateway.call(&limited(3)).await);
    assert_eq!(
        world.gateway.metric("portcullis_enforcing_contract-limits").await,
        Some(1)
    );
    // Only a shared limiter makes a service ready.
    assert_eq!(world.service.get("/ready").await.status, 503);
    assert!(
        !world.service.log().to_lowercase().contains("not enforced"),
        "{}",
        world.service.log()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stamped_limit_that_no_gate_checks_is_told() {
    let rules = json!({
        "name": "tiers-only",
        "envelope": {"when_missing": "reject"},
        "gates": [{"gate": "capacity", "when_unavailable": "reject"}],
        "decision": {"when_unavailable": "reject"}
    });
    let world = World::start(rules, json!({})).await;
    served(
        &world
            .gateway
            .call(&Call::get("/").envelope(&Envelope::owner("o")))
            .await,
    );
    assert_eq!(
        world.gateway.metric("portcullis_enforcing_tiers-only").await,
        Some(1),
        "no limit, none unchecked"
    );
    burst(world.gateway.address(), &limited(1), 3)
        .await
        .iter()
        .for_each(served);
    assert_eq!(world.upstream.hits(), 4);
    world.gateway.await_metric("portcullis_enforcing_tiers-only", 0).await;
    let about = |line: &Value| line.to_string().to_lowercase().contains("limit") && line["event"] != "start";
    let (level, _) = world.gateway.await_log("of the unchecked limit", about).await;
    assert_eq!(level, "warning");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_verdict_marked_unenforced_or_bypassed_lowers_the_gauge() {
    for fields in [
        json!({"verdict": "admit", "unenforced": true}),
        json!({"verdict": "admit", "bypassed": [{"class": "limiter_unavailable", "gate": "contract"}]}),
    ] {
        let bypassed = fields["bypassed"].is_array();
        let world = Scripted::start("contract-limits", Decision::Admit).await;
        served(&world.gateway.call(&limited(3)).await);
        world
            .gateway
            .await_metric("portcullis_enforcing_contract-limits", 1)
            .await;
        world.decision.behave(Decision::Verdict(fields));
        served(&world.gateway.call(&limited(3)).await);
        world
            .gateway
            .await_metric("portcullis_enforcing_contract-limits", 0)
            .await;
        if bypassed {
            world
                .gateway
                .await_metric("portcullis_bypassed_limiter_unavailable", 1)
                .await;
            let open = |line: &Value| {
                line["message"]
                    .as_str()
                    .is_some_and(|text| text.contains("fail-open, contract unchecked"))
            };
            let (level, line) = world.gateway.await_log("fail-open, contract unchecked", open).await;
            assert_eq!(
                (level.as_str(), &line["class"]),
                ("warning", &json!("limiter_unavailable"))
            );
            assert_eq!(line["gate"], "contract");
        }
        assert_eq!(world.upstream.hits(), 2);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_configurations_in_one_envoy_have_a_gauge_each() {
    let shadowed = json!({
        "name": "tried-out",
        "envelope": {"when_missing": "admit"},
        "gates": [{"gate": "contract", "when_unavailable": "admit"}],
        "decision": {"when_unavailable": "admit"}
    });
    let world = World::with(
        "contract-limits",
        portcullis_wasm_tests::development_service(Value::Null),
        |plan| plan.listener("shadow", shadowed).plugin(json!({"mode": "shadow"})),
    )
    .await;
    served(&world.gateway.call(&limited(1)).await);
    refused(&world.gateway.call(&limited(1)).await, RATE_LIMITED);
    let other = Call::get("/").envelope(&Envelope::owner("other").requests("owner", 1));
    for _ in 0..3 {
        served(&world.gateway.call_on("shadow", &other).await);
    }
    assert_eq!(world.upstream.hits(), 4);
    world
        .gateway
        .await_metric("portcullis_enforcing_contract-limits", 1)
        .await;
    world.gateway.await_metric("portcullis_enforcing_tried-out", 0).await;
    world
        .gateway
        .await_metric("portcullis_shadow_rejected_quota_exhausted", 2)
        .await;
    world
        .gateway
        .await_metric("portcullis_rejected_quota_exhausted", 1)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_start_is_told_with_rules_mode_and_profile() {
    let world = Scripted::start("contract-limits", Decision::Admit).await;
    let (_, line) = world
        .gateway
        .await_log("of the start", |line| {
            let text = line.to_string();
            ["contract-limits", "enforce", "development"]
                .iter()
                .all(|word| text.contains(word))
        })
        .await;
    assert!(line["event"].is_string() && line["message"].is_string(), "{line}");
}
