//! One decision of the service: the gates in their order, as questions to stores and answers from them.
//!
//! The driver asks [`Evaluation::step`], does what it says, and reports back; nothing here waits or knows a store. The
//! first gate that denies is the answer. A gate that is unavailable and opened is skipped; what earlier gates took is
//! given back when a later one denies or stays closed.

use alloc::vec::Vec;

use crate::charge::{ChargePlan, Charged, PlanBuilder};
use crate::class::{Dependency, FailureClass};
use crate::config::Tiers;
use crate::operation::OperationId;
use crate::rules::{Choice, Gate, GateRule};
use crate::verdict::{Admission, Bypass, Denial, Unavailability, Verdict};
use crate::wire::DecideRequest;

/// What the driver has to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Charge this plan in the limiter, then call [`Evaluation::charged`].
    Charge(ChargePlan),
    /// Give back what this operation took in the limiter, then ask again. A failure is retried later by the driver; it
    /// does not change the verdict.
    GiveBack(OperationId),
    /// Answer.
    Done(Verdict),
}

/// What the limiter said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LimiterAnswer {
    /// It answered.
    Charged(Charged),
    /// There is no limiter: everything is admitted, nothing is counted (development only).
    NoLimiter,
    /// It did not answer in time, or not sensibly.
    Unavailable,
}

/// Facts of the service that every decision needs.
#[derive(Debug, Clone)]
pub struct Operator {
    /// Capacity tiers.
    pub tiers: Tiers,
    /// A window of the tiers, in seconds.
    pub window_s: u64,
    /// How long a slot lives without renewal, in milliseconds.
    pub slot_ttl_ms: u64,
}

/// One decision under way.
#[derive(Debug)]
pub struct Evaluation<'a> {
    request: &'a DecideRequest,
    operator: &'a Operator,
    /// The next gate to look at.
    cursor: usize,
    admission: Admission,
    charged: bool,
    plan: Option<ChargePlan>,
    verdict: Option<Verdict>,
}

impl<'a> Evaluation<'a> {
    /// Starts a decision.
    pub fn new(request: &'a DecideRequest, operator: &'a Operator) -> Self {
        Self {
            request,
            operator,
            cursor: 0,
            admission: Admission::default(),
            charged: false,
            plan: None,
            verdict: None,
        }
    }

    /// What is to be done. `allow` says whether a class may be opened once more under a choice, and counts it.
    pub fn step(&mut self, allow: &mut dyn FnMut(FailureClass, Choice) -> bool) -> Step {
        loop {
            if let Some(verdict) = &self.verdict {
                let keeps = matches!(verdict, Verdict::Admit(_));
                if self.charged && !keeps {
                    self.charged = false;
                    return Step::GiveBack(self.request.op);
                }
                return Step::Done(verdict.clone());
            }
            if let Some(plan) = &self.plan {
                return Step::Charge(plan.clone());
            }
            let Some(rule) = self.request.gates.get(self.cursor) else {
                self.verdict = Some(Verdict::Admit(self.admission.clone()));
                continue;
            };
            match rule.gate().dependency() {
                Some(Dependency::Limiter) if rule.gate() != Gate::Concurrency => self.plan_limiter_gates(),
                // These gates have no store behind them in this service yet, and a listed gate without a store is
                // unavailable: it is opened or closed by its rule, never passed over.
                Some(dependency) => self.unavailable(dependency, rule, allow),
                None => self.unavailable(Dependency::Policy, rule, allow),
            }
        }
    }

    /// Adjacent limiter gates, as one plan.
    fn plan_limiter_gates(&mut self) {
        let mut builder = PlanBuilder::new(&self.request.subject, &self.operator.tiers, self.request.tokens);
        for rule in self.limiter_group() {
            match rule {
                GateRule::Capacity { .. } => builder.capacity(self.operator.window_s),
                GateRule::Contract { .. } => builder.contract(&self.request.limits, self.request.window_s),
                _ => {}
            }
        }
        let plan = builder.build(self.request.op);
        if plan.entries.is_empty() {
            // No limit binds this request: nothing to ask.
            self.cursor = self.cursor.saturating_add(self.limiter_group().len());
        } else {
            self.plan = Some(plan);
        }
    }

    fn limiter_group(&self) -> &'a [GateRule] {
        let rest = self.request.gates.get(self.cursor..).unwrap_or_default();
        let in_group = |rule: &GateRule| matches!(rule.gate(), Gate::Capacity | Gate::Contract);
        let length = rest.iter().position(|rule| !in_group(rule)).unwrap_or(rest.len());
        rest.get(..length).unwrap_or_default()
    }

    /// Reports the answer to [`Step::Charge`].
    pub fn charged(&mut self, answer: LimiterAnswer, allow: &mut dyn FnMut(FailureClass, Choice) -> bool) {
        let Some(plan) = self.plan.take() else { return };
        let group = self.limiter_group();
        match answer {
            LimiterAnswer::Charged(Charged::Granted(states)) => {
                self.charged = true;
                self.admission.tightest = plan.tightest(&states);
                self.admission.slot_ttl_ms = plan.takes_slot().then_some(self.operator.slot_ttl_ms);
            }
            LimiterAnswer::Charged(Charged::Denied(states)) => {
                // A store that denies without an exhausted entry did not answer sensibly.
                match plan.denial(&states) {
                    Some(denial) => self.verdict = Some(Verdict::Deny(denial)),
                    None => self.limiter_unavailable(&plan, group, allow),
                }
            }
            LimiterAnswer::Charged(Charged::Cancelled) => {
                self.verdict = Some(Verdict::Unavailable(Unavailability {
                    dependency: Dependency::Limiter,
                    gate: None,
                }));
            }
            LimiterAnswer::NoLimiter => match plan.blocked_gate().and_then(|gate| plan.blocked_denial(gate)) {
                Some(denial) => self.verdict = Some(Verdict::Deny(denial)),
                None => self.admission.unenforced = true,
            },
            LimiterAnswer::Unavailable => self.limiter_unavailable(&plan, group, allow),
        }
        self.cursor = self.cursor.saturating_add(group.len());
    }

    fn limiter_unavailable(
        &mut self,
        plan: &ChargePlan,
        group: &[GateRule],
        allow: &mut dyn FnMut(FailureClass, Choice) -> bool,
    ) {
        // A limit of 0 needs no store: it is a known denial before any choice about the outage is made.
        if let Some(denial) = plan.blocked_gate().and_then(|gate| plan.blocked_denial(gate)) {
            self.verdict = Some(Verdict::Deny(denial));
            return;
        }
        for rule in group {
            if !plan.entries.iter().any(|entry| entry.gate == rule.gate()) {
                continue;
            }
            self.bypass_or_close(Dependency::Limiter, rule, allow);
            if self.verdict.is_some() {
                return;
            }
        }
    }

    fn unavailable(
        &mut self,
        dependency: Dependency,
        rule: &GateRule,
        allow: &mut dyn FnMut(FailureClass, Choice) -> bool,
    ) {
        self.bypass_or_close(dependency, rule, allow);
        self.cursor = self.cursor.saturating_add(1);
    }

    fn bypass_or_close(
        &mut self,
        dependency: Dependency,
        rule: &GateRule,
        allow: &mut dyn FnMut(FailureClass, Choice) -> bool,
    ) {
        let class = dependency.class();
        let gate = rule.gate();
        let choice = rule.when_unavailable().unwrap_or(Choice::Reject);
        // An allowance counts requests, not gates: a second gate of the same class costs nothing more.
        let counted = self.admission.bypassed.iter().any(|bypass| bypass.class == class);
        if (counted && choice != Choice::Reject) || allow(class, choice) {
            self.admission.bypassed.push(Bypass { class, gate });
        } else {
            self.verdict = Some(Verdict::Unavailable(Unavailability {
                dependency,
                gate: Some(gate),
            }));
        }
    }
}

/// Whether a request needs a decision at all: a contract without limits, alone, has nothing to check.
pub fn needs_decision(request: &DecideRequest) -> bool {
    request.gates.iter().any(|rule| {
        !matches!(
            rule,
            GateRule::Contract {
                limits: crate::rules::LimitSource::Envelope,
                ..
            }
        )
    }) || !request.limits.is_empty()
}

/// The denial that is known without asking anybody: a stamped limit of 0, if the contract is checked.
pub fn known_denial(request: &DecideRequest) -> Option<Denial> {
    request.gates.iter().find(|rule| rule.gate() == Gate::Contract)?;
    #[cfg(feature = "mutation")]
    if crate::mutation::is_removed(Gate::Contract) {
        return None;
    }
    let (scope, resource) = request.limits.blocked()?;
    Some(Denial::blocked(scope, resource, request.window_s))
}

/// What is wrong with a request of the wire, or `None`: a limit whose id is missing would bind nobody.
pub fn request_fault(request: &DecideRequest) -> Option<&'static str> {
    let subject = &request.subject;
    let ids = [
        Some(&subject.owner),
        subject.org.as_ref(),
        subject.auth.as_ref(),
        subject.graph.as_ref(),
    ];
    let others = [subject.lane.as_ref(), subject.model.as_ref()];
    let too_long = |id: &&alloc::string::String| id.len() > crate::envelope::LONGEST_ID;
    if subject.owner.is_empty() {
        Some("subject.owner is empty")
    } else if ids.into_iter().chain(others).flatten().any(|id| too_long(&id)) {
        Some("an id of the subject is longer than 256 bytes")
    } else if !request.limits.org.is_empty() && subject.org.is_none() {
        Some("limits.org without subject.org")
    } else if !request.limits.auth.is_empty() && subject.auth.is_none() {
        Some("limits.auth without subject.auth")
    } else if request.window_s == 0 || request.window_s > 86_400 {
        Some("window_s is not from 1 to 86400")
    } else if request.gates.is_empty() {
        Some("no gate is listed")
    } else {
        None
    }
}

/// The gates that an admission passed without a check, for a log line.
pub fn bypassed_gates(admission: &Admission) -> Vec<&'static str> {
    admission.bypassed.iter().map(|bypass| bypass.gate.name()).collect()
}

#[cfg(test)]
mod tests;
