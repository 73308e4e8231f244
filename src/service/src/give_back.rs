//! Give-backs that wait: operations whose charge must not stay, retried until the limiter has heard of them.
//!
//! Bounded in number and age. What is dropped is counted, and lapses in the store by its time to live.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use portcullis_decision::operation::OperationId;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use crate::limiter::watched::WatchedLimiter;
use crate::locked;
use crate::metrics::Metrics;

/// Give-backs that wait at most.
const CAPACITY: usize = 65_536;
/// Give-backs of one round trip.
const BATCH: usize = 256;
/// How long one is worth telling: by then windows and slots have mostly lapsed.
const MAX_AGE: Duration = Duration::from_secs(120);
/// Pause after the first failure, doubled with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<(OperationId, Instant)>,
    under_way: usize,
}

/// The queue of give-backs, shared by the decisions that fill it and the task that empties it.
#[derive(Debug)]
pub struct GiveBack {
    queue: Mutex<Queue>,
    filled: Notify,
    metrics: Arc<Metrics>,
}

impl GiveBack {
    /// An empty queue.
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self {
            queue: Mutex::default(),
            filled: Notify::new(),
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

    /// Whether nothing waits and nothing is under way.
    pub fn is_empty(&self) -> bool {
        let queue = locked(&self.queue);
        queue.waiting.is_empty() && queue.under_way == 0
    }

    fn next_batch(&self) -> Vec<(OperationId, Instant)> {
        let mut queue = locked(&self.queue);
        while queue
            .waiting
            .front()
            .is_some_and(|(_, since)| since.elapsed() > MAX_AGE)
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

    /// Tells the limiter, for ever.
    pub async fn run(self: Arc<Self>, limiter: WatchedLimiter) {
        let mut pause = FIRST_PAUSE;
        loop {
            let batch = self.next_batch();
            if batch.is_empty() {
                self.filled.notified().await;
                continue;
            }
            let ops: Vec<_> = batch.iter().map(|(op, _)| *op).collect();
            let told = limiter.cancel(&ops).await.is_ok();
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
