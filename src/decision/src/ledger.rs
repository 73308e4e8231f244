//! The limiter's algorithm over memory: windows, slots, idempotent operations, order-independent cancels, settlements, and
//! blocks of admissions with what is returned of them.
//!
//! This is what `memory:` serves, what `explain` imagines counters with, and the model that the Lua script is compared
//! with. It has no clock: every call says what time it is, in milliseconds on one monotonic scale.

use alloc::string::String;
use alloc::vec::Vec;

use hashbrown::HashMap;

use crate::charge::{ChargeEntry, ChargePlan, Charged, EntryState};
use crate::limits::Resource;
use crate::operation::OperationId;
use crate::wire::Return;

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
    Charged {
        taken: Vec<Taken>,
        /// How many admissions were charged, if a block was asked for.
        block: Option<u64>,
    },
    /// It takes nothing, or nothing more. So does the id under which a part of a block was returned.
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
        part: Part,
    },
    Slot,
}

/// What may still become of an amount. What the request itself takes and what its block does are apart: the request is
/// settled, once, while its block goes back in parts, by other ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// It stays.
    Final,
    /// Tokens that a settlement replaces.
    Hold,
    /// Requests of a block.
    BlockRequests,
    /// Tokens of a block.
    BlockTokens,
}

impl Taken {
    /// Whether this is a block's, and its window is over.
    const fn is_block_over(&self, now_ms: u64) -> bool {
        match self.what {
            Share::Amount {
                window_ends_ms,
                part: Part::BlockRequests | Part::BlockTokens,
                ..
            } => window_ends_ms <= now_ms,
            Share::Amount { .. } | Share::Slot => false,
        }
    }
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
    /// Charges every entry of a plan, or none; as often as a block has admissions. A second charge of one operation changes
    /// nothing and is granted again, with the same block.
    pub fn charge(&mut self, now_ms: u64, plan: &ChargePlan, slot_ttl_ms: u64) -> Charged {
        self.sweep(now_ms);
        match self.operations.get(&plan.op) {
            Some((Operation::Cancelled, _)) => return Charged::Cancelled,
            Some((Operation::Charged { taken, block }, _)) => {
                // A block ends with its windows: in the next ones nothing is charged for it.
                let is_alive = taken.iter().all(|of| !of.is_block_over(now_ms));
                let own = u64::from(!plan.block.is_some_and(|ask| ask.ahead));
                let admissions = block.filter(|_| is_alive).unwrap_or(own);
                let again = |entry| EntryState {
                    exhausted: false,
                    ..self.state(now_ms, entry)
                };
                return granted(plan, admissions, plan.entries.iter().map(again).collect());
            }
            None => {}
        }
        let states: Vec<EntryState> = plan.entries.iter().map(|entry| self.state(now_ms, entry)).collect();
        if states.iter().any(|state| state.exhausted) {
            return Charged::Denied(states);
        }
        let block = plan.asked_block();
        let admissions = block.map_or(1, |ask| ask.size(plan.entries.iter().zip(&states)));
        if admissions == 0 {
            return granted(plan, 0, states);
        }
        let own = u64::from(!block.is_some_and(|ask| ask.ahead));
        let of_block = admissions.saturating_sub(own);
        let mut remembered_until_ms = now_ms.saturating_add(OPERATION_GRACE_MS);
        let mut taken = Vec::with_capacity(plan.entries.len());
        for entry in &plan.entries {
            let ends_ms = if entry.resource == Resource::Concurrency {
                let expires_ms = now_ms.saturating_add(slot_ttl_ms);
                let slots = self.slots.entry(entry.key.clone()).or_default();
                slots.insert(plan.op, expires_ms);
                taken.push(Taken {
                    key: entry.key.clone(),
                    what: Share::Slot,
                });
                expires_ms
            } else {
                let window_ends_ms = self.count(now_ms, entry, entry.cost.saturating_mul(admissions));
                let (hold, of_the_block) = match entry.resource {
                    Resource::Tokens => (Part::Hold, Part::BlockTokens),
                    _ => (Part::Final, Part::BlockRequests),
                };
                let parts = [(own, hold), (of_block, of_the_block)];
                taken.extend(
                    parts
                        .into_iter()
                        .filter(|(times, _)| *times > 0)
                        .map(|(times, part)| Taken {
                            key: entry.key.clone(),
                            what: Share::Amount {
                                amount: entry.cost.saturating_mul(times),
                                window_ends_ms,
                                part,
                            },
                        }),
                );
                window_ends_ms
            };
            remembered_until_ms = remembered_until_ms.max(ends_ms.saturating_add(OPERATION_GRACE_MS));
        }
        let operation = Operation::Charged {
            taken,
            block: block.map(|_| admissions),
        };
        self.operations.insert(plan.op, (operation, remembered_until_ms));
        let states = plan.entries.iter().map(|entry| self.state(now_ms, entry)).collect();
        granted(plan, admissions, states)
    }

    /// Adds an amount to an entry's window; returns when that ends.
    fn count(&mut self, now_ms: u64, entry: &ChargeEntry, amount: u64) -> u64 {
        let fresh = Window {
            used: 0,
            ends_ms: now_ms.saturating_add(entry.window_s.saturating_mul(1000)),
        };
        let window = self.windows.entry(entry.key.clone()).or_insert(fresh);
        if window.ends_ms <= now_ms {
            *window = fresh;
        }
        window.used = window.used.saturating_add(amount);
        window.ends_ms
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
        let Some((Operation::Charged { taken, .. }, _)) = before else {
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
    /// to windows of requests stays, and so does its block. Of an operation that was cancelled, or is not known, nothing is
    /// left to settle.
    pub fn settle(&mut self, settled: Settled) {
        let Some((Operation::Charged { taken, .. }, _)) = self.operations.get_mut(&settled.op) else {
            return;
        };
        for share in taken {
            match &mut share.what {
                Share::Slot => free(&mut self.slots, &share.key, settled.op),
                Share::Amount {
                    amount,
                    window_ends_ms,
                    part,
                } => {
                    let Some(tokens) = settled.tokens.filter(|_| *part == Part::Hold) else {
                        continue;
                    };
                    *part = Part::Final;
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

    /// Gives back a part of a block, once for each id: requests, no more than the block still has, and tokens, of which
    /// fewer than none are charged, over a limit if need be: they are used. Both in the very windows that were charged. What
    /// a later cancel gives back is the rest. Of an operation that was cancelled, or is not known, there is no part.
    pub fn give_back_part(&mut self, of: &Return) {
        if self.operations.contains_key(&of.id) {
            return;
        }
        let Some((Operation::Charged { taken, .. }, until_ms)) = self.operations.get_mut(&of.lease) else {
            return;
        };
        let until_ms = until_ms.saturating_add(OPERATION_GRACE_MS);
        for share in taken {
            let Share::Amount {
                amount,
                window_ends_ms,
                part,
            } = &mut share.what
            else {
                continue;
            };
            let (back, more) = match part {
                Part::BlockRequests => (of.requests, 0),
                Part::BlockTokens if of.tokens < 0 => (0, of.tokens.unsigned_abs()),
                Part::BlockTokens => (of.tokens.unsigned_abs(), 0),
                Part::Final | Part::Hold => continue,
            };
            let window = self.windows.get_mut(&share.key);
            if let Some(window) = window.filter(|window| window.ends_ms == *window_ends_ms) {
                let back = back.min(*amount);
                let rest = window.used.saturating_sub(back);
                window.used = rest.saturating_add(more).min(LARGEST_COUNT);
                *amount = amount
                    .saturating_sub(back)
                    .saturating_add(window.used.saturating_sub(rest));
            }
        }
        self.operations.insert(of.id, (Operation::Cancelled, until_ms));
    }

    /// Prolongs the slots of an operation. Returns false if one had lapsed: it is not revived, since another request may
    /// hold its place.
    pub fn renew(&mut self, now_ms: u64, op: OperationId, slot_ttl_ms: u64) -> bool {
        let Some((Operation::Charged { taken, .. }, remembered_until_ms)) = self.operations.get_mut(&op) else {
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

    /// Forgets an operation that nobody will name again. What it took stays taken: a caller that plays years of requests
    /// would otherwise keep each for its grace.
    pub fn forget(&mut self, op: OperationId) {
        self.operations.remove(&op);
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

/// The answer to a plan of which so many admissions are charged.
fn granted(plan: &ChargePlan, admissions: u64, states: Vec<EntryState>) -> Charged {
    match plan.asked_block() {
        Some(_) => Charged::Block { admissions, states },
        None => Charged::Granted(states),
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
