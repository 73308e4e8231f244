//! The fault switch: dependencies that shall fail for some seconds, so that a drill sees every failure class for real.
//!
//! A dependency that is switched off fails where its driver would: its store is wrapped, and the wrapper answers as a lost
//! connection. What watches stores, judges them and decides by them is the same code as in a real outage. A switch ends by
//! itself. Only a service of the profiles `development` and `staging` has one; in production nothing is wrapped.
//!
//! Left out on purpose: slow answers and wrong ones, which tests have.

mod stores;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use portcullis_decision::class::Dependency;
use portcullis_decision::config::Profile;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::time::{Instant, sleep_until};

pub use self::stores::switchable;
use crate::metrics::Metrics;
use crate::{after, locked};

/// The longest that a fault lasts, in seconds, unless it is switched on again.
pub const LONGEST_S: u64 = 300;

/// What can be switched off.
pub const SWITCHES: [Dependency; 4] = [
    Dependency::Limiter,
    Dependency::Policy,
    Dependency::Metering,
    Dependency::Decision,
];

/// What an operator asks for: from now on exactly these fail.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FaultOrder {
    /// Which dependencies fail; none ends all faults.
    pub dependencies: Vec<Dependency>,
    /// For how many seconds.
    #[serde(default)]
    pub for_s: Option<u64>,
}

impl FaultOrder {
    /// What is wrong with it.
    ///
    /// # Errors
    /// A sentence that names the key and the value.
    pub fn check(&self) -> Result<(), String> {
        match self.for_s {
            _ if self.dependencies.is_empty() => Ok(()),
            None => Err(format!(
                "for_s: required, and missing: for how many seconds, 1 to {LONGEST_S}"
            )),
            Some(for_s) if !(1..=LONGEST_S).contains(&for_s) => {
                Err(format!("for_s: must be 1 to {LONGEST_S}, is {for_s}"))
            }
            Some(_) => Ok(()),
        }
    }
}

/// The switches of one service.
#[derive(Debug)]
pub struct FaultSwitch {
    until: Mutex<Vec<(Dependency, Instant)>>,
    metrics: Arc<Metrics>,
}

impl FaultSwitch {
    /// The switches of a service of this profile, all off; `None` in production.
    pub fn of(profile: Profile, metrics: &Arc<Metrics>) -> Option<Arc<Self>> {
        match profile {
            Profile::Production => None,
            Profile::Development | Profile::Staging => Some(Arc::new(Self {
                until: Mutex::default(),
                metrics: Arc::clone(metrics),
            })),
        }
    }

    /// Whether this is to fail now.
    pub fn fails(&self, dependency: Dependency) -> bool {
        let now = Instant::now();
        locked(&self.until)
            .iter()
            .any(|(of, until)| *of == dependency && now < *until)
    }

    /// Carries out an order, and says when the faults end.
    pub fn switch(self: &Arc<Self>, order: &FaultOrder) {
        let seconds = order.for_s.unwrap_or_default();
        let end = after(Instant::now(), Duration::from_secs(seconds));
        let before = self.active();
        *locked(&self.until) = order.dependencies.iter().map(|of| (*of, end)).collect();
        let now = self.active();
        for dependency in SWITCHES {
            let (was, is) = (before.contains(&dependency), now.contains(&dependency));
            self.metrics.fault(dependency, is);
            if is {
                tracing::warn!(
                    event = "fault_on",
                    dependency = dependency.name(),
                    "an operator lets {} fail for {seconds} s",
                    dependency.name()
                );
            } else if was {
                told_of_the_end(dependency);
            }
        }
        if !now.is_empty() {
            tokio::spawn(Arc::clone(self).end_at(end));
        }
    }

    /// Says so when the faults have ended by themselves.
    async fn end_at(self: Arc<Self>, end: Instant) {
        sleep_until(end).await;
        let ended: Vec<Dependency> = {
            let mut until = locked(&self.until);
            let ended = until.iter().filter(|(_, at)| *at == end).map(|(of, _)| *of).collect();
            until.retain(|(_, at)| *at != end);
            ended
        };
        for dependency in ended {
            self.metrics.fault(dependency, false);
            told_of_the_end(dependency);
        }
    }

    fn active(&self) -> Vec<Dependency> {
        SWITCHES.into_iter().filter(|of| self.fails(*of)).collect()
    }

    /// What fails now, by name, each with `ends_in_ms`.
    pub fn report(&self) -> Value {
        let now = Instant::now();
        let until = locked(&self.until);
        let active = until.iter().filter(|(_, at)| *at > now).map(|(of, at)| {
            let left = at.saturating_duration_since(now).as_millis();
            let left = u64::try_from(left).unwrap_or(u64::MAX);
            (of.name().to_owned(), json!({"ends_in_ms": left}))
        });
        Value::Object(active.collect::<Map<_, _>>())
    }
}

fn told_of_the_end(dependency: Dependency) {
    tracing::warn!(
        event = "fault_off",
        dependency = dependency.name(),
        "{} is no longer let fail",
        dependency.name()
    );
}

#[cfg(test)]
mod tests;
