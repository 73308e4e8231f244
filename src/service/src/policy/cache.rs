//! A policy store as the rest of the service sees it: answers that are young enough, one question for each key at a time,
//! and every failure counted and logged.
//!
//! Architecture invariant: an answer counts for `max_staleness_ms` from when its question was *sent*, allow or deny; then it
//! is nothing. A fault is never an answer: whoever waited for it is told, and the next request asks again. An unknown
//! organization is an answer like any other. Half-way through its time an answer that is still wanted is asked for again, so
//! that a busy key never waits.
//!
//! A question belongs to nobody who waits for it: it goes on when they give up, so that a database that takes longer than
//! one request may wait is reached by the next.

mod table;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use portcullis_decision::class::{Dependency, FailureClass};
use portcullis_decision::log_line::{Level, LogLine};
use portcullis_decision::policy::{Lookup, Org, PolicyView, closest};
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use self::table::{Found, Landed, Table};
use super::{PolicyStore, Prices, Registry};
use crate::limiter::{Answer, StoreFault};
use crate::logs::Journal;
use crate::metrics::Metrics;
use crate::{after, locked, millis_since};

/// How long one question may take, whoever waits for it.
const QUESTION_TIMEOUT: Duration = Duration::from_secs(1);
/// A store that refuses at once is asked at most this often: shorter than anybody would notice after it has come back.
const PAUSE_AFTER_REFUSAL_MS: u64 = 50;
/// The key of the registry and of the price list, each of which is one answer.
const WHOLE: &str = "";

/// What can be asked for.
trait Subject: Clone + Send + Sync + Sized + 'static {
    fn ask<'a>(store: &'a dyn PolicyStore, key: &'a str, deadline: Instant) -> Answer<'a, Self>;
    fn table(cache: &Inner) -> &Table<Self>;
}

impl Subject for Option<Arc<Org>> {
    fn ask<'a>(store: &'a dyn PolicyStore, key: &'a str, deadline: Instant) -> Answer<'a, Self> {
        store.org(key, deadline)
    }

    fn table(cache: &Inner) -> &Table<Self> {
        &cache.orgs
    }
}

impl Subject for Arc<Registry> {
    fn ask<'a>(store: &'a dyn PolicyStore, _: &'a str, deadline: Instant) -> Answer<'a, Self> {
        store.registry(deadline)
    }

    fn table(cache: &Inner) -> &Table<Self> {
        &cache.registry
    }
}

impl Subject for Arc<Prices> {
    fn ask<'a>(store: &'a dyn PolicyStore, _: &'a str, deadline: Instant) -> Answer<'a, Self> {
        store.prices(deadline)
    }

    fn table(cache: &Inner) -> &Table<Self> {
        &cache.prices
    }
}

/// Whether what the store has said still counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Freshness {
    /// It has not said anything yet.
    Never,
    /// Its newest answer counts, or nothing has failed since.
    Fresh,
    /// Its newest answer is so old, too old to count, and it has failed since.
    Stale(Duration),
}

/// A policy store with its cache and its watch.
#[derive(Clone)]
pub struct PolicyCache(Arc<Inner>);

struct Inner {
    store: Arc<dyn PolicyStore>,
    orgs: Table<Option<Arc<Org>>>,
    registry: Table<Arc<Registry>>,
    prices: Table<Arc<Prices>>,
    /// How long a request waits for an answer.
    patience: Duration,
    epoch: Instant,
    /// Milliseconds since `epoch` before which a refusing store is not asked again.
    asked_again_at_ms: AtomicU64,
    /// When the newest answer was asked for, and when the newest fault was told.
    last: Mutex<(Option<Instant>, Option<Instant>)>,
    max_staleness: Duration,
    metrics: Arc<Metrics>,
    journal: Arc<Journal>,
}

impl PolicyCache {
    /// Answers of `store`, none older than `max_staleness`; a request waits for one for `patience` at most.
    pub fn new(
        store: Arc<dyn PolicyStore>,
        max_staleness: Duration,
        patience: Duration,
        metrics: Arc<Metrics>,
        journal: Arc<Journal>,
    ) -> Self {
        Self(Arc::new(Inner {
            store,
            orgs: Table::new(max_staleness),
            registry: Table::new(max_staleness),
            prices: Table::new(max_staleness),
            patience,
            epoch: Instant::now(),
            asked_again_at_ms: AtomicU64::new(0),
            last: Mutex::default(),
            max_staleness,
            metrics,
            journal,
        }))
    }

    /// The scheme of the store's address.
    pub fn scheme(&self) -> &'static str {
        self.0.store.scheme()
    }

    /// What the store says about an organization and, if they are asked about, a model's provider and a model's price.
    pub async fn view(
        &self,
        org: &str,
        provider_of: Option<&str>,
        price_of: Option<&str>,
        deadline: Instant,
    ) -> PolicyView {
        let until = deadline.min(after(Instant::now(), self.0.patience));
        if Instant::now() >= until {
            self.0.metrics.dependency_error(Dependency::Policy, "budget_spent");
            return PolicyView::UNAVAILABLE;
        }
        let provider = async {
            let Some(model) = provider_of else {
                return (Lookup::Known(None), None);
            };
            let registry = self.get::<Arc<Registry>>(WHOLE, until).await;
            registry.map_or((Lookup::Unavailable, None), |(registry, fresh_for_ms)| {
                (Lookup::Known(closest(&registry, model).cloned()), Some(fresh_for_ms))
            })
        };
        // No lease rests on a price: rules with a cap are decided exactly.
        let price = async {
            let Some(model) = price_of else {
                return Lookup::Known(None);
            };
            let prices = self.prices(until).await;
            prices.map_or(Lookup::Unavailable, |prices| {
                Lookup::Known(closest(&prices, model).copied())
            })
        };
        let (org, provider, price) = tokio::join!(self.get::<Option<Arc<Org>>>(org, until), provider, price);
        let (org, org_ms) = org.map_or((Lookup::Unavailable, None), |(org, fresh_for_ms)| {
            (Lookup::Known(org.map(|org| Org::clone(&org))), Some(fresh_for_ms))
        });
        let (provider, provider_ms) = provider;
        PolicyView {
            org,
            provider,
            price,
            fresh_for_ms: [org_ms, provider_ms].into_iter().flatten().min(),
        }
    }

    /// The price list.
    ///
    /// # Errors
    /// There is none that counts, and no new one by then.
    pub async fn prices(&self, until: Instant) -> Result<Arc<Prices>, StoreFault> {
        let prices = self.get::<Arc<Prices>>(WHOLE, until).await;
        prices.map(|(prices, _)| prices)
    }

    /// Whether the store would answer; see [`PolicyStore::ping`].
    ///
    /// # Errors
    /// The store's.
    pub async fn ping(&self) -> Result<(), StoreFault> {
        let sent = Instant::now();
        let answer = self.0.store.ping(after(sent, QUESTION_TIMEOUT)).await;
        match answer {
            Ok(()) => self.0.answered(sent),
            Err(fault) => self.0.tell(fault),
        }
        answer
    }

    /// Whether what the store has said still counts.
    pub fn freshness(&self) -> Freshness {
        let (answer, fault) = *locked(&self.0.last);
        let Some(sent) = answer else {
            return Freshness::Never;
        };
        let age = sent.elapsed();
        if age >= self.0.max_staleness && fault.is_some_and(|at| at > sent) {
            Freshness::Stale(age)
        } else {
            Freshness::Fresh
        }
    }

    /// An answer that counts, and for how many milliseconds it will.
    async fn get<T: Subject>(&self, key: &str, until: Instant) -> Result<(T, u64), StoreFault> {
        let arrived = Instant::now();
        let mut outcome = "hit";
        let answer = loop {
            let mut flight = match self.look::<T>(key) {
                Ok(Found::Answer(answer, sent)) => break Ok((answer, sent)),
                Ok(Found::Flight(flight)) => flight,
                Err(fault) => break Err(fault),
            };
            outcome = "miss";
            let landed = match timeout_at(until, flight.wait_for(Option::is_some)).await {
                Ok(Ok(landed)) => landed.clone(),
                Ok(Err(_)) => break Err(StoreFault::Connection),
                Err(_) => {
                    self.0.tell(StoreFault::Timeout);
                    break Err(StoreFault::Timeout);
                }
            };
            match landed {
                // Asked for this request, or young enough for it.
                Some(Ok((answer, sent))) if sent >= arrived || T::table(&self.0).is_fresh(sent) => {
                    break Ok((answer, sent));
                }
                Some(Err(fault)) => break Err(fault),
                _ => {}
            }
        };
        self.0.metrics.policy_lookup(outcome);
        answer.map(|(answer, sent)| (answer, T::table(&self.0).fresh_for_ms(sent)))
    }

    /// An answer that counts, or the question that is under way; asks if there is neither.
    fn look<T: Subject>(&self, key: &str) -> Result<Found<T>, StoreFault> {
        let pauses = millis_since(self.0.epoch) < self.0.asked_again_at_ms.load(Ordering::Relaxed);
        let (found, to_ask) = T::table(&self.0).look(key, !pauses);
        if let Some((landing, sent)) = to_ask {
            tokio::spawn(self.clone().ask::<T>(key.to_owned(), landing, sent));
        }
        found.ok_or_else(|| {
            self.0.tell(StoreFault::CircuitOpen);
            StoreFault::CircuitOpen
        })
    }

    async fn ask<T: Subject>(self, key: String, landing: watch::Sender<Landed<T>>, sent: Instant) {
        let until = after(sent, QUESTION_TIMEOUT);
        let answer = T::ask(&*self.0.store, &key, until);
        let answer = timeout_at(until, answer).await.unwrap_or(Err(StoreFault::Timeout));
        self.0.metrics.policy_seconds.observe(sent.elapsed().as_secs_f64());
        match &answer {
            Ok(_) => {
                self.0.answered(sent);
                self.0.asked_again_at_ms.store(0, Ordering::Relaxed);
            }
            Err(fault) => {
                // A timeout already has its pause, and may be about one key only.
                if matches!(fault, StoreFault::Connection | StoreFault::AccessDenied) {
                    let at = millis_since(self.0.epoch).saturating_add(PAUSE_AFTER_REFUSAL_MS);
                    self.0.asked_again_at_ms.store(at, Ordering::Relaxed);
                }
                self.0.tell(*fault);
            }
        }
        let answer = answer.map(|answer| (answer, sent));
        T::table(&self.0).land(&key, answer.as_ref().ok());
        landing.send_replace(Some(answer));
    }
}

impl Inner {
    fn answered(&self, sent: Instant) {
        let mut last = locked(&self.last);
        last.0 = last.0.max(Some(sent));
    }

    fn tell(&self, fault: StoreFault) {
        locked(&self.last).1 = Some(Instant::now());
        self.metrics.dependency_error(Dependency::Policy, fault.kind());
        let mut line = LogLine::new(
            Level::Warn,
            "dependency_error",
            format!("the policy store failed: {fault}"),
        );
        line.class = Some(FailureClass::PolicyUnavailable);
        self.journal.write(Some(fault.kind()), line);
    }
}

#[cfg(test)]
mod tests;
