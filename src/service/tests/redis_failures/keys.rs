//! What stands in the store: every key has a time to live, and what others put there does no harm.

use std::time::Duration;

use portcullis_decision::charge::{BlockAsk, ChargePlan, Charged};
use portcullis_decision::ledger::Settled;
use portcullis_decision::limits::Resource;
use portcullis_decision::wire::Return;
use portcullis_service::limiter::StoreFault;
use redis::Value;

use crate::counting::{COUNTER, SLOT_TTL, connected, entry, id, one, within};
use crate::stores::{Store, open};

const SLOTS: &str = "portcullis:{owner:o}:concurrency";
const TOKENS: &str = "portcullis:{owner:o}:tokens:60";

fn ended(n: u32, tokens: Option<u64>) -> Settled {
    Settled { op: id(n), tokens }
}

/// Forty of a hundred tokens.
fn hold(n: u32) -> ChargePlan {
    ChargePlan {
        op: id(n),
        entries: vec![entry(Resource::Tokens, 100, 40)],
        block: None,
    }
}

fn text(value: Value) -> String {
    redis::from_redis_value(value).unwrap()
}

async fn every_key_lives_for_a_time(store: &Store) {
    let keys = store.keys().await;
    assert!(!keys.is_empty());
    for key in keys {
        let left = store.number(&["PTTL", &key]).await;
        // A day's window is the longest that can be configured.
        assert!((1..=86_460_000).contains(&left), "{key} lives for {left} ms");
    }
}

#[tokio::test]
async fn every_key_has_a_time_to_live_after_every_operation() {
    let store = Store::redis().await;
    let limiter = open(&store.url(), 1_000);
    connected(&limiter).await;
    let entries = vec![
        entry(Resource::Requests, 100, 1),
        entry(Resource::Tokens, 100, 0),
        entry(Resource::Concurrency, 3, 1),
    ];
    for n in 0..6 {
        let plan = ChargePlan {
            op: id(n),
            entries: entries.clone(),
            block: None,
        };
        limiter.charge(&plan, SLOT_TTL, within(1_000)).await.unwrap();
        every_key_lives_for_a_time(&store).await;
    }
    limiter
        .renew(&[id(0), id(1), id(5)], Duration::from_secs(50), within(1_000))
        .await
        .unwrap();
    every_key_lives_for_a_time(&store).await;
    assert!(
        store.number(&["PTTL", SLOTS]).await > 30_000,
        "the set goes before its last slot"
    );
    limiter.settle(&[ended(1, Some(7))], within(1_000)).await.unwrap();
    every_key_lives_for_a_time(&store).await;
    limiter.settle(&[ended(1, None)], within(1_000)).await.unwrap();
    limiter.cancel(&[id(0), id(9)], within(1_000)).await.unwrap();
    every_key_lives_for_a_time(&store).await;
    assert_eq!(store.number(&["ZCARD", SLOTS]).await, 1);
    assert_eq!(store.number(&["GET", TOKENS]).await, 7);
}

#[tokio::test]
async fn a_settlement_moves_no_time_to_live() {
    let store = Store::redis().await;
    let limiter = open(&store.url(), 1_000);
    connected(&limiter).await;
    limiter.charge(&hold(1), SLOT_TTL, within(1_000)).await.unwrap();
    let record = format!("portcullis:op:{}", id(1));
    let mut ends = Vec::new();
    for tokens in [None, Some(5), Some(6)] {
        limiter.settle(&[ended(1, tokens)], within(1_000)).await.unwrap();
        ends.push([
            store.number(&["PEXPIRETIME", TOKENS]).await,
            store.number(&["PEXPIRETIME", &record]).await,
        ]);
    }
    assert!(
        ends.iter().all(|at| *at == ends[0] && at[0] > 0 && at[1] > at[0]),
        "{ends:?}"
    );
}

#[tokio::test]
async fn a_settlement_never_takes_a_counter_below_zero_whatever_was_done_to_it() {
    let store = Store::redis().await;
    let limiter = open(&store.url(), 1_000);
    connected(&limiter).await;
    for (n, (planted, tokens, expected)) in [("5", 0, 0), ("5", 10, 10), ("0", 3, 3), ("39", 41, 41)]
        .iter()
        .enumerate()
    {
        let n = u32::try_from(n).unwrap();
        store.run(&["DEL", TOKENS]).await;
        limiter.charge(&hold(n), SLOT_TTL, within(1_000)).await.unwrap();
        store.run(&["SET", TOKENS, planted, "KEEPTTL"]).await;
        limiter.settle(&[ended(n, Some(*tokens))], within(1_000)).await.unwrap();
        assert_eq!(
            store.number(&["GET", TOKENS]).await,
            *expected,
            "{planted} settled with {tokens}"
        );
        limiter.cancel(&[id(n)], within(1_000)).await.unwrap();
        assert_eq!(
            store.number(&["GET", TOKENS]).await,
            0,
            "{planted} settled with {tokens}"
        );
    }
    // What is no count is nobody's share, and is left for whoever put it there.
    store.run(&["DEL", TOKENS]).await;
    limiter.charge(&hold(9), SLOT_TTL, within(1_000)).await.unwrap();
    store.run(&["SET", TOKENS, "many", "KEEPTTL"]).await;
    limiter.settle(&[ended(9, Some(1))], within(1_000)).await.unwrap();
    assert_eq!(text(store.run(&["GET", TOKENS]).await), "many");
}

#[tokio::test]
async fn a_settlement_that_fails_halfway_is_made_as_a_whole_when_it_is_asked_again() {
    let store = Store::redis().await;
    let limiter = open(&store.url(), 1_000);
    connected(&limiter).await;
    let plan = ChargePlan {
        op: id(1),
        entries: vec![entry(Resource::Tokens, 100, 40), entry(Resource::Concurrency, 3, 1)],
        block: None,
    };
    limiter.charge(&plan, SLOT_TTL, within(1_000)).await.unwrap();
    store.run(&["SET", SLOTS, "something else"]).await;
    for _ in 0..2 {
        let answer = limiter.settle(&[ended(1, Some(10))], within(1_000)).await;
        assert_eq!(answer, Err(StoreFault::NotSensible));
        assert_eq!(store.number(&["GET", TOKENS]).await, 40);
    }
    store.run(&["DEL", SLOTS]).await;
    limiter.settle(&[ended(1, Some(10))], within(1_000)).await.unwrap();
    assert_eq!(store.number(&["GET", TOKENS]).await, 10);
}

/// Ten requests of ten tokens each, and one that waits.
fn block(n: u32) -> ChargePlan {
    let (most, parts, ahead) = (11, 1, false);
    ChargePlan {
        op: id(n),
        entries: vec![entry(Resource::Requests, 100, 1), entry(Resource::Tokens, 1_000, 10)],
        block: Some(BlockAsk { most, parts, ahead }),
    }
}

fn part(n: u32, lease: u32, requests: u64, tokens: i64) -> Return {
    Return {
        id: id(n),
        lease: id(lease),
        requests,
        tokens,
    }
}

#[tokio::test]
async fn a_block_and_its_returns_move_no_window_and_all_their_keys_live_for_a_time() {
    let store = Store::redis().await;
    let limiter = open(&store.url(), 1_000);
    connected(&limiter).await;
    limiter.charge(&block(1), SLOT_TTL, within(1_000)).await.unwrap();
    let record = format!("portcullis:op:{}", id(1));
    let ends = async || {
        let mut ends = Vec::new();
        for key in [COUNTER, TOKENS, &record] {
            ends.push(store.number(&["PEXPIRETIME", key]).await);
        }
        ends
    };
    let before = ends().await;
    limiter
        .give_back_parts(&[part(50, 1, 4, 40), part(51, 1, 0, -3)], within(1_000))
        .await
        .unwrap();
    limiter.settle(&[ended(1, Some(3))], within(1_000)).await.unwrap();
    assert_eq!(ends().await, before);
    every_key_lives_for_a_time(&store).await;
    let marker = format!("portcullis:op:{}", id(50));
    assert!(
        store.number(&["PEXPIRETIME", &marker]).await >= before[2] + 60_000,
        "a return could be made twice"
    );
    assert_eq!(store.number(&["GET", COUNTER]).await, 7);
    assert_eq!(store.number(&["GET", TOKENS]).await, 3 + 60 + 3);
}

#[tokio::test]
async fn a_return_never_takes_a_counter_below_zero_whatever_was_done_to_it() {
    let store = Store::redis().await;
    let limiter = open(&store.url(), 1_000);
    connected(&limiter).await;
    limiter.charge(&block(1), SLOT_TTL, within(1_000)).await.unwrap();
    store.run(&["SET", COUNTER, "3", "KEEPTTL"]).await;
    store.run(&["SET", TOKENS, "many", "KEEPTTL"]).await;
    for _ in 0..2 {
        limiter
            .give_back_parts(&[part(50, 1, 5, 50)], within(1_000))
            .await
            .unwrap();
        assert_eq!(store.number(&["GET", COUNTER]).await, 0);
        // What is no count is left for whoever put it there.
        assert_eq!(text(store.run(&["GET", TOKENS]).await), "many");
    }
    store.run(&["DEL", COUNTER, TOKENS]).await;
    limiter
        .give_back_parts(&[part(51, 1, 5, -50)], within(1_000))
        .await
        .unwrap();
    assert_eq!(store.number(&["EXISTS", COUNTER, TOKENS]).await, 0);
}

#[tokio::test]
async fn a_return_that_fails_is_made_as_a_whole_when_it_is_asked_again() {
    let store = Store::redis().await;
    let limiter = open(&store.url(), 1_000);
    connected(&limiter).await;
    limiter.charge(&block(1), SLOT_TTL, within(1_000)).await.unwrap();
    store.run(&["RENAME", TOKENS, "aside"]).await;
    store.run(&["LPUSH", TOKENS, "x"]).await;
    let ends = store.number(&["PEXPIRETIME", "aside"]).await.to_string();
    store.run(&["PEXPIREAT", TOKENS, &ends]).await;
    for _ in 0..2 {
        let answer = limiter.give_back_parts(&[part(50, 1, 5, 50)], within(1_000)).await;
        assert_eq!(answer, Err(StoreFault::NotSensible));
        assert_eq!(store.number(&["GET", COUNTER]).await, 11);
    }
    store.run(&["RENAME", "aside", TOKENS]).await;
    for _ in 0..2 {
        limiter
            .give_back_parts(&[part(50, 1, 5, 50)], within(1_000))
            .await
            .unwrap();
        assert_eq!(store.number(&["GET", COUNTER]).await, 6);
        assert_eq!(store.number(&["GET", TOKENS]).await, 60);
    }
}

/// Versions that knew no blocks begin every record alike when they write one.
#[tokio::test]
async fn a_record_that_an_older_version_has_settled_is_returned_and_cancelled_as_ever() {
    let store = Store::redis().await;
    let limiter = open(&store.url(), 1_000);
    connected(&limiter).await;
    limiter.charge(&block(1), SLOT_TTL, within(1_000)).await.unwrap();
    let record = format!("portcullis:op:{}", id(1));
    let new = text(store.run(&["GET", &record]).await);
    let old = new.replace("charged:11\n", "charged\n");
    assert_ne!(old, new);
    store.run(&["SET", &record, &old, "KEEPTTL"]).await;
    let again = limiter.charge(&block(1), SLOT_TTL, within(1_000)).await;
    assert!(
        matches!(again, Ok(Charged::Block { admissions: 1, .. })),
        "no more than is known: {again:?}"
    );
    limiter
        .give_back_parts(&[part(50, 1, 4, 40)], within(1_000))
        .await
        .unwrap();
    assert_eq!(store.number(&["GET", COUNTER]).await, 7);
    limiter.cancel(&[id(1)], within(1_000)).await.unwrap();
    for counter in [TOKENS, COUNTER] {
        assert_eq!(store.number(&["GET", counter]).await, 0);
    }
}

/// Versions that knew no settlement wrote every window as `w`.
#[tokio::test]
async fn a_record_of_an_older_version_frees_its_slots_keeps_its_hold_and_is_cancelled_as_ever() {
    let store = Store::redis().await;
    let limiter = open(&store.url(), 1_000);
    connected(&limiter).await;
    let plan = ChargePlan {
        op: id(1),
        entries: vec![
            entry(Resource::Requests, 100, 1),
            entry(Resource::Tokens, 100, 40),
            entry(Resource::Concurrency, 3, 1),
        ],
        block: None,
    };
    limiter.charge(&plan, SLOT_TTL, within(1_000)).await.unwrap();
    let record = format!("portcullis:op:{}", id(1));
    let new = text(store.run(&["GET", &record]).await);
    let old = new.replace("\nt ", "\nw ");
    assert_ne!(old, new);
    store.run(&["SET", &record, &old, "KEEPTTL"]).await;
    assert!(
        limiter
            .renew(&[id(1)], SLOT_TTL, within(1_000))
            .await
            .unwrap()
            .is_empty()
    );
    limiter.settle(&[ended(1, Some(5))], within(1_000)).await.unwrap();
    assert_eq!(store.number(&["ZCARD", SLOTS]).await, 0);
    assert_eq!(store.number(&["GET", TOKENS]).await, 40);
    limiter.cancel(&[id(1)], within(1_000)).await.unwrap();
    for counter in [TOKENS, COUNTER] {
        assert_eq!(store.number(&["GET", counter]).await, 0);
    }
}

#[tokio::test]
async fn a_planted_key_without_a_time_to_live_is_repaired_also_by_a_denial() {
    let store = Store::redis().await;
    let limiter = open(&store.url(), 1_000);
    connected(&limiter).await;
    store.run(&["SET", COUNTER, "5"]).await;
    let Ok(Charged::Granted(states)) = limiter.charge(&one(1, 10), SLOT_TTL, within(1_000)).await else {
        panic!("not granted")
    };
    assert_eq!(states[0].used, 6);
    assert!((1..=60_000).contains(&store.number(&["PTTL", COUNTER]).await));

    store.run(&["SET", COUNTER, "99999999999999999999"]).await;
    let Ok(Charged::Denied(states)) = limiter.charge(&one(2, 10), SLOT_TTL, within(1_000)).await else {
        panic!("not denied")
    };
    assert_eq!(states[0].reset_ms, 60_000);
    assert!((1..=60_000).contains(&store.number(&["PTTL", COUNTER]).await));

    store.run(&["ZADD", SLOTS, "99999999999999", "somebody"]).await;
    let plan = ChargePlan {
        op: id(3),
        entries: vec![entry(Resource::Concurrency, 1, 1)],
        block: None,
    };
    assert!(matches!(
        limiter.charge(&plan, SLOT_TTL, within(1_000)).await,
        Ok(Charged::Denied(_))
    ));
    assert!((1..=30_000).contains(&store.number(&["PTTL", SLOTS]).await));
}

#[tokio::test]
async fn a_key_that_holds_something_else_is_unavailability_charges_nothing_and_hurts_nobody_else() {
    let store = Store::redis().await;
    let limiter = open(&store.url(), 1_000);
    connected(&limiter).await;
    let both = |n| ChargePlan {
        op: id(n),
        entries: vec![entry(Resource::Tokens, 100, 1), entry(Resource::Requests, 100, 1)],
        block: None,
    };
    let tokens = |n| ChargePlan {
        op: id(n),
        entries: vec![entry(Resource::Tokens, 100, 1)],
        block: None,
    };
    for (n, plant) in [
        ["LPUSH", COUNTER, "x"],
        ["SET", COUNTER, "many"],
        ["SET", COUNTER, "-5"],
        ["SET", COUNTER, "5.5"],
        ["SET", COUNTER, "1e3"],
        ["SET", COUNTER, ""],
    ]
    .iter()
    .enumerate()
    {
        let n = u32::try_from(n).unwrap() * 10;
        store.run(&["DEL", COUNTER]).await;
        store.run(plant).await;
        let answer = limiter.charge(&both(n), SLOT_TTL, within(1_000)).await;
        assert_eq!(answer, Err(StoreFault::NotSensible), "{plant:?}");
        let Ok(Charged::Granted(states)) = limiter.charge(&tokens(n + 1), SLOT_TTL, within(1_000)).await else {
            panic!("somebody else's key was in the way of another")
        };
        assert_eq!(
            states[0].used,
            u64::from(n / 10) + 1,
            "{plant:?} charged the other entry"
        );
    }
}

#[tokio::test]
async fn keys_start_with_the_configured_prefix_and_stay_apart_by_it() {
    let store = Store::redis().await;
    let limiter = open(&store.url(), 1_000);
    connected(&limiter).await;
    limiter.charge(&one(1, 10), SLOT_TTL, within(1_000)).await.unwrap();
    limiter.cancel(&[id(2)], within(1_000)).await.unwrap();
    let mut keys = store.keys().await;
    keys.sort();
    let mut expected = [
        COUNTER.to_owned(),
        format!("portcullis:op:{}", id(1)),
        format!("portcullis:op:{}", id(2)),
        format!("portcullis:op:{}", id(u32::MAX)),
        "portcullis:ping".to_owned(),
    ];
    expected.sort();
    assert_eq!(keys, expected);
}
