//! The limiter and its connections: nothing waits longer than its deadline, nothing piles up, nobody else pays.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use portcullis_decision::charge::Charged;
use portcullis_service::limiter::StoreFault;
use redis::Value;
use tokio::time::{Instant, sleep};

use crate::counting::{COUNTER, SLOT_TTL, connected, id, one, within};
use crate::proxy::Proxy;
use crate::stores::{Store, eventually, free_port, open};

/// As long as a good connection has to live for its loss to be nothing remarkable.
const STEADY: Duration = Duration::from_millis(600);

#[tokio::test]
async fn a_store_that_was_flushed_cut_off_or_restarted_costs_nobody_an_answer() {
    let mut store = Store::redis().await;
    let limiter = open(&store.url(), 2_000);
    connected(&limiter).await;
    for n in 0..3 {
        store.run(&["SCRIPT", "FLUSH"]).await;
        limiter.charge(&one(n, 10), SLOT_TTL, within(2_000)).await.unwrap();
        store.run(&["SCRIPT", "FLUSH"]).await;
        limiter.cancel(&[id(n), id(100), id(101)], within(2_000)).await.unwrap();
    }
    sleep(STEADY).await;
    store.run(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).await;
    limiter.charge(&one(10, 10), SLOT_TTL, within(2_000)).await.unwrap();
    sleep(STEADY).await;
    store.kill();
    store.restart().await;
    limiter.charge(&one(11, 10), SLOT_TTL, within(2_000)).await.unwrap();
    assert_eq!(
        store.number(&["GET", COUNTER]).await,
        1,
        "the restarted store is an empty one"
    );
}

#[tokio::test]
async fn a_frozen_store_ends_every_operation_by_its_deadline_and_the_next_ones_at_once() {
    let store = Store::redis().await;
    let limiter = open(&store.url(), 100);
    connected(&limiter).await;
    store.freeze();
    let start = Instant::now();
    let mut calls = tokio::task::JoinSet::new();
    for n in 0..3_000 {
        let limiter = Arc::clone(&limiter);
        calls.spawn(async move { limiter.charge(&one(n, 10_000), SLOT_TTL, within(100)).await });
    }
    let answers = calls.join_all().await;
    assert!(start.elapsed() < Duration::from_secs(6), "{:?}", start.elapsed());
    assert!(answers.iter().all(Result::is_err));
    assert!(answers.contains(&Err(StoreFault::Timeout)));
    let start = Instant::now();
    for n in 0..1_000 {
        let answer = limiter.charge(&one(n, 10_000), SLOT_TTL, within(100)).await;
        assert_eq!(answer, Err(StoreFault::CircuitOpen));
    }
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    assert_eq!(
        limiter.ping(within(100)).await,
        Err(StoreFault::Timeout),
        "not told why"
    );
    store.thaw();
    connected(&limiter).await;
}

#[tokio::test]
async fn a_caller_who_stops_waiting_first_still_lets_the_breaker_open() {
    let store = Store::redis().await;
    let limiter = open(&store.url(), 50);
    connected(&limiter).await;
    store.freeze();
    eventually("the breaker opens", async || {
        let (plan, until) = (one(1, 10), within(50));
        let answer = tokio::time::timeout_at(until, limiter.charge(&plan, SLOT_TTL, until)).await;
        matches!(answer, Ok(Err(StoreFault::CircuitOpen))).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_caller_without_time_says_nothing_about_the_store() {
    let store = Store::redis().await;
    let proxy = Proxy::start(store.port, "no mark".to_owned()).await;
    let limiter = open(&proxy.url(), 100);
    connected(&limiter).await;
    let before = proxy.mood.accepted.load(Ordering::SeqCst);
    proxy.mood.delay_ms.store(5, Ordering::SeqCst);
    for n in 0..50 {
        limiter.charge(&one(n, 1_000), SLOT_TTL, within(1)).await.ok();
    }
    let charged = limiter.charge(&one(100, 1_000), SLOT_TTL, within(1_000)).await;
    assert!(matches!(charged, Ok(Charged::Granted(_))), "{charged:?}");
    assert_eq!(
        proxy.mood.accepted.load(Ordering::SeqCst),
        before,
        "a good connection was given up"
    );
}

#[tokio::test]
async fn a_dead_store_costs_no_time() {
    let limiter = open(&format!("redis://127.0.0.1:{}", free_port()), 100);
    eventually("known to be dead", async || {
        (limiter.ping(within(100)).await == Err(StoreFault::Connection)).then_some(())
    })
    .await;
    let start = Instant::now();
    for n in 0..100 {
        assert_eq!(
            limiter.charge(&one(n, 10), SLOT_TTL, within(100)).await,
            Err(StoreFault::CircuitOpen)
        );
    }
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
}

#[tokio::test]
async fn connections_that_are_cut_under_load_cost_nobody_an_answer() {
    let store = Store::redis().await;
    let limiter = open(&store.url(), 2_000);
    connected(&limiter).await;
    sleep(STEADY).await;
    let mut calls = tokio::task::JoinSet::new();
    for worker in 0..20_u32 {
        let limiter = Arc::clone(&limiter);
        calls.spawn(async move {
            for n in 0..50 {
                let plan = one(worker * 1_000 + n, 100_000);
                limiter.charge(&plan, SLOT_TTL, within(2_000)).await.unwrap();
            }
        });
    }
    store.run(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).await;
    calls.join_all().await;
    assert_eq!(store.number(&["GET", COUNTER]).await, 1_000);
    assert!(store.sockets() <= 4, "{} sockets", store.sockets());
}

#[tokio::test]
async fn scripts_run_by_their_text_where_the_name_or_the_command_script_is_forbidden() {
    let store = Store::redis().await;
    for (user, rule) in [("noscript", "-script"), ("noname", "-evalsha")] {
        store
            .run(&["ACL", "SETUSER", user, "on", ">secret", "~portcullis:*", "+@all", rule])
            .await;
        let limiter = open(&format!("redis://{user}:secret@127.0.0.1:{}", store.port), 1_000);
        connected(&limiter).await;
        store.run(&["SCRIPT", "FLUSH"]).await;
        let before = calls(&store, "evalsha|rejected").await;
        for n in 0..10 {
            store.run(&["SCRIPT", "FLUSH"]).await;
            let charged = limiter.charge(&one(n, 1_000), SLOT_TTL, within(1_000)).await;
            assert!(matches!(charged, Ok(Charged::Granted(_))), "{user}: {charged:?}");
        }
        limiter
            .cancel(&(0..10).map(id).collect::<Vec<_>>(), within(1_000))
            .await
            .unwrap();
        let refused = calls(&store, "evalsha|rejected").await - before;
        assert!(
            refused <= 2,
            "{user}: asked {refused} times by a name that is forbidden"
        );
        assert_eq!(store.number(&["GET", COUNTER]).await, 0);
        store.run(&["FLUSHALL"]).await;
    }
}

/// Rejected calls of EVALSHA, as the server counts them.
async fn calls(store: &Store, _: &str) -> i64 {
    let Value::BulkString(text) = store.run(&["INFO", "commandstats"]).await else {
        panic!("no text")
    };
    let text = String::from_utf8(text).unwrap();
    let line = text.lines().find(|line| line.starts_with("cmdstat_evalsha:"));
    let rejected = line.and_then(|line| line.split("rejected_calls=").nth(1)?.split(',').next()?.parse().ok());
    rejected.unwrap_or(0)
}

#[tokio::test]
async fn a_limiter_that_is_dropped_leaves_no_connection_behind() {
    let store = Store::redis().await;
    let limiter = open(&store.url(), 1_000);
    connected(&limiter).await;
    assert!(store.sockets() >= 1);
    drop(limiter);
    eventually("disconnected", async || (store.sockets() == 0).then_some(())).await;
}
