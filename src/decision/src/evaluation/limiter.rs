//! Adjacent limiter gates (`concurrency`, `capacity`, `contract`): one plan, one answer.

use super::{Allow, Asked, Evaluation, LimiterAnswer};
use crate::charge::{ChargePlan, Charged, PlanBuilder};
use crate::class::{Code, Dependency};
use crate::limits::{Limit, ScopeLimits};
use crate::policy::Plan;
use crate::rules::{Gate, GateRule};
use crate::verdict::{Unavailability, Verdict};

impl Evaluation<'_> {
    /// Adjacent limiter gates, as one plan.
    pub(super) fn plan_limiter_gates(&mut self, allow: &mut Allow<'_>) {
        let (request, operator) = (self.request, self.operator);
        let group = self.group(Gate::Contract);
        let mut builder = PlanBuilder::new(&request.subject, &operator.tiers, request.tokens);
        for rule in group {
            #[cfg(feature = "mutation")]
            if crate::mutation::is_removed(rule.gate()) {
                continue;
            }
            let plan = if self.reads_plan(rule) {
                self.plan_for(rule, allow)
            } else {
                None
            };
            if self.verdict.is_some() {
                return;
            }
            match rule {
                GateRule::Capacity { .. } => {
                    if operator.tiers.need_org() && request.subject.org.is_none() {
                        // Only the service knows its tiers, so only here can it be seen that the id is missing.
                        return self.deny(Code::EnvelopePartial, Gate::Capacity);
                    }
                    builder.capacity(operator.window_s);
                }
                GateRule::Concurrency { .. } => {
                    if let Some(plan) = plan {
                        builder.plan_slots(&plan, request.window_s);
                    }
                }
                GateRule::Contract { .. } => {
                    let mut limits = request.limits;
                    if let Some(plan) = plan {
                        limits.org = self.plan_limits(&plan);
                    }
                    builder.contract(&limits, request.window_s);
                }
                _ => {}
            }
        }
        let mut plan = builder.build(request.op);
        plan.block = self.block(&plan, group.len());
        if plan.entries.is_empty() {
            // No limit binds this request: nothing to ask.
            self.cursor = self.cursor.saturating_add(group.len());
        } else if self.is_ahead() && plan.block.is_none() {
            self.no_lease();
        } else {
            self.is_charged = true;
            self.asked = Some(Asked::Charge(plan));
        }
    }

    /// What a plan puts in the place of stamped org limits. Its slots only where no gate of their own counts them.
    pub(super) fn plan_limits(&self, plan: &Plan) -> ScopeLimits {
        let counted = self.request.gates.iter().any(|rule| rule.gate() == Gate::Concurrency);
        let concurrency = if counted { Limit::Unlimited } else { plan.concurrency };
        ScopeLimits {
            requests: plan.requests,
            tokens: plan.tokens,
            concurrency,
        }
    }

    /// Reports the answer to [`Step::Charge`].
    pub fn charged(&mut self, answer: LimiterAnswer, allow: &mut Allow<'_>) {
        let Some(Asked::Charge(plan)) = self.asked.take() else {
            return;
        };
        let group = self.group(Gate::Contract);
        self.cursor = self.cursor.saturating_add(group.len());
        match answer {
            LimiterAnswer::Charged(Charged::Granted(states)) => {
                self.taken.limiter = Some(self.request.op);
                self.admission.tightest = plan.tightest(&states);
                self.admission.held_tokens = plan.held_tokens();
                self.admission.slot_ttl_ms = plan.takes_slot().then_some(self.operator.slot_ttl_ms);
            }
            LimiterAnswer::Charged(Charged::Block { admissions, states }) => {
                if admissions > 0 {
                    self.taken.limiter = Some(self.request.op);
                }
                self.admission.tightest = plan.tightest(&states);
                if !self.is_ahead() {
                    self.admission.held_tokens = plan.held_tokens();
                }
                self.admission.lease = self.grant(&plan, &states, admissions);
            }
            LimiterAnswer::Charged(Charged::Denied(states)) => {
                // A store that denies without an exhausted entry did not answer sensibly.
                match plan.denial(&states) {
                    Some(denial) => self.verdict = Some(Verdict::Deny(denial)),
                    None => self.limiter_unavailable(&plan, group, allow),
                }
            }
            LimiterAnswer::Charged(Charged::Cancelled) => self.cancelled(Dependency::Limiter),
            LimiterAnswer::NoLimiter => match plan.blocked_gate().and_then(|gate| plan.blocked_denial(gate)) {
                Some(denial) => self.verdict = Some(Verdict::Deny(denial)),
                None => self.admission.unenforced = true,
            },
            LimiterAnswer::Unavailable => self.limiter_unavailable(&plan, group, allow),
        }
    }

    /// The operation was cancelled before: nothing was taken and nobody waits, so nothing is opened, counted or journaled
    /// for it either, whatever the rules say.
    pub(super) fn cancelled(&mut self, dependency: Dependency) {
        let gate = None;
        self.verdict = Some(Verdict::Unavailable(Unavailability { dependency, gate }));
    }

    pub(super) fn limiter_unavailable(&mut self, plan: &ChargePlan, group: &[GateRule], allow: &mut Allow<'_>) {
        // A limit of 0 needs no store: it is a known denial before any choice about the outage is made.
        if let Some(denial) = plan.blocked_gate().and_then(|gate| plan.blocked_denial(gate)) {
            self.verdict = Some(Verdict::Deny(denial));
            return;
        }
        // A gate whose limits bind nobody here had nothing to check.
        let had_something = |rule: &&GateRule| plan.entries.iter().any(|entry| entry.gate == rule.gate());
        for rule in group.iter().filter(had_something) {
            self.bypass_or_close(Dependency::Limiter, rule, allow);
            if self.verdict.is_some() {
                return;
            }
        }
    }
}
