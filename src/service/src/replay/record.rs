//! One line of a log of requests: what it has to say, and what it may.
//!
//! ```text
//! {"ts": "2026-03-01T12:00:00.5Z", "method": "POST", "path": "/v1/chat/completions",
//!  "envelope": {"owner-id": "o", "org-id": "g", "org-rate-limit-requests": 60}, "headers": {"x-request-id": "…"},
//!  "model": "gpt-4o", "max_tokens": 500, "status": 200, "tokens": 812, "duration_ms": 950}
//! ```
//!
//! Keys that are not listed here are ignored, since a log has many. A key that is listed and has another type is a fault of
//! the line: what is not understood is not guessed.

use std::borrow::Cow;
use std::fmt;
use std::fmt::Write as _;

use jiff::Timestamp;
use portcullis_decision::json;
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::Number;

/// Later times are no times: the year 9999.
const LATEST_MS: u64 = 253_402_300_799_000;

/// A request of a log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Record {
    /// When it came, in milliseconds since 1970.
    pub at_ms: Option<u64>,
    /// Method, path with query, and the fields, the envelope's with its prefix.
    pub headers: Fields,
    /// The model that its body named.
    pub model: Option<String>,
    /// The most tokens that its body asked for.
    pub max_tokens: Option<u64>,
    /// What it was answered then.
    pub status: Option<u16>,
    /// Tokens of input and of output that it used.
    pub used: Option<(u64, u64)>,
    /// How long it took, in milliseconds.
    pub duration_ms: u64,
}

/// Names and values in one piece of memory. One thread reads a log and another plays it: each text by itself would be asked for
/// by the one and given back by the other, which takes longer than reading it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fields {
    text: String,
    /// Where each name ends, and where its value does.
    ends: Vec<(usize, usize)>,
}

impl Fields {
    /// One more field, whose name is made of these pieces, in lower case.
    pub fn push(&mut self, name: &[&str], value: impl fmt::Display) {
        let start = self.text.len();
        name.iter().for_each(|piece| self.text.push_str(piece));
        if let Some(name) = self.text.get_mut(start..) {
            name.make_ascii_lowercase();
        }
        let end = self.text.len();
        // Writing to a `String` does not fail.
        let _ = write!(self.text, "{value}");
        self.ends.push((end, self.text.len()));
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        let mut start = 0;
        self.ends.iter().filter_map(move |(name, value)| {
            let field = (self.text.get(start..*name)?, self.text.get(*name..*value)?);
            start = *value;
            Some(field)
        })
    }

    /// The first value of this name.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.iter().find(|(known, _)| *known == name).map(|(_, value)| value)
    }

    /// Takes every field of this name away.
    pub fn remove(&mut self, name: &str) {
        let mut rest = Self::default();
        for (known, value) in self.iter().filter(|(known, _)| *known != name) {
            rest.push(&[known], value);
        }
        *self = rest;
    }
}

/// A value that may be written as a word or as a number.
#[derive(Debug)]
pub(super) enum Word<'a> {
    Number(Number),
    Text(Cow<'a, str>),
}

// Written out, since serde's own `untagged` makes and drops an error for each figure: a fifth of what a line costs.
impl<'de: 'a, 'a> Deserialize<'de> for Word<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(WordVisitor)
    }
}

struct WordVisitor;

impl<'de> Visitor<'de> for WordVisitor {
    type Value = Word<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text or a number")
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Word<'de>, E> {
        Ok(Word::Number(number.into()))
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Word<'de>, E> {
        Ok(Word::Number(number.into()))
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<Word<'de>, E> {
        let number = Number::from_f64(number).ok_or_else(|| E::custom("a number without end"))?;
        Ok(Word::Number(number))
    }

    fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<Word<'de>, E> {
        Ok(Word::Text(Cow::Borrowed(text)))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Word<'de>, E> {
        Ok(Word::Text(Cow::Owned(text.to_owned())))
    }
}

impl fmt::Display for Word<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::Text(text) => f.write_str(text),
        }
    }
}

impl Word<'_> {
    /// Whether it is one of the words that loggers write for nothing.
    fn is_nothing(&self) -> bool {
        matches!(self, Self::Text(text) if text == "-")
    }

    /// As text, unless it says nothing.
    pub(super) fn text(&self) -> Option<String> {
        (!self.is_nothing()).then(|| self.to_string())
    }

    /// As a whole number.
    ///
    /// # Errors
    /// What it is instead.
    pub(super) fn figure(&self, key: &str) -> Result<Option<u64>, String> {
        let Some(text) = self.text() else { return Ok(None) };
        let wrong = || format!("{key} is {text:?}, no whole number from 0");
        text.parse().map(Some).map_err(|_| wrong())
    }
}

/// A time: RFC 3339, or seconds since 1970.
///
/// # Errors
/// A text that is neither.
pub fn time_ms(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is no time: RFC 3339, such as 2026-03-01T12:00:00Z, or seconds since 1970");
    let ms = match text.parse::<f64>() {
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a float is cast to its nearest integer, and what is out of range is refused below"
        )]
        Ok(seconds) if seconds.is_finite() && seconds >= 0.0 => (seconds * 1000.0).round() as u64,
        Ok(_) => return Err(wrong()),
        Err(_) => {
            let time: Timestamp = text.parse().map_err(|_| wrong())?;
            u64::try_from(time.as_millisecond()).map_err(|_| wrong())?
        }
    };
    if ms > LATEST_MS { Err(wrong()) } else { Ok(ms) }
}

/// Reads a line of a log. What stands in keys that are ignored may be no UTF-8.
///
/// # Errors
/// What is wrong with it.
pub(super) fn read<'a, T: Deserialize<'a>>(line: &'a [u8]) -> Result<T, String> {
    json::read(line)
        .or_else(|_| serde_json::from_slice(line))
        .map_err(|error| {
            // It is one line of a file, and has a number there: the parser's own would be told for it.
            let text = error.to_string();
            match text.strip_suffix(&format!(" at line {} column {}", error.line(), error.column())) {
                Some(what) => format!("{what} at column {}", error.column()),
                None => text,
            }
        })
}

/// A text, where it stands if it can be. `Cow` alone would be a copy.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

/// An object of words, in the order of its keys. Of two equal ones the last counts.
struct Words<'a>(Vec<(Cow<'a, str>, Option<Word<'a>>)>);

impl<'de: 'a, 'a> Deserialize<'de> for Words<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(WordsVisitor)
    }
}

struct WordsVisitor;

impl<'de> Visitor<'de> for WordsVisitor {
    type Value = Words<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: de::MapAccess<'de>>(self, mut map: A) -> Result<Words<'de>, A::Error> {
        let mut words = Vec::with_capacity(8);
        while let Some((Text(key), word)) = map.next_entry::<Text<'de>, Option<Word<'de>>>()? {
            words.push((key, word));
        }
        words.sort_by(|(one, _), (other, _)| one.cmp(other));
        words.dedup_by(|(key, word), (before, kept)| {
            let is_again = key == before;
            if is_again {
                *kept = word.take();
            }
            is_again
        });
        Ok(Words(words))
    }
}

#[derive(Deserialize)]
struct Line<'a> {
    #[serde(borrow)]
    ts: Option<Word<'a>>,
    #[serde(borrow)]
    method: Option<Text<'a>>,
    #[serde(borrow)]
    path: Option<Text<'a>>,
    #[serde(borrow)]
    envelope: Option<Words<'a>>,
    #[serde(borrow)]
    headers: Option<Words<'a>>,
    #[serde(borrow)]
    model: Option<Text<'a>>,
    max_tokens: Option<u64>,
    status: Option<u16>,
    tokens: Option<u64>,
    input_tokens: Option<u64>,
    output_tokens: Option<u64>,
    duration_ms: Option<f64>,
}

impl Record {
    /// Reads a line. `prefix` is that of the envelope's headers.
    ///
    /// # Errors
    /// What is wrong with it, without any of its values but times and figures.
    pub fn parse(line: &[u8], prefix: &str) -> Result<Self, String> {
        let line: Line<'_> = read(line)?;
        let mut record = Self {
            at_ms: line.ts.and_then(|ts| ts.text()).map(|ts| time_ms(&ts)).transpose()?,
            model: line.model.map(|Text(model)| model.into_owned()),
            max_tokens: line.max_tokens,
            status: line.status,
            duration_ms: milliseconds(line.duration_ms),
            ..Self::default()
        };
        record.use_tokens(line.input_tokens, line.output_tokens, line.tokens);
        record.head(
            line.method.as_ref().map_or("POST", |Text(method)| method),
            line.path.as_ref().map_or("/", |Text(path)| path),
        );
        for (name, value) in line.envelope.iter().flat_map(|Words(words)| words) {
            record.field(&[prefix, name], value.as_ref());
        }
        for (name, value) in line.headers.iter().flat_map(|Words(words)| words) {
            record.field(&[name], value.as_ref());
        }
        Ok(record)
    }

    /// The first line of its head, before all fields.
    pub(super) fn head(&mut self, method: &str, path: &str) {
        self.headers.push(&[":method"], method);
        self.headers.push(&[":path"], path);
    }

    /// What it used. What is known only as a sum counts as output, the dearer part.
    pub(super) fn use_tokens(&mut self, input: Option<u64>, output: Option<u64>, sum: Option<u64>) {
        self.used = match (input, output, sum) {
            (None, None, None) => None,
            (None, None, Some(sum)) => Some((0, sum)),
            (input, output, _) => Some((input.unwrap_or(0), output.unwrap_or(0))),
        };
    }

    pub(super) fn field(&mut self, name: &[&str], value: Option<&Word<'_>>) {
        if let Some(value) = value.filter(|value| !value.is_nothing()) {
            self.headers.push(name, value);
        }
    }

    /// A body that says what the record knows of the one that was sent; empty if that is nothing.
    pub fn body(&self) -> Vec<u8> {
        let Some(model) = &self.model else { return Vec::new() };
        let mut body = serde_json::json!({"model": model});
        if let (Some(most), Some(keys)) = (self.max_tokens, body.as_object_mut()) {
            keys.insert("max_tokens".to_owned(), most.into());
        }
        body.to_string().into_bytes()
    }
}

fn milliseconds(given: Option<f64>) -> u64 {
    /// A stream that is longer than a day counts as one of a day.
    const DAY_MS: f64 = 86_400_000.0;
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to a day")]
    given.map_or(0, |ms| ms.clamp(0.0, DAY_MS).round() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_with_what_it_has() {
        let line = br#"{"ts": "2026-03-01T12:00:00.5Z", "method": "POST", "path": "/v1", "envelope": {"owner-id": "o",
            "org-rate-limit-requests": 60, "lane": null, "graph-id": "-"}, "headers": {"X-Request-Id": "r"},
            "model": "m", "max_tokens": 5, "status": 200, "tokens": 8, "duration_ms": 1.5, "other": [1]}"#;
        let record = Record::parse(line, "x-saturn-").unwrap();
        let expected = [
            (":method", "POST"),
            (":path", "/v1"),
            ("x-saturn-org-rate-limit-requests", "60"),
            ("x-saturn-owner-id", "o"),
            ("x-request-id", "r"),
        ];
        assert_eq!(record.headers.iter().collect::<Vec<_>>(), expected);
        assert_eq!(record.at_ms, Some(1_772_366_400_500));
        assert_eq!((record.used, record.duration_ms), (Some((0, 8)), 2));
        assert_eq!(record.body(), br#"{"max_tokens":5,"model":"m"}"#);
        let record = Record::parse(br#"{"ts": 1772366400.5, "input_tokens": 3}"#, "p-").unwrap();
        assert_eq!((record.at_ms, record.used), (Some(1_772_366_400_500), Some((3, 0))));
        assert_eq!(record.body(), b"");
    }

    #[test]
    fn the_last_of_two_equal_keys_counts_and_what_is_ignored_may_be_anything() {
        let line =
            b"{\"envelope\": {\"lane\": \"a\", \"owner-id\": \"o\", \"lane\": \"\\u0062\"}, \"agent\": \"\xff\"}";
        let record = Record::parse(line, "p-").unwrap();
        let expected = [
            (":method", "POST"),
            (":path", "/"),
            ("p-lane", "b"),
            ("p-owner-id", "o"),
        ];
        assert_eq!(record.headers.iter().collect::<Vec<_>>(), expected);
        assert!(Record::parse(b"{\"model\": \"\xff\"}", "p-").is_err());
    }

    #[test]
    fn fields_are_found_and_taken_away() {
        let mut fields = Fields::default();
        fields.push(&["P-", "a"], 1);
        fields.push(&["b"], "");
        fields.push(&["p-a"], "X");
        assert_eq!(
            (fields.get("p-a"), fields.get("b"), fields.get("c")),
            (Some("1"), Some(""), None)
        );
        fields.remove("p-a");
        assert_eq!(fields.iter().collect::<Vec<_>>(), [("b", "")]);
    }

    #[test]
    fn a_line_that_is_not_understood_is_a_fault() {
        for line in [
            "",
            "[]",
            r#"{"ts": "yesterday"}"#,
            r#"{"ts": -1}"#,
            r#"{"ts": 1e300}"#,
            r#"{"status": "200"}"#,
            r#"{"envelope": {"owner-id": ["o"]}}"#,
            r#"{"tokens": -1}"#,
        ] {
            assert!(Record::parse(line.as_bytes(), "p-").is_err(), "{line}");
        }
    }
}
