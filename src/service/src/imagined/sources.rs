//! Where a rule stands: the line of a key in the text that it was read from.
//!
//! A path such as `gates[2].when_unavailable` is walked through the text as the parser reads it; a key that was borrowed
//! from the text says by its address where it stands. Left out on purpose: keys that are written with escapes, whose line
//! is then that of what holds them.

use std::cell::Cell;
use std::fmt;

use portcullis_decision::config::SHIPPED_RULES;
use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// A text of configuration, and what a reader calls it.
#[derive(Debug, Clone)]
pub struct Source {
    /// A file's name, or `rules/NAME.json` of a shipped one.
    pub name: String,
    text: String,
    /// What stands before the paths of rules in this text: `rules.` where they are inline.
    prefix: &'static str,
}

impl Source {
    /// A whole text.
    pub fn new(name: impl Into<String>, text: &[u8]) -> Self {
        Self {
            name: name.into(),
            text: String::from_utf8_lossy(text).into_owned(),
            prefix: "",
        }
    }

    /// The rules inside a filter's configuration.
    #[must_use]
    pub const fn inline(mut self) -> Self {
        self.prefix = "rules.";
        self
    }

    /// The shipped rule file of this name.
    pub fn shipped(name: &str) -> Option<Self> {
        let (_, text) = SHIPPED_RULES.iter().find(|(shipped, _)| *shipped == name)?;
        Some(Self::new(format!("rules/{name}.json"), text.as_bytes()))
    }

    /// The path of a rule as it stands in this text.
    pub fn path(&self, of_rules: &str) -> String {
        format!("{}{of_rules}", self.prefix)
    }

    /// The line of a path of this text, from 1; `None` if it is not there.
    pub fn line(&self, path: &str) -> Option<usize> {
        self.line_of(&steps(path)?)
    }

    /// The line of a key within a key, whatever they contain.
    pub fn line_of_keys(&self, keys: &[&str]) -> Option<usize> {
        let steps: Vec<Step<'_>> = keys.iter().map(|key| Step::Key(key)).collect();
        self.line_of(&steps)
    }

    fn line_of(&self, steps: &[Step<'_>]) -> Option<usize> {
        let found = Cell::new(None);
        let walk = Walk {
            text: &self.text,
            steps,
            found: &found,
        };
        let mut reader = serde_json::Deserializer::from_str(&self.text);
        // A text with a fault behind the key still has the key.
        let _ = walk.deserialize(&mut reader);
        let before = self.text.get(..found.get()?)?;
        Some(before.matches('\n').count().saturating_add(1))
    }
}

#[derive(Debug)]
enum Step<'a> {
    Key(&'a str),
    Item(usize),
}

/// `a.b[1].c` as its steps.
fn steps(path: &str) -> Option<Vec<Step<'_>>> {
    let mut steps = Vec::new();
    for part in path.split('.') {
        let (key, items) = part.split_once('[').unwrap_or((part, ""));
        steps.push(Step::Key(key));
        for item in items.split('[').filter(|item| !item.is_empty()) {
            steps.push(Step::Item(item.strip_suffix(']')?.parse().ok()?));
        }
    }
    Some(steps)
}

/// Reads a value and, if steps are left, goes into it.
struct Walk<'t, 's> {
    text: &'t str,
    steps: &'s [Step<'s>],
    found: &'s Cell<Option<usize>>,
}

impl Walk<'_, '_> {
    /// Notes where a key stands that was borrowed from the text.
    fn note(&self, key: &str) {
        let at = key.as_ptr().addr().checked_sub(self.text.as_ptr().addr());
        if let Some(at) = at.filter(|at| *at < self.text.len()) {
            self.found.set(Some(at));
        }
    }
}

impl<'de> DeserializeSeed<'de> for Walk<'_, '_> {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

/// A key, borrowed if it could be.
struct Key;

impl<'de> DeserializeSeed<'de> for Key {
    type Value = (Option<&'de str>, String);

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Key {
    type Value = (Option<&'de str>, String);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_borrowed_str<E>(self, key: &'de str) -> Result<Self::Value, E> {
        Ok((Some(key), key.to_owned()))
    }

    fn visit_str<E>(self, key: &str) -> Result<Self::Value, E> {
        Ok((None, key.to_owned()))
    }
}

impl<'de> Visitor<'de> for Walk<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        // A list's item is where its first key is.
        let mut is_first = true;
        while let Some((borrowed, key)) = map.next_key_seed(Key)? {
            let wanted = match self.steps {
                [] => is_first,
                [Step::Key(name), ..] => key == *name,
                [Step::Item(_), ..] => false,
            };
            is_first = false;
            if !wanted {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            if let Some(key) = borrowed {
                self.note(key);
            }
            match self.steps {
                [_, rest @ ..] if !rest.is_empty() => map.next_value_seed(Walk {
                    steps: rest,
                    ..self.again()
                })?,
                _ => map.next_value::<IgnoredAny>().map(drop)?,
            }
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let mut at = 0_usize;
        loop {
            let is_wanted = matches!(self.steps, [Step::Item(wanted), ..] if *wanted == at);
            let more = if is_wanted {
                let rest = self.steps.get(1..).unwrap_or_default();
                items
                    .next_element_seed(Walk {
                        steps: rest,
                        ..self.again()
                    })?
                    .is_some()
            } else {
                items.next_element::<IgnoredAny>()?.is_some()
            };
            if !more {
                return Ok(());
            }
            at = at.saturating_add(1);
        }
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
}

impl Walk<'_, '_> {
    const fn again(&self) -> Walk<'_, '_> {
        Walk {
            text: self.text,
            steps: self.steps,
            found: self.found,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_found_on_its_line() {
        let text = "{\n  \"a\": {\"b\": 1},\n  \"gates\": [\n    {\"gate\": \"x\"},\n    {\n      \"gate\": \"y\",\n      \
                    \"when\": {\"admit\": 1}\n    }\n  ], \"n\": null\n}";
        let source = Source::new("f", text.as_bytes());
        for (path, line) in [
            ("a", Some(2)),
            ("a.b", Some(2)),
            ("gates", Some(3)),
            ("gates[0]", Some(4)),
            ("gates[1]", Some(6)),
            ("gates[1].when", Some(7)),
            ("gates[1].when.admit", Some(7)),
            ("n", Some(9)),
            ("gates[1].whem", Some(3)),
            ("b", None),
        ] {
            assert_eq!(source.line(path), line, "{path}");
        }
    }

    #[test]
    fn every_gate_of_every_shipped_file_has_its_line() {
        for (name, text) in SHIPPED_RULES {
            let source = Source::shipped(name).unwrap();
            let rules: serde_json::Value = serde_json::from_str(text).unwrap();
            for (at, gate) in rules["gates"].as_array().unwrap().iter().enumerate() {
                let line = source.line(&format!("gates[{at}]")).unwrap();
                let words = text.lines().nth(line - 1).unwrap();
                assert!(words.contains(gate["gate"].as_str().unwrap()), "{name} {at}: {words}");
            }
            assert!(source.line("decision.when_unavailable").is_some());
        }
    }
}
