//! Holds: how many tokens a request reserves before anybody knows what it will use.
//!
//! A hold is the estimate of the input plus the most output that the request allows, for each answer it asks for. The
//! difference to what was used is settled later, so a hold may be too high, and must not be low on demand: a figure that
//! some provider would run with is never read as a smaller one. Nothing here overflows; sums stop at [`LARGEST_LIMIT`],
//! which no token limit exceeds. Left out on purpose: the clamp of the default reservation to the smallest token limit
//! (the caller knows the limits).

use alloc::string::String;

use crate::body::BodyFacts;
use crate::json_scan::Value;
use crate::limits::LARGEST_LIMIT;

/// Bytes of a JSON body for one token of input.
///
/// English prose has a little more than four bytes per token, other scripts in UTF-8 and source code between three and
/// five, and the JSON around the messages comes on top, so the estimate is seldom low. Base64 media is over-estimated;
/// arrays of token ids may be under-estimated by up to two. Either way the settlement charges what the provider reports.
pub const BYTES_PER_TOKEN: u64 = 4;

/// The input tokens of a body of this length: a quarter of its bytes, rounded up, at most [`LARGEST_LIMIT`].
pub const fn estimate_input_tokens(bytes: u64) -> u64 {
    at_most_largest(bytes.div_ceil(BYTES_PER_TOKEN))
}

/// What a request says for one of its figures.
///
/// | in the body | is read as | because |
/// | --- | --- | --- |
/// | absent, `null` | `Absent` | providers take their default |
/// | `50`, `50.0`, `5e1`, `1e9` | that number | integral floats are integers to a lenient reader |
/// | `"50"`, `" 5e1 "`, `"1_000"` | the number in it | lenient readers convert strings |
/// | `1.5` | rounded up | a reader that doesn't refuse it rounds it either way |
/// | over 2^53 - 1, or of more than 64 characters | 2^53 - 1 | beyond what readers agree on; no provider serves it |
/// | `0`, `-1`, other negatives | `Unusable` | unlimited or unset to some servers, refused by the rest |
/// | any other string, a boolean, a list, an object | `Unusable` | no provider can make a number of it |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Figure {
    /// Not said.
    #[default]
    Absent,
    /// From 1 to 2^53 - 1.
    Given(u64),
    /// Said, but no figure: it stands for the default, like an absent one, and next to others.
    Unusable,
}

impl Figure {
    /// Reads a value.
    pub fn of(value: Value<'_>) -> Self {
        match value {
            Value::Null => Self::Absent,
            Value::Number(text) => Self::of_number(text),
            Value::LongNumber => Self::Given(LARGEST_LIMIT),
            Value::Text(text) => Self::of_number(&text.trim().chars().filter(|c| *c != '_').collect::<String>()),
            _ => Self::Unusable,
        }
    }

    fn of_number(text: &str) -> Self {
        // Rust's floats also parse `inf` and `nan`.
        if text.is_empty()
            || !text
                .bytes()
                .all(|b| matches!(b, b'0'..=b'9' | b'.' | b'e' | b'E' | b'+' | b'-'))
        {
            return Self::Unusable;
        }
        let figure = text
            .parse()
            .ok()
            .or_else(|| text.parse().ok().map(rounded_up))
            .unwrap_or(0);
        match figure {
            0 => Self::Unusable,
            figure => Self::Given(at_most_largest(figure)),
        }
    }
}

/// The smallest integer that is not below a number: 0 for negative ones, `u64::MAX` for infinity.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "casts from floats saturate, and an integer below 2^53 has an exact float"
)]
fn rounded_up(number: f64) -> u64 {
    let whole = number as u64;
    whole.saturating_add(u64::from(whole < LARGEST_LIMIT && (whole as f64) < number))
}

/// What a request reserves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hold {
    /// The estimate of its input.
    pub input_tokens: u64,
    /// The most output that it allows, for all its answers.
    pub output_tokens: u64,
}

impl Hold {
    /// The hold of a request.
    ///
    /// Its output is the largest of `max_tokens`, `max_completion_tokens`, `max_output_tokens` and Gemini's
    /// `maxOutputTokens`; one that is unusable counts as the default reservation, and so does none at all. It is
    /// multiplied by the answers asked for: the largest of `n`, `best_of` and `candidateCount` (at least 1), for each
    /// prompt of a list.
    pub fn of(facts: &BodyFacts, default_output_reservation: u64) -> Self {
        let figures = [
            facts.max_tokens,
            facts.max_completion_tokens,
            facts.max_output_tokens,
            facts.generation_max_output_tokens,
        ];
        let largest = figures
            .into_iter()
            .filter_map(|figure| match figure {
                Figure::Absent => None,
                Figure::Given(tokens) => Some(tokens),
                Figure::Unusable => Some(default_output_reservation),
            })
            .max();
        let answers = facts.answers.max(1).saturating_mul(facts.prompts.max(1));
        let each = largest.unwrap_or(default_output_reservation);
        Self {
            input_tokens: estimate_input_tokens(facts.input_bytes),
            output_tokens: at_most_largest(each.saturating_mul(answers)),
        }
    }

    /// The hold of a request whose body is not read: the default reservation.
    pub const fn without_body(default_output_reservation: u64) -> Self {
        Self {
            input_tokens: 0,
            output_tokens: default_output_reservation,
        }
    }

    /// All of it.
    pub const fn tokens(&self) -> u64 {
        at_most_largest(self.input_tokens.saturating_add(self.output_tokens))
    }
}

const fn at_most_largest(figure: u64) -> u64 {
    if figure < LARGEST_LIMIT { figure } else { LARGEST_LIMIT }
}

#[cfg(test)]
mod tests {
    use std::format;

    use super::*;
    use crate::body::BodyReader;

    fn output(fields: &str) -> u64 {
        let mut reader = BodyReader::new(10_000);
        reader.feed(format!("{{\"model\":\"m\"{fields}}}").as_bytes()).unwrap();
        Hold::of(&reader.finish().unwrap(), 1024).output_tokens
    }

    #[test]
    fn the_largest_of_the_figures_is_held() {
        assert_eq!(output(r#","max_tokens":1,"max_completion_tokens":5000"#), 5000);
        assert_eq!(output(r#","max_completion_tokens":1,"max_output_tokens":7"#), 7);
        assert_eq!(
            output(r#","generationConfig":{"maxOutputTokens":9,"candidateCount":2}"#),
            18
        );
        assert_eq!(
            output(r#","generation_config":{"max_output_tokens":9,"candidate_count":2}"#),
            18
        );
    }

    #[test]
    fn the_default_is_held_where_nothing_limits_the_output() {
        for fields in ["", r#","max_tokens":null"#, r#","max_tokens":-1"#, r#","max_tokens":0"#] {
            assert_eq!(output(fields), 1024, "{fields}");
        }
        assert_eq!(output(r#","max_tokens":-1,"max_completion_tokens":1"#), 1024);
        assert_eq!(output(r#","max_tokens":null,"max_completion_tokens":1"#), 1);
    }

    #[test]
    fn every_answer_asked_for_is_held() {
        assert_eq!(output(r#","max_tokens":10,"n":100"#), 1000);
        assert_eq!(output(r#","n":100"#), 102_400);
        assert_eq!(output(r#","max_tokens":10,"n":2,"best_of":20"#), 200);
        for n in ["0", "-1", "null", "\"x\"", "true", "[9]"] {
            assert_eq!(output(&format!(",\"max_tokens\":10,\"n\":{n}")), 10, "{n}");
        }
        assert_eq!(output(r#","max_tokens":10,"prompt":["a","b","c"]"#), 30);
        assert_eq!(output(r#","max_tokens":10,"prompt":[[1,2],[3]],"n":2"#), 40);
        for one in [r#""a""#, "[1,2,3]", "[]", "null", r#"["a"]"#] {
            assert_eq!(output(&format!(",\"max_tokens\":10,\"prompt\":{one}")), 10, "{one}");
        }
    }

    #[test]
    fn numbers_are_read_as_a_provider_might_read_them() {
        let largest = Figure::Given(LARGEST_LIMIT);
        for (text, expected) in [
            ("50", Figure::Given(50)),
            ("50.0", Figure::Given(50)),
            ("1e9", Figure::Given(1_000_000_000)),
            ("1.5", Figure::Given(2)),
            ("0.1", Figure::Given(1)),
            ("9007199254740991", largest),
            ("9007199254740992", largest),
            ("18446744073709551616", largest),
            ("1e400", largest),
            ("0", Figure::Unusable),
            ("-0", Figure::Unusable),
            ("-1", Figure::Unusable),
            ("-1e400", Figure::Unusable),
        ] {
            assert_eq!(Figure::of(Value::Number(text)), expected, "{text}");
        }
        for (text, expected) in [
            ("50", Figure::Given(50)),
            (" +050 ", Figure::Given(50)),
            ("1_000", Figure::Given(1000)),
            ("5e1", Figure::Given(50)),
            ("inf", Figure::Unusable),
            ("nan", Figure::Unusable),
            ("", Figure::Unusable),
            ("fifty", Figure::Unusable),
            ("-1", Figure::Unusable),
        ] {
            assert_eq!(Figure::of(Value::Text(text)), expected, "{text}");
        }
    }

    #[test]
    fn nothing_overflows() {
        let hold = |fields| {
            let mut reader = BodyReader::new(10_000);
            reader.feed(fields).unwrap();
            Hold::of(&reader.finish().unwrap(), u64::MAX).tokens()
        };
        assert_eq!(hold(br#"{"max_tokens":1e300,"n":1e300}"#), LARGEST_LIMIT);
        assert_eq!(hold(b"{}"), LARGEST_LIMIT);
        assert_eq!(estimate_input_tokens(u64::MAX), LARGEST_LIMIT);
        assert_eq!([0, 1, 4, 5].map(estimate_input_tokens), [0, 1, 1, 2]);
    }
}
