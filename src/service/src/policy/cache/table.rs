//! Answers by key, with their ages, and the questions under way. Asks nothing itself.

use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::limiter::StoreFault;
use crate::locked;

/// Answers that are kept at most, the oldest leaving first: some tens of megabytes.
const MOST_ANSWERS: usize = 100_000;

/// How a question ended, or `None` while it is under way. An answer comes with the time when it was asked for.
pub(super) type Landed<T> = Option<Result<(T, Instant), StoreFault>>;

/// What there is for a key.
pub(super) enum Found<T> {
    /// An answer that counts, and when it was asked for.
    Answer(T, Instant),
    /// The question under way.
    Flight(watch::Receiver<Landed<T>>),
}

struct Slot<T> {
    answer: Option<(T, Instant)>,
    flight: Option<watch::Receiver<Landed<T>>>,
}

struct Slots<T> {
    by_key: HashMap<String, Slot<T>>,
    /// Answers in the order of their landing, for throwing the oldest out; may name some that are gone.
    landed: VecDeque<(Instant, String)>,
}

/// Answers by key.
pub(super) struct Table<T> {
    max_staleness: Duration,
    most: usize,
    slots: Mutex<Slots<T>>,
}

impl<T: Clone> Table<T> {
    pub(super) fn new(max_staleness: Duration) -> Self {
        Self::of(max_staleness, MOST_ANSWERS)
    }

    fn of(max_staleness: Duration, most: usize) -> Self {
        Self {
            max_staleness,
            most,
            slots: Mutex::new(Slots {
                by_key: HashMap::new(),
                landed: VecDeque::new(),
            }),
        }
    }

    /// How long an answer asked for at `sent` still counts, in whole milliseconds.
    pub(super) fn fresh_for_ms(&self, sent: Instant) -> u64 {
        let left = self.max_staleness.saturating_sub(sent.elapsed());
        u64::try_from(left.as_millis()).unwrap_or(u64::MAX)
    }

    /// Whether an answer asked for at `sent` still counts.
    pub(super) fn is_fresh(&self, sent: Instant) -> bool {
        sent.elapsed() < self.max_staleness
    }

    /// What there is for a key; `None` if there is nothing and nobody `may_ask`. With a sender and a time the caller has to
    /// ask, as of that time.
    #[expect(clippy::type_complexity, reason = "one caller, beside it")]
    pub(super) fn look(
        &self,
        key: &str,
        may_ask: bool,
    ) -> (Option<Found<T>>, Option<(watch::Sender<Landed<T>>, Instant)>) {
        let mut slots = locked(&self.slots);
        let now = Instant::now();
        let slot = slots.by_key.get(key);
        let answer = slot
            .and_then(|slot| slot.answer.clone())
            .filter(|(_, sent)| self.is_fresh(*sent));
        let flight = slot.and_then(|slot| slot.flight.clone());
        let wants_a_new_one = answer.as_ref().is_none_or(|(_, sent)| {
            let age = now.saturating_duration_since(*sent);
            age.saturating_mul(2) >= self.max_staleness
        });
        let (flight, to_ask) = match flight {
            None if may_ask && wants_a_new_one => {
                let (sender, receiver) = watch::channel(None);
                let slot = slots.by_key.entry(key.to_owned()).or_insert(Slot {
                    answer: None,
                    flight: None,
                });
                slot.flight = Some(receiver.clone());
                (Some(receiver), Some((sender, now)))
            }
            flight => (flight, None),
        };
        let found = match answer {
            Some((answer, sent)) => Some(Found::Answer(answer, sent)),
            None => flight.map(Found::Flight),
        };
        (found, to_ask)
    }

    /// A question has ended, with an answer or without; an answer that was there stays until it is too old.
    pub(super) fn land(&self, key: &str, answer: Option<&(T, Instant)>) {
        let mut slots = locked(&self.slots);
        let Some(slot) = slots.by_key.get_mut(key) else { return };
        slot.flight = None;
        match answer {
            Some((value, sent)) => {
                slot.answer = Some((value.clone(), *sent));
                slots.landed.push_back((*sent, key.to_owned()));
            }
            // It may have been passed over while the question was under way, so it queues again.
            None => match slot
                .answer
                .as_ref()
                .map(|(_, sent)| *sent)
                .filter(|sent| self.is_fresh(*sent))
            {
                Some(sent) => slots.landed.push_back((sent, key.to_owned())),
                None => drop(slots.by_key.remove(key)),
            },
        }
        self.throw_out(&mut slots);
    }

    fn throw_out(&self, slots: &mut Slots<T>) {
        while let Some((sent, _)) = slots.landed.front() {
            if slots.by_key.len() <= self.most && self.is_fresh(*sent) {
                break;
            }
            let Some((sent, key)) = slots.landed.pop_front() else {
                break;
            };
            // A key that has been answered again since stands further back, too.
            let is_this = slots.by_key.get(&key).is_some_and(|slot| {
                slot.flight.is_none() && slot.answer.as_ref().is_some_and(|(_, known)| *known == sent)
            });
            if is_this {
                slots.by_key.remove(&key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_oldest_answers_leave_when_there_are_too_many_and_the_stale_ones_by_themselves() {
        let table: Table<u8> = Table::of(Duration::from_secs(2), 3);
        for (at, key) in ["a", "b", "c", "d"].into_iter().enumerate() {
            let (_, to_ask) = table.look(key, true);
            let (_, sent) = to_ask.unwrap();
            table.land(key, Some(&(u8::try_from(at).unwrap(), sent)));
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        let known = |key| matches!(table.look(key, false).0, Some(Found::Answer(..)));
        assert_eq!(["a", "b", "c", "d"].map(known), [false, true, true, true]);
        tokio::time::advance(Duration::from_secs(2)).await;
        let (_, to_ask) = table.look("e", true);
        table.land("e", Some(&(9, to_ask.unwrap().1)));
        let slots = locked(&table.slots);
        assert_eq!((slots.by_key.len(), slots.landed.len()), (1, 1));
    }
}
