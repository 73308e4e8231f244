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
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use jiff::Timestamp;
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
    /// The method.
    pub method: String,
    /// The path with its query.
    pub path: String,
    /// Fields, the envelope's with its prefix.
    pub headers: Vec<(String, String)>,
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

/// A value that may be written as a word or as a number.
#[derive(Debug)]
pub(super) enum Word<'a> {
    Number(Number),
    Text(Cow<'a, str>),
}

// Written out, since serde's own `untagged` makes and drops an error for each figure: a fifth of what a line costs.
impl<'de: 'a, 'a> Deserialize<'de> for Word<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(WordVisitor(PhantomData))
    }
}

struct WordVisitor<'a>(PhantomData<Word<'a>>);

impl<'de: 'a, 'a> Visitor<'de> for WordVisitor<'a> {
    type Value = Word<'a>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text or a number")
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Word<'a>, E> {
        Ok(Word::Number(number.into()))
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Word<'a>, E> {
        Ok(Word::Number(number.into()))
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<Word<'a>, E> {
        let number = Number::from_f64(number).ok_or_else(|| E::custom("a number without end"))?;
        Ok(Word::Number(number))
    }

    fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<Word<'a>, E> {
        Ok(Word::Text(Cow::Borrowed(text)))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Word<'a>, E> {
        Ok(Word::Text(Cow::Owned(text.to_owned())))
    }
}

impl Word<'_> {
    /// As text, unless it is one of the words that loggers write for nothing.
    pub(super) fn text(&self) -> Option<String> {
        match self {
            Self::Number(number) => Some(number.to_string()),
            Self::Text(text) if text == "-" => None,
            Self::Text(text) => Some(text.to_string()),
        }
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

#[derive(Deserialize)]
struct Line<'a> {
    #[serde(borrow)]
    ts: Option<Word<'a>>,
    #[serde(borrow)]
    method: Option<Cow<'a, str>>,
    #[serde(borrow)]
    path: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    envelope: Option<BTreeMap<Cow<'a, str>, Option<Word<'a>>>>,
    #[serde(borrow, default)]
    headers: Option<BTreeMap<Cow<'a, str>, Option<Word<'a>>>>,
    #[serde(borrow)]
    model: Option<Cow<'a, str>>,
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
        let line: Line<'_> = serde_json::from_slice(line).map_err(|error| error.to_string())?;
        let mut record = Self {
            at_ms: line.ts.and_then(|ts| ts.text()).map(|ts| time_ms(&ts)).transpose()?,
            method: line.method.map_or_else(|| "POST".to_owned(), Cow::into_owned),
            path: line.path.map_or_else(|| "/".to_owned(), Cow::into_owned),
            model: line.model.map(Cow::into_owned),
            max_tokens: line.max_tokens,
            status: line.status,
            duration_ms: milliseconds(line.duration_ms),
            ..Self::default()
        };
        record.use_tokens(line.input_tokens, line.output_tokens, line.tokens);
        for (name, value) in line.envelope.into_iter().flatten() {
            record.field(&format!("{prefix}{name}"), value.as_ref());
        }
        for (name, value) in line.headers.into_iter().flatten() {
            record.field(&name, value.as_ref());
        }
        Ok(record)
    }

    /// What it used. What is known only as a sum counts as output, the dearer part.
    pub(super) fn use_tokens(&mut self, input: Option<u64>, output: Option<u64>, sum: Option<u64>) {
        self.used = match (input, output, sum) {
            (None, None, None) => None,
            (None, None, Some(sum)) => Some((0, sum)),
            (input, output, _) => Some((input.unwrap_or(0), output.unwrap_or(0))),
        };
    }

    pub(super) fn field(&mut self, name: &str, value: Option<&Word<'_>>) {
        if let Some(value) = value.and_then(Word::text) {
            self.headers.push((name.to_ascii_lowercase(), value));
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
            ("x-saturn-org-rate-limit-requests", "60"),
            ("x-saturn-owner-id", "o"),
            ("x-request-id", "r"),
        ];
        let headers: Vec<_> = record.headers.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
        assert_eq!(headers, expected);
        assert_eq!(record.at_ms, Some(1_772_366_400_500));
        assert_eq!((record.used, record.duration_ms), (Some((0, 8)), 2));
        assert_eq!(record.body(), br#"{"max_tokens":5,"model":"m"}"#);
        let record = Record::parse(br#"{"ts": 1772366400.5, "input_tokens": 3}"#, "p-").unwrap();
        assert_eq!((record.at_ms, record.used), (Some(1_772_366_400_500), Some((3, 0))));
        assert_eq!(record.body(), b"");
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
