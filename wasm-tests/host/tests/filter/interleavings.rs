//! Random interleavings of everything that a host may do, held against the filter's invariants: at most one reply and one
//! resume per request and never both, no pause without an end, no trap, nothing told that was never asked, everything
//! asked and not decided is cancelled, and nothing goes up past closed rules without an admission or a part of a block. Bodies and responses come
//! in pieces: a body goes up as it came, and what was charged is settled, released or cancelled once.
//!
//! What is left out on purpose: runs longer than the outbox keeps an entry (120 s), in which dropping is right.

mod accounts;
mod audit;
mod leased;
mod step;

use std::cell::RefCell;

use portcullis_test_host::{Personality, TestHost, Violation};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, FileFailurePersistence, TestRunner};

use crate::interleavings::audit::Run;
use crate::interleavings::step::{Raw, Step, raw, step};

pub(crate) fn bounded(cases: u32) -> Config {
    let is_quick = std::env::var_os("PORTCULLIS_QUICK").is_some();
    Config {
        // `PROPTEST_CASES` asks for a longer search.
        cases: std::env::var("PROPTEST_CASES")
            .ok()
            .and_then(|n| n.parse().ok())
            .unwrap_or(if is_quick { cases / 4 } else { cases }),
        max_shrink_iters: 4_000,
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("regressions"))),
        ..Config::default()
    }
}

/// Looks for a value of the strategy with which the test fails. For tests that go on with one host.
pub(crate) fn for_all<S: Strategy>(cases: u32, strategy: &S, test: impl FnMut(S::Value) -> Result<(), TestCaseError>) {
    let test = RefCell::new(test);
    let found = TestRunner::new(bounded(cases)).run(strategy, |value| (test.borrow_mut())(value));
    if let Err(error) = found {
        panic!("{error}");
    }
}

proptest! {
    #![proptest_config(bounded(800))]

    #[test]
    fn a_host_whose_calls_work_sees_every_request_end_once(
        steps in vec(step(false), 1..60),
        drains in any::<bool>(),
        seed in any::<u64>(),
        leases in any::<bool>(),
    ) {
        run(&steps, drains, seed, leases)?;
    }

    #[test]
    fn a_host_whose_calls_fail_at_random_sees_every_request_end_once(
        steps in vec(step(true), 1..60),
        drains in any::<bool>(),
        seed in any::<u64>(),
        leases in any::<bool>(),
    ) {
        run(&steps, drains, seed, leases)?;
    }

    #[test]
    fn callbacks_in_any_order_and_for_any_context_never_trap(
        calls in vec(raw(), 1..80),
        configured in 0_usize..3,
    ) {
        let mut host = TestHost::new(Personality::ENVOY);
        for _ in 0..configured {
            host.configure(&audit::closed_configuration()).expect("no faults");
        }
        for Raw { name, context, arguments } in &calls {
            let mut all = vec![*context];
            all.extend(arguments);
            host.callback(name, *context, &all);
            let trap = host.violations().iter().find(|violation| matches!(violation, Violation::Trap { .. }));
            prop_assert!(trap.is_none(), "{name} {all:?}: {trap:?}");
        }
    }
}

fn run(steps: &[Step], drains: bool, seed: u64, leases: bool) -> Result<(), TestCaseError> {
    let mut run = Run::new(seed, leases);
    for step in steps {
        run.take(step);
        let violations = run.host.violations();
        prop_assert!(violations.is_empty(), "after {step:?}: {violations:?}");
    }
    run.finish(drains);
    let violations = run.host.violations();
    prop_assert!(violations.is_empty(), "at the end: {violations:?}");
    let broken = run.audit();
    prop_assert!(broken.is_empty(), "{broken:#?}");
    Ok(())
}
