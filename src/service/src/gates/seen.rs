//! What decisions have said of each gate: when a filter last listed it, and when it last was not kept.
//!
//! Leaves out on purpose: what that means together with the stores' states, which `gates` judges; and what passes without
//! this service, which only the filter's own gauge and counters can show.

use std::sync::Mutex;

use portcullis_decision::charge::is_unchecked;
use portcullis_decision::class::{Dependency, FailureClass};
use portcullis_decision::config::Mode;
use portcullis_decision::rules::Gate;
use portcullis_decision::verdict::Verdict;
use portcullis_decision::wire::DecideRequest;
use tokio::time::Instant;

use crate::locked;

/// Why a request passed a gate unchecked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Through {
    /// It was unavailable, and the rules open it.
    Opened(FailureClass),
    /// There is no limiter (development only).
    NoLimiter,
    /// The envelope stamps a limit, and the rules do not list the gate.
    NotListed,
}

/// What is known of one gate.
#[derive(Debug, Clone, Default)]
pub(super) struct Seen {
    /// When a filter last asked by rules that list it, and which.
    pub(super) listed: Option<(Instant, String)>,
    /// It also reads the org's plan, which the policy store has.
    pub(super) reads_plan: bool,
    /// When a filter last listed it in shadow mode, and by which rules.
    pub(super) shadow: Option<(Instant, String)>,
    /// When a request last passed it unchecked, and why.
    pub(super) through: Option<(Instant, Through)>,
    /// When a request was last refused since this did not answer it.
    pub(super) closed: Option<(Instant, Dependency)>,
}

impl Seen {
    /// The newest time at which a filter has asked about this gate, or passed it over.
    pub(super) fn last(&self) -> Option<Instant> {
        let listed = self.listed.as_ref().map(|(at, _)| *at);
        listed.max(self.through.map(|(at, _)| at))
    }
}

/// What is known of all gates.
#[derive(Debug, Default)]
pub struct Sightings([Mutex<Seen>; Gate::ALL.len()]);

impl Sightings {
    fn with(&self, gate: Gate, change: impl FnOnce(&mut Seen)) {
        let at = Gate::ALL.iter().position(|known| *known == gate);
        if let Some(seen) = at.and_then(|at| self.0.get(at)) {
            change(&mut locked(seen));
        }
    }

    pub(super) fn of(&self, gate: Gate) -> Seen {
        let mut known = Seen::default();
        self.with(gate, |seen| known = seen.clone());
        known
    }

    /// Notes a request and its verdict.
    pub fn note(&self, request: &DecideRequest, verdict: &Verdict) {
        let now = Instant::now();
        for rule in &request.gates {
            self.with(rule.gate(), |seen| {
                seen.reads_plan = rule.reads_plan();
                note_rules(&mut seen.listed, now, &request.rules);
                if request.mode == Mode::Shadow {
                    note_rules(&mut seen.shadow, now, &request.rules);
                }
            });
        }
        match verdict {
            Verdict::Admit(admission) => {
                for bypass in &admission.bypassed {
                    self.through(bypass.gate, Through::Opened(bypass.class), now);
                }
                let of_the_limiter = |gate: &Gate| gate.dependency() == Some(Dependency::Limiter);
                if admission.unenforced {
                    let listed = request.gates.iter().map(|rule| rule.gate());
                    listed
                        .filter(of_the_limiter)
                        .for_each(|gate| self.through(gate, Through::NoLimiter, now));
                }
                let listed = request.gates.iter().any(|rule| rule.gate() == Gate::Contract);
                if is_unchecked(&request.limits, listed) {
                    self.through(Gate::Contract, Through::NotListed, now);
                }
            }
            Verdict::Unavailable(unavailable) => {
                if let Some(gate) = unavailable.gate {
                    self.with(gate, |seen| seen.closed = Some((now, unavailable.dependency)));
                }
            }
            Verdict::Deny(_) => {}
        }
    }

    /// Notes a request that passed a gate for another reason than a verdict's.
    pub fn opened(&self, gate: Gate, class: FailureClass) {
        self.through(gate, Through::Opened(class), Instant::now());
    }

    fn through(&self, gate: Gate, why: Through, now: Instant) {
        self.with(gate, |seen| seen.through = Some((now, why)));
    }
}

/// The name is copied only where it is another: this happens with each decision.
fn note_rules(place: &mut Option<(Instant, String)>, now: Instant, rules: &str) {
    match place {
        Some((at, known)) if known == rules => *at = now,
        _ => *place = Some((now, rules.to_owned())),
    }
}
