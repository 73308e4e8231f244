//! What a decision leases, over the real ledger, with outages.

use alloc::vec::Vec;

#[cfg(target_arch = "wasm32")]
use wasm_bindgen_test::wasm_bindgen_test as test;

use super::super::{LimiterAnswer, Operator, Step};
use super::*;
use crate::class::{Code, Dependency, FailureClass};
use crate::config::Tiers;
use crate::ledger::Ledger;
use crate::limits::Limit;
use crate::metering::Month;
use crate::operation::OperationId;
use crate::policy::{Lookup, Org, OrgStatus, Plan, PolicyView};
use crate::rules::Choice;
use crate::wire::DecideRequest;

const MONTH: Month = Month {
    index: 24_318,
    ends_in_ms: 86_400_000,
    length_s: 2_592_000,
};

/// A request that asks for a lease of up to 256 admissions for a second, with other keys on top.
fn request(n: u8, changes: serde_json::Value) -> DecideRequest {
    let mut request = serde_json::json!({
        "op": OperationId::from_random([n; 16]), "profile": "development", "rules": "r", "mode": "enforce",
        "gates": [{"gate": "contract", "when_unavailable": "admit"}], "budget_ms": 220, "window_s": 60,
        "subject": {"owner": "o", "org": "g"}, "limits": {"org": {"requests": 1000}}, "tokens": 30,
        "lease": {"max_requests": 256, "max_age_ms": 1000, "gateway": OperationId::from_random([99; 16])}
    });
    request
        .as_object_mut()
        .unwrap()
        .extend(changes.as_object().unwrap().clone());
    serde_json::from_value(request).unwrap()
}

fn ahead(mut request: DecideRequest) -> DecideRequest {
    request.lease.as_mut().unwrap().ahead = true;
    request
}

/// What surrounds a decision, and what it did.
struct World {
    ledger: Ledger,
    now_ms: u64,
    limiter: bool,
    has_limiter: bool,
    plan: Option<Plan>,
    fresh_for_ms: Option<u64>,
    terms: Option<LeaseTerms>,
    tiers: Tiers,
    /// Classes that were to be opened, and whether a launch or a run was asked for.
    opened: Vec<FailureClass>,
    launches: u32,
    runs: u32,
}

impl Default for World {
    fn default() -> Self {
        Self {
            ledger: Ledger::default(),
            now_ms: 0,
            limiter: true,
            has_limiter: true,
            plan: Some(Plan::default()),
            fresh_for_ms: None,
            terms: Some(LeaseTerms { most: 100, parts: 8 }),
            tiers: Tiers::default(),
            opened: Vec::new(),
            launches: 0,
            runs: 0,
        }
    }
}

impl World {
    fn view(&self) -> PolicyView {
        let Some(plan) = self.plan else {
            return PolicyView::UNAVAILABLE;
        };
        PolicyView {
            org: Lookup::Known(Some(Org {
                status: OrgStatus::Active,
                plan,
                models: alloc::vec![crate::policy::ModelPattern::parse("*").unwrap()],
            })),
            provider: Lookup::Known(Some("p".into())),
            price: Lookup::Known(None),
            fresh_for_ms: self.fresh_for_ms,
        }
    }

    fn decide(&mut self, request: &DecideRequest) -> Verdict {
        let operator = Operator {
            tiers: self.tiers.clone(),
            window_s: 60,
            slot_ttl_ms: 30_000,
        };
        let mut opened = Vec::new();
        let mut allow = |class, choice: Choice| {
            opened.push(class);
            choice != Choice::Reject
        };
        let mut evaluation = Evaluation::new(request, &operator);
        if let Some(terms) = self.terms {
            evaluation = evaluation.leasing(terms);
        }
        let verdict = loop {
            match evaluation.step(&mut allow) {
                Step::Charge(plan) => {
                    let answer = match (self.has_limiter, self.limiter) {
                        (false, _) => LimiterAnswer::NoLimiter,
                        (_, false) => LimiterAnswer::Unavailable,
                        _ => LimiterAnswer::Charged(self.ledger.charge(self.now_ms, &plan, 30_000)),
                    };
                    evaluation.charged(answer, &mut allow);
                }
                Step::Policy { .. } => evaluation.policy(self.view()),
                Step::Meter(_) => {
                    self.runs += 1;
                    evaluation.metered(None, &MONTH, &mut allow);
                }
                Step::Launch { .. } => {
                    self.launches += 1;
                    evaluation.launched(Ok(()));
                }
                Step::GiveBack(taken) => {
                    if let Some(op) = taken.limiter {
                        self.ledger.cancel(self.now_ms, op);
                    }
                }
                Step::Done(verdict) => break verdict,
            }
        };
        self.opened.extend(opened);
        verdict
    }

    fn admitted(&mut self, request: &DecideRequest) -> Admission {
        match self.decide(request) {
            Verdict::Admit(admission) => admission,
            other => panic!("{other:?}"),
        }
    }

    fn lease(&mut self, request: &DecideRequest) -> Option<Grant> {
        self.admitted(request).lease
    }

    /// Requests charged to the org, by what is left to a request that asks for no lease.
    fn charged_so_far(&mut self, n: u8) -> u64 {
        let mut request = request(n, serde_json::json!({}));
        request.lease = None;
        let tightest = self.admitted(&request).tightest.unwrap();
        1000 - tightest.remaining - 1
    }
}

fn gates(names: &[&str]) -> serde_json::Value {
    let rule = |name: &&str| match *name {
        "launch_rate" => serde_json::json!({"gate": name, "per_minute": 60, "burst": 10}),
        "contract" => serde_json::json!({"gate": name, "when_unavailable": "admit", "limits": "envelope_or_plan"}),
        _ => serde_json::json!({"gate": name, "when_unavailable": "admit"}),
    };
    serde_json::json!({"gates": names.iter().map(rule).collect::<Vec<_>>()})
}

#[test]
fn the_request_and_its_block_are_charged_together_and_the_block_is_told() {
    let mut world = World::default();
    let limits =
        serde_json::json!({"limits": {"org": {"requests": 1000, "tokens": 50_000}, "owner": {"tokens": 40_000}}});
    let admission = world.admitted(&request(1, limits));
    let expected = Grant {
        requests: 99,
        tokens: Some(99 * 30),
        largest_hold: Some(40_000),
        ends_in_ms: 1_000,
    };
    assert_eq!((admission.lease, admission.held_tokens), (Some(expected), Some(30)));
    assert_eq!(world.charged_so_far(2), 100);
}

#[test]
fn ahead_all_of_the_block_is_told_and_no_hold() {
    let mut world = World::default();
    let limits = serde_json::json!({"limits": {"org": {"requests": 1000, "tokens": 50_000}}});
    let admission = world.admitted(&ahead(request(1, limits)));
    let grant = admission.lease.unwrap();
    assert_eq!((grant.requests, grant.tokens), (100, Some(3_000)));
    assert_eq!(admission.held_tokens, None);
    assert!(admission.tightest.is_some());
    assert_eq!(world.charged_so_far(2), 100);
}

#[test]
fn without_demand_or_room_the_decision_is_exact_and_ahead_charges_nothing() {
    for terms in [
        None,
        Some(LeaseTerms { most: 1, parts: 8 }),
        Some(LeaseTerms { most: 100, parts: 200 }),
    ] {
        let mut world = World {
            terms,
            ..World::default()
        };
        assert_eq!(world.lease(&request(1, serde_json::json!({}))), None);
        assert_eq!(world.admitted(&ahead(request(2, serde_json::json!({})))).lease, None);
        assert_eq!(world.charged_so_far(3), 1, "{terms:?}");
    }
}

#[test]
fn a_filter_never_gets_more_than_it_asked_for() {
    let mut world = World::default();
    let lease = serde_json::json!({"lease": {"max_requests": 10, "max_age_ms": 1000, "gateway": "00000000000000000000000000000001"}});
    assert_eq!(world.lease(&request(1, lease.clone())).unwrap().requests, 9);
    assert_eq!(world.lease(&ahead(request(2, lease))).unwrap().requests, 10);
}

#[test]
fn a_lease_ends_with_the_window_and_with_the_policy_under_it() {
    let policy = |names: &[&str]| request(1, gates(names));
    let ends = |world: &mut World, request: &DecideRequest| world.lease(request).map(|grant| grant.ends_in_ms);
    for (now_ms, fresh_for_ms, expected) in [
        (0, None, Some(1_000)),
        (59_400, None, Some(600)),
        (59_400, Some(700), Some(600)),
        (59_400, Some(500), Some(500)),
        (0, Some(0), None),
    ] {
        let mut world = World {
            fresh_for_ms,
            ..World::default()
        };
        world.charged_so_far(9);
        world.now_ms = now_ms;
        let got = ends(&mut world, &policy(&["org_status", "contract"]));
        assert_eq!(got, expected, "at {now_ms} with a policy for {fresh_for_ms:?}");
    }
    // A policy that no gate has looked at ends nothing.
    let mut world = World {
        fresh_for_ms: Some(5),
        ..World::default()
    };
    assert_eq!(ends(&mut world, &request(1, serde_json::json!({}))), Some(1_000));
}

#[test]
fn rules_that_hold_or_count_each_run_are_exact_and_ahead_asks_nobody() {
    for more in ["launch_rate", "metering", "concurrency"] {
        let names = match more {
            "metering" => ["org_status", "contract", more],
            _ => ["org_status", more, "contract"],
        };
        let mut world = World {
            plan: Some(Plan {
                concurrency: Limit::of(5),
                ..Plan::default()
            }),
            ..World::default()
        };
        assert_eq!(world.lease(&request(1, gates(&names))), None, "{more}");
        let (runs, launches, opened) = (world.runs, world.launches, world.opened.len());
        let admission = world.admitted(&ahead(request(2, gates(&names))));
        assert_eq!(admission, Admission::default(), "{more}");
        assert_eq!(
            (world.runs, world.launches, world.opened.len()),
            (runs, launches, opened)
        );
        assert_eq!(world.charged_so_far(3), 1, "{more}");
    }
}

#[test]
fn slots_of_a_plan_or_a_tier_make_a_decision_exact() {
    let plan = Plan {
        concurrency: Limit::of(5),
        requests: Limit::of(1000),
        ..Plan::default()
    };
    let mut by_plan = World {
        plan: Some(plan),
        ..World::default()
    };
    let mut unstamped = gates(&["org_status", "contract"]);
    unstamped["limits"] = serde_json::json!({});
    assert_eq!(by_plan.lease(&request(1, unstamped.clone())), None);
    assert_eq!(by_plan.admitted(&ahead(request(2, unstamped))), Admission::default());
    let mut by_tier = World::default();
    by_tier.tiers.platform.concurrency = Limit::of(5);
    assert_eq!(by_tier.lease(&request(1, gates(&["capacity", "contract"]))), None);
    let admission = by_tier.admitted(&ahead(request(2, gates(&["capacity", "contract"]))));
    assert_eq!(admission, Admission::default());
}

#[test]
fn nothing_is_leased_that_was_opened_or_is_not_enforced() {
    let both = || gates(&["org_status", "contract"]);
    let mut without_policy = World {
        plan: None,
        ..World::default()
    };
    let admission = without_policy.admitted(&request(1, both()));
    assert_eq!((admission.bypassed.len(), admission.lease), (1, None));
    assert_eq!(without_policy.charged_so_far(2), 1, "the request itself is charged");
    let mut without_answer = World {
        limiter: false,
        ..World::default()
    };
    let admission = without_answer.admitted(&request(1, both()));
    assert_eq!((admission.bypassed.len(), admission.lease), (1, None));
    let mut without_limiter = World {
        has_limiter: false,
        ..World::default()
    };
    for request in [request(1, both()), ahead(request(2, both()))] {
        let admission = without_limiter.admitted(&request);
        assert_eq!((admission.unenforced, admission.lease), (true, None));
    }
}

#[test]
fn ahead_opens_nothing_in_an_outage() {
    for (world, dependency) in [
        (
            World {
                plan: None,
                ..World::default()
            },
            Dependency::Policy,
        ),
        (
            World {
                limiter: false,
                ..World::default()
            },
            Dependency::Limiter,
        ),
    ] {
        let mut world = world;
        let verdict = world.decide(&ahead(request(1, gates(&["org_status", "contract"]))));
        assert!(
            matches!(verdict, Verdict::Unavailable(of) if of.dependency == dependency),
            "{verdict:?}"
        );
        assert_eq!(world.opened, []);
        assert_eq!(world.charged_so_far_if_up(), 0);
    }
}

impl World {
    fn charged_so_far_if_up(&mut self) -> u64 {
        self.limiter = true;
        self.charged_so_far(200)
    }
}

#[test]
fn a_denial_is_one_ahead_too_and_charges_nothing() {
    let mut world = World::default();
    let spent = serde_json::json!({"limits": {"org": {"requests": 1}}});
    world.charged_so_far(9);
    for request in [request(1, spent.clone()), ahead(request(2, spent))] {
        let verdict = world.decide(&request);
        assert!(
            matches!(&verdict, Verdict::Deny(denial) if denial.code == Code::RateLimited && denial.limit.is_some()),
            "{verdict:?}"
        );
    }
    let blocked = serde_json::json!({"limits": {"org": {"requests": 0}}});
    assert!(matches!(world.decide(&ahead(request(3, blocked))), Verdict::Deny(_)));
    assert_eq!(world.charged_so_far(10), 1);
}

#[test]
fn what_no_limit_binds_is_leased_without_a_charge() {
    let free = |n| {
        let mut changes = gates(&["org_status", "model_policy"]);
        changes["limits"] = serde_json::json!({});
        changes["subject"] = serde_json::json!({"owner": "o", "org": "g", "model": "m"});
        request(n, changes)
    };
    let mut world = World {
        fresh_for_ms: Some(800),
        limiter: false,
        ..World::default()
    };
    let grant = |requests| Grant {
        requests,
        tokens: None,
        largest_hold: None,
        ends_in_ms: 800,
    };
    assert_eq!(world.lease(&free(1)), Some(grant(99)));
    assert_eq!(world.lease(&ahead(free(2))), Some(grant(100)));
    world.terms = Some(LeaseTerms { most: 7, parts: 8 });
    assert_eq!(world.lease(&free(3)), None);
    assert_eq!(world.lease(&ahead(free(4))), None);
}

#[test]
fn a_gate_after_the_limiter_keeps_a_decision_exact() {
    let mut world = World::default();
    let names = gates(&["contract", "org_status"]);
    assert_eq!(world.lease(&request(1, names.clone())), None);
    assert_eq!(world.admitted(&ahead(request(2, names))), Admission::default());
    assert_eq!(world.charged_so_far(3), 1);
}

#[test]
fn the_same_operation_again_is_told_the_same_lease() {
    let mut world = World::default();
    let first = world.lease(&request(1, serde_json::json!({}))).unwrap();
    world.terms = Some(LeaseTerms { most: 1, parts: 80 });
    let again = world.lease(&request(1, serde_json::json!({}))).unwrap();
    assert_eq!((first.requests, again.requests), (99, 99));
    assert_eq!(world.charged_so_far(2), 100);
}
