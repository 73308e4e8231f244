//! A limiter as the rest of the service sees it: every operation bounded in time, timed, and its failure counted and
//! logged. What a failure means for a request is not decided here.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use portcullis_decision::charge::{ChargePlan, Charged};
use portcullis_decision::class::{Dependency, FailureClass};
use portcullis_decision::ledger::Settled;
use portcullis_decision::log_line::{Level, LogLine};
use portcullis_decision::operation::OperationId;
use portcullis_decision::wire::Return;
use tokio::time::{Instant, timeout_at};

use super::{Answer, Limiter, StoreFault, within};
use crate::after;
use crate::logs::Journal;
use crate::metrics::Metrics;

/// A limiter with its watch.
#[derive(Clone)]
pub struct WatchedLimiter {
    limiter: Arc<dyn Limiter>,
    op_timeout: Duration,
    slot_ttl: Duration,
    metrics: Arc<Metrics>,
    journal: Arc<Journal>,
    eviction_is_asked: Arc<AtomicBool>,
}

impl WatchedLimiter {
    /// Watches `limiter`; no operation takes longer than `op_timeout`.
    pub fn new(
        limiter: Arc<dyn Limiter>,
        op_timeout: Duration,
        slot_ttl: Duration,
        metrics: Arc<Metrics>,
        journal: Arc<Journal>,
    ) -> Self {
        Self {
            limiter,
            op_timeout,
            slot_ttl,
            metrics,
            journal,
            eviction_is_asked: Arc::default(),
        }
    }

    /// See [`Limiter::charge`]; ends at `deadline` at the latest. An answer after it is [`StoreFault::Timeout`].
    ///
    /// # Errors
    /// The store's.
    pub async fn charge(&self, plan: &ChargePlan, deadline: Instant) -> Result<Charged, StoreFault> {
        let until = deadline.min(self.deadline());
        self.watch(until, self.limiter.charge(plan, self.slot_ttl, until)).await
    }

    /// See [`Limiter::cancel`].
    ///
    /// # Errors
    /// The store's.
    pub async fn cancel(&self, ops: &[OperationId]) -> Result<(), StoreFault> {
        self.cancel_by(ops, self.deadline()).await
    }

    /// The same; ends at `deadline` at the latest.
    ///
    /// # Errors
    /// The store's.
    pub async fn cancel_by(&self, ops: &[OperationId], deadline: Instant) -> Result<(), StoreFault> {
        let until = deadline.min(self.deadline());
        self.watch(until, self.limiter.cancel(ops, until)).await
    }

    /// See [`Limiter::settle`].
    ///
    /// # Errors
    /// The store's.
    pub async fn settle(&self, settled: &[Settled]) -> Result<(), StoreFault> {
        let until = self.deadline();
        self.watch(until, self.limiter.settle(settled, until)).await
    }

    /// See [`Limiter::give_back_parts`].
    ///
    /// # Errors
    /// The store's.
    pub async fn give_back_parts(&self, parts: &[Return]) -> Result<(), StoreFault> {
        let until = self.deadline();
        self.watch(until, self.limiter.give_back_parts(parts, until)).await
    }

    /// See [`Limiter::renew`].
    ///
    /// # Errors
    /// The store's.
    pub async fn renew(&self, ops: &[OperationId]) -> Result<Vec<OperationId>, StoreFault> {
        let until = self.deadline();
        self.watch(until, self.limiter.renew(ops, self.slot_ttl, until)).await
    }

    /// See [`Limiter::ping`]. The first time that the store answers it is also asked whether it may drop counters.
    ///
    /// # Errors
    /// The store's.
    pub async fn ping(&self) -> Result<(), StoreFault> {
        let until = self.deadline();
        self.watch(until, self.limiter.ping(until)).await?;
        self.warn_of_eviction().await;
        Ok(())
    }

    /// Asks until there is an answer, and says it once. Not watched: a store that gives none does all that it is for.
    async fn warn_of_eviction(&self) {
        if self.eviction_is_asked.load(Ordering::Relaxed) {
            return;
        }
        let until = self.deadline();
        let answer = timeout_at(until, self.limiter.may_evict(until)).await;
        let Ok(Ok(may_evict)) = answer else { return };
        if !self.eviction_is_asked.swap(true, Ordering::Relaxed) && may_evict {
            let message = "the limiter's store may drop counters when its memory is full, and a dropped counter is a limit \
                           that starts anew: set its maxmemory-policy to noeviction";
            self.journal
                .write(None, LogLine::new(Level::Warn, "eviction_possible", message));
        }
    }

    fn deadline(&self) -> Instant {
        after(Instant::now(), self.op_timeout)
    }

    async fn watch<T>(&self, until: Instant, answer: Answer<'_, T>) -> Result<T, StoreFault> {
        let (answer, seconds) = within(until, answer).await;
        self.metrics.limiter_seconds.observe(seconds);
        if let Err(fault) = &answer {
            self.metrics.dependency_error(Dependency::Limiter, fault.kind());
            let mut line = LogLine::new(Level::Warn, "dependency_error", format!("the limiter failed: {fault}"));
            line.class = Some(FailureClass::LimiterUnavailable);
            self.journal.write(Some(fault.kind()), line);
        }
        answer
    }
}
