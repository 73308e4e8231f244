//! One decision of the service: the gates in their order, as questions to stores and answers from them.
//!
//! The driver asks [`Evaluation::step`], does what it says, and reports back; nothing here waits or knows a store. The
//! first gate that denies is the answer. A gate that is unavailable and opened is skipped; what earlier gates took is
//! given back when a later one denies or stays closed. Gates of one store that stand together are one question.

mod leasing;
mod limiter;
mod metering;
mod policy;
mod request;

pub use leasing::LeaseTerms;
pub use request::{known_denial, needs_decision, request_fault};

use alloc::string::String;
use alloc::vec::Vec;

use crate::charge::{ChargePlan, Charged};
use crate::class::{Code, Dependency, FailureClass};
use crate::config::Tiers;
use crate::metering::MeterPlan;
use crate::operation::OperationId;
use crate::policy::{Lookup, Plan, PolicyView};
use crate::rules::{Choice, Gate, GateRule};
use crate::verdict::{Admission, Bypass, Denial, Unavailability, Verdict};
use crate::wire::DecideRequest;

/// Says whether a class may be opened once more under a choice, and counts it.
pub type Allow<'f> = dyn FnMut(FailureClass, Choice) -> bool + 'f;

/// What the driver has to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Look up the request's org, and its model's provider and price if they are asked for, then call
    /// [`Evaluation::policy`].
    Policy {
        /// The organization.
        org: String,
        /// The model whose provider is wanted.
        provider_of: Option<String>,
        /// The model whose price is wanted.
        price_of: Option<String>,
    },
    /// Take one launch of the org in this process's memory, then call [`Evaluation::launched`].
    Launch {
        /// The organization.
        org: String,
        /// Launches per minute.
        per_minute: u64,
        /// Launches that may come at once.
        burst: u64,
    },
    /// Charge this plan in the limiter, then call [`Evaluation::charged`].
    Charge(ChargePlan),
    /// Check and record this in the metering store, then call [`Evaluation::metered`].
    Meter(MeterPlan),
    /// Give back what was taken, then ask again. A failure is retried later by the driver; it does not change the
    /// verdict.
    GiveBack(Taken),
    /// Answer.
    Done(Verdict),
}

/// What earlier gates took.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Taken {
    /// The operation has charged the limiter.
    pub limiter: Option<OperationId>,
    /// A launch of this org, at this rate per minute.
    pub launch: Option<(String, u64)>,
    /// The operation has recorded a run.
    pub metering: Option<OperationId>,
    /// Classes of whose emergency allowance this request has used one.
    pub allowances: Vec<FailureClass>,
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

/// A question that waits for its answer.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Asked {
    Charge(ChargePlan),
    /// `lacks_price`: `cost_cap` stays closed, whatever is granted, since its cap could not be kept.
    Meter {
        plan: MeterPlan,
        lacks_price: bool,
    },
}

/// One decision under way.
#[derive(Debug)]
pub struct Evaluation<'a> {
    request: &'a DecideRequest,
    operator: &'a Operator,
    /// The next gate to look at.
    cursor: usize,
    admission: Admission,
    taken: Taken,
    view: Option<PolicyView>,
    /// A cap could not be kept since nobody has priced the model.
    is_unpriced: bool,
    asked: Option<Asked>,
    /// Something counts this request: the limiter has to be asked.
    is_charged: bool,
    terms: Option<LeaseTerms>,
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
            taken: Taken::default(),
            view: None,
            is_unpriced: false,
            asked: None,
            is_charged: false,
            terms: None,
            verdict: None,
        }
    }

    /// What is to be done.
    pub fn step(&mut self, allow: &mut Allow<'_>) -> Step {
        loop {
            if let Some(verdict) = &self.verdict {
                if !matches!(verdict, Verdict::Admit(_)) && self.taken != Taken::default() {
                    return Step::GiveBack(core::mem::take(&mut self.taken));
                }
                return Step::Done(verdict.clone());
            }
            if self.is_pointless() {
                self.no_lease();
                continue;
            }
            match &self.asked {
                Some(Asked::Charge(plan)) => return Step::Charge(plan.clone()),
                Some(Asked::Meter { plan, .. }) => return Step::Meter(plan.clone()),
                None => {}
            }
            let Some(rule) = self.request.gates.get(self.cursor) else {
                if self.admission.lease.is_none() {
                    self.admission.lease = self.uncounted_grant();
                }
                self.verdict = Some(Verdict::Admit(self.admission.clone()));
                continue;
            };
            #[cfg(feature = "mutation")]
            if crate::mutation::is_removed(rule.gate()) {
                self.cursor = self.cursor.saturating_add(1);
                continue;
            }
            if let Some(step) = self.gate(rule, allow) {
                return step;
            }
        }
    }

    /// Looks at the gate under the cursor: a question, or `None` if it has been settled or its group has been planned.
    fn gate(&mut self, rule: &GateRule, allow: &mut Allow<'_>) -> Option<Step> {
        if self.view.is_none() && self.wants_policy(rule) {
            return self.ask_policy();
        }
        match rule {
            GateRule::OrgStatus { .. } => self.org_status(rule, allow),
            GateRule::ModelPolicy { .. } => self.model_policy(rule, allow),
            GateRule::LaunchRate { per_minute, burst } => {
                let org = self.request.subject.org.clone().unwrap_or_default();
                return Some(Step::Launch {
                    org,
                    per_minute: *per_minute,
                    burst: *burst,
                });
            }
            GateRule::Concurrency { .. } | GateRule::Capacity { .. } | GateRule::Contract { .. } => {
                self.plan_limiter_gates(allow);
            }
            GateRule::MonthlyQuota { .. } | GateRule::CostCap { .. } | GateRule::Metering { .. } => {
                self.plan_metering_gates(allow);
            }
        }
        None
    }

    fn wants_policy(&self, rule: &GateRule) -> bool {
        let group = self.group(rule.gate());
        matches!(rule.gate(), Gate::OrgStatus | Gate::ModelPolicy) || group.iter().any(|rule| self.reads_plan(rule))
    }

    /// Whether a gate needs the plan for this request: a contract with a stamped org limit does not.
    fn reads_plan(&self, rule: &GateRule) -> bool {
        rule.reads_plan() && (rule.gate() != Gate::Contract || self.request.limits.org.is_empty())
    }

    fn ask_policy(&mut self) -> Option<Step> {
        let Some(org) = self.request.subject.org.clone() else {
            // The filter refuses such a request as partial; without an id nobody can be asked.
            self.view = Some(PolicyView::UNAVAILABLE);
            return None;
        };
        let model_for = |gate| {
            let is_listed = self.request.gates.iter().any(|rule| rule.gate() == gate);
            self.request.subject.model.clone().filter(|_| is_listed)
        };
        Some(Step::Policy {
            org,
            provider_of: model_for(Gate::ModelPolicy),
            price_of: model_for(Gate::CostCap),
        })
    }

    /// The model that has no price although a cap depends on it: for whoever keeps the price list.
    pub fn unpriced_model(&self) -> Option<&'a str> {
        self.request.subject.model.as_deref().filter(|_| self.is_unpriced)
    }

    /// The gates that were opened so far, also of a request that is refused in the end.
    pub fn bypassed(&self) -> &[Bypass] {
        &self.admission.bypassed
    }

    /// Reports the answer to [`Step::Policy`].
    pub fn policy(&mut self, view: PolicyView) {
        self.view = Some(view);
    }

    fn deny(&mut self, code: Code, gate: Gate) {
        self.verdict = Some(Verdict::Deny(Denial::plain(code, Some(gate))));
    }

    /// Reports the answer to [`Step::Launch`]: taken, or how long to wait, in milliseconds.
    pub fn launched(&mut self, answer: Result<(), u64>) {
        let Some(GateRule::LaunchRate { per_minute, .. }) = self.request.gates.get(self.cursor) else {
            return;
        };
        match answer {
            Ok(()) => {
                self.taken.launch = self.request.subject.org.clone().map(|org| (org, *per_minute));
            }
            Err(wait_ms) => {
                self.verdict = Some(Verdict::Deny(Denial::launch_rate(*per_minute, wait_ms)));
            }
        }
        self.cursor = self.cursor.saturating_add(1);
    }

    /// The gates of the same store from the cursor on.
    fn group(&self, gate: Gate) -> &'a [GateRule] {
        let rest = self.request.gates.get(self.cursor..).unwrap_or_default();
        let dependency = gate.dependency();
        let length = rest
            .iter()
            .position(|rule| rule.gate().dependency() != dependency)
            .unwrap_or(rest.len());
        rest.get(..length).unwrap_or_default()
    }

    /// The org's plan, or `None` if it cannot be read: then the gate has been bypassed, or the verdict is settled.
    fn plan_for(&mut self, rule: &GateRule, allow: &mut Allow<'_>) -> Option<Plan> {
        match self.view.as_ref().map(|view| &view.org) {
            Some(Lookup::Known(Some(org))) => return Some(org.plan),
            Some(Lookup::Known(None)) => self.deny(Code::OrgUnknown, rule.gate()),
            _ => self.bypass_or_close(Dependency::Policy, rule, allow),
        }
        None
    }

    fn bypass_or_close(&mut self, dependency: Dependency, rule: &GateRule, allow: &mut Allow<'_>) {
        if self.is_ahead() {
            // Nobody waits for whom it could be opened.
            return self.close(dependency, rule.gate());
        }
        if !self.bypass(dependency, rule, allow) {
            self.close(dependency, rule.gate());
        }
    }

    fn close(&mut self, dependency: Dependency, gate: Gate) {
        let gate = Some(gate);
        self.verdict = Some(Verdict::Unavailable(Unavailability { dependency, gate }));
    }

    /// Opens a gate that is unavailable, if its rule and the class's allowance say so.
    fn bypass(&mut self, dependency: Dependency, rule: &GateRule, allow: &mut Allow<'_>) -> bool {
        let class = dependency.class();
        let gate = rule.gate();
        let choice = rule.when_unavailable().unwrap_or(Choice::Reject);
        // An allowance counts requests, not gates: a second gate of the same class costs nothing more.
        let counted = self.admission.bypassed.iter().any(|bypass| bypass.class == class);
        let is_opened = (counted && choice != Choice::Reject) || allow(class, choice);
        if is_opened {
            self.admission.bypassed.push(Bypass { class, gate });
            if !counted && matches!(choice, Choice::AdmitAtMost { .. }) {
                self.taken.allowances.push(class);
            }
        }
        is_opened
    }
}

#[cfg(test)]
mod tests;
