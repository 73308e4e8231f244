//! The outbox of a VM: what streams leave behind (cancels, settlements, renewals, unmetered admissions), sent in batches to
//! `/v1/settle`.
//!
//! A batch that was not answered goes back to the front and is sent again: every entry is idempotent by its operation id.
//! Notes are bounded in number and age; what does not fit is counted, and lapses in the store by its time to live.
//! Unmetered admissions are bounded in number alone, in a queue of their own: they are money, and nothing lapses.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::config::Profile;
use crate::operation::OperationId;
use crate::wire::{Return, SettleRequest, Settlement, Unmetered};

/// Entries that wait at most.
const CAPACITY: usize = 8_192;
/// Entries of one batch at most: 256 ids are about 9 KiB of JSON.
const BATCH: usize = 256;
/// How long a note is worth sending beyond a window, in milliseconds: by then slots and windows have lapsed.
const MAX_AGE_MS: u64 = 120_000;
/// Unmetered admissions that wait at most: with ids as long as they may be, about 3 MiB.
const UNMETERED_CAPACITY: usize = 4_096;
/// Unmetered admissions of one batch at most.
const UNMETERED_BATCH: usize = 128;
/// Notes that are looked at for one that another can be added to.
const LOOK_BACK: usize = 32;
/// Pause after a batch that failed, in milliseconds.
const RETRY_MS: u64 = 500;

/// What is to be told about one operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// Nobody waits for its decision any more.
    Cancel(OperationId),
    /// Its stream has ended: slots are freed, holds replaced, and a bill is added.
    Ended(Settlement),
    /// Its stream goes on.
    Renew(OperationId),
    /// A part of a block goes back.
    Return(Return),
}

/// Notes that wait, and the batch that is under way.
#[derive(Debug, Clone, Default)]
pub struct Outbox {
    /// A window of contract limits, in milliseconds: as long may a charge stand that a cancel gives back.
    window_ms: u64,
    /// The rules list `metering`: what a cancel gives back there never lapses by itself.
    records_runs: bool,
    waiting: VecDeque<(Note, u64)>,
    /// How many at the front of those that wait were sent before: the service may know them.
    sent_before: usize,
    under_way: Vec<(Note, u64)>,
    unmetered: VecDeque<(Unmetered, u64)>,
    unmetered_under_way: Vec<(Unmetered, u64)>,
    not_before_ms: u64,
    dropped: u64,
    unmetered_dropped: u64,
}

impl Outbox {
    /// The outbox of rules with windows of this length, that record runs or do not.
    pub fn of(window_ms: u64, records_runs: bool) -> Self {
        Self {
            window_ms,
            records_runs,
            ..Self::default()
        }
    }

    /// Whether a note is too old to be worth sending.
    fn is_stale(&self, note: &Note, age_ms: u64) -> bool {
        let keeps = match note {
            Note::Cancel(_) => self.records_runs,
            // Money does not lapse.
            Note::Ended(settlement) => settlement.bill.is_some(),
            Note::Renew(_) | Note::Return(_) => false,
        };
        !keeps && age_ms > MAX_AGE_MS.saturating_add(self.window_ms)
    }

    /// Adds a note at `now_ms`.
    pub fn add(&mut self, note: Note, now_ms: u64) {
        if let Note::Return(part) = &note
            && let Some(earlier) = self.fresh_return(part.lease)
        {
            // Not sent yet, so they can go back as one.
            earlier.requests = earlier.requests.saturating_add(part.requests);
            earlier.tokens = earlier.tokens.saturating_add(part.tokens);
            return;
        }
        if self.waiting.len() >= CAPACITY {
            self.dropped = self.dropped.saturating_add(1);
        } else {
            self.waiting.push_back((note, now_ms));
        }
    }

    /// A return of this block that was not sent yet, among the last few notes.
    fn fresh_return(&mut self, lease: OperationId) -> Option<&mut Return> {
        let fresh = self.waiting.len().saturating_sub(self.sent_before).min(LOOK_BACK);
        self.waiting
            .iter_mut()
            .rev()
            .take(fresh)
            .find_map(|(note, _)| match note {
                Note::Return(part) if part.lease == lease => Some(part),
                _ => None,
            })
    }

    /// Adds an unmetered admission of `now_ms`; its `age_ms` is set when it is sent.
    pub fn add_unmetered(&mut self, admission: Unmetered, now_ms: u64) {
        let kept = self.unmetered.len().saturating_add(self.unmetered_under_way.len());
        if kept >= UNMETERED_CAPACITY {
            self.unmetered_dropped = self.unmetered_dropped.saturating_add(1);
        } else {
            self.unmetered.push_back((admission, now_ms));
        }
    }

    /// Counts an unmetered admission that nothing is known of.
    pub const fn lose_unmetered(&mut self) {
        self.unmetered_dropped = self.unmetered_dropped.saturating_add(1);
    }

    /// The next batch, if one may be sent now. One batch is under way at a time.
    pub fn next_batch(&mut self, profile: Profile, now_ms: u64) -> Option<SettleRequest> {
        let is_under_way = !self.under_way.is_empty() || !self.unmetered_under_way.is_empty();
        if is_under_way || self.is_empty() || now_ms < self.not_before_ms {
            return None;
        }
        while self
            .waiting
            .front()
            .is_some_and(|(note, since)| self.is_stale(note, now_ms.saturating_sub(*since)))
        {
            self.waiting.pop_front();
            self.sent_before = self.sent_before.saturating_sub(1);
            self.dropped = self.dropped.saturating_add(1);
        }
        let take = self.waiting.len().min(BATCH);
        self.under_way = self.waiting.drain(..take).collect();
        self.sent_before = self.sent_before.saturating_sub(take);
        let take = self.unmetered.len().min(UNMETERED_BATCH);
        self.unmetered_under_way = self.unmetered.drain(..take).collect();
        if self.under_way.is_empty() && self.unmetered_under_way.is_empty() {
            return None;
        }
        let aged = |(admission, since): &(Unmetered, u64)| Unmetered {
            age_ms: now_ms.saturating_sub(*since),
            ..admission.clone()
        };
        let mut request = SettleRequest {
            profile,
            releases: Vec::new(),
            settles: Vec::new(),
            returns: Vec::new(),
            renewals: Vec::new(),
            cancels: Vec::new(),
            unmetered: self.unmetered_under_way.iter().map(aged).collect(),
        };
        for (note, _) in &self.under_way {
            match note {
                Note::Cancel(op) => request.cancels.push(*op),
                Note::Ended(settlement) if settlement.tokens.is_none() && settlement.bill.is_none() => {
                    request.releases.push(settlement.op);
                }
                Note::Ended(settlement) => request.settles.push(settlement.clone()),
                Note::Renew(op) => request.renewals.push(*op),
                Note::Return(part) => request.returns.push(*part),
            }
        }
        Some(request)
    }

    /// The batch under way was answered with 200.
    pub fn delivered(&mut self) {
        self.under_way.clear();
        self.unmetered_under_way.clear();
    }

    /// The batch under way was not answered: it goes back to the front, and waits a little.
    pub fn failed(&mut self, now_ms: u64) {
        self.not_before_ms = now_ms.saturating_add(RETRY_MS);
        self.sent_before = self.sent_before.saturating_add(self.under_way.len());
        for entry in self.under_way.drain(..).rev() {
            self.waiting.push_front(entry);
        }
        for entry in self.unmetered_under_way.drain(..).rev() {
            self.unmetered.push_front(entry);
        }
    }

    /// Sends the next batch without the pause after one that failed.
    pub const fn hurry(&mut self) {
        self.not_before_ms = 0;
    }

    /// Whether nothing waits and nothing is under way.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
            && self.under_way.is_empty()
            && self.unmetered.is_empty()
            && self.unmetered_under_way.is_empty()
    }

    /// How many notes were dropped since the last call.
    pub fn take_dropped(&mut self) -> u64 {
        core::mem::take(&mut self.dropped)
    }

    /// How many unmetered admissions were dropped since the last call.
    pub fn take_unmetered_dropped(&mut self) -> u64 {
        core::mem::take(&mut self.unmetered_dropped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(target_arch = "wasm32")]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    fn op(n: u8) -> OperationId {
        OperationId::from_random([n; 16])
    }

    fn ended(n: u8) -> Note {
        Note::Ended(Settlement {
            op: op(n),
            tokens: None,
            bill: None,
        })
    }

    #[test]
    fn a_batch_that_failed_is_sent_again_in_order() {
        let mut outbox = Outbox::default();
        outbox.add(Note::Cancel(op(1)), 0);
        outbox.add(ended(2), 0);
        let batch = outbox.next_batch(Profile::Production, 0).unwrap();
        assert_eq!(
            (batch.cancels.as_slice(), batch.releases.as_slice()),
            (&[op(1)][..], &[op(2)][..])
        );
        outbox.add(Note::Renew(op(3)), 1);
        assert_eq!(outbox.next_batch(Profile::Production, 1), None);
        outbox.failed(1);
        assert_eq!(outbox.next_batch(Profile::Production, 500), None);
        let again = outbox.next_batch(Profile::Production, 501).unwrap();
        assert_eq!(
            (again.cancels.len(), again.releases.len(), again.renewals.len()),
            (1, 1, 1)
        );
        outbox.delivered();
        assert!(outbox.is_empty());
    }

    #[test]
    fn returns_of_one_block_go_together_until_they_are_sent() {
        let part = |n, tokens| {
            Note::Return(Return {
                id: op(n),
                lease: op(9),
                requests: 1,
                tokens,
            })
        };
        let mut outbox = Outbox::default();
        outbox.add(part(1, 5), 0);
        outbox.add(part(2, -2), 0);
        let batch = outbox.next_batch(Profile::Production, 0).unwrap();
        assert_eq!(
            (batch.returns.len(), batch.returns[0].requests, batch.returns[0].tokens),
            (1, 2, 3)
        );
        outbox.failed(0);
        outbox.add(part(3, 7), 1);
        outbox.add(part(4, 7), 1);
        let batch = outbox.next_batch(Profile::Production, 501).unwrap();
        let told: Vec<_> = batch.returns.iter().map(|part| (part.id, part.tokens)).collect();
        assert_eq!(
            told,
            [(op(1), 3), (op(3), 14)],
            "the service may know the first one as it was"
        );
    }

    #[test]
    fn it_is_bounded_in_number_and_age_and_counts_what_it_drops() {
        let mut outbox = Outbox::default();
        for _ in 0..CAPACITY + 5 {
            outbox.add(Note::Cancel(op(1)), 0);
        }
        assert_eq!(outbox.take_dropped(), 5);
        assert_eq!(outbox.next_batch(Profile::Production, MAX_AGE_MS + 1), None);
        assert_eq!(outbox.take_dropped(), CAPACITY as u64);
        assert!(outbox.is_empty());
    }

    fn admission(n: u8) -> Unmetered {
        Unmetered {
            op: op(n),
            org: Some("g".into()),
            owner: Some("o".into()),
            rules: "r".into(),
            request_id: None,
            age_ms: 0,
        }
    }

    #[test]
    fn an_unmetered_admission_is_sent_with_its_age_until_it_is_answered_however_long_that_takes() {
        let mut outbox = Outbox::default();
        outbox.add_unmetered(admission(1), 10);
        let first = outbox.next_batch(Profile::Production, 15).unwrap();
        assert_eq!((first.unmetered.len(), first.unmetered[0].age_ms), (1, 5));
        assert_eq!(outbox.next_batch(Profile::Production, 15), None);
        outbox.failed(15);
        let day_ms = 86_400_000;
        let again = outbox.next_batch(Profile::Production, day_ms).unwrap();
        assert_eq!(again.unmetered[0].age_ms, day_ms - 10);
        assert!(!outbox.is_empty(), "it is not delivered before the answer");
        outbox.delivered();
        assert!(outbox.is_empty());
        assert_eq!(outbox.next_batch(Profile::Production, day_ms), None);
    }

    #[test]
    fn unmetered_admissions_are_bounded_and_a_flood_of_notes_leaves_them_their_room() {
        let mut outbox = Outbox::default();
        for _ in 0..=CAPACITY {
            outbox.add(Note::Cancel(op(1)), 0);
        }
        for _ in 0..UNMETERED_CAPACITY + 3 {
            outbox.add_unmetered(admission(2), 0);
        }
        outbox.lose_unmetered();
        assert_eq!((outbox.take_dropped(), outbox.take_unmetered_dropped()), (1, 4));
        let batch = outbox.next_batch(Profile::Production, 0).unwrap();
        assert_eq!((batch.cancels.len(), batch.unmetered.len()), (BATCH, UNMETERED_BATCH));
        outbox.add_unmetered(admission(3), 0);
        assert_eq!(outbox.take_unmetered_dropped(), 1, "what is under way still takes room");
    }

    #[test]
    fn a_cancel_of_a_recorded_run_is_told_however_late_and_notes_outlive_a_long_window() {
        let mut outbox = Outbox::of(60_000, true);
        outbox.add(Note::Cancel(op(1)), 0);
        outbox.add(ended(2), 0);
        let batch = outbox.next_batch(Profile::Production, 86_400_000).unwrap();
        assert_eq!(batch.cancels, [op(1)]);
        let mut outbox = Outbox::of(3_600_000, false);
        outbox.add(Note::Cancel(op(1)), 0);
        assert!(outbox.next_batch(Profile::Production, MAX_AGE_MS + 3_600_000).is_some());
    }
}
