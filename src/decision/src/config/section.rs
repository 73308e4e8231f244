//! A reader over one JSON object that notes every fault and goes on: wrong types, unknown keys, keys that stand twice.

use alloc::string::String;
use alloc::vec::Vec;
use core::ops::RangeInclusive;

use super::faults::{Faults, hint, one_of, shown};
use crate::json::Node;
use crate::rules::Choice;

/// One object of a configuration, with the path that leads to it.
pub(super) struct Section<'a> {
    path: String,
    entries: &'a [(String, Node)],
    known: Vec<&'static str>,
}

impl<'a> Section<'a> {
    /// The object at `path`, or a fault.
    pub(super) fn of(path: &str, node: &'a Node, faults: &mut Faults) -> Option<Self> {
        match node {
            Node::Object(entries) => Some(Self {
                path: path.into(),
                entries,
                known: Vec::new(),
            }),
            other => {
                faults.add(path, alloc::format!("must be an object, is {}", other.kind()));
                None
            }
        }
    }

    /// The path of a key of this object.
    pub(super) fn path(&self, key: &str) -> String {
        if self.path.is_empty() {
            key.into()
        } else {
            alloc::format!("{}.{key}", self.path)
        }
    }

    /// The value of a key, which counts as known from here on.
    pub(super) fn get(&mut self, key: &'static str) -> Option<&'a Node> {
        self.known.push(key);
        self.entries
            .iter()
            .find(|(name, _)| name == key)
            .map(|(_, value)| value)
    }

    /// A key that must be there.
    pub(super) fn required(&mut self, key: &'static str, faults: &mut Faults) -> Option<&'a Node> {
        let value = self.get(key);
        if value.is_none() {
            faults.add(self.path(key), "required, and missing");
        }
        value
    }

    /// A string.
    pub(super) fn text(&mut self, key: &'static str, faults: &mut Faults) -> Option<&'a str> {
        match self.get(key)? {
            Node::Text(text) => Some(text),
            other => {
                faults.add(self.path(key), alloc::format!("must be a string, is {}", other.kind()));
                None
            }
        }
    }

    /// A boolean.
    pub(super) fn boolean(&mut self, key: &'static str, faults: &mut Faults) -> Option<bool> {
        match self.get(key)? {
            Node::Bool(value) => Some(*value),
            other => {
                faults.add(
                    self.path(key),
                    alloc::format!("must be true or false, is {}", shown(other)),
                );
                None
            }
        }
    }

    /// An integer within `range`.
    pub(super) fn integer(
        &mut self,
        key: &'static str,
        range: RangeInclusive<u64>,
        faults: &mut Faults,
    ) -> Option<u64> {
        let node = self.get(key)?;
        integer_of(&self.path(key), node, range, faults)
    }

    /// One of some words.
    pub(super) fn word<T: Copy>(
        &mut self,
        key: &'static str,
        words: &[(&'static str, T)],
        faults: &mut Faults,
    ) -> Option<T> {
        let node = self.get(key)?;
        word_of(&self.path(key), node, words, faults)
    }

    /// `"reject"`, `"admit"` or `{"admit": {"max_per_minute": N}}`, which must be there.
    pub(super) fn choice(&mut self, key: &'static str, faults: &mut Faults) -> Option<Choice> {
        let node = self.required(key, faults)?;
        let path = self.path(key);
        match node {
            Node::Object(_) => bounded_choice(&path, node, faults),
            Node::Text(_) => word_of(
                &path,
                node,
                &[("reject", Choice::Reject), ("admit", Choice::Admit)],
                faults,
            ),
            other => {
                let is = shown(other);
                faults.add(
                    path,
                    alloc::format!(
                        "must be \"reject\", \"admit\" or {{\"admit\": {{\"max_per_minute\": N}}}}, is {is}"
                    ),
                );
                None
            }
        }
    }

    /// Notes every key that nobody asked for, and every key that stands twice.
    pub(super) fn finish(self, faults: &mut Faults) {
        #[cfg(feature = "schema")]
        faults.asked.push(super::schema::Asked::keys(&self.path, &self.known));
        for (at, (name, _)) in self.entries.iter().enumerate() {
            if !self.known.contains(&name.as_str()) {
                let hint = hint(name, &self.known);
                faults.add(self.path(&shown(name)), alloc::format!("unknown key{hint}"));
            } else if self.entries.iter().take(at).any(|(earlier, _)| earlier == name) {
                faults.add(self.path(name), "stands twice");
            }
        }
    }
}

fn bounded_choice(path: &str, node: &Node, faults: &mut Faults) -> Option<Choice> {
    let mut outer = Section::of(path, node, faults)?;
    let mut bound = None;
    if let Some(inner) = outer.required("admit", faults)
        && let Some(mut inner) = Section::of(&outer.path("admit"), inner, faults)
    {
        if inner.required("max_per_minute", faults).is_some() {
            bound = inner.integer("max_per_minute", 1..=1_000_000_000, faults);
        }
        inner.finish(faults);
    }
    outer.finish(faults);
    bound.map(|max_per_minute| Choice::AdmitAtMost { max_per_minute })
}

/// An integer within `range`, or a fault that says what was there.
pub(super) fn integer_of(path: &str, node: &Node, range: RangeInclusive<u64>, faults: &mut Faults) -> Option<u64> {
    #[cfg(feature = "schema")]
    faults.asked.push(super::schema::Asked::figure(path, &range));
    match node {
        Node::Integer(value) if range.contains(value) => Some(*value),
        other => {
            let (from, to, is) = (range.start(), range.end(), shown(other));
            faults.add(path, alloc::format!("must be an integer from {from} to {to}, is {is}"));
            None
        }
    }
}

/// One of some words, or a fault that lists them.
pub(super) fn word_of<T: Copy>(path: &str, node: &Node, words: &[(&'static str, T)], faults: &mut Faults) -> Option<T> {
    let names: Vec<&str> = words.iter().map(|(name, _)| *name).collect();
    #[cfg(feature = "schema")]
    faults.asked.push(super::schema::Asked::words(path, &names));
    if let Node::Text(text) = node {
        if let Some((_, value)) = words.iter().find(|(name, _)| name == text) {
            return Some(*value);
        }
        let hint = hint(text, &names);
        faults.add(
            path,
            alloc::format!("must be {}, is {}{hint}", one_of(&names), shown(node)),
        );
    } else {
        faults.add(path, alloc::format!("must be {}, is {}", one_of(&names), shown(node)));
    }
    None
}

/// Parses a text whose root is an object.
pub(super) fn root(text: &[u8], faults: &mut Faults) -> Option<Node> {
    if text.is_empty() {
        faults.add("", "the configuration is empty");
        return None;
    }
    match Node::parse(text) {
        Ok(node) => Some(node),
        Err(error) => {
            faults.add("", alloc::format!("not valid JSON: {error}"));
            None
        }
    }
}

/// A retired switch: unset, null, empty, `0` or false is fine and enables nothing.
pub(super) fn retired_switch(section: &mut Section<'_>, faults: &mut Faults) {
    let key = "allow_passthrough";
    match section.get(key) {
        None | Some(Node::Null | Node::Bool(false) | Node::Integer(0)) => {}
        Some(Node::Text(text)) if is_off(text) => {}
        Some(_) => faults.add(section.path(key), PASSTHROUGH_IS_GONE),
    }
}

/// Whether the text of a retired switch enables nothing.
pub(super) fn is_off(text: &str) -> bool {
    let text = text.trim();
    text.is_empty() || text == "0" || text.eq_ignore_ascii_case("false")
}

/// The migration message of the retired switches.
pub(super) const PASSTHROUGH_IS_GONE: &str = "this switch was retired and enables nothing: say what may pass in the rule \
                                              file (when_missing, when_unavailable), or use mode \"shadow\", then \
                                              remove it";
