//! Decisions that do not come: every way is `decision_unavailable`, by the rules, within the deadline, told once.

use portcullis_test_host::{Failure, headers, status};
use serde_json::json;

use crate::scene::{
    PATIENCE_MS, TIMEOUT_MS, admit, assert_bypassed, assert_clean, assert_degraded, closed, decide_of, open, settle,
    waiting,
};

/// Bodies that a 200 may carry and that are no verdict about this operation.
fn senseless(op: &str) -> Vec<(&'static str, Vec<u8>)> {
    let with_op = |mut verdict: serde_json::Value| {
        verdict["op"] = json!(op);
        verdict.to_string().into_bytes()
    };
    let mut huge = json!({"verdict": "admit", "padding": "x".repeat(64 * 1024)});
    huge["op"] = json!(op);
    vec![
        ("empty", Vec::new()),
        ("cut", b"{".to_vec()),
        ("not UTF-8", vec![0xc0, 0xa7]),
        ("no verdict", with_op(json!({}))),
        ("an unknown verdict", with_op(json!({"verdict": "maybe"}))),
        (
            "an unknown code",
            with_op(json!({"verdict": "deny", "code": "BECAUSE"})),
        ),
        (
            "an outage dressed up as a denial",
            with_op(json!({"verdict": "deny", "code": "SERVICE_DEGRADED"})),
        ),
        (
            "the filter's own dependency",
            with_op(json!({"verdict": "unavailable", "dependency": "decision"})),
        ),
        (
            "another operation",
            json!({"op": "0".repeat(32), "verdict": "admit"})
                .to_string()
                .into_bytes(),
        ),
        ("no operation", json!({"verdict": "admit"}).to_string().into_bytes()),
        ("over 64 KiB", huge.to_string().into_bytes()),
        (
            "a bypass of a gate that is not listed",
            with_op(json!({"verdict": "admit", "bypassed": [{"class": "policy_unavailable", "gate": "org_status"}]})),
        ),
    ]
}

#[test]
fn a_body_that_is_no_verdict_is_rejected_or_admitted_by_the_rules_and_cancelled() {
    for at in 0..senseless("").len() {
        let mut closed = closed();
        let (stream, callout) = waiting(&mut closed);
        let (what, body) = senseless(&callout.op()).swap_remove(at);
        println!("{what}");
        closed.answer(callout.token, 200, &body);
        assert_degraded(&closed, stream);
        closed.tick(20);
        assert_eq!(settle(&closed).told("cancels"), [callout.op()]);

        let mut open = open();
        let (stream, callout) = waiting(&mut open);
        let (_, body) = senseless(&callout.op()).swap_remove(at);
        open.answer(callout.token, 200, &body);
        assert_bypassed(&open, stream);
    }
}

#[test]
fn a_closed_gate_that_the_service_opened_is_no_admission() {
    let mut host = closed();
    let (stream, callout) = waiting(&mut host);
    let bypassed = json!([{"class": "limiter_unavailable", "gate": "contract"}]);
    crate::scene::verdict(&mut host, &callout, json!({"verdict": "admit", "bypassed": bypassed}));
    assert_degraded(&host, stream);
}

#[test]
fn any_status_but_200_is_no_answer_whatever_the_body_says() {
    for status in [100, 201, 204, 301, 400, 403, 404, 429, 500, 502, 504] {
        let mut host = closed();
        let (stream, callout) = waiting(&mut host);
        let body = json!({"op": callout.op(), "verdict": "admit"}).to_string();
        host.answer(callout.token, status, body.as_bytes());
        assert_degraded(&host, stream);
    }
}

#[test]
fn an_answer_without_a_readable_status_is_tried_once_more_and_then_given_up() {
    for lines in [
        vec![],
        vec![("x", "y")],
        vec![(":status", "")],
        vec![(":status", "two hundred")],
        vec![(":status", "0")],
        vec![(":status", "+200")],
        vec![(":status", "0200")],
    ] {
        let mut host = closed();
        let (stream, first) = waiting(&mut host);
        host.deliver(
            first.token,
            headers(&lines),
            json!({"op": first.op(), "verdict": "admit"}).to_string().into(),
        );
        // No status: perhaps a connection that died, so once more.
        let again = decide_of(&host, stream);
        assert_eq!(again.op(), first.op());
        host.deliver(again.token, headers(&lines), Vec::new());
        assert_degraded(&host, stream);
    }
}

#[test]
fn an_answer_that_the_host_does_not_hand_over_is_no_answer() {
    for call in ["proxy_get_header_map_pairs", "proxy_get_buffer_bytes"] {
        for status in status::FAILURES {
            let mut host = closed();
            let (stream, callout) = waiting(&mut host);
            host.faults().always(call, status);
            admit(&mut host, &callout);
            if call == "proxy_get_header_map_pairs" {
                let again = decide_of(&host, stream);
                admit(&mut host, &again);
            }
            assert_degraded(&host, stream);
        }
    }
}

#[test]
fn a_connection_that_failed_is_tried_once_more_as_the_same_operation() {
    for failure in [Failure::Refused, Failure::Died] {
        let mut host = closed();
        let (stream, first) = waiting(&mut host);
        host.tick(100);
        host.fail(first.token, failure);
        let again = decide_of(&host, stream);
        assert_eq!(again.op(), first.op());
        assert_eq!((again.timeout_ms, again.json()["budget_ms"].as_u64()), (150, Some(120)));
        admit(&mut host, &again);
        assert!(host.stream(stream).has_passed());
        assert_eq!(host.counter("callouts"), 2);
        assert_clean(&host);
    }
}

#[test]
fn a_second_failure_or_too_little_time_is_the_end() {
    let mut host = closed();
    let (stream, first) = waiting(&mut host);
    host.fail(first.token, Failure::Refused);
    let again = decide_of(&host, stream);
    host.fail(again.token, Failure::Refused);
    assert_degraded(&host, stream);

    let (stream, callout) = waiting(&mut host);
    host.tick(TIMEOUT_MS - 39);
    host.fail(callout.token, Failure::Refused);
    assert_degraded(&host, stream);
}

#[test]
fn a_timeout_and_garbage_are_not_tried_again() {
    for failure in [Failure::TimedOut, Failure::Garbage] {
        let mut host = closed();
        let (stream, callout) = waiting(&mut host);
        host.fail(callout.token, failure);
        assert_degraded(&host, stream);
        assert!(!String::from_utf8_lossy(&host.stream(stream).reply().body).contains("upstream"));
    }
}

#[test]
fn a_dispatch_that_the_host_refuses_is_answered_once_whatever_its_status() {
    for status in status::FAILURES {
        let mut closed = closed();
        closed.faults().always("proxy_http_call", status);
        let stream = closed.request(&crate::scene::ENVELOPE);
        assert_degraded(&closed, stream);
        closed.tick(1_000);
        assert_eq!(closed.sent(), [], "nothing was asked, so there is nothing to cancel");

        let mut open = open();
        open.faults().always("proxy_http_call", status);
        let stream = open.request(&crate::scene::ENVELOPE);
        assert_bypassed(&open, stream);
        assert_eq!(open.stream(stream).resumes, 0, "it was never paused");
    }
}

#[test]
fn a_second_try_that_the_host_refuses_is_answered_and_the_first_cancelled() {
    let mut host = closed();
    let (stream, callout) = waiting(&mut host);
    host.faults().once("proxy_http_call", 10);
    host.fail(callout.token, Failure::Refused);
    assert_degraded(&host, stream);
    host.tick(20);
    assert_eq!(settle(&host).told("cancels"), [callout.op()]);
}

#[test]
fn the_guest_ends_the_wait_if_the_hosts_timer_never_fires() {
    let mut closed = closed();
    let (stream, callout) = waiting(&mut closed);
    closed.tick(TIMEOUT_MS);
    assert!(closed.stream(stream).replies.is_empty(), "the host's timer goes first");
    closed.tick(PATIENCE_MS - TIMEOUT_MS);
    assert_degraded(&closed, stream);
    assert_eq!(settle(&closed).told("cancels"), [callout.op()]);

    let mut open = open();
    let (stream, callout) = waiting(&mut open);
    open.tick(PATIENCE_MS);
    assert_bypassed(&open, stream);
    admit(&mut open, &callout);
    assert_eq!(open.stream(stream).resumes, 1, "a late verdict changes nothing");
    assert_clean(&open);
}

#[test]
fn a_thousand_requests_end_at_their_deadlines_each_once() {
    let mut host = closed();
    let mut streams = Vec::new();
    for _ in 0..1_000 {
        streams.push(host.request(&crate::scene::ENVELOPE));
        host.tick(1);
    }
    host.tick(PATIENCE_MS);
    assert!(streams.iter().all(|stream| host.stream(*stream).replies.len() == 1));
    assert_clean(&host);
}
