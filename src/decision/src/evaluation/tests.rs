//! Gates in their order, over the real ledger, with outages.

#[cfg(target_arch = "wasm32")]
use wasm_bindgen_test::wasm_bindgen_test as test;

use super::*;
use crate::allowance::Allowances;
use crate::class::Code;
use crate::config::{Mode, Profile};
use crate::ledger::Ledger;
use crate::limits::{Limit, Resource, Scope, ScopeLimits, StampedLimits};
use crate::wire::Subject;

mod prices;

/// The gates that an admission passed without a check.
fn bypassed_gates(admission: &Admission) -> Vec<&'static str> {
    admission.bypassed.iter().map(|bypass| bypass.gate.name()).collect()
}

enum Store<'a> {
    Ledger(&'a mut Ledger),
    Missing,
    Down,
}

const MONTH: crate::metering::Month = crate::metering::Month {
    index: 24_318,
    ends_in_ms: 86_400_000,
    length_s: 2_592_000,
};

fn decide(request: &DecideRequest, operator: &Operator, store: &mut Store<'_>) -> Verdict {
    let mut allowances = Allowances::default();
    let mut allow = |class, choice| allowances.admit(class, choice, 0);
    let mut evaluation = Evaluation::new(request, operator);
    loop {
        match evaluation.step(&mut allow) {
            Step::Charge(plan) => {
                let answer = match store {
                    Store::Ledger(ledger) => LimiterAnswer::Charged(ledger.charge(0, &plan, operator.slot_ttl_ms)),
                    Store::Missing => LimiterAnswer::NoLimiter,
                    Store::Down => LimiterAnswer::Unavailable,
                };
                evaluation.charged(answer, &mut allow);
            }
            Step::Policy { .. } => evaluation.policy(PolicyView::UNAVAILABLE),
            Step::Meter(_) => evaluation.metered(None, &MONTH, &mut allow),
            Step::Launch { .. } => evaluation.launched(Ok(())),
            Step::GiveBack(taken) => {
                if let (Store::Ledger(ledger), Some(op)) = (&mut *store, taken.limiter) {
                    ledger.cancel(0, op);
                }
            }
            Step::Done(verdict) => return verdict,
        }
    }
}

fn operator(platform: Option<u64>) -> Operator {
    let mut tiers = Tiers::default();
    if let Some(figure) = platform {
        tiers.platform = ScopeLimits {
            requests: Limit::of(figure),
            ..ScopeLimits::default()
        };
    }
    Operator {
        tiers,
        window_s: 60,
        slot_ttl_ms: 30_000,
    }
}

fn request(n: u8, gates: &[GateRule], org_limit: Option<u64>) -> DecideRequest {
    let mut limits = StampedLimits::default();
    if let Some(figure) = org_limit {
        limits.set(Scope::Org, Resource::Requests, Limit::of(figure));
    }
    DecideRequest {
        op: OperationId::from_random([n; 16]),
        profile: Profile::Development,
        rules: "r".into(),
        mode: Mode::Enforce,
        gates: gates.to_vec(),
        budget_ms: 100,
        window_s: 60,
        subject: Subject {
            owner: "o".into(),
            org: Some("g".into()),
            model: Some("m".into()),
            ..Subject::default()
        },
        limits,
        tokens: 1,
        request_id: None,
        retry: false,
        lease: None,
    }
}

const fn contract(when_unavailable: Choice) -> GateRule {
    GateRule::Contract {
        when_unavailable,
        limits: crate::rules::LimitSource::Envelope,
    }
}

const fn capacity(when_unavailable: Choice) -> GateRule {
    GateRule::Capacity { when_unavailable }
}

fn code(verdict: &Verdict) -> Option<Code> {
    match verdict {
        Verdict::Deny(denial) => Some(denial.code),
        _ => None,
    }
}

#[test]
fn the_tighter_limit_decides_and_capacity_answers_when_both_are_spent() {
    let gates = [capacity(Choice::Reject), contract(Choice::Reject)];
    for (tier, contract_limit, admitted, expected) in [
        (2, 5, 2, Code::CapacityExhausted),
        (5, 2, 2, Code::RateLimited),
        (3, 3, 3, Code::CapacityExhausted),
    ] {
        let mut ledger = Ledger::default();
        let operator = operator(Some(tier));
        for n in 0..6 {
            let verdict = decide(
                &request(n, &gates, Some(contract_limit)),
                &operator,
                &mut Store::Ledger(&mut ledger),
            );
            let expected = (n >= admitted).then_some(expected);
            assert_eq!(
                code(&verdict),
                expected,
                "tier {tier}, contract {contract_limit}, request {n}"
            );
        }
    }
}

#[test]
fn an_unavailable_limiter_is_closed_or_opened_by_the_gates_that_had_something_to_check() {
    let open_capacity = [capacity(Choice::Admit), contract(Choice::Reject)];
    // No tier binds: capacity has nothing to check, so only the contract's choice counts.
    let verdict = decide(&request(0, &open_capacity, Some(5)), &operator(None), &mut Store::Down);
    assert!(matches!(verdict, Verdict::Unavailable(u) if u.gate == Some(Gate::Contract)));
    let verdict = decide(&request(0, &open_capacity, None), &operator(Some(1)), &mut Store::Down);
    let Verdict::Admit(admission) = verdict else {
        panic!("{verdict:?}")
    };
    assert_eq!(bypassed_gates(&admission), ["capacity"]);
    let verdict = decide(&request(0, &open_capacity, None), &operator(None), &mut Store::Down);
    assert_eq!(verdict, Verdict::Admit(Admission::default()));
}

#[test]
fn a_limit_of_zero_is_known_without_a_store() {
    for choice in [Choice::Admit, Choice::Reject] {
        for store in [Store::Down, Store::Missing] {
            let mut store = store;
            let verdict = decide(&request(0, &[contract(choice)], Some(0)), &operator(None), &mut store);
            assert_eq!(code(&verdict), Some(Code::RateLimited));
            let gates = [capacity(choice), contract(choice)];
            let verdict = decide(&request(0, &gates, Some(0)), &operator(Some(0)), &mut store);
            assert_eq!(code(&verdict), Some(Code::CapacityExhausted));
        }
    }
}

#[test]
fn without_a_limiter_everything_is_admitted_and_says_so() {
    let verdict = decide(
        &request(0, &[contract(Choice::Reject)], Some(1)),
        &operator(None),
        &mut Store::Missing,
    );
    assert!(matches!(verdict, Verdict::Admit(admission) if admission.unenforced));
}

#[test]
fn a_later_gate_that_stays_closed_gives_back_what_earlier_ones_took() {
    let gates = [
        contract(Choice::Reject),
        GateRule::Metering {
            when_unavailable: Choice::Reject,
        },
    ];
    let mut ledger = Ledger::default();
    for n in 0..5 {
        let verdict = decide(
            &request(n, &gates, Some(1)),
            &operator(None),
            &mut Store::Ledger(&mut ledger),
        );
        assert!(
            matches!(verdict, Verdict::Unavailable(u) if u.dependency == Dependency::Metering),
            "request {n}"
        );
    }
    let only_contract = request(9, &[contract(Choice::Reject)], Some(1));
    let verdict = decide(&only_contract, &operator(None), &mut Store::Ledger(&mut ledger));
    assert!(matches!(verdict, Verdict::Admit(_)));
}

#[test]
fn a_listed_gate_without_a_store_is_opened_or_closed_and_never_passed_over() {
    for gate in [
        Gate::OrgStatus,
        Gate::ModelPolicy,
        Gate::Concurrency,
        Gate::MonthlyQuota,
        Gate::CostCap,
    ] {
        for choice in [Choice::Admit, Choice::Reject] {
            let rule: GateRule =
                serde_json::from_value(serde_json::json!({"gate": gate, "when_unavailable": choice})).unwrap();
            let verdict = decide(&request(0, &[rule], None), &operator(None), &mut Store::Missing);
            match verdict {
                Verdict::Admit(admission) => {
                    assert_eq!(
                        (choice, bypassed_gates(&admission)),
                        (Choice::Admit, alloc::vec![gate.name()])
                    );
                }
                Verdict::Unavailable(unavailable) => {
                    assert_eq!((choice, unavailable.gate), (Choice::Reject, Some(gate)))
                }
                Verdict::Deny(_) => panic!("an outage of {} was reported as a denial", gate.name()),
            }
        }
    }
}

#[test]
fn a_cancelled_operation_is_never_admitted_nor_opened() {
    let mut ledger = Ledger::default();
    ledger.cancel(0, OperationId::from_random([1; 16]));
    for choice in [Choice::Reject, Choice::Admit] {
        let request = request(1, &[contract(choice)], Some(5));
        let verdict = decide(&request, &operator(None), &mut Store::Ledger(&mut ledger));
        assert!(matches!(verdict, Verdict::Unavailable(_)));
    }
}

#[test]
fn an_emergency_allowance_is_not_spent_by_requests_that_are_refused_all_the_same() {
    let bounded = Choice::AdmitAtMost { max_per_minute: 1 };
    let gates = [
        contract(bounded),
        GateRule::Metering {
            when_unavailable: Choice::Reject,
        },
    ];
    let request = request(1, &gates, Some(5));
    let operator = operator(None);
    let mut allowances = Allowances::default();
    for _ in 0..3 {
        let mut evaluation = Evaluation::new(&request, &operator);
        let mut given_back = Vec::new();
        let verdict = loop {
            let mut allow = |class, choice| allowances.admit(class, choice, 0);
            match evaluation.step(&mut allow) {
                Step::Charge(_) => evaluation.charged(LimiterAnswer::Unavailable, &mut allow),
                Step::Meter(_) => evaluation.metered(None, &MONTH, &mut allow),
                Step::GiveBack(taken) => given_back.extend(taken.allowances),
                Step::Done(verdict) => break verdict,
                other => panic!("{other:?}"),
            }
        };
        // Always metering's refusal: the limiter's allowance is there each time.
        assert!(matches!(verdict, Verdict::Unavailable(u) if u.dependency == Dependency::Metering));
        given_back.into_iter().for_each(|class| allowances.give_back(class));
    }
}

#[test]
fn gates_that_are_torn_apart_or_stand_twice_are_refused_on_the_wire() {
    let metering = GateRule::Metering {
        when_unavailable: Choice::Reject,
    };
    let quota = GateRule::MonthlyQuota {
        when_unavailable: Choice::Reject,
    };
    let fault = |gates: &[GateRule]| request_fault(&request(1, gates, None));
    assert_eq!(fault(&[contract(Choice::Reject), quota, metering]), None);
    for gates in [
        &[metering, contract(Choice::Reject), quota][..],
        &[contract(Choice::Reject), metering, capacity(Choice::Reject)],
        &[metering, metering],
    ] {
        assert!(fault(gates).is_some(), "{gates:?}");
    }
}

#[test]
fn a_tier_per_organization_needs_the_org_id() {
    let mut operator = operator(None);
    operator.tiers.organization.requests = Limit::of(5);
    let mut request = request(1, &[capacity(Choice::Admit)], None);
    request.subject.org = None;
    for mut store in [Store::Down, Store::Missing, Store::Ledger(&mut Ledger::default())] {
        assert_eq!(
            code(&decide(&request, &operator, &mut store)),
            Some(Code::EnvelopePartial)
        );
    }
    operator.tiers.organization.requests = Limit::Unlimited;
    assert!(matches!(
        decide(&request, &operator, &mut Store::Missing),
        Verdict::Admit(_)
    ));
}
