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

mod slot;
#[cfg(test)]
pub(crate) mod tests;

use alloc::vec::Vec;

use slot::{Block, MOST_BLOCKS, Remembered, Seen, Slot};

use crate::limits::{Limit, Resource, Scope, StampedLimits};
use crate::operation::OperationId;
use crate::rules::{Gate, Rules};
use crate::verdict::{Denial, Grant, LimitState};
use crate::wire::{Return, Subject};

/// How often a write that lost a race is tried, in all. Then the request is decided by a callout.
const ATTEMPTS: usize = 8;
/// How long after its end a block may be taken out by anybody: whoever fetched it is gone.
const ORPHANED_MS: u64 = 1_000;
/// The longest that any configuration lets a lease get or a fetch take. What lasts longer was written by another clock: a
/// worker whose monotonic clock fails goes on with the wall clock.
const LONGEST_MS: u64 = 60_000;

/// The host's memory, which all workers share. Slots are numbered; a slot's version changes with every write.
pub trait SharedMemory {
    /// The value of a slot and its version; `Ok(None)` if there is none.
    ///
    /// # Errors
    /// The host has no such memory.
    fn get(&mut self, slot: u64) -> Result<Option<(Vec<u8>, u32)>, NoMemory>;

    /// Replaces a slot's value if its version is still this one; 0 for a slot without a value.
    fn set(&mut self, slot: u64, value: &[u8], version: u32) -> Written;
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

/// What makes two requests alike: the key of their lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bundle {
    key: Vec<u8>,
    slots: [u64; 2],
}

impl Bundle {
    /// The bundle of a request under rules that [`are_leasable`]; `None` if its limits take slots, which are held for the
    /// length of a stream. `configuration` tells configurations apart, `slots` is how many slots there are.
    pub fn of(subject: &Subject, limits: &StampedLimits, configuration: &str, slots: u64) -> Option<Self> {
        let takes_slots = |scope: &Scope| limits.of(*scope).concurrency != Limit::Unlimited;
        if Scope::CONTRACT.iter().any(takes_slots) {
            return None;
        }
        let mut key = Vec::with_capacity(128);
        let mut part = |text: Option<&str>| {
            // Absent and empty are different, and no text can look like the end of another.
            let length = text.map_or(u16::MAX, |text| u16::try_from(text.len()).unwrap_or(u16::MAX));
            key.extend_from_slice(&length.to_le_bytes());
            key.extend_from_slice(text.unwrap_or_default().as_bytes());
        };
        part(Some(configuration));
        part(Some(&subject.owner));
        for id in [
            &subject.org,
            &subject.auth,
            &subject.graph,
            &subject.lane,
            &subject.model,
        ] {
            part(id.as_deref());
        }
        for scope in Scope::CONTRACT {
            for resource in [Resource::Requests, Resource::Tokens] {
                let figure = limits.of(scope).get(resource).figure();
                key.extend_from_slice(&figure.unwrap_or(u64::MAX).to_le_bytes());
            }
        }
        let hash = hash(&key);
        let slots = [hash.checked_rem(slots)?, hash.rotate_left(32).checked_rem(slots)?];
        Some(Self { key, slots })
    }
}

/// Whether rules can be leased at all: gates that hold something for the length of a stream, or that count each run, can't.
pub fn are_leasable(rules: &Rules) -> bool {
    rules.gates.iter().all(|rule| is_leasable(rule.gate()))
}

/// Whether what a gate says of one request it says of the next ones like it.
pub const fn is_leasable(gate: Gate) -> bool {
    matches!(
        gate,
        Gate::OrgStatus | Gate::ModelPolicy | Gate::Capacity | Gate::Contract
    )
}

/// FNV-1a, with its bits mixed once more: neighbouring keys must not share both of their slots.
fn hash(bytes: &[u8]) -> u64 {
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let mixed = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    mixed ^ (mixed >> 33)
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

/// A slot as it was read.
struct Read {
    slot: Slot,
    version: u32,
    /// Another bundle lives here.
    is_taken: bool,
}

fn read(memory: &mut dyn SharedMemory, at: u64, bundle: &[u8], now_ms: u64) -> Result<Read, NoMemory> {
    let Some((bytes, version)) = memory.get(at)? else {
        return Ok(Read {
            slot: Slot::default(),
            version: 0,
            is_taken: false,
        });
    };
    let (slot, is_taken) = match Slot::decode(&bytes) {
        Some((owner, slot)) if owner == bundle => (slot, false),
        Some((_, other)) => {
            let lasts = |until_ms: u64| now_ms < until_ms && until_ms <= now_ms.saturating_add(LONGEST_MS);
            let is_taken = other.blocks.iter().any(|block| !block.is_orphan(now_ms))
                || lasts(other.fetching_until_ms)
                || other.remembered.is_some_and(|remembered| lasts(remembered.until_ms));
            (Slot::default(), is_taken)
        }
        None => (Slot::default(), false),
    };
    Ok(Read {
        slot,
        version,
        is_taken,
    })
}

/// Reads the bundle's slot: the first of its two that is its own or free.
fn find(memory: &mut dyn SharedMemory, bundle: &Bundle, now_ms: u64) -> Result<Option<(u64, Read)>, NoMemory> {
    for at in bundle.slots {
        let read = read(memory, at, &bundle.key, now_ms)?;
        if !read.is_taken {
            return Ok(Some((at, read)));
        }
    }
    Ok(None)
}

/// How long nobody asks for a block after an answer that has brought none: demand may have grown by then.
const PAUSE_MS: u64 = 50;

/// A fetch was answered and has brought no block. Somebody may ask again, sooner than after one that is never answered.
pub fn nothing_came(memory: &mut dyn SharedMemory, bundle: &Bundle, times: Times) {
    for _ in 0..ATTEMPTS {
        let Ok(Some((at, mut read))) = find(memory, bundle, times.now_ms) else {
            return;
        };
        let until_ms = times.now_ms.saturating_add(PAUSE_MS);
        if read.slot.fetching_until_ms <= until_ms {
            return;
        }
        read.slot.fetching_until_ms = until_ms;
        match memory.set(at, &read.slot.encode(&bundle.key), read.version) {
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
        let Ok(Some((at, mut read))) = find(memory, bundle, times.now_ms) else {
            return exact;
        };
        let slot = &mut read.slot;
        let gone = slot.take_orphans(times.now_ms);
        // What is charged already comes first, whatever was denied since.
        let taken = match slot.spend(hold, times) {
            Some((share, leftover)) => (Take::Leased(share), leftover),
            None => {
                if let Some(denial) = slot.denied(hold, times) {
                    return Take::Denied(denial);
                }
                // A slot that is full has no place for another block.
                if slot.is_fetching(times) || slot.blocks.len() >= MOST_BLOCKS {
                    return exact;
                }
                slot.fetching_until_ms = times.now_ms.saturating_add(times.fetch_ms);
                (Take::Ask { fetch: true }, None)
            }
        };
        match memory.set(at, &slot.encode(&bundle.key), read.version) {
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

impl Slot {
    /// Somebody fetches a block.
    const fn is_fetching(&self, times: Times) -> bool {
        times.now_ms < self.fetching_until_ms && self.fetching_until_ms <= times.now_ms.saturating_add(LONGEST_MS)
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

    /// One admission, of the block that ends first; and what is left of that block if it was the last one.
    fn spend(&mut self, hold: u64, times: Times) -> Option<(Share, Option<Unspent>)> {
        let Times { now_ms, max_age_ms, .. } = times;
        let fits = |block: &Block| {
            let is_alive = now_ms < block.ends_ms && block.ends_ms <= now_ms.saturating_add(max_age_ms);
            let held = hold.min(block.largest_hold);
            is_alive && block.requests > 0 && block.tokens.is_none_or(|tokens| tokens >= held)
        };
        let (at, block) = self
            .blocks
            .iter_mut()
            .enumerate()
            .filter(|(_, block)| fits(block))
            .min_by_key(|(_, block)| block.ends_ms)?;
        let held_tokens = block.tokens.map(|_| hold.min(block.largest_hold));
        block.requests = block.requests.saturating_sub(1);
        block.tokens = block
            .tokens
            .map(|tokens| tokens.saturating_sub(held_tokens.unwrap_or(0)));
        let block = *block;
        let leftover = if block.requests == 0 {
            self.blocks.remove(at);
            Some(Unspent::of(&block))
        } else {
            None
        };
        let left = self.left(times);
        let fetch = !self.is_fetching(times) && left <= block.granted.checked_div(2).unwrap_or(0);
        if fetch {
            self.fetching_until_ms = now_ms.saturating_add(times.fetch_ms);
        }
        let tightest = self.seen.map(|seen| {
            let passed_ms = now_ms.saturating_sub(seen.at_ms);
            LimitState {
                remaining: match seen.tightest.resource {
                    Resource::Requests => seen.tightest.remaining.saturating_add(left),
                    _ => seen.tightest.remaining,
                },
                reset_ms: seen.tightest.reset_ms.saturating_sub(passed_ms),
                ..seen.tightest
            }
        });
        let share = Share {
            lease: block.op,
            held_tokens,
            tightest,
            fetch,
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
        let Ok(Some((at, mut read))) = find(memory, bundle, times.now_ms) else {
            break;
        };
        let slot = &mut read.slot;
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
        match memory.set(at, &slot.encode(&bundle.key), read.version) {
            Written::Done => {
                returns.extend(gone);
                return Some(Installed {
                    slot: at,
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
        let Ok(Some((at, mut read))) = find(memory, bundle, times.now_ms) else {
            return;
        };
        let is_of_tokens = limit.resource == Resource::Tokens;
        // Admissions that are still there, or on their way, are worth more than the denial.
        if read.slot.left(times) > 0 && !is_of_tokens {
            return;
        }
        read.slot.fetching_until_ms = 0;
        read.slot.remembered = Some(Remembered {
            denial: denial.clone(),
            hold: if is_of_tokens { hold } else { 0 },
            since_ms: times.now_ms,
            until_ms: times.now_ms.saturating_add(ms),
        });
        match memory.set(at, &read.slot.encode(&bundle.key), read.version) {
            Written::Raced => {}
            Written::Done | Written::Refused => return,
        }
    }
}

/// Takes a block out of its slot; what it has left has to be returned.
pub fn retire(memory: &mut dyn SharedMemory, installed: &Installed, now_ms: u64) -> Option<Unspent> {
    for _ in 0..ATTEMPTS {
        let mut read = read(memory, installed.slot, &installed.bundle, now_ms).ok()?;
        let at = read.slot.blocks.iter().position(|block| block.op == installed.lease)?;
        let block = read.slot.blocks.remove(at);
        match memory.set(installed.slot, &read.slot.encode(&installed.bundle), read.version) {
            Written::Done => return Some(Unspent::of(&block)),
            Written::Raced => {}
            Written::Refused => return None,
        }
    }
    None
}
