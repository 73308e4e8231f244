//! One slot of the host's shared memory: blocks of admissions of one bundle, as bytes.
//!
//! A value names its bundle in full. One that can't be read, or is another bundle's, is no lease: hosts share one memory
//! among plugins, evict, and compare keys by a hash.

use alloc::vec::Vec;

use crate::json;
use crate::limits::{Resource, Scope};
use crate::operation::OperationId;
use crate::verdict::{Denial, LimitState};

/// The first byte: another layout is another's value.
const LAYOUT: u8 = 1;
/// Blocks that one slot keeps at most: one in use, one fetched ahead, and what waits to be returned.
pub(super) const MOST_BLOCKS: usize = 4;
/// No token limit binds.
const NO_TOKENS: u64 = u64::MAX;

/// Admissions that were charged by one operation, and not yet all handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) op: OperationId,
    pub(super) requests: u64,
    /// How many there were: ahead of their end more are fetched.
    pub(super) granted: u64,
    /// Tokens for them; `None` if no token limit binds.
    pub(super) tokens: Option<u64>,
    /// The most that one request holds.
    pub(super) largest_hold: u64,
    pub(super) ends_ms: u64,
}

/// Bytes of a block in a value.
pub(super) const BLOCK_BYTES: usize = 56;

impl Block {
    pub(super) fn read(bytes: &[u8; BLOCK_BYTES]) -> Option<Self> {
        let mut reader = Reader(bytes);
        let (id, rest) = reader.0.split_first_chunk::<16>()?;
        reader.0 = rest;
        Some(Self {
            op: OperationId::from_random(*id),
            requests: reader.number()?,
            granted: reader.number()?,
            tokens: Some(reader.number()?).filter(|tokens| *tokens != NO_TOKENS),
            largest_hold: reader.number()?,
            ends_ms: reader.number()?,
        })
    }

    pub(super) fn write(&self, bytes: &mut [u8; BLOCK_BYTES]) {
        let (op, numbers) = bytes.split_at_mut(16);
        op.copy_from_slice(&self.op.to_bytes());
        let tokens = self.tokens.unwrap_or(NO_TOKENS);
        let figures = [self.requests, self.granted, tokens, self.largest_hold, self.ends_ms];
        let (words, _) = numbers.as_chunks_mut::<8>();
        for (word, figure) in words.iter_mut().zip(figures) {
            *word = figure.to_le_bytes();
        }
    }
}

/// A denial that is remembered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Remembered {
    pub(super) denial: Denial,
    /// What the denied request would have held: one that holds less may fit.
    pub(super) hold: u64,
    pub(super) since_ms: u64,
    pub(super) until_ms: u64,
}

/// The tightest limit when a block was granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) tightest: LimitState,
    pub(super) at_ms: u64,
}

impl Seen {
    pub(super) fn read(reader: &mut Reader<'_>) -> Option<Self> {
        Some(Self {
            at_ms: reader.number()?,
            tightest: LimitState {
                scope: *Scope::ALL.get(usize::from(reader.byte()?))?,
                resource: *Resource::ALL.get(usize::from(reader.byte()?))?,
                limit: reader.number()?,
                remaining: reader.number()?,
                reset_ms: reader.number()?,
                window_s: reader.number()?,
            },
        })
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Slot {
    /// Until then somebody fetches a block.
    pub(super) fetching_until_ms: u64,
    pub(super) blocks: Vec<Block>,
    pub(super) remembered: Option<Remembered>,
    pub(super) seen: Option<Seen>,
}

impl Slot {
    pub(super) fn encode(&self, bundle: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(bundle.len().saturating_add(192));
        bytes.push(LAYOUT);
        put_bytes(&mut bytes, bundle);
        put(&mut bytes, self.fetching_until_ms);
        bytes.push(u8::try_from(self.blocks.len()).unwrap_or(u8::MAX));
        for block in &self.blocks {
            let mut written = [0; BLOCK_BYTES];
            block.write(&mut written);
            bytes.extend_from_slice(&written);
        }
        match &self.remembered {
            None => bytes.push(0),
            Some(remembered) => {
                bytes.push(1);
                put(&mut bytes, remembered.hold);
                put(&mut bytes, remembered.since_ms);
                put(&mut bytes, remembered.until_ms);
                put_bytes(&mut bytes, &serde_json::to_vec(&remembered.denial).unwrap_or_default());
            }
        }
        match &self.seen {
            None => bytes.push(0),
            Some(seen) => {
                bytes.push(1);
                put(&mut bytes, seen.at_ms);
                let limit = &seen.tightest;
                bytes.push(index_of(&Scope::ALL, &limit.scope));
                bytes.push(index_of(&Resource::ALL, &limit.resource));
                for figure in [limit.limit, limit.remaining, limit.reset_ms, limit.window_s] {
                    put(&mut bytes, figure);
                }
            }
        }
        bytes
    }

    /// The slot of these bytes, if they are one.
    pub(super) fn decode(bytes: &[u8]) -> Option<(&[u8], Self)> {
        let mut reader = Reader(bytes);
        if reader.byte()? != LAYOUT {
            return None;
        }
        let bundle = reader.bytes()?;
        let fetching_until_ms = reader.number()?;
        let count = usize::from(reader.byte()?);
        if count > MOST_BLOCKS {
            return None;
        }
        let mut blocks = Vec::with_capacity(count);
        for _ in 0..count {
            let (block, rest) = reader.0.split_first_chunk::<BLOCK_BYTES>()?;
            reader.0 = rest;
            blocks.push(Block::read(block)?);
        }
        let remembered = match reader.byte()? {
            0 => None,
            _ => Some(Remembered {
                hold: reader.number()?,
                since_ms: reader.number()?,
                until_ms: reader.number()?,
                denial: json::read(reader.bytes()?).ok()?,
            }),
        };
        let seen = match reader.byte()? {
            0 => None,
            _ => Some(Seen::read(&mut reader)?),
        };
        let slot = Self {
            fetching_until_ms,
            blocks,
            remembered,
            seen,
        };
        reader.0.is_empty().then_some((bundle, slot))
    }
}

fn put(bytes: &mut Vec<u8>, number: u64) {
    bytes.extend_from_slice(&number.to_le_bytes());
}

fn index_of<T: PartialEq>(all: &[T], one: &T) -> u8 {
    let at = all.iter().position(|other| other == one);
    at.and_then(|at| u8::try_from(at).ok()).unwrap_or(u8::MAX)
}

fn put_bytes(bytes: &mut Vec<u8>, part: &[u8]) {
    // Longer than any envelope can be; what is cut would not be found again, and so is never used.
    let length = u16::try_from(part.len()).unwrap_or(u16::MAX);
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(part.get(..usize::from(length)).unwrap_or(part));
}

/// Whose value it is, without a look at the rest.
pub(super) fn owner_of(value: &[u8]) -> Option<&[u8]> {
    let mut reader = Reader(value);
    if reader.byte()? == LAYOUT { reader.bytes() } else { None }
}

pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn byte(&mut self) -> Option<u8> {
        let (byte, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*byte)
    }

    pub(super) fn number(&mut self) -> Option<u64> {
        let (number, rest) = self.0.split_first_chunk::<8>()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*number))
    }

    pub(super) fn bytes(&mut self) -> Option<&'a [u8]> {
        let (length, rest) = self.0.split_first_chunk::<2>()?;
        let (bytes, rest) = rest.split_at_checked(usize::from(u16::from_le_bytes(*length)))?;
        self.0 = rest;
        Some(bytes)
    }
}
