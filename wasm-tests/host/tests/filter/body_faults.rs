//! Bodies that are refused, that do not come, or that the host does not hand over: what the client gets, and that nothing
//! of them is opened, asked about or sent up.

use std::collections::BTreeSet;

use portcullis_test_host::{Call, Personality, status};

use crate::llm::{
    BODY, BODY_TIMEOUT_MS, CALL, admit_with_hold, assert_forwarded, assert_refused, called, reader, reader_on,
};
use crate::scene::{PATIENCE_MS, assert_clean, assert_degraded, decide_of, rules};

#[test]
fn a_fault_is_refused_at_once_and_nothing_is_asked_or_told() {
    let too_long = format!(r#"{{"x":"{}"#, "x".repeat(1_048_576));
    let cases = [
        (r#"{"model":"a","model":"#, 400, "MODEL_AMBIGUOUS"),
        (r#"{"model":"a","Model":"#, 400, "MODEL_AMBIGUOUS"),
        (r#"{"model":5,"#, 400, "BODY_UNREADABLE"),
        ("model=gpt", 400, "BODY_UNREADABLE"),
        ("\u{FEFF}{", 400, "BODY_UNREADABLE"),
        (too_long.as_str(), 413, "BODY_TOO_LARGE"),
    ];
    for when_unavailable in ["reject", "admit"] {
        for (start, status, code) in cases {
            let mut host = reader(when_unavailable);
            let stream = host.begin(&CALL);
            host.body(stream, start.as_bytes(), false);
            assert_eq!(
                host.stream(stream).replies.len(),
                1,
                "not refused: {}",
                &start[..start.len().min(30)]
            );
            assert_refused(&host, stream, status, code);
            let reply = host.stream(stream).reply();
            assert_eq!(reply.header("x-portcullis-class"), Some("request_malformed"));
            assert_eq!(reply.header("retry-after"), None);
            assert_eq!(reply.header("x-should-retry"), Some("false"));
            host.body(stream, b"more", true);
            host.finish(stream);
            host.tick(1_000);
            assert_eq!(host.sent(), []);
            assert_eq!(host.counter("rejected_request_malformed"), 1);
            assert_clean(&host);
        }
    }
}

#[test]
fn what_is_missing_at_the_end_of_a_body_is_refused_then() {
    for body in [r#"{"model":"a""#, "   ", r#"{"model":"a"}}"#, r#"[{"model":"a"}]"#] {
        let mut host = reader("admit");
        let stream = host.begin(&CALL);
        host.body(stream, body.as_bytes(), true);
        assert_refused(&host, stream, 400, "BODY_UNREADABLE");
        assert_eq!(host.sent(), []);
    }
}

#[test]
fn a_model_that_path_and_body_name_differently_is_refused() {
    let mut host = reader("admit");
    let mut lines = CALL.to_vec();
    lines[1].1 = "/v1beta/models/gemini-2.5-pro:generateContent";
    let stream = host.begin(&lines);
    host.body(stream, br#"{"contents":[],"model":"other"}"#, true);
    assert_refused(&host, stream, 400, "MODEL_AMBIGUOUS");
    let stream = host.begin(&lines);
    host.body(stream, br#"{"contents":[]}"#, true);
    let callout = decide_of(&host, stream);
    assert_eq!(callout.json()["subject"]["model"], "gemini-2.5-pro");
    lines[1].1 = "/v1beta/models/a%2Fb:generateContent";
    let stream = host.begin(&lines);
    assert_refused(&host, stream, 400, "MODEL_AMBIGUOUS");
}

#[test]
fn a_host_that_gives_nothing_of_the_body_is_named_and_the_request_is_never_opened() {
    for when_unavailable in ["reject", "admit"] {
        for personality in [Personality::ENVOY_THAT_STOPS_ALL, Personality::ENVOY] {
            let mut host = reader_on(personality, &rules("reading", when_unavailable));
            let stream = host.begin(&CALL);
            if personality == Personality::ENVOY_THAT_STOPS_ALL {
                host.body(stream, BODY.as_bytes(), true);
            }
            host.tick(BODY_TIMEOUT_MS - 100);
            assert!(host.stream(stream).replies.is_empty());
            host.tick(200);
            assert_degraded(&host, stream);
            let lines = host.lines("rejected");
            assert_eq!(lines.len(), 1);
            let message = lines[0]["message"].as_str().unwrap_or_default();
            assert!(message.contains("allow_on_headers_stop_iteration"), "{message}");
            assert_eq!(host.logs().last().map(|line| line.level), Some(3), "it is no WARN");
            host.finish(stream);
            host.tick(1_000);
            assert_eq!(host.sent(), []);
            assert_clean(&host);
        }
    }
}

#[test]
fn a_body_that_stops_coming_is_refused_after_its_time() {
    let mut host = reader("admit");
    let slow = host.begin(&CALL);
    for _ in 0..9 {
        host.body(slow, b" ", false);
        host.tick(BODY_TIMEOUT_MS / 10);
    }
    let later = host.begin(&CALL);
    assert!(host.stream(slow).replies.is_empty());
    host.tick(BODY_TIMEOUT_MS / 10 + 100);
    assert_refused(&host, slow, 400, "BODY_UNREADABLE");
    assert!(host.stream(later).replies.is_empty(), "the time of another request");
    host.body(later, BODY.as_bytes(), true);
    let callout = host.callout();
    admit_with_hold(&mut host, &callout);
    assert_forwarded(&host, later);
}

#[test]
fn a_wait_for_a_body_does_not_delay_the_deadlines_of_decisions() {
    let mut host = reader("reject");
    let waiting = host.begin(&CALL);
    let (decided, _) = called(&mut host);
    host.tick(PATIENCE_MS);
    assert_degraded(&host, decided);
    assert!(host.stream(waiting).replies.is_empty());
}

#[test]
fn a_piece_that_the_host_does_not_hand_over_is_refused_and_never_opened() {
    for when_unavailable in ["reject", "admit"] {
        for status in status::FAILURES {
            for piece in 1..=2 {
                let mut host = reader(when_unavailable);
                let stream = host.begin(&CALL);
                host.faults().nth("proxy_get_buffer_bytes", piece, status);
                let (head, tail) = BODY.as_bytes().split_at(50);
                host.body(stream, head, false);
                host.body(stream, tail, true);
                assert_degraded(&host, stream);
                assert_eq!(host.sent(), [], "it asks about a body that it has not read");
            }
        }
    }
}

#[test]
fn a_decision_that_the_host_does_not_take_at_the_end_of_a_body_is_answered_by_the_rules() {
    for status in status::FAILURES {
        let mut closed = reader("reject");
        closed.faults().always("proxy_http_call", status);
        let stream = closed.begin(&CALL);
        closed.body(stream, BODY.as_bytes(), true);
        assert_degraded(&closed, stream);

        let mut open = reader("admit");
        open.faults().always("proxy_http_call", status);
        let stream = open.begin(&CALL);
        let (head, tail) = BODY.as_bytes().split_at(33);
        open.body(stream, head, false);
        open.body(stream, tail, true);
        assert_forwarded(&open, stream);
        assert_eq!(open.counter("bypassed_decision_unavailable"), 1);
    }
}

#[test]
fn a_refusal_that_the_host_does_not_take_is_offered_again_at_the_tick() {
    let mut host = reader("reject");
    host.faults().once("proxy_send_local_response", 10);
    let stream = host.begin(&CALL);
    host.body(stream, b"no", false);
    assert!(host.stream(stream).replies.is_empty());
    host.body(stream, b" more", true);
    host.tick(20);
    assert_refused(&host, stream, 400, "BODY_UNREADABLE");
}

#[test]
fn a_resume_that_the_host_does_not_take_is_not_offered_after_the_body_has_gone_on() {
    let mut host = reader("reject");
    let mut lines = CALL.to_vec();
    lines.push(("expect", "100-continue"));
    let stream = host.begin(&lines);
    let callout = host.callout();
    host.faults().once("proxy_continue_stream", 10);
    admit_with_hold(&mut host, &callout);
    assert!(!host.stream(stream).has_passed());
    // What the callback returns lets the request go on, with what the host has of its body.
    host.body(stream, b"{}", true);
    host.tick(1_000);
    assert_eq!(
        host.stream(stream).resumes,
        0,
        "it is resumed although it is not paused"
    );
    assert_forwarded(&host, stream);
}

#[test]
fn what_its_headers_refuse_is_refused_before_the_body() {
    let mut host = reader("admit");
    let mut lines = CALL.to_vec();
    lines[7].1 = "05";
    let stream = host.begin(&lines);
    assert_refused(&host, stream, 503, "ENVELOPE_MALFORMED");
    host.body(stream, BODY.as_bytes(), true);
    assert_clean(&host);
}

#[test]
fn any_call_may_fail_while_a_body_is_read_and_the_request_still_ends_once() {
    let mut host = reader("admit");
    called(&mut host);
    let names: BTreeSet<_> = host.ledger().host_calls.keys().copied().collect();
    for name in names {
        for status in [1, 2, 10, 12, 255] {
            let mut host = reader("admit");
            host.faults().when(name, move |call: &Call| {
                matches!(call.callback, "proxy_on_request_headers" | "proxy_on_request_body").then_some(status)
            });
            let stream = host.begin(&CALL);
            host.body(stream, &BODY.as_bytes()[..20], false);
            host.body(stream, &BODY.as_bytes()[20..], true);
            host.tick(BODY_TIMEOUT_MS + PATIENCE_MS);
            let seen = host.stream(stream);
            let ends = seen.replies.len() + usize::from(seen.has_passed());
            assert_eq!(ends, 1, "{name} {status}: {host:#?}");
            assert_clean(&host);
        }
    }
}
