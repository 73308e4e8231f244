//! Host calls that fail, with every status, once or for ever: one reply, one resume, no trap.

use portcullis_test_host::{Call, status};

use crate::scene::{
    ENVELOPE, PATIENCE_MS, admit, admit_with_slot, assert_bypassed, assert_clean, assert_degraded, closed, deny, open,
    settle, waiting,
};

#[test]
fn a_reply_that_the_host_does_not_take_is_offered_again_at_the_tick() {
    for status in status::FAILURES {
        let mut host = closed();
        let (stream, callout) = waiting(&mut host);
        host.faults().once("proxy_send_local_response", status);
        deny(&mut host, &callout);
        assert!(host.stream(stream).replies.is_empty());
        host.tick(20);
        assert_eq!(host.stream(stream).reply().status, 429);
        host.tick(1_000);
        assert_eq!(host.counter("rejected_quota_exhausted"), 1);
        assert_clean(&host);
    }
}

#[test]
fn a_resume_that_the_host_does_not_take_is_offered_again_at_the_tick() {
    for status in status::FAILURES {
        let mut host = closed();
        let (stream, callout) = waiting(&mut host);
        host.faults().once("proxy_continue_stream", status);
        admit(&mut host, &callout);
        assert!(!host.stream(stream).has_passed());
        host.tick(20);
        assert!(host.stream(stream).has_passed());
        host.tick(1_000);
        assert_eq!((host.stream(stream).resumes, host.counter("admitted")), (1, 1));
        assert_clean(&host);
    }
}

#[test]
fn a_reply_is_offered_again_at_the_tick_although_earlier_requests_wait() {
    let mut host = closed();
    let (_, _) = waiting(&mut host);
    let (refused, callout) = waiting(&mut host);
    host.faults().once("proxy_send_local_response", 10);
    deny(&mut host, &callout);
    host.tick(20);
    assert_eq!(
        host.stream(refused).replies.len(),
        1,
        "it waits for the deadline of another request"
    );
    assert_clean(&host);
}

#[test]
fn a_context_that_the_host_refuses_once_does_not_hang_its_request() {
    let mut host = closed();
    let (stream, callout) = waiting(&mut host);
    host.faults()
        .once("proxy_set_effective_context", status::INTERNAL_FAILURE);
    admit(&mut host, &callout);
    host.tick(PATIENCE_MS);
    let ended = host.stream(stream).has_passed() || !host.stream(stream).replies.is_empty();
    assert!(ended, "the request is paused for ever");
    assert_clean(&host);
}

#[test]
fn a_reply_out_of_the_request_headers_is_offered_again_at_the_tick() {
    let mut host = closed();
    host.faults().nth("proxy_send_local_response", 1, 1);
    let stream = host.request(&[(":method", "GET"), (":path", "/")]);
    assert!(host.stream(stream).replies.is_empty() && !host.stream(stream).has_passed());
    host.tick(20);
    assert_eq!(host.stream(stream).reply().code(), "ENVELOPE_MISSING");
    assert_clean(&host);
}

#[test]
fn nothing_is_offered_for_a_stream_that_has_ended() {
    for call in ["proxy_send_local_response", "proxy_continue_stream"] {
        let mut host = closed();
        let (stream, callout) = waiting(&mut host);
        host.faults().once(call, 10);
        if call == "proxy_continue_stream" {
            admit(&mut host, &callout);
        } else {
            deny(&mut host, &callout);
        }
        host.finish(stream);
        host.tick(100);
        assert!(host.stream(stream).replies.is_empty() && host.stream(stream).resumes == 0);
        assert_clean(&host);
    }
}

#[test]
fn nothing_is_offered_between_the_end_of_a_stream_and_the_end_of_its_context() {
    let mut host = closed();
    let (stream, callout) = waiting(&mut host);
    host.faults().once("proxy_send_local_response", 10);
    deny(&mut host, &callout);
    host.end(stream, portcullis_test_host::End::Log);
    host.tick(100);
    assert!(host.stream(stream).replies.is_empty());
    assert_clean(&host);
}

#[test]
fn what_was_granted_to_a_context_that_the_host_refuses_is_given_back() {
    for status in status::FAILURES {
        let mut host = closed();
        let (stream, callout) = waiting(&mut host);
        host.faults().when("proxy_set_effective_context", move |call: &Call| {
            (call.callback == "proxy_on_http_call_response").then_some(status)
        });
        admit_with_slot(&mut host, &callout);
        assert!(!host.stream(stream).has_passed());
        host.tick(PATIENCE_MS);
        let batch = settle(&host);
        let told = [batch.told("releases"), batch.told("cancels")].concat();
        assert_eq!(told, [callout.op()]);
        assert_clean(&host);
    }
}

#[test]
fn any_call_may_fail_for_ever_and_a_request_still_ends_once() {
    let calls = [
        "clock_time_get",
        "random_get",
        "proxy_log",
        "proxy_get_current_time_nanoseconds",
        "proxy_get_header_map_pairs",
        "proxy_get_buffer_bytes",
        "proxy_remove_header_map_value",
        "proxy_add_header_map_value",
        "proxy_http_call",
        "proxy_define_metric",
        "proxy_increment_metric",
        "proxy_record_metric",
        "proxy_done",
    ];
    for call in calls {
        for status in [1, 2, 10, 12, 255] {
            let (mut closed, mut open) = (closed(), open());
            closed.faults().always(call, status);
            open.faults().always(call, status);
            let (refused, bypassed) = (closed.request(&ENVELOPE), open.request(&ENVELOPE));
            closed.tick(PATIENCE_MS);
            open.tick(PATIENCE_MS);
            assert_degraded(&closed, refused);
            assert!(open.stream(bypassed).has_passed(), "{call} {status}");
            assert_clean(&open);
            for (host, stream) in [(&mut closed, refused), (&mut open, bypassed)] {
                host.finish(stream);
                host.tick(1_000);
                host.drain();
                assert_clean(host);
            }
        }
    }
}

#[test]
fn every_call_may_fail_at_once_and_the_next_request_works() {
    for status in status::FAILURES {
        let mut host = open();
        host.faults().when("*", move |_| Some(status));
        let stream = host.request(&ENVELOPE);
        host.tick(1_000);
        assert_eq!(host.stream(stream).resumes, 0);
        assert_clean(&host);
        host.faults().heal_all();
        let stream = host.request(&ENVELOPE);
        host.tick(PATIENCE_MS);
        assert_bypassed(&host, stream);
    }
}
