//! Adjacent metering gates (`monthly_quota`, `cost_cap`, `metering`): one plan, one answer.
//!
//! A cap can only be kept where what a request costs can be added to its month. So a request whose model has no price, or
//! whose price can't be read, makes `cost_cap` unavailable for an org with a cap, and its own choice opens or closes it. The
//! store is asked all the same: a month that is used up is a known denial, which no price could change.

use super::{Allow, Asked, Evaluation};
use crate::class::Dependency;
use crate::limits::Limit;
use crate::metering::{MeterPlan, Metered, Month};
use crate::policy::Lookup;
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
        let mut lacks_price = false;
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
                    lacks_price = !self.can_be_priced(plan.cost) && !self.bypass(Dependency::Policy, rule, allow);
                }
                (GateRule::Metering { .. }, _) => plan.records = true,
                _ => {}
            }
        }
        if !plan.records && plan.runs == Limit::Unlimited && plan.cost == Limit::Unlimited {
            self.cursor = self.cursor.saturating_add(group.len());
        } else {
            // What will be refused for the lack of a price is only checked: there would be a run to give back.
            plan.records &= !lacks_price;
            self.asked = Some(Asked::Meter { plan, lacks_price });
        }
    }

    /// Whether what this request costs will be known, or need not be: no cap, or no model that could be priced.
    fn can_be_priced(&mut self, cap: Limit) -> bool {
        if cap == Limit::Unlimited || self.request.subject.model.is_none() {
            return true;
        }
        match self.view.as_ref().map(|view| &view.price) {
            Some(Lookup::Known(Some(_))) => true,
            Some(Lookup::Known(None)) => {
                self.is_unpriced = true;
                false
            }
            Some(Lookup::Unavailable) | None => false,
        }
    }

    /// Reports the answer to [`Step::Meter`]; `None` if the store did not answer in time, or not sensibly. `month` is
    /// the driver's own, for what is known without the store.
    pub fn metered(&mut self, answer: Option<Metered>, month: &Month, allow: &mut Allow<'_>) {
        let Some(Asked::Meter { plan, lacks_price }) = self.asked.take() else {
            return;
        };
        let group = self.group(Gate::Metering);
        self.cursor = self.cursor.saturating_add(group.len());
        match answer {
            Some(Metered::Granted) if lacks_price => self.close(Dependency::Policy, Gate::CostCap),
            Some(Metered::Granted) => self.taken.metering = Some(self.request.op).filter(|_| plan.records),
            Some(Metered::Denied(state)) => match plan.denial(&state) {
                // The quota stands behind the cap that is closed.
                Some(denial) if lacks_price && plan.cost_first && denial.gate != Some(Gate::CostCap) => {
                    self.close(Dependency::Policy, Gate::CostCap);
                }
                Some(denial) => self.verdict = Some(Verdict::Deny(denial)),
                None => self.metering_unavailable(&plan, lacks_price, group, month, allow),
            },
            Some(Metered::Cancelled) => self.cancelled(Dependency::Metering),
            None => self.metering_unavailable(&plan, lacks_price, group, month, allow),
        }
    }

    pub(super) fn metering_unavailable(
        &mut self,
        plan: &MeterPlan,
        lacks_price: bool,
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
            if lacks_price && rule.gate() == Gate::CostCap {
                return self.close(Dependency::Policy, Gate::CostCap);
            }
            self.bypass_or_close(Dependency::Metering, rule, allow);
            if self.verdict.is_some() {
                return;
            }
        }
    }
}
