//! What this process has decided of late, for operators who look in: the last hour by outcome, the limits that are nearest to
//! being used up, and the last requests that passed something unchecked.
//!
//! Bounded, whatever comes: sixty minutes, a fixed number of limits (the nearest stay) and of bypasses (the newest stay). A
//! limit is shown as the limiter last answered, until its window has ended. Left out on purpose: what other processes decide,
//! and what filters admit by leases, of which only what they were given is known here.

mod scopes;

use std::collections::VecDeque;
use std::sync::Mutex;

use portcullis_decision::charge::{ChargePlan, Charged};
use portcullis_decision::class::FailureClass;
use portcullis_decision::config::Mode;
use portcullis_decision::verdict::{Admission, Verdict};
use portcullis_decision::wire::DecideRequest;
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use self::scopes::Scopes;
use crate::readiness::now;
use crate::{locked, millis_since};

/// Minutes that are remembered.
const MINUTES: usize = 60;
/// Bypasses that are remembered.
const BYPASSES: usize = 50;
/// Limits that are shown.
const SHOWN: usize = 20;

/// What one minute has brought.
#[derive(Debug, Clone, Copy, Default)]
struct Minute {
    /// Which minute this is, counted from the start; of another one nothing counts.
    number: u64,
    /// Went on by their right.
    admitted: u64,
    /// Went on although something was not checked.
    bypassed: u64,
    /// Would have been refused, in shadow mode.
    shadow: u64,
    /// Admissions that filters were given to hand out by themselves.
    leased: u64,
    /// Were refused, by class.
    refused: [u64; FailureClass::ALL.len()],
}

impl Minute {
    fn add(&mut self, other: &Self) {
        self.admitted = self.admitted.saturating_add(other.admitted);
        self.bypassed = self.bypassed.saturating_add(other.bypassed);
        self.shadow = self.shadow.saturating_add(other.shadow);
        self.leased = self.leased.saturating_add(other.leased);
        for (sum, more) in self.refused.iter_mut().zip(other.refused) {
            *sum = sum.saturating_add(more);
        }
    }

    fn refuse(&mut self, class: FailureClass) {
        let at = FailureClass::ALL.iter().position(|known| *known == class);
        if let Some(count) = at.and_then(|at| self.refused.get_mut(at)) {
            *count = count.saturating_add(1);
        }
    }

    fn json(&self) -> Value {
        let refused = FailureClass::ALL
            .iter()
            .zip(self.refused)
            .filter(|(_, count)| *count > 0);
        let refused: Map<_, _> = refused
            .map(|(class, count)| (class.name().to_owned(), json!(count)))
            .collect();
        json!({"admitted": self.admitted, "bypassed": self.bypassed, "shadow_refused": self.shadow, "leased": self.leased,
            "refused": refused})
    }
}

#[derive(Debug)]
struct Seen {
    minutes: [Minute; MINUTES],
    bypasses: VecDeque<Value>,
    scopes: Scopes,
}

/// What was decided of late.
#[derive(Debug)]
pub struct Recent {
    epoch: Instant,
    seen: Mutex<Seen>,
}

impl Default for Recent {
    fn default() -> Self {
        Self {
            epoch: Instant::now(),
            seen: Mutex::new(Seen {
                minutes: [Minute::default(); MINUTES],
                bypasses: VecDeque::new(),
                scopes: Scopes::default(),
            }),
        }
    }
}

impl Recent {
    /// Notes a verdict.
    pub fn note(&self, request: &DecideRequest, verdict: &Verdict) {
        let mut seen = locked(&self.seen);
        let minute = seen.minute(self.minute());
        match verdict {
            Verdict::Admit(admission) => {
                let count = if admission.bypassed.is_empty() && !admission.unenforced {
                    &mut minute.admitted
                } else {
                    &mut minute.bypassed
                };
                *count = count.saturating_add(1);
                seen.bypassed(request, admission);
            }
            Verdict::Deny(_) | Verdict::Unavailable(_) => match (request.mode, verdict.class()) {
                (Mode::Shadow, _) => minute.shadow = minute.shadow.saturating_add(1),
                (Mode::Enforce, Some(class)) => minute.refuse(class),
                (Mode::Enforce, None) => {}
            },
        }
    }

    /// Notes so many admissions that a filter was given to hand out by itself.
    pub fn leased(&self, admissions: u64) {
        let mut seen = locked(&self.seen);
        let minute = seen.minute(self.minute());
        minute.leased = minute.leased.saturating_add(admissions);
    }

    /// Notes where the limits of a plan stand.
    pub fn charged(&self, plan: &ChargePlan, charged: &Charged) {
        let (Charged::Granted(states) | Charged::Block { states, .. } | Charged::Denied(states)) = charged else {
            return;
        };
        let now_ms = millis_since(self.epoch);
        let mut seen = locked(&self.seen);
        for (entry, state) in plan.entries.iter().zip(states) {
            seen.scopes.note(entry, state, now_ms);
        }
    }

    /// All of it: `hour` (its sum and each minute, the newest first), `scopes` (the nearest first), `bypasses` (the newest
    /// first).
    pub fn json(&self) -> Value {
        let (number, now_ms) = (self.minute(), millis_since(self.epoch));
        let mut seen = locked(&self.seen);
        let span = u64::try_from(MINUTES).unwrap_or(u64::MAX);
        let mut sum = Minute::default();
        let mut minutes = Vec::with_capacity(MINUTES);
        for ago in 0..span {
            let of = number.checked_sub(ago).and_then(|number| {
                let found = seen.minutes.iter().find(|minute| minute.number == number);
                found.copied()
            });
            let minute = of.unwrap_or_default();
            sum.add(&minute);
            minutes.push(minute.json());
        }
        json!({
            "hour": {"sum": sum.json(), "minutes": minutes},
            "scopes": seen.scopes.nearest(SHOWN, now_ms),
            "bypasses": seen.bypasses
        })
    }

    /// Which minute this is. The first is 1, so that an empty place is nobody's.
    fn minute(&self) -> u64 {
        let minutes = millis_since(self.epoch).checked_div(60_000).unwrap_or_default();
        minutes.saturating_add(1)
    }
}

impl Seen {
    /// The place of a minute, emptied if it was an earlier one's: the place of the oldest.
    fn minute(&mut self, number: u64) -> &mut Minute {
        let at = self
            .minutes
            .iter()
            .position(|minute| minute.number == number)
            .unwrap_or_else(|| {
                let oldest = self.minutes.iter().enumerate().min_by_key(|(_, minute)| minute.number);
                oldest.map_or(0, |(at, _)| at)
            });
        let [first, rest @ ..] = &mut self.minutes;
        let minute = at.checked_sub(1).and_then(|at| rest.get_mut(at)).unwrap_or(first);
        if minute.number != number {
            *minute = Minute {
                number,
                ..Minute::default()
            };
        }
        minute
    }

    fn bypassed(&mut self, request: &DecideRequest, admission: &Admission) {
        for bypass in admission.first_of_each_class() {
            self.bypasses.push_front(
                json!({"at": now(), "class": bypass.class.name(), "gate": bypass.gate.name(),
                "org": request.subject.org, "owner": request.subject.owner, "request_id": request.request_id,
                "rules": request.rules}),
            );
        }
        self.bypasses.truncate(BYPASSES);
    }
}

#[cfg(test)]
mod tests;
