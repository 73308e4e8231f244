//! The trace that a request belongs to, as its W3C headers say: what of `traceparent` and `tracestate` a decision carries on.
//!
//! Anything but one line of `traceparent` that is well-formed is no trace, and then `tracestate` is nothing either: who gets
//! half of it could not tell a broken trace from a new one. The client's own headers are not touched. Left out on purpose:
//! spans, sampling, and what an entry of `tracestate` means to its vendor.

use alloc::string::String;
use alloc::vec::Vec;

use crate::stream::Header;

/// Length of version, trace id, span id and flags with the dashes between them, in bytes.
const LENGTH: usize = 55;
/// Longest `tracestate` that is carried on, all lines together, in bytes: what everybody has to take at least.
const LONGEST_STATE: usize = 512;
const ZEROS: &[u8; 32] = b"00000000000000000000000000000000";

/// Where a request stands in its trace: `traceparent` in the form of version 00, whatever version it came in; then, if there
/// is a `tracestate`, a comma and that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceContext(String);

impl TraceContext {
    /// What the headers of a request say; `None` if it belongs to no trace.
    pub fn of<'a>(headers: impl IntoIterator<Item = Header<'a>>) -> Option<Self> {
        let (mut parent, mut state) = (None, Vec::new());
        for (name, value) in headers {
            if name.eq_ignore_ascii_case(b"traceparent") {
                if parent.is_some() {
                    return None;
                }
                parent = Some(value);
            } else if name.eq_ignore_ascii_case(b"tracestate") {
                state.push(b',');
                state.extend_from_slice(value);
            }
        }
        let mut text = parent_of(parent?)?;
        if state.len() <= LONGEST_STATE.saturating_add(1)
            && state.iter().all(|byte| matches!(byte, b' '..=b'~' | b'\t'))
        {
            text.append(&mut state);
        }
        String::from_utf8(text).ok().map(Self)
    }

    /// `traceparent`.
    pub fn parent(&self) -> &str {
        self.0.get(..LENGTH).unwrap_or_default()
    }

    /// `tracestate`, if there is any.
    pub fn state(&self) -> Option<&str> {
        self.0.get(56..).filter(|state| !state.is_empty())
    }

    /// The trace: 32 hexadecimal digits, not all of them 0.
    pub fn trace_id(&self) -> &str {
        self.0.get(3..35).unwrap_or_default()
    }

    /// The span that the request was sent from: 16 hexadecimal digits, not all of them 0.
    pub fn span_id(&self) -> &str {
        self.0.get(36..52).unwrap_or_default()
    }

    /// Whether who sent the request records this trace.
    pub fn is_sampled(&self) -> bool {
        let digits = self.0.get(53..LENGTH);
        digits.is_some_and(|digits| u8::from_str_radix(digits, 16).is_ok_and(|flags| flags & 1 == 1))
    }
}

/// A well-formed value, in the form of version 00. A later version may say more after what this one says.
fn parent_of(value: &[u8]) -> Option<Vec<u8>> {
    let fields = value.get(..LENGTH)?;
    let ends_well = match value.get(LENGTH) {
        None => true,
        Some(more) => *more == b'-' && !fields.starts_with(b"00"),
    };
    let fits = |(at, byte): (usize, &u8)| match at {
        2 | 35 | 52 => *byte == b'-',
        _ => matches!(byte, b'0'..=b'9' | b'a'..=b'f'),
    };
    if !ends_well
        || !fields.iter().enumerate().all(fits)
        || fields.starts_with(b"ff")
        || fields.get(3..35)? == ZEROS
        || ZEROS.starts_with(fields.get(36..52)?)
    {
        return None;
    }
    let mut parent = fields.to_vec();
    parent.get_mut(..2)?.copy_from_slice(b"00");
    Some(parent)
}

#[cfg(test)]
mod tests {
    use alloc::format;
    use alloc::string::ToString;
    use alloc::vec;

    use super::*;
    #[cfg(target_arch = "wasm32")]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn of(lines: &[(&str, &str)]) -> Option<TraceContext> {
        TraceContext::of(lines.iter().map(|(name, value)| (name.as_bytes(), value.as_bytes())))
    }

    #[test]
    fn a_well_formed_trace_is_carried_on_as_it_is() {
        let trace = of(&[(":path", "/"), ("TraceParent", PARENT), ("tracestate", "a=1,b=2")]).unwrap();
        assert_eq!((trace.parent(), trace.state()), (PARENT, Some("a=1,b=2")));
        assert_eq!(trace.trace_id(), "4bf92f3577b34da6a3ce929d0e0e4736");
        assert_eq!(trace.span_id(), "00f067aa0ba902b7");
        assert!(trace.is_sampled());
    }

    #[test]
    fn a_malformed_traceparent_is_none_and_takes_tracestate_with_it() {
        let with = |at: usize, text: &str| {
            let mut value = PARENT.to_string();
            value.replace_range(at..at + text.len(), text);
            value
        };
        let malformed = [
            String::new(),
            "00".into(),
            PARENT[..54].into(),
            format!("{PARENT}-"),
            format!("{PARENT}0"),
            format!("{PARENT}-more"),
            format!(" {PARENT}"),
            format!("{PARENT}, {PARENT}"),
            with(0, "ff"),
            with(0, "0g"),
            with(2, "_"),
            with(35, "0"),
            with(52, " "),
            with(53, "0x"),
            with(3, "00000000000000000000000000000000"),
            with(36, "0000000000000000"),
            with(3, "4BF92F"),
            with(36, "00F067"),
            with(3, "\u{e9}"),
            with(0, "01") + "more",
        ];
        for value in malformed {
            assert_eq!(of(&[("traceparent", &value), ("tracestate", "a=1")]), None, "{value:?}");
        }
        assert_eq!(of(&[("tracestate", "a=1")]), None);
        assert_eq!(
            of(&[("traceparent", PARENT), ("traceparent", PARENT)]),
            None,
            "two lines"
        );
        assert_eq!(
            TraceContext::of([(b"traceparent".as_slice(), [0xFF; 55].as_slice())]),
            None
        );
    }

    #[test]
    fn a_later_version_is_read_as_far_as_version_00_goes() {
        for later in [
            format!("01{}", &PARENT[2..]),
            format!("cc{}-what-comes-next", &PARENT[2..]),
        ] {
            assert_eq!(of(&[("traceparent", &later)]).unwrap().parent(), PARENT, "{later}");
        }
    }

    #[test]
    fn only_the_lowest_flag_says_that_a_trace_is_recorded() {
        for (flags, sampled) in [
            ("00", false),
            ("01", true),
            ("02", false),
            ("03", true),
            ("fe", false),
            ("ff", true),
        ] {
            let trace = of(&[("traceparent", &format!("{}{flags}", &PARENT[..53]))]).unwrap();
            assert_eq!(trace.is_sampled(), sampled, "{flags}");
        }
    }

    #[test]
    fn tracestate_is_joined_and_bounded_and_without_it_the_trace_goes_on() {
        let state = |values: &[&str]| {
            let mut lines = vec![("traceparent", PARENT)];
            lines.extend(values.iter().map(|value| ("tracestate", *value)));
            of(&lines).unwrap().state().map(ToString::to_string)
        };
        assert_eq!(state(&["a=1", "b=2"]).as_deref(), Some("a=1,b=2"));
        let longest = format!("a={}", "1".repeat(510));
        assert_eq!(state(&[&longest]).as_ref(), Some(&longest));
        for none in [
            [""].as_slice(),
            &[&(longest + "1")],
            &["a=1\n"],
            &["a=\u{e9}"],
            &["a=\u{7f}"],
        ] {
            assert_eq!(state(none), None, "{none:?}");
        }
    }
}
