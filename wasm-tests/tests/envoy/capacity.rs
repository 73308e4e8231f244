//! The operator's own tiers: they bind only where the rules list them, come before the contract, and count per id.

use portcullis_wasm_tests::{Call, DEADLINE, Envelope, Reply, until};
use serde_json::{Value, json};

use crate::expect::{CAPACITY_EXHAUSTED, ENVELOPE_PARTIAL, RATE_LIMITED, refused, served};
use crate::world::{World, burst};

fn call(envelope: &Envelope) -> Call {
    Call::get("/").envelope(envelope)
}

#[tokio::test(flavor = "multi_thread")]
async fn exhausted_by_the_same_request_capacity_is_the_answer() {
    let world = World::start("operator-admission", json!({"platform": {"requests": 3}})).await;
    let answers = burst(
        world.gateway.address(),
        &call(&Envelope::owner("o").requests("owner", 3)),
        5,
    )
    .await;
    answers[..3].iter().for_each(served);
    answers[3..].iter().for_each(|answer| {
        refused(answer, CAPACITY_EXHAUSTED);
    });
    assert_eq!(world.upstream.hits(), 3);
    world
        .gateway
        .await_metric("portcullis_rejected_capacity_exhausted", 2)
        .await;
    assert_eq!(world.gateway.counter("portcullis_rejected_quota_exhausted").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_capacity_denial_charges_no_contract() {
    let world = World::start("operator-admission", json!({"graph": {"requests": 2}})).await;
    let on = |graph: &str| call(&Envelope::owner("o").requests("owner", 5).with("graph-id", graph));
    let first = burst(world.gateway.address(), &on("first"), 5).await;
    first[..2].iter().for_each(served);
    first[2..].iter().for_each(|answer| {
        refused(answer, CAPACITY_EXHAUSTED);
    });
    burst(world.gateway.address(), &on("second"), 2)
        .await
        .iter()
        .for_each(served);
    served(&world.gateway.call(&on("third")).await);
    refused(&world.gateway.call(&on("third")).await, RATE_LIMITED);
    assert_eq!(world.upstream.hits(), 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_contract_denial_charges_no_tier() {
    let world = World::start("operator-admission", json!({"platform": {"requests": 5}})).await;
    let of = |owner: &str, limit: u64| call(&Envelope::owner(owner).requests("owner", limit));
    let denied = burst(world.gateway.address(), &of("small", 1), 10).await;
    served(&denied[0]);
    denied[1..].iter().for_each(|answer| {
        refused(answer, RATE_LIMITED);
    });
    let other = burst(world.gateway.address(), &of("large", 100), 5).await;
    other[..4].iter().for_each(served);
    refused(&other[4], CAPACITY_EXHAUSTED);
    assert_eq!(world.upstream.hits(), 5);
}

/// Each of the distinct envelopes gets two requests of its own.
async fn two_each(capacity: Value, envelopes: &[Envelope]) {
    let world = World::start("operator-admission", capacity).await;
    for envelope in envelopes {
        let answers = burst(world.gateway.address(), &call(envelope), 3).await;
        answers[..2].iter().for_each(served);
        refused(&answers[2], CAPACITY_EXHAUSTED);
    }
    assert_eq!(world.upstream.hits(), envelopes.len() * 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_organization_tier_counts_per_org() {
    let of = |org: &str| Envelope::owner("o").org(org);
    two_each(json!({"organization": {"requests": 2}}), &[of("g"), of("h")]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_organization_model_tier_counts_per_org_and_model() {
    let of = |org: &str, model: &str| Envelope::owner("o").org(org).with("model", model);
    let capacity = json!({"organization_model": {"requests": 2}});
    let world = World::with(
        "operator-admission",
        portcullis_wasm_tests::development_service(capacity),
        |plan| plan.plugin(json!({"model": {"from": "header"}})),
    )
    .await;
    for envelope in [of("g", "m"), of("g", "n"), of("h", "m"), of("g:m", "n"), of("g", "m:n")] {
        let answers = burst(world.gateway.address(), &call(&envelope), 3).await;
        answers[..2].iter().for_each(served);
        refused(&answers[2], CAPACITY_EXHAUSTED);
    }
    assert_eq!(world.upstream.hits(), 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_graph_tier_counts_per_graph() {
    let of = |graph: &str| Envelope::owner("o").with("graph-id", graph);
    two_each(json!({"graph": {"requests": 2}}), &[of("g"), of("h")]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tier_of_tokens_counts_what_requests_reserve() {
    two_each(json!({"platform": {"tokens": 2048}}), &[Envelope::owner("o")]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lane_binds_only_when_it_is_configured_and_named() {
    let world = World::start("operator-admission", json!({"lanes": {"batch": {"requests": 2}}})).await;
    let batch = burst(
        world.gateway.address(),
        &call(&Envelope::owner("o").with("lane", "batch")),
        3,
    )
    .await;
    batch[..2].iter().for_each(served);
    refused(&batch[2], CAPACITY_EXHAUSTED);
    burst(
        world.gateway.address(),
        &call(&Envelope::owner("o").with("lane", "other")),
        5,
    )
    .await
    .iter()
    .for_each(served);
    burst(world.gateway.address(), &call(&Envelope::owner("o")), 5)
        .await
        .iter()
        .for_each(served);
    assert_eq!(world.upstream.hits(), 12);
}

#[tokio::test(flavor = "multi_thread")]
async fn tiers_do_not_bind_where_the_rules_do_not_list_them() {
    let world = World::start("contract-limits", json!({"platform": {"requests": 1}})).await;
    let answers = burst(
        world.gateway.address(),
        &call(&Envelope::owner("o").requests("owner", 4)),
        5,
    )
    .await;
    answers[..4].iter().for_each(served);
    refused(&answers[4], RATE_LIMITED);
    assert_eq!(world.upstream.hits(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tier_of_slots_is_freed_when_the_answer_ends() {
    let world = World::start("operator-admission", json!({"platform": {"concurrency": 1}})).await;
    world.upstream.reply(Reply {
        stream: true,
        ..Reply::default()
    });
    let request = call(&Envelope::owner("o"));
    let address = world.gateway.address();
    let held = tokio::spawn({
        let request = request.clone();
        async move { burst(address, &request, 1).await }
    });
    world.upstream.await_hits(1).await;
    refused(&world.gateway.call(&request).await, CAPACITY_EXHAUSTED);
    assert_eq!(world.upstream.hits(), 1);
    world.upstream.release();
    served(&held.await.unwrap()[0]);
    until("the slot to be free", DEADLINE, async || {
        (world.gateway.call(&request).await.status == 200).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_organization_tier_needs_the_org_id() {
    let world = World::start("operator-admission", json!({"organization": {"requests": 2}})).await;
    refused(
        &world.gateway.call(&call(&Envelope::owner("o"))).await,
        ENVELOPE_PARTIAL,
    );
    assert_eq!(world.upstream.hits(), 0);
}
