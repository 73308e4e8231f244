//! Slots that move from one member to another while they are charged.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use portcullis_decision::charge::Charged;
use portcullis_decision::limits::Resource;
use portcullis_service::limiter::StoreFault;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::scene::{SLOT_TTL, cancelled, connected, entry, orgs, plan, requests, used, within};
use crate::stores::cluster::Cluster;
use crate::stores::{eventually, open};

const OP_TIMEOUT_MS: u64 = 400;
const LIMIT: u64 = 3_000;

/// Moves a slot as a resharding does: key by key, and with a pause in the middle.
async fn move_slot(cluster: &Cluster, slot: i64, from: usize, to: usize) {
    let (source, target) = (&cluster.members[from], &cluster.members[to]);
    let (slot, port) = (slot.to_string(), target.port.to_string());
    let (source_id, target_id) = (source.id().await, target.id().await);
    target
        .run(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &source_id])
        .await;
    source
        .run(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &target_id])
        .await;
    let mut is_first = true;
    loop {
        let keys = source.run(&["CLUSTER", "GETKEYSINSLOT", &slot, "20"]).await;
        let keys: Vec<String> = redis::from_redis_value(keys).unwrap();
        if keys.is_empty() {
            break;
        }
        let mut command = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"];
        command.extend(keys.iter().map(String::as_str));
        source.run(&command).await;
        if std::mem::take(&mut is_first) {
            // Long enough for charges that meet a slot in two halves.
            sleep(Duration::from_millis(40)).await;
        }
    }
    for member in [target, source].into_iter().chain(&cluster.members) {
        eventually("the slot has its owner", async || {
            member.try_run(&["CLUSTER", "SETSLOT", &slot, "NODE", &target_id]).await
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hot_slot_that_moves_to_and_fro_never_admits_too_many_and_loses_no_charge() {
    let cluster = Cluster::of_three().await;
    let orgs = orgs(&cluster).await;
    let limiter = open(&cluster.url(), OP_TIMEOUT_MS);
    connected(&limiter, &orgs).await;
    let [_, b, c] = &orgs;
    let all = [
        requests(b, LIMIT),
        entry(b, Resource::Tokens, 10 * LIMIT, 5),
        requests(c, 10 * LIMIT),
    ];
    let slot = cluster.slot(&all[0].key).await;

    let (is_over, next) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
    let (granted, refused) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let mut load = JoinSet::new();
    for _ in 0..8 {
        let (limiter, is_over, next) = (Arc::clone(&limiter), Arc::clone(&is_over), Arc::clone(&next));
        let (granted, refused, all) = (Arc::clone(&granted), Arc::clone(&refused), all.clone());
        load.spawn(async move {
            let mut doubtful = Vec::new();
            while !is_over.load(Ordering::SeqCst) && next.load(Ordering::SeqCst) < 2_500 {
                let op = next.fetch_add(1, Ordering::SeqCst);
                match limiter.charge(&plan(op, &all), SLOT_TTL, within(OP_TIMEOUT_MS)).await {
                    Ok(Charged::Granted(_)) => drop(granted.fetch_add(1, Ordering::SeqCst)),
                    // There is room for all of them, so a denial would be a lie.
                    Ok(other) => panic!("{other:?}"),
                    Err(fault) => {
                        assert!(
                            matches!(
                                fault,
                                StoreFault::Timeout | StoreFault::ClusterDown | StoreFault::Connection
                            ),
                            "{fault:?}"
                        );
                        refused.fetch_add(1, Ordering::SeqCst);
                        doubtful.push(op);
                    }
                }
                sleep(Duration::from_millis(1)).await;
            }
            doubtful
        });
    }
    let mut owners = (1, 0);
    for _ in 0..6 {
        let before = granted.load(Ordering::SeqCst);
        move_slot(&cluster, slot, owners.0, owners.1).await;
        owners = (owners.1, 3 - owners.0 - owners.1);
        eventually("charges go on after the move", async || {
            (granted.load(Ordering::SeqCst) > before + 20).then_some(())
        })
        .await;
    }
    is_over.store(true, Ordering::SeqCst);
    let doubtful: Vec<u32> = load.join_all().await.into_iter().flatten().collect();
    let granted = granted.load(Ordering::SeqCst);
    let refused = refused.load(Ordering::SeqCst);
    assert!(granted > 120, "{granted} granted, {refused} refused");
    // Whoever got no answer gives back. What is left is exactly what was granted, on whichever member it is now.
    for op in doubtful {
        cancelled(&limiter, op).await;
    }
    assert_eq!(used(&limiter, &all).await.unwrap(), [granted, 5 * granted, granted]);
    assert!(granted <= LIMIT);
    // And so goes back to nothing.
    for op in 0..next.load(Ordering::SeqCst) {
        cancelled(&limiter, op).await;
    }
    assert_eq!(used(&limiter, &all).await.unwrap(), [0, 0, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_has_moved_is_charged_at_its_new_owner_at_once_and_denies_there() {
    let cluster = Cluster::of_three().await;
    let orgs = orgs(&cluster).await;
    let limiter = open(&cluster.url(), 2_000);
    connected(&limiter, &orgs).await;
    let all = [requests(&orgs[0], 6), requests(&orgs[1], 100)];
    let charge = async |op| limiter.charge(&plan(op, &all), SLOT_TTL, within(2_000)).await.unwrap();
    for op in 0..4 {
        assert!(matches!(charge(op).await, Charged::Granted(_)));
    }
    move_slot(&cluster, cluster.slot(&all[0].key).await, 0, 2).await;
    for op in 4..6 {
        assert!(matches!(charge(op).await, Charged::Granted(_)), "after the move");
    }
    assert!(matches!(charge(6).await, Charged::Denied(_)));
    assert_eq!(used(&limiter, &all).await.unwrap(), [6, 6]);
    let key = format!("portcullis:{}", all[0].key);
    assert_eq!(
        cluster.members[2].number(&["GET", &key]).await,
        6,
        "it is counted where it lives"
    );
    // What was charged before the move goes back after it.
    limiter.cancel(&[plan(0, &all).op], within(2_000)).await.unwrap();
    assert_eq!(used(&limiter, &all).await.unwrap(), [5, 5]);
}
