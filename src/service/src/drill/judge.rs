//! Whether an answer is the one that `explain` predicts, and everything in which it is not.
//!
//! Compared are the status, every header that the filter writes, the body, and what reached the upstream. Figures that depend
//! on the moment (what is left of a window) only have to lie between one second and the prediction. Left out on purpose:
//! what hosts add to a reply, and what an upstream answers.

use portcullis_decision::class::FailureClass;
use serde_json::Value;

use super::probes::Shows;
use crate::explain::report::{Ending, Report, WireReply};

/// Headers of a refusal that no other answer has.
const CLASS: &str = "x-portcullis-class";
/// Names that only the filter gives to a reply of its own, so that none may be there that was not predicted.
const OF_REFUSALS: [&str; 3] = [CLASS, "retry-after", "x-should-retry"];
/// Names that end so carry figures that depend on the moment.
const MOMENTARY: [&str; 3] = ["retry-after", "x-ratelimit-reset-requests", "x-ratelimit-reset-tokens"];

/// What came back.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Got {
    /// The status.
    pub(super) status: u16,
    /// Fields, lower-case.
    pub(super) headers: Vec<(String, String)>,
    /// The body.
    pub(super) body: Vec<u8>,
    /// How many requests the upstream saw meanwhile, if it can tell.
    pub(super) upstream: Option<u64>,
}

impl Got {
    /// The value of a header.
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    /// The code of a refusal.
    pub(super) fn code(&self) -> Option<String> {
        let body: Value = serde_json::from_slice(&self.body).ok()?;
        body.pointer("/error/code")?.as_str().map(str::to_owned)
    }

    /// Whether the filter refused it.
    pub(super) fn is_refused(&self) -> bool {
        self.header(CLASS).is_some()
    }
}

/// Whether what is predicted shows what it has to; if not, why these files do not bring it about.
pub(super) fn prediction_fault(shows: Shows, report: &Report) -> Option<String> {
    if report.ending == Ending::NotGuarded {
        let (method, path) = (&report.request.method, &report.request.path);
        return Some(format!("by the configuration no route guards {method} {path}"));
    }
    if !report.enforced {
        return Some("by the configuration the filter is in shadow mode: nothing is refused".to_owned());
    }
    let is_shown = match shows {
        Shows::Admission => report.ending == Ending::Admitted,
        Shows::Denial => report.ending == Ending::Denied,
        Shows::Class(class) => report.class == Some(class.name()) || is_opened(report, class),
    };
    let comes_to = report.class.unwrap_or("admitted");
    let why = &report.decided_by.why;
    (!is_shown).then(|| format!("by these files it comes to {comes_to}, not to {}: {why}", shows.name()))
}

/// Whether a class is predicted as a pass that the rules open.
pub(super) fn is_opened(report: &Report, class: FailureClass) -> bool {
    let counter = format!("portcullis_bypassed_{}", class.name());
    report.counted.contains(&counter)
}

/// Everything that is not as predicted.
pub(super) fn differences(report: &Report, got: &Got) -> Vec<String> {
    let mut found = Vec::new();
    match &report.reply {
        Some(reply) => refusal(reply, got, &mut found),
        None => admission(got, &mut found),
    }
    let expected = u64::from(report.upstream.reached);
    if let Some(seen) = got.upstream.filter(|seen| *seen != expected) {
        found.push(format!("the upstream saw {seen} requests, not {expected}"));
    }
    found
}

fn admission(got: &Got, found: &mut Vec<String>) {
    if let Some(class) = got.header(CLASS) {
        let code = got.code().unwrap_or_default();
        found.push(format!("it was refused: {} {code} ({class})", got.status));
    } else if got.status >= 500 {
        found.push(format!("status {}, and not from the filter", got.status));
    }
}

fn refusal(reply: &WireReply, got: &Got, found: &mut Vec<String>) {
    if got.status != reply.status {
        found.push(format!("status {}, not {}", got.status, reply.status));
    }
    for (name, expected) in &reply.headers {
        match got.header(name) {
            None => found.push(format!("no header {name}, expected {expected:?}")),
            Some(value) if !is_as(name, expected, value) => {
                found.push(format!("header {name} is {value:?}, not {expected:?}"));
            }
            Some(_) => {}
        }
    }
    for name in OF_REFUSALS {
        let is_expected = reply.headers.iter().any(|(known, _)| known == name);
        if let Some(value) = got.header(name).filter(|_| !is_expected) {
            found.push(format!("header {name} is {value:?}, and should not be there"));
        }
    }
    body(reply.body.as_bytes(), &got.body, found);
}

fn is_as(name: &str, expected: &str, value: &str) -> bool {
    if expected == value {
        return true;
    }
    if MOMENTARY.contains(&name) {
        return is_moment(expected, value);
    }
    // `"owner-requests";r=0;t=60`
    if name == "ratelimit"
        && let (Some((expected, at_most)), Some((value, moment))) =
            (expected.rsplit_once(";t="), value.rsplit_once(";t="))
    {
        return expected == value && is_moment(at_most, moment);
    }
    false
}

/// Between a second and what was predicted for a window that has just begun. `60`, or `60s`.
fn is_moment(at_most: &str, value: &str) -> bool {
    let seconds = |text: &str| text.trim_end_matches('s').parse::<f64>().ok();
    match (seconds(at_most), seconds(value)) {
        (Some(at_most), Some(value)) => (1.0..=at_most).contains(&value),
        _ => false,
    }
}

fn body(expected: &[u8], got: &[u8], found: &mut Vec<String>) {
    let Ok(expected) = serde_json::from_slice::<Value>(expected) else {
        if expected != got {
            found.push("another body".to_owned());
        }
        return;
    };
    let got: Value = serde_json::from_slice(got).unwrap_or_default();
    let Some(expected) = expected.get("error").and_then(Value::as_object) else {
        return;
    };
    let of_got = |key: &str| {
        got.get("error")
            .and_then(|error| error.get(key))
            .unwrap_or(&Value::Null)
    };
    let has_id = of_got("request_id").as_str().is_some_and(|id| !id.is_empty());
    if !has_id {
        found.push("no error.request_id in the body".to_owned());
    }
    for (key, expected) in expected.iter().filter(|(key, _)| *key != "request_id") {
        let value = of_got(key);
        let is_right = match (expected.as_u64(), value.as_u64()) {
            (Some(at_most), Some(value)) if key == "retry_after" => (1..=at_most).contains(&value),
            _ => value == expected,
        };
        if !is_right {
            found.push(format!("error.{key} in the body is {value}, not {expected}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn reply() -> WireReply {
        WireReply {
            status: 429,
            headers: [
                ("content-type", "application/json"),
                (CLASS, "quota_exhausted"),
                ("retry-after", "60"),
                ("ratelimit", "\"owner-requests\";r=0;t=60"),
            ]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .to_vec(),
            body: json!({"error": {"code": "RATE_LIMITED", "scope": "owner", "retry_after": 60, "request_id": "1"}})
                .to_string(),
        }
    }

    fn got() -> Got {
        let reply = reply();
        Got {
            status: reply.status,
            headers: reply.headers,
            body: reply.body.into_bytes(),
            upstream: Some(0),
        }
    }

    fn found(got: &Got) -> Vec<String> {
        let mut found = Vec::new();
        refusal(&reply(), got, &mut found);
        found
    }

    fn set(got: &mut Got, name: &str, value: &str) {
        got.headers.retain(|(known, _)| known != name);
        got.headers.push((name.to_owned(), value.to_owned()));
    }

    #[test]
    fn the_same_reply_some_seconds_later_is_as_predicted() {
        let mut later = got();
        assert_eq!(found(&later), Vec::<String>::new());
        set(&mut later, "retry-after", "41");
        set(&mut later, "ratelimit", "\"owner-requests\";r=0;t=41");
        set(&mut later, "x-envoy-upstream-service-time", "1");
        let body = json!({"error": {"code": "RATE_LIMITED", "scope": "owner", "retry_after": 41, "request_id": "2"}});
        later.body = body.to_string().into_bytes();
        assert_eq!(found(&later), Vec::<String>::new());
    }

    #[test]
    fn every_other_difference_is_named() {
        type Change = fn(&mut Got);
        let changes: [(&str, Change); 8] = [
            ("status 200, not 429", |got| got.status = 200),
            ("no header x-portcullis-class", |got| {
                got.headers.retain(|(name, _)| name != CLASS);
            }),
            ("header x-portcullis-class is \"limiter_unavailable\"", |got| {
                set(got, CLASS, "limiter_unavailable");
            }),
            ("header retry-after is \"61\"", |got| set(got, "retry-after", "61")),
            ("header ratelimit is", |got| {
                set(got, "ratelimit", "\"org-requests\";r=0;t=60");
            }),
            ("x-should-retry is \"false\", and should not", |got| {
                set(got, "x-should-retry", "false");
            }),
            ("error.code in the body is null", |got| got.body = b"served".to_vec()),
            ("error.scope in the body is \"org\"", |got| {
                let text = String::from_utf8(got.body.clone()).unwrap();
                got.body = text.replace("owner", "org").into_bytes();
            }),
        ];
        for (says, change) in changes {
            let mut got = got();
            change(&mut got);
            let found = found(&got).join("; ");
            assert!(found.contains(says), "{says}: {found}");
        }
    }

    #[test]
    fn a_pass_is_one_without_a_class_and_without_a_fault_of_the_gateway() {
        let passed = |change: fn(&mut Got)| {
            let mut got = Got {
                status: 404,
                ..Got::default()
            };
            change(&mut got);
            let mut found = Vec::new();
            admission(&got, &mut found);
            found
        };
        assert!(passed(|_| {}).is_empty(), "what an upstream answers is its own");
        assert!(passed(|got| got.status = 502)[0].contains("502"));
        assert!(passed(|got| set(got, CLASS, "quota_exhausted"))[0].contains("refused"));
    }
}
