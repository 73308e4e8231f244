//! The service over HTTP while its store fails: every answer follows the rules, within the budget, and when the store is
//! back so is the counting, by itself.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::process::Service;
use crate::proxy::Proxy;
use crate::stores::{PATIENCE, Store, eventually, sockets_to};
use crate::wire::{Answer, request};
use std::sync::atomic::Ordering;

/// The filter's default timeout less 30.
const BUDGET_MS: u64 = 220;
/// What a loaded machine may add to an answer. Whether an answer cost a timeout is told by the service's own clock.
const SLACK: Duration = Duration::from_secs(2);
/// In seconds: half of a timeout, and a bound of the histograms.
const SLOW: &str = "0.05";
/// In how long a store that is back has to be noticed.
const RECOVERY: Duration = Duration::from_secs(5);
/// Two connections, and as many that are being replaced.
const MOST_SOCKETS: usize = 4;
/// Beside those, sockets whose other end has gone and that the kernel has not cleared away yet.
const MOST_WITH_REMAINS: usize = 2 * MOST_SOCKETS;

/// The service over a store at this address.
pub(crate) async fn service_at(url: &str) -> Service {
    let config = json!({"profile": "development", "listen": "127.0.0.1:0", "limiter": {"url": url}});
    let service = Service::start(config).await;
    eventually("the service counts", async || counts(&service).await.then_some(())).await;
    service
}

/// Asks with a limit that is never reached, so that a denial is always wrong.
async fn decide(service: &Service, when_unavailable: &str) -> Value {
    let start = Instant::now();
    let body = request(json!({
        "gates": [{"gate": "contract", "when_unavailable": when_unavailable, "limits": "envelope"}],
        "limits": {"owner": {"requests": 1_000_000, "concurrency": 1_000_000}}, "budget_ms": BUDGET_MS,
    }));
    let answer: Answer = service.post("/v1/decide", &body).await;
    let took = start.elapsed();
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(
        took < Duration::from_millis(BUDGET_MS) + SLACK,
        "{took:?} for {}",
        answer.body
    );
    let verdict = answer.json();
    assert_ne!(verdict["verdict"], "deny", "an outage became a denial: {verdict}");
    verdict
}

/// Whether a request is admitted and counted.
pub(crate) async fn counts(service: &Service) -> bool {
    decide(service, "reject").await["verdict"] == "admit"
}

/// One request under each rule; whether the store was there for both.
async fn follows_the_rules(service: &Service) -> bool {
    let closed = decide(service, "reject").await;
    let counted = closed["verdict"] == "admit";
    if !counted {
        assert_eq!(closed["verdict"], "unavailable", "{closed}");
        assert_eq!(
            (&closed["dependency"], &closed["gate"]),
            (&json!("limiter"), &json!("contract")),
            "{closed}"
        );
    }
    let open = decide(service, "admit").await;
    assert_eq!(open["verdict"], "admit", "{open}");
    let bypassed = open.get("bypassed");
    if let Some(bypassed) = bypassed {
        assert_eq!(
            *bypassed,
            json!([{"class": "limiter_unavailable", "gate": "contract"}]),
            "{open}"
        );
    }
    assert_eq!(service.get("/live").await.status, 200);
    counted && bypassed.is_none()
}

/// Never more than a few sockets to what the service dials, and without remains no more than it holds.
async fn sockets_are_bounded(port: u16) {
    let now = sockets_to(port);
    assert!(now <= MOST_WITH_REMAINS, "{now} sockets");
    eventually("a bounded number of sockets", async || {
        (sockets_to(port) <= MOST_SOCKETS).then_some(())
    })
    .await;
}

/// Answers while the store is out: none counts, hardly any waits, and connections don't pile up.
async fn costs_no_timeouts(service: &Service, port: u16) {
    let before = slow_operations(service).await;
    for _ in 0..20 {
        assert!(!follows_the_rules(service).await, "counted during the outage");
        sockets_are_bounded(port).await;
    }
    let slow = slow_operations(service).await - before;
    assert!(
        slow <= 4,
        "{slow} of 40 requests waited for a store that was known to be out"
    );
}

/// Operations of the limiter that took longer than [`SLOW`], so far.
async fn slow_operations(service: &Service) -> u64 {
    let metrics = service.get("/metrics").await.body;
    let figure = |name: &str| -> u64 {
        let line = metrics.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|figure| figure.trim().parse().ok())
            .unwrap_or_else(|| panic!("no {name} in {metrics}"))
    };
    figure("portcullis_limiter_seconds_count") - figure(&format!("portcullis_limiter_seconds_bucket{{le=\"{SLOW}\"}}"))
}

/// The store is back: soon everything counts, and goes on counting.
async fn recovers(service: &Service) {
    let start = Instant::now();
    eventually("counting again", async || {
        follows_the_rules(service).await.then_some(())
    })
    .await;
    assert!(start.elapsed() < RECOVERY, "recovered after {:?}", start.elapsed());
}

/// What can happen to a store.
#[derive(Debug, Clone, Copy)]
enum Outage {
    Killed,
    Frozen,
    ReadOnly,
    OutOfMemory,
    EvalForbidden,
    CommandForbidden,
    OtherPassword,
}

impl Outage {
    async fn begin(self, store: &mut Store) {
        match self {
            Self::Killed => store.kill(),
            Self::Frozen => store.freeze(),
            Self::ReadOnly => drop(store.run(&["REPLICAOF", "127.0.0.1", "1"]).await),
            Self::OutOfMemory => {
                store.run(&["SET", "filler", &"x".repeat(2_000_000)]).await;
                store
                    .run(&["CONFIG", "SET", "maxmemory-policy", "noeviction", "maxmemory", "1mb"])
                    .await;
            }
            Self::EvalForbidden => drop(store.run(&["ACL", "SETUSER", "default", "-eval", "-evalsha"]).await),
            Self::CommandForbidden => drop(store.run(&["ACL", "SETUSER", "default", "-zadd"]).await),
            Self::OtherPassword => {
                store.run(&["CONFIG", "SET", "requirepass", "another"]).await;
                store.admit_tester_by(format!("redis://:another@127.0.0.1:{}", store.port));
                store.run(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).await;
            }
        }
    }

    async fn end(self, store: &mut Store) {
        match self {
            Self::Killed => store.restart().await,
            Self::Frozen => store.thaw(),
            Self::ReadOnly => drop(store.run(&["REPLICAOF", "NO", "ONE"]).await),
            Self::OutOfMemory => drop(store.run(&["CONFIG", "SET", "maxmemory", "0"]).await),
            Self::EvalForbidden | Self::CommandForbidden => {
                drop(store.run(&["ACL", "SETUSER", "default", "+@all"]).await);
            }
            Self::OtherPassword => {
                store.run(&["CONFIG", "SET", "requirepass", ""]).await;
                store.admit_tester_by(store.url());
            }
        }
    }

    /// What the metrics call it.
    const fn kind(self) -> &'static str {
        match self {
            Self::Killed => "connection",
            Self::Frozen => "timeout",
            Self::ReadOnly => "read_only",
            Self::OutOfMemory => "out_of_memory",
            Self::EvalForbidden | Self::CommandForbidden | Self::OtherPassword => "access_denied",
        }
    }
}

async fn rides_out(outage: Outage) {
    let mut store = Store::redis().await;
    let service = service_at(&store.url()).await;
    eventually("ready", async || {
        (service.get("/ready").await.status == 200).then_some(())
    })
    .await;

    outage.begin(&mut store).await;
    eventually("the outage shows", async || {
        (!follows_the_rules(&service).await).then_some(())
    })
    .await;
    // A few more answers may each cost a timeout; then the store is not asked any more.
    for _ in 0..3 {
        follows_the_rules(&service).await;
    }
    costs_no_timeouts(&service, store.port).await;
    eventually("not ready", async || {
        (service.get("/ready").await.status == 503).then_some(())
    })
    .await;
    let metrics = service.get("/metrics").await.body;
    let named = format!(r#"dependency="limiter",kind="{}""#, outage.kind());
    assert!(metrics.contains(&named), "{named} is not in {metrics}");

    outage.end(&mut store).await;
    recovers(&service).await;
    for _ in 0..10 {
        assert!(follows_the_rules(&service).await, "recovered, and lost it again");
    }
    eventually("ready again", async || {
        (service.get("/ready").await.status == 200).then_some(())
    })
    .await;
    sockets_are_bounded(store.port).await;
}

#[tokio::test]
async fn a_killed_store_follows_the_rules_and_counts_again_when_it_is_back() {
    rides_out(Outage::Killed).await;
}

#[tokio::test]
async fn a_frozen_store_follows_the_rules_and_counts_again_when_it_is_back() {
    rides_out(Outage::Frozen).await;
}

#[tokio::test]
async fn a_read_only_store_follows_the_rules_and_counts_again_when_it_takes_writes() {
    rides_out(Outage::ReadOnly).await;
}

#[tokio::test]
async fn a_store_out_of_memory_follows_the_rules_and_counts_again_when_it_has_some() {
    rides_out(Outage::OutOfMemory).await;
}

#[tokio::test]
async fn a_store_that_forbids_scripts_follows_the_rules_and_counts_again_when_it_allows_them() {
    rides_out(Outage::EvalForbidden).await;
}

#[tokio::test]
async fn a_store_that_forbids_a_command_of_the_scripts_follows_the_rules() {
    rides_out(Outage::CommandForbidden).await;
}

#[tokio::test]
async fn a_store_with_another_password_follows_the_rules_and_counts_again_with_the_right_one() {
    rides_out(Outage::OtherPassword).await;
}

#[tokio::test]
async fn a_store_a_minute_late_follows_the_rules_and_counts_again_when_it_is_on_time() {
    let store = Store::redis().await;
    let proxy = Proxy::start(store.port, "no mark".to_owned()).await;
    let service = service_at(&proxy.url()).await;
    proxy.mood.delay_ms.store(60_000, Ordering::SeqCst);
    eventually("the delay shows", async || {
        (!follows_the_rules(&service).await).then_some(())
    })
    .await;
    for _ in 0..3 {
        follows_the_rules(&service).await;
    }
    costs_no_timeouts(&service, proxy.port).await;
    proxy.mood.delay_ms.store(0, Ordering::SeqCst);
    recovers(&service).await;
}

#[tokio::test]
async fn a_flapping_store_never_makes_a_wrong_answer_and_sockets_stay_bounded() {
    let mut store = Store::redis().await;
    let service = service_at(&store.url()).await;
    for round in 0..8_u64 {
        let end = Instant::now() + Duration::from_millis(30 * (round + 1));
        while Instant::now() < end {
            follows_the_rules(&service).await;
            sockets_are_bounded(store.port).await;
        }
        if round % 2 == 0 {
            store.kill();
        } else {
            store.restart().await;
        }
    }
    recovers(&service).await;
}

#[tokio::test]
async fn a_store_that_was_not_there_at_the_start_is_found_when_it_comes() {
    let mut store = Store::redis().await;
    store.kill();
    let config = json!({"profile": "development", "listen": "127.0.0.1:0", "limiter": {"url": store.url()}});
    let service = Service::start(config).await;
    assert!(!follows_the_rules(&service).await);
    assert_eq!(service.get("/ready").await.status, 503);
    store.restart().await;
    eventually("counting", async || follows_the_rules(&service).await.then_some(())).await;
    eventually("ready", async || {
        (service.get("/ready").await.status == 200).then_some(())
    })
    .await;
}

#[tokio::test]
async fn what_a_frozen_store_charges_when_it_thaws_is_given_back() {
    let store = Store::redis().await;
    let service = service_at(&store.url()).await;
    let body = |op: &str| {
        request(json!({
            "op": op, "gates": [{"gate": "contract", "when_unavailable": "reject", "limits": "envelope"}],
            "subject": {"owner": "late"}, "limits": {"owner": {"requests": 5}}, "budget_ms": BUDGET_MS,
        }))
    };
    store.freeze();
    let answer = service
        .post("/v1/decide", &body(&format!("{:032x}", 0xfeed)))
        .await
        .json();
    assert_eq!(answer["verdict"], "unavailable", "{answer}");
    store.thaw();
    // The charge lay in the store's socket; whichever of it and its cancel came first, nothing is left of it.
    let record = format!("portcullis:op:{:032x}", 0xfeed);
    let end = Instant::now() + PATIENCE;
    while store.number(&["EXISTS", &record]).await == 0 {
        assert!(Instant::now() < end, "no cancel arrived");
        sleep(Duration::from_millis(10)).await;
    }
    eventually("given back", async || {
        (store.number(&["GET", "portcullis:{owner:late}:requests:60"]).await == 0).then_some(())
    })
    .await;
}
