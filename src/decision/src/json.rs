//! JSON: one way to read it, and its tree as it was written.
//!
//! A [`Node`]'s objects keep every key, also one that stands twice:
//! `serde_json::Value` would silently let the last of two equal keys win, and a configuration in which `when_unavailable`
//! stands twice must be a fault, not a choice. Numbers, escapes and nesting limits are serde_json's (RFC 8259).

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use serde::Deserialize;
use serde::de::{Error as _, MapAccess, SeqAccess, Visitor};

/// Reads a whole text. That it is UTF-8 is seen at once: the parser would look at each of its strings by itself, which takes
/// more than all else that it does with them.
///
/// # Errors
/// The parser's message with line and column.
pub fn read<'a, T: Deserialize<'a>>(text: &'a [u8]) -> Result<T, serde_json::Error> {
    serde_json::from_str(core::str::from_utf8(text).map_err(|error| no_utf8(text, error.valid_up_to()))?)
}

/// Where a text stops being UTF-8, in the parser's words.
fn no_utf8(text: &[u8], valid: usize) -> serde_json::Error {
    let before = text.get(..valid).unwrap_or_default();
    let line = before.iter().filter(|byte| **byte == b'\n').count().saturating_add(1);
    let column = before
        .iter()
        .rev()
        .take_while(|byte| **byte != b'\n')
        .count()
        .saturating_add(1);
    serde_json::Error::custom(alloc::format!("no UTF-8 at line {line} column {column}"))
}

/// One JSON value.
#[derive(Debug, Clone, PartialEq)]
pub enum Node {
    /// `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// An integer from 0 to 2^64 - 1.
    Integer(u64),
    /// Any other number.
    OtherNumber(f64),
    /// A string.
    Text(String),
    /// An array.
    List(Vec<Node>),
    /// An object, in the order of the text.
    Object(Vec<(String, Node)>),
}

impl Node {
    /// Parses a whole text.
    ///
    /// # Errors
    /// The parser's message with line and column.
    pub fn parse(text: &[u8]) -> Result<Self, serde_json::Error> {
        read(text)
    }

    /// What a reader would call this kind of value.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "a boolean",
            Self::Integer(_) | Self::OtherNumber(_) => "a number",
            Self::Text(_) => "a string",
            Self::List(_) => "an array",
            Self::Object(_) => "an object",
        }
    }

    /// The value of a key of an object, the first if it stands twice.
    pub fn get(&self, key: &str) -> Option<&Self> {
        match self {
            Self::Object(entries) => entries.iter().find(|(name, _)| name == key).map(|(_, value)| value),
            _ => None,
        }
    }

    /// The same, to be changed.
    pub fn get_mut(&mut self, key: &str) -> Option<&mut Self> {
        match self {
            Self::Object(entries) => entries.iter_mut().find(|(name, _)| name == key).map(|(_, value)| value),
            _ => None,
        }
    }

    /// The values of an object, to be changed; of anything else none.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut Self> {
        let entries: &mut [(String, Self)] = match self {
            Self::Object(entries) => entries,
            _ => &mut [],
        };
        entries.iter_mut().map(|(_, value)| value)
    }
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Integer(value) => write!(f, "{value}"),
            Self::OtherNumber(value) => write!(f, "{value}"),
            Self::Text(value) => write!(f, "{value:?}"),
            Self::List(_) => f.write_str("an array"),
            Self::Object(_) => f.write_str("an object"),
        }
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Node, E> {
        Ok(Node::Bool(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Node, E> {
        Ok(Node::Integer(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Node, E> {
        // serde_json hands over non-negative integers as u64, so this is a negative one.
        #[allow(clippy::cast_precision_loss, reason = "only shown in a message")]
        Ok(Node::OtherNumber(value as f64))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Node, E> {
        Ok(Node::OtherNumber(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Node, E> {
        Ok(Node::Text(String::from(value)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Node, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = access.next_element()? {
            items.push(item);
        }
        Ok(Node::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Node, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = access.next_entry()? {
            entries.push(entry);
        }
        Ok(Node::Object(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(target_arch = "wasm32")]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    #[test]
    fn a_key_that_stands_twice_is_kept_twice() {
        let node = Node::parse(br#"{"a": 1, "a": -2.5}"#).unwrap();
        assert_eq!(
            node,
            Node::Object(std::vec![
                ("a".into(), Node::Integer(1)),
                ("a".into(), Node::OtherNumber(-2.5))
            ])
        );
    }

    #[test]
    fn a_text_that_is_not_json_says_where() {
        let message = std::format!("{}", Node::parse(b"{\"a\": }").unwrap_err());
        assert!(message.contains("line 1 column 7"), "{message}");
        let fault = Node::parse(b"{\n \"a\": \"caf\xe9\"}").unwrap_err();
        assert_eq!(std::format!("{fault}"), "no UTF-8 at line 2 column 11");
        assert_eq!((fault.line(), fault.column()), (2, 11));
    }
}
