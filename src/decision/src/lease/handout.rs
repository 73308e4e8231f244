//! One admission handed out where the host has put the value: only its numbers change, and nothing is copied.
//!
//! This is what each leased request does. Left out on purpose: what is rarer (the last admission of a block, a block that
//! nobody looks after, a denial that is remembered, a value that is not whole), for which the slot is decoded.

use super::slot::{BLOCK_BYTES, Block, MOST_BLOCKS, Reader, Seen, owner_of};
use super::{Share, Times, is_fetching};
use crate::limits::Resource;
use crate::verdict::LimitState;

/// What one admission changes in a slot.
pub(super) struct Spending {
    /// Which block it is of, and what that block is afterwards.
    pub(super) at: usize,
    pub(super) block: Block,
    held_tokens: Option<u64>,
    /// Requests that can be handed out after it.
    left: u64,
    /// It falls to this request to have the next block fetched.
    pub(super) fetch: bool,
}

impl Spending {
    /// One admission, of the block that ends first; `None` if there is none for a request like this.
    pub(super) fn of(
        blocks: impl Iterator<Item = Block>,
        fetching_until_ms: u64,
        hold: u64,
        times: Times,
    ) -> Option<Self> {
        let Times { now_ms, max_age_ms, .. } = times;
        let (mut first, mut left): (Option<(usize, Block)>, u64) = (None, 0);
        for (at, block) in blocks.enumerate() {
            if now_ms >= block.ends_ms {
                continue;
            }
            left = left.saturating_add(block.requests);
            let held = hold.min(block.largest_hold);
            let fits = block.ends_ms <= now_ms.saturating_add(max_age_ms)
                && block.requests > 0
                && block.tokens.is_none_or(|tokens| tokens >= held);
            if fits && first.is_none_or(|(_, first)| block.ends_ms < first.ends_ms) {
                first = Some((at, block));
            }
        }
        let (at, mut block) = first?;
        let held_tokens = block.tokens.map(|_| hold.min(block.largest_hold));
        block.requests = block.requests.saturating_sub(1);
        block.tokens = block
            .tokens
            .map(|tokens| tokens.saturating_sub(held_tokens.unwrap_or(0)));
        let left = left.saturating_sub(1);
        let fetch = !is_fetching(fetching_until_ms, times) && left <= block.granted.checked_div(2).unwrap_or(0);
        Some(Self {
            at,
            block,
            held_tokens,
            left,
            fetch,
        })
    }

    /// What the request gets.
    pub(super) fn share(&self, seen: Option<&Seen>, now_ms: u64) -> Share {
        let tightest = seen.map(|seen| {
            let passed_ms = now_ms.saturating_sub(seen.at_ms);
            LimitState {
                remaining: match seen.tightest.resource {
                    Resource::Requests => seen.tightest.remaining.saturating_add(self.left),
                    _ => seen.tightest.remaining,
                },
                reset_ms: seen.tightest.reset_ms.saturating_sub(passed_ms),
                ..seen.tightest
            }
        });
        Share {
            lease: self.block.op,
            held_tokens: self.held_tokens,
            tightest,
            fetch: self.fetch,
        }
    }
}

/// A value that has blocks and no denial.
#[derive(Debug)]
pub(super) struct Handout<'a> {
    fetching_until_ms: &'a mut [u8; 8],
    blocks: &'a mut [[u8; BLOCK_BYTES]],
    seen: Option<Seen>,
}

impl<'a> Handout<'a> {
    /// The parts of a value, if it is whole.
    pub(super) fn of(value: &'a mut [u8]) -> Option<Self> {
        // The layout, a length, and the owner.
        let head = owner_of(value)?.len().checked_add(3)?;
        let (_, rest) = value.split_at_mut_checked(head)?;
        let (fetching_until_ms, rest) = rest.split_first_chunk_mut::<8>()?;
        let (count, rest) = rest.split_first_mut()?;
        let count = usize::from(*count);
        if count > MOST_BLOCKS {
            return None;
        }
        let (blocks, rest) = rest.split_at_mut_checked(count.checked_mul(BLOCK_BYTES)?)?;
        let (blocks, _) = blocks.as_chunks_mut::<BLOCK_BYTES>();
        let mut tail = Reader(rest);
        if tail.byte()? != 0 {
            return None;
        }
        let seen = match tail.byte()? {
            0 => None,
            _ => Some(Seen::read(&mut tail)?),
        };
        tail.0.is_empty().then_some(Self {
            fetching_until_ms,
            blocks,
            seen,
        })
    }

    /// Hands out an admission; `None` if there is none, or if more than numbers would change. Then nothing has.
    pub(super) fn spend(self, hold: u64, times: Times) -> Option<Share> {
        let blocks = self.blocks.iter().map_while(Block::read);
        if blocks.clone().any(|block| block.is_orphan(times.now_ms)) {
            return None;
        }
        let fetching_until_ms = u64::from_le_bytes(*self.fetching_until_ms);
        let spending = Spending::of(blocks, fetching_until_ms, hold, times)?;
        let place = self.blocks.get_mut(spending.at)?;
        if spending.block.requests == 0 {
            return None;
        }
        spending.block.write(place);
        if spending.fetch {
            *self.fetching_until_ms = times.now_ms.saturating_add(times.fetch_ms).to_le_bytes();
        }
        Some(spending.share(self.seen.as_ref(), times.now_ms))
    }
}

#[cfg(test)]
mod tests;
