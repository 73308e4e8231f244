//! Metering: runs and cost per org and calendar month, as one question to the metering store.
//!
//! A month is UTC, by the store's clock. `monthly_quota`, `cost_cap` and `metering` that stand together are one statement:
//! checked and recorded, or neither.

use alloc::string::String;

use hashbrown::HashMap;

use crate::class::Code;
use crate::limits::{Limit, Resource, Scope};
use crate::operation::OperationId;
use crate::rules::Gate;
use crate::verdict::{Denial, LimitState};

/// What to check and to record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeterPlan {
    /// Makes the record idempotent.
    pub op: OperationId,
    /// Whose month.
    pub org: String,
    /// At most this many runs, if the gate `monthly_quota` asks; else unlimited.
    pub runs: Limit,
    /// At most this much spent, in micro-dollars, if the gate `cost_cap` asks; else unlimited.
    pub cost: Limit,
    /// Whether the run is recorded: the gate `metering`.
    pub records: bool,
    /// `cost_cap` stands before `monthly_quota`.
    pub cost_first: bool,
}

/// Where an org's month stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MonthState {
    /// Runs so far, this one not included.
    pub runs: u64,
    /// Micro-dollars spent so far.
    pub cost: u64,
    /// Milliseconds until the month ends.
    pub ends_in_ms: u64,
    /// The month's length, in seconds.
    pub length_s: u64,
}

/// What a metering store did with a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Metered {
    /// Everything fits, and the run is recorded (or had been, by the same operation).
    Granted,
    /// Something does not fit, and nothing was recorded.
    Denied(MonthState),
    /// The operation was cancelled before.
    Cancelled,
}

impl MeterPlan {
    /// Whether a state leaves room for one more run: runs below the quota, spent below the cap.
    pub fn fits(&self, state: &MonthState) -> bool {
        let below = |limit: Limit, used: u64| limit.figure().is_none_or(|figure| used < figure);
        below(self.runs, state.runs) && below(self.cost, state.cost)
    }

    /// The denial that a state means, or `None` if everything fits.
    pub fn denial(&self, state: &MonthState) -> Option<Denial> {
        let runs = self.runs.figure().filter(|figure| state.runs >= *figure);
        let cost = self.cost.figure().filter(|figure| state.cost >= *figure);
        let by_cost = cost.is_some() && (self.cost_first || runs.is_none());
        if !by_cost && runs.is_none() {
            return None;
        }
        let retry_after_s = Some(state.ends_in_ms.div_ceil(1000).max(1));
        if by_cost {
            // Money is no rate limit: the fields for those have no unit for it.
            return Some(Denial {
                code: Code::CostCapExceeded,
                gate: Some(Gate::CostCap),
                limit: None,
                retry_after_s,
            });
        }
        let limit = runs.map(|limit| LimitState {
            scope: Scope::Org,
            resource: Resource::Requests,
            limit,
            remaining: 0,
            reset_ms: state.ends_in_ms,
            window_s: state.length_s,
        });
        Some(Denial {
            code: Code::RunQuotaExceeded,
            gate: Some(Gate::MonthlyQuota),
            limit,
            retry_after_s,
        })
    }

    /// The denial by a figure of 0, which is known without the store; `month` is the caller's own.
    pub fn blocked(&self, month: &Month) -> Option<Denial> {
        // With nothing run and nothing spent, only a figure of 0 is used up.
        self.denial(&MonthState {
            runs: 0,
            cost: 0,
            ends_in_ms: month.ends_in_ms,
            length_s: month.length_s,
        })
    }
}

/// What one operation has cost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cost {
    /// Makes it idempotent.
    pub op: OperationId,
    /// Who pays.
    pub org: String,
    /// Micro-dollars.
    pub micro_dollars: u64,
}

/// A calendar month, as the caller's clock sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Month {
    /// Months since the year 0: tells two months apart.
    pub index: u64,
    /// Milliseconds until it ends.
    pub ends_in_ms: u64,
    /// Its length, in seconds.
    pub length_s: u64,
}

/// Operations that are remembered before those of earlier months are swept.
const SWEEP_AT: usize = 65_536;

/// The metering store's algorithm over memory: what `memory:` serves, and the model of the others.
#[derive(Debug, Clone, Default)]
pub struct MeterLedger {
    /// Runs and micro-dollars, by month and org.
    months: HashMap<(u64, String), (u64, u64)>,
    /// The month and org that an operation was recorded for; `None` once it has been cancelled.
    operations: HashMap<OperationId, (u64, Option<String>)>,
    /// The month in which the cost of an operation was added.
    costed: HashMap<OperationId, u64>,
}

impl MeterLedger {
    /// Checks and records, or neither. A second call of one operation changes nothing and is granted again.
    pub fn record(&mut self, month: &Month, plan: &MeterPlan) -> Metered {
        match self.operations.get(&plan.op) {
            Some((_, None)) => return Metered::Cancelled,
            Some((_, Some(_))) => return Metered::Granted,
            None => {}
        }
        let key = (month.index, plan.org.clone());
        let (runs, cost) = self.months.get(&key).copied().unwrap_or_default();
        let state = MonthState {
            runs,
            cost,
            ends_in_ms: month.ends_in_ms,
            length_s: month.length_s,
        };
        if !plan.fits(&state) {
            return Metered::Denied(state);
        }
        if plan.records {
            self.sweep(month.index);
            self.months.insert(key, (runs.saturating_add(1), cost));
            self.operations.insert(plan.op, (month.index, Some(plan.org.clone())));
        }
        Metered::Granted
    }

    /// Gives a run back, and keeps the operation from being recorded later. Idempotent.
    pub fn cancel(&mut self, month: &Month, op: OperationId) {
        if let Some((index, Some(org))) = self.operations.insert(op, (month.index, None))
            && let Some((runs, _)) = self.months.get_mut(&(index, org))
        {
            *runs = runs.saturating_sub(1);
        }
    }

    /// Adds what an operation has cost, in micro-dollars, to the month of its record, or else to this one. A second call of
    /// one operation changes nothing.
    pub fn settle(&mut self, month: &Month, cost: &Cost) {
        self.sweep(month.index);
        if self.costed.insert(cost.op, month.index).is_none() {
            let index = self.operations.get(&cost.op).map_or(month.index, |(index, _)| *index);
            self.add_cost(&Month { index, ..*month }, &cost.org, cost.micro_dollars);
        }
    }

    /// Adds what something has cost, in micro-dollars.
    pub fn add_cost(&mut self, month: &Month, org: &str, cost: u64) {
        let (_, spent) = self.months.entry((month.index, org.into())).or_default();
        *spent = spent.saturating_add(cost);
    }

    /// Forgets an operation that nobody will name again. What was recorded for it stays recorded.
    pub fn forget(&mut self, op: OperationId) {
        self.operations.remove(&op);
        self.costed.remove(&op);
    }

    /// Adds runs that were recorded elsewhere.
    pub fn add_runs(&mut self, month: &Month, org: &str, runs: u64) {
        let (recorded, _) = self.months.entry((month.index, org.into())).or_default();
        *recorded = recorded.saturating_add(runs);
    }

    /// Micro-dollars that an org has spent.
    pub fn cost(&self, month: &Month, org: &str) -> u64 {
        self.months.get(&(month.index, org.into())).map_or(0, |(_, cost)| *cost)
    }

    /// Runs recorded for an org.
    pub fn runs(&self, month: &Month, org: &str) -> u64 {
        self.months.get(&(month.index, org.into())).map_or(0, |(runs, _)| *runs)
    }

    fn sweep(&mut self, index: u64) {
        if self.operations.len() >= SWEEP_AT {
            self.operations.retain(|_, (of, _)| *of == index);
            self.months.retain(|(of, _), _| of.saturating_add(1) >= index);
        }
        if self.costed.len() >= SWEEP_AT {
            self.costed.retain(|_, of| *of == index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(target_arch = "wasm32")]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    fn plan(runs: Limit, cost: Limit) -> MeterPlan {
        MeterPlan {
            op: OperationId::from_random([1; 16]),
            org: "g".into(),
            runs,
            cost,
            records: true,
            cost_first: false,
        }
    }

    fn state(runs: u64, cost: u64) -> MonthState {
        MonthState {
            runs,
            cost,
            ends_in_ms: 86_400_001,
            length_s: 2_592_000,
        }
    }

    #[test]
    fn a_quota_counts_runs_and_a_cap_counts_what_is_spent() {
        let plan = plan(Limit::of(10), Limit::of(500));
        assert!(plan.fits(&state(9, 499)) && plan.denial(&state(9, 499)).is_none());
        let denial = plan.denial(&state(10, 500)).unwrap();
        assert_eq!(
            (denial.code, denial.retry_after_s),
            (Code::RunQuotaExceeded, Some(86_401))
        );
        assert!(!denial.waiting_helps());
        assert_eq!(plan.denial(&state(9, 500)).unwrap().code, Code::CostCapExceeded);
        assert_eq!(plan.denial(&state(9, u64::MAX)).unwrap().code, Code::CostCapExceeded);
        let cost_first = MeterPlan {
            cost_first: true,
            ..plan
        };
        assert_eq!(cost_first.denial(&state(10, 500)).unwrap().code, Code::CostCapExceeded);
    }

    const MONTH: Month = Month {
        index: 24_000,
        ends_in_ms: 1_000,
        length_s: 2_592_000,
    };

    fn op(n: u8) -> OperationId {
        OperationId::from_random([n; 16])
    }

    #[test]
    fn ten_runs_are_ten_runs_and_one_operation_is_one_run() {
        let mut ledger = MeterLedger::default();
        let run = |ledger: &mut MeterLedger, n| {
            ledger.record(
                &MONTH,
                &MeterPlan {
                    op: op(n),
                    ..plan(Limit::of(10), Limit::Unlimited)
                },
            )
        };
        let granted = (0..100).filter(|n| run(&mut ledger, *n) == Metered::Granted).count();
        assert_eq!(granted, 10);
        assert_eq!(run(&mut ledger, 3), Metered::Granted, "asked again");
        ledger.cancel(&MONTH, op(3));
        ledger.cancel(&MONTH, op(3));
        assert_eq!(run(&mut ledger, 3), Metered::Cancelled);
        assert_eq!(run(&mut ledger, 200), Metered::Granted);
        assert!(matches!(run(&mut ledger, 201), Metered::Denied(_)));
        let next = Month { index: 24_001, ..MONTH };
        let plan = MeterPlan {
            op: op(202),
            ..plan(Limit::of(10), Limit::Unlimited)
        };
        assert_eq!(ledger.record(&next, &plan), Metered::Granted, "a new month");
    }

    #[test]
    fn a_cap_denies_once_it_is_reached() {
        let mut ledger = MeterLedger::default();
        let capped = |n| MeterPlan {
            op: op(n),
            ..plan(Limit::Unlimited, Limit::of(500))
        };
        ledger.add_cost(&MONTH, "g", 499);
        assert_eq!(ledger.record(&MONTH, &capped(1)), Metered::Granted);
        ledger.add_cost(&MONTH, "g", u64::MAX);
        assert!(matches!(ledger.record(&MONTH, &capped(2)), Metered::Denied(_)));
    }

    #[test]
    fn what_an_operation_has_cost_is_added_once_and_to_the_month_of_its_record() {
        let mut ledger = MeterLedger::default();
        let capped = |n| MeterPlan {
            op: op(n),
            ..plan(Limit::Unlimited, Limit::of(500))
        };
        let cost = |n, micro_dollars| Cost {
            op: op(n),
            org: "g".into(),
            micro_dollars,
        };
        assert_eq!(ledger.record(&MONTH, &capped(1)), Metered::Granted);
        let next = Month { index: 24_001, ..MONTH };
        for _ in 0..3 {
            ledger.settle(&next, &cost(1, 400));
            ledger.settle(&next, &cost(2, 100));
        }
        assert_eq!((ledger.cost(&MONTH, "g"), ledger.cost(&next, "g")), (400, 100));
        ledger.settle(&MONTH, &cost(3, u64::MAX));
        assert_eq!(ledger.cost(&MONTH, "g"), u64::MAX);
        assert!(matches!(ledger.record(&MONTH, &capped(4)), Metered::Denied(_)));
        assert_eq!(ledger.record(&next, &capped(5)), Metered::Granted);
    }

    #[test]
    fn a_figure_of_zero_is_known_without_the_store() {
        let denial = plan(Limit::Blocked, Limit::Unlimited).blocked(&MONTH).unwrap();
        assert_eq!((denial.code, denial.retry_after_s), (Code::RunQuotaExceeded, Some(1)));
        assert!(!denial.waiting_helps());
        let denial = plan(Limit::of(1), Limit::Blocked).blocked(&MONTH).unwrap();
        assert_eq!((denial.code, denial.retry_after_s), (Code::CostCapExceeded, Some(1)));
        assert_eq!(plan(Limit::of(1), Limit::Unlimited).blocked(&MONTH), None);
    }
}
