//! The cases about blocks of admissions: how large they are, and what is returned of them.

use std::sync::Arc;

use portcullis_decision::charge::{BlockAsk, ChargeEntry, ChargePlan, Charged, EntryState};
use portcullis_decision::ledger::LARGEST_COUNT;
use portcullis_decision::limits::Resource;
use portcullis_decision::wire::Return;

use crate::stores::eventually;
use crate::subject::{LARGEST, SLOT_TTL, Subject, entry, id, plan, slot, soon};

/// A plan that asks for a block of up to so many admissions, for a request that waits.
fn block(op: u32, entries: &[ChargeEntry], most: u64, parts: u64) -> ChargePlan {
    ChargePlan {
        block: Some(BlockAsk {
            most,
            parts,
            ahead: false,
        }),
        ..plan(op, entries)
    }
}

/// The same, with no request that waits.
fn ahead(op: u32, entries: &[ChargeEntry], most: u64, parts: u64) -> ChargePlan {
    let ask = BlockAsk {
        most,
        parts,
        ahead: true,
    };
    ChargePlan {
        block: Some(ask),
        ..plan(op, entries)
    }
}

/// How many admissions were charged, and where the entries stand.
fn charged(charged: Charged) -> (u64, Vec<EntryState>) {
    match charged {
        Charged::Block { admissions, states } => (admissions, states),
        other => panic!("no block: {other:?}"),
    }
}

async fn admissions(subject: &Subject, plan: &ChargePlan) -> u64 {
    match subject.charge(plan).await {
        Charged::Block { admissions, .. } => admissions,
        Charged::Denied(_) => 0,
        other => panic!("{other:?}"),
    }
}

fn requests(limit: u64) -> [ChargeEntry; 1] {
    [entry("k", Resource::Requests, limit, 1)]
}

/// What goes back of a block, under an id of its own.
fn part(id_of_it: u32, lease: u32, requests: u64, tokens: i64) -> Return {
    Return {
        id: id(id_of_it),
        lease: id(lease),
        requests,
        tokens,
    }
}

async fn give_back(subject: &Subject, parts: &[Return]) {
    subject.limiter.give_back_parts(parts, soon()).await.unwrap();
}

pub(crate) async fn a_block_is_charged_whole_to_every_window(subject: Subject) {
    let both = [
        entry("k", Resource::Requests, 1_000, 1),
        entry("k", Resource::Tokens, 100_000, 30),
        entry("free", Resource::Tokens, 5, 0),
    ];
    let (admissions, states) = charged(subject.charge(&block(1, &both, 50, 8)).await);
    assert_eq!(admissions, 50);
    let used: Vec<u64> = states.iter().map(|state| state.used).collect();
    assert_eq!(used, [50, 1_500, 0]);
    assert!(
        states.iter().all(|state| !state.exhausted && state.reset_ms > 0),
        "{states:?}"
    );
    assert_eq!(subject.used(&both).await, [50, 1_500, 0]);
}

pub(crate) async fn the_size_follows_what_is_left_of_the_tightest_window_and_the_number_of_parts(subject: Subject) {
    let both = [
        entry("k", Resource::Requests, 1_000, 1),
        entry("k", Resource::Tokens, 10_000, 30),
    ];
    // Of 10 000 tokens 333 requests could be made; then of what is left of them.
    assert_eq!(admissions(&subject, &block(1, &both, 256, 8)).await, 41);
    assert_eq!(admissions(&subject, &block(2, &both, 256, 16)).await, 18);
    assert_eq!(admissions(&subject, &block(3, &both, 12, 8)).await, 12);
    assert_eq!(
        admissions(&subject, &block(4, &both, 1_000, 0)).await,
        333 - 41 - 18 - 12
    );
    assert!(matches!(
        subject.charge(&block(5, &both, 256, 1)).await,
        Charged::Denied(_)
    ));
    assert_eq!(subject.used(&both).await, [333, 9_990]);
}

pub(crate) async fn a_block_that_would_be_small_is_one_admission(subject: Subject) {
    assert_eq!(admissions(&subject, &block(1, &requests(64), 256, 8)).await, 8);
    assert_eq!(admissions(&subject, &block(2, &requests(64), 256, 8)).await, 1);
    assert_eq!(admissions(&subject, &block(3, &requests(64), 7, 1)).await, 1);
    assert_eq!(subject.used(&requests(64)).await, [10]);
}

pub(crate) async fn one_gateway_gets_exactly_what_the_limit_allows(subject: Subject) {
    for (name, limit) in [("a", 1_000), ("b", 64), ("c", 7)] {
        let entries = [entry(name, Resource::Requests, limit, 1)];
        let (mut sum, mut blocks, mut op) = (0, 0, limit as u32 * 1_000);
        while let Charged::Block { admissions, .. } = subject.charge(&block(op, &entries, 256, 8)).await {
            sum += admissions;
            blocks += u64::from(admissions > 1);
            op += 1;
        }
        assert_eq!(sum, limit);
        assert_eq!(blocks > 0, limit >= 64, "{blocks} blocks of {limit}");
    }
}

pub(crate) async fn ahead_charges_nothing_where_a_block_would_be_small_and_is_denied_where_nothing_fits(
    subject: Subject,
) {
    let (size, states) = charged(subject.charge(&ahead(1, &requests(64), 256, 9)).await);
    assert_eq!((size, states[0].used), (0, 0));
    assert_eq!(subject.used(&requests(64)).await, [0]);
    // Nothing was written, so there may be one later; and all of it is for later requests.
    assert_eq!(admissions(&subject, &ahead(1, &requests(64), 256, 8)).await, 8);
    assert_eq!(subject.used(&requests(64)).await, [8]);
    assert_eq!(
        charged(subject.charge(&ahead(2, &requests(64), 256, 8)).await).0,
        0,
        "56 are left"
    );
    assert!(matches!(
        subject.charge(&ahead(3, &requests(8), 256, 1)).await,
        Charged::Denied(_)
    ));
    assert_eq!(subject.used(&requests(64)).await, [8]);
}

pub(crate) async fn the_same_operation_again_is_answered_the_same_block(subject: Subject) {
    for ask in [block, ahead] {
        let op = if ask(1, &[], 1, 1).block.unwrap().ahead { 2 } else { 1 };
        let entries = [entry(&op.to_string(), Resource::Requests, 1_000, 1)];
        for most in [100, 100, 9, 500] {
            let (size, states) = charged(subject.charge(&ask(op, &entries, most, 8)).await);
            assert_eq!((size, states[0].used), (100, 100), "asked for {most}");
        }
    }
    assert_eq!(admissions(&subject, &block(3, &requests(9), 100, 8)).await, 1);
    assert_eq!(admissions(&subject, &block(3, &requests(9), 100, 1)).await, 1);
}

pub(crate) async fn a_block_asked_for_again_after_its_window_is_none_any_more(subject: Subject) {
    let windows = |name: &str| {
        let brief = ChargeEntry {
            window_s: 1,
            ..entry(name, Resource::Requests, 100, 1)
        };
        [entry(name, Resource::Tokens, 10_000, 1), brief]
    };
    let (waited_for, fetched) = (windows("a"), windows("b"));
    assert_eq!(admissions(&subject, &block(1, &waited_for, 10, 8)).await, 10);
    assert_eq!(admissions(&subject, &ahead(2, &fetched, 10, 8)).await, 10);
    eventually("the windows end", async || {
        let over = subject.used(&waited_for[1..]).await == [0] && subject.used(&fetched[1..]).await == [0];
        over.then_some(())
    })
    .await;
    // Nothing is charged in the next window, so nothing may be handed out in it.
    assert_eq!(admissions(&subject, &block(1, &waited_for, 10, 8)).await, 1);
    let (size, _) = charged(subject.charge(&ahead(2, &fetched, 10, 8)).await);
    assert_eq!(size, 0);
    assert_eq!(subject.used(&waited_for).await, [10, 0]);
}

pub(crate) async fn a_plan_that_takes_a_slot_has_no_block(subject: Subject) {
    let with_a_slot = [entry("k", Resource::Requests, 1_000, 1), slot("k", 50)];
    let charged = subject.charge(&block(1, &with_a_slot, 100, 1)).await;
    assert!(matches!(charged, Charged::Granted(_)), "{charged:?}");
    assert_eq!(subject.used(&with_a_slot).await, [1, 1]);
}

pub(crate) async fn a_cancel_gives_all_of_a_block_back(subject: Subject) {
    let both = [
        entry("k", Resource::Requests, 1_000, 1),
        entry("k", Resource::Tokens, 100_000, 30),
    ];
    assert_eq!(admissions(&subject, &block(1, &both, 100, 8)).await, 100);
    assert_eq!(admissions(&subject, &ahead(2, &both, 20, 8)).await, 20);
    subject.cancel(1).await;
    assert_eq!(subject.used(&both).await, [20, 600]);
    subject.cancel(2).await;
    subject.cancel(2).await;
    assert_eq!(subject.used(&both).await, [0, 0]);
    assert_eq!(subject.charge(&block(1, &both, 100, 8)).await, Charged::Cancelled);
    subject.cancel(3).await;
    assert_eq!(subject.charge(&ahead(3, &both, 100, 8)).await, Charged::Cancelled);
}

pub(crate) async fn a_settlement_replaces_the_requests_own_hold_and_leaves_its_block(subject: Subject) {
    let both = [
        entry("k", Resource::Requests, 1_000, 1),
        entry("k", Resource::Tokens, 100_000, 30),
    ];
    assert_eq!(admissions(&subject, &block(1, &both, 100, 8)).await, 100);
    subject.settle(1, Some(7)).await;
    subject.settle(1, Some(9)).await;
    assert_eq!(subject.used(&both).await, [100, 7 + 99 * 30]);
    assert_eq!(
        admissions(&subject, &block(1, &both, 100, 8)).await,
        100,
        "settled, and still the same block"
    );
    give_back(&subject, &[part(50, 1, 99, 99 * 30)]).await;
    assert_eq!(subject.used(&both).await, [1, 7]);
    subject.cancel(1).await;
    assert_eq!(subject.used(&both).await, [0, 0]);
    // Where nobody waits there is no hold to replace.
    assert_eq!(admissions(&subject, &ahead(2, &both, 10, 8)).await, 10);
    subject.settle(2, Some(7)).await;
    assert_eq!(subject.used(&both).await, [10, 300]);
}

pub(crate) async fn a_return_is_made_once_and_for_every_window_of_the_block(subject: Subject) {
    let all = [
        entry("k", Resource::Requests, 1_000, 1),
        entry("k", Resource::Tokens, 100_000, 30),
        entry("l", Resource::Requests, 2_000, 1),
        entry("l", Resource::Tokens, 50_000, 30),
    ];
    assert_eq!(admissions(&subject, &block(1, &all, 100, 8)).await, 100);
    for _ in 0..3 {
        give_back(&subject, &[part(50, 1, 40, 1_000)]).await;
        assert_eq!(subject.used(&all).await, [60, 2_000, 60, 2_000]);
    }
    // Under another id it is another one; only tokens, or only requests, may go back.
    give_back(&subject, &[part(51, 1, 0, 15), part(52, 1, 3, 0), part(51, 1, 9, 900)]).await;
    assert_eq!(subject.used(&all).await, [57, 1_985, 57, 1_985]);
    // More was used than was held: it is charged.
    give_back(&subject, &[part(53, 1, 0, -500), part(53, 1, 0, -500)]).await;
    assert_eq!(subject.used(&all).await, [57, 2_485, 57, 2_485]);
}

pub(crate) async fn no_more_goes_back_than_the_block_has_and_what_is_charged_may_go_over_a_limit(subject: Subject) {
    let both = [
        entry("k", Resource::Requests, 100, 1),
        entry("k", Resource::Tokens, 1_000, 10),
    ];
    assert!(subject.is_granted(900, &both).await);
    assert_eq!(admissions(&subject, &block(1, &both, 12, 8)).await, 12);
    give_back(&subject, &[part(50, 1, 500, 5_000)]).await;
    assert_eq!(
        subject.used(&both).await,
        [2, 20],
        "what requests themselves took was returned"
    );
    give_back(&subject, &[part(51, 1, 1, 1), part(52, 1, u64::MAX, i64::MAX)]).await;
    assert_eq!(subject.used(&both).await, [2, 20]);
    give_back(&subject, &[part(53, 1, 0, -2_000)]).await;
    assert_eq!(subject.used(&both).await, [2, 2_020]);
    give_back(&subject, &[part(54, 1, 0, i64::MIN)]).await;
    assert_eq!(subject.used(&both).await, [2, LARGEST_COUNT]);
    subject.cancel(1).await;
    assert_eq!(subject.used(&both).await, [1, 10]);
}

pub(crate) async fn a_cancel_after_returns_gives_back_the_rest(subject: Subject) {
    let both = [
        entry("k", Resource::Requests, 1_000, 1),
        entry("k", Resource::Tokens, 100_000, 30),
    ];
    for op in [1, 2] {
        assert_eq!(admissions(&subject, &block(op, &both, 50, 8)).await, 50);
    }
    give_back(
        &subject,
        &[part(50, 1, 20, 600), part(51, 1, 0, -100), part(52, 2, 0, 25)],
    )
    .await;
    assert_eq!(subject.used(&both).await, [80, 3_000 - 600 + 100 - 25]);
    subject.cancel(1).await;
    assert_eq!(subject.used(&both).await, [50, 1_500 - 25]);
    give_back(&subject, &[part(53, 1, 20, 600)]).await;
    assert_eq!(subject.used(&both).await, [50, 1_500 - 25], "of a cancelled operation");
    subject.cancel(2).await;
    assert_eq!(subject.used(&both).await, [0, 0]);
}

pub(crate) async fn a_return_to_an_operation_without_a_block_changes_nothing(subject: Subject) {
    let both = [
        entry("k", Resource::Requests, 1_000, 1),
        entry("k", Resource::Tokens, 100_000, 30),
    ];
    assert!(subject.is_granted(1, &both).await);
    assert_eq!(admissions(&subject, &block(2, &both, 7, 8)).await, 1);
    give_back(
        &subject,
        &[part(50, 1, 1, 30), part(51, 2, 1, 30), part(52, 77, 1, -30)],
    )
    .await;
    assert_eq!(subject.used(&both).await, [2, 60]);
    // An id under which something went back takes nothing of its own.
    assert_eq!(subject.charge(&plan(50, &both)).await, Charged::Cancelled);
    assert!(
        subject.is_granted(52, &both).await,
        "of an unknown operation nothing went back"
    );
}

pub(crate) async fn a_return_after_its_window_is_gone_is_a_no_op(subject: Subject) {
    let brief = [
        ChargeEntry {
            window_s: 1,
            ..entry("k", Resource::Requests, 100, 1)
        },
        ChargeEntry {
            window_s: 1,
            ..entry("k", Resource::Tokens, 10_000, 10)
        },
    ];
    assert_eq!(admissions(&subject, &block(1, &brief, 10, 8)).await, 10);
    eventually("the window ends", async || {
        (subject.used(&brief).await == [0, 0]).then_some(())
    })
    .await;
    give_back(&subject, &[part(50, 1, 4, -40)]).await;
    assert_eq!(subject.used(&brief).await, [0, 0], "a window came back");
    // A new window of the same key is another one.
    let mut op = 100;
    eventually("a new window", async || {
        op += 2;
        let (size, states) = charged(subject.charge(&block(op, &brief, 10, 8)).await);
        give_back(&subject, &[part(op + 1, 1, 3, 30)]).await;
        let untouched = subject.used(&brief).await;
        subject.cancel(op).await;
        // It may have ended by itself while we looked.
        (size == 10 && states[0].used == 10 && untouched != [0, 0]).then(|| {
            assert_eq!(untouched, [10, 100]);
        })
    })
    .await;
}

pub(crate) async fn a_batch_of_returns_is_carried_out(subject: Subject) {
    let both = [
        entry("k", Resource::Requests, 10_000, 1),
        entry("k", Resource::Tokens, 1_000_000, 30),
    ];
    for op in 0..4 {
        assert_eq!(admissions(&subject, &ahead(op, &both, 200, 8)).await, 200);
    }
    let parts: Vec<Return> = (0..600).map(|n| part(1_000 + n % 500, n % 4, 1, 10)).collect();
    give_back(&subject, &parts).await;
    assert_eq!(subject.used(&both).await, [300, 24_000 - 5_000]);
    give_back(&subject, &[]).await;
}

pub(crate) async fn fifty_concurrent_blocks_never_exceed_the_limit(subject: Subject) {
    let entries = [
        entry("k", Resource::Requests, 1_003, 1),
        entry("k", Resource::Tokens, 20_000, 10),
    ];
    let mut calls = tokio::task::JoinSet::new();
    for worker in 0..50_u32 {
        let limiter = Arc::clone(&subject.limiter);
        calls.spawn(async move {
            let mut sum = 0;
            for turn in 0..40 {
                let op = 1 + worker * 100 + turn;
                let asked = if turn % 3 == 0 { ahead } else { block }(op, &entries_of(), 64, 8);
                match limiter.charge(&asked, SLOT_TTL, soon()).await.unwrap() {
                    Charged::Block { admissions, .. } => sum += admissions,
                    Charged::Denied(_) => {}
                    other => panic!("{other:?}"),
                }
            }
            sum
        });
    }
    let sum: u64 = calls.join_all().await.iter().sum();
    assert_eq!(sum, 1_003, "all of it, and no more");
    assert_eq!(subject.used(&entries).await, [1_003, 10_030]);
}

fn entries_of() -> [ChargeEntry; 2] {
    [
        entry("k", Resource::Requests, 1_003, 1),
        entry("k", Resource::Tokens, 20_000, 10),
    ]
}

pub(crate) async fn blocks_and_returns_at_the_same_time_never_exceed_the_limit(subject: Subject) {
    let mut calls = tokio::task::JoinSet::new();
    for worker in 0..50_u32 {
        let limiter = Arc::clone(&subject.limiter);
        calls.spawn(async move {
            let mut kept = 0;
            for turn in 0..12 {
                let op = 1 + worker * 100 + turn;
                let asked = block(op, &entries_of(), 64, 8);
                let Charged::Block { admissions, states } = limiter.charge(&asked, SLOT_TTL, soon()).await.unwrap()
                else {
                    continue;
                };
                assert!(states[0].used <= 1_003, "{states:?}");
                let back = (admissions - 1) / 2;
                // Twice: one of them is late.
                let tokens = i64::try_from(back * 10).unwrap();
                let parts = [part(10_000 + op, op, back, tokens); 2];
                limiter.give_back_parts(&parts, soon()).await.unwrap();
                kept += admissions - back;
            }
            kept
        });
    }
    let kept: u64 = calls.join_all().await.iter().sum();
    assert!(kept <= 1_003, "{kept} were admitted");
    assert_eq!(subject.used(&entries_of()).await, [kept, kept * 10]);
}

pub(crate) async fn blocks_up_to_two_to_the_53_are_exact(subject: Subject) {
    let of = |cost| [entry("k", Resource::Tokens, LARGEST, cost)];
    // 2^53 - 1 = 6361 * 69431 * 20394401.
    assert_eq!(
        admissions(&subject, &ahead(1, &of(6_361), u64::MAX, 69_431)).await,
        20_394_401
    );
    assert_eq!(subject.used(&of(0)).await, [6_361 * 20_394_401]);
    subject.cancel(1).await;
    assert_eq!(admissions(&subject, &ahead(2, &of(1), u64::MAX, 0)).await, LARGEST);
    assert_eq!(subject.used(&of(0)).await, [LARGEST]);
    give_back(
        &subject,
        &[part(50, 2, 0, i64::try_from(LARGEST).unwrap() - 1_000_000_000_000_001)],
    )
    .await;
    assert_eq!(subject.used(&of(0)).await, [1_000_000_000_000_001]);
    // One less than a multiple, where a rounded quotient would be one too many.
    let (limit, cost) = (LARGEST - 1, 3);
    let entries = [entry("l", Resource::Tokens, limit, cost)];
    assert_eq!(
        admissions(&subject, &ahead(3, &entries, u64::MAX, 1)).await,
        limit / cost
    );
    let entries = [entry("m", Resource::Requests, LARGEST, 1)];
    assert_eq!(
        admissions(&subject, &ahead(4, &entries, u64::MAX, 2)).await,
        LARGEST / 2
    );
}
