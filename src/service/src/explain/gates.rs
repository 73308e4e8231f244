//! What each gate had to do with the answer: read off the questions that the decision asked and the answers it got.
//!
//! Nothing is decided here. Where a gate has no trace of its own, the verdict and the order of the gates say what it did.

use portcullis_decision::charge::Charged;
use portcullis_decision::class::{Dependency, FailureClass};
use portcullis_decision::evaluation::LimiterAnswer;
use portcullis_decision::policy::{Lookup, PolicyView};
use portcullis_decision::rules::{Choice, Gate, GateRule};
use portcullis_decision::verdict::Verdict;
use serde::Serialize;

use crate::imagined::{Decided, Told};

/// What became of a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It had nothing against the request.
    Passed,
    /// It said no: the answer.
    Denied,
    /// It could not answer, and its rule let the request go on.
    Opened,
    /// It could not answer, and its rule refused the request: the answer.
    Closed,
    /// It could not answer, and a later gate knew its answer without.
    Unanswered,
    /// The answer stood before it was its turn.
    NotReached,
    /// Nobody ran it, since no gate was run.
    NotRun,
}

impl Outcome {
    /// In words, for a table.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Denied => "DENIED",
            Self::Opened => "unavailable, opened",
            Self::Closed => "UNAVAILABLE, CLOSED",
            Self::Unanswered => "unavailable",
            Self::NotReached => "not reached",
            Self::NotRun => "not run",
        }
    }
}

/// Where one limit stands after the request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Standing {
    /// Whom it binds.
    pub scope: &'static str,
    /// What it counts.
    pub resource: &'static str,
    /// The figure.
    pub limit: u64,
    /// What is used: this request included if it was admitted.
    pub used: u64,
    /// Seconds until its window ends; absent for slots.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resets_in_s: Option<u64>,
}

/// One line of the table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Row {
    /// The gate.
    pub gate: &'static str,
    /// What became of it.
    pub outcome: Outcome,
    /// The class that was opened or closed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub class: Option<&'static str>,
    /// What the rules say for when it can't answer; absent for a gate that always can.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub when_unavailable: Option<Choice>,
    /// Why, in a few words.
    pub why: String,
    /// The limits that it looked at.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub limits: Vec<Standing>,
    /// The line of its rule.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<usize>,
}

/// The rows of a request. `by` is the gate that gave the answer, if one did; without a decision no gate was run, but one may
/// have known its answer.
pub fn rows(gates: &[GateRule], decided: Option<&Decided>, by: Option<Gate>) -> Vec<Row> {
    let at = gates.iter().position(|rule| Some(rule.gate()) == by);
    let row = |(index, rule): (usize, &GateRule)| {
        let gate = rule.gate();
        let is_answer = at == Some(index);
        let outcome = match decided {
            _ if is_answer => match decided.map(|decided| &decided.verdict) {
                Some(Verdict::Unavailable(_)) => Outcome::Closed,
                _ => Outcome::Denied,
            },
            None => Outcome::NotRun,
            Some(decided) if decided.bypassed.iter().any(|bypass| bypass.gate == gate) => Outcome::Opened,
            Some(decided) if at.is_none_or(|at| index < at) => {
                if is_answered(gate, decided) {
                    Outcome::Passed
                } else {
                    Outcome::Unanswered
                }
            }
            Some(_) => Outcome::NotReached,
        };
        let limits = decided.map(|decided| standings(gate, decided)).unwrap_or_default();
        Row {
            gate: gate.name(),
            outcome,
            class: class(gate, outcome, decided).map(FailureClass::name),
            when_unavailable: rule.when_unavailable(),
            why: why(rule, outcome, decided, &limits),
            limits,
            line: None,
        }
    };
    gates.iter().enumerate().map(row).collect()
}

/// The class that a gate was opened or closed by.
fn class(gate: Gate, outcome: Outcome, decided: Option<&Decided>) -> Option<FailureClass> {
    let decided = decided?;
    match outcome {
        Outcome::Opened => decided
            .bypassed
            .iter()
            .find(|bypass| bypass.gate == gate)
            .map(|bypass| bypass.class),
        Outcome::Closed => decided.verdict.class(),
        _ => None,
    }
}

fn policy(decided: &Decided) -> Option<&PolicyView> {
    decided.told.iter().find_map(|told| match told {
        Told::Policy(view) => Some(view),
        _ => None,
    })
}

/// Whether the store that a gate asks has answered it, or it had nothing to ask.
fn is_answered(gate: Gate, decided: &Decided) -> bool {
    decided.told.iter().all(|told| match told {
        Told::Charge(plan, LimiterAnswer::Unavailable) => {
            gate.dependency() != Some(Dependency::Limiter) || plan.entries.iter().all(|entry| entry.gate != gate)
        }
        Told::Meter(_, None, _) => gate.dependency() != Some(Dependency::Metering),
        _ => true,
    })
}

fn standings(gate: Gate, decided: &Decided) -> Vec<Standing> {
    let mut standings = Vec::new();
    for told in &decided.told {
        let Told::Charge(plan, answer) = told else { continue };
        let states = match answer {
            LimiterAnswer::Charged(
                Charged::Granted(states) | Charged::Denied(states) | Charged::Block { states, .. },
            ) => states.as_slice(),
            _ => &[],
        };
        for (at, entry) in plan.entries.iter().enumerate().filter(|(_, entry)| entry.gate == gate) {
            let Some(state) = states.get(at) else { continue };
            let has_window = entry.resource != portcullis_decision::limits::Resource::Concurrency;
            standings.push(Standing {
                scope: entry.scope.name(),
                resource: entry.resource.name(),
                limit: entry.limit,
                used: state.used,
                resets_in_s: has_window.then(|| state.reset_ms.div_ceil(1000)),
            });
        }
    }
    standings
}

/// A gate's own words.
fn why(rule: &GateRule, outcome: Outcome, decided: Option<&Decided>, limits: &[Standing]) -> String {
    match outcome {
        Outcome::NotReached | Outcome::NotRun => return String::new(),
        _ => {}
    }
    let Some(decided) = decided else {
        return "known without asking anybody".to_owned();
    };
    match rule.gate() {
        Gate::OrgStatus | Gate::ModelPolicy => of_policy(rule.gate(), decided),
        Gate::Concurrency | Gate::Capacity | Gate::Contract => {
            if limits.is_empty() {
                of_nothing(rule.gate(), outcome, decided)
            } else {
                let words = limits
                    .iter()
                    .map(|limit| format!("{} {} {} of {}", limit.scope, limit.resource, limit.used, limit.limit));
                words.collect::<Vec<_>>().join(", ")
            }
        }
        Gate::LaunchRate => decided
            .told
            .iter()
            .find_map(|told| match told {
                Told::Launch(None) => Some("a launch was free".to_owned()),
                Told::Launch(Some(wait_ms)) => Some(format!("the next launch is free in {wait_ms} ms")),
                _ => None,
            })
            .unwrap_or_default(),
        Gate::MonthlyQuota | Gate::CostCap | Gate::Metering => of_metering(rule.gate(), outcome, decided),
    }
}

fn of_policy(gate: Gate, decided: &Decided) -> String {
    if gate == Gate::ModelPolicy && decided.request.subject.model.is_none() {
        return "the request names no model".to_owned();
    }
    let Some(view) = policy(decided) else {
        return "nobody was asked".to_owned();
    };
    let org = match &view.org {
        Lookup::Unavailable => return "the policy store did not answer".to_owned(),
        Lookup::Known(None) => return "the policy does not know the org".to_owned(),
        Lookup::Known(Some(org)) => org,
    };
    if gate == Gate::OrgStatus {
        return format!("the org is {}", org.status.name());
    }
    let model = decided.request.subject.model.as_deref().unwrap_or_default();
    if !org.allows(model) {
        return format!("{model:?} is not on the org's list");
    }
    match &view.provider {
        Lookup::Known(Some(provider)) => format!("{model:?} is on the org's list and served by {provider:?}"),
        Lookup::Known(None) => format!("{model:?} is on the org's list, and no provider serves it"),
        Lookup::Unavailable => "the provider registry did not answer".to_owned(),
    }
}

/// A limiter gate without figures.
fn of_nothing(gate: Gate, outcome: Outcome, decided: &Decided) -> String {
    let answer = decided.told.iter().find_map(|told| match told {
        Told::Charge(plan, answer) if plan.entries.iter().any(|entry| entry.gate == gate) => Some(answer),
        _ => None,
    });
    match answer {
        Some(LimiterAnswer::Unavailable) if outcome == Outcome::Denied => {
            "a limit of 0, known without the limiter".to_owned()
        }
        Some(LimiterAnswer::Unavailable) => "the limiter did not answer".to_owned(),
        Some(LimiterAnswer::NoLimiter) => "the service has no limiter: nothing was counted".to_owned(),
        _ if matches!(outcome, Outcome::Opened | Outcome::Closed) => "the org's plan could not be read".to_owned(),
        _ if outcome == Outcome::Denied && gate == Gate::Capacity => {
            "a tier counts by org, and the envelope names none".to_owned()
        }
        _ if outcome == Outcome::Denied => "the org's plan is needed, and the org is not known".to_owned(),
        _ => "no limit binds this request".to_owned(),
    }
}

fn of_metering(gate: Gate, outcome: Outcome, decided: &Decided) -> String {
    if class(gate, outcome, Some(decided)) == Some(FailureClass::PolicyUnavailable) {
        let is_known = policy(decided).is_some_and(|view| matches!(view.org, Lookup::Known(_)));
        return if is_known && gate == Gate::CostCap {
            "a cap is set, and the model has no price that could be read".to_owned()
        } else {
            "the org's plan could not be read".to_owned()
        };
    }
    let meter = decided.told.iter().find_map(|told| match told {
        Told::Meter(plan, answer, so_far) => Some((plan, answer, so_far)),
        _ => None,
    });
    let Some((plan, answer, (runs, cost))) = meter else {
        return match outcome {
            Outcome::Denied => "the org's plan is needed, and the org is not known".to_owned(),
            _ => "no figure binds this request".to_owned(),
        };
    };
    let figure = match gate {
        Gate::MonthlyQuota => plan.runs.figure().map(|most| (runs, most, "runs")),
        Gate::CostCap => plan.cost.figure().map(|most| (cost, most, "micro-dollars")),
        _ => None,
    };
    match (answer, figure) {
        (None, _) if outcome == Outcome::Denied => "a figure of 0, known without the metering store".to_owned(),
        (None, _) => "the metering store did not answer".to_owned(),
        (Some(_), Some((used, most, what))) => format!("{used} of {most} {what} before this request"),
        (Some(_), None) if gate == Gate::Metering && plan.records => "the run was recorded".to_owned(),
        (Some(_), None) => "no figure binds this request".to_owned(),
    }
}
