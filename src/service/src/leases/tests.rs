//! The desk, by a clock that the tests move.

use std::time::Duration;

use serde_json::json;
use tokio::time::advance;

use super::*;
use crate::decide::tests::request;

fn id(n: u128) -> OperationId {
    OperationId::from_random(n.to_be_bytes())
}

fn ask(gateway: u128) -> LeaseAsk {
    LeaseAsk {
        max_requests: 256,
        max_age_ms: 1_000,
        gateway: id(gateway),
        ahead: false,
    }
}

/// The most that a block may be.
fn most(desk: &LeaseDesk, bundle: Bundle) -> u64 {
    desk.terms(bundle, &ask(1)).most
}

async fn pass(ms: u64) {
    advance(Duration::from_millis(ms)).await;
}

#[tokio::test(start_paused = true)]
async fn a_block_is_half_of_what_is_asked_for_before_it_ends() {
    let (desk, bundle) = (LeaseDesk::default(), Bundle(7));
    assert_eq!(most(&desk, bundle), 1, "nobody has asked yet");
    for op in 0..200 {
        desk.handed_out(bundle, id(op), 1);
        pass(10).await;
    }
    // A hundred a second.
    let steady = most(&desk, bundle);
    assert!((48..=50).contains(&steady), "{steady}");
    let long = LeaseAsk {
        max_age_ms: 3_000,
        ..ask(1)
    };
    assert!((144..=150).contains(&desk.terms(bundle, &long).most));
    let little = LeaseAsk {
        max_requests: 20,
        ..ask(1)
    };
    assert_eq!(desk.terms(bundle, &little).most, 20);
    assert_eq!(most(&desk, Bundle(8)), 1, "of another bundle");
}

#[tokio::test(start_paused = true)]
async fn what_would_be_small_is_one_and_demand_that_falls_is_forgotten_in_two_seconds() {
    let (desk, bundle) = (LeaseDesk::default(), Bundle(7));
    desk.handed_out(bundle, id(1), 15);
    assert_eq!(most(&desk, bundle), 1);
    desk.handed_out(bundle, id(2), 1);
    assert_eq!(most(&desk, bundle), 8);
    pass(1_000).await;
    assert_eq!(most(&desk, bundle), 8);
    desk.handed_out(bundle, id(3), 100);
    pass(1_500).await;
    assert_eq!(most(&desk, bundle), 25);
    pass(500).await;
    assert_eq!(most(&desk, bundle), 1);
}

#[tokio::test(start_paused = true)]
async fn what_came_back_was_not_in_demand() {
    let (desk, bundle) = (LeaseDesk::default(), Bundle(7));
    desk.handed_out(bundle, id(1), 100);
    assert_eq!(most(&desk, bundle), 50);
    let part = |lease, requests| Return {
        id: id(900),
        lease: id(lease),
        requests,
        tokens: 0,
    };
    desk.came_back(&[part(1, 30), part(2, 10)]);
    assert_eq!(most(&desk, bundle), 35);
    pass(1_000).await;
    desk.came_back(&[part(1, 50), part(1, 900)]);
    assert_eq!(most(&desk, bundle), 1);
}

#[tokio::test(start_paused = true)]
async fn every_gateway_that_asked_in_the_last_ten_seconds_counts() {
    let (desk, bundle) = (LeaseDesk::default(), Bundle(7));
    let parts = |gateway| desk.terms(bundle, &ask(gateway)).parts;
    assert_eq!((parts(1), parts(1)), (8, 8));
    assert_eq!((parts(2), parts(3), parts(1)), (16, 24, 24));
    pass(6_000).await;
    assert_eq!(parts(1), 24);
    pass(5_000).await;
    assert_eq!(parts(1), 8, "two are gone");
    for gateway in 0..100_000 {
        parts(gateway);
    }
    assert_eq!(parts(7), 8 * u64::try_from(MOST_GATEWAYS).unwrap());
    assert_eq!(locked(&desk.desk).gateways.len(), MOST_GATEWAYS);
}

#[tokio::test(start_paused = true)]
async fn a_million_bundles_take_no_more_room_and_the_wanted_one_keeps_its_place() {
    let desk = LeaseDesk::of(64);
    let wanted = Bundle(1);
    for n in 0..1_000_000_u64 {
        if n % 1_000 == 0 {
            desk.handed_out(wanted, id(1), 100);
            pass(10).await;
        }
        desk.handed_out(Bundle(n + 2), id(u128::from(n)), 2);
    }
    assert!(most(&desk, wanted) >= 250);
    let inner = locked(&desk.desk);
    assert_eq!(inner.demands.len() * WAYS, 64);
    assert!(inner.blocks.len() <= MOST_BLOCKS && inner.oldest.len() <= MOST_BLOCKS);
}

#[tokio::test(start_paused = true)]
async fn exact_decisions_count_while_anybody_asks_for_leases_and_rules_that_cannot_be_leased_never() {
    let desk = LeaseDesk::default();
    let plain = request(1, json!({}));
    assert_eq!(desk.watched(&plain), None);
    let mut asking = plain.clone();
    asking.lease = Some(ask(1));
    let bundle = desk.watched(&asking).unwrap();
    pass(9_999).await;
    assert_eq!(desk.watched(&plain), Some(bundle));
    let metered = request(1, json!({"gates": [{"gate": "metering", "when_unavailable": "admit"}]}));
    assert_eq!(desk.watched(&metered), None);
    pass(1).await;
    assert_eq!(desk.watched(&plain), None);
}

#[test]
fn whatever_makes_two_requests_different_to_a_gate_makes_them_different_bundles() {
    let desk = LeaseDesk::default();
    let all = [
        json!({}),
        json!({"subject": {"owner": "p"}}),
        json!({"subject": {"owner": "o", "org": "g"}}),
        json!({"subject": {"owner": "o", "auth": "g"}}),
        json!({"subject": {"owner": "o", "graph": "g"}}),
        json!({"subject": {"owner": "o", "lane": "g"}}),
        json!({"subject": {"owner": "o", "model": "g"}}),
        json!({"limits": {"owner": {"requests": 4}}}),
        json!({"limits": {"owner": {"tokens": 3}}}),
        json!({"limits": {"owner": {"requests": 3, "tokens": 3}}}),
        json!({"window_s": 61}),
        json!({"gates": [
            {"gate": "capacity", "when_unavailable": "reject"}, {"gate": "contract", "when_unavailable": "reject"}
        ]}),
    ];
    let bundles: Vec<Bundle> = all
        .iter()
        .map(|changes| desk.bundle(&request(1, changes.clone())))
        .collect();
    for (at, bundle) in bundles.iter().enumerate() {
        assert!(!bundles[at + 1..].contains(bundle), "{}", all[at]);
        // What only this one request has makes no difference.
        let mut alike = all[at].clone();
        alike["tokens"] = json!(77);
        alike["request_id"] = json!("r-2");
        assert_eq!(desk.bundle(&request(2, alike)), *bundle);
    }
}
