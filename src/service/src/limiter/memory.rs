//! `memory:`: the pure ledger behind a lock, by this process's monotonic clock. A real limiter, for one process.

use std::future::ready;
use std::sync::Mutex;
use std::time::Duration;

use portcullis_decision::charge::{ChargePlan, Charged};
use portcullis_decision::ledger::{Ledger, Settled};
use portcullis_decision::operation::OperationId;
use portcullis_decision::wire::Return;
use tokio::time::Instant;

use super::{Answer, Limiter};
use crate::{locked, millis_since};

/// Counters of this process.
#[derive(Debug)]
pub struct MemoryLimiter {
    epoch: Instant,
    ledger: Mutex<Ledger>,
}

impl Default for MemoryLimiter {
    fn default() -> Self {
        Self {
            epoch: Instant::now(),
            ledger: Mutex::new(Ledger::default()),
        }
    }
}

impl MemoryLimiter {
    /// Runs `step` on the ledger at the present time. The lock is held for microseconds, so waiting for it is no reason
    /// to look at a deadline.
    fn at_once<T: Send + 'static>(&self, step: impl FnOnce(&mut Ledger, u64) -> T) -> Answer<'_, T> {
        let answer = step(&mut locked(&self.ledger), millis_since(self.epoch));
        Box::pin(ready(Ok(answer)))
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl Limiter for MemoryLimiter {
    fn scheme(&self) -> &'static str {
        "memory"
    }

    fn is_shared(&self) -> bool {
        false
    }

    fn charge<'a>(&'a self, plan: &'a ChargePlan, slot_ttl: Duration, _: Instant) -> Answer<'a, Charged> {
        self.at_once(|ledger, now_ms| ledger.charge(now_ms, plan, millis(slot_ttl)))
    }

    fn cancel<'a>(&'a self, ops: &'a [OperationId], _: Instant) -> Answer<'a, ()> {
        self.at_once(|ledger, now_ms| ops.iter().for_each(|op| ledger.cancel(now_ms, *op)))
    }

    fn settle<'a>(&'a self, settled: &'a [Settled], _: Instant) -> Answer<'a, ()> {
        self.at_once(|ledger, _| settled.iter().for_each(|settled| ledger.settle(*settled)))
    }

    fn give_back_parts<'a>(&'a self, parts: &'a [Return], _: Instant) -> Answer<'a, ()> {
        self.at_once(|ledger, _| parts.iter().for_each(|part| ledger.give_back_part(part)))
    }

    fn renew<'a>(&'a self, ops: &'a [OperationId], slot_ttl: Duration, _: Instant) -> Answer<'a, Vec<OperationId>> {
        self.at_once(|ledger, now_ms| {
            ops.iter()
                .copied()
                .filter(|op| !ledger.renew(now_ms, *op, millis(slot_ttl)))
                .collect()
        })
    }

    fn ping(&self, _: Instant) -> Answer<'_, ()> {
        Box::pin(ready(Ok(())))
    }
}
