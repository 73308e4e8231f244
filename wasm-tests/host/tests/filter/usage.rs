//! What an admitted call is charged in the end: what its response reports, the estimate of its input, or its hold; told
//! once, by operation id, whatever the reason for its end. A response is looked at and never held.

use portcullis_test_host::{Call, End, Failure, status};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::bodies::pieces;
use crate::llm::{
    CALL, DIALECTS, Dialect, ESTIMATE, EVENTS, HOLD, JSON, MODEL, admit_with_hold, called, metered, reader, told_of,
    under_way,
};
use crate::scene::{assert_clean, decide_of, deny, settle, settles, verdict};

/// What is told of a call that has reported its usage.
fn used(op: &str, dialect: &Dialect) -> Value {
    let bill = json!({"org": "org-1", "model": MODEL, "input": dialect.input, "cached_input": dialect.cached,
                      "output": dialect.output});
    json!({"op": op, "tokens": dialect.input + dialect.output, "bill": bill})
}

/// What is told of a call that is billed its hold: its windows are charged that already.
fn held(op: &str) -> Value {
    let bill = json!({"org": "org-1", "model": MODEL, "input": ESTIMATE, "cached_input": 0,
                      "output": HOLD - ESTIMATE, "is_hold": true});
    json!({"op": op, "bill": bill})
}

#[test]
fn each_dialect_is_charged_what_it_reports_as_json_and_as_a_stream() {
    for dialect in DIALECTS {
        for (head, body) in [(JSON, dialect.json), (EVENTS, dialect.stream)] {
            let mut host = metered();
            let (stream, op) = under_way(&mut host);
            host.respond_with(stream, &head, [body.as_bytes()]);
            assert_eq!(host.stream(stream).returned_bytes, body.len() as u64);
            host.finish(stream);
            let told = told_of(&mut host, &op);
            assert_eq!(told, (vec![used(&op, &dialect)], vec![]), "{}", dialect.name);
            assert_eq!(host.counter("usage_unknown"), 0);
            assert_clean(&host);
        }
    }
}

#[test]
fn a_stream_is_charged_the_same_wherever_it_is_cut() {
    for dialect in DIALECTS {
        let mut host = metered();
        let body = dialect.stream.as_bytes();
        for at in 0..=body.len() {
            let (stream, op) = under_way(&mut host);
            let (head, tail) = body.split_at(at);
            host.respond_with(stream, &EVENTS, [head, tail]);
            host.finish(stream);
            host.tick(20);
            let batch = settle(&host);
            let expected = (op.clone(), used(&op, &dialect));
            assert_eq!(batch.settles(), [expected], "{}, cut at {at}", dialect.name);
            host.answer(batch.token, 200, b"{}");
            host.forget();
        }
        assert_clean(&host);
    }
}

#[test]
fn a_stream_is_charged_the_same_byte_by_byte() {
    for dialect in DIALECTS {
        let mut host = metered();
        let (stream, op) = under_way(&mut host);
        host.respond_with(stream, &EVENTS, dialect.stream.as_bytes().chunks(1));
        host.finish(stream);
        assert_eq!(told_of(&mut host, &op).0, [used(&op, &dialect)]);
        assert_clean(&host);
    }
}

#[test]
fn a_body_that_ends_without_an_empty_piece_or_with_trailers_is_charged_the_same() {
    let [dialect, ..] = DIALECTS;
    for ending in ["with its last piece", "with trailers", "with the stream"] {
        let mut host = metered();
        let (stream, op) = under_way(&mut host);
        host.response_headers(stream, &EVENTS, false);
        host.response_body(stream, dialect.stream.as_bytes(), ending == "with its last piece");
        if ending == "with trailers" {
            host.response_trailers(stream);
        }
        host.finish(stream);
        assert_eq!(told_of(&mut host, &op).0, [used(&op, &dialect)], "{ending}");
        assert_clean(&host);
    }
}

#[test]
fn an_error_of_the_provider_is_charged_the_input_and_a_timeout_the_hold() {
    for status in [
        "300", "400", "404", "408", "413", "429", "500", "502", "503", "504", "529",
    ] {
        let mut host = metered();
        let (stream, op) = under_way(&mut host);
        let head = [(":status", status), ("content-type", "application/json")];
        // What an error says of usage is nobody's bill.
        host.respond_with(stream, &head, [DIALECTS[0].json.as_bytes()]);
        host.finish(stream);
        let expected = if matches!(status, "408" | "504") {
            held(&op)
        } else {
            json!({"op": op, "tokens": ESTIMATE})
        };
        assert_eq!(told_of(&mut host, &op), (vec![expected], vec![]), "{status}");
        assert_clean(&host);
    }
}

#[test]
fn whatever_reports_no_whole_usage_is_charged_the_hold() {
    let [chat, ..] = DIALECTS;
    let cut_off = chat.stream.trim_end_matches("data: [DONE]");
    type Head<'a> = &'a [(&'a str, &'a str)];
    let cases: [(&str, Head<'_>, &str); 8] = [
        ("a stream that is cut off", &EVENTS, &cut_off[..cut_off.len() / 2]),
        (
            "a stream without usage",
            &EVENTS,
            "data: {\"choices\":[]}\n\ndata: [DONE]\n\n",
        ),
        ("JSON that is cut off", &JSON, &chat.json[..chat.json.len() - 1]),
        (
            "a negative figure",
            &JSON,
            r#"{"usage":{"prompt_tokens":-1,"completion_tokens":3}}"#,
        ),
        ("no body", &JSON, ""),
        (
            "a compressed response",
            &[
                (":status", "200"),
                ("content-type", "application/json"),
                ("content-encoding", "gzip"),
            ],
            chat.json,
        ),
        (
            "another type",
            &[(":status", "200"), ("content-type", "audio/mpeg")],
            chat.json,
        ),
        ("no type", &[(":status", "200")], chat.json),
    ];
    for (what, head, body) in cases {
        let mut host = metered();
        let (stream, op) = under_way(&mut host);
        host.respond_with(stream, head, [body.as_bytes()]);
        host.finish(stream);
        assert_eq!(told_of(&mut host, &op), (vec![held(&op)], vec![]), "{what}");
        assert_eq!(host.counter("usage_unknown"), 1, "{what}");
        assert_clean(&host);
    }
}

#[test]
fn a_call_that_ends_without_a_response_is_charged_the_hold() {
    let mut host = metered();
    let (stream, op) = under_way(&mut host);
    host.reset(stream);
    assert_eq!(told_of(&mut host, &op), (vec![held(&op)], vec![]));
    let (stream, op) = under_way(&mut host);
    host.response_headers(stream, &EVENTS, false);
    host.reset(stream);
    assert_eq!(told_of(&mut host, &op), (vec![held(&op)], vec![]));
    assert_clean(&host);
}

#[test]
fn a_response_that_the_host_does_not_hand_over_is_charged_the_hold() {
    for status in status::FAILURES {
        for (call, callback) in [
            ("proxy_get_buffer_bytes", "proxy_on_response_body"),
            ("proxy_get_header_map_pairs", "proxy_on_response_headers"),
        ] {
            let mut host = metered();
            let (stream, op) = under_way(&mut host);
            host.faults()
                .when(call, move |call: &Call| (call.callback == callback).then_some(status));
            host.respond_with(stream, &JSON, [DIALECTS[0].json.as_bytes()]);
            host.finish(stream);
            assert_eq!(told_of(&mut host, &op).0, [held(&op)], "{call} {status}");
            assert_clean(&host);
        }
    }
}

#[test]
fn a_piece_that_is_missed_makes_the_rest_unreadable() {
    let [dialect, ..] = DIALECTS;
    let mut host = metered();
    let (stream, op) = under_way(&mut host);
    host.response_headers(stream, &EVENTS, false);
    host.faults().once("proxy_get_buffer_bytes", 1);
    host.response_body(
        stream,
        b"data: {\"usage\":{\"prompt_tokens\":5000,\"completion_tokens\":5000}}\n\n",
        false,
    );
    host.response_body(stream, dialect.stream.as_bytes(), true);
    host.finish(stream);
    assert_eq!(told_of(&mut host, &op).0, [held(&op)]);
    assert_clean(&host);
}

#[test]
fn without_a_hold_and_without_a_bill_a_response_is_not_read_and_nothing_is_told() {
    let mut host = reader("reject");
    let (stream, callout) = called(&mut host);
    verdict(&mut host, &callout, json!({"verdict": "admit"}));
    let before = host.ledger().clone();
    host.respond_with(stream, &JSON, [DIALECTS[0].json.as_bytes()]);
    let step = host.ledger().since(&before);
    assert_eq!(step.tally("proxy_get_buffer_bytes").calls, 0);
    assert_eq!(step.tally("proxy_get_header_map_pairs").calls, 0);
    host.finish(stream);
    assert_eq!(told_of(&mut host, &callout.op()), (vec![], vec![]));
    assert_clean(&host);
}

#[test]
fn without_metering_only_the_windows_are_settled() {
    let [dialect, ..] = DIALECTS;
    let mut host = reader("reject");
    let (stream, op) = under_way(&mut host);
    host.respond_with(stream, &JSON, [dialect.json.as_bytes()]);
    host.finish(stream);
    let tokens = dialect.input + dialect.output;
    assert_eq!(
        told_of(&mut host, &op),
        (vec![json!({"op": op, "tokens": tokens})], vec![])
    );
    // A charge that stays as it was is not told.
    let (stream, op) = under_way(&mut host);
    host.reset(stream);
    assert_eq!(told_of(&mut host, &op), (vec![], vec![]));
    assert_clean(&host);
}

#[test]
fn a_refused_call_settles_nothing_although_its_reply_passes_as_a_response() {
    let mut host = metered();
    let (stream, callout) = called(&mut host);
    deny(&mut host, &callout);
    host.finish(stream);
    assert_eq!(told_of(&mut host, &callout.op()), (vec![], vec![]));
    assert_clean(&host);
}

#[test]
fn a_settlement_frees_the_slot_too_and_a_charge_that_stays_is_a_release() {
    let [dialect, ..] = DIALECTS;
    for reports in [true, false] {
        let mut host = reader("reject");
        let (stream, callout) = called(&mut host);
        let admission = json!({"verdict": "admit", "held_tokens": HOLD, "slot_ttl_ms": 30_000});
        verdict(&mut host, &callout, admission);
        let op = callout.op();
        if reports {
            host.respond_with(stream, &JSON, [dialect.json.as_bytes()]);
        }
        host.finish(stream);
        let expected = if reports {
            (
                vec![json!({"op": op, "tokens": dialect.input + dialect.output})],
                vec![],
            )
        } else {
            (vec![], vec!["releases"])
        };
        assert_eq!(told_of(&mut host, &op), expected);
        assert_clean(&host);
    }
}

#[test]
fn a_call_is_settled_once_whichever_callback_of_its_end_comes_first() {
    let orders = [
        [End::Log, End::Done, End::Delete],
        [End::Done, End::Log, End::Delete],
        [End::Log, End::Log, End::Delete],
        [End::Delete, End::Delete, End::Delete],
    ];
    for order in orders {
        let mut host = metered();
        let (stream, op) = under_way(&mut host);
        host.respond_with(stream, &JSON, [DIALECTS[0].json.as_bytes()]);
        for end in order {
            host.end(stream, end);
        }
        assert_eq!(
            told_of(&mut host, &op),
            (vec![used(&op, &DIALECTS[0])], vec![]),
            "{order:?}"
        );
        assert_clean(&host);
    }
}

#[test]
fn a_settlement_is_on_its_way_at_the_next_tick_and_told_until_it_is_heard() {
    for failure in Failure::ALL {
        let mut host = metered();
        let (stream, op) = under_way(&mut host);
        host.respond_with(stream, &JSON, [DIALECTS[0].json.as_bytes()]);
        host.finish(stream);
        host.tick(20);
        for _ in 0..3 {
            let batch = settle(&host);
            assert_eq!(batch.settles(), [(op.clone(), used(&op, &DIALECTS[0]))]);
            host.fail(batch.token, failure);
            host.tick(520);
        }
        let batch = settle(&host);
        host.answer(batch.token, 200, b"{}");
        host.tick(2_000);
        assert_eq!(settles(&host).len(), 4);
        assert_clean(&host);
    }
}

#[test]
fn a_drain_tells_every_settlement_before_it_finishes() {
    let mut host = metered();
    let mut ops = Vec::new();
    for _ in 0..300 {
        let (stream, op) = under_way(&mut host);
        host.respond_with(stream, &JSON, [DIALECTS[0].json.as_bytes()]);
        host.finish(stream);
        ops.push(op);
    }
    assert!(!host.drain());
    let mut told = Vec::new();
    while !host.is_drained() {
        let batch = settle(&host);
        told.extend(batch.settles().into_iter().map(|(op, _)| op));
        host.answer(batch.token, 200, b"{}");
    }
    ops.sort();
    told.sort();
    assert_eq!(told, ops);
    assert_clean(&host);
}

#[test]
fn a_call_decided_on_its_headers_holds_the_default_and_is_settled_too() {
    let [dialect, ..] = DIALECTS;
    let mut host = reader("reject");
    let mut lines = CALL.to_vec();
    lines.push(("expect", "100-continue"));
    let stream = host.begin(&lines);
    let callout = decide_of(&host, stream);
    admit_with_hold(&mut host, &callout);
    host.body(stream, b"{}", true);
    host.respond_with(stream, &JSON, [dialect.json.as_bytes()]);
    host.finish(stream);
    let op = callout.op();
    let tokens = dialect.input + dialect.output;
    assert_eq!(told_of(&mut host, &op).0, [json!({"op": op, "tokens": tokens})]);
    assert_clean(&host);
}

/// Bytes that may be a response, and where they are cut.
fn any_response() -> impl Strategy<Value = (bool, Vec<u8>, Vec<prop::sample::Index>)> {
    let edits = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
    let damaged = (0..DIALECTS.len(), any::<bool>(), edits).prop_map(|(which, is_stream, edits)| {
        let dialect = &DIALECTS[which];
        let text = if is_stream { dialect.stream } else { dialect.json };
        let mut body = text.as_bytes().to_vec();
        for (at, byte) in edits {
            *at.get_mut(&mut body) = byte;
        }
        (is_stream, body)
    });
    let bytes = (any::<bool>(), prop::collection::vec(any::<u8>(), 0..300));
    let response = prop_oneof![1 => bytes, 3 => damaged];
    let cuts = prop::collection::vec(any::<prop::sample::Index>(), 0..6);
    (response, cuts).prop_map(|((is_stream, body), cuts)| (is_stream, body, cuts))
}

#[test]
fn no_bytes_of_a_response_trap_or_are_held_and_each_is_settled_once() {
    let mut host = metered();
    crate::interleavings::for_all(400, &any_response(), |(is_stream, body, cuts)| {
        let (stream, op) = under_way(&mut host);
        let head = if is_stream { EVENTS } else { JSON };
        host.respond_with(stream, &head, pieces(&body, &cuts));
        prop_assert_eq!(host.stream(stream).returned_bytes, body.len() as u64);
        host.finish(stream);
        let (settlements, lists) = told_of(&mut host, &op);
        prop_assert!(lists.is_empty() && settlements.len() == 1, "{settlements:?} {lists:?}");
        let bill = &settlements[0]["bill"];
        if bill["is_hold"] == json!(true) {
            prop_assert!(bill["output"].as_u64() >= Some(HOLD - ESTIMATE));
            prop_assert!(settlements[0].get("tokens").is_none());
        } else {
            let sum = bill["input"].as_u64().unwrap_or_default() + bill["output"].as_u64().unwrap_or_default();
            prop_assert!(sum == HOLD || settlements[0]["tokens"].as_u64() == Some(sum.min((1 << 53) - 1)));
        }
        prop_assert!(host.violations().is_empty(), "{:?}", host.violations());
        host.forget();
        Ok(())
    });
}
