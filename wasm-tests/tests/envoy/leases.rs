//! Admissions that the gateway hands out by itself are the ones that the service has charged: as many as the limit, whoever
//! shares it, and what a limit, a policy or a client sees of them is what it would see of exact ones.
//!
//! Left out on purpose: how leases end before their time (`leases_ends.rs`), and tokens (`leases_tokens.rs`).

use std::time::{Duration, Instant};

use portcullis_wasm_tests::{
    Answer, Call, Connection, DEADLINE, Envelope, Gateway, GatewayPlan, Service, Upstream, until,
};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::backed::{MODEL_NOT_ALLOWED, over_redis, patient};
use crate::expect::{RATE_LIMITED, refused, served, summary};
use crate::stores::Store;
use crate::world::{burst, concurrent_burst, strict};

/// The plugin's part: blocks of the usual size, handed out for so long.
pub(crate) fn leased(max_age: Duration) -> Value {
    json!({"leases": {"max_age_ms": u64::try_from(max_age.as_millis()).unwrap()}})
}

/// Gateways that lease, in front of one upstream, by one service over one Redis.
pub(crate) struct Leasing {
    pub(crate) redis: Store,
    pub(crate) service: Service,
    pub(crate) upstream: Upstream,
    pub(crate) gateway: Gateway,
    rules: Value,
    plugin: Value,
}

impl Leasing {
    /// Contract limits that hold or nothing passes.
    pub(crate) async fn start(max_age: Duration) -> Self {
        Self::with(strict(), json!({}), leased(max_age)).await
    }

    /// Under these rules, with more in the service's configuration and in the plugin's.
    pub(crate) async fn with(rules: Value, more: Value, plugin: Value) -> Self {
        let redis = Store::redis().await;
        let mut config = over_redis(&redis.url());
        for (key, value) in more.as_object().into_iter().flatten() {
            config[key] = value.clone();
        }
        let (service, upstream) = tokio::join!(Service::start(config), Upstream::start());
        let gateway = plan(&rules, &service, &upstream, &plugin).start().await;
        service.await_state("limiter", "up").await;
        Self {
            redis,
            service,
            upstream,
            gateway,
            rules,
            plugin,
        }
    }

    /// What a gateway of these is.
    pub(crate) fn plan(&self) -> GatewayPlan {
        plan(&self.rules, &self.service, &self.upstream, &self.plugin)
    }

    /// Admissions by a lease. The filter counts them at its next tick, so this waits until everything admitted is counted.
    pub(crate) async fn hits(&self) -> i64 {
        let admitted = i64::try_from(self.upstream.hits()).unwrap();
        self.gateway.await_metric("portcullis_admitted", admitted).await;
        self.gateway.counter("portcullis_lease_hits").await
    }

    /// Requests at an easy pace, until they are served from blocks. How many there were.
    pub(crate) async fn warm(&self, call: &Call) -> usize {
        warm(&self.gateway, call).await
    }
}

/// The same for any gateway. Blocks come only where there is demand, which the service has to see first.
pub(crate) async fn warm(gateway: &Gateway, call: &Call) -> usize {
    let mut connection = Connection::open(gateway.address()).await;
    let mut count = 0;
    let before = gateway.counter("portcullis_lease_hits").await;
    until("admissions by a lease", DEADLINE, async || {
        let answer = connection.call(call).await;
        assert_eq!(answer.status, 200, "{answer:?} {}", answer.text());
        count += 1;
        (gateway.counter("portcullis_lease_hits").await >= before + 3).then_some(())
    })
    .await;
    count
}

fn plan(rules: &Value, service: &Service, upstream: &Upstream, plugin: &Value) -> GatewayPlan {
    GatewayPlan::new(rules.clone(), upstream.address)
        .decision(service.address)
        .patient_connects()
        .plugin(patient())
        .plugin(plugin.clone())
}

/// How many were served; the others were denied for their requests.
#[track_caller]
pub(crate) fn passed(answers: &[Answer]) -> usize {
    for answer in answers {
        match answer.status {
            200 => served(answer),
            _ => drop(refused(answer, RATE_LIMITED)),
        }
    }
    answers.iter().filter(|answer| answer.status == 200).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn one_bundle_gets_exactly_its_limit_and_most_of_it_without_a_callout() {
    const LIMIT: usize = 1_000;
    let mut world = Leasing::start(Duration::from_secs(5)).await;
    let envelope = Envelope::owner("o").org("g").auth("a");
    let call = Call::get("/v1/models").envelope(&envelope.requests("owner", LIMIT));
    let warm = world.warm(&call).await;
    let answers = concurrent_burst(world.gateway.address(), &call, 10, 140).await;
    assert_eq!(warm + passed(&answers), LIMIT, "{warm} and {:?}", summary(&answers));
    assert_eq!(world.upstream.hits(), LIMIT);
    let (hits, callouts) = (world.hits().await, world.gateway.counter("portcullis_callouts").await);
    let requests = warm + 1_400;
    eprintln!(
        "{hits} of {LIMIT} were leased, with {callouts} callouts for {requests} requests, {warm} of them to warm"
    );
    assert!(hits > 500, "{hits} leased");
    assert!(callouts < 500, "{callouts} callouts");
    let denied = i64::try_from(requests - LIMIT).unwrap();
    world.gateway.await_metric("portcullis_admitted", 1_000).await;
    world
        .gateway
        .await_metric("portcullis_rejected_quota_exhausted", denied)
        .await;
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_scope_that_bundles_share_gets_its_limit_and_gets_all_of_it_soon() {
    const LIMIT: usize = 2_000;
    let max_age = Duration::from_secs(1);
    let mut world = Leasing::start(max_age).await;
    // Different owners and credentials of one organization.
    let calls: Vec<Call> = [("o", "a"), ("o", "b"), ("p", "a"), ("p", "c"), ("q", "d")]
        .iter()
        .map(|(owner, auth)| {
            let envelope = Envelope::owner(owner).org("shared").auth(auth);
            Call::get("/v1/models").envelope(&envelope.requests("org", LIMIT))
        })
        .collect();
    let address = world.gateway.address();
    let warm = world.warm(&calls[0]).await;
    let mut bursts = JoinSet::new();
    for call in calls.clone() {
        bursts.spawn(async move { concurrent_burst(address, &call, 2, 250).await });
    }
    let answers: Vec<Answer> = bursts.join_all().await.into_iter().flatten().collect();
    let at_once = warm + passed(&answers);
    assert_eq!(world.upstream.hits(), at_once);
    assert!(at_once <= LIMIT, "{at_once} admitted");
    let hits = world.hits().await;
    assert!(hits > 100, "{hits} leased");
    // What the bundles have left over comes back when it ends, and a denial is remembered no longer.
    let start = Instant::now();
    until("all of the limit", DEADLINE, async || {
        for call in &calls {
            passed(&burst(address, call, 1).await);
        }
        (world.upstream.hits() == LIMIT).then_some(())
    })
    .await;
    let took = start.elapsed();
    eprintln!("{at_once} of {LIMIT} at once, {hits} of them leased, and the rest {took:?} later");
    assert!(took < max_age * 2 + Duration::from_secs(1), "took {took:?}");
    for call in &calls {
        let answers = concurrent_burst(address, call, 2, 5).await;
        assert_eq!(passed(&answers), 0);
    }
    assert_eq!(world.upstream.hits(), LIMIT);
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_limit_holds_from_the_first_request_on() {
    let mut world = Leasing::start(Duration::from_secs(30)).await;
    let with = |limit: u64| Call::get("/v1/models").envelope(&Envelope::owner("o").requests("owner", limit));
    world.warm(&with(10_000)).await;
    let so_far = world.upstream.hits();
    // There is plenty left of the blocks, but not under this limit.
    for lower in [so_far as u64, 1, 0] {
        let answer = world.gateway.call(&with(lower)).await;
        refused(
            &answer,
            crate::expect::Refusal {
                retry_after: answer.retry_after().map(|_| (1, 60)),
                ..RATE_LIMITED
            },
        );
    }
    assert_eq!(world.upstream.hits(), so_far);
    // A higher one counts what the other has taken.
    world.warm(&with(20_000)).await;
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_policy_ends_what_was_leased_under_the_old_one() {
    let staleness = Duration::from_secs(1);
    let max_age = Duration::from_secs(1);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("policy.json");
    let write = |models: Value| {
        let policy = json!({
            "providers": {"gpt-4o": "openai"}, "prices": {"*": {"input": 0, "output": 0}},
            "plans": {"team": {}}, "orgs": {"g": {"status": "active", "plan": "team", "models": models}}
        });
        let new = folder.path().join("policy.new");
        std::fs::write(&new, policy.to_string()).unwrap();
        std::fs::rename(&new, &file).unwrap();
    };
    write(json!(["gpt-4o"]));
    let policy = json!({"policy": {"url": format!("file:{}", file.display()), "max_staleness_ms": 1_000}});
    let rules = json!({
        "name": "strict-model",
        "envelope": {"when_missing": "reject"},
        "gates": [{"gate": "model_policy", "when_unavailable": "reject"},
                  {"gate": "contract", "when_unavailable": "reject"}],
        "decision": {"when_unavailable": "reject"}
    });
    let mut plugin = leased(max_age);
    plugin["model"] = json!({"from": "header"});
    let mut world = Leasing::with(rules, policy, plugin).await;
    let envelope = Envelope::owner("o").org("g").with("model", "gpt-4o");
    let call = Call::get("/v1/models").envelope(&envelope.requests("owner", 1_000_000));
    let mut connection = Connection::open(world.gateway.address()).await;
    for _ in 0..3 {
        world.warm(&call).await;
        write(json!([]));
        let in_force = Instant::now() + max_age + staleness;
        let mut last_served = None;
        while Instant::now() < in_force {
            let answer = connection.call(&call).await;
            match answer.status {
                200 => last_served = Some(Instant::now()),
                _ => drop(refused(&answer, MODEL_NOT_ALLOWED)),
            }
        }
        if let Some(last) = last_served {
            eprintln!("served until {:?} before it had to be in force", in_force - last);
        }
        for _ in 0..20 {
            refused(&connection.call(&call).await, MODEL_NOT_ALLOWED);
        }
        write(json!(["gpt-4o"]));
        until("it to be allowed again", DEADLINE, async || {
            (connection.call(&call).await.status == 200).then_some(())
        })
        .await;
    }
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_limit_that_a_leased_answer_shows_counts_down() {
    const LIMIT: u64 = 1_000;
    let mut plugin = leased(Duration::from_secs(5));
    plugin["reply"] = json!({"limit_headers": "always"});
    let mut world = Leasing::with(strict(), json!({}), plugin).await;
    let call = Call::get("/v1/models").envelope(&Envelope::owner("o").requests("owner", LIMIT));
    let mut connection = Connection::open(world.gateway.address()).await;
    let warm = u64::try_from(world.warm(&call).await).unwrap();
    let mut before = LIMIT;
    let mut off = Vec::new();
    for used in warm + 1..=warm + 600 {
        let answer = connection.call(&call).await;
        served(&answer);
        let shown = |name: &str| -> u64 {
            let value = answer.header(&format!("x-ratelimit-{name}-requests"));
            value
                .unwrap_or_else(|| panic!("no {name}: {answer:?}"))
                .parse()
                .unwrap()
        };
        assert_eq!(shown("limit"), LIMIT);
        assert!((1..=60).contains(&shown("reset")), "{answer:?}");
        let remaining = shown("remaining");
        if remaining > before || remaining != LIMIT - used {
            off.push((used, remaining));
        }
        before = remaining;
    }
    let hits = world.hits().await;
    eprintln!("{hits} of {} were leased; off: {off:?}", warm + 600);
    assert!(hits > 300, "{hits} leased");
    assert!(off.is_empty(), "what was shown after so many: {off:?}");
    world.gateway.assert_sound();
}

/// What a tenant at a steady rate costs: nearly nothing but its blocks.
#[tokio::test(flavor = "multi_thread")]
async fn a_steady_tenant_is_nearly_always_served_from_leases() {
    const EVERY: Duration = Duration::from_millis(4);
    let mut world = Leasing::start(Duration::from_secs(1)).await;
    let call = Call::get("/v1/models").envelope(&Envelope::owner("o").org("g").requests("owner", 100_000_000_u64));
    let rate: u32 = std::env::var("PORTCULLIS_RATE").map_or(2_000, |rate| rate.parse().expect("requests per second"));
    let connections = (rate * u32::try_from(EVERY.as_millis()).unwrap())
        .div_ceil(1_000)
        .max(1);
    let run = async |length: Duration| {
        let mut clients = JoinSet::new();
        for at in 0..connections {
            let (address, call) = (world.gateway.address(), call.clone());
            clients.spawn(async move {
                let mut connection = Connection::open(address).await;
                let mut clock = tokio::time::interval_at((Instant::now() + EVERY * at / connections).into(), EVERY);
                let end = Instant::now() + length;
                let mut count = 0_usize;
                while Instant::now() < end {
                    clock.tick().await;
                    served(&connection.call(&call).await);
                    count += 1;
                }
                count
            });
        }
        clients.join_all().await.into_iter().sum::<usize>()
    };
    run(Duration::from_secs(2)).await;
    let before = (world.hits().await, world.gateway.counter("portcullis_callouts").await);
    let start = Instant::now();
    let count = run(Duration::from_secs(4)).await;
    let took = start.elapsed();
    let hits = world.hits().await - before.0;
    let callouts = world.gateway.counter("portcullis_callouts").await - before.1;
    eprintln!(
        "{:.0} per second: {:.2} % of {count} leased, {callouts} callouts",
        count as f64 / took.as_secs_f64(),
        hits as f64 * 100.0 / count as f64
    );
    assert!(hits as f64 >= count as f64 * 0.98, "{hits} of {count} leased");
    world.gateway.assert_sound();
}
