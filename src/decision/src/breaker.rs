//! The filter's circuit breaker: after enough failures in a row a VM answers at once by the rules, and probes.
//!
//! It exists so that a dead decision service does not cost every request its whole timeout. It never decides what the
//! answer is: that is the rules' choice for `decision`.

/// Failures in a row that open the breaker.
const FAILURES_TO_OPEN: u32 = 5;
/// Milliseconds between two probes while it is open.
const PROBE_INTERVAL_MS: u64 = 1_000;

/// Whether a request may call the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Permission {
    /// The breaker is closed: call.
    Call,
    /// The breaker is open, and this request is the probe of this second: call.
    Probe,
    /// The breaker is open: answer by the rules.
    Refused,
}

/// Closed, or open since some failures in a row.
#[derive(Debug, Clone, Default)]
pub struct Breaker {
    failures: u32,
    next_probe_ms: Option<u64>,
}

impl Breaker {
    /// Asks whether a request may call at `now_ms`. A granted probe moves the next one by a second.
    pub fn ask(&mut self, now_ms: u64) -> Permission {
        match self.next_probe_ms {
            None => Permission::Call,
            Some(due_ms) if now_ms >= due_ms => {
                self.next_probe_ms = Some(now_ms.saturating_add(PROBE_INTERVAL_MS));
                Permission::Probe
            }
            Some(_) => Permission::Refused,
        }
    }

    /// Notes an answer that made sense. Returns true if this closed the breaker.
    pub fn succeeded(&mut self) -> bool {
        self.failures = 0;
        self.next_probe_ms.take().is_some()
    }

    /// Notes a call without a sensible answer. Returns true if this opened the breaker.
    pub fn failed(&mut self, now_ms: u64) -> bool {
        self.failures = self.failures.saturating_add(1);
        if self.failures < FAILURES_TO_OPEN || self.next_probe_ms.is_some() {
            return false;
        }
        self.next_probe_ms = Some(now_ms.saturating_add(PROBE_INTERVAL_MS));
        true
    }

    /// Whether it is open.
    pub const fn is_open(&self) -> bool {
        self.next_probe_ms.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(target_arch = "wasm32")]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    #[test]
    fn five_failures_in_a_row_open_it_and_a_success_closes_it() {
        let mut breaker = Breaker::default();
        for _ in 0..4 {
            assert!(!breaker.failed(0));
        }
        assert!(!breaker.succeeded());
        for _ in 0..4 {
            assert!(!breaker.failed(0));
        }
        assert_eq!(breaker.ask(0), Permission::Call);
        assert!(breaker.failed(0));
        assert_eq!(breaker.ask(1), Permission::Refused);
        assert!(breaker.succeeded());
        assert_eq!(breaker.ask(1), Permission::Call);
    }

    #[test]
    fn an_open_breaker_lets_one_probe_pass_each_second() {
        let mut breaker = Breaker::default();
        for _ in 0..5 {
            breaker.failed(10_000);
        }
        assert_eq!(breaker.ask(10_999), Permission::Refused);
        assert_eq!(breaker.ask(11_000), Permission::Probe);
        assert_eq!(breaker.ask(11_001), Permission::Refused);
        breaker.failed(11_100);
        assert_eq!(breaker.ask(12_000), Permission::Probe);
    }
}
