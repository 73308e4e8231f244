//! The limiter's algorithm over memory: windows, slots, idempotent operations, order-independent cancels, settlements.
//!
//! This is what `memory:` serves, what `explain` imagines counters with, and the model that the Lua script is compared
//! with. It has no clock: every call says what time it is, in milliseconds on one monotonic scale.

use alloc::string::String;
use alloc::vec::Vec;

use hashbrown::HashMap;

use crate::charge::{ChargeEntry, ChargePlan, Charged, EntryState};
use crate::limits::Resource;
use crate::operation::OperationId;

/// Between two sweeps for what has expired, in milliseconds.
const SWEEP_INTERVAL_MS: u64 = 1_000;
/// How long an operation is remembered beyond what it took, in milliseconds: longer than any retry or late cancel.
const OPERATION_GRACE_MS: u64 = 60_000;
/// The most that a counter holds: one above every limit, and the last of the integers that a store whose numbers are
/// doubles tells apart. A settlement may go over a limit, and not over this.
pub const LARGEST_COUNT: u64 = 1 << 53;

/// How an operation ended: its stream is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settled {
    /// Whose slots are free again.
    pub op: OperationId,
    /// What each of its token windows is charged in place of its hold; `None` leaves the hold charged.
    pub tokens: Option<u64>,
}

#[derive(Debug, Clone, Copy)]
struct Window {
    used: u64,
    ends_ms: u64,
}

#[derive(Debug, Clone)]
enum Operation {
    Charged(Vec<Taken>),
    Cancelled,
}

#[derive(Debug, Clone)]
struct Taken {
    key: String,
    what: Share,
}

#[derive(Debug, Clone, Copy)]
enum Share {
    /// An amount of the window that ends then; a later window of the same key is another one.
    Amount {
        amount: u64,
        window_ends_ms: u64,
        /// A hold of tokens that was not settled yet.
        is_open: bool,
    },
    Slot,
}

/// Counters, slots and operations.
#[derive(Debug, Clone, Default)]
pub struct Ledger {
    windows: HashMap<String, Window>,
    slots: HashMap<String, HashMap<OperationId, u64>>,
    operations: HashMap<OperationId, (Operation, u64)>,
    next_sweep_ms: u64,
}

impl Ledger {
    /// Charges every entry of a plan, or none. A second charge of one operation changes nothing and is granted again.
    pub fn charge(&mut self, now_ms: u64, plan: &ChargePlan, slot_ttl_ms: u64) -> Charged {
        self.sweep(now_ms);
        match self.operations.get(&plan.op) {
            Some((Operation::Cancelled, _)) => return Charged::Cancelled,
            Some((Operation::Charged(_), _)) => {
                let again = |entry| EntryState {
                    exhausted: false,
                    ..self.state(now_ms, entry)
                };
                return Charged::Granted(plan.entries.iter().map(again).collect());
            }
            None => {}
        }
        let states: Vec<EntryState> = plan.entries.iter().map(|entry| self.state(now_ms, entry)).collect();
        if states.iter().any(|state| state.exhausted) {
            return Charged::Denied(states);
        }
        let mut remembered_until_ms = now_ms.saturating_add(OPERATION_GRACE_MS);
        let mut taken = Vec::with_capacity(plan.entries.len());
        for entry in &plan.entries {
            let (what, ends_ms) = self.take(now_ms, plan.op, entry, slot_ttl_ms);
            taken.push(Taken {
                key: entry.key.clone(),
                what,
            });
            remembered_until_ms = remembered_until_ms.max(ends_ms.saturating_add(OPERATION_GRACE_MS));
        }
        self.operations
            .insert(plan.op, (Operation::Charged(taken), remembered_until_ms));
        Charged::Granted(plan.entries.iter().map(|entry| self.state(now_ms, entry)).collect())
    }

    /// Takes one entry; returns what was taken and when it ends.
    fn take(&mut self, now_ms: u64, op: OperationId, entry: &ChargeEntry, slot_ttl_ms: u64) -> (Share, u64) {
        if entry.resource == Resource::Concurrency {
            let expires_ms = now_ms.saturating_add(slot_ttl_ms);
            self.slots.entry(entry.key.clone()).or_default().insert(op, expires_ms);
            return (Share::Slot, expires_ms);
        }
        let fresh = Window {
            used: 0,
            ends_ms: now_ms.saturating_add(entry.window_s.saturating_mul(1000)),
        };
        let window = self.windows.entry(entry.key.clone()).or_insert(fresh);
        if window.ends_ms <= now_ms {
            *window = fresh;
        }
        window.used = window.used.saturating_add(entry.cost);
        (
            Share::Amount {
                amount: entry.cost,
                window_ends_ms: window.ends_ms,
                is_open: entry.resource == Resource::Tokens,
            },
            window.ends_ms,
        )
    }

    fn state(&self, now_ms: u64, entry: &ChargeEntry) -> EntryState {
        let whole_ms = entry.window_s.saturating_mul(1000);
        let (used, reset_ms) = if entry.resource == Resource::Concurrency {
            let live = |slots: &HashMap<OperationId, u64>| slots.values().filter(|expires| **expires > now_ms).count();
            let held = self.slots.get(&entry.key).map_or(0, live);
            (u64::try_from(held).unwrap_or(u64::MAX), 0)
        } else {
            match self.windows.get(&entry.key).filter(|window| window.ends_ms > now_ms) {
                Some(window) => (window.used, window.ends_ms.saturating_sub(now_ms)),
                None => (0, whole_ms),
            }
        };
        let exhausted = entry.limit == 0 || used.saturating_add(entry.cost) > entry.limit;
        EntryState {
            used,
            reset_ms,
            exhausted,
        }
    }

    /// Gives back all that an operation took, and keeps it from taking anything later. Idempotent.
    pub fn cancel(&mut self, now_ms: u64, op: OperationId) {
        let until_ms = now_ms.saturating_add(OPERATION_GRACE_MS);
        let before = self.operations.insert(op, (Operation::Cancelled, until_ms));
        let Some((Operation::Charged(taken), _)) = before else {
            return;
        };
        for share in taken {
            match share.what {
                Share::Slot => free(&mut self.slots, &share.key, op),
                Share::Amount {
                    amount, window_ends_ms, ..
                } => {
                    let window = self.windows.get_mut(&share.key);
                    if let Some(window) = window.filter(|window| window.ends_ms == window_ends_ms) {
                        window.used = window.used.saturating_sub(amount);
                    }
                }
            }
        }
    }

    /// Frees the slots of an operation and, if told the tokens, replaces what it charged to token windows by them. That
    /// happens once, to the very windows that were charged, and may go over a limit: the tokens are used. What it charged
    /// to windows of requests stays. Of an operation that was cancelled, or is not known, nothing is left to settle.
    pub fn settle(&mut self, settled: Settled) {
        let Some((Operation::Charged(taken), _)) = self.operations.get_mut(&settled.op) else {
            return;
        };
        for share in taken {
            match &mut share.what {
                Share::Slot => free(&mut self.slots, &share.key, settled.op),
                Share::Amount {
                    amount,
                    window_ends_ms,
                    is_open,
                } => {
                    let Some(tokens) = settled.tokens.filter(|_| *is_open) else {
                        continue;
                    };
                    *is_open = false;
                    let window = self.windows.get_mut(&share.key);
                    if let Some(window) = window.filter(|window| window.ends_ms == *window_ends_ms) {
                        let others = window.used.saturating_sub(*amount);
                        window.used = others.saturating_add(tokens).min(LARGEST_COUNT);
                        // What a later cancel gives back.
                        *amount = window.used.saturating_sub(others);
                    }
                }
            }
        }
    }

    /// Prolongs the slots of an operation. Returns false if one had lapsed: it is not revived, since another request may
    /// hold its place.
    pub fn renew(&mut self, now_ms: u64, op: OperationId, slot_ttl_ms: u64) -> bool {
        let Some((Operation::Charged(taken), remembered_until_ms)) = self.operations.get_mut(&op) else {
            return false;
        };
        let expires_ms = now_ms.saturating_add(slot_ttl_ms);
        *remembered_until_ms = (*remembered_until_ms).max(expires_ms.saturating_add(OPERATION_GRACE_MS));
        let mut kept = true;
        for share in taken.iter().filter(|share| matches!(share.what, Share::Slot)) {
            match self.slots.get_mut(&share.key).and_then(|slots| slots.get_mut(&op)) {
                Some(expires) if *expires > now_ms => *expires = expires_ms,
                _ => kept = false,
            }
        }
        kept
    }

    /// Counters, sets of slots and operations that are kept, for a gauge.
    pub fn sizes(&self) -> (usize, usize, usize) {
        (self.windows.len(), self.slots.len(), self.operations.len())
    }

    fn sweep(&mut self, now_ms: u64) {
        if now_ms < self.next_sweep_ms {
            return;
        }
        self.next_sweep_ms = now_ms.saturating_add(SWEEP_INTERVAL_MS);
        self.windows.retain(|_, window| window.ends_ms > now_ms);
        self.slots.retain(|_, slots| {
            slots.retain(|_, expires| *expires > now_ms);
            !slots.is_empty()
        });
        self.operations.retain(|_, (_, until_ms)| *until_ms > now_ms);
    }
}

fn free(slots: &mut HashMap<String, HashMap<OperationId, u64>>, key: &str, op: OperationId) {
    if let Some(holders) = slots.get_mut(key) {
        holders.remove(&op);
        if holders.is_empty() {
            slots.remove(key);
        }
    }
}

#[cfg(test)]
mod tests;
