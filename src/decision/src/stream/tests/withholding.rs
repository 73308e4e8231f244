//! What a request lacks while it is held, and that it has it back when it goes on.

use std::string::{String, ToString};
use std::vec::Vec;

#[cfg(target_arch = "wasm32")]
use wasm_bindgen_test::wasm_bindgen_test as test;

use super::bodies::{CONTRACT, LIMITED, reading};
use super::*;

const WITHHOLD: &str = r#", "pause": {"withhold": ["authorization", "x-api-key"]}"#;

/// Lines of credentials among others, some of them twice and in spellings of their own.
const CREDENTIALS: [(&str, &str); 5] = [
    ("x-other", "1"),
    ("Authorization", "Bearer é"),
    ("x-api-key", "first"),
    ("authorization", "Basic 2"),
    ("x-api-key", "second"),
];

fn withholding(decision: &str, more: &str) -> Run {
    Run::with(
        &rules("\"reject\"", "\"reject\"", decision),
        &std::format!("{WITHHOLD}{more}"),
    )
}

fn lines(more: &[(&'static str, &'static str)]) -> Vec<(&'static str, &'static str)> {
    [&CREDENTIALS[..], more].concat()
}

fn limited() -> Vec<(&'static str, &'static str)> {
    lines(&LIMITED)
}

impl Run {
    fn withheld(&self) -> Vec<String> {
        let name = |effect: &Effect| match effect {
            Effect::WithholdRequestHeader(name) => Some(name.clone()),
            _ => None,
        };
        self.effects.iter().filter_map(name).collect()
    }

    fn put_back(&self) -> Vec<(String, String)> {
        let line = |effect: &Effect| match effect {
            Effect::PutBackRequestHeader(line) => {
                Some((line.name.clone(), String::from_utf8(line.value.clone()).unwrap()))
            }
            _ => None,
        };
        self.effects.iter().filter_map(line).collect()
    }

    fn place(&self, is_it: impl Fn(&Effect) -> bool) -> usize {
        self.effects.iter().position(is_it).expect("it is there")
    }
}

fn credentials() -> Vec<(String, String)> {
    let lines = CREDENTIALS.iter().filter(|(name, _)| *name != "x-other");
    lines
        .map(|(name, value)| (name.to_string(), value.to_string()))
        .collect()
}

#[test]
fn a_held_request_lacks_what_is_withheld_before_it_is_asked_about_and_has_it_back_when_it_goes_on() {
    let mut run = withholding("\"reject\"", "");
    run.headers(0, &limited());
    assert_eq!(run.withheld(), ["Authorization", "x-api-key", "authorization"]);
    let dispatch = run.place(|effect| matches!(effect, Effect::Dispatch(_)));
    let last = run
        .effects
        .iter()
        .rposition(|effect| matches!(effect, Effect::WithholdRequestHeader(_)));
    assert!(last < Some(dispatch), "{:?}", run.effects);
    assert!(run.put_back().is_empty());
    run.answer(1, Some(200), &admit());
    assert_eq!(run.put_back(), credentials());
    let resume = run.place(|effect| *effect == Effect::Resume);
    let last = run
        .effects
        .iter()
        .rposition(|effect| matches!(effect, Effect::PutBackRequestHeader(_)));
    assert!(last < Some(resume), "{:?}", run.effects);
    run.clock(10_000);
    run.end(20_000);
    assert!(run.put_back().is_empty(), "put back twice");
}

#[test]
fn a_refused_request_gets_nothing_back() {
    let mut run = withholding("\"reject\"", "");
    run.headers(0, &limited()).answer(211, Some(500), "");
    assert_eq!((run.reply(), run.put_back()), (degraded(), Vec::new()));
    let mut run = withholding("\"reject\"", "");
    run.headers(0, &limited()).clock(1_000);
    assert_eq!((run.reply(), run.put_back()), (degraded(), Vec::new()));
}

#[test]
fn a_request_that_goes_on_undecided_or_watched_has_it_back() {
    let mut run = withholding("\"admit\"", "");
    run.headers(0, &limited()).clock(1_000);
    assert!(run.resumed());
    assert_eq!(run.put_back(), credentials());
    let mut run = withholding("\"reject\"", r#", "mode": "shadow""#);
    run.headers(0, &limited()).clock(1_000);
    assert!(run.resumed());
    assert_eq!(run.put_back(), credentials());
}

#[test]
fn a_retry_withholds_nothing_anew_and_puts_back_nothing_yet() {
    let mut run = withholding("\"reject\"", "");
    run.headers(0, &limited()).answer(1, None, "");
    assert!(run.dispatched());
    assert_eq!((run.withheld(), run.put_back()), (Vec::new(), Vec::new()));
    run.answer(2, Some(200), &admit());
    assert_eq!(run.put_back(), credentials());
}

#[test]
fn a_dispatch_that_the_host_refuses_puts_back_what_was_withheld_only_where_the_request_goes_on() {
    for (decision, put_back) in [("\"admit\"", credentials()), ("\"reject\"", Vec::new())] {
        let mut run = withholding(decision, "");
        run.headers(0, &limited());
        run.effects = run.stream.on_dispatch_refused(&mut run.gatehouse, 0);
        assert_eq!(run.put_back(), put_back, "{decision}");
    }
}

#[test]
fn the_wait_for_a_body_withholds_already() {
    let mut run = reading(CONTRACT, "reject", WITHHOLD);
    run.head(0, &lines(&LIMITED), false);
    assert!(!run.dispatched() && run.stream.is_held());
    assert_eq!(run.withheld(), ["Authorization", "x-api-key", "authorization"]);
    run.piece(1, br#"{"model": "m"}"#).body_end(2);
    assert!(run.dispatched());
    assert_eq!((run.withheld(), run.put_back()), (Vec::new(), Vec::new()));
    run.answer(3, Some(200), &admit());
    assert_eq!(run.put_back(), credentials());
}

#[test]
fn what_goes_on_at_once_keeps_everything_and_what_is_refused_at_once_nothing() {
    let owner = [("x-admission-owner-id", "o")];
    let zero = [owner[0], ("x-admission-owner-rate-limit-requests", "+5")];
    let mut refused = Vec::new();
    for headers in [lines(&owner), lines(&zero), lines(&[])] {
        let mut run = withholding("\"reject\"", "");
        run.headers(0, &headers);
        assert!(!run.dispatched() && run.put_back().is_empty(), "{headers:?}");
        let is_refused = run.effects.iter().any(|effect| matches!(effect, Effect::Reply(_)));
        refused.push(is_refused);
        assert_eq!(run.withheld().is_empty(), !is_refused, "{headers:?}");
    }
    assert_eq!(refused, [false, true, true]);
    let mut run = withholding("\"reject\"", r#", "leases": {"max_requests": 100, "max_age_ms": 1000}"#);
    run.headers(0, &limited());
    let granting = std::format!(
        r#"{{"op": "{}", "verdict": "admit", "lease": {{"requests": 4, "ends_in_ms": 1000}}}}"#,
        op()
    );
    run.answer(5, Some(200), &granting);
    run.next_stream();
    run.headers(10, &limited());
    assert!(!run.stream.is_held() && !run.dispatched(), "the block admits it");
    assert_eq!((run.withheld(), run.put_back()), (Vec::new(), Vec::new()));
}

#[test]
fn what_the_host_did_not_remove_is_not_put_back_and_that_is_told() {
    let mut run = withholding("\"reject\"", "");
    run.headers(0, &limited());
    let told = run.stream.on_not_withheld(&mut run.gatehouse, "x-api-key", 0);
    let told = std::format!("{told:?}");
    assert!(told.contains("not_withheld") && told.contains("x-api-key"), "{told}");
    assert!(!told.contains("second"), "{told}");
    run.answer(1, Some(200), &admit());
    let all_but: Vec<_> = credentials()
        .into_iter()
        .filter(|(name, _)| name != "x-api-key")
        .collect();
    assert_eq!(run.put_back(), all_but);
    let told = run.stream.on_not_put_back(&mut run.gatehouse, "authorization", 1);
    assert!(std::format!("{told:?}").contains("not_put_back"));
}

#[test]
fn no_value_is_shown_by_what_describes_a_request() {
    let mut run = withholding("\"reject\"", "");
    run.headers(0, &limited());
    let mut shown = std::format!("{:?}", run.stream);
    run.answer(1, Some(200), &admit());
    shown.push_str(&std::format!("{:?}", run.effects));
    for secret in ["Bearer", "first", "Basic", "66, 101, 97"] {
        assert!(!shown.contains(secret), "{secret} in {shown}");
    }
}
