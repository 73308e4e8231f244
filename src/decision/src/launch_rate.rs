//! Launches per minute and org: a token bucket in the memory of one process (GCRA, the generic cell rate algorithm of
//! ITU-T I.371, in milliseconds with a thousandth of precision).
//!
//! It has no dependency, so it has no outage; with N service processes up to N times as many launches pass.

use alloc::borrow::ToOwned;
use alloc::string::String;

use hashbrown::HashMap;

const MINUTE_MS: u64 = 60_000;
/// Microseconds carry the fraction of an interval such as a seventh of a minute.
const MICROS_PER_MS: u64 = 1_000;
/// Buckets that are kept before full ones are swept.
const SWEEP_AT: usize = 4_096;

/// The buckets of one process.
#[derive(Debug, Clone, Default)]
pub struct LaunchRate {
    /// When each org's bucket would be empty of debt: the theoretical arrival time, in microseconds.
    arrivals: HashMap<String, u64>,
    sweep_at: usize,
}

impl LaunchRate {
    /// Takes one launch at `now_ms`, or says how long to wait, in milliseconds.
    ///
    /// # Errors
    /// The milliseconds until a launch is free; a whole minute for a rate of 0.
    pub fn take(&mut self, org: &str, per_minute: u64, burst: u64, now_ms: u64) -> Result<(), u64> {
        let Some(interval) = MINUTE_MS.saturating_mul(MICROS_PER_MS).checked_div(per_minute) else {
            return Err(MINUTE_MS);
        };
        let now = now_ms.saturating_mul(MICROS_PER_MS);
        self.sweep(now);
        let tolerance = interval.saturating_mul(burst.saturating_sub(1));
        let arrival = self.arrivals.get(org).copied().unwrap_or(0).max(now);
        let ahead = arrival.saturating_sub(now);
        if ahead > tolerance {
            return Err(ahead.saturating_sub(tolerance).div_ceil(MICROS_PER_MS));
        }
        self.arrivals.insert(org.to_owned(), arrival.saturating_add(interval));
        Ok(())
    }

    /// Gives one launch back, after a later gate has denied.
    pub fn give_back(&mut self, org: &str, per_minute: u64) {
        let interval = MINUTE_MS.saturating_mul(MICROS_PER_MS).checked_div(per_minute);
        if let (Some(arrival), Some(interval)) = (self.arrivals.get_mut(org), interval) {
            *arrival = arrival.saturating_sub(interval);
        }
    }

    fn sweep(&mut self, now: u64) {
        if self.arrivals.len() >= self.sweep_at.max(SWEEP_AT) {
            self.arrivals.retain(|_, arrival| *arrival > now);
            self.sweep_at = self.arrivals.len().saturating_mul(2);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(target_arch = "wasm32")]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    #[test]
    fn a_burst_passes_at_once_and_then_one_each_interval() {
        let mut rate = LaunchRate::default();
        let passed = (0..10).filter(|_| rate.take("a", 60, 3, 0).is_ok()).count();
        assert_eq!(passed, 3);
        assert_eq!(rate.take("a", 60, 3, 0), Err(1_000));
        assert_eq!(rate.take("a", 60, 3, 999), Err(1));
        assert_eq!(rate.take("a", 60, 3, 1_000), Ok(()));
        assert_eq!(rate.take("b", 60, 3, 0), Ok(()), "orgs do not share a bucket");
    }

    #[test]
    fn a_launch_that_is_given_back_can_be_taken_again() {
        let mut rate = LaunchRate::default();
        assert_eq!(rate.take("a", 7, 1, 0), Ok(()));
        assert!(rate.take("a", 7, 1, 0).is_err());
        rate.give_back("a", 7);
        assert_eq!(rate.take("a", 7, 1, 0), Ok(()));
        rate.give_back("nobody", 7);
    }

    #[test]
    fn a_rate_of_zero_blocks() {
        assert_eq!(LaunchRate::default().take("a", 0, 5, 1), Err(60_000));
    }

    #[test]
    fn full_buckets_are_forgotten() {
        let mut rate = LaunchRate::default();
        for n in 0..SWEEP_AT * 3 {
            assert_eq!(rate.take(&std::format!("{n}"), 60, 1, n as u64 * 2_000), Ok(()));
        }
        assert!(rate.arrivals.len() <= SWEEP_AT + 1);
    }
}
