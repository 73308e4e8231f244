//! The cases about streams that have ended: their slots, and the tokens that they used in place of those they held.

use std::sync::Arc;
use std::time::Duration;

use portcullis_decision::charge::{ChargeEntry, Charged};
use portcullis_decision::ledger::{LARGEST_COUNT, Settled};
use portcullis_decision::limits::Resource;
use tokio::time::sleep;

use crate::cases::together;
use crate::stores::eventually;
use crate::subject::{LARGEST, SLOT_TTL, Subject, entry, granted, id, plan, slot, soon};

fn tokens(limit: u64, cost: u64) -> [ChargeEntry; 1] {
    [entry("k", Resource::Tokens, limit, cost)]
}

fn brief_tokens(limit: u64, cost: u64) -> [ChargeEntry; 1] {
    tokens(limit, cost).map(|entry| ChargeEntry { window_s: 1, ..entry })
}

pub(crate) async fn a_settlement_gives_the_difference_back_in_its_window(subject: Subject) {
    let start = granted(subject.charge(&plan(1, &tokens(100, 60))).await);
    assert!(!subject.is_granted(2, &tokens(100, 41)).await);
    // Long enough for a window that was begun anew to show.
    sleep(Duration::from_millis(50)).await;
    subject.settle(1, Some(10)).await;
    let states = granted(subject.charge(&plan(3, &tokens(100, 41))).await);
    assert_eq!(states[0].used, 51);
    assert!(
        (1..start[0].reset_ms).contains(&states[0].reset_ms),
        "the window moved: {states:?}"
    );
    assert!(subject.is_granted(4, &tokens(100, 49)).await);
    assert!(!subject.is_granted(5, &tokens(100, 1)).await);
}

pub(crate) async fn a_settlement_above_the_hold_charges_the_difference_over_the_limit_if_need_be(subject: Subject) {
    assert!(subject.is_granted(1, &tokens(100, 30)).await);
    assert!(subject.is_granted(2, &tokens(100, 30)).await);
    subject.settle(1, Some(50)).await;
    assert_eq!(subject.used(&tokens(100, 0)).await, [80]);
    subject.settle(2, Some(130)).await;
    assert_eq!(subject.used(&tokens(100, 0)).await, [180]);
    let denied = plan(3, &tokens(100, 1));
    let Charged::Denied(states) = subject.charge(&denied).await else {
        panic!("admitted over the limit")
    };
    let limit = denied.denial(&states).unwrap().limit.unwrap();
    assert_eq!((limit.limit, limit.remaining), (100, 0));
}

pub(crate) async fn a_settlement_of_all_that_was_held_changes_nothing(subject: Subject) {
    assert!(subject.is_granted(1, &tokens(100, 60)).await);
    subject.settle(1, Some(60)).await;
    assert_eq!(subject.used(&tokens(100, 0)).await, [60]);
}

pub(crate) async fn a_settlement_is_made_once(subject: Subject) {
    assert!(subject.is_granted(1, &tokens(100, 60)).await);
    assert!(subject.is_granted(2, &tokens(100, 20)).await);
    for again in [Some(10), Some(10), Some(0), Some(90), None] {
        subject.settle(1, again).await;
        assert_eq!(subject.used(&tokens(100, 0)).await, [30], "after {again:?}");
    }
    // A charge that is asked again is one that was made; it opens nothing.
    assert!(subject.is_granted(1, &tokens(100, 60)).await);
    subject.settle(1, Some(0)).await;
    assert_eq!(subject.used(&tokens(100, 0)).await, [30]);
}

pub(crate) async fn fifty_concurrent_settlements_of_one_operation_count_once(subject: Subject) {
    assert!(subject.is_granted(1, &tokens(1_000, 500)).await);
    assert!(subject.is_granted(2, &tokens(1_000, 100)).await);
    let mut calls = tokio::task::JoinSet::new();
    for amount in 0..50 {
        let limiter = Arc::clone(&subject.limiter);
        let tokens = Some(amount * 3);
        calls.spawn(async move { limiter.settle(&[Settled { op: id(1), tokens }], soon()).await.unwrap() });
    }
    calls.join_all().await;
    let used = subject.used(&tokens(1_000, 0)).await[0];
    assert!(
        (100..250).contains(&used) && (used - 100) % 3 == 0,
        "{used} is no one settlement's"
    );
    subject.cancel(1).await;
    assert_eq!(subject.used(&tokens(1_000, 0)).await, [100]);
}

pub(crate) async fn a_stream_that_ends_without_a_word_about_tokens_keeps_its_hold_charged(subject: Subject) {
    let both = [slot("k", 1), entry("k", Resource::Tokens, 100, 60)];
    assert!(subject.is_granted(1, &both).await);
    subject.settle(1, None).await;
    assert_eq!(subject.used(&both).await, [0, 60]);
    // The word may come later, by another way.
    subject.settle(1, Some(5)).await;
    assert_eq!(subject.used(&both).await, [0, 5]);
}

pub(crate) async fn a_settlement_after_its_window_is_gone_is_a_no_op(subject: Subject) {
    for op in [1, 2] {
        assert!(subject.is_granted(op, &brief_tokens(100, 30)).await);
    }
    eventually("the window ends", async || {
        (subject.used(&brief_tokens(100, 0)).await == [0]).then_some(())
    })
    .await;
    subject.settle(1, Some(90)).await;
    assert_eq!(subject.used(&brief_tokens(100, 0)).await, [0], "a window came back");
    // A new window of the same key is another one. Its own operation is settled in it, whatever happens to the others.
    let mut op = 10;
    eventually("a new window", async || {
        op += 1;
        let new = granted(subject.charge(&plan(op, &brief_tokens(100, 40))).await)[0];
        subject.settle(1, Some(0)).await;
        subject.settle(2, Some(0)).await;
        subject.settle(2, Some(90)).await;
        subject.cancel(1).await;
        let untouched = subject.used(&brief_tokens(100, 0)).await;
        subject.settle(op, Some(1)).await;
        let settled = subject.used(&brief_tokens(100, 0)).await;
        subject.cancel(op).await;
        // It may have ended by itself while we looked.
        (new.used == 40 && new.reset_ms > 0 && settled != [0]).then(|| {
            assert_eq!((untouched, settled), (vec![40], vec![1]));
        })
    })
    .await;
}

pub(crate) async fn a_settlement_never_takes_a_counter_below_zero(subject: Subject) {
    for op in [1, 2] {
        assert!(subject.is_granted(op, &tokens(100, 40)).await);
    }
    for _ in 0..2 {
        for op in [1, 2] {
            subject.settle(op, Some(0)).await;
        }
        assert_eq!(subject.used(&tokens(100, 0)).await, [0]);
        for op in [1, 2] {
            subject.cancel(op).await;
        }
        assert_eq!(subject.used(&tokens(100, 0)).await, [0]);
    }
    assert!(subject.is_granted(3, &tokens(100, 100)).await);
    assert!(!subject.is_granted(4, &tokens(100, 1)).await, "there was credit left");
}

pub(crate) async fn a_settlement_frees_the_slots_of_its_operation_and_a_renewal_does_not_revive_them(subject: Subject) {
    let one = [slot("k", 1), entry("k", Resource::Tokens, 100, 10)];
    assert!(subject.is_granted(1, &one).await);
    subject.settle(2, Some(1)).await;
    assert!(!subject.is_granted(2, &one).await, "somebody else's slot was freed");
    assert!(subject.renew(1).await);
    subject.settle(1, Some(3)).await;
    assert!(!subject.renew(1).await, "a slot that was given back came back");
    assert_eq!(subject.used(&one).await, [0, 3]);
    assert!(subject.is_granted(3, &one).await);
    assert!(!subject.renew(1).await, "one slot has two holders");
    subject.settle(1, Some(3)).await;
    assert_eq!(subject.used(&one).await, [1, 13]);
}

pub(crate) async fn a_lapsed_slot_does_not_keep_its_operation_from_being_settled(subject: Subject) {
    let one = [slot("k", 1), entry("k", Resource::Tokens, 100, 40)];
    assert!(subject.is_granted(1, &one).await);
    eventually("the slot lapses", async || {
        subject.is_granted(2, &one).await.then_some(())
    })
    .await;
    subject.settle(1, Some(3)).await;
    assert_eq!(subject.used(&one[1..]).await, [43]);
}

pub(crate) async fn a_cancel_after_a_settlement_gives_back_what_it_charged(subject: Subject) {
    assert!(subject.is_granted(1, &tokens(100, 40)).await);
    assert!(subject.is_granted(2, &tokens(100, 40)).await);
    subject.settle(1, Some(5)).await;
    subject.settle(2, Some(70)).await;
    assert_eq!(subject.used(&tokens(100, 0)).await, [75]);
    subject.cancel(1).await;
    assert_eq!(subject.used(&tokens(100, 0)).await, [70]);
    subject.cancel(2).await;
    assert_eq!(subject.used(&tokens(100, 0)).await, [0]);
}

pub(crate) async fn a_settlement_of_a_cancelled_or_unknown_operation_changes_nothing(subject: Subject) {
    let both = |cost| [slot("k", 5), entry("k", Resource::Tokens, 100, cost)];
    for op in [1, 2] {
        assert!(subject.is_granted(op, &both(40)).await);
    }
    subject.cancel(1).await;
    for op in [1, 77] {
        for amount in [Some(0), Some(90), None] {
            subject.settle(op, amount).await;
            assert_eq!(subject.used(&both(0)).await, [1, 40], "operation {op}, {amount:?}");
        }
    }
    assert_eq!(subject.charge(&plan(1, &both(40))).await, Charged::Cancelled);
    // What was settled before it was charged is charged as if nothing had been said.
    assert!(subject.is_granted(77, &both(30)).await);
    assert_eq!(subject.used(&both(0)).await, [2, 70]);
    subject.settle(77, Some(1)).await;
    assert_eq!(subject.used(&both(0)).await, [1, 41]);
    // An operation that was denied has taken nothing either.
    assert!(!subject.is_granted(3, &both(60)).await);
    subject.settle(3, Some(1)).await;
    assert_eq!(subject.used(&both(0)).await, [1, 41]);
}

pub(crate) async fn a_settlement_leaves_windows_of_requests_alone(subject: Subject) {
    let all = [
        entry("k", Resource::Requests, 10, 1),
        entry("k", Resource::Tokens, 100, 40),
        entry("l", Resource::Requests, 10, 1),
    ];
    assert!(subject.is_granted(1, &all).await);
    subject.settle(1, Some(7)).await;
    assert_eq!(subject.used(&all).await, [1, 7, 1]);
    subject.cancel(1).await;
    assert_eq!(subject.used(&all).await, [0, 0, 0]);
}

pub(crate) async fn every_token_window_of_an_operation_is_settled(subject: Subject) {
    let all = [
        entry("a", Resource::Tokens, 1_000, 40),
        slot("k", 3),
        entry("b", Resource::Tokens, 100, 40),
        ChargeEntry {
            window_s: 7,
            ..entry("c", Resource::Tokens, 100, 40)
        },
    ];
    for op in [1, 2] {
        assert!(subject.is_granted(op, &all).await);
    }
    subject.settle(1, Some(11)).await;
    assert_eq!(subject.used(&all).await, [51, 1, 51, 51]);
}

pub(crate) async fn a_batch_settles_each_operation_for_itself(subject: Subject) {
    let both = [slot("k", 1_000), entry("k", Resource::Tokens, 100_000, 40)];
    for op in 0..300 {
        let charged = subject
            .limiter
            .charge(&plan(op, &both), Duration::from_secs(30), soon())
            .await;
        granted(charged.unwrap());
    }
    let amount = |op: u32| match op % 3 {
        0 => None,
        1 => Some(0),
        _ => Some(u64::from(op)),
    };
    let mut batch: Vec<Settled> = (0..290)
        .map(|op| Settled {
            op: id(op),
            tokens: amount(op),
        })
        .collect();
    // The first word counts, in a batch as well.
    batch.push(Settled {
        op: id(2),
        tokens: Some(90),
    });
    subject.limiter.settle(&batch, soon()).await.unwrap();
    let expected: u64 = (0..290).map(|op| amount(op).unwrap_or(40)).sum::<u64>() + 10 * 40;
    assert_eq!(subject.used(&both).await, [10, expected]);
    subject.limiter.settle(&[], soon()).await.unwrap();
}

pub(crate) async fn fifty_concurrent_charges_of_forty_against_a_hundred_tokens_left_admit_exactly_two(
    subject: Subject,
) {
    // A hundred are left since a hold was settled.
    assert!(subject.is_granted(900, &tokens(1_000, 950)).await);
    assert!(subject.is_granted(901, &tokens(1_000, 50)).await);
    subject.settle(900, Some(850)).await;
    let forty = (0..50).map(|op| plan(op, &tokens(1_000, 40))).collect();
    assert_eq!(together(&subject, forty).await, 2);
    assert_eq!(subject.used(&tokens(1_000, 0)).await, [980]);
}

pub(crate) async fn settlements_up_to_two_to_the_53_are_exact_and_none_goes_over(subject: Subject) {
    let of = |cost| tokens(LARGEST, cost);
    assert!(subject.is_granted(1, &of(1)).await);
    assert!(subject.is_granted(2, &of(2)).await);
    subject.settle(1, Some(LARGEST - 2)).await;
    assert_eq!(subject.used(&of(0)).await, [LARGEST]);
    subject.settle(2, Some(u64::MAX)).await;
    assert_eq!(subject.used(&of(0)).await, [LARGEST_COUNT]);
    assert!(!subject.is_granted(3, &of(1)).await);
    assert!(!subject.is_granted(3, &of(LARGEST)).await);
    subject.cancel(1).await;
    assert_eq!(subject.used(&of(0)).await, [3], "what did not fit was not charged");
    subject.cancel(2).await;
    assert_eq!(subject.used(&of(0)).await, [0]);
    // Millions of millions: where a careless script starts to write 1e+15.
    assert!(subject.is_granted(4, &of(1_000_000_000_000_001)).await);
    assert!(subject.is_granted(5, &of(5)).await);
    subject.settle(5, Some(2_000_000_000_000_003)).await;
    assert_eq!(subject.used(&of(0)).await, [3_000_000_000_000_004]);
    subject.settle(4, Some(1_000_000_000_000_007)).await;
    assert_eq!(subject.used(&of(0)).await, [3_000_000_000_000_010]);
    subject.cancel(4).await;
    assert_eq!(subject.used(&of(0)).await, [2_000_000_000_000_003]);
}

pub(crate) async fn a_settlement_while_the_slot_is_renewed_is_the_last_word(subject: Subject) {
    let one = [slot("k", 1), entry("k", Resource::Tokens, 100, 10)];
    for op in 1..20 {
        assert!(
            subject.is_granted(op, &one).await,
            "operation {op} still holds the slot"
        );
        let mut calls = tokio::task::JoinSet::new();
        for turn in 0..6 {
            let limiter = Arc::clone(&subject.limiter);
            calls.spawn(async move {
                if turn == 3 {
                    let tokens = Some(1);
                    limiter.settle(&[Settled { op: id(op), tokens }], soon()).await.unwrap();
                } else {
                    limiter.renew(&[id(op)], SLOT_TTL, soon()).await.unwrap();
                }
            });
        }
        calls.join_all().await;
        assert_eq!(subject.used(&one).await, [0, u64::from(op)]);
    }
}
