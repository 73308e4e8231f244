//! Adjacent metering gates (`monthly_quota`, `cost_cap`, `metering`): one plan, one answer.

use super::{Allow, Asked, Evaluation};
use crate::class::Dependency;
use crate::limits::Limit;
use crate::metering::{MeterPlan, Metered, Month};
use crate::rules::{Gate, GateRule};
use crate::verdict::Verdict;

impl Evaluation<'_> {
    /// Adjacent metering gates, as one plan.
    pub(super) fn plan_metering_gates(&mut self, allow: &mut Allow<'_>) {
        let group = self.group(Gate::Metering);
        let mut plan = MeterPlan {
            op: self.request.op,
            org: self.request.subject.org.clone().unwrap_or_default(),
            runs: Limit::Unlimited,
            cost: Limit::Unlimited,
            records: false,
            cost_first: false,
        };
        for rule in group {
            #[cfg(feature = "mutation")]
            if crate::mutation::is_removed(rule.gate()) {
                continue;
            }
            let figures = if rule.reads_plan() {
                self.plan_for(rule, allow)
            } else {
                None
            };
            if self.verdict.is_some() {
                return;
            }
            match (rule, figures) {
                (GateRule::MonthlyQuota { .. }, Some(figures)) => plan.runs = figures.monthly_runs,
                (GateRule::CostCap { .. }, Some(figures)) => {
                    plan.cost = figures.monthly_cost;
                    plan.cost_first = plan.runs == Limit::Unlimited;
                }
                (GateRule::Metering { .. }, _) => plan.records = true,
                _ => {}
            }
        }
        if !plan.records && plan.runs == Limit::Unlimited && plan.cost == Limit::Unlimited {
            self.cursor = self.cursor.saturating_add(group.len());
        } else {
            self.asked = Some(Asked::Meter(plan));
        }
    }

    /// Reports the answer to [`Step::Meter`]; `None` if the store did not answer in time, or not sensibly. `month` is
    /// the driver's own, for what is known without the store.
    pub fn metered(&mut self, answer: Option<Metered>, month: &Month, allow: &mut Allow<'_>) {
        let Some(Asked::Meter(plan)) = self.asked.take() else {
            return;
        };
        let group = self.group(Gate::Metering);
        self.cursor = self.cursor.saturating_add(group.len());
        match answer {
            Some(Metered::Granted) => self.taken.metering = Some(self.request.op).filter(|_| plan.records),
            Some(Metered::Denied(state)) => match plan.denial(&state) {
                Some(denial) => self.verdict = Some(Verdict::Deny(denial)),
                None => self.metering_unavailable(&plan, group, month, allow),
            },
            Some(Metered::Cancelled) => self.cancelled(Dependency::Metering),
            None => self.metering_unavailable(&plan, group, month, allow),
        }
    }

    pub(super) fn metering_unavailable(
        &mut self,
        plan: &MeterPlan,
        group: &[GateRule],
        month: &Month,
        allow: &mut Allow<'_>,
    ) {
        if let Some(denial) = plan.blocked(month) {
            self.verdict = Some(Verdict::Deny(denial));
            return;
        }
        let had_something = |rule: &&GateRule| match rule.gate() {
            Gate::MonthlyQuota => plan.runs != Limit::Unlimited,
            Gate::CostCap => plan.cost != Limit::Unlimited,
            _ => true,
        };
        for rule in group.iter().filter(had_something) {
            self.bypass_or_close(Dependency::Metering, rule, allow);
            if self.verdict.is_some() {
                return;
            }
        }
    }
}
