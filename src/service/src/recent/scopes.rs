//! The limits that are nearest to being used up, as the limiter last answered.
//!
//! A table of fixed size: one more limit takes the place of one whose window has ended, else of the one that is furthest from
//! its end, if it is nearer itself. Two limits of the same subject and resource with different figures are one row, the last
//! one asked about.
//!
//! Each decision comes by here, and mostly about a subject that has no row and gets none: whether it gets one is told by two
//! bounds, and the rows are only gone through where these leave it open.

use std::collections::HashMap;

use portcullis_decision::charge::{ChargeEntry, EntryState};
use serde_json::{Value, json};

use crate::canary;

/// Limits that are kept.
const KEPT: usize = 256;
/// A slot's row is worth showing so long after its last answer: it has no window.
const SLOTS_MS: u64 = 60_000;

#[derive(Debug, Clone)]
struct Row {
    scope: &'static str,
    resource: &'static str,
    used: u64,
    limit: u64,
    ends_ms: u64,
}

impl Row {
    /// How much is used, in millionths: a limit of 0 is used up.
    fn share(&self) -> u64 {
        let millions = u128::from(self.used).saturating_mul(1_000_000);
        let share = millions.checked_div(u128::from(self.limit)).unwrap_or(1_000_000);
        u64::try_from(share).unwrap_or(u64::MAX)
    }
}

/// The rows, by the store's key.
#[derive(Debug, Default)]
pub(super) struct Scopes {
    rows: HashMap<String, Row>,
    /// No row ends before this; the first may end later.
    no_end_before_ms: u64,
    /// No row's share is less; the smallest may be more.
    no_share_below: u64,
}

impl Scopes {
    /// Notes where a limit stands.
    pub(super) fn note(&mut self, entry: &ChargeEntry, state: &EntryState, now_ms: u64) {
        // What the service's own canary uses up on purpose.
        let owner = entry.key.strip_prefix("{owner:");
        if owner.is_some_and(|owner| owner.starts_with(canary::NAME)) {
            return;
        }
        let is_slot = entry.resource == portcullis_decision::limits::Resource::Concurrency;
        let row = Row {
            scope: entry.scope.name(),
            resource: entry.resource.name(),
            used: state.used,
            limit: entry.limit,
            ends_ms: now_ms.saturating_add(if is_slot { SLOTS_MS } else { state.reset_ms }),
        };
        let (ends_ms, share) = (row.ends_ms, row.share());
        if let Some(known) = self.rows.get_mut(&entry.key) {
            *known = row;
        } else if self.finds_place(share, now_ms) {
            self.rows.insert(entry.key.clone(), row);
        } else {
            return;
        }
        self.no_end_before_ms = self.no_end_before_ms.min(ends_ms);
        self.no_share_below = self.no_share_below.min(share);
    }

    fn forget_the_ended(&mut self, now_ms: u64) {
        self.rows.retain(|_, row| row.ends_ms > now_ms);
        self.no_end_before_ms = self.rows.values().map(|row| row.ends_ms).min().unwrap_or(u64::MAX);
    }

    fn finds_place(&mut self, share: u64, now_ms: u64) -> bool {
        if self.rows.len() < KEPT {
            return true;
        }
        if self.no_end_before_ms <= now_ms {
            self.forget_the_ended(now_ms);
            if self.rows.len() < KEPT {
                return true;
            }
        }
        if share <= self.no_share_below {
            return false;
        }
        let shares = self.rows.iter().map(|(key, known)| (known.share(), key));
        let Some((furthest, key)) = shares.min_by_key(|(share, _)| *share) else {
            return true;
        };
        self.no_share_below = furthest;
        if furthest >= share {
            return false;
        }
        let key = key.clone();
        self.rows.remove(&key);
        true
    }

    /// The nearest so many, the nearest first.
    pub(super) fn nearest(&mut self, most: usize, now_ms: u64) -> Value {
        self.forget_the_ended(now_ms);
        let mut rows: Vec<_> = self.rows.iter().collect();
        rows.sort_by(|(a_key, a), (b_key, b)| b.share().cmp(&a.share()).then_with(|| a_key.cmp(b_key)));
        rows.into_iter()
            .take(most)
            .map(|(key, row)| {
                let ends_in_s = row.ends_ms.saturating_sub(now_ms).div_ceil(1_000);
                json!({"scope": row.scope, "ids": ids(key), "resource": row.resource, "used": row.used,
                    "limit": row.limit, "ends_in_s": ends_in_s})
            })
            .collect()
    }
}

/// The ids in a key, `{scope:id:id}:resource`, as they were before they were percent-encoded.
fn ids(key: &str) -> Vec<String> {
    let inner = key.strip_prefix('{').and_then(|rest| rest.split('}').next());
    inner.unwrap_or_default().split(':').skip(1).map(decoded).collect()
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        let value = (byte == b'%').then(|| {
            let digit = |byte: Option<u8>| char::from(byte?).to_digit(16);
            let (high, low) = (digit(rest.next())?, digit(rest.next())?);
            u8::try_from(high.checked_mul(16)?.checked_add(low)?).ok()
        });
        bytes.push(value.flatten().unwrap_or(byte));
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests;
