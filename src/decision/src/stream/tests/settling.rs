//! What is settled when an admitted request ends.

use std::string::{String, ToString};
use std::vec::Vec;

#[cfg(target_arch = "wasm32")]
use wasm_bindgen_test::wasm_bindgen_test as test;

use super::bodies::{CONTRACT, LIMITED, reading};
use super::*;

const BODY: &[u8] = br#"{"model":"m","max_tokens":100}"#;
const ESTIMATE: u64 = 8;
const HELD: u64 = 108;
const METERED: &str =
    r#"{"gate": "contract", "when_unavailable": "reject"}, {"gate": "metering", "when_unavailable": "reject"}"#;

const JSON: [(&str, &str); 2] = [(":status", "200"), ("content-type", "application/json; charset=utf-8")];
const USAGE: &[u8] =
    br#"{"usage":{"prompt_tokens":10,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":4}}}"#;

fn admitted(gates: &str, held: &str) -> Run {
    let mut run = reading(gates, "reject", "");
    let envelope = [LIMITED[0], LIMITED[1], ("x-admission-org-id", "g")];
    run.head(0, &envelope, false).piece(1, BODY).body_end(1);
    assert_eq!(run.asked()["tokens"], HELD);
    let verdict = std::format!(r#"{{"op": "{}", "verdict": "admit" {held}}}"#, op());
    run.answer(2, Some(200), &verdict);
    assert!(run.resumed());
    run
}

impl Run {
    fn response(&mut self, headers: &[(&str, &str)]) -> &mut Self {
        let headers: Vec<Header<'_>> = headers.iter().map(|(n, v)| (n.as_bytes(), v.as_bytes())).collect();
        self.stream.on_response_headers(LimitHeaders::Denied, Some(&headers));
        self
    }

    fn settled(&mut self) -> Option<serde_json::Value> {
        let told = self.end(9).told(9);
        if told.is_empty() {
            return None;
        }
        let told: serde_json::Value = serde_json::from_str(&told).unwrap();
        let settles = told["settles"].as_array().expect("a settlement");
        assert_eq!((settles.len(), settles[0]["op"].as_str()), (1, Some(op().as_str())));
        Some(settles[0].clone())
    }

    fn settled_tokens(&mut self) -> Option<u64> {
        self.settled().and_then(|settlement| settlement["tokens"].as_u64())
    }
}

const TOKENS: &str = r#", "held_tokens": 108"#;

#[test]
fn a_whole_report_replaces_the_hold() {
    let mut run = admitted(CONTRACT, TOKENS);
    run.response(&JSON);
    for byte in USAGE {
        assert!(run.stream.reads_response());
        run.stream.on_response_body(Some(core::slice::from_ref(byte)));
    }
    assert_eq!(run.settled_tokens(), Some(15));
    assert!(!run.counted(Counter::UsageUnknown));
}

#[test]
fn a_report_above_the_hold_is_charged_too() {
    let mut run = admitted(CONTRACT, TOKENS);
    run.response(&JSON)
        .stream
        .on_response_body(Some(br#"{"usage":{"input_tokens":1000,"output_tokens":500}}"#));
    assert_eq!(run.settled_tokens(), Some(1500));
}

#[test]
fn what_was_not_served_is_charged_its_estimate_or_its_hold_if_that_is_less() {
    for status in ["301", "400", "401", "404", "429", "500", "503"] {
        let mut run = admitted(CONTRACT, TOKENS);
        run.response(&[(":status", status), ("content-type", "application/json")]);
        assert!(!run.stream.reads_response());
        assert_eq!(run.settled_tokens(), Some(ESTIMATE), "{status}");
        assert!(!run.counted(Counter::UsageUnknown));
        let mut run = admitted(CONTRACT, r#", "held_tokens": 5"#);
        run.response(&[(":status", status)]);
        assert_eq!(run.settled_tokens(), None, "a hold of 5 stands");
    }
}

#[test]
fn the_hold_stands_where_nobody_knows_better() {
    let stream = [(":status", "200"), ("content-type", "text/event-stream")];
    let half: &[u8] = b"data: {\"choices\":[{\"delta\":{\"content\":\"hi\"}}]}\n\n";
    let half_message: &[u8] =
        b"data: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":10,\"output_tokens\":1}}}\n\n";
    type Response<'a> = (&'a [(&'a str, &'a str)], &'a [u8]);
    let responses: [Response<'_>; 9] = [
        (&[], b""),
        (&stream, half),
        (&stream, half_message),
        (&JSON, b"{\"usage\":{\"prompt_tokens\":10,"),
        (&JSON, b"{\"usage\":{\"prompt_tokens\":-1,\"completion_tokens\":5}}"),
        (&[JSON[0], JSON[1], ("content-encoding", "gzip")], USAGE),
        (&[(":status", "200"), ("content-type", "text/html")], USAGE),
        (&[(":status", "408"), JSON[1]], b""),
        (&[(":status", "504")], b""),
    ];
    for (headers, body) in responses {
        let mut run = admitted(CONTRACT, TOKENS);
        if !headers.is_empty() {
            run.response(headers);
        }
        run.stream.on_response_body(Some(body));
        assert_eq!(run.settled(), None, "{headers:?} {body:?}");
        assert!(run.counted(Counter::UsageUnknown), "{headers:?} {body:?}");
    }
    let mut run = admitted(CONTRACT, TOKENS);
    run.response(&JSON).stream.on_response_body(Some(USAGE));
    run.stream.on_response_body(None);
    assert_eq!(run.settled(), None, "a piece that the host could not give");
}

#[test]
fn without_a_token_limit_or_metering_the_response_is_not_looked_at() {
    let mut run = admitted(CONTRACT, "");
    run.response(&JSON);
    assert!(!run.stream.reads_response());
    assert_eq!(run.settled(), None);
    assert!(!run.counted(Counter::UsageUnknown));
}

#[test]
fn a_response_whose_report_counts_is_asked_for_uncompressed() {
    let identity = Effect::SetRequestHeader("accept-encoding", "identity");
    for (held, client, expected) in [(TOKENS, true, true), (TOKENS, false, false), ("", true, false)] {
        let mut run = reading(CONTRACT, "reject", "");
        let mut headers = LIMITED.to_vec();
        if client {
            headers.push(("accept-encoding", "gzip, br"));
        }
        run.head(0, &headers, false).piece(1, BODY).body_end(1);
        let verdict = std::format!(r#"{{"op": "{}", "verdict": "admit" {held}}}"#, op());
        run.answer(2, Some(200), &verdict);
        let at = run.effects.iter().position(|effect| *effect == identity);
        let resumed = run.effects.iter().position(|effect| *effect == Effect::Resume);
        assert_eq!(at.is_some(), expected);
        assert!(resumed.is_some() && at < resumed, "before it goes on");
    }
}

#[test]
fn a_slot_is_freed_by_the_same_settlement() {
    let mut run = admitted(CONTRACT, r#", "held_tokens": 108, "slot_ttl_ms": 3000"#);
    run.response(&JSON).stream.on_response_body(Some(USAGE));
    assert_eq!(run.settled_tokens(), Some(15));
    run.gatehouse.passed(5_000);
    run.gatehouse.settled(Some(200), b"{}", 5_000);
    assert_eq!(run.told(5_000), "", "nothing is renewed");
}

#[test]
fn metered_rules_bill_what_was_used_and_at_least_the_hold_where_that_is_unknown() {
    let bill = |run: &mut Run| run.settled().map(|settlement| settlement["bill"].clone());
    let mut run = admitted(METERED, TOKENS);
    run.response(&JSON).stream.on_response_body(Some(USAGE));
    let expected = serde_json::json!({"org": "g", "model": "m", "input": 10, "cached_input": 4, "output": 5});
    assert_eq!(bill(&mut run), Some(expected));

    let mut run = admitted(METERED, "");
    run.response(&JSON);
    let expected =
        serde_json::json!({"org": "g", "model": "m", "input": 8, "cached_input": 0, "output": 100, "is_hold": true});
    assert_eq!(bill(&mut run), Some(expected));
    assert!(run.counted(Counter::UsageUnknown));

    let mut run = admitted(METERED, TOKENS);
    run.response(&[(":status", "200"), ("content-type", "text/event-stream")]);
    run.stream.on_response_body(Some(
        b"data: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":70,\"output_tokens\":1}}}\n\n",
    ));
    let expected =
        serde_json::json!({"org": "g", "model": "m", "input": 70, "cached_input": 0, "output": 100, "is_hold": true});
    assert_eq!(bill(&mut run), Some(expected));

    let mut run = admitted(METERED, "");
    run.response(&[(":status", "500")]);
    assert_eq!(run.settled(), None, "nobody is billed for an error");
}

#[test]
fn a_request_that_was_never_decided_is_billed_too() {
    let gates = r#"{"gate": "metering", "when_unavailable": "admit"}"#;
    let mut run = reading(gates, "admit", "");
    let envelope = [LIMITED[0], ("x-admission-org-id", "g")];
    run.head(0, &envelope, false).piece(1, BODY).body_end(1);
    run.answer(2, Some(504), "");
    assert!(run.resumed());
    run.response(&JSON).stream.on_response_body(Some(USAGE));
    let told: serde_json::Value = serde_json::from_str(&run.end(9).told(9)).unwrap();
    assert_eq!(told["settles"][0]["bill"]["output"], 5);
    assert_eq!(told["unmetered"][0]["op"], op().to_string());
}

#[test]
fn a_settlement_is_told_again_until_it_is_answered_and_once_only() {
    let mut run = admitted(CONTRACT, TOKENS);
    run.response(&JSON).stream.on_response_body(Some(USAGE));
    let first: String = run.end(9).told(9);
    assert!(first.contains("\"tokens\":15"));
    run.gatehouse.settled(None, b"", 20);
    assert_eq!(run.told(1_000), first);
    run.gatehouse.settled(Some(200), b"{}", 1_001);
    run.end(1_002);
    assert_eq!(run.told(2_000), "");
}
