//! What the policy in PostgreSQL says is what holds at the gateway: a change takes effect within its staleness, what is
//! freshly known outlives every store, and what is not fresh is nothing.

use std::time::{Duration, Instant};

use portcullis_wasm_tests::{Answer, Call, DEADLINE, Envelope, Gateway, GatewayPlan, Service, Upstream, until};
use serde_json::{Value, json};

use crate::backed::{
    COST_CAP_EXCEEDED, MODEL_NOT_ALLOWED, ORG_SUSPENDED, POLICY_UNAVAILABLE, RUN_QUOTA_EXCEEDED, Watch, apply,
    over_redis, patient, runs,
};
use crate::expect::{Refusal, refused, served, summary};
use crate::postgres::Postgres;
use crate::stores::Store;
use crate::world::concurrent_burst;

/// So long that nothing goes stale during a test.
const NEVER_STALE_MS: u64 = 600_000;
/// Of the policy that is changed.
const STALENESS: Duration = Duration::from_secs(1);

fn policy() -> Value {
    json!({
        "providers": {"gpt-4o": "openai", "claude-*": "anthropic"},
        // Free, so that only these tests move what a month has cost.
        "prices": {"*": {"input": 0, "output": 0}},
        "plans": {"team": {"monthly_runs": 1_000, "monthly_cost": 1_000}},
        "orgs": {
            "good": {"status": "active", "plan": "team", "models": ["gpt-4o", "claude-*"]},
            "bad": {"status": "suspended", "plan": "team", "models": ["gpt-4o"]}
        }
    })
}

fn call(org: &str, model: &str) -> Call {
    Call::get("/v1/models").envelope(&Envelope::owner("o").org(org).with("model", model))
}

struct World {
    service: Service,
    gateway: Gateway,
    upstream: Upstream,
}

impl World {
    /// `ingress` has fail-closed-metered, `launch` has launch-gate; both with time for a cold pool of connections.
    async fn start(redis: &Store, postgres: &Postgres, max_staleness_ms: u64) -> Self {
        let mut config = over_redis(&redis.url());
        config["policy"] = json!({"url": postgres.url(), "max_staleness_ms": max_staleness_ms});
        config["metering"] = json!({"url": postgres.url()});
        config["limiter"]["key_prefix"] = json!(format!("stale-{max_staleness_ms}"));
        Self::with(config, patient()).await
    }

    async fn with(config: Value, filter: Value) -> Self {
        let service = Service::start(config).await;
        let upstream = Upstream::start().await;
        let plan = GatewayPlan::new("fail-closed-metered", upstream.address)
            .decision(service.address)
            .patient_connects()
            .workers(1)
            .plugin(filter.clone())
            .plugin(json!({"model": {"from": "header"}}))
            .listener("launch", "launch-gate")
            .plugin(filter);
        let gateway = plan.start().await;
        for store in ["limiter", "policy", "metering"] {
            service.await_state(store, "up").await;
        }
        Self {
            service,
            gateway,
            upstream,
        }
    }

    fn watch(&self) -> Watch<'_> {
        Watch {
            gateway: &self.gateway,
            upstream: &self.upstream,
        }
    }

    /// A refusal that nothing of reached the upstream.
    async fn refused(&self, listener: &str, call: &Call, refusal: Refusal) {
        let before = self.upstream.hits();
        refused(&self.gateway.call_on(listener, call).await, refusal);
        assert_eq!(self.upstream.hits(), before, "upstream hits");
    }

    /// Asks until the answer is this refusal.
    async fn becomes(&self, listener: &str, call: &Call, refusal: Refusal) {
        until(refusal.code, DEADLINE, async || {
            let answer = self.gateway.call_on(listener, call).await;
            (answer.code() == refusal.code).then_some(())
        })
        .await;
        self.refused(listener, call, refusal).await;
    }

    async fn becomes_served(&self, listener: &str, call: &Call) {
        until("it to be served", DEADLINE, async || {
            let answer = self.gateway.call_on(listener, call).await;
            (answer.status == 200).then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_denial_that_is_freshly_known_outlives_every_store_and_a_stale_one_is_an_outage() {
    let (mut redis, mut postgres) = tokio::join!(Store::redis(), Postgres::start());
    postgres.trust_everybody().await;
    apply(&postgres.url(), &policy());
    let (fresh, stale) = tokio::join!(
        World::start(&redis, &postgres, NEVER_STALE_MS),
        World::start(&redis, &postgres, 300)
    );
    let (bad, unlisted) = (call("bad", "gpt-4o"), call("good", "o1"));
    for world in [&fresh, &stale] {
        world.becomes_served("ingress", &call("good", "gpt-4o")).await;
        for listener in ["ingress", "launch"] {
            world.becomes(listener, &bad, ORG_SUSPENDED).await;
        }
        world.becomes("ingress", &unlisted, MODEL_NOT_ALLOWED).await;
    }
    redis.kill();
    postgres.kill();
    for store in ["limiter", "policy", "metering"] {
        fresh.service.await_state(store, "down").await;
    }
    let denied = fresh.gateway.counter("portcullis_rejected_policy_denied").await;
    for _ in 0..3 {
        fresh.refused("ingress", &bad, ORG_SUSPENDED).await;
        fresh.refused("launch", &bad, ORG_SUSPENDED).await;
        fresh.refused("ingress", &unlisted, MODEL_NOT_ALLOWED).await;
    }
    fresh
        .gateway
        .await_metric("portcullis_rejected_policy_denied", denied + 9)
        .await;
    assert_eq!(fresh.gateway.counter("portcullis_bypassed_policy_unavailable").await, 0);
    // It never was an outage of the policy to those; the same request of a good organization meets the others.
    let answer = fresh.gateway.call_on("launch", &call("good", "gpt-4o")).await;
    served(&answer);
    fresh
        .gateway
        .await_metric("portcullis_bypassed_metering_unavailable", 1)
        .await;

    // The staleness has passed long ago, as a store is down only after two pings.
    for _ in 0..3 {
        stale.watch().refused("ingress", &bad, POLICY_UNAVAILABLE).await;
        stale.watch().refused("ingress", &unlisted, POLICY_UNAVAILABLE).await;
        stale.watch().served("launch", &bad).await;
    }
}

/// Makes a change after the answers to `call` were cached. Once the staleness has passed, the very next request has to be
/// refused, and if requests go on coming meanwhile nothing but that refusal may be seen.
async fn takes_effect(world: &World, busy: bool, call: &Call, refusal: Refusal, change: impl FnOnce()) {
    world.becomes_served("ingress", call).await;
    change();
    let in_force = Instant::now() + STALENESS;
    while busy && Instant::now() < in_force {
        let answer = world.gateway.call(call).await;
        if answer.status != 200 {
            refused(&answer, refusal);
        }
    }
    tokio::time::sleep_until(in_force.into()).await;
    for _ in 0..3 {
        world.refused("ingress", call, refusal).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_model_a_suspended_org_and_a_lowered_cap_take_effect_within_the_staleness() {
    let (redis, postgres) = tokio::join!(Store::redis(), Postgres::start());
    postgres.trust_everybody().await;
    let url = postgres.url();
    apply(&url, &policy());
    let mut config = over_redis(&redis.url());
    // An outage here would only be the machine's.
    config["limiter"]["op_timeout_ms"] = json!(3_000);
    config["policy"] = json!({"url": url, "max_staleness_ms": 1_000});
    config["metering"] = json!({"url": url});
    let mut world = World::with(config, json!({"decision": {"timeout_ms": 9_000}})).await;
    let changed = |path: &str, value: Value| {
        let mut policy = policy();
        *policy.pointer_mut(path).expect("the policy has it") = value;
        policy
    };
    let (gpt, claude) = (call("good", "gpt-4o"), call("good", "claude-opus"));

    let revoked = changed("/orgs/good/models", json!(["gpt-4o"]));
    takes_effect(&world, false, &claude, MODEL_NOT_ALLOWED, || apply(&url, &revoked)).await;
    served(&world.gateway.call(&gpt).await);

    apply(&url, &policy());
    let suspended = changed("/orgs/good/status", json!("suspended"));
    takes_effect(&world, true, &claude, ORG_SUSPENDED, || apply(&url, &suspended)).await;
    world.becomes("launch", &gpt, ORG_SUSPENDED).await;

    apply(&url, &policy());
    postgres.run("UPDATE portcullis_months SET cost = 500").await;
    let capped = changed("/plans/team/monthly_cost", json!(400));
    takes_effect(&world, false, &gpt, COST_CAP_EXCEEDED, || apply(&url, &capped)).await;

    apply(&url, &policy());
    let fewer = changed("/plans/team/monthly_runs", json!(1));
    takes_effect(&world, false, &gpt, RUN_QUOTA_EXCEEDED, || apply(&url, &fewer)).await;

    // Undoing takes effect as well, and all along exactly what passed was billed.
    apply(&url, &policy());
    world.becomes_served("ingress", &gpt).await;
    assert_eq!(runs(&postgres).await, world.upstream.hits());
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_requests_at_once_against_ten_remaining_runs_admit_ten() {
    let (redis, postgres) = tokio::join!(Store::redis(), Postgres::start());
    postgres.trust_everybody().await;
    let mut few = policy();
    few["plans"]["team"]["monthly_runs"] = json!(12);
    apply(&postgres.url(), &few);
    let mut config = over_redis(&redis.url());
    config["limiter"]["op_timeout_ms"] = json!(4_000);
    config["policy"] = json!({"url": postgres.url(), "max_staleness_ms": NEVER_STALE_MS});
    config["metering"] = json!({"url": postgres.url()});
    let mut world = World::with(config, json!({"decision": {"timeout_ms": 9_500}})).await;
    let call = call("good", "gpt-4o");
    for _ in 0..2 {
        served(&world.gateway.call(&call).await);
    }
    let answers = concurrent_burst(world.gateway.address(), &call, 100, 1).await;
    let (passed, denied): (Vec<Answer>, Vec<Answer>) = answers.into_iter().partition(|answer| answer.status == 200);
    assert_eq!((passed.len(), denied.len()), (10, 90), "{:?}", summary(&denied));
    for answer in &denied {
        refused(answer, RUN_QUOTA_EXCEEDED);
    }
    assert_eq!(world.upstream.hits(), 12);
    assert_eq!(runs(&postgres).await, 12);
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bounded_choice_for_metering_closes_after_so_many_and_gives_back_what_the_contract_took() {
    let (redis, mut postgres) = tokio::join!(Store::redis(), Postgres::start());
    postgres.trust_everybody().await;
    let mut config = over_redis(&redis.url());
    config["metering"] = json!({"url": postgres.url()});
    let service = Service::start(config).await;
    service.await_state("metering", "up").await;
    let upstream = Upstream::start().await;
    let rules = json!({
        "name": "bounded",
        "envelope": {"when_missing": "reject"},
        "gates": [
            {"gate": "contract", "when_unavailable": "reject"},
            {"gate": "metering", "when_unavailable": {"admit": {"max_per_minute": 3}}}
        ],
        "decision": {"when_unavailable": "reject"}
    });
    let plan = GatewayPlan::new(rules, upstream.address).decision(service.address);
    let mut gateway = plan.plugin(patient()).start().await;
    let watch = Watch {
        gateway: &gateway,
        upstream: &upstream,
    };
    let call = Call::get("/").envelope(&Envelope::owner("o").org("g").requests("owner", 1_000));
    watch.served("ingress", &call).await;
    postgres.kill();
    let start = Instant::now();
    for _ in 0..3 {
        watch.served("ingress", &call).await;
    }
    for _ in 0..5 {
        watch
            .refused("ingress", &call, crate::backed::METERING_UNAVAILABLE)
            .await;
    }
    assert!(
        start.elapsed() < Duration::from_mins(1),
        "the minute is over: this shows nothing"
    );
    assert_eq!(upstream.hits(), 4);
    gateway
        .await_metric("portcullis_bypassed_metering_unavailable", 3)
        .await;
    gateway
        .await_metric("portcullis_rejected_metering_unavailable", 5)
        .await;
    until("what the closed ones took to be given back", DEADLINE, async || {
        (redis.number(&["GET", "portcullis:{owner:o}:requests:60"]).await == 4).then_some(())
    })
    .await;
    postgres.restart().await;
    crate::backed::billed(&postgres, &[&service], 4).await;
    gateway.assert_sound();
}
