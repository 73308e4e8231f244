//! The directory of an operation: which keys it charges, in which attempt. The algorithm stands in `directory.lua`.
//!
//! Whoever settles or cancels knows an operation's id and nothing else, so that is where a directory is found: under one of a
//! few homes that follow from the id. They lie far apart, so that a lost part of the cluster leaves most operations one.

use portcullis_decision::operation::OperationId;

use super::slot::{SLOTS, slot_of, tag_in, tag_of};
use crate::limiter::redis::script::{Answer as Words, Call, Place};

/// Homes of an operation. The first that can be reached is used.
pub(super) const HOMES: u16 = 3;

/// The key of the directory of an operation in one of its homes.
pub(super) fn home(prefix: &str, op: OperationId, at: u16) -> String {
    let apart = SLOTS.div_ceil(HOMES).saturating_mul(at);
    let slot = slot_of(&op.to_string()).wrapping_add(apart) % SLOTS;
    format!("{prefix}:{{{}}}:op:{op}", tag_in(slot))
}

/// How far an attempt has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Absent,
    Open,
    Charged,
    Denied,
    Cancelled,
}

/// What a directory says.
#[derive(Debug)]
pub(super) struct Directory {
    pub(super) state: State,
    pub(super) attempt: u64,
    /// How many admissions are charged.
    pub(super) size: u64,
    /// All keys of all attempts, each with its attempt, in the order of precedence.
    pub(super) keys: Vec<(u64, String)>,
}

impl Directory {
    /// Reads an answer of the script; `None` if it isn't one.
    pub(super) fn read(words: &Words) -> Option<Self> {
        let state = match words.word.as_str() {
            "absent" => State::Absent,
            "open" => State::Open,
            "charged" => State::Charged,
            "denied" => State::Denied,
            "cancelled" => State::Cancelled,
            _ => return None,
        };
        let [attempt, size] = *words.figures.as_slice() else {
            return None;
        };
        let line = |line: &String| {
            let (attempt, key) = line.split_once(' ')?;
            Some((attempt.parse().ok()?, key.to_owned()))
        };
        let keys = words.names.iter().map(line).collect::<Option<_>>()?;
        Some(Self {
            state,
            attempt,
            size,
            keys,
        })
    }

    /// Whether there is something that may be settled.
    pub(super) const fn is_live(&self) -> bool {
        matches!(self.state, State::Open | State::Charged)
    }

    /// The hash tags of an attempt, with braces, and the keys of each, in the order of precedence.
    pub(super) fn groups(&self, attempt: u64) -> Vec<(String, Vec<String>)> {
        let mut groups: Vec<(String, Vec<String>)> = Vec::new();
        for (_, key) in self.keys.iter().filter(|(of, _)| *of == attempt) {
            let tag = format!("{{{}}}", tag_of(key).unwrap_or_default());
            match groups.iter_mut().find(|(known, _)| *known == tag) {
                Some((_, keys)) => keys.push(key.clone()),
                None => groups.push((tag, vec![key.clone()])),
            }
        }
        groups
    }
}

/// A directory, and in which of its homes it was found.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) home: u16,
    pub(super) directory: Directory,
}

impl Found {
    /// Under which label an attempt takes something. Two attempts never share one, so that what is given back of one is
    /// nothing that the other holds.
    pub(super) fn label(&self, attempt: u64) -> String {
        if (self.home, attempt) == (0, 0) {
            String::new()
        } else {
            format!(".{}.{attempt}", self.home)
        }
    }

    /// The calls that give back one attempt, and keep it from taking anything more.
    pub(super) fn cancels_of(&self, prefix: &str, op: OperationId, attempt: u64) -> Vec<Call> {
        let label = self.label(attempt);
        let cancel = |(tag, counters): (String, Vec<String>)| {
            Call::cancel(&Place {
                prefix,
                op,
                group: Some((&tag, &label)),
                counters: &counters,
            })
        };
        self.directory.groups(attempt).into_iter().map(cancel).collect()
    }

    /// The same for all attempts.
    pub(super) fn cancels(&self, prefix: &str, op: OperationId) -> Vec<Call> {
        let mut attempts: Vec<u64> = self.directory.keys.iter().map(|(attempt, _)| *attempt).collect();
        attempts.dedup();
        attempts
            .into_iter()
            .flat_map(|attempt| self.cancels_of(prefix, op, attempt))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_homes_of_an_operation_lie_a_third_of_the_slots_apart() {
        for n in 0..50_u8 {
            let op = OperationId::from_random([n; 16]);
            let slots: Vec<i32> = (0..HOMES).map(|at| i32::from(slot_of(&home("p", op, at)))).collect();
            for at in 0..3 {
                let apart = (slots[(at + 1) % 3] - slots[at]).rem_euclid(i32::from(SLOTS));
                assert!((5_460..=5_462).contains(&apart), "{slots:?}");
            }
        }
    }

    #[test]
    fn keys_are_grouped_by_tag_in_their_order_and_by_attempt() {
        let key = |attempt, key: &str| (attempt, key.to_owned());
        let directory = Directory {
            state: State::Open,
            attempt: 1,
            size: 1,
            keys: vec![
                key(0, "p:{a}:requests:60"),
                key(1, "p:{b}:requests:60"),
                key(1, "p:{a}:requests:60"),
                key(1, "p:{b}:concurrency"),
            ],
        };
        let names = |attempt| {
            let groups = directory.groups(attempt);
            let names = groups.into_iter().map(|(tag, keys)| (tag, keys.len()));
            names.collect::<Vec<_>>()
        };
        assert_eq!(names(0), [("{a}".to_owned(), 1)]);
        assert_eq!(names(1), [("{b}".to_owned(), 2), ("{a}".to_owned(), 1)]);
        assert_eq!(names(2), []);
    }

    #[test]
    fn an_answer_of_another_shape_is_no_directory() {
        let words = |word: &str, figures: &[u64], names: &[&str]| Words {
            word: word.to_owned(),
            figures: figures.to_vec(),
            names: names.iter().map(ToString::to_string).collect(),
        };
        let read = Directory::read(&words("charged", &[1, 9], &["0 p:{a}:x", "1 p:{b}:y"])).unwrap();
        assert_eq!((read.state, read.attempt, read.size), (State::Charged, 1, 9));
        assert_eq!(read.keys[1], (1, "p:{b}:y".to_owned()));
        for (word, figures, names) in [
            ("done", &[0, 0][..], &[][..]),
            ("open", &[0], &[]),
            ("open", &[0, 0, 0], &[]),
            ("open", &[0, 0], &["p:{a}:x"]),
            ("open", &[0, 0], &["x p:{a}:x"]),
        ] {
            assert!(
                Directory::read(&words(word, figures, names)).is_none(),
                "{word} {figures:?} {names:?}"
            );
        }
    }
}
