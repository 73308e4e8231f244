//! Random interleavings of two workers that share leases, of what the service grants them and of a memory that fails, races,
//! evicts and is written by strangers: nothing is handed out beyond what was granted and has not gone back, nothing goes
//! back twice, and nothing traps. Where nobody meddles, everything granted is handed out or goes back.
//!
//! Left out on purpose: bodies and responses, which the other interleavings have; and runs in which a host counts versions
//! anew after an eviction while a worker is between its read and its write, as workers of a test take turns.

mod run;

use portcullis_test_host::{Meddle, Personality, SharedDataKind};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};

use crate::interleavings::bounded;
use crate::lease_interleavings::run::Run;

/// Who asks. Two of them meet in the same slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bundle {
    First,
    Second,
    /// With a token limit.
    Tokens,
    /// Another limit of the first.
    Changed,
}

/// How a call to the service ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Admitted, with a block of so many if one is asked for, that ends in so many milliseconds.
    Grant(u64, u64),
    /// Denied until this many milliseconds have passed.
    Deny(u64),
    /// A dependency is down.
    Unavailable,
    /// No answer.
    Lost,
    /// An answer that is none.
    Garbage,
}

/// One thing that happens.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    /// A request comes to one of the workers.
    Request(usize, Bundle),
    /// A call that is out ends.
    Answer(Index, Answer),
    /// A stream ends.
    Finish(Index),
    /// Time passes, with ticks.
    Tick(u64),
    /// Time passes without.
    Jump(u64),
    /// Somebody comes before the next write.
    Meddle(Meddle),
    /// A value vanishes.
    Evict(Index),
    /// A stranger writes bytes, or a part of what is there.
    Put(Index, Vec<u8>, Option<Index>),
    /// The next call of this name fails, or every one.
    Break(usize, &'static str, u32, bool),
    /// Every call works again.
    Heal,
    /// A worker ends as it should, or dies; another takes its place.
    Replace(usize, bool),
    /// A worker is configured anew, with the same text or another one.
    Reconfigure(usize, bool),
}

fn answer() -> impl Strategy<Value = Answer> {
    prop_oneof![
        6 => (1_u64..40, select(vec![50, 400, 1_000, 60_000])).prop_map(|(most, ends_ms)| Answer::Grant(most, ends_ms)),
        1 => select(vec![0, 200, 40_000]).prop_map(Answer::Deny),
        2 => select(vec![Answer::Unavailable, Answer::Lost, Answer::Garbage]),
    ]
}

fn step(meddles: bool) -> BoxedStrategy<Step> {
    let bundle = select(vec![
        Bundle::First,
        Bundle::First,
        Bundle::First,
        Bundle::Second,
        Bundle::Tokens,
        Bundle::Changed,
    ]);
    let works = prop_oneof![
        14 => (0_usize..2, bundle).prop_map(|(worker, bundle)| Step::Request(worker, bundle)),
        7 => (any::<Index>(), answer()).prop_map(|(call, answer)| Step::Answer(call, answer)),
        3 => any::<Index>().prop_map(Step::Finish),
        2 => select(vec![20_u64, 200, 400, 1_100]).prop_map(Step::Tick),
        // A worker that does not tick for a second counts as dead.
        1 => Just(Step::Jump(5)),
    ];
    if !meddles {
        return works.boxed();
    }
    let bytes = || vec(any::<u8>(), 0..200);
    let meddle = prop_oneof![
        4 => Just(Meddle::Touch),
        1 => Just(Meddle::Evict),
        1 => Just(Meddle::Nothing),
        1 => bytes().prop_map(Meddle::Write),
    ];
    let calls = vec![
        "proxy_get_shared_data",
        "proxy_set_shared_data",
        "proxy_http_call",
        "random_get",
        "proxy_set_effective_context",
    ];
    prop_oneof![
        20 => works,
        4 => meddle.prop_map(Step::Meddle),
        1 => any::<Index>().prop_map(Step::Evict),
        1 => (any::<Index>(), bytes(), any::<Option<Index>>()).prop_map(|(key, bytes, cut)| Step::Put(key, bytes, cut)),
        3 => (0_usize..2, select(calls), select(vec![1, 2, 6, 8, 10, 12, 255]), any::<bool>())
            .prop_map(|(worker, call, status, always)| Step::Break(worker, call, status, always)),
        2 => Just(Step::Heal),
        1 => select(vec![300, 1_500]).prop_map(Step::Jump),
        1 => (0_usize..2, any::<bool>()).prop_map(|(worker, drains)| Step::Replace(worker, drains)),
        1 => (0_usize..2, any::<bool>()).prop_map(|(worker, changes)| Step::Reconfigure(worker, changes)),
    ]
    .boxed()
}

fn personality() -> impl Strategy<Value = Personality> {
    let without_ticks = Personality {
        ticks: false,
        ..Personality::ENVOY
    };
    prop_oneof![6 => ticking(), 1 => Just(without_ticks), 1 => Just(Personality::APISIX)]
}

fn ticking() -> impl Strategy<Value = Personality> {
    select(vec![Personality::ENVOY, Personality::WASMX])
}

proptest! {
    #![proptest_config(bounded(500))]

    #[test]
    fn whoever_meddles_no_more_is_handed_out_than_was_granted(
        steps in vec(step(true), 1..90),
        personality in personality(),
        seed in any::<u32>(),
    ) {
        let run = taken(&steps, personality, seed)?;
        if personality.shared_data == SharedDataKind::Missing {
            prop_assert_eq!(run.hits(), 0);
        }
        let broken = run.audit();
        prop_assert!(broken.is_empty(), "{broken:#?}");
    }

    #[test]
    fn where_nobody_meddles_everything_granted_is_handed_out_or_goes_back(
        steps in vec(step(false), 1..90),
        personality in ticking(),
        seed in any::<u32>(),
    ) {
        let run = taken(&steps, personality, seed)?;
        let mut broken = run.audit();
        broken.extend(run.audit_of_the_whole());
        prop_assert!(broken.is_empty(), "{broken:#?}");
    }
}

fn taken(steps: &[Step], personality: Personality, seed: u32) -> Result<Run, TestCaseError> {
    let mut run = Run::new(personality, seed);
    for step in steps {
        run.take(step);
        let violations = run.violations();
        prop_assert!(violations.is_empty(), "after {step:?}: {violations:?}");
    }
    run.finish();
    let violations = run.violations();
    prop_assert!(violations.is_empty(), "at the end: {violations:?}");
    Ok(run)
}
