//! What streams leave behind: cancels, releases, settlements, renewals and unmetered admissions, in batches.
//!
//! A batch that the limiter did not take is refused as a whole, and the filter sends it again: every entry is idempotent.
//! The metering store can't hold a batch up: what it did not take is told to it later.

use std::collections::HashSet;

use portcullis_decision::ledger::Settled;
use portcullis_decision::operation::OperationId;
use portcullis_decision::wire::{SettleAnswer, SettleRequest};

use crate::decide::Decider;
use crate::limiter::StoreFault;
use crate::locked;
use crate::metering::Cancel;
use crate::unmetered::Admission;

impl Decider {
    /// Tells the limiter, cancels first: what they free may be waited for.
    ///
    /// # Errors
    /// The store's; then parts of the batch may have been carried out.
    pub async fn settle(&self, mut request: SettleRequest) -> Result<SettleAnswer, StoreFault> {
        // A stream that has just ended may have been due for renewal: its slot is given up, not lost.
        let settled = settled(&request);
        let ended: HashSet<_> = settled
            .iter()
            .map(|settled| &settled.op)
            .chain(&request.cancels)
            .collect();
        request.renewals.retain(|op| !ended.contains(op));
        locked(&self.launches).cancel(&request.cancels);
        // Before the filter's own word that a request did go on.
        self.void(&request.cancels).await;
        for unmetered in request.unmetered {
            self.unmetered.add(Admission::told(unmetered));
        }
        self.bills.take(&request.settles);
        let lost = match &self.limiter {
            // Without a limiter no slot was ever taken here, so a stream that renews one has lost it elsewhere.
            None => request.renewals,
            Some(limiter) => {
                if !request.cancels.is_empty() {
                    limiter.cancel(&request.cancels).await?;
                }
                if !settled.is_empty() {
                    limiter.settle(&settled).await?;
                    let replaced = settled.iter().filter(|settled| settled.tokens.is_some()).count();
                    self.metrics.settled.inc_by(u64::try_from(replaced).unwrap_or(u64::MAX));
                }
                if request.renewals.is_empty() {
                    Vec::new()
                } else {
                    limiter.renew(&request.renewals).await?
                }
            }
        };
        self.metrics
            .slot_lost
            .inc_by(u64::try_from(lost.len()).unwrap_or(u64::MAX));
        Ok(SettleAnswer { lost })
    }

    /// Tells the metering store, and the journal, that nobody waits for these decisions.
    async fn void(&self, ops: &[OperationId]) {
        if ops.is_empty() {
            return;
        }
        self.unmetered.void(ops);
        if let Some(meter) = &self.meter
            && meter.cancel(ops, Cancel::Void).await.is_err()
        {
            ops.iter().for_each(|op| self.give_back.voids.later(*op));
        }
    }
}

/// What the limiter is told of the streams that have ended. One that stands under both keys is settled all the same: a
/// release leaves the hold open.
fn settled(request: &SettleRequest) -> Vec<Settled> {
    let released = request.releases.iter().map(|op| Settled { op: *op, tokens: None });
    let used = request.settles.iter().map(|of| Settled {
        op: of.op,
        tokens: of.tokens,
    });
    released.chain(used).collect()
}
