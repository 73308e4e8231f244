//! What streams leave behind: cancels, releases, settlements, returns, renewals and unmetered admissions, in batches.
//!
//! A batch of which the limiter did not take everything is refused, and the filter sends it again: every entry is idempotent.
//! What is money of it is put down before, and the refusal says so: it need not come again. The metering store can't hold a
//! batch up: what it did not take is told to it later.

use std::collections::HashSet;
use std::future::Future;

use portcullis_decision::ledger::Settled;
use portcullis_decision::operation::OperationId;
use portcullis_decision::wire::{Return, SettleAnswer, SettleRequest};

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
                // Each is tried whatever became of the others: slots must not lapse for a cancel that has failed.
                let call = (!request.cancels.is_empty()).then(|| limiter.cancel(&request.cancels));
                let cancelled = done(call).await;
                let call = (!settled.is_empty()).then(|| limiter.settle(&settled));
                let replaced = done(call).await;
                let call = (!request.returns.is_empty()).then(|| limiter.give_back_parts(&request.returns));
                let returned = done(call).await;
                let call = (!request.renewals.is_empty()).then(|| limiter.renew(&request.renewals));
                let renewed = done(call).await;
                cancelled.and(replaced).and(returned)?;
                let lost = renewed?;
                // Counted when nothing of the batch comes again.
                let replaced = settled.iter().filter(|settled| settled.tokens.is_some()).count();
                self.metrics.settled.inc_by(u64::try_from(replaced).unwrap_or(u64::MAX));
                lost
            }
        };
        self.note_returns(&request.returns);
        self.metrics
            .slot_lost
            .inc_by(u64::try_from(lost.len()).unwrap_or(u64::MAX));
        Ok(SettleAnswer { lost, put_down: false })
    }

    /// Counts what came back of leases, charged ones or not.
    fn note_returns(&self, returns: &[Return]) {
        if returns.is_empty() {
            return;
        }
        self.leases.came_back(returns);
        let requests = returns
            .iter()
            .fold(0_u64, |sum, part| sum.saturating_add(part.requests));
        self.metrics.lease_returned.inc_by(requests);
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

/// What became of a call; of none, nothing.
async fn done<T: Default>(call: Option<impl Future<Output = Result<T, StoreFault>>>) -> Result<T, StoreFault> {
    match call {
        Some(call) => call.await,
        None => Ok(T::default()),
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
