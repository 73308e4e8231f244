//! What waits to be told to a store, in order: the batch that is under way still takes room until it has ended.
//!
//! Left out on purpose: what is told, how often, and what finds no room.

use std::collections::VecDeque;

/// Entries that wait, and how many are under way.
#[derive(Debug)]
pub(crate) struct Backlog<T> {
    waiting: VecDeque<T>,
    under_way: usize,
}

impl<T> Default for Backlog<T> {
    fn default() -> Self {
        Self {
            waiting: VecDeque::new(),
            under_way: 0,
        }
    }
}

impl<T> Backlog<T> {
    /// Entries that were not delivered yet.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len().saturating_add(self.under_way)
    }

    /// As a gauge shows it.
    pub(crate) fn shown(&self) -> i64 {
        i64::try_from(self.len()).unwrap_or(i64::MAX)
    }

    pub(crate) fn push(&mut self, entry: T) {
        self.waiting.push_back(entry);
    }

    /// Takes out waiting entries that are not to be kept.
    pub(crate) fn retain(&mut self, keep: impl FnMut(&T) -> bool) {
        self.waiting.retain(keep);
    }

    /// The next entries, at most so many; they are under way until [`Self::end_batch`].
    pub(crate) fn next_batch(&mut self, most: usize) -> Vec<T> {
        let take = self.waiting.len().min(most);
        let batch: Vec<_> = self.waiting.drain(..take).collect();
        self.under_way = batch.len();
        batch
    }

    /// The batch under way has ended; `again` of it wait once more, before all that came since.
    pub(crate) fn end_batch(&mut self, again: Vec<T>) {
        self.under_way = 0;
        again.into_iter().rev().for_each(|entry| self.waiting.push_front(entry));
    }
}
