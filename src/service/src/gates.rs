//! Whether each gate is really enforced: one of six states, since when, and why.
//!
//! The states, the first that applies:
//!
//! - `never_seen`: no filter has asked by rules that list the gate since this service started.
//! - `shadow`: a filter asks in shadow mode, so that nothing is refused.
//! - `bypassing`: in the last [`RECENT`] a request passed the gate unchecked.
//! - `no_store`: the store that the gate asks is not configured, or does not answer.
//! - `stale`: what the policy store has said is too old to count, and it says nothing new.
//! - `enforcing`: none of these.
//!
//! Several filters may ask one service: a gate is as well as the worst of them in the last [`RECENT`]. Left out on purpose:
//! what passes without this service (a filter that can't reach it, a route that is not guarded), which the filter's own gauge
//! and a drill show; and `/ready`'s status, which no state here changes.

mod seen;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use portcullis_decision::class::Dependency;
use portcullis_decision::config::Tiers;
use portcullis_decision::rules::Gate;
use serde_json::{Map, Value, json};
use tokio::time::{Instant, MissedTickBehavior, interval};

pub use self::seen::Sightings;
use self::seen::{Seen, Through};
use crate::locked;
use crate::metrics::Metrics;
use crate::policy::cache::{Freshness, PolicyCache};
use crate::readiness::{Condition, Readiness, now};

/// How long what was not enforced once is shown: as long as the filter's own gauge is 0.
pub const RECENT: Duration = Duration::from_secs(10);
/// Between two looks at all gates, so that a change is told when it comes.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// How a gate is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateState {
    /// No filter has asked for it.
    NeverSeen,
    /// Its limits hold.
    Enforcing,
    /// It is decided, and nothing is refused.
    Shadow,
    /// Something passed it unchecked just now.
    Bypassing,
    /// Its store is not there.
    NoStore,
    /// Its policy is too old to count.
    Stale,
}

impl GateState {
    /// All states.
    pub const ALL: [Self; 6] = [
        Self::NeverSeen,
        Self::Enforcing,
        Self::Shadow,
        Self::Bypassing,
        Self::NoStore,
        Self::Stale,
    ];

    /// The name in `/ready` and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NeverSeen => "never_seen",
            Self::Enforcing => "enforcing",
            Self::Shadow => "shadow",
            Self::Bypassing => "bypassing",
            Self::NoStore => "no_store",
            Self::Stale => "stale",
        }
    }
}

/// A state with its reason.
type Judged = (GateState, String);

/// What is shown of one gate.
#[derive(Debug)]
struct Shown {
    state: GateState,
    since: String,
}

/// The states of all gates.
pub struct Gates {
    seen: Arc<Sightings>,
    readiness: Arc<Readiness>,
    policy: Option<PolicyCache>,
    has_tiers: bool,
    metrics: Arc<Metrics>,
    shown: Mutex<Vec<(Gate, Shown)>>,
}

impl Gates {
    /// The gates of a service with these stores and tiers, by what `seen` gets to know.
    pub fn new(
        seen: Arc<Sightings>,
        readiness: Arc<Readiness>,
        policy: Option<PolicyCache>,
        tiers: &Tiers,
        metrics: Arc<Metrics>,
    ) -> Self {
        let shown = Gate::ALL.map(|gate| {
            let (state, since) = (GateState::NeverSeen, now());
            (gate, Shown { state, since })
        });
        Self {
            seen,
            readiness,
            policy,
            has_tiers: *tiers != Tiers::default(),
            metrics,
            shown: Mutex::new(shown.into()),
        }
    }

    /// Looks at all gates each second, for ever.
    pub async fn run(self: Arc<Self>) {
        let mut ticks = interval(LOOK_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.report();
        }
    }

    /// All gates by name, each with `state`, `since`, `reason` and, once a filter has asked, the newest `rules` that list it
    /// and `asked_s_ago`. Sets the gauges to the same, and tells changes.
    pub fn report(&self) -> Value {
        let now = Instant::now();
        let mut shown = locked(&self.shown);
        let report = shown.iter_mut().map(|(gate, shown)| {
            let seen = self.seen.of(*gate);
            let (state, reason) = self.judge(*gate, &seen, now);
            self.metrics.gate_state(*gate, state);
            if shown.state != state {
                tell(*gate, shown.state, state, &reason);
                *shown = Shown {
                    state,
                    since: self::now(),
                };
            }
            let mut entry = Map::new();
            entry.insert("state".to_owned(), json!(state.name()));
            entry.insert("since".to_owned(), json!(shown.since));
            entry.insert("reason".to_owned(), json!(reason));
            if let Some((_, rules)) = &seen.listed {
                entry.insert("rules".to_owned(), json!(rules));
            }
            if let Some(last) = seen.last() {
                let asked_s_ago = now.saturating_duration_since(last).as_secs();
                entry.insert("asked_s_ago".to_owned(), json!(asked_s_ago));
            }
            (gate.name().to_owned(), Value::Object(entry))
        });
        Value::Object(report.collect::<Map<_, _>>())
    }

    fn judge(&self, gate: Gate, seen: &Seen, now: Instant) -> Judged {
        let Some(last) = seen.last() else {
            return (
                GateState::NeverSeen,
                "no filter has asked by rules that list it since this service started".to_owned(),
            );
        };
        // While nobody asks, a filter is what it was.
        let shadow = seen.shadow.as_ref();
        if let Some((_, rules)) = shadow.filter(|(at, _)| last.saturating_duration_since(*at) < RECENT) {
            return (
                GateState::Shadow,
                format!("a filter with the rules {rules} is in shadow mode: it refuses nothing"),
            );
        }
        let is_recent = |at: Instant| now.saturating_duration_since(at) < RECENT;
        if let Some((_, why)) = seen.through.filter(|(at, _)| is_recent(*at)) {
            return (GateState::Bypassing, passed(why));
        }
        let stores = [gate.dependency(), seen.reads_plan.then_some(Dependency::Policy)];
        let faults = stores.into_iter().flatten().filter_map(|store| self.fault_of(store));
        if let Some(fault) = faults.min_by_key(|(state, _)| *state != GateState::NoStore) {
            return fault;
        }
        if let Some((_, dependency)) = seen.closed.filter(|(at, _)| is_recent(*at)) {
            let reason = format!(
                "{} gave a decision no answer, and the rules refuse then",
                dependency.name()
            );
            return (GateState::NoStore, reason);
        }
        (GateState::Enforcing, self.enforcing(gate))
    }

    /// What is wrong with a store.
    fn fault_of(&self, store: Dependency) -> Option<Judged> {
        let (condition, detail) = self.readiness.of(store);
        let name = store.name();
        match (condition, store, self.policy.as_ref().map(PolicyCache::freshness)) {
            (Condition::Absent, ..) => Some((GateState::NoStore, detail)),
            (_, Dependency::Policy, Some(Freshness::Stale(age))) => Some((
                GateState::Stale,
                format!(
                    "the last answer of the policy store is {} s old, too old to count, and it gives no new one",
                    age.as_secs()
                ),
            )),
            // Answers that still count are as good as the store.
            (_, Dependency::Policy, Some(Freshness::Fresh)) => None,
            (Condition::Down, ..) => Some((GateState::NoStore, format!("{name}: {detail}"))),
            (Condition::Up | Condition::Embedded, ..) => None,
        }
    }

    fn enforcing(&self, gate: Gate) -> String {
        if gate == Gate::Capacity && !self.has_tiers {
            return "checked, and there is nothing to check: this service's capacity has no tier".to_owned();
        }
        let store = gate.dependency().map(|store| self.readiness.of(store));
        match store {
            Some((Condition::Embedded, detail)) => format!("checked; {detail}"),
            _ => "checked by every decision that comes to it".to_owned(),
        }
    }
}

fn passed(why: Through) -> String {
    let recent = RECENT.as_secs();
    match why {
        Through::Opened(class) => format!(
            "in the last {recent} s a request passed it unchecked: {}, which the rules open",
            class.name()
        ),
        Through::NoLimiter => format!("in the last {recent} s a request passed it unchecked: no limiter is configured"),
        Through::NotListed => {
            format!("in the last {recent} s an envelope stamped a limit, and the filter's rules do not list this gate")
        }
    }
}

fn tell(gate: Gate, before: GateState, state: GateState, reason: &str) {
    let (gate, before, name) = (gate.name(), before.name(), state.name());
    if state == GateState::Enforcing {
        tracing::info!(
            event = "gate_state",
            gate,
            state = name,
            "{gate} is {name}, was {before}"
        );
    } else {
        tracing::warn!(
            event = "gate_state",
            gate,
            state = name,
            "{gate} is {name}, was {before}: {reason}"
        );
    }
}

#[cfg(test)]
mod tests;
