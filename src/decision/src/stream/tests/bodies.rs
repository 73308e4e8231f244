//! The wait for a request's body, and what is asked when it has come.

use std::string::{String, ToString};
use std::vec::Vec;

#[cfg(target_arch = "wasm32")]
use wasm_bindgen_test::wasm_bindgen_test as test;

use super::*;

const BODY_TIMEOUT_MS: u64 = 10_000;

pub(super) const LIMITED: [(&str, &str); 2] = [
    ("x-admission-owner-id", "o"),
    ("x-admission-owner-rate-limit-tokens", "9000"),
];

/// Rules of these gates, with the model read from the body.
pub(super) fn reading(gates: &str, decision: &str, more: &str) -> Run {
    let rules = std::format!(
        r#"{{"name": "r", "envelope": {{"when_missing": "reject"}}, "gates": [{gates}],
            "decision": {{"when_unavailable": "{decision}"}}}}"#
    );
    Run::with(&rules, &std::format!(r#", "model": {{"from": "body"}} {more}"#))
}

pub(super) const CONTRACT: &str = r#"{"gate": "contract", "when_unavailable": "reject"}"#;
const CAPACITY: &str = r#"{"gate": "capacity", "when_unavailable": "reject"}"#;

impl Run {
    pub(super) fn piece(&mut self, now_ms: u64, bytes: &[u8]) -> &mut Self {
        self.effects = self.stream.on_body_piece(&mut self.gatehouse, Some(bytes), now_ms);
        self
    }

    pub(super) fn body_end(&mut self, now_ms: u64) -> &mut Self {
        self.effects = self.stream.on_body_end(&mut self.gatehouse, &mut self.host, now_ms);
        self.dispatch_if_asked()
    }

    pub(super) fn asked(&self) -> serde_json::Value {
        let mut callouts = self.effects.iter().filter_map(|effect| match effect {
            Effect::Dispatch(callout) => Some(serde_json::from_slice(&callout.body).unwrap()),
            _ => None,
        });
        callouts.next().expect("a callout")
    }

    fn lines(&self) -> Vec<String> {
        let line = |effect: &Effect| match effect {
            Effect::Log(line) => Some(line.to_json()),
            _ => None,
        };
        self.effects.iter().filter_map(line).collect()
    }
}

#[test]
fn nothing_is_asked_before_the_body_has_ended_and_then_its_model_and_its_hold_are() {
    let mut run = reading(CONTRACT, "reject", "");
    run.head(0, &LIMITED, false);
    assert!(run.stream.is_held() && !run.dispatched() && !run.resumed());
    let body = br#"{"model":"gpt-4o","max_tokens":100}"#;
    for byte in body {
        run.piece(1, core::slice::from_ref(byte));
        assert_eq!(run.effects, []);
    }
    run.body_end(2);
    let asked = run.asked();
    assert_eq!(asked["subject"]["model"], "gpt-4o");
    assert_eq!(asked["tokens"], 100 + body.len().div_ceil(4));
    run.answer(3, Some(200), &admit());
    assert!(run.resumed() && run.counted(Counter::Admitted));
}

#[test]
fn a_faulty_body_is_refused_at_its_first_fault_whatever_the_rules_open() {
    for (body, expected) in [
        (&br#"{"model":"a","model":"b"}"#[..], (400, "MODEL_AMBIGUOUS")),
        (br#"{"model":"a","Model":"b"}"#, (400, "MODEL_AMBIGUOUS")),
        (b"model=a", (400, "BODY_UNREADABLE")),
        (br#"{"model":"a""#, (400, "BODY_UNREADABLE")),
        (br#"{"model":7}"#, (400, "BODY_UNREADABLE")),
        (&[b' '; 101], (413, "BODY_TOO_LARGE")),
    ] {
        let mut run = reading(CONTRACT, "admit", "");
        run.gatehouse = {
            let text = r#"{"profile": "development", "rules": "contract-limits", "decision": {"upstream": "p"},
                "model": {"from": "body", "max_body_bytes": 100}}"#;
            Gatehouse::new(FilterConfig::parse(text.as_bytes()).unwrap(), text.as_bytes())
        };
        run.head(0, &LIMITED, false).piece(1, body);
        if run.effects.is_empty() {
            run.body_end(1);
        }
        assert_eq!(run.reply(), Some((expected.0, expected.1.to_string())), "{body:?}");
        assert!(run.stream.is_held() && !run.dispatched());
        assert_eq!(run.end(2).told(2), "", "nothing was asked, so nothing is cancelled");
    }
}

#[test]
fn a_model_is_required_only_where_a_gate_looks_at_it() {
    let mut run = reading(CONTRACT, "reject", "");
    run.head(0, &LIMITED, false).piece(1, b"{}").body_end(1);
    assert!(run.asked()["subject"]["model"].is_null());
    let gates = std::format!("{CAPACITY}, {CONTRACT}");
    let mut run = reading(&gates, "reject", "");
    run.head(0, &LIMITED, false).piece(1, b"{}").body_end(1);
    assert_eq!(run.reply(), Some((400, "MODEL_REQUIRED".into())));
}

#[test]
fn the_path_names_the_model_and_the_body_must_not_name_another() {
    let path = (":path", "/v1beta/models/gemini-pro:generateContent?alt=sse");
    for (body, expected) in [(&b"{}"[..], None), (br#"{"model":"other"}"#, Some("MODEL_AMBIGUOUS"))] {
        let mut run = reading(CONTRACT, "reject", "");
        run.head(0, &[LIMITED[0], LIMITED[1], path], false)
            .piece(1, body)
            .body_end(1);
        match expected {
            None => assert_eq!(run.asked()["subject"]["model"], "gemini-pro"),
            Some(code) => assert_eq!(run.reply(), Some((400, code.into()))),
        }
    }
    let mut run = reading(CONTRACT, "reject", "");
    run.head(
        0,
        &[LIMITED[0], LIMITED[1], (":path", "/v1/models/a/b:generateContent")],
        false,
    );
    assert_eq!(run.reply(), Some((400, "MODEL_AMBIGUOUS".into())));
}

#[test]
fn without_a_body_the_default_is_held_and_the_envelopes_model_is_not_believed() {
    for (more, ends_here) in [
        (&[(":method", "GET")][..], true),
        (&[(":method", "CONNECT")], false),
        (
            &[
                (":method", "GET"),
                ("upgrade", "WebSocket"),
                ("connection", "keep-alive, Upgrade"),
            ],
            false,
        ),
        (&[("expect", "100-continue"), ("content-length", "20")], false),
    ] {
        let mut run = reading(CONTRACT, "reject", r#", "tokens": {"default_output_reservation": 77}"#);
        let mut headers = LIMITED.to_vec();
        headers.push(("x-admission-model", "free"));
        headers.extend(more);
        run.head(0, &headers, ends_here);
        let asked = run.asked();
        assert_eq!(asked["tokens"], 77, "{more:?}");
        assert!(asked["subject"]["model"].is_null());
    }
}

#[test]
fn a_body_that_cannot_be_waited_for_gets_nobody_past_a_gate_that_looks_at_the_model() {
    for more in [
        &[(":method", "CONNECT")][..],
        &[("expect", "100-continue"), ("content-length", "20")],
    ] {
        let gates = std::format!("{CAPACITY}, {CONTRACT}");
        let mut run = reading(&gates, "reject", "");
        let mut headers = LIMITED.to_vec();
        headers.extend(more);
        run.head(0, &headers, false);
        assert_eq!(run.reply(), Some((400, "MODEL_REQUIRED".into())), "{more:?}");
        assert!(!run.dispatched());
    }
}

#[test]
fn without_ticks_no_body_is_waited_for() {
    let text = r#"{"profile": "development", "rules": "contract-limits", "decision": {"upstream": "p"},
        "model": {"from": "body"}}"#;
    let config = FilterConfig::parse(text.as_bytes()).unwrap();
    assert!(config.unfit_for_host(true).is_none());
    assert_eq!(config.unfit_for_host(false).unwrap().level, Level::Error);
}

#[test]
fn a_websocket_header_on_another_method_and_a_host_that_hides_the_body_do_not_skip_it() {
    for more in [
        &[("upgrade", "websocket"), ("connection", "upgrade")][..],
        &[("content-length", "20")],
        &[("expect", "x, 100-continue"), ("content-length", "20")],
        &[("transfer-encoding", "chunked")],
    ] {
        let mut run = reading(CONTRACT, "reject", "");
        let mut headers = LIMITED.to_vec();
        headers.extend(more);
        let ends_here = more[0].0 != "upgrade" && more[0].0 != "expect";
        run.head(0, &headers, ends_here);
        assert!(!run.dispatched() && run.stream.is_held(), "{more:?}");
    }
}

#[test]
fn a_request_that_needs_no_decision_does_not_wait_for_its_body() {
    let mut run = reading(CONTRACT, "reject", "");
    run.head(0, &LIMITED[..1], false);
    assert!(!run.stream.is_held() && run.counted(Counter::Admitted));
    assert_eq!(run.piece(1, b"anything").effects, []);
    assert_eq!(run.body_end(1).effects, []);
}

#[test]
fn a_host_that_gives_nothing_of_the_body_is_named_and_no_rule_opens_it() {
    let mut run = reading(CONTRACT, "admit", "");
    run.head(5, &LIMITED, false);
    assert_eq!(run.clock(5 + BODY_TIMEOUT_MS - 1).effects, []);
    run.clock(5 + BODY_TIMEOUT_MS);
    assert_eq!(run.reply(), degraded());
    let lines = run.lines();
    assert!(
        lines
            .iter()
            .any(|line| line.contains("allow_on_headers_stop_iteration")),
        "{lines:?}"
    );
    let mut run = reading(CONTRACT, "admit", "");
    run.head(0, &LIMITED, false);
    run.effects = run.stream.on_body_piece(&mut run.gatehouse, None, 1);
    assert_eq!(run.reply(), degraded());
}

#[test]
fn a_body_that_stops_arriving_is_the_senders_fault() {
    let mut run = reading(CONTRACT, "admit", "");
    run.head(0, &LIMITED, false).piece(9_000, b"{");
    run.clock(BODY_TIMEOUT_MS);
    assert_eq!(run.reply(), Some((400, "BODY_UNREADABLE".into())));
}

#[test]
fn shadow_mode_lets_a_faulty_body_go_on_while_it_arrives() {
    let mut run = reading(CONTRACT, "reject", r#", "mode": "shadow""#);
    run.head(0, &LIMITED, false).piece(1, b"not JSON");
    assert!(run.resumed() && !run.stream.is_held());
    assert!(run.counted(Counter::ShadowRejected(FailureClass::RequestMalformed)));
    assert_eq!(run.piece(2, b"more").effects, []);
    assert_eq!(run.body_end(2).effects, []);
}
