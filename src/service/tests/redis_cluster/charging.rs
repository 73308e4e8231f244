//! Charges over several members: never over a limit, and nothing left behind by a denial.

use std::sync::Arc;

use portcullis_decision::charge::{BlockAsk, ChargeEntry, ChargePlan, Charged};
use portcullis_decision::ledger::Settled;
use portcullis_decision::limits::Resource;
use portcullis_decision::wire::Return;
use portcullis_service::limiter::Limiter;
use tokio::task::JoinSet;

use crate::scene::{SLOT_TTL, cancelled, connected, entry, id, orgs, plan, requests, used, within};
use crate::stores::cluster::{Cluster, fresh_prefix, shared};
use crate::stores::{eventually, open_under};

const TIMEOUT_MS: u64 = 5_000;

/// Two processes over one cluster, and an org on each of its members.
struct Pair {
    cluster: &'static Cluster,
    prefix: String,
    limiters: [Arc<dyn Limiter>; 2],
    orgs: [String; 3],
}

impl Pair {
    async fn start() -> Self {
        let (cluster, prefix) = (shared().await, fresh_prefix());
        let limiters = [(); 2].map(|()| open_under(&cluster.url(), TIMEOUT_MS, &prefix));
        let orgs = orgs(cluster).await;
        for limiter in &limiters {
            connected(limiter, &orgs).await;
        }
        Self {
            cluster,
            prefix,
            limiters,
            orgs,
        }
    }

    /// Charges all at the same time, in turn by each of the two.
    async fn together(&self, plans: Vec<ChargePlan>) -> Vec<Charged> {
        let mut calls = JoinSet::new();
        for (at, plan) in plans.into_iter().enumerate() {
            let limiter = Arc::clone(&self.limiters[at % 2]);
            calls.spawn(async move { limiter.charge(&plan, SLOT_TTL, within(TIMEOUT_MS)).await.unwrap() });
        }
        calls.join_all().await
    }

    async fn used(&self, entries: &[ChargeEntry]) -> Vec<u64> {
        used(&self.limiters[0], entries).await.unwrap()
    }

    /// Directories of attempts that were denied after something had been charged.
    async fn denied_attempts(&self) -> usize {
        let mut denied = 0;
        for member in &self.cluster.members {
            let ours = format!("{}:{{[0-9]*}}:op:*", self.prefix);
            let keys: Vec<String> = redis::from_redis_value(member.run(&["KEYS", &ours]).await).unwrap();
            for key in keys {
                let text: Option<String> = redis::from_redis_value(member.run(&["GET", &key]).await).unwrap();
                denied += usize::from(text.is_some_and(|text| text.starts_with("denied ")));
            }
        }
        denied
    }
}

fn granted(answers: &[Charged]) -> usize {
    answers
        .iter()
        .filter(|charged| matches!(charged, Charged::Granted(_)))
        .count()
}

#[tokio::test]
async fn concurrent_charges_over_members_admit_exactly_the_limit_and_denials_leave_nothing() {
    let pair = Pair::start().await;
    let [a, b, c] = &pair.orgs;
    // The scarce one is charged last, so that denials have something to give back.
    let all = [
        requests(a, 1_000),
        entry(a, Resource::Concurrency, 1_000, 1),
        entry(b, Resource::Tokens, 100_000, 30),
        requests(c, 17),
    ];
    let answers = pair.together((0..80).map(|op| plan(op, &all)).collect()).await;
    assert_eq!(granted(&answers), 17);
    eventually("denials give back", async || {
        (pair.used(&all).await == [17, 17, 17 * 30, 17]).then_some(())
    })
    .await;
    assert!(
        pair.denied_attempts().await > 0,
        "nothing had to be given back: this shows nothing"
    );
    for op in 0..80 {
        pair.limiters[1].cancel(&[id(op)], within(TIMEOUT_MS)).await.unwrap();
    }
    assert_eq!(pair.used(&all).await, [0, 0, 0, 0]);
}

#[tokio::test]
async fn a_scarce_first_group_is_exact_as_well() {
    let pair = Pair::start().await;
    let [a, b, c] = &pair.orgs;
    let all = [requests(c, 17), requests(b, 1_000), requests(a, 1_000)];
    let answers = pair.together((0..60).map(|op| plan(op, &all)).collect()).await;
    assert_eq!(granted(&answers), 17);
    assert_eq!(pair.used(&all).await, [17, 17, 17]);
}

#[tokio::test]
async fn one_operation_over_members_counts_once_whoever_charges_it() {
    let pair = Pair::start().await;
    let [a, b, c] = &pair.orgs;
    let all = [requests(a, 5), entry(b, Resource::Concurrency, 1, 1), requests(c, 5)];
    let answers = pair.together((0..50).map(|_| plan(1, &all)).collect()).await;
    assert_eq!(granted(&answers), 50, "{answers:?}");
    assert_eq!(pair.used(&all).await, [1, 1, 1]);
}

#[tokio::test]
async fn retries_that_meet_denials_never_admit_more_operations_than_the_limit() {
    let pair = Pair::start().await;
    let [a, b, c] = &pair.orgs;
    let all = [requests(a, 1_000), requests(b, 12), requests(c, 12)];
    let mut calls = JoinSet::new();
    for turn in 0..3 {
        for op in 0..40_u32 {
            let limiter = Arc::clone(&pair.limiters[(turn + op as usize) % 2]);
            let plan = plan(op, &all);
            calls.spawn(async move { (op, limiter.charge(&plan, SLOT_TTL, within(TIMEOUT_MS)).await.unwrap()) });
        }
    }
    let mut admitted: Vec<u32> = calls
        .join_all()
        .await
        .into_iter()
        .filter_map(|(op, charged)| matches!(charged, Charged::Granted(_)).then_some(op))
        .collect();
    admitted.sort_unstable();
    admitted.dedup();
    assert!(admitted.len() <= 12, "{} operations were admitted", admitted.len());
    let counted = u64::try_from(admitted.len()).unwrap();
    eventually("what is charged is what was admitted", async || {
        (pair.used(&all).await == [counted; 3]).then_some(())
    })
    .await;
    for op in 0..40 {
        cancelled(&pair.limiters[0], op).await;
    }
    assert_eq!(pair.used(&all).await, [0, 0, 0]);
}

fn block(op: u32, entries: &[ChargeEntry]) -> ChargePlan {
    let (most, parts, ahead) = (256, 8, false);
    ChargePlan {
        block: Some(BlockAsk { most, parts, ahead }),
        ..plan(op, entries)
    }
}

fn admissions(charged: &Charged) -> u64 {
    match charged {
        Charged::Block { admissions, .. } => *admissions,
        Charged::Denied(_) => 0,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_block_is_as_large_as_the_tightest_member_allows_and_charged_to_all() {
    let pair = Pair::start().await;
    let [a, b, c] = &pair.orgs;
    let all = [
        requests(a, 1_000),
        entry(b, Resource::Tokens, 10_000, 30),
        requests(c, 800),
    ];
    let first = pair.together(vec![block(1, &all)]).await;
    assert_eq!(admissions(&first[0]), 41);
    assert_eq!(pair.used(&all).await, [41, 1_230, 41]);
    // The same block again, by the other process.
    let again = pair.limiters[1]
        .charge(&block(1, &all), SLOT_TTL, within(TIMEOUT_MS))
        .await
        .unwrap();
    assert_eq!(admissions(&again), 41);
    let back = Return {
        id: id(900),
        lease: id(1),
        requests: 20,
        tokens: 500,
    };
    for limiter in [0, 1, 0] {
        pair.limiters[limiter]
            .give_back_parts(&[back], within(TIMEOUT_MS))
            .await
            .unwrap();
    }
    assert_eq!(
        pair.used(&all).await,
        [21, 730, 21],
        "a part goes back once, on every member"
    );
    pair.limiters[1].cancel(&[id(1)], within(TIMEOUT_MS)).await.unwrap();
    assert_eq!(pair.used(&all).await, [0, 0, 0]);
}

#[tokio::test]
async fn concurrent_blocks_over_members_never_exceed_the_limit_and_use_it_up() {
    let pair = Pair::start().await;
    let [a, b, c] = &pair.orgs;
    let all = [requests(a, 10_000), requests(b, 500), requests(c, 500)];
    let answers = pair.together((0..40).map(|op| block(op, &all)).collect()).await;
    let mut sum: u64 = answers.iter().map(admissions).sum();
    assert!(sum <= 500, "{sum}");
    assert!(
        answers.iter().any(|charged| admissions(charged) >= 8),
        "no block: {answers:?}"
    );
    eventually("what is charged is what was admitted", async || {
        (pair.used(&all).await == [sum; 3]).then_some(())
    })
    .await;
    for op in 100..700 {
        let charged = pair.limiters[0]
            .charge(&block(op, &all), SLOT_TTL, within(TIMEOUT_MS))
            .await;
        match admissions(&charged.unwrap()) {
            0 => break,
            some => sum += some,
        }
    }
    assert_eq!(sum, 500);
    assert_eq!(pair.used(&all).await, [500; 3]);
}

#[tokio::test]
async fn another_process_settles_renews_and_cancels_what_one_has_charged() {
    let pair = Pair::start().await;
    let [a, b, c] = &pair.orgs;
    let all = [
        entry(a, Resource::Concurrency, 5, 1),
        entry(b, Resource::Tokens, 1_000, 100),
        entry(c, Resource::Tokens, 1_000, 100),
    ];
    let answers = pair.together(vec![plan(1, &all)]).await;
    assert_eq!(granted(&answers), 1);
    let fresh = open_under(&pair.cluster.url(), TIMEOUT_MS, &pair.prefix);
    assert_eq!(
        fresh
            .renew(&[id(1), id(2)], SLOT_TTL, within(TIMEOUT_MS))
            .await
            .unwrap(),
        [id(2)]
    );
    let settled = [Settled {
        op: id(1),
        tokens: Some(7),
    }];
    for _ in 0..2 {
        fresh.settle(&settled, within(TIMEOUT_MS)).await.unwrap();
    }
    assert_eq!(pair.used(&all).await, [0, 7, 7]);
    fresh.cancel(&[id(1), id(3)], within(TIMEOUT_MS)).await.unwrap();
    assert_eq!(pair.used(&all).await, [0, 0, 0]);
    for op in [1, 3] {
        let charged = pair.limiters[0]
            .charge(&plan(op, &all), SLOT_TTL, within(TIMEOUT_MS))
            .await;
        assert_eq!(charged.unwrap(), Charged::Cancelled, "operation {op}");
    }
    assert_eq!(pair.used(&all).await, [0, 0, 0]);
}

#[tokio::test]
async fn every_key_has_a_time_to_live_and_a_tag() {
    let pair = Pair::start().await;
    let [a, b, c] = &pair.orgs;
    let all = [
        requests(a, 9),
        entry(b, Resource::Concurrency, 9, 1),
        entry(c, Resource::Tokens, 900, 90),
    ];
    let plans = (0..12).map(|op| plan(op, &all)).chain([plan(20, &all[..1])]).collect();
    pair.together(plans).await;
    pair.limiters[0]
        .cancel(&[id(0), id(77)], within(TIMEOUT_MS))
        .await
        .unwrap();
    pair.limiters[0]
        .renew(&[id(1)], SLOT_TTL, within(TIMEOUT_MS))
        .await
        .unwrap();
    let settled = [Settled {
        op: id(2),
        tokens: Some(1),
    }];
    pair.limiters[0].settle(&settled, within(TIMEOUT_MS)).await.unwrap();
    let mut seen = 0;
    for member in &pair.cluster.members {
        let ours = format!("{}:*", pair.prefix);
        let keys: Vec<String> = redis::from_redis_value(member.run(&["KEYS", &ours]).await).unwrap();
        for key in keys {
            let ttl = member.number(&["PTTL", &key]).await;
            assert!(ttl == -2 || (1..=150_000).contains(&ttl), "{key} lives for {ttl} ms");
            assert!(key.contains('{') && key.contains('}'), "{key} has no tag");
            seen += 1;
        }
    }
    assert!(seen > 30, "only {seen} keys");
}
