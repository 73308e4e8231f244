//! Requests whose model is read from the body: when it is asked about, what it holds, and that it goes up as it came. What
//! goes wrong on the way has a file of its own.

use portcullis_test_host::{Callout, Personality, TestHost, headers};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::llm::{
    BODY, BODY_TIMEOUT_MS, CALL, HOLD, MODEL, admit_with_hold, assert_forwarded, assert_refused, called, reader,
    reading, told_of,
};
use crate::scene::{assert_clean, decide_of, deny, rules};

fn without_op(callout: &Callout) -> Value {
    let mut json = callout.json();
    json["op"] = Value::Null;
    json
}

#[test]
fn a_body_is_waited_for_and_asked_about_at_its_end() {
    let mut host = reader("reject");
    let stream = host.begin(&CALL);
    let (head, tail) = BODY.as_bytes().split_at(30);
    host.body(stream, head, false);
    host.tick(1_000);
    assert_eq!(host.sent(), [], "it asks before it has read");
    host.body(stream, tail, true);
    let callout = host.callout();
    let asked = callout.json();
    let subject = json!({"owner": "owner-1", "org": "org-1", "model": MODEL});
    assert_eq!((&asked["subject"], &asked["tokens"]), (&subject, &json!(HOLD)));
    assert_eq!(
        asked["budget_ms"], 220,
        "the wait for the body takes the decision's time"
    );
    assert!(!host.stream(stream).has_passed() && host.stream(stream).forwarded.is_empty());
    admit_with_hold(&mut host, &callout);
    assert_forwarded(&host, stream);
}

#[test]
fn what_is_asked_is_the_same_wherever_the_body_is_cut() {
    let mut host = reader("reject");
    let (_, callout) = called(&mut host);
    let whole = without_op(&callout);
    for at in 0..=BODY.len() {
        let (head, tail) = BODY.as_bytes().split_at(at);
        let stream = host.begin(&CALL);
        host.body(stream, head, false);
        host.body(stream, tail, true);
        let callout = decide_of(&host, stream);
        assert_eq!(without_op(&callout), whole, "cut at {at}");
        admit_with_hold(&mut host, &callout);
        assert_forwarded(&host, stream);
    }
    let stream = host.begin(&CALL);
    for byte in BODY.as_bytes().chunks(1) {
        host.body(stream, byte, false);
    }
    host.body(stream, b"", true);
    assert_eq!(without_op(&decide_of(&host, stream)), whole);
}

#[test]
fn trailers_end_a_body() {
    let mut host = reader("reject");
    let stream = host.begin(&CALL);
    host.body(stream, BODY.as_bytes(), false);
    assert_eq!(host.sent(), []);
    host.trailers(stream);
    let callout = host.callout();
    assert_eq!(callout.json()["subject"]["model"], MODEL);
    admit_with_hold(&mut host, &callout);
    assert_forwarded(&host, stream);
}

#[test]
fn each_byte_of_a_body_is_copied_into_the_vm_once() {
    let mut host = reader("reject");
    let stream = host.begin(&CALL);
    let before = host.ledger().clone();
    let filler = "x".repeat(1_000);
    host.body(stream, br#"{"model":"m","x":["#, false);
    for _ in 0..300 {
        host.body(stream, format!("\"{filler}\",").as_bytes(), false);
    }
    host.body(stream, b"0]}", true);
    let read = host.ledger().since(&before).tally("proxy_get_buffer_bytes");
    let sent = host.stream(stream).sent.len() as u64;
    // Each call also carries a pointer and a size.
    assert_eq!(read.bytes - read.calls * 8, sent);
    let held = host.callout().json()["tokens"].as_u64();
    assert_eq!(held, Some(sent.div_ceil(4) + 1_024));
    assert_clean(&host);
}

#[test]
fn a_body_as_long_as_is_allowed_takes_no_more_memory_than_its_pieces() {
    let mut host = reader("reject");
    let (_, callout) = called(&mut host);
    admit_with_hold(&mut host, &callout);
    let before = host.memory_bytes();
    let stream = host.begin(&CALL);
    let mut body = br#"{"model":"m","x":""#.to_vec();
    body.resize(1_048_576 - 2, b'x');
    body.extend(br#""}"#);
    host.body(stream, &body, true);
    let callout = decide_of(&host, stream);
    admit_with_hold(&mut host, &callout);
    assert_forwarded(&host, stream);
    let grown = host.memory_bytes() - before;
    assert!(grown <= 256 * 1_024, "{grown} bytes for a body of {}", body.len());
}

#[test]
fn a_client_that_goes_away_while_it_sends_leaves_nothing_behind() {
    let mut host = reader("reject");
    let stream = host.begin(&CALL);
    host.body(stream, &BODY.as_bytes()[..40], false);
    host.reset(stream);
    host.tick(BODY_TIMEOUT_MS + 1_000);
    assert_eq!(host.sent(), []);
    assert!(host.stream(stream).replies.is_empty());
    assert_clean(&host);
}

#[test]
fn a_denied_request_sends_nothing_of_its_body_up() {
    let mut host = reader("admit");
    let (stream, callout) = called(&mut host);
    deny(&mut host, &callout);
    assert_refused(&host, stream, 429, "RATE_LIMITED");
    host.finish(stream);
    assert_eq!(told_of(&mut host, &callout.op()), (vec![], vec![]));
}

#[test]
fn what_has_no_body_to_wait_for_is_decided_on_its_headers() {
    let mut get = CALL.to_vec();
    get[0].1 = "GET";
    let mut websocket = get.clone();
    websocket.extend([("upgrade", "WebSocket"), ("connection", "keep-alive, Upgrade")]);
    let mut connect = CALL.to_vec();
    connect[0].1 = "CONNECT";
    let mut expecting = CALL.to_vec();
    expecting.push(("expect", "100-Continue"));
    for (lines, ends_here) in [(get, true), (websocket, false), (connect, false), (expecting, false)] {
        let mut host = reader("reject");
        let stream = host.open(host.root());
        host.send_headers(stream, headers(&lines), ends_here);
        let callout = host.callout();
        assert_eq!(callout.json()["subject"], json!({"owner": "owner-1", "org": "org-1"}));
        assert_eq!(callout.json()["tokens"], 1_024);
        if !ends_here {
            host.body(stream, b"while it waits", false);
        }
        admit_with_hold(&mut host, &callout);
        if !ends_here {
            host.body(stream, b", and after", true);
        }
        assert_forwarded(&host, stream);
        assert_eq!(host.ledger().tally("proxy_get_buffer_bytes").calls, 2, "a body is read");
    }
}

#[test]
fn a_body_that_nobody_needs_to_read_goes_up_at_once() {
    let mut host = reader("reject");
    let mut unlimited = CALL.to_vec();
    unlimited.truncate(7);
    let mut options = CALL.to_vec();
    options[0].1 = "OPTIONS";
    for lines in [unlimited, options] {
        let stream = host.begin(&lines);
        assert!(host.stream(stream).has_passed());
        host.body(stream, b"{\"model\":", false);
        assert_eq!(host.stream(stream).forwarded, b"{\"model\":");
        host.body(stream, b"nothing that is JSON", true);
        assert_forwarded(&host, stream);
    }
    assert_eq!(host.sent(), []);
}

#[test]
fn shadow_mode_counts_a_fault_and_lets_the_body_through() {
    let mut shadow = reading(&rules("reading", "reject"));
    shadow["mode"] = json!("shadow");
    for body in ["not json", BODY] {
        let mut host = TestHost::new(Personality::ENVOY);
        host.configure(&shadow.to_string()).expect("no faults");
        let stream = host.begin(&CALL);
        let (head, tail) = body.as_bytes().split_at(5);
        host.body(stream, head, false);
        host.body(stream, tail, true);
        if body == BODY {
            let callout = host.callout();
            deny(&mut host, &callout);
            assert_eq!(host.counter("shadow_rejected_quota_exhausted"), 1);
        } else {
            assert_eq!(host.counter("shadow_rejected_request_malformed"), 1);
        }
        assert_forwarded(&host, stream);
    }
}

/// Bytes that may be a body, and where they are cut.
fn any_body() -> impl Strategy<Value = (Vec<u8>, Vec<prop::sample::Index>)> {
    let edits = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4);
    let damaged = edits.prop_map(|edits| {
        let mut body = BODY.as_bytes().to_vec();
        for (at, byte) in edits {
            *at.get_mut(&mut body) = byte;
        }
        body
    });
    let bytes = prop_oneof![1 => prop::collection::vec(any::<u8>(), 0..300), 2 => damaged];
    (bytes, prop::collection::vec(any::<prop::sample::Index>(), 0..5))
}

/// Cuts bytes in pieces.
pub(crate) fn pieces<'a>(bytes: &'a [u8], cuts: &[prop::sample::Index]) -> Vec<&'a [u8]> {
    let mut at: Vec<_> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
    at.extend([0, bytes.len()]);
    at.sort_unstable();
    at.windows(2).map(|ends| &bytes[ends[0]..ends[1]]).collect()
}

#[test]
fn no_bytes_of_a_body_trap_or_get_past_the_decision() {
    let mut host = reader("admit");
    crate::interleavings::for_all(400, &any_body(), |(body, cuts)| {
        let stream = host.begin(&CALL);
        for piece in pieces(&body, &cuts) {
            host.body(stream, piece, false);
        }
        host.body(stream, b"", true);
        if host.stream(stream).replies.is_empty() {
            let callout = decide_of(&host, stream);
            prop_assert!(!host.stream(stream).has_passed());
            admit_with_hold(&mut host, &callout);
            prop_assert_eq!(&host.stream(stream).forwarded, &body);
        } else {
            prop_assert!(!host.stream(stream).has_passed());
        }
        host.finish(stream);
        prop_assert!(host.violations().is_empty(), "{:?}", host.violations());
        Ok(())
    });
}
