//! Whether this service can enforce: the state of each dependency, since when, and what `/ready` answers.
//!
//! A dependency goes down after two failed pings in a row and comes up after two good ones, the first of all counting at
//! once, so that one lost packet does not take a service out of a load balancer. Ready needs a *shared* limiter, in every
//! profile: counters that no other process sees hold no contract.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use portcullis_decision::class::Dependency;
use portcullis_decision::config::{ServiceConfig, StoreUrl};
use serde_json::{Value, json};
use tokio::time::{MissedTickBehavior, interval};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime as _, SystemTime};

use crate::limiter::watched::WatchedLimiter;
use crate::limiter::{Limiter, StoreFault};
use crate::locked;
use crate::metering::watched::WatchedMeter;
use crate::metrics::Metrics;
use crate::policy::cache::PolicyCache;

/// Between two pings.
const PING_INTERVAL: Duration = Duration::from_secs(1);
/// Pings in a row that change a state.
const IN_A_ROW: u8 = 2;

/// How a dependency is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    /// It answers.
    Up,
    /// It is configured, and does not answer.
    Down,
    /// It is in this process.
    Embedded,
    /// It is not configured.
    Absent,
}

impl Condition {
    const fn name(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Down => "down",
            Self::Embedded => "embedded",
            Self::Absent => "absent",
        }
    }
}

/// Two in a row.
#[derive(Debug, Clone, Copy, Default)]
struct Hysteresis {
    up: bool,
    asked: bool,
    against: u8,
}

impl Hysteresis {
    /// Takes one result; returns whether the dependency counts as up.
    fn take(&mut self, good: bool) -> bool {
        let first_good = good && !self.asked;
        self.asked = true;
        self.against = if good == self.up {
            0
        } else {
            self.against.saturating_add(1)
        };
        if first_good || self.against >= IN_A_ROW {
            self.up = good;
            self.against = 0;
        }
        self.up
    }
}

#[derive(Debug)]
struct State {
    condition: Condition,
    since: String,
    detail: String,
    /// Why the last ping got no answer, if it got none: operators see that at once, load balancers only what lasts.
    failing: Option<String>,
}

impl State {
    fn new(condition: Condition, detail: impl Into<String>) -> Self {
        Self {
            condition,
            since: now(),
            detail: detail.into(),
            failing: None,
        }
    }

    fn json(&self) -> Value {
        json!({"state": self.condition.name(), "since": self.since, "detail": self.detail})
    }
}

/// The present time as RFC 3339, by the wall clock; for reading, never for deciding.
pub(crate) fn now() -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = SystemTime.format_time(&mut Writer::new(&mut text));
    text
}

/// A dependency that can be asked whether it answers.
pub trait Pinged: Send + Sync + 'static {
    /// Which it is.
    const DEPENDENCY: Dependency;

    /// Whether it answers, and would take what it is for.
    fn ping(&self) -> impl Future<Output = Result<(), StoreFault>> + Send;
}

impl Pinged for WatchedLimiter {
    const DEPENDENCY: Dependency = Dependency::Limiter;

    async fn ping(&self) -> Result<(), StoreFault> {
        self.ping().await
    }
}

impl Pinged for WatchedMeter {
    const DEPENDENCY: Dependency = Dependency::Metering;

    async fn ping(&self) -> Result<(), StoreFault> {
        self.ping().await
    }
}

impl Pinged for PolicyCache {
    const DEPENDENCY: Dependency = Dependency::Policy;

    async fn ping(&self) -> Result<(), StoreFault> {
        self.ping().await
    }
}

/// What a store that has not answered yet shows.
const NOT_REACHED: &str = "not reached yet";

/// The states of all dependencies.
#[derive(Debug)]
pub struct Readiness {
    limiter: Mutex<State>,
    policy: Mutex<State>,
    metering: Mutex<State>,
    metrics: Arc<Metrics>,
}

impl Readiness {
    /// The states at the start.
    pub fn new(config: &ServiceConfig, limiter: Option<&dyn Limiter>, metrics: Arc<Metrics>) -> Self {
        let limiter = match limiter {
            None => State::new(
                Condition::Absent,
                "no limiter is configured: contract limits are not enforced",
            ),
            Some(limiter) if limiter.is_shared() => State::new(Condition::Down, NOT_REACHED),
            Some(limiter) => {
                let scheme = limiter.scheme();
                State::new(
                    Condition::Embedded,
                    format!("{scheme}: counts in this process alone; only a shared limiter is ready"),
                )
            }
        };
        let answers = matches!(limiter.condition, Condition::Up | Condition::Embedded);
        metrics.dependency_is_up(Dependency::Limiter, answers);
        let policy = policy(config.policy.url.as_ref(), &metrics);
        let metering = metering(config.metering.url.as_ref(), &metrics);
        Self {
            limiter: Mutex::new(limiter),
            policy: Mutex::new(policy),
            metering: Mutex::new(metering),
            metrics,
        }
    }

    /// Whether the service is ready, and the body that says why.
    pub fn report(&self) -> (bool, Value) {
        let (limiter, policy, metering) = (locked(&self.limiter), locked(&self.policy), locked(&self.metering));
        let policy_is_loaded = matches!(policy.condition, Condition::Up | Condition::Absent);
        let ready = limiter.condition == Condition::Up && policy_is_loaded;
        let dependencies = json!({"limiter": limiter.json(), "policy": policy.json(), "metering": metering.json()});
        (ready, json!({"ready": ready, "dependencies": dependencies}))
    }

    /// How a dependency is, and the detail beside it; the service itself is up.
    pub fn of(&self, dependency: Dependency) -> (Condition, String) {
        let state = match dependency {
            Dependency::Limiter => &self.limiter,
            Dependency::Policy => &self.policy,
            Dependency::Metering => &self.metering,
            Dependency::Decision => return (Condition::Up, String::new()),
        };
        let state = locked(state);
        (state.condition, state.detail.clone())
    }

    /// Whether the service is ready, and each dependency as `/ready` names it, with `failing` beside it: why the last ping got
    /// no answer, or null.
    pub fn for_operators(&self) -> (bool, Value) {
        let (ready, _) = self.report();
        let one = |state: &Mutex<State>| {
            let state = locked(state);
            let mut entry = state.json();
            if let Some(entry) = entry.as_object_mut() {
                entry.insert("failing".to_owned(), json!(state.failing));
            }
            entry
        };
        let dependencies =
            json!({"limiter": one(&self.limiter), "policy": one(&self.policy), "metering": one(&self.metering)});
        (ready, dependencies)
    }

    /// Pings a shared store, for ever.
    pub async fn run<P: Pinged>(self: Arc<Self>, store: P) {
        let mut ticks = interval(PING_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut hysteresis = Hysteresis::default();
        loop {
            ticks.tick().await;
            let result = store.ping().await;
            let up = hysteresis.take(result.is_ok());
            let failing = result.err().map(|fault| fault.to_string());
            let detail = failing.clone().unwrap_or_else(|| "answers".to_owned());
            self.dependency_is(P::DEPENDENCY, up, detail);
            locked(self.state(P::DEPENDENCY)).failing = failing;
        }
    }

    const fn state(&self, dependency: Dependency) -> &Mutex<State> {
        match dependency {
            Dependency::Limiter | Dependency::Decision => &self.limiter,
            Dependency::Policy => &self.policy,
            Dependency::Metering => &self.metering,
        }
    }

    fn dependency_is(&self, dependency: Dependency, up: bool, detail: String) {
        let state = self.state(dependency);
        let noun = match dependency {
            Dependency::Limiter | Dependency::Decision => "limiter",
            Dependency::Policy => "policy store",
            Dependency::Metering => "metering store",
        };
        let condition = if up { Condition::Up } else { Condition::Down };
        let mut state = locked(state);
        if state.condition == condition {
            if !up {
                state.detail = detail;
            }
            return;
        }
        let again = if state.detail == NOT_REACHED { "" } else { " again" };
        *state = State::new(condition, detail.clone());
        drop(state);
        self.metrics.dependency_is_up(dependency, up);
        let name = dependency.name();
        if up {
            tracing::info!(event = "dependency_up", dependency = name, "the {noun} is up{again}");
        } else {
            tracing::warn!(
                event = "dependency_down",
                dependency = name,
                "the {noun} is down: {detail}"
            );
        }
    }
}

/// The metering store's state at the start.
fn metering(url: Option<&StoreUrl>, metrics: &Metrics) -> State {
    let Some(url) = url else {
        let detail = "no metering store is configured: gates that need one are unavailable";
        return State::new(Condition::Absent, detail);
    };
    metrics.dependency_is_up(Dependency::Metering, url.is_embedded());
    if url.is_embedded() {
        let detail = format!("{}: counts in this process alone, and forgets with it", url.scheme());
        State::new(Condition::Embedded, detail)
    } else {
        State::new(Condition::Down, NOT_REACHED)
    }
}

/// The policy store's state at the start.
fn policy(url: Option<&StoreUrl>, metrics: &Metrics) -> State {
    if url.is_none() {
        let detail = "no policy store is configured: gates that need one are unavailable";
        return State::new(Condition::Absent, detail);
    }
    metrics.dependency_is_up(Dependency::Policy, false);
    State::new(Condition::Down, NOT_REACHED)
}

#[cfg(test)]
mod tests;
