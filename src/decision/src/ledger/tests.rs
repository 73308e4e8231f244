//! The limiter's algorithm with a manual clock.

use std::vec::Vec;

#[cfg(target_arch = "wasm32")]
use wasm_bindgen_test::wasm_bindgen_test as test;

use super::*;
use crate::charge::BlockAsk;
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

fn block(n: u8, entries: &[ChargeEntry], most: u64, ahead: bool) -> ChargePlan {
    ChargePlan {
        block: Some(BlockAsk { most, parts: 2, ahead }),
        ..plan(n, entries)
    }
}

fn part(n: u8, lease: u8, requests: u64, tokens: i64) -> Return {
    Return {
        id: op(n),
        lease: op(lease),
        requests,
        tokens,
    }
}

#[test]
fn a_block_is_settled_and_returned_apart_and_a_cancel_gives_back_the_rest() {
    let mut ledger = Ledger::default();
    let both = [
        entry("k", Resource::Tokens, 1_000, 10),
        entry("r", Resource::Requests, 100, 1),
    ];
    let figures = |ledger: &Ledger| both.iter().map(|entry| ledger.state(1, entry).used).collect::<Vec<_>>();
    for _ in 0..2 {
        let Charged::Block { admissions, states } = ledger.charge(0, &block(1, &both, 20, false), SLOT_TTL_MS) else {
            panic!("no block")
        };
        assert_eq!((admissions, states[0].used, states[1].used), (20, 200, 20));
    }
    ledger.settle(ended(1, Some(3)));
    assert_eq!(figures(&ledger), [193, 20]);
    for _ in 0..2 {
        ledger.give_back_part(&part(101, 1, 5, 60));
        ledger.give_back_part(&part(102, 1, 0, -7));
        assert_eq!(figures(&ledger), [140, 15]);
    }
    ledger.give_back_part(&part(103, 1, 99, 999));
    assert_eq!(figures(&ledger), [3, 1], "what the request took is its own");
    ledger.cancel(1, op(1));
    ledger.give_back_part(&part(104, 1, 1, 1));
    assert_eq!(figures(&ledger), [0, 0]);
}

#[test]
fn a_return_is_remembered_longer_than_its_block() {
    let mut ledger = Ledger::default();
    let one = [entry("r", Resource::Requests, 100, 1)];
    ledger.charge(0, &block(1, &one, 20, true), SLOT_TTL_MS);
    ledger.give_back_part(&part(101, 1, 5, 0));
    // The block's record goes a minute after its window, the return's a minute later.
    for (now_ms, known) in [(119_999, 2), (120_000, 1), (179_999, 1), (180_000, 0)] {
        ledger.next_sweep_ms = 0;
        ledger.sweep(now_ms);
        assert_eq!(ledger.operations.len(), known, "at {now_ms}");
    }
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
        Block(u8, u64, bool),
        /// The number of the return, the operation, requests and tokens.
        Return(u8, u8, u64, i64),
    }

    fn call() -> impl Strategy<Value = Call> {
        let id = 0..12_u8;
        prop_oneof![
            4 => id.clone().prop_map(Call::Charge),
            1 => id.clone().prop_map(Call::Cancel),
            2 => (id.clone(), proptest::option::of(0..12_u64)).prop_map(|(n, tokens)| Call::Settle(n, tokens)),
            1 => id.clone().prop_map(Call::Renew),
            1 => (0..40_000_u64).prop_map(Call::Pass),
            3 => (id.clone(), 1..40_u64, any::<bool>()).prop_map(|(n, most, ahead)| Call::Block(n, most, ahead)),
            3 => (0..30_u8, id, 0..20_u64, 0..60_i64).prop_map(|(n, lease, requests, tokens)| {
                Call::Return(n, lease, requests, tokens)
            }),
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
                entry("R", Resource::Requests, 60, 1),
                entry("T", Resource::Tokens, 300, HOLD),
            ];
            let windows = [entries[3].clone(), entries[4].clone()];
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
                    Call::Block(n, most, ahead) => {
                        ledger.charge(now, &block(n, &windows, most, ahead), SLOT_TTL_MS);
                    }
                    Call::Return(n, lease, requests, tokens) => {
                        ledger.give_back_part(&part(100 + n, lease, requests, tokens));
                    }
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
                    Call::Pass(_) | Call::Block(..) | Call::Return(..) => {}
                }
                let sum: u64 = charged.values().flatten().map(|of| of.0).sum();
                prop_assert_eq!(used(&ledger, 0), sum);
            }
        }

        /// The same for blocks: what was charged less what was returned of it, each once; so nobody is ever admitted
        /// by an admission that has gone back.
        #[test]
        fn a_counter_of_blocks_is_what_was_granted_less_what_was_returned(
            calls in proptest::collection::vec(call(), 0..200),
        ) {
            let mut ledger = Ledger::default();
            let both = [entry("r", Resource::Requests, 100, 1), entry("k", Resource::Tokens, 500, HOLD)];
            // By operation: requests and tokens of its own, and of its block. `None` once it is cancelled.
            let mut charged = std::collections::HashMap::<u8, Option<[u64; 4]>>::new();
            let mut returned = std::collections::HashSet::new();
            let mut settled = std::collections::HashSet::new();
            for call in calls {
                match call {
                    Call::Block(n, most, ahead) => {
                        let answer = ledger.charge(0, &block(n, &both, most, ahead), SLOT_TTL_MS);
                        if let Charged::Block { admissions, .. } = answer && admissions > 0 {
                            let own = u64::from(!ahead);
                            let block = admissions - own.min(admissions);
                            charged.entry(n).or_insert(Some([own, own * HOLD, block, block * HOLD]));
                        }
                    }
                    Call::Return(n, lease, requests, tokens) => {
                        ledger.give_back_part(&part(100 + n, lease, requests, tokens));
                        if let Some(Some(of)) = charged.get_mut(&lease) && returned.insert(n) {
                            of[2] -= requests.min(of[2]);
                            of[3] -= u64::try_from(tokens).unwrap().min(of[3]);
                        }
                    }
                    Call::Cancel(n) => { ledger.cancel(0, op(n)); charged.insert(n, None); }
                    Call::Settle(n, tokens) => {
                        ledger.settle(ended(n, tokens));
                        if let (Some(Some(of)), Some(tokens)) = (charged.get_mut(&n), tokens)
                            && of[0] > 0 && settled.insert(n) {
                            of[1] = tokens;
                        }
                    }
                    Call::Charge(_) | Call::Renew(_) | Call::Pass(_) => {}
                }
                let sum = |at: [usize; 2]| -> u64 { charged.values().flatten().map(|of| of[at[0]] + of[at[1]]).sum() };
                prop_assert_eq!(ledger.state(0, &both[0]).used, sum([0, 2]));
                prop_assert_eq!(ledger.state(0, &both[1]).used, sum([1, 3]));
            }
        }
    }
}
