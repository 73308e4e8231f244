//! The limiter's algorithm with a manual clock.

use std::vec::Vec;

#[cfg(target_arch = "wasm32")]
use wasm_bindgen_test::wasm_bindgen_test as test;

use super::*;
use crate::limits::Scope;
use crate::rules::Gate;

const SLOT_TTL_MS: u64 = 30_000;

fn op(n: u8) -> OperationId {
    OperationId::from_random([n; 16])
}

fn entry(key: &str, resource: Resource, limit: u64, cost: u64) -> ChargeEntry {
    ChargeEntry {
        gate: Gate::Contract,
        scope: Scope::Org,
        resource,
        key: key.into(),
        limit,
        cost,
        window_s: 60,
    }
}

fn plan(n: u8, entries: &[ChargeEntry]) -> ChargePlan {
    ChargePlan {
        op: op(n),
        entries: entries.to_vec(),
        block: None,
    }
}

fn ended(n: u8, tokens: Option<u64>) -> Settled {
    Settled { op: op(n), tokens }
}

/// What the window of tokens `k` counts.
fn used(ledger: &Ledger, now_ms: u64) -> u64 {
    ledger.state(now_ms, &entry("k", Resource::Tokens, 1, 0)).used
}

fn granted(charged: &Charged) -> bool {
    matches!(charged, Charged::Granted(_))
}

#[test]
fn a_window_starts_with_its_first_charge_and_retry_after_is_enough() {
    let mut ledger = Ledger::default();
    let one = [entry("k", Resource::Requests, 1, 1)];
    assert!(granted(&ledger.charge(5_000, &plan(1, &one), SLOT_TTL_MS)));
    for (now, wait_s) in [(5_000, 60), (5_001, 60), (6_000, 59), (64_000, 1), (64_999, 1)] {
        let second = plan(2, &one);
        let Charged::Denied(states) = ledger.charge(now, &second, SLOT_TTL_MS) else {
            panic!("admitted at {now}")
        };
        assert_eq!(second.denial(&states).unwrap().retry_after_s, Some(wait_s), "at {now}");
    }
    assert!(granted(&ledger.charge(65_000, &plan(2, &one), SLOT_TTL_MS)));
    assert!(!granted(&ledger.charge(65_001, &plan(3, &one), SLOT_TTL_MS)));
}

#[test]
fn waiting_exactly_as_long_as_the_longest_of_several_is_enough() {
    let mut ledger = Ledger::default();
    assert!(granted(&ledger.charge(
        0,
        &plan(1, &[entry("a", Resource::Requests, 1, 1)]),
        SLOT_TTL_MS
    )));
    assert!(granted(&ledger.charge(
        20_500,
        &plan(2, &[entry("b", Resource::Requests, 1, 1)]),
        SLOT_TTL_MS
    )));
    let both = [
        entry("a", Resource::Requests, 1, 1),
        entry("b", Resource::Requests, 1, 1),
    ];
    let third = plan(3, &both);
    let Charged::Denied(states) = ledger.charge(30_000, &third, SLOT_TTL_MS) else {
        panic!("admitted")
    };
    let denial = third.denial(&states).unwrap();
    assert_eq!(
        (denial.retry_after_s, denial.limit.unwrap().reset_ms),
        (Some(51), 50_500)
    );
    assert!(!granted(&ledger.charge(80_499, &plan(4, &both), SLOT_TTL_MS)));
    assert!(granted(&ledger.charge(30_000 + 51_000, &plan(5, &both), SLOT_TTL_MS)));
}

#[test]
fn a_denied_request_charges_no_scope() {
    let mut ledger = Ledger::default();
    let both = [
        entry("org", Resource::Requests, 10, 1),
        entry("owner", Resource::Requests, 3, 1),
    ];
    let admitted = (0..6)
        .filter(|n| granted(&ledger.charge(0, &plan(*n, &both), SLOT_TTL_MS)))
        .count();
    assert_eq!(admitted, 3);
    let org = [entry("org", Resource::Requests, 10, 1)];
    let left = (10..30)
        .filter(|n| granted(&ledger.charge(0, &plan(*n, &org), SLOT_TTL_MS)))
        .count();
    assert_eq!(left, 7);
}

#[test]
fn one_operation_is_charged_once_however_often_it_is_asked() {
    let mut ledger = Ledger::default();
    let two = [
        entry("k", Resource::Requests, 2, 1),
        entry("s", Resource::Concurrency, 2, 1),
    ];
    for _ in 0..5 {
        assert!(granted(&ledger.charge(0, &plan(1, &two), SLOT_TTL_MS)));
    }
    let Charged::Granted(states) = ledger.charge(0, &plan(2, &two), SLOT_TTL_MS) else {
        panic!("denied")
    };
    assert_eq!(states.iter().map(|state| state.used).collect::<Vec<_>>(), [2, 2]);
}

#[test]
fn a_cancel_gives_everything_back_whichever_arrives_first() {
    let mut ledger = Ledger::default();
    let all = [
        entry("k", Resource::Tokens, 10, 10),
        entry("s", Resource::Concurrency, 1, 1),
    ];
    assert!(granted(&ledger.charge(0, &plan(1, &all), SLOT_TTL_MS)));
    ledger.cancel(1, op(1));
    ledger.cancel(2, op(1));
    ledger.cancel(2, op(2));
    assert_eq!(ledger.charge(3, &plan(2, &all), SLOT_TTL_MS), Charged::Cancelled);
    assert_eq!(ledger.charge(3, &plan(1, &all), SLOT_TTL_MS), Charged::Cancelled);
    let Charged::Granted(states) = ledger.charge(3, &plan(3, &all), SLOT_TTL_MS) else {
        panic!("denied")
    };
    assert_eq!(states.iter().map(|state| state.used).collect::<Vec<_>>(), [10, 1]);
}

#[test]
fn a_refund_after_its_window_is_gone_is_a_no_op() {
    let mut ledger = Ledger::default();
    let one = [entry("k", Resource::Requests, 5, 1)];
    ledger.charge(0, &plan(1, &one), SLOT_TTL_MS);
    ledger.charge(60_000, &plan(2, &one), SLOT_TTL_MS);
    ledger.cancel(60_001, op(1));
    let Charged::Granted(states) = ledger.charge(60_002, &plan(3, &one), SLOT_TTL_MS) else {
        panic!("denied")
    };
    assert_eq!(states[0].used, 2);
}

#[test]
fn slots_are_released_by_id_lapse_by_themselves_and_are_never_revived() {
    let mut ledger = Ledger::default();
    let slot = [entry("s", Resource::Concurrency, 1, 1)];
    assert!(granted(&ledger.charge(0, &plan(1, &slot), SLOT_TTL_MS)));
    assert!(!granted(&ledger.charge(29_999, &plan(2, &slot), SLOT_TTL_MS)));
    assert!(ledger.renew(29_999, op(1), SLOT_TTL_MS));
    assert!(!granted(&ledger.charge(59_998, &plan(2, &slot), SLOT_TTL_MS)));
    assert!(granted(&ledger.charge(59_999, &plan(3, &slot), SLOT_TTL_MS)));
    assert!(
        !ledger.renew(60_000, op(1), SLOT_TTL_MS),
        "the lapsed slot came back over the cap"
    );
    ledger.settle(ended(1, None));
    assert!(
        !granted(&ledger.charge(60_001, &plan(4, &slot), SLOT_TTL_MS)),
        "another holder's slot was freed"
    );
    ledger.settle(ended(3, None));
    ledger.settle(ended(3, None));
    assert!(granted(&ledger.charge(60_002, &plan(5, &slot), SLOT_TTL_MS)));
}

#[test]
fn a_settlement_replaces_a_hold_once_up_or_down_and_a_cancel_gives_back_what_is_then_charged() {
    let mut ledger = Ledger::default();
    let hold = [
        entry("k", Resource::Tokens, 100, 40),
        entry("k2", Resource::Tokens, 100, 40),
        entry("r", Resource::Requests, 10, 1),
        entry("s", Resource::Concurrency, 2, 1),
    ];
    for n in [1, 2] {
        assert!(granted(&ledger.charge(0, &plan(n, &hold), SLOT_TTL_MS)));
    }
    ledger.settle(ended(1, Some(10)));
    ledger.settle(ended(2, Some(95)));
    for again in [Some(0), Some(40), None] {
        ledger.settle(ended(1, again));
        ledger.settle(ended(2, again));
    }
    let figures = |ledger: &Ledger| hold.iter().map(|entry| ledger.state(1, entry).used).collect::<Vec<_>>();
    assert_eq!(figures(&ledger), [105, 105, 2, 0]);
    assert!(
        !ledger.renew(1, op(1), SLOT_TTL_MS),
        "a slot that was given back came back"
    );
    ledger.cancel(1, op(2));
    assert_eq!(figures(&ledger), [10, 10, 1, 0]);
    ledger.settle(ended(2, Some(7)));
    ledger.settle(ended(9, Some(7)));
    assert_eq!(figures(&ledger), [10, 10, 1, 0]);
}

#[test]
fn a_settlement_is_for_the_window_that_was_charged_and_for_no_later_one() {
    let mut ledger = Ledger::default();
    let hold = [entry("k", Resource::Tokens, 100, 40)];
    for n in [1, 2] {
        ledger.charge(0, &plan(n, &hold), SLOT_TTL_MS);
    }
    ledger.settle(ended(1, Some(1)));
    assert_eq!(used(&ledger, 59_999), 41);
    ledger.settle(ended(2, Some(1_000)));
    assert_eq!(used(&ledger, 60_000), 0);
    for n in [3, 4] {
        ledger.charge(60_000, &plan(n, &hold), SLOT_TTL_MS);
    }
    for n in [1, 2] {
        ledger.settle(ended(n, Some(0)));
    }
    assert_eq!(used(&ledger, 60_001), 80);
}

#[test]
fn a_settlement_goes_over_a_limit_and_not_over_the_largest_count() {
    let mut ledger = Ledger::default();
    let hold = [entry("k", Resource::Tokens, 100, 40)];
    for n in [1, 2] {
        ledger.charge(0, &plan(n, &hold), SLOT_TTL_MS);
    }
    ledger.settle(ended(1, Some(u64::MAX)));
    assert_eq!(used(&ledger, 1), LARGEST_COUNT);
    assert!(!granted(&ledger.charge(1, &plan(3, &hold), SLOT_TTL_MS)));
    ledger.cancel(1, op(1));
    assert_eq!(used(&ledger, 1), 40, "what did not fit was not charged");
}

#[test]
fn a_limit_lowered_below_what_is_used_denies_without_an_underflow() {
    let mut ledger = Ledger::default();
    for n in 0..5 {
        ledger.charge(0, &plan(n, &[entry("k", Resource::Requests, 10, 1)]), SLOT_TTL_MS);
    }
    let lowered = plan(9, &[entry("k", Resource::Requests, 2, 1)]);
    let Charged::Denied(states) = ledger.charge(1, &lowered, SLOT_TTL_MS) else {
        panic!("admitted")
    };
    assert_eq!(lowered.denial(&states).unwrap().limit.unwrap().remaining, 0);
}

#[test]
fn what_has_expired_is_forgotten() {
    let mut ledger = Ledger::default();
    for n in 0..200 {
        let key = std::format!("k{n}");
        ledger.charge(
            0,
            &plan(
                n,
                &[
                    entry(&key, Resource::Requests, 1, 1),
                    entry(&key, Resource::Concurrency, 1, 1),
                ],
            ),
            1,
        );
    }
    ledger.charge(1_000_000, &plan(201, &[]), 1);
    assert_eq!(ledger.sizes(), (0, 0, 1));
}

#[cfg(not(target_family = "wasm"))]
mod properties {
    use super::*;
    use proptest::prelude::*;

    const HOLD: u64 = 6;

    #[derive(Debug, Clone)]
    enum Call {
        Charge(u8),
        Cancel(u8),
        Settle(u8, Option<u64>),
        Renew(u8),
        Pass(u64),
    }

    fn call() -> impl Strategy<Value = Call> {
        let id = 0..12_u8;
        prop_oneof![
            4 => id.clone().prop_map(Call::Charge),
            1 => id.clone().prop_map(Call::Cancel),
            2 => (id.clone(), proptest::option::of(0..12_u64)).prop_map(|(n, tokens)| Call::Settle(n, tokens)),
            1 => id.prop_map(Call::Renew),
            1 => (0..40_000_u64).prop_map(Call::Pass),
        ]
    }

    proptest! {
        /// Whatever happens: no window and no set of slots is ever over its limit, and no cancelled operation is charged.
        #[test]
        fn never_over_a_limit(calls in proptest::collection::vec(call(), 0..200)) {
            let mut ledger = Ledger::default();
            let entries = [
                entry("r", Resource::Requests, 4, 1),
                entry("t", Resource::Tokens, 20, HOLD),
                entry("s", Resource::Concurrency, 2, 1),
            ];
            let mut now = 0;
            let mut cancelled = std::collections::HashMap::new();
            for call in calls {
                match call {
                    Call::Charge(n) => {
                        let charged = ledger.charge(now, &plan(n, &entries), SLOT_TTL_MS);
                        if cancelled.get(&n).is_some_and(|at| now < at + OPERATION_GRACE_MS) {
                            prop_assert_eq!(charged, Charged::Cancelled);
                        }
                    }
                    Call::Cancel(n) => { ledger.cancel(now, op(n)); cancelled.insert(n, now); }
                    // What is used beyond a hold is charged over the limit; here nobody does.
                    Call::Settle(n, tokens) => ledger.settle(ended(n, tokens.map(|tokens| tokens.min(HOLD)))),
                    Call::Renew(n) => { ledger.renew(now, op(n), SLOT_TTL_MS); }
                    Call::Pass(ms) => now += ms,
                }
                for entry in &entries {
                    prop_assert!(ledger.state(now, entry).used <= entry.limit);
                }
            }
        }

        /// Within one window a counter is the sum of what each operation is charged: its hold, or what it was first
        /// settled with, or nothing once it is cancelled.
        #[test]
        fn a_counter_is_the_sum_of_its_operations(calls in proptest::collection::vec(call(), 0..200)) {
            let mut ledger = Ledger::default();
            let hold = [entry("k", Resource::Tokens, 30, HOLD)];
            // By operation: what it is charged, and whether that is settled. `None` once it is cancelled.
            let mut charged = std::collections::HashMap::<u8, Option<(u64, bool)>>::new();
            for call in calls {
                match call {
                    Call::Charge(n) => {
                        if granted(&ledger.charge(0, &plan(n, &hold), SLOT_TTL_MS)) {
                            charged.entry(n).or_insert(Some((HOLD, false)));
                        }
                    }
                    Call::Cancel(n) => { ledger.cancel(0, op(n)); charged.insert(n, None); }
                    Call::Settle(n, tokens) => {
                        ledger.settle(ended(n, tokens));
                        if let (Some(Some(of)), Some(tokens)) = (charged.get_mut(&n), tokens) && !of.1 {
                            *of = (tokens, true);
                        }
                    }
                    Call::Renew(n) => { ledger.renew(0, op(n), SLOT_TTL_MS); }
                    Call::Pass(_) => {}
                }
                let sum: u64 = charged.values().flatten().map(|of| of.0).sum();
                prop_assert_eq!(used(&ledger, 0), sum);
            }
        }
    }
}
