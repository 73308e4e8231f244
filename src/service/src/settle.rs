//! What streams leave behind: cancels, releases and renewals, in batches.
//!
//! A batch that the limiter did not take is refused as a whole, and the filter sends it again: every entry is idempotent.

use portcullis_decision::wire::{SettleAnswer, SettleRequest};

use crate::decide::Decider;
use crate::limiter::StoreFault;

impl Decider {
    /// Tells the limiter, cancels first: what they free may be waited for.
    ///
    /// # Errors
    /// The store's; then parts of the batch may have been carried out.
    pub async fn settle(&self, request: SettleRequest) -> Result<SettleAnswer, StoreFault> {
        let lost = match &self.limiter {
            // Without a limiter no slot was ever taken here, so a stream that renews one has lost it elsewhere.
            None => request.renewals,
            Some(limiter) => {
                if !request.cancels.is_empty() {
                    limiter.cancel(&request.cancels).await?;
                }
                if !request.releases.is_empty() {
                    limiter.release(&request.releases).await?;
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
}
