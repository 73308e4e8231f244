//! Nothing is counted twice and nothing over a limit: replies that get lost, two processes, concurrent gateways.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use portcullis_decision::charge::{ChargeEntry, ChargePlan, Charged, key};
use portcullis_decision::ledger::Settled;
use portcullis_decision::limits::{Resource, Scope};
use portcullis_decision::operation::OperationId;
use portcullis_decision::rules::Gate;
use portcullis_service::limiter::{Limiter, StoreFault};
use serde_json::json;
use tokio::time::Instant;

use crate::outages::service_at;
use crate::proxy::Proxy;
use crate::stores::{Store, eventually, open};
use crate::wire::request;

pub(crate) const SLOT_TTL: Duration = Duration::from_secs(30);
pub(crate) const COUNTER: &str = "portcullis:{owner:o}:requests:60";

pub(crate) fn id(n: u32) -> OperationId {
    OperationId::from_random((0xabcd_0000_u128 + u128::from(n)).to_be_bytes())
}

pub(crate) fn entry(resource: Resource, limit: u64, cost: u64) -> ChargeEntry {
    let mut key = key(Scope::Owner, resource, &["o"]);
    if resource != Resource::Concurrency {
        key.push_str(":60");
    }
    ChargeEntry {
        gate: Gate::Contract,
        scope: Scope::Owner,
        resource,
        key,
        limit,
        cost,
        window_s: 60,
    }
}

pub(crate) fn one(n: u32, limit: u64) -> ChargePlan {
    ChargePlan {
        op: id(n),
        entries: vec![entry(Resource::Requests, limit, 1)],
        block: None,
    }
}

pub(crate) fn within(ms: u64) -> Instant {
    Instant::now() + Duration::from_millis(ms)
}

/// Waits until the limiter is connected, and the store knows its scripts.
pub(crate) async fn connected(limiter: &Arc<dyn Limiter>) {
    eventually("connected", async || limiter.ping(within(500)).await.ok()).await;
    let nothing = ChargePlan {
        op: id(u32::MAX),
        entries: Vec::new(),
        block: None,
    };
    limiter.charge(&nothing, SLOT_TTL, within(1_000)).await.unwrap();
}

#[tokio::test]
async fn a_reply_lost_with_its_connection_is_asked_again_and_counted_once() {
    let store = Store::redis().await;
    let proxy = Proxy::start(store.port, id(1).to_string()).await;
    let limiter = open(&proxy.url(), 1_000);
    connected(&limiter).await;
    proxy.mood.cut_next_reply.store(true, Ordering::SeqCst);
    let charged = limiter.charge(&one(1, 10), SLOT_TTL, within(1_000)).await.unwrap();
    assert!(
        !proxy.mood.cut_next_reply.load(Ordering::SeqCst),
        "the reply was not lost"
    );
    assert!(matches!(charged, Charged::Granted(_)), "{charged:?}");
    assert_eq!(store.number(&["GET", COUNTER]).await, 1);
}

#[tokio::test]
async fn a_settlement_whose_reply_was_lost_is_asked_again_and_made_once() {
    let store = Store::redis().await;
    let proxy = Proxy::start(store.port, id(1).to_string()).await;
    let limiter = open(&proxy.url(), 1_000);
    connected(&limiter).await;
    let tokens = |n, cost| ChargePlan {
        op: id(n),
        entries: vec![entry(Resource::Tokens, 100, cost)],
        block: None,
    };
    for n in [1, 2] {
        limiter.charge(&tokens(n, 40), SLOT_TTL, within(1_000)).await.unwrap();
    }
    proxy.mood.cut_next_reply.store(true, Ordering::SeqCst);
    let settled = Settled {
        op: id(1),
        tokens: Some(15),
    };
    limiter.settle(&[settled], within(1_000)).await.unwrap();
    assert!(
        !proxy.mood.cut_next_reply.load(Ordering::SeqCst),
        "the reply was not lost"
    );
    assert_eq!(store.number(&["GET", "portcullis:{owner:o}:tokens:60"]).await, 55);
}

#[tokio::test]
async fn a_reply_that_never_comes_is_a_timeout_counted_once_and_given_back() {
    let store = Store::redis().await;
    let proxy = Proxy::start(store.port, id(1).to_string()).await;
    let limiter = open(&proxy.url(), 150);
    connected(&limiter).await;
    proxy.mood.swallow_next_reply.store(true, Ordering::SeqCst);
    let start = Instant::now();
    let fault = limiter.charge(&one(1, 10), SLOT_TTL, within(150)).await.unwrap_err();
    assert_eq!(fault, StoreFault::Timeout);
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    assert_eq!(store.number(&["GET", COUNTER]).await, 1);
    // From here on every reply of that connection answers an earlier question: none may be taken for another's.
    let mut refunded = false;
    for n in 2..12 {
        refunded |= limiter.cancel(&[id(1)], within(150)).await.is_ok();
        if let Ok(charged) = limiter.charge(&one(n, 10), SLOT_TTL, within(150)).await {
            assert!(matches!(charged, Charged::Granted(_)), "{charged:?}");
        }
        limiter.cancel(&[id(n)], within(150)).await.ok();
    }
    assert!(refunded, "the limiter never recovered");
    for n in 1..12 {
        eventually("cancelled", async || limiter.cancel(&[id(n)], within(150)).await.ok()).await;
    }
    assert_eq!(store.number(&["GET", COUNTER]).await, 0);
}

#[tokio::test]
async fn a_gateway_that_lost_a_reply_is_answered_and_the_counter_moves_by_one() {
    let store = Store::redis().await;
    let op = format!("{:032x}", 0xc0ffee);
    let proxy = Proxy::start(store.port, op.clone()).await;
    let service = service_at(&proxy.url()).await;
    proxy.mood.cut_next_reply.store(true, Ordering::SeqCst);
    let body = request(json!({
        "op": op, "gates": [{"gate": "contract", "when_unavailable": "reject", "limits": "envelope"}],
        "subject": {"owner": "o2"}, "limits": {"owner": {"requests": 5}}, "budget_ms": 220,
    }));
    let answer = service.post("/v1/decide", &body).await.json();
    assert_eq!(answer["verdict"], "admit", "{answer}");
    assert_eq!(store.number(&["GET", "portcullis:{owner:o2}:requests:60"]).await, 1);
    // The filter's own retry of the same decision.
    let answer = service.post("/v1/decide", &body).await.json();
    assert_eq!(answer["verdict"], "admit", "{answer}");
    assert_eq!(store.number(&["GET", "portcullis:{owner:o2}:requests:60"]).await, 1);
}

#[tokio::test]
async fn two_services_in_turn_admit_thirty_of_a_hundred() {
    // That their clocks may differ shows in the scripts' arguments: no time of a process is among them.
    let store = Store::redis().await;
    let limiters = [open(&store.url(), 1_000), open(&store.url(), 1_000)];
    for limiter in &limiters {
        connected(limiter).await;
    }
    let mut admitted = 0;
    for (n, limiter) in (0..100).zip(limiters.iter().cycle()) {
        match limiter.charge(&one(n, 30), SLOT_TTL, within(1_000)).await.unwrap() {
            Charged::Granted(_) => admitted += 1,
            Charged::Denied(states) => assert!((1..=60_000).contains(&states[0].reset_ms), "{states:?}"),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(admitted, 30);
}

#[tokio::test]
async fn two_services_at_once_admit_exactly_the_limit() {
    let store = Store::redis().await;
    let limiters = [open(&store.url(), 2_000), open(&store.url(), 2_000)];
    for limiter in &limiters {
        connected(limiter).await;
    }
    let mut calls = tokio::task::JoinSet::new();
    for (n, limiter) in (0..200).zip(limiters.iter().cycle()) {
        let limiter = Arc::clone(limiter);
        calls.spawn(async move { limiter.charge(&one(n, 30), SLOT_TTL, within(2_000)).await.unwrap() });
    }
    let admitted = calls
        .join_all()
        .await
        .iter()
        .filter(|charged| matches!(charged, Charged::Granted(_)))
        .count();
    assert_eq!(admitted, 30);
}

#[tokio::test]
async fn a_replica_that_stayed_behind_is_unavailable_and_never_denies() {
    let store = Store::redis().await;
    let limiter = open(&store.url(), 1_000);
    connected(&limiter).await;
    assert!(matches!(
        limiter.charge(&one(1, 1), SLOT_TTL, within(1_000)).await,
        Ok(Charged::Granted(_))
    ));
    assert!(matches!(
        limiter.charge(&one(2, 1), SLOT_TTL, within(1_000)).await,
        Ok(Charged::Denied(_))
    ));
    store.run(&["REPLICAOF", "127.0.0.1", "1"]).await;
    assert_eq!(
        limiter.charge(&one(3, 1), SLOT_TTL, within(1_000)).await,
        Err(StoreFault::ReadOnly)
    );
    assert_eq!(limiter.ping(within(1_000)).await, Err(StoreFault::ReadOnly));
}
