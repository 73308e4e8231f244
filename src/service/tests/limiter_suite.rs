//! What every limiter does, whatever its store: the same cases by name for each.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    missing_docs,
    reason = "a test may stop at the first surprise"
)]

mod stores;

use std::sync::Arc;
use std::time::Duration;

use portcullis_decision::charge::{ChargeEntry, ChargePlan, Charged, EntryState, key};
use portcullis_decision::class::Code;
use portcullis_decision::limits::{Resource, Scope};
use portcullis_decision::operation::OperationId;
use portcullis_decision::rules::Gate;
use portcullis_service::limiter::Limiter;
use stores::{Store, eventually, is_installed, open};
use tokio::time::{Instant, sleep};

const SLOT_TTL: Duration = Duration::from_millis(400);
const LARGEST: u64 = (1 << 53) - 1;

/// A limiter and what it needs to live.
struct Subject {
    limiter: Arc<dyn Limiter>,
    _store: Option<Store>,
}

impl Subject {
    fn memory() -> Option<Self> {
        Some(Self {
            limiter: open("memory:", 100),
            _store: None,
        })
    }

    async fn store(program: &'static str) -> Option<Self> {
        let store = Store::start(program, &[]).await;
        Some(Self {
            limiter: open(&store.url(), 2_000),
            _store: Some(store),
        })
    }

    async fn valkey() -> Option<Self> {
        if is_installed("valkey-server") {
            Self::store("valkey-server").await
        } else {
            None
        }
    }

    async fn charge(&self, plan: &ChargePlan) -> Charged {
        self.limiter.charge(plan, SLOT_TTL, soon()).await.unwrap()
    }

    async fn is_granted(&self, op: u32, entries: &[ChargeEntry]) -> bool {
        matches!(self.charge(&plan(op, entries)).await, Charged::Granted(_))
    }

    /// What every entry counts, by a charge that is denied: an entry in front that nothing fits in.
    async fn used(&self, entries: &[ChargeEntry]) -> Vec<u64> {
        let mut all = vec![entry("blocked", Resource::Requests, 0, 1)];
        all.extend_from_slice(entries);
        let Charged::Denied(states) = self.charge(&plan(999_999, &all)).await else {
            panic!("a limit of 0 admitted")
        };
        states.iter().skip(1).map(|state| state.used).collect()
    }

    async fn cancel(&self, op: u32) {
        self.limiter.cancel(&[id(op)], soon()).await.unwrap();
    }

    async fn release(&self, op: u32) {
        self.limiter.release(&[id(op)], soon()).await.unwrap();
    }

    async fn renew(&self, op: u32) -> bool {
        self.limiter
            .renew(&[id(op)], SLOT_TTL, soon())
            .await
            .unwrap()
            .is_empty()
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(5)
}

fn id(n: u32) -> OperationId {
    OperationId::from_random(u128::from(n).to_be_bytes())
}

fn entry(name: &str, resource: Resource, limit: u64, cost: u64) -> ChargeEntry {
    let key = key(Scope::Org, resource, &[name]);
    ChargeEntry {
        gate: Gate::Contract,
        scope: Scope::Org,
        resource,
        key,
        limit,
        cost,
        window_s: 60,
    }
}

fn brief(name: &str, limit: u64, cost: u64) -> ChargeEntry {
    ChargeEntry {
        window_s: 1,
        ..entry(name, Resource::Requests, limit, cost)
    }
}

fn slot(name: &str, limit: u64) -> ChargeEntry {
    entry(name, Resource::Concurrency, limit, 1)
}

fn plan(op: u32, entries: &[ChargeEntry]) -> ChargePlan {
    ChargePlan {
        op: id(op),
        entries: entries.to_vec(),
    }
}

fn granted(charged: Charged) -> Vec<EntryState> {
    match charged {
        Charged::Granted(states) => states,
        other => panic!("not granted: {other:?}"),
    }
}

macro_rules! suite {
    ($($case:ident),+ $(,)?) => {
        mod memory {
            $(#[tokio::test] async fn $case() { super::$case(super::Subject::memory().unwrap()).await; })+
        }
        mod redis {
            $(#[tokio::test] async fn $case() {
                super::$case(super::Subject::store("redis-server").await.unwrap()).await;
            })+
        }
        /// Passes without a look where no such server is installed.
        mod valkey {
            $(#[tokio::test] async fn $case() {
                if let Some(subject) = super::Subject::valkey().await {
                    super::$case(subject).await;
                }
            })+
        }
    };
}

suite!(
    a_window_starts_with_its_first_charge_and_retry_after_is_enough,
    a_denied_request_charges_no_scope,
    one_operation_is_charged_once_however_often_it_is_asked,
    a_cancel_gives_everything_back_whichever_arrives_first,
    a_refund_after_its_window_is_gone_is_a_no_op,
    a_released_slot_is_free_and_only_its_own_holder_frees_it,
    a_lapsed_slot_is_free_and_never_revived,
    a_renewed_slot_lives_on,
    a_batch_of_any_length_is_carried_out,
    a_limit_lowered_below_what_is_used_denies_without_an_underflow,
    a_first_charge_of_zero_starts_a_window_that_ends,
    a_limit_of_zero_denies_even_what_costs_nothing,
    ids_never_meet_in_a_key,
    a_token_hold_is_charged_whole_and_given_back_whole,
    capacity_denies_before_contract,
    the_longest_wait_of_the_denying_gate_is_reported,
    fifty_concurrent_charges_admit_exactly_the_limit,
    fifty_concurrent_charges_of_one_operation_count_once,
    figures_up_to_two_to_the_53_are_exact,
    a_plan_without_entries_is_granted,
    a_ping_is_answered,
);

async fn a_window_starts_with_its_first_charge_and_retry_after_is_enough(subject: Subject) {
    let one = [brief("o", 1, 1)];
    let start = Instant::now();
    let states = granted(subject.charge(&plan(1, &one)).await);
    assert_eq!(
        (states[0].used, states[0].reset_ms, states[0].exhausted),
        (1, 1_000, false)
    );
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
        sleep(Duration::from_millis(last_ms.max(1).min(200))).await;
    }
    assert!(
        start.elapsed() >= Duration::from_millis(990),
        "the window ended after {:?}",
        start.elapsed()
    );
    assert!(
        start.elapsed() <= Duration::from_millis(1_500),
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

async fn a_denied_request_charges_no_scope(subject: Subject) {
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

async fn one_operation_is_charged_once_however_often_it_is_asked(subject: Subject) {
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

async fn a_cancel_gives_everything_back_whichever_arrives_first(subject: Subject) {
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

async fn a_refund_after_its_window_is_gone_is_a_no_op(subject: Subject) {
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

async fn a_released_slot_is_free_and_only_its_own_holder_frees_it(subject: Subject) {
    let one = [slot("k", 1), entry("k", Resource::Requests, 10, 1)];
    assert!(subject.is_granted(1, &one).await);
    assert!(!subject.is_granted(2, &one).await);
    subject.release(2).await;
    assert!(!subject.is_granted(2, &one).await, "somebody else's slot was freed");
    subject.release(1).await;
    subject.release(1).await;
    assert!(!subject.renew(1).await, "a slot that was given back came back");
    assert!(subject.is_granted(3, &one).await);
    subject.release(1).await;
    assert_eq!(subject.used(&one).await, [1, 2]);
}

async fn a_lapsed_slot_is_free_and_never_revived(subject: Subject) {
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

async fn a_renewed_slot_lives_on(subject: Subject) {
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

async fn a_batch_of_any_length_is_carried_out(subject: Subject) {
    let entries = [entry("k", Resource::Requests, 1_000, 1), slot("k", 1_000)];
    let ops: Vec<OperationId> = (0..150).map(id).collect();
    let long = Duration::from_secs(30);
    for op in &ops {
        let plan = ChargePlan {
            op: *op,
            entries: entries.to_vec(),
        };
        granted(subject.limiter.charge(&plan, long, soon()).await.unwrap());
    }
    let mut asked = ops.clone();
    asked.push(id(500));
    assert_eq!(subject.limiter.renew(&asked, long, soon()).await.unwrap(), [id(500)]);
    subject.limiter.release(&ops[..100], soon()).await.unwrap();
    assert_eq!(subject.used(&entries).await, [150, 50]);
    subject.limiter.cancel(&ops, soon()).await.unwrap();
    assert_eq!(subject.used(&entries).await, [0, 0]);
    subject.limiter.cancel(&[], soon()).await.unwrap();
}

async fn a_limit_lowered_below_what_is_used_denies_without_an_underflow(subject: Subject) {
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

async fn a_first_charge_of_zero_starts_a_window_that_ends(subject: Subject) {
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

async fn a_limit_of_zero_denies_even_what_costs_nothing(subject: Subject) {
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

async fn ids_never_meet_in_a_key(subject: Subject) {
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

async fn a_token_hold_is_charged_whole_and_given_back_whole(subject: Subject) {
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

async fn capacity_denies_before_contract(subject: Subject) {
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

async fn the_longest_wait_of_the_denying_gate_is_reported(subject: Subject) {
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

async fn together(subject: &Subject, plans: Vec<ChargePlan>) -> usize {
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

async fn fifty_concurrent_charges_admit_exactly_the_limit(subject: Subject) {
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

async fn fifty_concurrent_charges_of_one_operation_count_once(subject: Subject) {
    let entries = [entry("k", Resource::Requests, 17, 1), slot("k", 1)];
    assert_eq!(
        together(&subject, (0..50).map(|_| plan(1, &entries)).collect()).await,
        50
    );
    assert_eq!(subject.used(&entries).await, [1, 1]);
}

async fn figures_up_to_two_to_the_53_are_exact(subject: Subject) {
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

async fn a_plan_without_entries_is_granted(subject: Subject) {
    assert_eq!(subject.charge(&plan(1, &[])).await, Charged::Granted(Vec::new()));
    assert_eq!(subject.charge(&plan(1, &[])).await, Charged::Granted(Vec::new()));
    subject.cancel(1).await;
    assert_eq!(subject.charge(&plan(1, &[])).await, Charged::Cancelled);
}

async fn a_ping_is_answered(subject: Subject) {
    subject.limiter.ping(soon()).await.unwrap();
}
