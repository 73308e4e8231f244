//! A metering store as the rest of the service sees it: every operation bounded in time, timed, and its failure counted
//! and logged. What a failure means for a request is not decided here.

use std::sync::Arc;
use std::time::Duration;

use portcullis_decision::class::{Dependency, FailureClass};
use portcullis_decision::log_line::{Level, LogLine};
use portcullis_decision::metering::{Cost, MeterPlan, Metered};
use portcullis_decision::operation::OperationId;
use tokio::time::{Instant, sleep};

use super::{Cancel, Meter, Tended};
use crate::after;
use crate::limiter::{Answer, StoreFault, within};
use crate::logs::Journal;
use crate::metrics::Metrics;
use crate::unmetered::Admission;

/// How long a batch of the journal or of costs may take: nobody waits for it.
const BATCH_TIMEOUT: Duration = Duration::from_secs(5);
/// How long looking after the tables may take.
const TEND_TIMEOUT: Duration = Duration::from_secs(30);
/// Between two looks at the tables, while they are sound.
const TEND_INTERVAL: Duration = Duration::from_secs(60);
/// Until the next look, when the last one failed.
const TEND_AGAIN: Duration = Duration::from_secs(1);
/// Until the next look, when the last one left something to do: others want the database too.
const TEND_ON: Duration = Duration::from_millis(100);

/// A metering store with its watch.
#[derive(Clone)]
pub struct WatchedMeter {
    meter: Arc<dyn Meter>,
    op_timeout: Duration,
    metrics: Arc<Metrics>,
    journal: Arc<Journal>,
}

impl WatchedMeter {
    /// Watches `meter`; no operation of a request takes longer than `op_timeout`.
    pub fn new(meter: Arc<dyn Meter>, op_timeout: Duration, metrics: Arc<Metrics>, journal: Arc<Journal>) -> Self {
        Self {
            meter,
            op_timeout,
            metrics,
            journal,
        }
    }

    /// Whether other service processes record in the same place.
    pub fn is_shared(&self) -> bool {
        self.meter.is_shared()
    }

    /// See [`Meter::record`]; ends at `deadline` at the latest. An answer after it is [`StoreFault::Timeout`].
    ///
    /// # Errors
    /// The store's.
    pub async fn record(&self, plan: &MeterPlan, deadline: Instant) -> Result<Metered, StoreFault> {
        let until = deadline.min(self.deadline());
        self.watch(until, self.meter.record(plan, until)).await
    }

    /// See [`Meter::cancel`].
    ///
    /// # Errors
    /// The store's.
    pub async fn cancel(&self, ops: &[OperationId], why: Cancel) -> Result<(), StoreFault> {
        self.cancel_by(ops, why, self.deadline()).await
    }

    /// The same; ends at `deadline` at the latest.
    ///
    /// # Errors
    /// The store's.
    pub async fn cancel_by(&self, ops: &[OperationId], why: Cancel, deadline: Instant) -> Result<(), StoreFault> {
        let until = deadline.min(self.deadline());
        self.watch(until, self.meter.cancel(ops, why, until)).await
    }

    /// See [`Meter::add_costs`].
    ///
    /// # Errors
    /// The store's.
    pub async fn add_costs(&self, costs: &[Cost]) -> Result<(), StoreFault> {
        let until = after(Instant::now(), BATCH_TIMEOUT);
        self.watch(until, self.meter.add_costs(costs, until)).await
    }

    /// See [`Meter::journal`].
    ///
    /// # Errors
    /// The store's.
    pub async fn journal(&self, admissions: &[Admission]) -> Option<Result<(), StoreFault>> {
        let until = after(Instant::now(), BATCH_TIMEOUT);
        let answer = self.meter.journal(admissions, until)?;
        Some(self.watch(until, answer).await)
    }

    /// See [`Meter::ping`].
    ///
    /// # Errors
    /// The store's.
    pub async fn ping(&self) -> Result<(), StoreFault> {
        let until = self.deadline();
        self.watch(until, self.meter.ping(until)).await
    }

    /// Looks after the store's tables, for ever; see [`Meter::tend`].
    pub async fn run(self) {
        loop {
            let until = after(Instant::now(), TEND_TIMEOUT);
            let tended = self.watch(until, self.meter.tend()).await;
            let pause = match tended {
                Ok(Tended::AllDone) => TEND_INTERVAL,
                Ok(Tended::MoreToDo) => TEND_ON,
                Err(_) => TEND_AGAIN,
            };
            sleep(pause).await;
        }
    }

    fn deadline(&self) -> Instant {
        after(Instant::now(), self.op_timeout)
    }

    async fn watch<T>(&self, until: Instant, answer: Answer<'_, T>) -> Result<T, StoreFault> {
        let (answer, seconds) = within(until, answer).await;
        self.metrics.metering_seconds.observe(seconds);
        if let Err(fault) = &answer {
            self.metrics.dependency_error(Dependency::Metering, fault.kind());
            let message = format!("the metering store failed: {fault}");
            let mut line = LogLine::new(Level::Warn, "dependency_error", message);
            line.class = Some(FailureClass::MeteringUnavailable);
            self.journal.write(Some(fault.kind()), line);
        }
        answer
    }
}
