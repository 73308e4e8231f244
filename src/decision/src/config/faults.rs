//! Faults of a configuration, and the hint for a near miss.

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

/// One fault: where, and what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The path of the key, such as `gates[1].when_unavailable`; empty for the whole text.
    pub path: String,
    /// What is wrong with it, in a sentence that names the value.
    pub message: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.path.is_empty() {
            f.write_str(&self.message)
        } else {
            write!(f, "{}: {}", self.path, self.message)
        }
    }
}

/// All faults of one text, in the order in which they were found. Never empty when it is an error.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Faults {
    list: Vec<Fault>,
    #[cfg(feature = "schema")]
    pub(super) asked: Vec<super::schema::Asked>,
}

impl Faults {
    /// Notes a fault.
    pub fn add(&mut self, path: impl Into<String>, message: impl Into<String>) {
        self.list.push(Fault {
            path: path.into(),
            message: message.into(),
        });
    }

    /// Notes those of another reading as well.
    pub fn append(&mut self, mut others: Self) {
        self.list.append(&mut others.list);
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The faults.
    pub fn iter(&self) -> impl Iterator<Item = &Fault> {
        self.list.iter()
    }

    /// `value` if there is no fault.
    ///
    /// # Errors
    /// The faults, if there are any, or if there is no value.
    pub fn into_result<T>(mut self, value: Option<T>) -> Result<T, Self> {
        match value {
            Some(value) if self.list.is_empty() => Ok(value),
            _ => {
                if self.list.is_empty() {
                    self.add("", "the configuration could not be read");
                }
                Err(self)
            }
        }
    }
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, fault) in self.list.iter().enumerate() {
            if at > 0 {
                f.write_str("; ")?;
            }
            write!(f, "{fault}")?;
        }
        Ok(())
    }
}

impl core::error::Error for Faults {}

/// `; did you mean "…"?` for the candidate within two edits of `word` (one for short words), else nothing.
pub(crate) fn hint(word: &str, candidates: &[&str]) -> String {
    let most = if word.chars().count() <= 4 { 1 } else { 2 };
    candidates
        .iter()
        .map(|candidate| {
            // A key without its unit (`timeout` for `timeout_ms`) is as near as two edits.
            let cut = word.len() >= 4 && candidate.starts_with(word);
            (
                if cut {
                    most.min(edits(word, candidate))
                } else {
                    edits(word, candidate)
                },
                *candidate,
            )
        })
        .filter(|(distance, _)| *distance <= most)
        .min()
        .map_or_else(String::new, |(_, candidate)| {
            alloc::format!("; did you mean {candidate:?}?")
        })
}

/// Words as a list for a message: `"a", "b" or "c"`.
pub(crate) fn one_of(words: &[&str]) -> String {
    let mut text = String::new();
    for (at, word) in words.iter().enumerate() {
        if at > 0 {
            text.push_str(if at.saturating_add(1) == words.len() {
                " or "
            } else {
                ", "
            });
        }
        text.push_str(&alloc::format!("{word:?}"));
    }
    text
}

/// Optimal string alignment: insertions, deletions, substitutions and swaps of neighbours. Configuration keys are short,
/// so the full table is cheap.
fn edits(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    if a.len() > 64 || b.len() > 64 {
        return usize::MAX;
    }
    let width = b.len().saturating_add(1);
    let mut rows: Vec<Vec<usize>> = Vec::new();
    rows.push((0..width).collect());
    for (i, from) in a.iter().enumerate() {
        let mut row = Vec::with_capacity(width);
        row.push(i.saturating_add(1));
        for (j, to) in b.iter().enumerate() {
            let above = rows
                .get(i)
                .and_then(|r| r.get(j.saturating_add(1)))
                .copied()
                .unwrap_or(usize::MAX);
            let left = row.get(j).copied().unwrap_or(usize::MAX);
            let diagonal = rows.get(i).and_then(|r| r.get(j)).copied().unwrap_or(usize::MAX);
            let mut best = above
                .min(left)
                .saturating_add(1)
                .min(diagonal.saturating_add(usize::from(from != to)));
            let swapped =
                i > 0 && j > 0 && a.get(i.saturating_sub(1)) == Some(to) && b.get(j.saturating_sub(1)) == Some(from);
            if swapped {
                let before = rows
                    .get(i.saturating_sub(1))
                    .and_then(|r| r.get(j.saturating_sub(1)))
                    .copied();
                best = best.min(before.unwrap_or(usize::MAX).saturating_add(1));
            }
            row.push(best);
        }
        rows.push(row);
    }
    rows.last().and_then(|row| row.last()).copied().unwrap_or(usize::MAX)
}

/// Text of a value for a message, cut so that a hostile value cannot flood a log.
pub(crate) fn shown(value: &impl ToString) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((cut, _)) => alloc::format!("{}…", text.get(..cut).unwrap_or_default()),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(target_arch = "wasm32")]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    #[test]
    fn a_near_miss_is_named_and_a_far_one_is_not() {
        assert_eq!(hint("windows_s", &["window_s", "mode"]), "; did you mean \"window_s\"?");
        assert_eq!(hint("contarct", &["contract"]), "; did you mean \"contract\"?");
        assert_eq!(
            hint("timeout", &["upstream", "timeout_ms"]),
            "; did you mean \"timeout_ms\"?"
        );
        assert_eq!(hint("banana", &["window_s", "mode"]), "");
    }
}
