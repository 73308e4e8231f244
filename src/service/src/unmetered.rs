//! The journal of unmetered admissions: requests that went on while their run could not be recorded, kept until the
//! metering store has them, so that they can be billed.
//!
//! Bounded; what finds no room is counted and said at ERROR. An admission counts as delivered only once the store has
//! said so; the store takes each once, by its operation id. Which of several stores is behind is not known here.

mod list;

pub use list::run as list;

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use portcullis_decision::log_line::{Level, LogLine};
use portcullis_decision::operation::OperationId;
use portcullis_decision::rules::Gate;
use portcullis_decision::verdict::Admission as Verdict;
use portcullis_decision::wire::{DecideRequest, Unmetered};
use tokio::sync::Notify;
use tokio::time::sleep;

use crate::backlog::Backlog;
use crate::locked;
use crate::logs::Journal;
use crate::metering::memory::unix_ms;
use crate::metering::watched::WatchedMeter;
use crate::metrics::Metrics;

/// Admissions that wait at most: some 30 MB with ids of ordinary length.
const CAPACITY: usize = 100_000;
/// Admissions of one round trip.
const BATCH: usize = 500;
/// Characters of a request id that are kept.
const LONGEST_REQUEST_ID: usize = 256;
/// Pause after the first failure, doubled with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Who let the request pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// This service, without the metering store.
    Service,
    /// A filter, without a service.
    Filter,
}

impl Source {
    /// The word in tables and lists.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Service => "service",
            Self::Filter => "filter",
        }
    }
}

/// A run that was recorded nowhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admission {
    /// Makes its record idempotent.
    pub op: OperationId,
    /// Whose run it is; empty if the request named no organization.
    pub org: String,
    /// The owner.
    pub owner: Option<String>,
    /// The rules' name.
    pub rules: String,
    /// When, in milliseconds since 1970, by this machine's clock.
    pub at_ms: u64,
    /// The client's request id, which only correlates.
    pub request_id: Option<String>,
    /// Who let it pass.
    pub source: Source,
}

fn cut(request_id: Option<String>) -> Option<String> {
    request_id.map(|text| text.chars().take(LONGEST_REQUEST_ID).collect())
}

impl Admission {
    /// What has to be journaled of an admission, or `None` if its run was recorded, or nothing had to be.
    ///
    /// Only the gate `metering` records: where it was asked, a bypassed quota beside it leaves nothing to bill.
    pub fn of(request: &DecideRequest, admission: &Verdict) -> Option<Self> {
        let is_unmetered = admission.bypassed.iter().any(|bypass| bypass.gate == Gate::Metering);
        is_unmetered.then(|| Self {
            op: request.op,
            org: request.subject.org.clone().unwrap_or_default(),
            owner: Some(request.subject.owner.clone()).filter(|owner| !owner.is_empty()),
            rules: request.rules.clone(),
            at_ms: unix_ms(),
            request_id: cut(request.request_id.clone()),
            source: Source::Service,
        })
    }

    /// What a filter has told.
    pub fn told(unmetered: Unmetered) -> Self {
        Self {
            op: unmetered.op,
            org: unmetered.org.unwrap_or_default(),
            owner: unmetered.owner.filter(|owner| !owner.is_empty()),
            rules: unmetered.rules,
            at_ms: unix_ms().saturating_sub(unmetered.age_ms),
            request_id: cut(unmetered.request_id),
            source: Source::Filter,
        }
    }
}

#[derive(Debug, Default)]
struct Queue {
    admissions: Backlog<Admission>,
    /// Of all that are kept: a filter tells again what was not answered.
    ops: HashSet<(OperationId, bool)>,
}

const fn key(admission: &Admission) -> (OperationId, bool) {
    (admission.op, matches!(admission.source, Source::Filter))
}

/// The admissions that wait, shared by the decisions that add them and the task that delivers them.
#[derive(Debug)]
pub struct UnmeteredJournal {
    queue: Mutex<Queue>,
    filled: Notify,
    metrics: Arc<Metrics>,
    log: Arc<Journal>,
    capacity: usize,
}

impl UnmeteredJournal {
    /// An empty journal.
    pub fn new(metrics: Arc<Metrics>, log: Arc<Journal>) -> Self {
        Self {
            queue: Mutex::default(),
            filled: Notify::new(),
            metrics,
            log,
            capacity: CAPACITY,
        }
    }

    /// Keeps an admission, unless it is kept already.
    pub fn add(&self, admission: Admission) {
        let mut queue = locked(&self.queue);
        if queue.ops.contains(&key(&admission)) {
            return;
        }
        self.metrics.unmetered.inc();
        if queue.admissions.len() >= self.capacity {
            drop(queue);
            self.metrics.unmetered_dropped.inc();
            let message = "an unmetered admission found no room in the journal: it can't be billed";
            let mut line = LogLine::new(Level::Error, "unmetered_dropped", message);
            line.org = Some(admission.org).filter(|org| !org.is_empty());
            line.rules = Some(admission.rules);
            line.request_id = admission.request_id;
            self.log.write(None, line);
            return;
        }
        queue.ops.insert(key(&admission));
        queue.admissions.push(admission);
        self.show(&queue);
        drop(queue);
        self.filled.notify_one();
    }

    /// Forgets what this service has let pass under these operations: nobody waited for the answer, so nothing ran.
    pub fn void(&self, ops: &[OperationId]) {
        let mut queue = locked(&self.queue);
        if queue.admissions.len() == 0 {
            return;
        }
        let ops: HashSet<_> = ops.iter().collect();
        let Queue { admissions, ops: kept } = &mut *queue;
        admissions.retain(|admission| {
            let is_void = admission.source == Source::Service && ops.contains(&admission.op);
            if is_void {
                kept.remove(&key(admission));
            }
            !is_void
        });
        self.show(&queue);
    }

    /// Admissions that no store has taken yet.
    pub fn len(&self) -> usize {
        locked(&self.queue).admissions.len()
    }

    /// Whether every admission has been delivered.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn show(&self, queue: &Queue) {
        self.metrics.unmetered_waiting.set(queue.admissions.shown());
    }

    fn next_batch(&self) -> Vec<Admission> {
        locked(&self.queue).admissions.next_batch(BATCH)
    }

    fn finish(&self, batch: Vec<Admission>, delivered: bool) {
        let mut queue = locked(&self.queue);
        if delivered {
            for admission in &batch {
                queue.ops.remove(&key(admission));
            }
        }
        queue.admissions.end_batch(if delivered { Vec::new() } else { batch });
        self.show(&queue);
    }

    /// Delivers to the store, for ever. Ends at once over a store that keeps no journal: then all stays here.
    pub async fn run(self: Arc<Self>, meter: WatchedMeter) {
        let mut pause = FIRST_PAUSE;
        loop {
            let batch = self.next_batch();
            if batch.is_empty() {
                self.filled.notified().await;
                continue;
            }
            let answer = meter.journal(&batch).await;
            let is_kept = answer.is_some();
            let delivered = answer.is_some_and(|answer| answer.is_ok());
            let count = batch.len();
            self.finish(batch, delivered);
            if !is_kept {
                return;
            }
            if delivered {
                pause = FIRST_PAUSE;
                tracing::info!(
                    event = "unmetered_journaled",
                    count,
                    "{count} unmetered admissions were journaled and counted in their months"
                );
            } else {
                sleep(pause).await;
                pause = pause.saturating_mul(2).min(LONGEST_PAUSE);
            }
        }
    }

    /// Says at the end of the process what goes down with it.
    pub fn tell_of_the_lost(&self) {
        let count = self.len();
        if count > 0 {
            tracing::error!(
                event = "unmetered_lost",
                count,
                "{count} unmetered admissions were journaled nowhere: they can't be billed"
            );
        }
    }
}

#[cfg(test)]
mod tests;
