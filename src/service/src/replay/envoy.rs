//! `--from envoy`: a line of Envoy's JSON access log as a record, by the names that `docs/replay.md` gives in `json_format`.
//!
//! Envoy writes null, or `-`, for what a request did not have. Other keys of the line are ignored; keys under the envelope's
//! prefix are its headers.

use std::borrow::Cow;
use std::collections::BTreeMap;

use portcullis_decision::envelope::has_prefix;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::record::{Record, Word, read, time_ms};

#[derive(Deserialize)]
#[serde(untagged)]
enum Entry<'a> {
    #[serde(borrow)]
    Word(Word<'a>),
    Other(IgnoredAny),
}

/// Reads a line.
///
/// # Errors
/// What is wrong with it, without any of its values but times and figures.
pub fn parse(line: &[u8], prefix: &str) -> Result<Record, String> {
    let entries: BTreeMap<Cow<'_, str>, Entry<'_>> = read(line)?;
    let word = |key: &str| match entries.get(key) {
        Some(Entry::Word(word)) => Some(word),
        _ => None,
    };
    let text = |key: &str| word(key).and_then(Word::text);
    let figure = |key: &str| word(key).map_or(Ok(None), |word| word.figure(key));
    let mut record = Record {
        at_ms: text("start_time").map(|time| time_ms(&time)).transpose()?,
        model: text("model"),
        status: figure("response_code")?.and_then(|status| u16::try_from(status).ok()),
        duration_ms: figure("duration")?.unwrap_or(0),
        used: None,
        ..Record::default()
    };
    record.use_tokens(figure("input_tokens")?, figure("output_tokens")?, figure("tokens")?);
    record.head(
        text("method").as_deref().unwrap_or("POST"),
        text("path").as_deref().unwrap_or("/"),
    );
    for (name, entry) in &entries {
        if let Entry::Word(word) = entry
            && has_prefix(name.as_bytes(), prefix)
        {
            record.field(&[name], Some(word));
        }
    }
    Ok(record)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_envoy_is_a_record() {
        let line = br#"{"start_time":"2026-03-01T12:00:00.500Z","method":"POST","path":"/v1?x","response_code":429,"duration":12,
            "x-admission-owner-id":"o","x-admission-org-rate-limit-requests":"60","x-admission-lane":null,"x-admission-graph-id":"-",
            "bytes_sent":5,"tls":{"version":"x"},"tokens":"-"}"#;
        let record = parse(line, "x-admission-").unwrap();
        assert_eq!(
            (record.at_ms, record.status, record.duration_ms),
            (Some(1_772_366_400_500), Some(429), 12)
        );
        assert_eq!(record.used, None);
        let expected = [
            (":method", "POST"),
            (":path", "/v1?x"),
            ("x-admission-org-rate-limit-requests", "60"),
            ("x-admission-owner-id", "o"),
        ];
        assert_eq!(record.headers.iter().collect::<Vec<_>>(), expected);
        assert_eq!(
            parse(br#"{"response_code":"x"}"#, "p-").unwrap_err(),
            "response_code is \"x\", no whole number from 0"
        );
    }
}
