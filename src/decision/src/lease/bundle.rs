//! Bundles: what makes two requests alike to every gate, as the key of their lease, and which two slots they may have.
//!
//! Left out on purpose: what stands in a slot.

use alloc::vec::Vec;

use crate::envelope::Ids;
use crate::limits::{Limit, StampedLimits};
use crate::rules::{Gate, Rules};

/// What makes two requests alike: the key of their lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bundle {
    pub(super) key: Vec<u8>,
    pub(super) slots: [u64; 2],
}

impl Bundle {
    /// The bundle of a request under rules that [`are_leasable`]; `None` if its limits take slots, which are held for the
    /// length of a stream. `configuration` tells configurations apart, `slots` is how many slots there are.
    pub fn of(subject: Ids<'_>, limits: &StampedLimits, configuration: &str, slots: u64) -> Option<Self> {
        let scopes = [&limits.owner, &limits.org, &limits.auth];
        if scopes.iter().any(|scope| scope.concurrency != Limit::Unlimited) {
            return None;
        }
        // Room for everything of a common length, so that it does not move as it grows.
        let mut key = Vec::with_capacity(configuration.len().saturating_add(192));
        let mut part = |text: Option<&str>| {
            // Absent and empty are different, and no text can look like the end of another.
            let length = text.map_or(u16::MAX, |text| u16::try_from(text.len()).unwrap_or(u16::MAX));
            key.extend_from_slice(&length.to_le_bytes());
            if let Some(text) = text {
                key.extend_from_slice(text.as_bytes());
            }
        };
        part(Some(configuration));
        part(Some(subject.owner));
        for id in [subject.org, subject.auth, subject.graph, subject.lane, subject.model] {
            part(id);
        }
        for scope in scopes {
            for limit in [scope.requests, scope.tokens] {
                let figure = limit.figure().unwrap_or(u64::MAX);
                key.extend_from_slice(&figure.to_le_bytes());
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

/// Every bit of a key moves every bit of its hash: neighbouring keys must not share both of their slots. Eight bytes at a
/// time, since it is done for each request; what a client could do by keys that collide is to make requests exact.
fn hash(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut last = [0; 8];
    last.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
    let length = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
    let mixed = |hash: u64, word: u64| {
        let mixed = (hash ^ word).wrapping_mul(0xff51_afd7_ed55_8ccd);
        mixed ^ (mixed >> 32)
    };
    let words = words.iter().chain([&last]).map(|word| u64::from_le_bytes(*word));
    mixed(words.fold(length, mixed), 0x9e37_79b9_7f4a_7c15)
}

/// Whether two keys are the same, eight bytes at a time.
pub(super) fn is_same(one: &[u8], other: &[u8]) -> bool {
    let ((words, rest), (other_words, other_rest)) = (one.as_chunks::<8>(), other.as_chunks::<8>());
    one.len() == other.len() && words.iter().eq(other_words) && rest == other_rest
}
