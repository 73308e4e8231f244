//! Members that are lost: with a replica that takes over, and without.

use std::time::Duration;

use portcullis_decision::charge::Charged;
use portcullis_decision::ledger::Settled;
use portcullis_decision::limits::Resource;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::process::Service;
use crate::scene::{SLOT_TTL, connected, entry, id, orgs, plan, requests, used, within};
use crate::stores::cluster::Cluster;
use crate::stores::{Store, eventually, open};
use crate::wire::request;

/// The filter's timeout less 30, for a filter that gives a loaded machine time.
const BUDGET_MS: u64 = 1_000;
/// In how long a replica has taken over, on a loaded machine.
const FAILOVER: Duration = Duration::from_secs(30);
const OP_TIMEOUT_MS: u64 = 400;
/// What a loaded machine may add to an answer.
const SLACK: Duration = Duration::from_secs(2);

async fn service_over(cluster: &Cluster) -> Service {
    let config = json!({"profile": "development", "listen": "127.0.0.1:0",
                        "limiter": {"url": cluster.url(), "op_timeout_ms": OP_TIMEOUT_MS}});
    let service = Service::start(config).await;
    eventually("ready", async || {
        (service.get("/ready").await.status == 200).then_some(())
    })
    .await;
    service
}

/// One decision under `reject`; in time, whatever it is.
async fn decide(service: &Service, owner: &str, limit: u64) -> Value {
    let start = Instant::now();
    let body = request(json!({
        "gates": [{"gate": "contract", "when_unavailable": "reject", "limits": "envelope"}],
        "subject": {"owner": owner}, "limits": {"owner": {"requests": limit}}, "budget_ms": BUDGET_MS,
    }));
    let answer = service.post("/v1/decide", &body).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(
        start.elapsed() < Duration::from_millis(BUDGET_MS) + SLACK,
        "{:?}",
        start.elapsed()
    );
    let verdict = answer.json();
    if verdict["verdict"] == "unavailable" {
        assert_eq!(
            (&verdict["dependency"], &verdict["gate"]),
            (&json!("limiter"), &json!("contract")),
            "{verdict}"
        );
    }
    verdict
}

async fn owner_on(cluster: &Cluster, primary: usize) -> String {
    let tag = cluster.name_on(primary, |n| format!("owner:w{n}")).await;
    tag.strip_prefix("owner:").unwrap().to_owned()
}

/// Waits until the replica has all that its primary has.
async fn replicated(primary: &Store) {
    eventually("the replica has it all", async || {
        let said: String = redis::from_redis_value(primary.run(&["INFO", "replication"]).await).unwrap();
        let offset = |name: &str, end: char| {
            let (_, rest) = said.split_once(name)?;
            rest.split([end, '\r', '\n']).next()?.parse::<u64>().ok()
        };
        (offset("offset=", ',')? == offset("master_repl_offset:", '\r')?).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failover_is_limiter_unavailable_and_then_the_count_goes_on() {
    let mut cluster = Cluster::with_replicas().await;
    let service = service_over(&cluster).await;
    let owner = owner_on(&cluster, 0).await;
    let mut admitted = 0;
    for _ in 0..6 {
        eventually("counted", async || {
            (decide(&service, &owner, 10).await["verdict"] == "admit").then_some(())
        })
        .await;
        admitted += 1;
    }
    replicated(&cluster.members[0]).await;
    cluster.members[0].kill();
    let start = Instant::now();
    let mut refused = 0;
    loop {
        let verdict = decide(&service, &owner, 10).await;
        match verdict["verdict"].as_str() {
            Some("admit") => break,
            Some("unavailable") => refused += 1,
            _ => panic!("an outage became something else: {verdict}"),
        }
        assert!(start.elapsed() < FAILOVER, "no failover within {FAILOVER:?}");
    }
    admitted += 1;
    assert!(refused > 0, "nothing failed: this shows nothing");
    assert!(cluster.members[3].is_primary().await);
    // Exactly as many more as were left, and no restart.
    let mut denied = 0;
    for _ in 0..10 {
        match decide(&service, &owner, 10).await["verdict"].as_str() {
            Some("admit") => admitted += 1,
            Some("deny") => denied += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((admitted, denied), (10, 7));
    // The former primary comes back as a replica, and answers no charge by what it knows.
    cluster.members[0].restart().await;
    eventually("it follows", async || {
        (!cluster.members[0].is_primary().await).then_some(())
    })
    .await;
    for _ in 0..20 {
        assert_eq!(decide(&service, &owner, 10).await["verdict"], "deny");
    }
    assert_eq!(service.get("/ready").await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_member_without_a_replica_leaves_the_groups_of_the_others_as_they_are() {
    let mut cluster = Cluster::of_three().await;
    let service = service_over(&cluster).await;
    let owners = [
        owner_on(&cluster, 0).await,
        owner_on(&cluster, 1).await,
        owner_on(&cluster, 2).await,
    ];
    for owner in &owners {
        eventually("counted", async || {
            (decide(&service, owner, 1_000).await["verdict"] == "admit").then_some(())
        })
        .await;
    }
    cluster.members[2].kill();
    eventually("the loss shows", async || {
        (decide(&service, &owners[2], 1_000).await["verdict"] == "unavailable").then_some(())
    })
    .await;
    // Operations keep their directories in three places, of which one is lost now.
    for turn in 0..30 {
        for owner in &owners[..2] {
            let verdict = decide(&service, owner, 1_000).await;
            assert_eq!(verdict["verdict"], "admit", "turn {turn}: {verdict}");
        }
        let verdict = decide(&service, &owners[2], 1_000).await;
        assert_eq!(verdict["verdict"], "unavailable", "{verdict}");
    }
    let ready = service.get("/ready").await;
    assert_eq!(ready.status, 200, "two of three members are not none: {}", ready.body);
    // A denial that is known stays one, whatever is lost behind it.
    for _ in 0..3 {
        assert_eq!(decide(&service, &owners[0], 1).await["verdict"], "deny");
    }
    let errors = service.get("/metrics").await.body;
    assert!(
        errors.contains("portcullis_dependency_errors_total{dependency=\"limiter\""),
        "{errors}"
    );
    cluster.members[2].restart().await;
    eventually("it counts again by itself", async || {
        (decide(&service, &owners[2], 1_000).await["verdict"] == "admit").then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_member_costs_the_others_nothing_once_it_is_known() {
    let cluster = Cluster::of_three().await;
    let limiter = open(&cluster.url(), OP_TIMEOUT_MS);
    let orgs = orgs(&cluster).await;
    connected(&limiter, &orgs).await;
    cluster.members[2].freeze();
    let charge = async |op: u32, org: &str| {
        limiter
            .charge(&plan(op, &[requests(org, 1_000)]), SLOT_TTL, within(OP_TIMEOUT_MS))
            .await
    };
    let mut op = 0;
    eventually("it is known", async || {
        op += 1;
        let start = Instant::now();
        let refused = charge(op, &orgs[2]).await.is_err();
        (refused && start.elapsed() < Duration::from_millis(OP_TIMEOUT_MS / 2)).then_some(())
    })
    .await;
    let mut slow = 0;
    for op in 1_000..1_040 {
        let start = Instant::now();
        charge(op, &orgs[usize::from(op % 2 == 0)]).await.unwrap();
        slow += u32::from(start.elapsed() > Duration::from_millis(OP_TIMEOUT_MS / 2));
    }
    assert!(
        slow <= 4,
        "{slow} of 40 waited for a member that was known to be frozen"
    );
    cluster.members[2].thaw();
    eventually("it counts again", async || {
        op += 1;
        charge(op, &orgs[2]).await.ok()
    })
    .await;
    assert_eq!(
        used(&limiter, &[requests(&orgs[0], 1), requests(&orgs[1], 1)])
            .await
            .unwrap(),
        [20, 20]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_ends_while_a_member_is_frozen_holds_up_no_other_and_is_settled_when_it_is_back() {
    let cluster = Cluster::of_three().await;
    let limiter = open(&cluster.url(), OP_TIMEOUT_MS);
    let orgs = orgs(&cluster).await;
    connected(&limiter, &orgs).await;
    let slots = |org: &str| [entry(org, Resource::Concurrency, 1_000, 1)];
    for op in 0..41 {
        let plan = plan(op, &slots(&orgs[if op < 30 { 0 } else { 2 }]));
        let charged = limiter.charge(&plan, SLOT_TTL, within(2_000)).await.unwrap();
        assert!(matches!(charged, Charged::Granted(_)), "{charged:?}");
    }
    let ops: Vec<_> = (0..40).map(id).collect();
    cluster.members[2].freeze();
    eventually("it is known", async || {
        let start = Instant::now();
        let refused = limiter
            .charge(&plan(99, &slots(&orgs[2])), SLOT_TTL, within(OP_TIMEOUT_MS))
            .await;
        (refused.is_err() && start.elapsed() < Duration::from_millis(OP_TIMEOUT_MS / 2)).then_some(())
    })
    .await;
    let lost = limiter.renew(&ops, SLOT_TTL, within(OP_TIMEOUT_MS)).await.unwrap();
    assert_eq!(lost, [], "what can't be asked is not known to be lost");
    let ended: Vec<Settled> = ops.iter().map(|op| Settled { op: *op, tokens: None }).collect();
    limiter.settle(&ended, within(OP_TIMEOUT_MS)).await.unwrap();
    // Those whose directory is on the frozen member still hold their slots.
    let held = used(&limiter, &slots(&orgs[0])).await.unwrap()[0];
    assert!((1..30).contains(&held), "{held} of 30 are still held");
    // The same for one of them alone: other kinds of the same batch wait for the answer.
    let alone = [id(40)];
    assert_eq!(limiter.renew(&alone, SLOT_TTL, within(OP_TIMEOUT_MS)).await, Ok(vec![]));
    let ended = alone.map(|op| Settled { op, tokens: None });
    limiter.settle(&ended, within(OP_TIMEOUT_MS)).await.unwrap();
    cluster.members[2].thaw();
    eventually("all are settled", async || {
        let held = [
            used(&limiter, &slots(&orgs[0])).await.ok()?[0],
            used(&limiter, &slots(&orgs[2])).await.ok()?[0],
        ];
        (held == [0, 0]).then_some(())
    })
    .await;
    // Where nobody can be reached nothing is taken over, and that is said.
    cluster.members.iter().for_each(Store::freeze);
    assert!(limiter.cancel(&alone, within(OP_TIMEOUT_MS)).await.is_err());
    assert!(limiter.settle(&ended, within(OP_TIMEOUT_MS)).await.is_err());
    assert!(limiter.renew(&alone, SLOT_TTL, within(OP_TIMEOUT_MS)).await.is_err());
    cluster.members.iter().for_each(Store::thaw);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_of_what_was_never_charged_holds_up_no_batch_while_a_member_is_lost() {
    let mut cluster = Cluster::of_three().await;
    let service = service_over(&cluster).await;
    let (owner, lost) = (owner_on(&cluster, 0).await, owner_on(&cluster, 2).await);
    eventually("counted", async || {
        (decide(&service, &lost, 1_000).await["verdict"] == "admit").then_some(())
    })
    .await;
    cluster.members[2].kill();
    eventually("the loss shows", async || {
        (decide(&service, &lost, 1_000).await["verdict"] == "unavailable").then_some(())
    })
    .await;
    let mut streams = Vec::new();
    for _ in 0..2 {
        let body = request(json!({
            "gates": [{"gate": "contract", "when_unavailable": "reject", "limits": "envelope"}],
            "subject": {"owner": owner}, "limits": {"owner": {"concurrency": 10}}, "budget_ms": BUDGET_MS,
        }));
        let verdict = service.post("/v1/decide", &body).await.json();
        assert_eq!(verdict["verdict"], "admit", "{verdict}");
        streams.push(body["op"].as_str().unwrap().to_owned());
    }
    let key = format!("portcullis:{{owner:{owner}}}:concurrency");
    let slots = async || {
        let slots = cluster.members[0].run(&["ZRANGE", &key, "0", "-1", "WITHSCORES"]).await;
        redis::from_redis_value::<Vec<(String, f64)>>(slots).unwrap()
    };
    let before = slots().await;
    assert_eq!(before.len(), 2, "{before:?}");
    // Slots are counted in milliseconds.
    sleep(Duration::from_millis(20)).await;
    // One of the homes of any operation is on the lost member.
    let unknown = id(7).to_string();
    let batch = json!({
        "profile": "development", "cancels": [unknown], "releases": [streams[0]], "renewals": [streams[1]]
    });
    let answer = service.post("/v1/settle", &batch).await;
    assert_eq!((answer.status, answer.body.as_str()), (200, "{}"), "{answer:?}");
    let after = slots().await;
    let [(holder, expires)] = after.as_slice() else {
        panic!("one was released: {after:?}")
    };
    assert!(holder.starts_with(&streams[1]), "{after:?}");
    assert!(
        before.iter().any(|(of, at)| of == holder && at < expires),
        "{before:?}, {after:?}"
    );
    // The member hears of the cancel once it is back, without anybody asking again.
    cluster.members[2].restart().await;
    eventually("it is told", async || {
        let keys: Vec<String> = cluster.members[2].keys().await;
        let home = keys.into_iter().find(|key| key.ends_with(&format!(":op:{unknown}")))?;
        let said: String = redis::from_redis_value(cluster.members[2].run(&["GET", &home]).await).unwrap();
        said.starts_with("cancelled ").then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_that_wants_all_its_parts_or_none_is_unavailable_as_a_whole_and_says_so() {
    let mut cluster = Cluster::start(3, false, &["--cluster-require-full-coverage", "yes"]).await;
    let service = service_over(&cluster).await;
    let owner = owner_on(&cluster, 0).await;
    cluster.members[2].kill();
    eventually("the cluster stops", async || {
        (decide(&service, &owner, 1_000).await["verdict"] == "unavailable").then_some(())
    })
    .await;
    eventually("not ready", async || {
        (service.get("/ready").await.status == 503).then_some(())
    })
    .await;
    cluster.members[2].restart().await;
    eventually("it counts again by itself", async || {
        (decide(&service, &owner, 1_000).await["verdict"] == "admit").then_some(())
    })
    .await;
}
