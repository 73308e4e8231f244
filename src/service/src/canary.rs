//! The canary: a request that must be denied, made again and again through this service's own decider and its real limiter.
//!
//! Each round has a scope of its own that no caller can have guessed (the owner `portcullis-canary/…` with 128 random bits),
//! with a limit of one request in a window. The first request of it must be admitted and the second denied: so a store that
//! loses what it is told, or a limiter that is not there, shows even where nobody is near a limit. What a round leaves in the
//! store lapses with its window.
//!
//! Left out on purpose: verdict metrics, log lines of denials and the gates' states, which tell of callers; and everything
//! before the service (routes, the filter, the edge), which `portcullis drill` tries.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use portcullis_decision::class::Code;
use portcullis_decision::config::Mode;
use portcullis_decision::limits::{Limit, Resource, Scope, StampedLimits};
use portcullis_decision::log_line::{Level, LogLine};
use portcullis_decision::operation::OperationId;
use portcullis_decision::rules::{Choice, GateRule, LimitSource};
use portcullis_decision::verdict::Verdict;
use portcullis_decision::wire::{DecideRequest, Subject};
use serde_json::{Value, json};
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::decide::Decider;
use crate::readiness::now;
use crate::{locked, random};

/// The rules' name in requests of the canary, and the beginning of its owners.
pub(crate) const NAME: &str = "portcullis-canary";
/// Far longer than a round takes, so that no window ends between its two requests.
const WINDOW_S: u64 = 60;

/// How a round ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// The second request was denied: the limiter counts.
    Denied,
    /// The second request was admitted: nothing is enforced.
    Admitted,
    /// The limiter gave no answer to one of them, so that nothing is known.
    Unanswered,
    /// The first request of a scope was denied already.
    DeniedAtOnce,
}

impl Outcome {
    /// What the two tries say, each of whether it was admitted. A first one without an answer may have charged nothing, or
    /// been given back since: then whoever admits the second one has done nothing wrong.
    const fn of(first: Option<bool>, second: Option<bool>) -> Self {
        match (first, second) {
            (Some(true), Some(false)) => Self::Denied,
            (Some(false), Some(false)) => Self::DeniedAtOnce,
            (Some(_), Some(true)) => Self::Admitted,
            (None, _) | (_, None) => Self::Unanswered,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Denied => "denied",
            Self::Admitted => "admitted",
            Self::Unanswered => "unanswered",
            Self::DeniedAtOnce => "denied_at_once",
        }
    }

    const fn detail(self) -> &'static str {
        match self {
            Self::Denied => "the second request under a limit of 1 was denied, as it must be",
            Self::Admitted => "the second request under a limit of 1 was admitted: limits are not enforced",
            Self::Unanswered => "the limiter gave no answer: nothing is known of this round",
            Self::DeniedAtOnce => {
                "the first request under a limit of 1 was denied: the limiter counts what nobody charged"
            }
        }
    }
}

#[derive(Debug)]
struct Told {
    outcome: Option<Outcome>,
    since: String,
    /// When a round last ended with an answer.
    answered: Instant,
}

/// The canary of one service.
pub struct Canary {
    decider: Arc<Decider>,
    interval: Duration,
    told: Mutex<Told>,
}

impl Canary {
    /// A canary that tries each `interval`.
    pub fn new(decider: Arc<Decider>, interval: Duration) -> Self {
        let told = Told {
            outcome: None,
            since: now(),
            answered: Instant::now(),
        };
        Self {
            decider,
            interval,
            told: Mutex::new(told),
        }
    }

    /// Tries for ever.
    pub async fn run(self: Arc<Self>) {
        let mut ticks = interval(self.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let outcome = self.round().await;
            self.take(outcome);
        }
    }

    /// What it found last. Sets the gauges to the same.
    pub fn report(&self) -> Value {
        let told = locked(&self.told);
        let age_s = told.answered.elapsed().as_secs();
        let denied = match told.outcome {
            Some(Outcome::Denied | Outcome::DeniedAtOnce) => Some(true),
            Some(Outcome::Admitted) => Some(false),
            Some(Outcome::Unanswered) | None => None,
        };
        self.decider.metrics.canary(denied, age_s);
        json!({
            "state": told.outcome.map_or("not_run", Outcome::name),
            "since": told.since,
            "age_s": age_s,
            "detail": told.outcome.map_or("no round has ended yet", Outcome::detail),
        })
    }

    async fn round(&self) -> Outcome {
        let Some(scope) = operation() else {
            return Outcome::Unanswered;
        };
        let owner = format!("{NAME}/{scope}");
        let first = self.try_once(&owner).await;
        let second = self.try_once(&owner).await;
        Outcome::of(first, second)
    }

    /// Whether one request of this owner was admitted; `None` if that could not be decided.
    async fn try_once(&self, owner: &str) -> Option<bool> {
        let mut limits = StampedLimits::default();
        limits.set(Scope::Owner, Resource::Requests, Limit::of(1));
        let request = DecideRequest {
            op: operation()?,
            profile: self.decider.profile,
            rules: NAME.to_owned(),
            mode: Mode::Enforce,
            gates: vec![GateRule::Contract {
                when_unavailable: Choice::Reject,
                limits: LimitSource::Envelope,
            }],
            budget_ms: self.decider.least_budget_ms(),
            window_s: WINDOW_S,
            subject: Subject {
                owner: owner.to_owned(),
                ..Subject::default()
            },
            limits,
            tokens: 1,
            request_id: None,
            retry: false,
            lease: None,
        };
        match self.decider.untold(&request, Instant::now()).await {
            Verdict::Admit(_) => Some(true),
            Verdict::Deny(denial) => (denial.code == Code::RateLimited).then_some(false),
            Verdict::Unavailable(_) => None,
        }
    }

    fn take(&self, outcome: Outcome) {
        let changed = {
            let mut told = locked(&self.told);
            if outcome != Outcome::Unanswered {
                told.answered = Instant::now();
            }
            let changed = told.outcome != Some(outcome);
            if changed {
                told.outcome = Some(outcome);
                told.since = now();
            }
            changed
        };
        let (level, event) = match outcome {
            // Said again each round: nothing else may be wrong with this service.
            Outcome::Admitted => (Level::Error, "canary_admitted"),
            _ if !changed => return,
            Outcome::Denied => (Level::Info, "canary_denied"),
            Outcome::Unanswered => (Level::Warn, "canary_unanswered"),
            Outcome::DeniedAtOnce => (Level::Warn, "canary_denied_at_once"),
        };
        let message = format!("canary: {}", outcome.detail());
        self.decider.journal.write(None, LogLine::new(level, event, message));
    }
}

/// An id that nobody can have guessed.
fn operation() -> Option<OperationId> {
    random().map(OperationId::from_random)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::tests::{Mood, over};
    use crate::limiter::StoreFault;

    async fn round(moods: &[Mood]) -> Outcome {
        let (decider, _) = over(moods);
        Canary::new(decider, Duration::from_secs(1)).round().await
    }

    #[tokio::test(start_paused = true)]
    async fn a_second_request_that_is_admitted_says_nothing_where_the_first_had_no_answer() {
        // Later than it may be: the charge is given back, and what comes next is granted at once.
        for first in [Mood::GrantAfter(300), Mood::Fail(StoreFault::Connection)] {
            assert_eq!(round(&[first]).await, Outcome::Unanswered, "{first:?}");
        }
        assert_eq!(round(&[]).await, Outcome::Admitted);
    }

    #[test]
    fn an_outcome_is_known_only_where_both_requests_were_answered() {
        let (admitted, denied) = (Some(true), Some(false));
        for (first, second, outcome) in [
            (admitted, denied, Outcome::Denied),
            (admitted, admitted, Outcome::Admitted),
            (denied, admitted, Outcome::Admitted),
            (denied, denied, Outcome::DeniedAtOnce),
            (None, admitted, Outcome::Unanswered),
            (None, denied, Outcome::Unanswered),
            (admitted, None, Outcome::Unanswered),
            (denied, None, Outcome::Unanswered),
            (None, None, Outcome::Unanswered),
        ] {
            assert_eq!(Outcome::of(first, second), outcome, "{first:?}, {second:?}");
        }
    }
}
