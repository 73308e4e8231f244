//! The cases: each is one behaviour, and knows nothing of the store under it.

use std::sync::Arc;
use std::time::Duration;

use portcullis_decision::charge::{ChargeEntry, ChargePlan, Charged, key};
use portcullis_decision::class::Code;
use portcullis_decision::ledger::Settled;
use portcullis_decision::limits::{Resource, Scope};
use portcullis_decision::operation::OperationId;
use portcullis_decision::rules::Gate;
use tokio::time::{Instant, sleep};

use crate::stores::eventually;
use crate::subject::{LARGEST, SLOT_TTL, Subject, brief, entry, granted, id, plan, slot, soon};

pub(crate) async fn a_window_starts_with_its_first_charge_and_retry_after_is_enough(subject: Subject) {
    let one = [brief("o", 1, 1)];
    let start = Instant::now();
    let states = granted(subject.charge(&plan(1, &one)).await);
    assert_eq!((states[0].used, states[0].reset_ms), (1, 1_000));
    let second = plan(2, &one);
    let mut last_ms = 1_000;
    loop {
        let Charged::Denied(states) = subject.charge(&second).await else {
            break;
        };
        assert!(
            states[0].reset_ms <= last_ms,
            "the window moved: {states:?} after {last_ms}"
        );
        last_ms = states[0].reset_ms;
        let denial = second.denial(&states).unwrap();
        assert_eq!((denial.code, denial.retry_after_s), (Code::RateLimited, Some(1)));
        sleep(Duration::from_millis(last_ms.clamp(1, 200))).await;
    }
    assert!(
        start.elapsed() >= Duration::from_millis(990),
        "the window ended after {:?}",
        start.elapsed()
    );
    assert!(
        start.elapsed() <= Duration::from_millis(1_900),
        "the window lasted {:?}",
        start.elapsed()
    );
    let third = plan(3, &one);
    let Charged::Denied(states) = subject.charge(&third).await else {
        panic!("two in one window")
    };
    let wait = third.denial(&states).unwrap().retry_after_s.unwrap();
    sleep(Duration::from_secs(wait)).await;
    assert!(
        subject.is_granted(4, &one).await,
        "denied after the wait that it was told"
    );
}

pub(crate) async fn a_denied_request_charges_no_scope(subject: Subject) {
    let both = [
        entry("org", Resource::Requests, 10, 1),
        entry("owner", Resource::Requests, 3, 1),
        slot("org", 10),
    ];
    let mut admitted = 0;
    for op in 0..6 {
        admitted += u32::from(subject.is_granted(op, &both).await);
    }
    assert_eq!(admitted, 3);
    assert_eq!(subject.used(&both).await, [3, 3, 3]);
}

pub(crate) async fn one_operation_is_charged_once_however_often_it_is_asked(subject: Subject) {
    let two = [entry("k", Resource::Requests, 2, 1), slot("k", 2)];
    for _ in 0..5 {
        let states = granted(subject.charge(&plan(1, &two)).await);
        assert_eq!(states.iter().map(|state| state.used).collect::<Vec<_>>(), [1, 1]);
    }
    assert!(subject.is_granted(2, &two).await);
    // Spent by now, and still: this operation has been let in.
    let states = granted(subject.charge(&plan(1, &two)).await);
    assert!(
        states.iter().all(|state| !state.exhausted && state.used == 2),
        "{states:?}"
    );
}

pub(crate) async fn a_cancel_gives_everything_back_whichever_arrives_first(subject: Subject) {
    let all = [entry("k", Resource::Tokens, 10, 10), slot("k", 1)];
    assert!(subject.is_granted(1, &all).await);
    subject.cancel(1).await;
    subject.cancel(1).await;
    subject.cancel(2).await;
    assert_eq!(subject.used(&all).await, [0, 0]);
    assert_eq!(subject.charge(&plan(1, &all)).await, Charged::Cancelled);
    assert_eq!(subject.charge(&plan(2, &all)).await, Charged::Cancelled);
    assert!(subject.is_granted(3, &all).await);
    assert_eq!(subject.used(&all).await, [10, 1]);
}

pub(crate) async fn a_refund_after_its_window_is_gone_is_a_no_op(subject: Subject) {
    let one = [brief("k", 1_000_000, 1)];
    assert!(subject.is_granted(1, &one).await);
    let mut op = 1;
    eventually("a new window", async || {
        op += 1;
        let states = granted(subject.charge(&plan(op, &one)).await);
        (states[0].used == 1).then_some(())
    })
    .await;
    subject.cancel(1).await;
    assert_eq!(subject.used(&one).await, [1]);
}

pub(crate) async fn a_released_slot_is_free_and_only_its_own_holder_frees_it(subject: Subject) {
    let one = [slot("k", 1), entry("k", Resource::Requests, 10, 1)];
    assert!(subject.is_granted(1, &one).await);
    assert!(!subject.is_granted(2, &one).await);
    subject.settle(2, None).await;
    assert!(!subject.is_granted(2, &one).await, "somebody else's slot was freed");
    subject.settle(1, None).await;
    subject.settle(1, None).await;
    assert!(!subject.renew(1).await, "a slot that was given back came back");
    assert!(subject.is_granted(3, &one).await);
    subject.settle(1, None).await;
    assert_eq!(subject.used(&one).await, [1, 2]);
}

pub(crate) async fn a_lapsed_slot_is_free_and_never_revived(subject: Subject) {
    let one = [slot("k", 1)];
    assert!(subject.is_granted(1, &one).await);
    assert!(!subject.is_granted(2, &one).await);
    eventually("the slot lapses", async || {
        subject.is_granted(3, &one).await.then_some(())
    })
    .await;
    assert!(!subject.renew(1).await, "the lapsed slot came back over the limit");
    assert!(!subject.renew(77).await, "a slot that nobody ever took was renewed");
    assert_eq!(subject.used(&one).await, [1]);
}

pub(crate) async fn a_renewed_slot_lives_on(subject: Subject) {
    let one = [slot("k", 1)];
    assert!(subject.is_granted(1, &one).await);
    let end = Instant::now() + 3 * SLOT_TTL;
    while Instant::now() < end {
        assert!(subject.renew(1).await);
        assert!(!subject.is_granted(2, &one).await, "a slot in use was given away");
        sleep(SLOT_TTL / 8).await;
    }
    eventually("the slot lapses", async || {
        subject.is_granted(3, &one).await.then_some(())
    })
    .await;
}

pub(crate) async fn a_batch_of_any_length_is_carried_out(subject: Subject) {
    let entries = [entry("k", Resource::Requests, 1_000, 1), slot("k", 1_000)];
    let ops: Vec<OperationId> = (0..300).map(id).collect();
    let long = Duration::from_secs(30);
    for op in &ops {
        let plan = ChargePlan {
            op: *op,
            entries: entries.to_vec(),
            block: None,
        };
        granted(subject.limiter.charge(&plan, long, soon()).await.unwrap());
    }
    let mut asked = ops.clone();
    asked.push(id(500));
    assert_eq!(subject.limiter.renew(&asked, long, soon()).await.unwrap(), [id(500)]);
    let ended: Vec<Settled> = ops[..100].iter().map(|op| Settled { op: *op, tokens: None }).collect();
    subject.limiter.settle(&ended, soon()).await.unwrap();
    assert_eq!(subject.used(&entries).await, [300, 200]);
    subject.limiter.cancel(&ops, soon()).await.unwrap();
    assert_eq!(subject.used(&entries).await, [0, 0]);
    subject.limiter.cancel(&[], soon()).await.unwrap();
}

pub(crate) async fn a_limit_lowered_below_what_is_used_denies_without_an_underflow(subject: Subject) {
    for op in 0..5 {
        assert!(
            subject
                .is_granted(op, &[entry("k", Resource::Requests, 10, 1), slot("k", 10)])
                .await
        );
    }
    let lowered = plan(9, &[entry("k", Resource::Requests, 2, 1), slot("k", 2)]);
    let Charged::Denied(states) = subject.charge(&lowered).await else {
        panic!("admitted")
    };
    assert!(
        states.iter().all(|state| state.used == 5 && state.exhausted),
        "{states:?}"
    );
    assert_eq!(lowered.denial(&states).unwrap().limit.unwrap().remaining, 0);
}

pub(crate) async fn a_first_charge_of_zero_starts_a_window_that_ends(subject: Subject) {
    let free = [ChargeEntry {
        window_s: 1,
        ..entry("k", Resource::Tokens, 5, 0)
    }];
    let full = [ChargeEntry {
        window_s: 1,
        ..entry("k", Resource::Tokens, 5, 5)
    }];
    assert!(subject.is_granted(1, &free).await);
    assert!(subject.is_granted(2, &full).await);
    assert!(!subject.is_granted(3, &full).await);
    assert!(
        subject.is_granted(4, &free).await,
        "what costs nothing fits into a full window"
    );
    eventually("the window ends", async || {
        subject.is_granted(5, &full).await.then_some(())
    })
    .await;
}

pub(crate) async fn a_limit_of_zero_denies_even_what_costs_nothing(subject: Subject) {
    for entry in [
        entry("k", Resource::Requests, 0, 1),
        entry("k", Resource::Tokens, 0, 0),
        slot("k", 0),
    ] {
        let Charged::Denied(states) = subject.charge(&plan(1, &[entry])).await else {
            panic!("admitted")
        };
        assert!(states[0].exhausted && states[0].used == 0, "{states:?}");
    }
}

pub(crate) async fn ids_never_meet_in_a_key(subject: Subject) {
    let ids = [
        "a",
        "a:b",
        "a%3Ab",
        "{a}",
        "a}:tokens",
        " a",
        "a ",
        "a\u{a0}",
        "🦀",
        "%F0%9F%A6%80",
        "*",
        "op:0",
        "A",
    ];
    for (at, name) in ids.iter().enumerate() {
        let one = [entry(name, Resource::Requests, 1, 1), slot(name, 1)];
        let op = u32::try_from(at).unwrap();
        assert!(subject.is_granted(op, &one).await, "{name:?} met another");
        assert!(!subject.is_granted(op + 100, &one).await, "{name:?} was not counted");
    }
}

pub(crate) async fn a_token_hold_is_charged_whole_and_given_back_whole(subject: Subject) {
    let hold = |cost| {
        [
            entry("k", Resource::Tokens, 100, cost),
            entry("k", Resource::Requests, 10, 1),
        ]
    };
    assert!(subject.is_granted(1, &hold(60)).await);
    assert!(!subject.is_granted(2, &hold(41)).await);
    assert!(subject.is_granted(3, &hold(40)).await);
    subject.cancel(1).await;
    assert_eq!(subject.used(&hold(0)).await, [40, 1]);
    assert!(subject.is_granted(4, &hold(60)).await);
}

pub(crate) async fn capacity_denies_before_contract(subject: Subject) {
    let tier = |limit| {
        let key = key(Scope::Platform, Resource::Requests, &[]);
        let (gate, scope) = (Gate::Capacity, Scope::Platform);
        ChargeEntry {
            gate,
            scope,
            key,
            ..entry("", Resource::Requests, limit, 1)
        }
    };
    let both = [tier(1), entry("k", Resource::Requests, 1, 1)];
    assert!(subject.is_granted(1, &both).await);
    let second = plan(2, &both);
    let Charged::Denied(states) = subject.charge(&second).await else {
        panic!("admitted")
    };
    assert_eq!(second.denial(&states).unwrap().code, Code::CapacityExhausted);
    let third = plan(3, &[tier(5), entry("k", Resource::Requests, 1, 1)]);
    let Charged::Denied(states) = subject.charge(&third).await else {
        panic!("admitted")
    };
    assert_eq!(third.denial(&states).unwrap().code, Code::RateLimited);
}

pub(crate) async fn the_longest_wait_of_the_denying_gate_is_reported(subject: Subject) {
    let short = ChargeEntry {
        window_s: 5,
        ..entry("short", Resource::Requests, 1, 1)
    };
    let long = ChargeEntry {
        window_s: 50,
        ..entry("long", Resource::Requests, 1, 1)
    };
    assert!(
        subject
            .is_granted(1, &[long.clone(), short.clone(), slot("k", 1)])
            .await
    );
    let second = plan(2, &[short, slot("k", 1), long]);
    let Charged::Denied(states) = subject.charge(&second).await else {
        panic!("admitted")
    };
    assert!(states.iter().all(|state| state.exhausted), "{states:?}");
    assert_eq!(second.denial(&states).unwrap().retry_after_s, Some(50));
}

pub(crate) async fn together(subject: &Subject, plans: Vec<ChargePlan>) -> usize {
    let mut calls = tokio::task::JoinSet::new();
    for plan in plans {
        let limiter = Arc::clone(&subject.limiter);
        calls.spawn(async move { limiter.charge(&plan, SLOT_TTL, soon()).await.unwrap() });
    }
    calls
        .join_all()
        .await
        .iter()
        .filter(|charged| matches!(charged, Charged::Granted(_)))
        .count()
}

pub(crate) async fn fifty_concurrent_charges_admit_exactly_the_limit(subject: Subject) {
    let entries = [
        entry("k", Resource::Requests, 17, 1),
        entry("l", Resource::Tokens, 1_000, 10),
    ];
    assert_eq!(
        together(&subject, (0..50).map(|op| plan(op, &entries)).collect()).await,
        17
    );
    assert_eq!(subject.used(&entries).await, [17, 170]);
}

pub(crate) async fn fifty_concurrent_charges_of_one_operation_count_once(subject: Subject) {
    let entries = [entry("k", Resource::Requests, 17, 1), slot("k", 1)];
    assert_eq!(
        together(&subject, (0..50).map(|_| plan(1, &entries)).collect()).await,
        50
    );
    assert_eq!(subject.used(&entries).await, [1, 1]);
}

pub(crate) async fn figures_up_to_two_to_the_53_are_exact(subject: Subject) {
    let of = |cost| [entry("k", Resource::Tokens, LARGEST, cost)];
    assert!(subject.is_granted(1, &of(LARGEST - 2)).await);
    assert_eq!(subject.used(&of(1)).await, [LARGEST - 2]);
    assert!(!subject.is_granted(2, &of(3)).await);
    assert!(!subject.is_granted(3, &of(LARGEST)).await);
    assert!(subject.is_granted(4, &of(1)).await);
    assert_eq!(subject.used(&of(1)).await, [LARGEST - 1]);
    assert!(subject.is_granted(5, &of(1)).await);
    let states = granted(subject.charge(&plan(5, &of(1))).await);
    assert_eq!(states[0].used, LARGEST);
    assert!(!subject.is_granted(6, &of(1)).await);
    assert!(!subject.is_granted(7, &of(u64::MAX)).await);
    subject.cancel(1).await;
    assert_eq!(subject.used(&of(1)).await, [2]);
    // Millions of millions: where a careless script starts to write 1e+15.
    let of = |cost| [entry("l", Resource::Tokens, LARGEST, cost)];
    assert!(subject.is_granted(11, &of(1_000_000_000_000_000)).await);
    assert!(subject.is_granted(12, &of(1_000_000_000_000_001)).await);
    subject.cancel(11).await;
    assert_eq!(subject.used(&of(1)).await, [1_000_000_000_000_001]);
}

pub(crate) async fn a_plan_without_entries_is_granted(subject: Subject) {
    assert_eq!(subject.charge(&plan(1, &[])).await, Charged::Granted(Vec::new()));
    assert_eq!(subject.charge(&plan(1, &[])).await, Charged::Granted(Vec::new()));
    subject.cancel(1).await;
    assert_eq!(subject.charge(&plan(1, &[])).await, Charged::Cancelled);
}

pub(crate) async fn a_ping_is_answered(subject: Subject) {
    subject.limiter.ping(soon()).await.unwrap();
}
