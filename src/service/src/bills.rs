//! Bills: the tokens of calls that have ended, kept until what they cost stands in their orgs' months.
//!
//! `/v1/settle` only puts them down here and waits for no store; one task prices them by the policy's price list as it is
//! then, and tells the metering store, in batches. A list that can't be read and a store that can't be told are waited for;
//! the store adds each operation once, however often it is told. A model without a price costs nothing that could be added:
//! that is counted and said, and the bill is gone.
//!
//! Bounded; what finds no room is counted and said at ERROR. Left out on purpose: whether the tokens are right, and whose
//! hold they replace.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use portcullis_decision::cost::cost_micro_dollars;
use portcullis_decision::log_line::{Level, LogLine};
use portcullis_decision::metering::Cost;
use portcullis_decision::operation::OperationId;
use portcullis_decision::policy::closest;
use portcullis_decision::usage::Usage;
use portcullis_decision::wire::{Bill, Settlement};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use crate::backlog::Backlog;
use crate::logs::Journal;
use crate::metering::watched::WatchedMeter;
use crate::metrics::Metrics;
use crate::policy::Prices;
use crate::policy::cache::PolicyCache;
use crate::{after, locked};

/// Bills that wait at most: some 30 MB with names of ordinary length.
const CAPACITY: usize = 100_000;
/// Operations whose bill is over that are remembered, the oldest leaving first: a filter tells again what was not answered.
const REMEMBERED: usize = 65_536;
/// Bills of one round trip.
const BATCH: usize = 500;
/// How long one look for the price list may take.
const PRICES_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause after the first failure, doubled with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Characters of a model's name that a line shows.
const LONGEST_SHOWN_MODEL: usize = 128;

type Entry = (OperationId, Bill);

#[derive(Debug, Default)]
struct Queue {
    bills: Backlog<Entry>,
    /// Of all that are kept, and of all in `over`.
    ops: HashSet<OperationId>,
    over: VecDeque<OperationId>,
}

/// The bills that wait, shared by the settlements that bring them and the task that delivers them.
#[derive(Debug)]
pub struct Bills {
    queue: Mutex<Queue>,
    filled: Notify,
    metrics: Arc<Metrics>,
    log: Arc<Journal>,
    capacity: usize,
    remembered: usize,
}

impl Bills {
    /// No bills.
    pub fn new(metrics: Arc<Metrics>, log: Arc<Journal>) -> Self {
        Self {
            queue: Mutex::default(),
            filled: Notify::new(),
            metrics,
            log,
            capacity: CAPACITY,
            remembered: REMEMBERED,
        }
    }

    /// Keeps the bills of these settlements, each operation's once. Waits for nothing.
    pub fn take(&self, settlements: &[Settlement]) {
        let bills = settlements.iter().filter_map(|one| Some((one.op, one.bill.as_ref()?)));
        let mut queue = locked(&self.queue);
        for (op, bill) in bills {
            if queue.ops.contains(&op) {
                continue;
            }
            if queue.bills.len() >= self.capacity {
                self.drop_for_lack_of_room(bill);
                continue;
            }
            if bill.is_hold {
                self.metrics.bills_of_holds.inc();
            }
            queue.ops.insert(op);
            queue.bills.push((op, bill.clone()));
        }
        self.show(&queue);
        drop(queue);
        self.filled.notify_one();
    }

    fn drop_for_lack_of_room(&self, bill: &Bill) {
        self.metrics.bills_dropped.inc();
        let message = "a bill found no room: what the call has cost is added to no month";
        let mut line = LogLine::new(Level::Error, "bill_dropped", message);
        line.org = Some(bill.org.clone()).filter(|org| !org.is_empty());
        self.log.write(None, line);
    }

    /// Bills that stand in no month yet.
    pub fn len(&self) -> usize {
        locked(&self.queue).bills.len()
    }

    /// Whether every bill has been delivered.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn show(&self, queue: &Queue) {
        self.metrics.bills_waiting.set(queue.bills.shown());
    }

    fn next_batch(&self) -> Vec<Entry> {
        locked(&self.queue).bills.next_batch(BATCH)
    }

    /// The batch under way has ended: these are over, and the others wait again, before all that came since.
    fn finish(&self, over: &[OperationId], again: Vec<Entry>) {
        let mut queue = locked(&self.queue);
        queue.bills.end_batch(again);
        queue.over.extend(over);
        while queue.over.len() > self.remembered {
            if let Some(op) = queue.over.pop_front() {
                queue.ops.remove(&op);
            }
        }
        self.show(&queue);
    }

    /// What these bills cost, and the bills that have a cost. The others are over.
    fn price(&self, batch: Vec<Entry>, prices: &Prices, over: &mut Vec<OperationId>) -> (Vec<Entry>, Vec<Cost>) {
        let (mut billed, mut costs) = (Vec::with_capacity(batch.len()), Vec::with_capacity(batch.len()));
        for (op, bill) in batch {
            let usage = Usage {
                input: Some(bill.input),
                cached_input: Some(bill.cached_input),
                output: Some(bill.output),
                is_complete: true,
            };
            let cost = closest(prices, &bill.model).and_then(|price| cost_micro_dollars(&usage, price));
            let Some(micro_dollars) = cost else {
                self.tell_of_no_price(&bill);
                over.push(op);
                continue;
            };
            costs.push(Cost {
                op,
                org: bill.org.clone(),
                micro_dollars,
            });
            billed.push((op, bill));
        }
        (billed, costs)
    }

    fn tell_of_no_price(&self, bill: &Bill) {
        self.metrics.unpriced.inc();
        let message = format!(
            "{}: what the call has cost is added to no month",
            no_price_for(&bill.model)
        );
        let mut line = LogLine::new(Level::Warn, "bill_unpriced", message);
        line.org = Some(bill.org.clone()).filter(|org| !org.is_empty());
        self.log.write(None, line);
    }

    /// Delivers to the store, for ever.
    pub async fn run(self: Arc<Self>, policy: PolicyCache, meter: WatchedMeter) {
        let mut pause = FIRST_PAUSE;
        loop {
            let batch = self.next_batch();
            if batch.is_empty() {
                self.filled.notified().await;
                continue;
            }
            if self.deliver(batch, &policy, &meter).await {
                pause = FIRST_PAUSE;
            } else {
                sleep(pause).await;
                pause = pause.saturating_mul(2).min(LONGEST_PAUSE);
            }
        }
    }

    /// Whether nothing of the batch has to wait again.
    async fn deliver(&self, batch: Vec<Entry>, policy: &PolicyCache, meter: &WatchedMeter) -> bool {
        let Ok(prices) = policy.prices(after(Instant::now(), PRICES_TIMEOUT)).await else {
            self.finish(&[], batch);
            return false;
        };
        let mut over = Vec::new();
        let (billed, costs) = self.price(batch, &prices, &mut over);
        if costs.is_empty() || meter.add_costs(&costs).await.is_ok() {
            over.extend(billed.iter().map(|(op, _)| *op));
            self.finish(&over, Vec::new());
            true
        } else {
            self.finish(&over, billed);
            false
        }
    }

    /// Says at the end of the process what goes down with it.
    pub fn tell_of_the_lost(&self) {
        let count = self.len();
        if count > 0 {
            tracing::error!(
                event = "bills_lost",
                count,
                "{count} bills were delivered nowhere: what those calls have cost is added to no month"
            );
        }
    }
}

/// What an operator looks for. A model's name is no secret, but may be long.
pub(crate) fn no_price_for(model: &str) -> String {
    let mut shown: String = model.chars().take(LONGEST_SHOWN_MODEL).collect();
    if shown.len() < model.len() {
        shown.push('…');
    }
    format!("no price for model {shown}")
}

#[cfg(test)]
mod tests;
