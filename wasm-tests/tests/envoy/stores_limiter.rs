//! Redis fails behind the service behind Envoy. The rules choose differently for the limiter and for the service, in both
//! directions, so an answer tells which of the two was blamed: a slow or dead store follows `limiter`, a dead service
//! follows `decision`.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use portcullis_wasm_tests::{Call, DEADLINE, Envelope, Gateway, GatewayPlan, Service, Upstream, until};
use serde_json::json;

use crate::backed::{LIMITER_UNAVAILABLE, Watch, all_told, contract_rules, over_redis, patient};
use crate::expect::{DECISION_UNAVAILABLE, RATE_LIMITED, refused, served};
use crate::proxy::Proxy;
use crate::stores::Store;
use crate::world::burst;

/// In how long a store that is back has to be noticed, on any machine.
const RECOVERY: Duration = Duration::from_secs(8);
/// A limit that no test reaches: every denial would be wrong.
const OUT_OF_REACH: u64 = 1_000_000;

fn limited() -> Call {
    Call::get("/v1/models").envelope(&Envelope::owner("o").requests("owner", OUT_OF_REACH))
}

/// `closed` rejects without the limiter and admits without the service; `open` the other way round.
struct World {
    redis: Store,
    late: Proxy,
    service: Service,
    upstream: Upstream,
    gateway: Gateway,
}

impl World {
    async fn start() -> Self {
        let redis = Store::redis().await;
        let late = Proxy::start(redis.port, "no mark".to_owned()).await;
        let service = Service::start(over_redis(&late.url())).await;
        service.await_state("limiter", "up").await;
        let upstream = Upstream::start().await;
        // One worker, so that both listeners share a VM, its gauges and its breaker.
        let plan = GatewayPlan::new(contract_rules("closed", json!("reject"), "admit"), upstream.address)
            .decision(service.address)
            .workers(1)
            .plugin(patient())
            .listener("open", contract_rules("open", json!("admit"), "reject"))
            .plugin(patient());
        let gateway = plan.start().await;
        let world = Self {
            redis,
            late,
            service,
            upstream,
            gateway,
        };
        world.counts_again().await;
        world
    }

    fn watch(&self) -> Watch<'_> {
        Watch {
            gateway: &self.gateway,
            upstream: &self.upstream,
        }
    }

    async fn counter(&self, name: &str) -> i64 {
        self.gateway.counter(name).await
    }

    /// Waits until a request is counted, whatever may be said about the limiter until then.
    async fn counts_again(&self) {
        let start = Instant::now();
        until("counting", DEADLINE * 2, async || {
            let (answer, hits) = self.watch().call("ingress", &limited()).await;
            assert_eq!(hits, usize::from(answer.status == 200));
            (answer.status == 200).then_some(())
        })
        .await;
        assert!(start.elapsed() < RECOVERY, "recovered after {:?}", start.elapsed());
    }

    /// Five requests to each listener while the store is out: all follow `limiter`, and all that is to be seen says so.
    async fn follows_limiter(&self, kind: &str) {
        until("the outage to show", DEADLINE, async || {
            let (answer, _) = self.watch().call("ingress", &limited()).await;
            (answer.status == 503).then_some(())
        })
        .await;
        let names = [
            "portcullis_rejected_limiter_unavailable",
            "portcullis_bypassed_limiter_unavailable",
        ];
        let before = (self.counter(names[0]).await, self.counter(names[1]).await);
        for _ in 0..5 {
            self.watch().refused("ingress", &limited(), LIMITER_UNAVAILABLE).await;
            self.watch().served("open", &limited()).await;
            assert_eq!(self.service.get("/live").await.status, 200);
        }
        self.gateway.await_metric(names[0], before.0 + 5).await;
        self.gateway.await_metric(names[1], before.1 + 5).await;
        self.gateway.await_metric("portcullis_enforcing_open", 0).await;
        self.gateway.await_metric("portcullis_enforcing_closed", 1).await;
        for name in [
            "portcullis_rejected_decision_unavailable",
            "portcullis_bypassed_decision_unavailable",
        ] {
            assert_eq!(self.counter(name).await, 0, "the service was blamed for its store");
        }
        assert_eq!(self.counter("portcullis_rejected_quota_exhausted").await, 0);
        self.says_so(kind).await;
    }

    async fn says_so(&self, kind: &str) {
        let opened = |line: &serde_json::Value| {
            line["event"] == "bypassed"
                && line["class"] == "limiter_unavailable"
                && line["message"] == "fail-open, contract unchecked"
                && line["action"] == "admit"
        };
        let (level, _) = self.gateway.await_log("a bypass", opened).await;
        assert_eq!(level, "warning");
        let line = self.service.await_log("a bypass", opened).await;
        assert_eq!((&line["level"], &line["gate"]), (&json!("WARN"), &json!("contract")));
        let closed =
            |line: &serde_json::Value| line["event"] == "unavailable" && line["class"] == "limiter_unavailable";
        let line = self.service.await_log("a refusal", closed).await;
        assert_eq!(
            (&line["code"], &line["action"]),
            (&json!("SERVICE_DEGRADED"), &json!("reject"))
        );
        let error = |line: &serde_json::Value| {
            line["event"] == "dependency_error" && line["dependency"] == "limiter" && line["kind"] == kind
        };
        self.service.await_log(kind, error).await;
        let metric = |name: String| async move { self.service.metric(&name).await };
        let errors = format!("portcullis_dependency_errors_total{{dependency=\"limiter\",kind=\"{kind}\"}}");
        assert!(metric(errors).await > 0.0);
        let bypassed = "portcullis_bypassed_total{class=\"limiter_unavailable\",gate=\"contract\"}";
        assert!(metric(bypassed.to_owned()).await >= 5.0);
        self.service.await_state("limiter", "down").await;
        assert_eq!(self.service.get("/ready").await.status, 503);
        assert!(metric("portcullis_dependency_up{dependency=\"limiter\"}".to_owned()).await == 0.0);
    }

    /// The store is back: requests are counted, limits deny, and the service is ready, all by itself.
    async fn recovers(&mut self, owner: &str) {
        self.counts_again().await;
        let once = Call::get("/").envelope(&Envelope::owner(owner).requests("owner", 1));
        // The service's other connection may still be away.
        until("a denial by the store", DEADLINE, async || {
            let answer = self.gateway.call(&once).await;
            assert_ne!(answer.status, 500);
            (answer.status == 429).then(|| refused(&answer, RATE_LIMITED))
        })
        .await;
        assert_eq!(
            self.redis
                .number(&["GET", &format!("portcullis:{{owner:{owner}}}:requests:60")])
                .await,
            1
        );
        self.service.await_state("limiter", "up").await;
        assert_eq!(self.service.get("/live").await.status, 200);
        self.gateway.assert_sound();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_redis_follows_limiter_and_counts_again_when_it_is_back() {
    let mut world = World::start().await;
    world.redis.kill();
    world.follows_limiter("connection").await;
    world.redis.restart().await;
    world.recovers("after").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_redis_follows_limiter_and_what_it_charged_too_late_is_given_back() {
    let mut world = World::start().await;
    world.redis.freeze();
    world.follows_limiter("timeout").await;
    world.redis.thaw();
    world.recovers("after").await;
    // Whatever lay in its socket has been charged and cancelled: only requests that were admitted by right are counted.
    until("the count of admissions by right", DEADLINE, async || {
        let bypassed = world.counter("portcullis_bypassed_limiter_unavailable").await;
        let by_right = i64::try_from(world.upstream.hits()).unwrap() - bypassed - 1;
        let counted = world.redis.number(&["GET", "portcullis:{owner:o}:requests:60"]).await;
        (counted == by_right).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redis_that_is_a_minute_late_follows_limiter_and_counts_again_when_it_is_on_time() {
    let mut world = World::start().await;
    world.late.mood.delay_ms.store(60_000, Ordering::SeqCst);
    world.follows_limiter("timeout").await;
    world.late.mood.delay_ms.store(0, Ordering::SeqCst);
    world.recovers("after").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_or_frozen_service_follows_decision_where_its_store_would_have_been_decided_otherwise() {
    let mut world = World::start().await;
    let names = [
        "portcullis_bypassed_decision_unavailable",
        "portcullis_rejected_decision_unavailable",
    ];
    for frozen in [false, true] {
        if frozen {
            world.service.freeze();
        } else {
            world.service.kill();
        }
        let before = (world.counter(names[0]).await, world.counter(names[1]).await);
        for _ in 0..2 {
            world.watch().served("ingress", &limited()).await;
            world.watch().refused("open", &limited(), DECISION_UNAVAILABLE).await;
        }
        world.gateway.await_metric(names[0], before.0 + 2).await;
        world.gateway.await_metric(names[1], before.1 + 2).await;
        world.gateway.await_metric("portcullis_enforcing_closed", 0).await;
        if frozen {
            world.service.thaw();
        } else {
            world.service.restart().await;
        }
        until("the gateway to ask again", DEADLINE, async || {
            let (answer, _) = world.watch().call("open", &limited()).await;
            (answer.status == 200).then_some(())
        })
        .await;
    }
    for name in [
        "portcullis_bypassed_limiter_unavailable",
        "portcullis_rejected_limiter_unavailable",
    ] {
        assert_eq!(world.counter(name).await, 0, "the store was blamed for its service");
    }
    world.recovers("after").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flapping_redis_is_never_a_denial_nor_an_error_and_every_answer_is_by_the_rules() {
    let mut world = World::start().await;
    let mut seen = [0_usize; 2];
    for round in 0..6_u64 {
        let end = Instant::now() + Duration::from_millis(60 * (round + 1));
        while Instant::now() < end {
            let (closed, hits) = world.watch().call("ingress", &limited()).await;
            match closed.status {
                200 => served(&closed),
                _ => drop(refused(&closed, LIMITER_UNAVAILABLE)),
            }
            assert_eq!(hits, usize::from(closed.status == 200));
            seen[hits] += 1;
            world.watch().served("open", &limited()).await;
        }
        if round % 2 == 0 {
            world.redis.kill();
        } else {
            world.redis.restart().await;
        }
    }
    assert!(seen[0] > 0 && seen[1] > 0, "it did not flap: {seen:?}");
    world.recovers("after").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_line_about_an_open_gate_stands_for_many_and_says_for_how_many() {
    let mut world = World::start().await;
    world.redis.kill();
    for answer in burst(world.gateway.address_of("open"), &limited(), 60).await {
        served(&answer);
    }
    let class = "limiter_unavailable";
    let bypassed = world.counter("portcullis_bypassed_limiter_unavailable").await;
    assert!(bypassed > 50, "only {bypassed} of 60 met the outage");
    let lines = all_told(
        &world.gateway,
        Some(&world.service),
        class,
        u64::try_from(bypassed).unwrap(),
    )
    .await;
    assert!(lines.0 < 40 && lines.1 < 40, "hardly a line stands for two: {lines:?}");

    world.service.kill();
    for answer in burst(world.gateway.address(), &limited(), 60).await {
        served(&answer);
    }
    let bypassed = world.counter("portcullis_bypassed_decision_unavailable").await;
    assert_eq!(bypassed, 60);
    let lines = all_told(&world.gateway, None, "decision_unavailable", 60).await;
    assert!(lines.0 < 40, "hardly a line stands for two: {lines:?}");
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bounded_choice_lets_so_many_pass_a_minute_while_redis_is_dead_and_then_closes() {
    let mut redis = Store::redis().await;
    let service = Service::start(over_redis(&redis.url())).await;
    let upstream = Upstream::start().await;
    let rules = contract_rules("bounded", json!({"admit": {"max_per_minute": 5}}), "reject");
    let plan = GatewayPlan::new(rules, upstream.address).decision(service.address);
    let mut gateway = plan.plugin(patient()).start().await;
    redis.kill();
    let watch = Watch {
        gateway: &gateway,
        upstream: &upstream,
    };
    let start = Instant::now();
    for _ in 0..5 {
        watch.served("ingress", &limited()).await;
    }
    for _ in 0..7 {
        watch.refused("ingress", &limited(), LIMITER_UNAVAILABLE).await;
    }
    assert!(
        start.elapsed() < Duration::from_mins(1),
        "the minute is over: this shows nothing"
    );
    assert_eq!(upstream.hits(), 5);
    gateway.await_metric("portcullis_bypassed_limiter_unavailable", 5).await;
    gateway.await_metric("portcullis_rejected_limiter_unavailable", 7).await;
    // What the emergency used up is no limit: with the store back all pass, and are counted.
    redis.restart().await;
    until("counting", DEADLINE * 2, async || {
        (watch.call("ingress", &limited()).await.0.status == 200).then_some(())
    })
    .await;
    gateway.assert_sound();
}
