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

use crate::limiter::Limiter;
use crate::limiter::watched::WatchedLimiter;
use crate::locked;
use crate::metrics::Metrics;

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
}

impl State {
    fn new(condition: Condition, detail: impl Into<String>) -> Self {
        Self {
            condition,
            since: now(),
            detail: detail.into(),
        }
    }

    fn json(&self) -> Value {
        json!({"state": self.condition.name(), "since": self.since, "detail": self.detail})
    }
}

/// The present time as RFC 3339, by the wall clock; for reading, never for deciding.
fn now() -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = SystemTime.format_time(&mut Writer::new(&mut text));
    text
}

/// The states of all dependencies.
#[derive(Debug)]
pub struct Readiness {
    limiter: Mutex<State>,
    policy: State,
    metering: State,
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
            Some(limiter) if limiter.is_shared() => State::new(Condition::Down, "not reached yet"),
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
        let [policy, metering] = [
            (Dependency::Policy, &config.policy.url),
            (Dependency::Metering, &config.metering.url),
        ]
        .map(|(dependency, url)| without_driver(dependency, url.as_ref(), &metrics));
        Self {
            limiter: Mutex::new(limiter),
            policy,
            metering,
            metrics,
        }
    }

    /// Whether the service is ready, and the body that says why.
    pub fn report(&self) -> (bool, Value) {
        let limiter = locked(&self.limiter);
        let ready =
            limiter.condition == Condition::Up && matches!(self.policy.condition, Condition::Up | Condition::Absent);
        let dependencies =
            json!({"limiter": limiter.json(), "policy": self.policy.json(), "metering": self.metering.json()});
        (ready, json!({"ready": ready, "dependencies": dependencies}))
    }

    /// Pings a shared limiter, for ever.
    pub async fn run(self: Arc<Self>, limiter: WatchedLimiter) {
        let mut ticks = interval(PING_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut hysteresis = Hysteresis::default();
        loop {
            ticks.tick().await;
            let result = limiter.ping().await;
            let up = hysteresis.take(result.is_ok());
            let detail = result
                .err()
                .map_or_else(|| "answers".to_owned(), |fault| fault.to_string());
            self.limiter_is(up, detail);
        }
    }

    fn limiter_is(&self, up: bool, detail: String) {
        let condition = if up { Condition::Up } else { Condition::Down };
        let mut state = locked(&self.limiter);
        if state.condition == condition {
            if !up {
                state.detail = detail;
            }
            return;
        }
        let first = state.detail == "not reached yet";
        *state = State::new(condition, detail.clone());
        drop(state);
        self.metrics.dependency_is_up(Dependency::Limiter, up);
        if up {
            let message = if first {
                "the limiter is up"
            } else {
                "the limiter is up again"
            };
            tracing::info!(event = "dependency_up", dependency = "limiter", "{message}");
        } else {
            tracing::warn!(
                event = "dependency_down",
                dependency = "limiter",
                "the limiter is down: {detail}"
            );
        }
    }
}

/// Policies and meters have no store behind them in this version: a gate that needs one is unavailable, and says so.
fn without_driver(dependency: Dependency, url: Option<&StoreUrl>, metrics: &Metrics) -> State {
    let name = dependency.name();
    match url {
        None => State::new(
            Condition::Absent,
            format!("no {name} store is configured: gates that need one are unavailable"),
        ),
        Some(_) => {
            metrics.dependency_is_up(dependency, false);
            let detail = format!("this version has no {name} store: gates that need one are unavailable");
            tracing::warn!(event = "dependency_down", dependency = name, "{detail}");
            State::new(Condition::Down, detail)
        }
    }
}

#[cfg(test)]
mod tests;
