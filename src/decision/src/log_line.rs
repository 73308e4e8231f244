//! Log lines: one JSON object each, and at most one per kind and second, which says how many it stands for.
//!
//! A line never holds a header value other than the org id, the request id and the trace id: no credential, no address, no body.

use alloc::borrow::Cow;
use alloc::string::String;
use alloc::vec::Vec;

use serde::Serialize;

use crate::class::FailureClass;

/// Milliseconds between two lines of one kind.
const INTERVAL_MS: u64 = 1_000;

/// How loud a line is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As expected.
    Info,
    /// Something was not checked, or is not available.
    Warn,
    /// An operator has to act.
    Error,
}

/// One line. Keys that do not apply are left out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LogLine {
    /// What happened, as one word.
    pub event: &'static str,
    /// What happened, as a sentence.
    pub message: Cow<'static, str>,
    /// How loud.
    pub level: Level,
    /// The failure class.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub class: Option<FailureClass>,
    /// The gate or gates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gate: Option<String>,
    /// What was done: `reject`, `admit` or `shadow`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub action: Option<&'static str>,
    /// The code of a refusal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<&'static str>,
    /// The organization.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub org: Option<String>,
    /// The client's request id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// The trace that the request belongs to.
    #[cfg(feature = "trace-lines")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace_id: Option<String>,
    /// The rules' name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rules: Option<String>,
    /// How many events this line stands for, itself included.
    #[serde(skip_serializing_if = "is_one")]
    pub count: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_one(count: &u64) -> bool {
    *count == 1
}

impl LogLine {
    /// A line about nothing but an event.
    pub fn new(level: Level, event: &'static str, message: impl Into<Cow<'static, str>>) -> Self {
        Self {
            event,
            message: message.into(),
            level,
            class: None,
            gate: None,
            action: None,
            code: None,
            org: None,
            request_id: None,
            #[cfg(feature = "trace-lines")]
            trace_id: None,
            rules: None,
            count: 1,
        }
    }

    /// The JSON text, in one line.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_else(|_| String::from("{\"event\":\"unprintable\"}"))
    }
}

/// Lets one line of a kind pass each second and counts the others, which the next line or [`LogLimiter::due`] tells.
#[derive(Debug, Clone, Default)]
pub struct LogLimiter {
    kinds: Vec<Kind>,
}

#[derive(Debug, Clone)]
struct Kind {
    event: &'static str,
    class: Option<FailureClass>,
    action: Option<&'static str>,
    next_ms: u64,
    /// The newest line that was held back, with the count of all of them.
    held: Option<LogLine>,
}

impl LogLimiter {
    /// The line to write now, or `None` if it is held back.
    pub fn admit(&mut self, mut line: LogLine, now_ms: u64) -> Option<LogLine> {
        let same =
            |kind: &&mut Kind| kind.event == line.event && kind.class == line.class && kind.action == line.action;
        let Some(kind) = self.kinds.iter_mut().find(same) else {
            let (event, class, action) = (line.event, line.class, line.action);
            self.kinds.push(Kind {
                event,
                class,
                action,
                next_ms: now_ms.saturating_add(INTERVAL_MS),
                held: None,
            });
            return Some(line);
        };
        line.count = line.count.saturating_add(kind.held.take().map_or(0, |held| held.count));
        if now_ms < kind.next_ms {
            kind.held = Some(line);
            return None;
        }
        kind.next_ms = now_ms.saturating_add(INTERVAL_MS);
        Some(line)
    }

    /// Lines that were held back and may be written by now.
    pub fn due(&mut self, now_ms: u64) -> Vec<LogLine> {
        let mut due = Vec::new();
        for kind in self
            .kinds
            .iter_mut()
            .filter(|kind| kind.held.is_some() && now_ms >= kind.next_ms)
        {
            kind.next_ms = now_ms.saturating_add(INTERVAL_MS);
            due.extend(kind.held.take());
        }
        due
    }

    /// All lines that are held back, for the end of a VM's life.
    pub fn drain(&mut self) -> Vec<LogLine> {
        self.kinds.iter_mut().filter_map(|kind| kind.held.take()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(target_arch = "wasm32")]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    #[test]
    fn one_line_a_second_stands_for_all_of_its_kind() {
        let mut limiter = LogLimiter::default();
        let line = |class| LogLine {
            class: Some(class),
            ..LogLine::new(Level::Warn, "bypassed", "m")
        };
        let limiter_down = FailureClass::LimiterUnavailable;
        assert_eq!(limiter.admit(line(limiter_down), 0).unwrap().count, 1);
        assert_eq!(limiter.admit(line(limiter_down), 10), None);
        assert_eq!(limiter.admit(line(limiter_down), 999), None);
        assert_eq!(
            limiter
                .admit(line(FailureClass::DecisionUnavailable), 999)
                .unwrap()
                .count,
            1
        );
        assert_eq!(limiter.due(999), []);
        assert_eq!(limiter.due(1_000)[0].count, 2);
        assert_eq!(limiter.admit(line(limiter_down), 1_500), None);
        assert_eq!(limiter.admit(line(limiter_down), 2_000).unwrap().count, 2);
    }

    #[test]
    fn a_line_is_one_object_in_one_line() {
        let mut line = LogLine::new(Level::Warn, "bypassed", "a\nb");
        line.org = Some("o\"}{\n".into());
        assert_eq!(
            line.to_json(),
            r#"{"event":"bypassed","message":"a\nb","level":"warn","org":"o\"}{\n"}"#
        );
    }
}
