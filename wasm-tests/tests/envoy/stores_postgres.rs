//! PostgreSQL fails behind the service behind Envoy: the closed rules refuse with the store's name, the open ones let pass
//! and journal, and after the recovery every run that passed is billed exactly once.
//!
//! Two services share the database: one reads its policy there too, the other has it in a file, so that metering alone is
//! gone. Each has a gateway with the same three listeners.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use portcullis_wasm_tests::{Call, Connection, DEADLINE, Envelope, Gateway, GatewayPlan, Service, Upstream, until};
use serde_json::{Map, Value, json};
use tempfile::NamedTempFile;
use tokio::task::JoinSet;

use crate::backed::{
    METERING_UNAVAILABLE, POLICY_UNAVAILABLE, Watch, all_told, apply, billed, in_time, over_redis, patient, unmetered,
};
use crate::expect::{DECISION_UNAVAILABLE, Refusal, refused, served};
use crate::postgres::{PASSWORD, Postgres};
use crate::stores::Store;

/// So many that no test spends the launches of one.
const ORGS: usize = 64;
const UNMETERED: &str = "portcullis_bypassed_metering_unavailable";

fn policy() -> Value {
    let org = json!({"status": "active", "plan": "team", "models": ["gpt-4o"]});
    let orgs: Map<String, Value> = (0..ORGS).map(|at| (format!("g{at}"), org.clone())).collect();
    json!({
        "providers": {"gpt-4o": "openai"},
        // Free, so that no test spends the cap of an organization.
        "prices": {"*": {"input": 0, "output": 0}},
        "plans": {"team": {"requests": 1_000_000, "monthly_runs": 1_000_000, "monthly_cost": 1_000_000}},
        "orgs": orgs
    })
}

/// The next organization's call, so that none meets a limit.
fn next_call() -> Call {
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    let org = format!("g{}", CALLS.fetch_add(1, Ordering::SeqCst) % ORGS);
    Call::get("/v1/models").envelope(&Envelope::owner("o").org(&org).with("model", "gpt-4o"))
}

/// A service and the gateway in front of it: `ingress` has fail-closed, the others bill.
struct Side {
    service: Service,
    gateway: Gateway,
    upstream: Upstream,
    /// Requests that passed listeners which bill.
    runs: AtomicUsize,
}

impl Side {
    async fn start(config: Value) -> Self {
        let service = Service::start(config).await;
        let upstream = Upstream::start().await;
        let by_header = json!({"model": {"from": "header"}});
        let mut plan = GatewayPlan::new("fail-closed", upstream.address)
            .decision(service.address)
            .workers(1)
            .plugin(patient())
            .plugin(by_header.clone());
        plan = plan
            .listener("metered", "fail-closed-metered")
            .plugin(patient())
            .plugin(by_header);
        plan = plan.listener("launch", "launch-gate").plugin(patient());
        Self {
            gateway: plan.start().await,
            service,
            upstream,
            runs: AtomicUsize::new(0),
        }
    }

    fn watch(&self) -> Watch<'_> {
        Watch {
            gateway: &self.gateway,
            upstream: &self.upstream,
        }
    }

    async fn served(&self, listener: &str) {
        self.watch().served(listener, &next_call()).await;
        self.runs
            .fetch_add(usize::from(listener != "ingress"), Ordering::SeqCst);
    }

    async fn refused(&self, listener: &str, refusal: Refusal) {
        self.watch().refused(listener, &next_call(), refusal).await;
    }

    /// One request; whether it passed.
    async fn asks(&self, listener: &str) -> bool {
        let (answer, hits) = self.watch().call(listener, &next_call()).await;
        let passed = answer.status == 200;
        assert_eq!(hits, usize::from(passed));
        self.runs
            .fetch_add(usize::from(passed && listener != "ingress"), Ordering::SeqCst);
        passed
    }

    /// Waits until every listener admits by right.
    async fn is_whole(&self) {
        for store in ["limiter", "policy", "metering"] {
            until(store, DEADLINE * 2, async || {
                let state = self.service.state(store).await;
                (state == "up" || state == "embedded").then_some(())
            })
            .await;
        }
        for listener in ["ingress", "metered"] {
            until(listener, DEADLINE, async || self.asks(listener).await.then_some(())).await;
        }
        until("a launch by right", DEADLINE, async || {
            let before = self.bypassed().await;
            assert!(self.asks("launch").await, "launch-gate admits");
            (self.bypassed().await == before).then_some(())
        })
        .await;
    }

    async fn bypassed(&self) -> i64 {
        let mut sum = 0;
        for class in ["limiter", "policy", "metering", "decision"] {
            sum += self
                .gateway
                .counter(&format!("portcullis_bypassed_{class}_unavailable"))
                .await;
        }
        sum
    }

    /// The launches that have to stand in the journal.
    async fn unmetered(&self) -> usize {
        let decision = self.gateway.counter("portcullis_bypassed_decision_unavailable").await;
        usize::try_from(self.gateway.counter(UNMETERED).await + decision).unwrap()
    }

    /// Everything that is to be seen of launches that were let pass.
    async fn says_so(&self, class: &str, message: &str) {
        let counter = format!("portcullis_bypassed_{class}");
        let count = u64::try_from(self.gateway.counter(&counter).await).unwrap();
        assert!(count > 0);
        all_told(&self.gateway, Some(&self.service), class, count).await;
        let opened = |line: &Value| line["event"] == "bypassed" && line["class"] == class && line["message"] == message;
        let (level, line) = self.gateway.await_log(message, opened).await;
        assert_eq!((level.as_str(), &line["action"]), ("warning", &json!("admit")));
        let line = self.service.await_log(message, opened).await;
        assert_eq!((&line["level"], &line["action"]), (&json!("WARN"), &json!("admit")));
        assert!(line["org"].as_str().is_some_and(|org| org.starts_with('g')), "{line}");
        assert!(line["request_id"].is_string(), "{line}");
    }

    fn says_nothing_secret(&self) {
        for log in [self.service.log(), self.gateway.log()] {
            assert!(!log.contains(PASSWORD) && !log.contains("FATAL"), "{log}");
        }
    }
}

/// What can happen to the database.
#[derive(Clone, Copy, Debug)]
enum Outage {
    Killed,
    Frozen,
    Full,
}

impl Outage {
    async fn begin(self, postgres: &mut Postgres) {
        match self {
            Self::Killed => postgres.kill(),
            Self::Frozen => postgres.freeze(),
            Self::Full => {
                // The same answer as from a server without free connections, but the tester still gets one.
                postgres.run("ALTER ROLE guest CONNECTION LIMIT 0").await;
                postgres.terminate_backends().await;
            }
        }
    }

    async fn end(self, postgres: &mut Postgres) {
        match self {
            Self::Killed => postgres.restart().await,
            Self::Frozen => postgres.thaw(),
            Self::Full => drop(postgres.run("ALTER ROLE guest CONNECTION LIMIT -1").await),
        }
    }

    const fn kind(self) -> &'static str {
        match self {
            Self::Killed => "connection",
            Self::Frozen => "timeout",
            Self::Full => "pool_exhausted",
        }
    }
}

struct World {
    redis: Store,
    postgres: Postgres,
    url: String,
    /// Policy and metering in the database.
    both: Side,
    /// Metering alone.
    metering: Side,
    _policy: NamedTempFile,
}

impl World {
    async fn start() -> Self {
        let (redis, postgres) = tokio::join!(Store::redis(), Postgres::start());
        postgres.trust_everybody().await;
        apply(&postgres.url(), &policy());
        let guest =
            format!("CREATE USER guest PASSWORD '{PASSWORD}'; GRANT pg_read_all_data, pg_write_all_data TO guest");
        postgres.run(&guest).await;
        let url = postgres.url().replace("//postgres:", "//guest:");
        let file = NamedTempFile::new().expect("a temporary file");
        std::fs::write(file.path(), policy().to_string()).expect("the policy can be written");
        let config = |name: &str, policy: &str| {
            let mut config = over_redis(&redis.url());
            config["limiter"]["key_prefix"] = json!(name);
            config["policy"] = json!({"url": policy, "max_staleness_ms": 300});
            config["metering"] = json!({"url": url});
            config
        };
        let in_file = format!("file:{}", file.path().display());
        let (both, metering) = tokio::join!(
            Side::start(config("both", &url)),
            Side::start(config("metering", &in_file))
        );
        both.is_whole().await;
        metering.is_whole().await;
        Self {
            redis,
            postgres,
            url,
            both,
            metering,
            _policy: file,
        }
    }

    /// The database is out: both services answer by their rules, and blame the right store.
    async fn follows_the_rules(&self, kind: &str) {
        // What is fresh still counts, and a connection may still be open.
        until("the outage to show", DEADLINE, async || {
            (!self.both.asks("ingress").await).then_some(())
        })
        .await;
        until("the outage to show", DEADLINE, async || {
            (!self.metering.asks("metered").await).then_some(())
        })
        .await;
        let before = (self.both.unmetered().await, self.metering.unmetered().await);
        for _ in 0..3 {
            self.both.refused("ingress", POLICY_UNAVAILABLE).await;
            self.both.refused("metered", POLICY_UNAVAILABLE).await;
            self.both.served("launch").await;
            self.metering.served("ingress").await;
            self.metering.refused("metered", METERING_UNAVAILABLE).await;
            self.metering.served("launch").await;
        }
        assert_eq!(
            (self.both.unmetered().await, self.metering.unmetered().await),
            (before.0 + 3, before.1 + 3)
        );
        for (side, class) in [(&self.both, "policy"), (&self.metering, "metering")] {
            assert!(
                side.gateway
                    .counter(&format!("portcullis_rejected_{class}_unavailable"))
                    .await
                    >= 3
            );
            assert_eq!(side.gateway.counter("portcullis_rejected_policy_denied").await, 0);
            assert_eq!(side.gateway.counter("portcullis_rejected_quota_exhausted").await, 0);
            assert_eq!(side.gateway.counter("portcullis_bypassed_limiter_unavailable").await, 0);
            side.gateway.await_metric("portcullis_enforcing_launch-gate", 0).await;
            side.gateway
                .await_metric("portcullis_enforcing_fail-closed-metered", 1)
                .await;
            side.says_so("metering_unavailable", "fail-open, launch unmetered")
                .await;
            assert_eq!(side.service.get("/live").await.status, 200);
            let errors = format!("portcullis_dependency_errors_total{{dependency=\"{class}\",kind=\"{kind}\"}}");
            until(&errors, DEADLINE, async || {
                (side.service.metric(&errors).await > 0.0).then_some(())
            })
            .await;
            assert!(side.service.metric("portcullis_unmetered_total").await >= 3.0);
            let closed = |line: &Value| {
                line["event"] == "unavailable" && line["dependency"] == class && line["code"] == "SERVICE_DEGRADED"
            };
            side.service.await_log("a refusal", closed).await;
            side.service.await_state(class, "down").await;
        }
        self.both
            .says_so("policy_unavailable", "fail-open, org_status unchecked")
            .await;
    }

    /// The database is back: everything is admitted by right, and every run that passed is billed exactly once.
    async fn recovers(&mut self) {
        self.both.is_whole().await;
        self.metering.is_whole().await;
        self.books_are_even().await;
        for side in [&mut self.both, &mut self.metering] {
            side.says_nothing_secret();
            side.gateway.assert_sound();
        }
    }

    async fn books_are_even(&self) {
        let runs = self.both.runs.load(Ordering::SeqCst) + self.metering.runs.load(Ordering::SeqCst);
        billed(&self.postgres, &[&self.both.service, &self.metering.service], runs).await;
        let expected = self.both.unmetered().await + self.metering.unmetered().await;
        let mut listed = Vec::new();
        until("the list of unmetered runs", DEADLINE, async || {
            listed = unmetered(&self.url);
            (listed.len() == expected).then_some(())
        })
        .await;
        assert!(
            listed
                .iter()
                .all(|row| row["rules"] == "launch-gate" && row["owner"] == "o")
        );
        assert!(self.redis.keys().await.iter().any(|key| key.starts_with("both:")));
    }
}

async fn rides_out(outage: Outage) {
    let mut world = World::start().await;
    outage.begin(&mut world.postgres).await;
    world.follows_the_rules(outage.kind()).await;
    outage.end(&mut world.postgres).await;
    world.recovers().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_postgres_is_closed_or_open_by_the_rules_and_every_run_is_billed_once() {
    rides_out(Outage::Killed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_postgres_is_closed_or_open_by_the_rules_and_every_run_is_billed_once() {
    rides_out(Outage::Frozen).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_postgres_out_of_connections_is_closed_or_open_by_the_rules_and_every_run_is_billed_once() {
    rides_out(Outage::Full).await;
}

/// Calls of one connection after the other until `stop`; gives how many passed.
async fn load(address: std::net::SocketAddr, closed: bool, stop: Arc<AtomicBool>) -> usize {
    let mut connection = Connection::open(address).await;
    let mut passed = 0;
    while !stop.load(Ordering::SeqCst) {
        let answer = connection.call(&next_call()).await;
        in_time(&answer);
        if !closed || answer.status == 200 {
            served(&answer);
            passed += 1;
        } else {
            let class = answer.header("x-portcullis-class").unwrap_or_default().to_owned();
            let refusal = if class == "metering_unavailable" {
                METERING_UNAVAILABLE
            } else {
                POLICY_UNAVAILABLE
            };
            refused(&answer, refusal);
        }
    }
    passed
}

#[tokio::test(flavor = "multi_thread")]
async fn a_postgres_restarted_under_load_costs_no_wrong_answer_and_every_run_is_billed_once() {
    let mut world = World::start().await;
    let stop = Arc::new(AtomicBool::new(false));
    let mut running = JoinSet::new();
    let before = world.both.upstream.hits();
    for (listener, closed) in [("metered", true), ("launch", false), ("metered", true)] {
        let address = world.both.gateway.address_of(listener);
        running.spawn(load(address, closed, Arc::clone(&stop)));
    }
    for _ in 0..3 {
        let so_far = world.both.upstream.hits();
        world.postgres.terminate_backends().await;
        until("requests after the cut", DEADLINE, async || {
            (world.both.upstream.hits() > so_far + 5).then_some(())
        })
        .await;
    }
    world.postgres.kill();
    let bypassed = world.both.unmetered().await;
    until("launches without the database", DEADLINE, async || {
        (world.both.unmetered().await > bypassed + 5).then_some(())
    })
    .await;
    world.postgres.restart().await;
    until("load after the recovery", DEADLINE, async || {
        let state = world.both.service.state("metering").await;
        (state == "up").then_some(())
    })
    .await;
    stop.store(true, Ordering::SeqCst);
    let passed: usize = running.join_all().await.into_iter().sum();
    assert_eq!(world.both.upstream.hits() - before, passed);
    world.both.runs.fetch_add(passed, Ordering::SeqCst);
    for class in ["policy_denied", "quota_exhausted", "decision_unavailable"] {
        let name = format!("portcullis_rejected_{class}");
        assert_eq!(world.both.gateway.counter(&name).await, 0, "{name}");
    }
    world.recovers().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn launches_while_the_service_is_gone_are_told_when_it_is_back_and_billed_once() {
    let mut world = World::start().await;
    let side = &mut world.both;
    side.service.kill();
    for _ in 0..6 {
        side.served("launch").await;
        side.refused("ingress", DECISION_UNAVAILABLE).await;
        side.refused("metered", DECISION_UNAVAILABLE).await;
    }
    side.gateway
        .await_metric("portcullis_bypassed_decision_unavailable", 6)
        .await;
    let opened = |line: &Value| {
        line["event"] == "bypassed"
            && line["class"] == "decision_unavailable"
            && line["message"] == "fail-open, launch unmetered"
    };
    let (level, _) = side.gateway.await_log("a bypass", opened).await;
    assert_eq!(level, "warning");
    all_told(&side.gateway, None, "decision_unavailable", 6).await;
    side.service.restart().await;
    until("the filter to tell", DEADLINE, async || {
        (unmetered(&world.url).len() == 6).then_some(())
    })
    .await;
    let listed = unmetered(&world.url);
    assert!(listed.iter().all(|row| row["source"] == "filter"), "{listed:?}");
    world.recovers().await;
    // A service that starts again with what it was told has nothing to bill a second time.
    world.both.service.restart().await;
    tokio::time::timeout(Duration::from_secs(30), world.recovers())
        .await
        .expect("it recovers again");
}
