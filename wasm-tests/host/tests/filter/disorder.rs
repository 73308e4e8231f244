//! Callbacks for contexts that nobody knows, in orders that no host should choose.

use portcullis_test_host::{End, Personality, TestHost};

use crate::scene::{
    ENVELOPE, admit, admit_with_slot, assert_clean, assert_degraded, closed, deny, open, settle, waiting,
};

/// Every callback, with the number of arguments that follow the context.
const CALLBACKS: [(&str, usize); 15] = [
    ("proxy_on_context_create", 1),
    ("proxy_on_vm_start", 1),
    ("proxy_on_configure", 1),
    ("proxy_on_tick", 0),
    ("proxy_on_request_headers", 2),
    ("proxy_on_request_body", 2),
    ("proxy_on_request_trailers", 1),
    ("proxy_on_response_headers", 2),
    ("proxy_on_http_call_response", 4),
    ("proxy_on_done", 0),
    ("proxy_on_log", 0),
    ("proxy_on_delete", 0),
    ("proxy_on_log", 0),
    ("proxy_on_done", 0),
    ("proxy_on_tick", 0),
];

fn has_trapped(host: &TestHost) -> bool {
    host.violations()
        .iter()
        .any(|violation| matches!(violation, portcullis_test_host::Violation::Trap { .. }))
}

#[test]
fn no_callback_traps_for_a_context_that_nobody_announced() {
    for context in [0, 2, 77, u32::MAX] {
        for argument in [0, 1, u32::MAX] {
            for is_configured in [false, true] {
                let mut host = TestHost::new(Personality::ENVOY);
                if is_configured {
                    host = closed();
                }
                for (name, count) in CALLBACKS {
                    let mut arguments = vec![context];
                    arguments.extend(std::iter::repeat_n(argument, count));
                    host.callback(name, context, &arguments);
                    assert!(!has_trapped(&host), "{name} {arguments:?}: {:#?}", host.violations());
                }
            }
        }
    }
}

#[test]
fn no_callback_traps_for_a_stream_after_its_end_or_for_a_root_taken_for_a_stream() {
    let mut host = closed();
    let (stream, callout) = waiting(&mut host);
    admit_with_slot(&mut host, &callout);
    host.finish(stream);
    for context in [stream, host.root()] {
        for (name, count) in CALLBACKS {
            let mut arguments = vec![context];
            arguments.extend(std::iter::repeat_n(0, count));
            host.callback(name, context, &arguments);
            assert!(!has_trapped(&host), "{name}: {:#?}", host.violations());
        }
    }
}

#[test]
fn an_answer_to_an_unknown_token_is_dropped() {
    let mut host = closed();
    let (stream, callout) = waiting(&mut host);
    for token in [0, callout.token + 1, u32::MAX] {
        host.answer(
            token,
            200,
            format!(r#"{{"op":"{}","verdict":"admit"}}"#, callout.op()).as_bytes(),
        );
    }
    assert!(!host.stream(stream).has_passed());
    admit(&mut host, &callout);
    assert!(host.stream(stream).has_passed());
    assert_clean(&host);
}

#[test]
fn a_second_answer_to_one_callout_changes_nothing() {
    let mut host = closed();
    let (stream, callout) = waiting(&mut host);
    deny(&mut host, &callout);
    admit(&mut host, &callout);
    assert_eq!(host.stream(stream).reply().status, 429);
    let (stream, callout) = waiting(&mut host);
    admit(&mut host, &callout);
    deny(&mut host, &callout);
    assert_eq!((host.stream(stream).resumes, host.stream(stream).replies.len()), (1, 0));
    assert_clean(&host);
}

#[test]
fn a_body_or_trailers_without_headers_are_undecided() {
    for is_body in [true, false] {
        let (mut closed, mut open) = (closed(), open());
        let (refused, bypassed) = (closed.open(closed.root()), open.open(open.root()));
        for (host, stream) in [(&mut closed, refused), (&mut open, bypassed)] {
            if is_body {
                host.body(stream, b"0123456789", true);
            } else {
                host.trailers(stream);
            }
        }
        assert_degraded(&closed, refused);
        assert!(open.stream(bypassed).replies.is_empty());
        assert_eq!(open.counter("bypassed_decision_unavailable"), 1);
        assert_clean(&open);
    }
}

#[test]
fn headers_that_come_twice_are_decided_once() {
    let mut host = closed();
    let (stream, callout) = waiting(&mut host);
    host.callback("proxy_on_request_headers", stream, &[stream, 6, 1]);
    assert_eq!(host.pending_callouts().len(), 1);
    admit(&mut host, &callout);
    assert_eq!(
        host.callback("proxy_on_request_headers", stream, &[stream, 6, 1]),
        Some(0)
    );
    assert_eq!(host.sent().len(), 1);
    assert_clean(&host);
}

#[test]
fn the_callbacks_of_an_end_may_come_in_any_order_and_repeat() {
    let orders = [
        [End::Log, End::Done, End::Delete],
        [End::Done, End::Log, End::Delete],
        [End::Log, End::Log, End::Delete],
        [End::Delete, End::Delete, End::Delete],
        [End::Done, End::Done, End::Delete],
    ];
    for order in orders {
        let mut host = closed();
        let (stream, callout) = waiting(&mut host);
        admit_with_slot(&mut host, &callout);
        for end in order {
            host.end(stream, end);
        }
        host.tick(20);
        assert_eq!(settle(&host).told("releases"), [callout.op()], "{order:?}");
        assert_clean(&host);
    }
}

#[test]
fn a_root_that_goes_before_its_streams_traps_nothing() {
    let mut host = closed();
    let (stream, callout) = waiting(&mut host);
    host.drain();
    admit(&mut host, &callout);
    host.finish(stream);
    assert!(!has_trapped(&host));
    let mut host = closed();
    let root = host.root();
    let (stream, _) = waiting(&mut host);
    host.callback("proxy_on_delete", root, &[root]);
    host.callback("proxy_on_tick", root, &[root]);
    host.request(&ENVELOPE);
    host.finish(stream);
    assert!(!has_trapped(&host));
}
