//! The emergency allowance of `{"admit": {"max_per_minute": N}}`: fail open, but only so far.
//!
//! A fixed minute that starts with its first admission: within it at most N pass, so that an outage never opens the
//! upstream without bound. It is counted by whoever applies the choice, for each class on its own.

use alloc::vec::Vec;

use crate::class::FailureClass;
use crate::rules::Choice;

const MINUTE_MS: u64 = 60_000;

/// The allowances in use, by class.
#[derive(Debug, Clone, Default)]
pub struct Allowances {
    minutes: Vec<(FailureClass, Minute)>,
}

#[derive(Debug, Clone, Copy)]
struct Minute {
    ends_ms: u64,
    used: u64,
}

impl Allowances {
    /// Whether `choice` lets one more request pass for `class` at `now_ms`; counts it if so.
    pub fn admit(&mut self, class: FailureClass, choice: Choice, now_ms: u64) -> bool {
        let most = match choice {
            Choice::Reject => return false,
            Choice::Admit => return true,
            Choice::AdmitAtMost { max_per_minute } => max_per_minute,
        };
        let fresh = Minute {
            ends_ms: now_ms.saturating_add(MINUTE_MS),
            used: 0,
        };
        let minute = match self.minutes.iter().position(|(of, _)| *of == class) {
            Some(at) => self.minutes.get_mut(at),
            None => {
                self.minutes.push((class, fresh));
                self.minutes.last_mut()
            }
        };
        let Some((_, minute)) = minute else { return false };
        if now_ms >= minute.ends_ms {
            *minute = fresh;
        }
        if minute.used >= most {
            return false;
        }
        minute.used = minute.used.saturating_add(1);
        true
    }

    /// Gives one admission back: the request was refused after all, for another reason.
    pub fn give_back(&mut self, class: FailureClass) {
        for (_, minute) in self.minutes.iter_mut().filter(|(of, _)| *of == class) {
            minute.used = minute.used.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(target_arch = "wasm32")]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    #[test]
    fn a_bounded_choice_passes_n_a_minute_for_each_class() {
        let mut allowances = Allowances::default();
        let choice = Choice::AdmitAtMost { max_per_minute: 2 };
        let ask = |a: &mut Allowances, class, now| a.admit(class, choice, now);
        let limiter = FailureClass::LimiterUnavailable;
        assert!(ask(&mut allowances, limiter, 0));
        assert!(ask(&mut allowances, limiter, 59_999));
        assert!(!ask(&mut allowances, limiter, 59_999));
        assert!(ask(&mut allowances, FailureClass::DecisionUnavailable, 59_999));
        assert!(ask(&mut allowances, limiter, 60_000));
    }

    #[test]
    fn reject_never_passes_and_admit_always_does() {
        let mut allowances = Allowances::default();
        assert!(!allowances.admit(FailureClass::LimiterUnavailable, Choice::Reject, 0));
        assert!((0..10_000).all(|_| allowances.admit(FailureClass::LimiterUnavailable, Choice::Admit, 0)));
    }
}
