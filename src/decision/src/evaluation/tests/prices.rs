//! What a price, or the lack of one, does to `cost_cap`, over books that say what a month holds.

#[cfg(target_arch = "wasm32")]
use wasm_bindgen_test::wasm_bindgen_test as test;

use super::*;
use crate::metering::{Metered, MonthState};
use crate::policy::{Org, OrgStatus, Price};

/// What the stores say in a test of the price rule.
struct Books {
    monthly_cost: Limit,
    monthly_runs: Limit,
    price: Lookup<Price>,
    /// `None`: the metering store is down.
    spent: Option<(u64, u64)>,
}

impl Books {
    /// A verdict, the model that was found without a price, and the runs that were recorded and not given back.
    fn decide(&self, request: &DecideRequest, allowances: &mut Allowances) -> (Verdict, Option<String>, u32) {
        let (operator, mut runs) = (operator(None), 0);
        let mut evaluation = Evaluation::new(request, &operator);
        loop {
            let mut allow = |class, choice| allowances.admit(class, choice, 0);
            match evaluation.step(&mut allow) {
                Step::Policy { price_of, .. } => {
                    assert_eq!(price_of, request.subject.model, "the price is asked for");
                    let plan = Plan {
                        monthly_cost: self.monthly_cost,
                        monthly_runs: self.monthly_runs,
                        ..Plan::default()
                    };
                    evaluation.policy(PolicyView {
                        org: Lookup::Known(Some(Org {
                            status: OrgStatus::Active,
                            plan,
                            models: Vec::new(),
                        })),
                        provider: Lookup::Known(None),
                        price: self.price.clone(),
                        fresh_for_ms: None,
                    });
                }
                Step::Meter(plan) => {
                    let answer = self.spent.map(|(runs, cost)| MonthState {
                        runs,
                        cost,
                        ends_in_ms: MONTH.ends_in_ms,
                        length_s: MONTH.length_s,
                    });
                    let answer = answer.map(|state| {
                        if plan.fits(&state) {
                            runs += u32::from(plan.records);
                            Metered::Granted
                        } else {
                            Metered::Denied(state)
                        }
                    });
                    evaluation.metered(answer, &MONTH, &mut allow);
                }
                Step::GiveBack(taken) => {
                    runs -= u32::from(taken.metering.is_some());
                    taken
                        .allowances
                        .into_iter()
                        .for_each(|class| allowances.give_back(class));
                }
                Step::Done(verdict) => return (verdict, evaluation.unpriced_model().map(Into::into), runs),
                other => panic!("{other:?}"),
            }
        }
    }
}

const PRICE: Price = Price {
    input: 1,
    cached_input: 1,
    output: 1,
};

fn books(price: Lookup<Price>) -> Books {
    Books {
        monthly_cost: Limit::of(500),
        monthly_runs: Limit::of(10),
        price,
        spent: Some((0, 0)),
    }
}

/// The metering gates in this order, `cost_cap` by its own choice and the others closed.
fn metering_gates(order: [Gate; 3], cap: Choice) -> Vec<GateRule> {
    let rule = |gate| match gate {
        Gate::CostCap => GateRule::CostCap { when_unavailable: cap },
        Gate::MonthlyQuota => GateRule::MonthlyQuota {
            when_unavailable: Choice::Reject,
        },
        _ => GateRule::Metering {
            when_unavailable: Choice::Reject,
        },
    };
    order.map(rule).to_vec()
}

const QUOTA_FIRST: [Gate; 3] = [Gate::MonthlyQuota, Gate::CostCap, Gate::Metering];
const CAP_FIRST: [Gate; 3] = [Gate::CostCap, Gate::MonthlyQuota, Gate::Metering];

fn is_closed_by_price(verdict: &Verdict) -> bool {
    let closed = Unavailability {
        dependency: Dependency::Policy,
        gate: Some(Gate::CostCap),
    };
    *verdict == Verdict::Unavailable(closed)
}

#[test]
fn a_model_without_a_price_makes_the_cap_unavailable_and_its_own_choice_counts() {
    for (price, named) in [(Lookup::Known(None), Some("m")), (Lookup::Unavailable, None)] {
        let books = books(price);
        let mut allowances = Allowances::default();
        let closed = request(1, &metering_gates(QUOTA_FIRST, Choice::Reject), None);
        let (verdict, unpriced, runs) = books.decide(&closed, &mut allowances);
        assert!(is_closed_by_price(&verdict), "{verdict:?}");
        assert_eq!((unpriced.as_deref(), runs), (named, 0));

        let open = request(2, &metering_gates(QUOTA_FIRST, Choice::Admit), None);
        let (verdict, unpriced, runs) = books.decide(&open, &mut allowances);
        let Verdict::Admit(admission) = verdict else {
            panic!("{verdict:?}")
        };
        let bypass = Bypass {
            class: FailureClass::PolicyUnavailable,
            gate: Gate::CostCap,
        };
        assert_eq!(admission.bypassed, [bypass]);
        assert_eq!((unpriced.as_deref(), runs), (named, 1), "the run is recorded");
    }
}

#[test]
fn a_price_is_only_needed_for_a_cap_and_a_named_model() {
    let mut allowances = Allowances::default();
    let gates = metering_gates(QUOTA_FIRST, Choice::Reject);
    let mut no_model = request(1, &gates, None);
    no_model.subject.model = None;
    let uncapped = Books {
        monthly_cost: Limit::Unlimited,
        ..books(Lookup::Unavailable)
    };
    for (books, request) in [
        (books(Lookup::Known(Some(PRICE))), request(1, &gates, None)),
        (books(Lookup::Unavailable), no_model),
        (uncapped, request(1, &gates, None)),
    ] {
        let (verdict, unpriced, runs) = books.decide(&request, &mut allowances);
        assert_eq!(verdict, Verdict::Admit(Admission::default()));
        assert_eq!((unpriced, runs), (None, 1));
    }
}

#[test]
fn a_month_that_is_used_up_is_denied_with_or_without_a_price() {
    for price in [Lookup::Known(Some(PRICE)), Lookup::Known(None), Lookup::Unavailable] {
        for choice in [Choice::Reject, Choice::Admit] {
            let mut allowances = Allowances::default();
            let mut code_of = |order, spent, monthly_cost| {
                let books = Books {
                    spent,
                    monthly_cost,
                    ..books(price.clone())
                };
                let request = request(1, &metering_gates(order, choice), None);
                let (verdict, _, runs) = books.decide(&request, &mut allowances);
                assert_eq!(runs, 0);
                (code(&verdict), is_closed_by_price(&verdict))
            };
            let cap = Limit::of(500);
            let denied = |code| (Some(code), false);
            assert_eq!(code_of(QUOTA_FIRST, Some((0, 500)), cap), denied(Code::CostCapExceeded));
            assert_eq!(code_of(CAP_FIRST, Some((10, 500)), cap), denied(Code::CostCapExceeded));
            assert_eq!(
                code_of(QUOTA_FIRST, Some((10, 500)), cap),
                denied(Code::RunQuotaExceeded)
            );
            assert_eq!(code_of(QUOTA_FIRST, Some((10, 0)), cap), denied(Code::RunQuotaExceeded));
            for spent in [None, Some((0, 0))] {
                let blocked = code_of(QUOTA_FIRST, spent, Limit::Blocked);
                assert_eq!(blocked, denied(Code::CostCapExceeded), "a cap of 0");
            }
            // The cap's gate comes first, and is closed.
            let behind = code_of(CAP_FIRST, Some((10, 0)), cap);
            if price != Lookup::Known(Some(PRICE)) && choice == Choice::Reject {
                assert_eq!(behind, (None, true));
            } else {
                assert_eq!(behind, denied(Code::RunQuotaExceeded));
            }
        }
    }
}

#[test]
fn without_a_price_and_without_the_metering_store_the_first_gate_that_stays_closed_answers() {
    let down = Books {
        spent: None,
        ..books(Lookup::Known(None))
    };
    let verdict_of = |order| {
        let request = request(1, &metering_gates(order, Choice::Reject), None);
        down.decide(&request, &mut Allowances::default()).0
    };
    assert!(is_closed_by_price(&verdict_of(CAP_FIRST)));
    let quota = Unavailability {
        dependency: Dependency::Metering,
        gate: Some(Gate::MonthlyQuota),
    };
    assert_eq!(verdict_of(QUOTA_FIRST), Verdict::Unavailable(quota));
}

#[test]
fn an_allowance_for_unpriced_requests_is_bounded_and_not_spent_by_denials() {
    let mut allowances = Allowances::default();
    let gates = metering_gates(QUOTA_FIRST, Choice::AdmitAtMost { max_per_minute: 1 });
    let request = request(1, &gates, None);
    let spent = Books {
        spent: Some((0, 500)),
        ..books(Lookup::Known(None))
    };
    for _ in 0..3 {
        assert_eq!(
            code(&spent.decide(&request, &mut allowances).0),
            Some(Code::CostCapExceeded)
        );
    }
    let open = books(Lookup::Known(None));
    assert!(matches!(
        open.decide(&request, &mut allowances).0,
        Verdict::Admit(admission) if bypassed_gates(&admission) == ["cost_cap"]
    ));
    let (verdict, _, runs) = open.decide(&request, &mut allowances);
    assert!(is_closed_by_price(&verdict) && runs == 0, "{verdict:?}");
}
