//! Leases: blocks of admissions that the service has charged for one bundle, handed out by the filter from the host's
//! memory, across all its workers, without a callout.
//!
//! ```text
//! take ──▶ Leased        one admission of a block, by compare-and-swap
//!     ├──▶ Denied        what the service has denied, for as long as it is remembered
//!     └──▶ Ask           nothing to hand out: a callout decides, and one asker at a time also fetches a block
//! ```
//!
//! - A bundle is a subject with its limits under one configuration: what makes two requests alike to every gate.
//! - No share is kept in a VM's own memory: it would strand admissions. Whatever a host does to the memory (drops a value,
//!   hands out another's, loses a race) costs at most admissions that nobody hands out; never one too many, since only a
//!   write that the host says has replaced what was read hands one out.
//! - What a block has left at its end is returned to the service by whoever takes it out of the slot, once. What is lost
//!   with a process lapses with its window.
//! - Two slots are looked at for each bundle, and a bundle never displaces another one that is alive: then it stays exact.
//!
//! Left out on purpose: how large a block is, which is the service's to say; and clocks.

mod bundle;
mod handout;
mod slot;
#[cfg(test)]
pub(crate) mod tests;

use alloc::vec::Vec;

use bundle::is_same;
pub use bundle::{Bundle, are_leasable, is_leasable};
use handout::{Handout, Spending};
use slot::{Block, MOST_BLOCKS, Remembered, Seen, Slot, owner_of};

use crate::limits::Resource;
use crate::operation::OperationId;
use crate::verdict::{Denial, Grant, LimitState};
use crate::wire::Return;

/// How often a write that lost a race is tried, in all. Then the request is decided by a callout.
const ATTEMPTS: usize = 8;
/// How long after its end a block may be taken out by anybody: whoever fetched it is gone.
const ORPHANED_MS: u64 = 1_000;
/// The longest that any configuration lets a lease get or a fetch take. What lasts longer was written by another clock: a
/// worker whose monotonic clock fails goes on with the wall clock.
const LONGEST_MS: u64 = 60_000;

/// The host's memory, which all workers share. Slots are numbered; a slot's version changes with every write. As the
/// methods are given, there is no such memory, and every decision is exact.
pub trait SharedMemory {
    /// The value of a slot and its version; `Ok(None)` if there is none.
    ///
    /// # Errors
    /// The host has no such memory.
    fn get(&mut self, _slot: u64) -> Result<Option<(Vec<u8>, u32)>, NoMemory> {
        Err(NoMemory)
    }

    /// Replaces a slot's value if its version is still this one; 0 for a slot without a value.
    fn set(&mut self, _slot: u64, _value: &[u8], _version: u32) -> Written {
        Written::Refused
    }
}

/// What a host is asked for in the middle of an event.
pub trait Host: SharedMemory {
    /// 128 random bits, or `None` if it has none.
    fn random(&mut self) -> Option<[u8; 16]>;

    /// Seconds since 1970 (UTC), or `None` if it has no such clock.
    fn unix_s(&mut self) -> Option<u64>;
}

/// The slot in which the gateway's own id stands, whatever the configuration.
pub const GATEWAY_SLOT: u64 = u64::MAX;

/// The host has no memory that its workers share: every decision is a callout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoMemory;

/// What became of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// It took place.
    Done,
    /// Somebody else has written since.
    Raced,
    /// The host refused.
    Refused,
}

/// One admission of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// The operation that charged the block.
    pub lease: OperationId,
    /// Tokens that the request holds of it; `None` if no token limit binds.
    pub held_tokens: Option<u64>,
    /// The tightest limit, as far as this gateway knows, if the service told one.
    pub tightest: Option<LimitState>,
    /// The block is half handed out, and it falls to this request to have the next one fetched.
    pub fetch: bool,
}

/// What the memory says about a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Take {
    /// It may go on.
    Leased(Share),
    /// It was denied, a moment ago, to one just like it.
    Denied(Denial),
    /// A callout has to decide; with `fetch` it should bring a block.
    Ask {
        /// Nobody else is fetching one.
        fetch: bool,
    },
}

/// Where a block stands, for its return.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installed {
    slot: u64,
    bundle: Vec<u8>,
    lease: OperationId,
    /// When it ends.
    pub ends_ms: u64,
}

/// What a block has left: to be returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unspent {
    /// The operation that charged the block.
    pub lease: OperationId,
    /// Requests that nobody made.
    pub requests: u64,
    /// Tokens that nobody holds.
    pub tokens: u64,
}

impl Unspent {
    fn of(block: &Block) -> Self {
        Self {
            lease: block.op,
            requests: block.requests,
            tokens: block.tokens.unwrap_or(0),
        }
    }

    /// As it is told, under an id of its own.
    pub fn told(self, id: OperationId) -> Option<Return> {
        (self.requests > 0 || self.tokens > 0).then(|| Return {
            id,
            lease: self.lease,
            requests: self.requests,
            tokens: i64::try_from(self.tokens).unwrap_or(i64::MAX),
        })
    }
}

/// A slot that is the bundle's, or free for it.
struct Found {
    at: u64,
    /// Its value if it is the bundle's, and otherwise nothing.
    value: Vec<u8>,
    version: u32,
}

impl Found {
    fn slot(&self) -> Slot {
        Slot::decode(&self.value).map_or_else(Slot::default, |(_, slot)| slot)
    }
}

/// Reads a slot; `Ok(None)` if another bundle lives there.
fn look(memory: &mut dyn SharedMemory, at: u64, bundle: &[u8], now_ms: u64) -> Result<Option<Found>, NoMemory> {
    let (mut value, version) = memory.get(at)?.unwrap_or_default();
    if !owner_of(&value).is_some_and(|owner| is_same(owner, bundle)) {
        if Slot::decode(&value).is_some_and(|(_, other)| other.is_alive(now_ms)) {
            return Ok(None);
        }
        value.clear();
    }
    Ok(Some(Found { at, value, version }))
}

/// Reads the bundle's slot: the first of its two that is its own or free.
fn find(memory: &mut dyn SharedMemory, bundle: &Bundle, now_ms: u64) -> Result<Option<Found>, NoMemory> {
    for at in bundle.slots {
        if let Some(found) = look(memory, at, &bundle.key, now_ms)? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// How long nobody asks for a block after an answer that has brought none: demand may have grown by then.
const PAUSE_MS: u64 = 50;

/// A fetch was answered and has brought no block. Somebody may ask again, sooner than after one that is never answered.
pub fn nothing_came(memory: &mut dyn SharedMemory, bundle: &Bundle, times: Times) {
    for _ in 0..ATTEMPTS {
        let Ok(Some(found)) = find(memory, bundle, times.now_ms) else {
            return;
        };
        let mut slot = found.slot();
        let until_ms = times.now_ms.saturating_add(PAUSE_MS);
        if slot.fetching_until_ms <= until_ms {
            return;
        }
        slot.fetching_until_ms = until_ms;
        match memory.set(found.at, &slot.encode(&bundle.key), found.version) {
            Written::Raced => {}
            Written::Done | Written::Refused => return,
        }
    }
}

/// What time a lease may be used and remembered, in milliseconds.
#[derive(Debug, Clone, Copy)]
pub struct Times {
    /// Now.
    pub now_ms: u64,
    /// The oldest that anything gets.
    pub max_age_ms: u64,
    /// How long fetching takes at most.
    pub fetch_ms: u64,
}

/// Hands out one admission of the bundle, or says why not. `hold` is what the request may use, in tokens. What has to be
/// returned on the way is added to `returns`.
pub fn take(
    memory: &mut dyn SharedMemory,
    bundle: &Bundle,
    hold: u64,
    times: Times,
    returns: &mut Vec<Unspent>,
) -> Take {
    let exact = Take::Ask { fetch: false };
    for _ in 0..ATTEMPTS {
        let Ok(Some(mut found)) = find(memory, bundle, times.now_ms) else {
            return exact;
        };
        if let Some(share) = Handout::of(&mut found.value).and_then(|handout| handout.spend(hold, times)) {
            match memory.set(found.at, &found.value, found.version) {
                Written::Done => return Take::Leased(share),
                Written::Raced => continue,
                Written::Refused => return exact,
            }
        }
        let mut slot = found.slot();
        let gone = slot.take_orphans(times.now_ms);
        // What is charged already comes first, whatever was denied since.
        let taken = match slot.spend(hold, times) {
            Some((share, leftover)) => (Take::Leased(share), leftover),
            None => {
                if let Some(denial) = slot.denied(hold, times) {
                    return Take::Denied(denial);
                }
                // A slot that is full has no place for another block.
                if is_fetching(slot.fetching_until_ms, times) || slot.blocks.len() >= MOST_BLOCKS {
                    return exact;
                }
                slot.fetching_until_ms = times.now_ms.saturating_add(times.fetch_ms);
                (Take::Ask { fetch: true }, None)
            }
        };
        match memory.set(found.at, &slot.encode(&bundle.key), found.version) {
            Written::Done => {
                returns.extend(gone);
                returns.extend(taken.1);
                return taken.0;
            }
            Written::Raced => {}
            Written::Refused => return exact,
        }
    }
    exact
}

impl Block {
    /// Nobody looks after it any more.
    const fn is_orphan(&self, now_ms: u64) -> bool {
        now_ms >= self.ends_ms.saturating_add(ORPHANED_MS)
            || self.ends_ms > now_ms.saturating_add(LONGEST_MS + ORPHANED_MS)
    }
}

/// Somebody fetches a block, and says until when.
const fn is_fetching(until_ms: u64, times: Times) -> bool {
    lasts(until_ms, times.now_ms)
}

/// A time that is still to come, by a clock that is ours.
const fn lasts(until_ms: u64, now_ms: u64) -> bool {
    now_ms < until_ms && until_ms <= now_ms.saturating_add(LONGEST_MS)
}

impl Slot {
    /// Its bundle still needs it.
    fn is_alive(&self, now_ms: u64) -> bool {
        self.blocks.iter().any(|block| !block.is_orphan(now_ms))
            || lasts(self.fetching_until_ms, now_ms)
            || self
                .remembered
                .as_ref()
                .is_some_and(|remembered| lasts(remembered.until_ms, now_ms))
    }

    fn denied(&self, hold: u64, times: Times) -> Option<Denial> {
        let remembered = self.remembered.as_ref()?;
        // A time from another clock, or another life of the host, is none of ours.
        let is_ours = remembered.until_ms <= times.now_ms.saturating_add(times.max_age_ms);
        if !is_ours || times.now_ms >= remembered.until_ms || hold < remembered.hold {
            return None;
        }
        Some(
            remembered
                .denial
                .later(times.now_ms.saturating_sub(remembered.since_ms)),
        )
    }

    /// Takes out blocks that nobody looks after any more.
    fn take_orphans(&mut self, now_ms: u64) -> Vec<Unspent> {
        let is_orphan = |block: &Block| block.is_orphan(now_ms);
        let gone = self
            .blocks
            .iter()
            .filter(|block| is_orphan(block))
            .map(Unspent::of)
            .collect();
        self.blocks.retain(|block| !is_orphan(block));
        gone
    }

    /// One admission, and what is left of its block if it was the last one.
    fn spend(&mut self, hold: u64, times: Times) -> Option<(Share, Option<Unspent>)> {
        let spending = Spending::of(self.blocks.iter().copied(), self.fetching_until_ms, hold, times)?;
        let share = spending.share(self.seen.as_ref(), times.now_ms);
        if spending.fetch {
            self.fetching_until_ms = times.now_ms.saturating_add(times.fetch_ms);
        }
        let leftover = if spending.block.requests == 0 {
            self.blocks.remove(spending.at);
            Some(Unspent::of(&spending.block))
        } else {
            if let Some(block) = self.blocks.get_mut(spending.at) {
                *block = spending.block;
            }
            None
        };
        Some((share, leftover))
    }

    /// Requests that can still be handed out.
    fn left(&self, times: Times) -> u64 {
        let alive = self.blocks.iter().filter(|block| times.now_ms < block.ends_ms);
        alive.fold(0, |sum: u64, block| sum.saturating_add(block.requests))
    }
}

/// A block that the service has granted.
#[derive(Debug, Clone, Copy)]
pub struct Fetched {
    /// The operation that charged it.
    pub lease: OperationId,
    /// What it holds.
    pub grant: Grant,
    /// The tightest limit, as it is told to clients.
    pub tightest: Option<LimitState>,
    /// When it was asked for.
    pub asked_ms: u64,
}

/// Puts a block into the bundle's slot. What has to be returned, the block itself if it found no place, is added to
/// `returns`.
pub fn install(
    memory: &mut dyn SharedMemory,
    bundle: &Bundle,
    fetched: Fetched,
    times: Times,
    returns: &mut Vec<Unspent>,
) -> Option<Installed> {
    let Fetched {
        lease,
        grant,
        tightest,
        asked_ms,
    } = fetched;
    let block = Block {
        op: lease,
        requests: grant.requests,
        granted: grant.requests,
        tokens: grant.tokens,
        largest_hold: grant.largest_hold.unwrap_or(u64::MAX),
        // From when it was asked for: the service's time cannot have begun earlier.
        ends_ms: asked_ms.saturating_add(grant.ends_in_ms.min(times.max_age_ms)),
    };
    for _ in 0..ATTEMPTS {
        let Ok(Some(found)) = find(memory, bundle, times.now_ms) else {
            break;
        };
        let mut slot = found.slot();
        let gone = slot.take_orphans(times.now_ms);
        if slot.blocks.len() >= MOST_BLOCKS || times.now_ms >= block.ends_ms {
            break;
        }
        slot.blocks.push(block);
        slot.fetching_until_ms = 0;
        slot.remembered = None;
        slot.seen = tightest.map(|tightest| Seen {
            tightest,
            at_ms: asked_ms,
        });
        match memory.set(found.at, &slot.encode(&bundle.key), found.version) {
            Written::Done => {
                returns.extend(gone);
                return Some(Installed {
                    slot: found.at,
                    bundle: bundle.key.clone(),
                    lease,
                    ends_ms: block.ends_ms,
                });
            }
            Written::Raced => {}
            Written::Refused => break,
        }
    }
    returns.push(Unspent::of(&block));
    None
}

/// Remembers what the service has denied a request of the bundle that would have held `hold` tokens. Only what a limit
/// denied is remembered: a policy's answer has an age of its own, which is not told.
pub fn remember(memory: &mut dyn SharedMemory, bundle: &Bundle, denial: &Denial, hold: u64, times: Times) {
    // Slots come free at any time.
    let Some(limit) = denial.limit.filter(|limit| limit.resource != Resource::Concurrency) else {
        return;
    };
    let ms = limit.reset_ms.min(times.max_age_ms);
    for _ in 0..ATTEMPTS {
        let Ok(Some(found)) = find(memory, bundle, times.now_ms) else {
            return;
        };
        let mut slot = found.slot();
        let is_of_tokens = limit.resource == Resource::Tokens;
        // Admissions that are still there, or on their way, are worth more than the denial.
        if slot.left(times) > 0 && !is_of_tokens {
            return;
        }
        slot.fetching_until_ms = 0;
        slot.remembered = Some(Remembered {
            denial: denial.clone(),
            hold: if is_of_tokens { hold } else { 0 },
            since_ms: times.now_ms,
            until_ms: times.now_ms.saturating_add(ms),
        });
        match memory.set(found.at, &slot.encode(&bundle.key), found.version) {
            Written::Raced => {}
            Written::Done | Written::Refused => return,
        }
    }
}

/// Takes a block out of its slot; what it has left has to be returned.
pub fn retire(memory: &mut dyn SharedMemory, installed: &Installed, now_ms: u64) -> Option<Unspent> {
    for _ in 0..ATTEMPTS {
        let found = look(memory, installed.slot, &installed.bundle, now_ms).ok()??;
        let mut slot = found.slot();
        let at = slot.blocks.iter().position(|block| block.op == installed.lease)?;
        let block = slot.blocks.remove(at);
        match memory.set(found.at, &slot.encode(&installed.bundle), found.version) {
            Written::Done => return Some(Unspent::of(&block)),
            Written::Raced => {}
            Written::Refused => return None,
        }
    }
    None
}
