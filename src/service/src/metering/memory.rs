//! `memory:`: the pure ledger behind a lock, by this machine's wall clock (UTC). A real meter, for one process.

use std::future::ready;
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

use portcullis_decision::metering::{Cost, MeterLedger, MeterPlan, Metered, Month};
use portcullis_decision::operation::OperationId;
use tokio::time::Instant;

use super::{Cancel, Meter, Tended};
use crate::limiter::Answer;
use crate::locked;
use crate::unmetered::Admission;

const DAY_MS: u64 = 86_400_000;

/// Months of this process.
#[derive(Debug, Default)]
pub struct MemoryMeter {
    ledger: Mutex<MeterLedger>,
}

impl MemoryMeter {
    /// Runs `step` on the ledger in the present month. The lock is held for microseconds.
    fn at_once<T: Send + 'static>(&self, step: impl FnOnce(&mut MeterLedger, &Month) -> T) -> Answer<'_, T> {
        let answer = step(&mut locked(&self.ledger), &this_month());
        Box::pin(ready(Ok(answer)))
    }
}

impl Meter for MemoryMeter {
    fn scheme(&self) -> &'static str {
        "memory"
    }

    fn is_shared(&self) -> bool {
        false
    }

    fn record<'a>(&'a self, plan: &'a MeterPlan, _: Instant) -> Answer<'a, Metered> {
        self.at_once(|ledger, month| ledger.record(month, plan))
    }

    fn cancel<'a>(&'a self, ops: &'a [OperationId], _: Cancel, _: Instant) -> Answer<'a, ()> {
        self.at_once(|ledger, month| ops.iter().for_each(|op| ledger.cancel(month, *op)))
    }

    fn add_costs<'a>(&'a self, costs: &'a [Cost], _: Instant) -> Answer<'a, ()> {
        self.at_once(|ledger, month| costs.iter().for_each(|cost| ledger.settle(month, cost)))
    }

    fn journal<'a>(&'a self, _: &'a [Admission], _: Instant) -> Option<Answer<'a, ()>> {
        None
    }

    fn ping(&self, _: Instant) -> Answer<'_, ()> {
        Box::pin(ready(Ok(())))
    }

    fn tend(&self) -> Answer<'_, Tended> {
        Box::pin(ready(Ok(Tended::AllDone)))
    }
}

/// Milliseconds since 1970 by the wall clock; 0 if that is set to before.
pub(crate) fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// The month by this process's clock.
pub(crate) fn this_month() -> Month {
    month_at(unix_ms())
}

/// The month of a time, in UTC (Hinnant's `civil_from_days`, in years that begin in March, so that the odd day is last).
#[allow(
    clippy::arithmetic_side_effects,
    reason = "days since 1970 in 64 bits of milliseconds stay below 2^38, and every divisor is a constant"
)]
pub(crate) fn month_at(unix_ms: u64) -> Month {
    /// From 0000-03-01 to 1970-01-01.
    const SHIFT: u64 = 719_468;
    let days = unix_ms / DAY_MS + SHIFT;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    // 0 is March.
    let month = (5 * day_of_year + 2) / 153;
    let starts_on = (153 * month + 2) / 5;
    let leap_ends = year_of_era + 1;
    let is_leap = leap_ends % 4 == 0 && (leap_ends % 100 != 0 || leap_ends % 400 == 0);
    let length = match month {
        11 => 28 + u64::from(is_leap),
        _ => (153 * (month + 1) + 2) / 5 - starts_on,
    };
    let left_ms = (length - (day_of_year - starts_on)) * DAY_MS - unix_ms % DAY_MS;
    Month {
        index: (era * 400 + year_of_era) * 12 + month,
        ends_in_ms: left_ms,
        length_s: length * 86_400,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn months_end_where_the_calendar_says() {
        for (seconds, days_left, length) in [
            (0, 31, 31),
            // 2024-02-29, 2023-02-28, 2000-02-01, 2026-12-31.
            (1_709_164_800, 1, 29),
            (1_677_542_400, 1, 28),
            (949_363_200, 29, 29),
            (1_798_675_200, 1, 31),
        ] {
            let month = month_at(seconds * 1000);
            assert_eq!(
                (month.ends_in_ms, month.length_s),
                (days_left * DAY_MS, length * 86_400),
                "{seconds}"
            );
        }
    }

    #[test]
    fn every_month_of_four_centuries_is_followed_by_the_next() {
        let mut at = 0;
        let first = month_at(0).index;
        for index in 0..4_800 {
            let month = month_at(at);
            assert_eq!(month.index, first + index);
            assert_eq!(month.ends_in_ms, month.length_s * 1000);
            assert_eq!(month_at(at + month.ends_in_ms - 1).index, month.index);
            assert_eq!(month_at(at + month.ends_in_ms - 1).ends_in_ms, 1);
            at += month.ends_in_ms;
        }
    }
}
