//! A limiter as the rest of the service sees it: every operation bounded in time, timed, and its failure counted and
//! logged. What a failure means for a request is not decided here.

use std::sync::Arc;
use std::time::Duration;

use portcullis_decision::charge::{ChargePlan, Charged};
use portcullis_decision::class::{Dependency, FailureClass};
use portcullis_decision::log_line::{Level, LogLine};
use portcullis_decision::operation::OperationId;
use tokio::time::{Instant, timeout_at};

use super::{Answer, Limiter, StoreFault};
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
        let until = self.deadline();
        self.watch(until, self.limiter.cancel(ops, until)).await
    }

    /// See [`Limiter::release`].
    ///
    /// # Errors
    /// The store's.
    pub async fn release(&self, ops: &[OperationId]) -> Result<(), StoreFault> {
        let until = self.deadline();
        self.watch(until, self.limiter.release(ops, until)).await
    }

    /// See [`Limiter::renew`].
    ///
    /// # Errors
    /// The store's.
    pub async fn renew(&self, ops: &[OperationId]) -> Result<Vec<OperationId>, StoreFault> {
        let until = self.deadline();
        self.watch(until, self.limiter.renew(ops, self.slot_ttl, until)).await
    }

    /// See [`Limiter::ping`].
    ///
    /// # Errors
    /// The store's.
    pub async fn ping(&self) -> Result<(), StoreFault> {
        let until = self.deadline();
        self.watch(until, self.limiter.ping(until)).await
    }

    fn deadline(&self) -> Instant {
        after(Instant::now(), self.op_timeout)
    }

    async fn watch<T>(&self, until: Instant, answer: Answer<'_, T>) -> Result<T, StoreFault> {
        let start = Instant::now();
        let mut answer = timeout_at(until, answer).await.unwrap_or(Err(StoreFault::Timeout));
        let end = Instant::now();
        // A future that is ready is polled to its end also when its time is over.
        if end > until && answer.is_ok() {
            answer = Err(StoreFault::Timeout);
        }
        self.metrics
            .limiter_seconds
            .observe(end.saturating_duration_since(start).as_secs_f64());
        if let Err(fault) = &answer {
            self.metrics.dependency_error(Dependency::Limiter, fault.kind());
            let mut line = LogLine::new(Level::Warn, "dependency_error", format!("the limiter failed: {fault}"));
            line.class = Some(FailureClass::LimiterUnavailable);
            self.journal.write(Some(fault.kind()), line);
        }
        answer
    }
}
