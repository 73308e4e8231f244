//! The outbox of a VM: what streams leave behind (cancels, settlements, renewals, unmetered admissions), sent in batches to
//! `/v1/settle`.
//!
//! A batch that was not answered is sent again, before the rest: every entry is idempotent by its operation id. Where the
//! service has put down what is money of a batch and only its limiter has failed, the rest of it waits behind what was not
//! sent yet: an outage of the limiter must not keep back the bills of all later calls.
//!
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
    /// Sent before, and not answered: the service may know them.
    again: VecDeque<(Note, u64)>,
    /// Not sent yet.
    waiting: VecDeque<(Note, u64)>,
    under_way: Vec<(Note, u64)>,
    /// What was not sent yet goes before what was.
    fresh_first: bool,
    unmetered: VecDeque<(Unmetered, u64)>,
    unmetered_under_way: Vec<(Unmetered, u64)>,
    not_before_ms: u64,
    dropped: u64,
    bills_dropped: u64,
    unmetered_dropped: u64,
}

/// How much was dropped since the last look.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Dropped {
    /// Notes.
    pub notes: u64,
    /// Those among them with what a call has cost.
    pub bills: u64,
    /// Unmetered admissions.
    pub unmetered: u64,
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
            // There is one for each slot: its stream goes on, and whether it has lost the slot is for the service to say.
            Note::Renew(_) => true,
            Note::Return(_) => false,
        };
        !keeps && age_ms > MAX_AGE_MS.saturating_add(self.window_ms)
    }

    /// Adds a note at `now_ms`, and says whether there was room for it.
    pub fn add(&mut self, note: Note, now_ms: u64) -> bool {
        if let Note::Return(part) = &note
            && let Some(earlier) = self.fresh_return(part.lease)
        {
            // Not sent yet, so they can go back as one.
            earlier.requests = earlier.requests.saturating_add(part.requests);
            earlier.tokens = earlier.tokens.saturating_add(part.tokens);
            return true;
        }
        let has_room = self.again.len().saturating_add(self.waiting.len()) < CAPACITY;
        if has_room {
            self.waiting.push_back((note, now_ms));
        } else {
            self.drop_note(&note);
        }
        has_room
    }

    fn drop_note(&mut self, note: &Note) {
        self.dropped = self.dropped.saturating_add(1);
        if matches!(note, Note::Ended(settlement) if settlement.bill.is_some()) {
            self.bills_dropped = self.bills_dropped.saturating_add(1);
        }
    }

    /// A return of this block that was not sent yet, among the last few notes.
    fn fresh_return(&mut self, lease: OperationId) -> Option<&mut Return> {
        self.waiting
            .iter_mut()
            .rev()
            .take(LOOK_BACK)
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
        let first_again = !self.fresh_first || self.waiting.is_empty();
        for is_again in [first_again, !first_again] {
            while self.under_way.len() < BATCH {
                let queue = if is_again { &mut self.again } else { &mut self.waiting };
                let Some((note, since)) = queue.pop_front() else { break };
                if self.is_stale(&note, now_ms.saturating_sub(since)) {
                    self.drop_note(&note);
                } else {
                    self.under_way.push((note, since));
                }
            }
        }
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

    /// The batch under way was answered with 200; the renewals that were in it.
    pub fn delivered(&mut self) -> Vec<OperationId> {
        self.unmetered_under_way.clear();
        self.fresh_first = false;
        let renewal = |(note, _)| match note {
            Note::Renew(op) => Some(op),
            _ => None,
        };
        self.under_way.drain(..).filter_map(renewal).collect()
    }

    /// The batch under way was not answered: it is sent again, before what was not sent yet, after a little while.
    pub fn failed(&mut self, now_ms: u64) {
        self.not_before_ms = now_ms.saturating_add(RETRY_MS);
        self.again.extend(self.under_way.drain(..));
        for entry in self.unmetered_under_way.drain(..).rev() {
            self.unmetered.push_front(entry);
        }
        self.fresh_first = false;
    }

    /// The service has put down the bills and the unmetered admissions of the batch under way, and the rest has failed: that
    /// is told again, without them, when what was not sent yet has had its turn.
    pub fn put_down(&mut self, now_ms: u64) {
        for (note, _) in &mut self.under_way {
            if let Note::Ended(settlement) = note {
                settlement.bill = None;
            }
        }
        self.unmetered_under_way.clear();
        self.failed(now_ms);
        self.fresh_first = true;
        if self.waiting.len() >= BATCH || self.unmetered.len() >= UNMETERED_BATCH {
            self.not_before_ms = now_ms;
        }
    }

    /// Nothing is sent any more: drops all that waits or is under way.
    pub fn give_up(&mut self) {
        self.failed(0);
        while let Some((note, _)) = self.again.pop_front().or_else(|| self.waiting.pop_front()) {
            self.drop_note(&note);
        }
        let admissions = u64::try_from(self.unmetered.len()).unwrap_or(u64::MAX);
        self.unmetered_dropped = self.unmetered_dropped.saturating_add(admissions);
        self.unmetered.clear();
    }

    /// Sends the next batch without the pause after one that failed.
    pub const fn hurry(&mut self) {
        self.not_before_ms = 0;
    }

    /// Whether nothing waits and nothing is under way.
    pub fn is_empty(&self) -> bool {
        self.again.is_empty()
            && self.waiting.is_empty()
            && self.under_way.is_empty()
            && self.unmetered.is_empty()
            && self.unmetered_under_way.is_empty()
    }

    /// How much was dropped since the last call.
    pub fn take_dropped(&mut self) -> Dropped {
        Dropped {
            notes: core::mem::take(&mut self.dropped),
            bills: core::mem::take(&mut self.bills_dropped),
            unmetered: core::mem::take(&mut self.unmetered_dropped),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Bill;
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
        assert_eq!(outbox.take_dropped().notes, 5);
        assert_eq!(outbox.next_batch(Profile::Production, MAX_AGE_MS + 1), None);
        assert_eq!(outbox.take_dropped().notes, CAPACITY as u64);
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
        let dropped = outbox.take_dropped();
        assert_eq!((dropped.notes, dropped.unmetered), (1, 4));
        let batch = outbox.next_batch(Profile::Production, 0).unwrap();
        assert_eq!((batch.cancels.len(), batch.unmetered.len()), (BATCH, UNMETERED_BATCH));
        outbox.add_unmetered(admission(3), 0);
        assert_eq!(outbox.take_dropped().unmetered, 1, "what is under way still takes room");
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

    fn billed(n: u16) -> Note {
        let mut id = [0; 16];
        id[..2].copy_from_slice(&n.to_be_bytes());
        Note::Ended(Settlement {
            op: OperationId::from_random(id),
            tokens: Some(1),
            bill: Some(Bill {
                org: "g".into(),
                model: "m".into(),
                input: 1,
                cached_input: 0,
                output: 1,
                is_hold: false,
            }),
        })
    }

    #[test]
    fn while_only_the_limiter_fails_every_bill_is_told_once_and_what_is_left_of_it_until_it_is_taken() {
        let mut outbox = Outbox::default();
        let all = 3 * BATCH as u16 + 9;
        for n in 0..all {
            outbox.add(billed(n), 0);
        }
        outbox.add_unmetered(admission(1), 0);
        let (mut bills, mut now_ms, mut batches) = (0, 0, 0);
        while bills < usize::from(all) {
            let batch = outbox.next_batch(Profile::Production, now_ms).expect("a batch");
            assert_eq!(
                batch.unmetered.len(),
                usize::from(batches == 0),
                "it is put down with the first one"
            );
            bills += batch.settles.iter().filter(|settle| settle.bill.is_some()).count();
            outbox.put_down(now_ms);
            batches += 1;
            now_ms += if batches < 3 { 0 } else { RETRY_MS };
        }
        assert_eq!(
            (bills, batches),
            (usize::from(all), 4),
            "each once, and as quickly as they can be told"
        );
        let mut told = Vec::new();
        while let Some(batch) = outbox.next_batch(Profile::Production, now_ms) {
            assert!(
                batch
                    .settles
                    .iter()
                    .all(|settle| settle.bill.is_none() && settle.tokens == Some(1))
            );
            told.extend(batch.settles.iter().map(|settle| settle.op));
            outbox.delivered();
        }
        assert_eq!(
            told.len(),
            usize::from(all),
            "the holds are replaced when the limiter is back"
        );
        assert!(outbox.is_empty() && outbox.take_dropped() == Dropped::default());
    }

    #[test]
    fn what_was_not_sent_yet_goes_first_only_while_the_service_answers() {
        let mut outbox = Outbox::default();
        outbox.add(billed(1), 0);
        outbox.next_batch(Profile::Production, 0).unwrap();
        outbox.put_down(0);
        outbox.add(billed(2), 1);
        let has_bill = |batch: &SettleRequest| -> Vec<bool> {
            let settles = batch.settles.iter();
            settles.map(|settle| settle.bill.is_some()).collect()
        };
        let second = outbox.next_batch(Profile::Production, RETRY_MS).unwrap();
        assert_eq!(has_bill(&second), [true, false]);
        outbox.failed(RETRY_MS);
        outbox.add(billed(3), RETRY_MS);
        let third = outbox.next_batch(Profile::Production, 2 * RETRY_MS).unwrap();
        assert_eq!(has_bill(&third), [true, false, true], "in the order of before");
        outbox.delivered();
        assert!(outbox.is_empty());
    }

    #[test]
    fn what_is_given_up_is_counted_by_kind() {
        let mut outbox = Outbox::default();
        outbox.add(billed(1), 0);
        outbox.add(Note::Renew(op(2)), 0);
        outbox.add_unmetered(admission(3), 0);
        outbox.next_batch(Profile::Production, 0).unwrap();
        outbox.add(billed(2), 0);
        outbox.give_up();
        let all = Dropped {
            notes: 3,
            bills: 2,
            unmetered: 1,
        };
        assert_eq!((outbox.take_dropped(), outbox.is_empty()), (all, true));
    }
}
