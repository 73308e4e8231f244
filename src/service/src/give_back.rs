//! Give-backs that wait: operations whose charge or record must not stay, retried until their store has heard of them.
//!
//! One queue for each store and reason, so that a store that is down holds up no other. Bounded in number and age. What is
//! dropped is counted; in the limiter it lapses by its time to live.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use portcullis_decision::operation::OperationId;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use crate::limiter::StoreFault;
use crate::limiter::watched::WatchedLimiter;
use crate::locked;
use crate::metering::Cancel;
use crate::metering::watched::WatchedMeter;
use crate::metrics::Metrics;

/// Give-backs that wait at most.
const CAPACITY: usize = 65_536;
/// Give-backs of one round trip.
const BATCH: usize = 256;
/// How long one is worth telling the limiter: by then windows and slots have mostly lapsed.
const LIMITER_MAX_AGE: Duration = Duration::from_secs(120);
/// How long one is worth telling the metering store, where nothing lapses: it remembers operations for a day.
const METERING_MAX_AGE: Duration = Duration::from_secs(43_200);
/// Pause after the first failure, doubled with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// What has to hear of give-backs.
pub trait Creditor: Send + 'static {
    /// Gives back what these operations took.
    fn give_back(&self, ops: &[OperationId]) -> impl Future<Output = Result<(), StoreFault>> + Send;
}

impl Creditor for WatchedLimiter {
    async fn give_back(&self, ops: &[OperationId]) -> Result<(), StoreFault> {
        self.cancel(ops).await
    }
}

impl Creditor for (WatchedMeter, Cancel) {
    async fn give_back(&self, ops: &[OperationId]) -> Result<(), StoreFault> {
        self.0.cancel(ops, self.1).await
    }
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<(OperationId, Instant)>,
    under_way: usize,
}

/// All queues of a service.
#[derive(Debug, Clone)]
pub struct GiveBacks {
    /// To the limiter.
    pub limiter: Arc<GiveBack>,
    /// To the metering store: runs that were recorded for nothing.
    pub metering: Arc<GiveBack>,
    /// To the metering store: operations of which nothing ran at all.
    pub voids: Arc<GiveBack>,
}

impl GiveBacks {
    /// Empty queues.
    pub fn new(metrics: &Arc<Metrics>) -> Self {
        let queue = |max_age| Arc::new(GiveBack::new(max_age, Arc::clone(metrics)));
        Self {
            limiter: queue(LIMITER_MAX_AGE),
            metering: queue(METERING_MAX_AGE),
            voids: queue(METERING_MAX_AGE),
        }
    }

    /// Whether nothing waits and nothing is under way.
    pub fn are_empty(&self) -> bool {
        self.limiter.is_empty() && self.metering.is_empty() && self.voids.is_empty()
    }
}

/// The queue of give-backs, shared by the decisions that fill it and the task that empties it.
#[derive(Debug)]
pub struct GiveBack {
    queue: Mutex<Queue>,
    filled: Notify,
    max_age: Duration,
    metrics: Arc<Metrics>,
}

impl GiveBack {
    /// An empty queue; what has waited in it for longer than `max_age` is dropped.
    fn new(max_age: Duration, metrics: Arc<Metrics>) -> Self {
        Self {
            queue: Mutex::default(),
            filled: Notify::new(),
            max_age,
            metrics,
        }
    }

    /// Gives back, soon, what this operation took.
    pub fn later(&self, op: OperationId) {
        let mut queue = locked(&self.queue);
        if queue.waiting.len() >= CAPACITY {
            self.metrics.give_back_dropped.inc();
        } else {
            queue.waiting.push_back((op, Instant::now()));
            drop(queue);
            self.filled.notify_one();
        }
    }

    /// Give-backs that the store has not heard of.
    pub fn len(&self) -> usize {
        let queue = locked(&self.queue);
        queue.waiting.len().saturating_add(queue.under_way)
    }

    /// Whether nothing waits and nothing is under way.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn next_batch(&self) -> Vec<(OperationId, Instant)> {
        let mut queue = locked(&self.queue);
        while queue
            .waiting
            .front()
            .is_some_and(|(_, since)| since.elapsed() > self.max_age)
        {
            queue.waiting.pop_front();
            self.metrics.give_back_dropped.inc();
        }
        let take = queue.waiting.len().min(BATCH);
        let batch: Vec<_> = queue.waiting.drain(..take).collect();
        queue.under_way = batch.len();
        batch
    }

    fn finish(&self, batch: Vec<(OperationId, Instant)>, told: bool) {
        let mut queue = locked(&self.queue);
        queue.under_way = 0;
        if !told {
            batch
                .into_iter()
                .rev()
                .for_each(|entry| queue.waiting.push_front(entry));
        }
    }

    /// Tells the store, for ever.
    pub async fn run(self: Arc<Self>, creditor: impl Creditor) {
        let mut pause = FIRST_PAUSE;
        loop {
            let batch = self.next_batch();
            if batch.is_empty() {
                self.filled.notified().await;
                continue;
            }
            let ops: Vec<_> = batch.iter().map(|(op, _)| *op).collect();
            let told = creditor.give_back(&ops).await.is_ok();
            self.finish(batch, told);
            if told {
                pause = FIRST_PAUSE;
            } else {
                sleep(pause).await;
                pause = pause.saturating_mul(2).min(LONGEST_PAUSE);
            }
        }
    }
}
