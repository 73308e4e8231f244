//! What a decision asks of the metering store, what it gives back to either store, and what it leaves to be billed.

use portcullis_decision::class::Dependency;
use portcullis_decision::evaluation::Taken;
use portcullis_decision::metering::{MeterPlan, Metered};
use portcullis_decision::operation::OperationId;
use portcullis_decision::verdict::Verdict;
use portcullis_decision::wire::DecideRequest;
use tokio::time::Instant;

use super::Decider;
use crate::locked;
use crate::metering::Cancel;
use crate::spans::Traced;
use crate::unmetered::Admission;

impl Decider {
    /// Checks and records a run; `None` if the store did not answer in time, or not sensibly. What a late or lost answer
    /// may have recorded is given back.
    pub(super) async fn meter_a_run(
        &self,
        plan: &MeterPlan,
        deadline: Instant,
        gave_back: &mut bool,
        traced: &Traced,
    ) -> Option<Metered> {
        let Some(meter) = &self.meter else {
            self.metrics.dependency_error(Dependency::Metering, "not_configured");
            return None;
        };
        if Instant::now() >= deadline {
            self.metrics.dependency_error(Dependency::Metering, "budget_spent");
            return None;
        }
        let recorded = meter.record(plan, deadline);
        match traced.asked("metering.record", Dependency::Metering, recorded).await {
            Ok(metered) => Some(metered),
            Err(fault) => {
                if plan.records && fault.may_have_happened() {
                    *gave_back = true;
                    self.give_back.metering.later(plan.op);
                }
                None
            }
        }
    }

    /// Gives back what earlier gates took: at once while there is time, so that who is told of a denial finds nothing
    /// charged by it; else, or if that fails or takes longer, later: a verdict after the budget is lost to who asked.
    /// Returns whether a store has to hear of it.
    pub(super) async fn give_back_taken(
        &self,
        op: OperationId,
        taken: Taken,
        deadline: Instant,
        traced: &Traced,
    ) -> bool {
        if taken.launch.is_some() {
            locked(&self.launches).give_back(op);
        }
        for class in taken.allowances {
            locked(&self.allowances).give_back(class);
        }
        let has_time = Instant::now() < deadline;
        let limiter = async {
            let Some(op) = taken.limiter else { return };
            let ops = [op];
            let now_told = match &self.limiter {
                Some(limiter) if has_time => {
                    let given = limiter.cancel_by(&ops, deadline);
                    traced
                        .asked("limiter.give_back", Dependency::Limiter, given)
                        .await
                        .is_ok()
                }
                _ => false,
            };
            if !now_told {
                self.give_back.limiter.later(op);
            }
        };
        let metering = async {
            let Some(op) = taken.metering else { return };
            let ops = [op];
            let now_told = match &self.meter {
                Some(meter) if has_time => {
                    let given = meter.cancel_by(&ops, Cancel::GiveBack, deadline);
                    traced
                        .asked("metering.give_back", Dependency::Metering, given)
                        .await
                        .is_ok()
                }
                _ => false,
            };
            if !now_told {
                self.give_back.metering.later(op);
            }
        };
        tokio::join!(limiter, metering);
        taken.limiter.is_some() || taken.metering.is_some()
    }

    /// Journals an admission whose run was not recorded.
    pub(super) fn journal_unmetered(&self, request: &DecideRequest, verdict: &Verdict) {
        if let Verdict::Admit(admission) = verdict
            && let Some(admission) = Admission::of(request, admission)
        {
            self.unmetered.add(admission);
        }
    }
}

#[cfg(test)]
mod tests;
