//! The end of a process: what streams have left behind is told before the root context goes.

use portcullis_test_host::Failure;

use crate::scene::{admit_with_slot, assert_clean, closed, settle, settles, waiting};

#[test]
fn a_root_with_nothing_to_tell_finishes_at_once() {
    let mut host = closed();
    assert!(host.drain());
    assert_clean(&host);
}

#[test]
fn a_drain_tells_everything_and_only_then_finishes() {
    let mut host = closed();
    let mut ops = Vec::new();
    let mut streams = Vec::new();
    for _ in 0..300 {
        let (stream, callout) = waiting(&mut host);
        admit_with_slot(&mut host, &callout);
        streams.push(stream);
        ops.push(callout.op());
    }
    streams.iter().for_each(|stream| host.finish(*stream));
    assert!(!host.drain(), "it finishes with 300 slots to release");
    let mut told = Vec::new();
    while !host.is_drained() {
        let batch = settle(&host);
        told.extend(batch.told("releases"));
        host.answer(batch.token, 200, b"{}");
    }
    ops.sort();
    told.sort();
    assert_eq!(told, ops);
    assert_clean(&host);
}

#[test]
fn a_drain_does_not_wait_for_a_service_that_is_down() {
    for failure in Failure::ALL {
        let mut host = closed();
        let (stream, _) = waiting(&mut host);
        host.reset(stream);
        assert!(!host.drain());
        let batch = settle(&host);
        host.fail(batch.token, failure);
        assert!(host.is_drained());
        assert_eq!(
            host.counter("outbox_dropped"),
            1,
            "{failure:?}: what could not be told is"
        );
        assert_eq!(host.lines("outbox_dropped").len(), 1, "{failure:?}");
        assert_clean(&host);
    }
}

#[test]
fn a_drain_whose_callout_the_host_refuses_finishes_at_once() {
    let mut host = closed();
    let (stream, _) = waiting(&mut host);
    host.reset(stream);
    host.faults().always("proxy_http_call", 2);
    assert!(host.drain());
    assert_eq!(settles(&host), []);
    assert_eq!(host.counter("outbox_dropped"), 1);
    assert_clean(&host);
}

#[test]
fn a_drain_while_a_batch_is_out_waits_for_it_and_tells_the_rest() {
    let mut host = closed();
    let (first, first_callout) = waiting(&mut host);
    host.reset(first);
    host.tick(20);
    let batch = settle(&host);
    assert_eq!(batch.told("cancels"), [first_callout.op()]);
    let (second, second_callout) = waiting(&mut host);
    host.reset(second);
    assert!(!host.drain());
    host.answer(batch.token, 200, b"{}");
    let rest = settle(&host);
    assert_eq!(rest.told("cancels"), [second_callout.op()]);
    host.answer(rest.token, 200, b"{}");
    assert!(host.is_drained());
    assert_clean(&host);
}

#[test]
fn lines_that_were_held_back_are_written_at_the_end() {
    let mut host = closed();
    for _ in 0..5 {
        host.request(&[(":method", "GET"), (":path", "/")]);
    }
    assert_eq!(host.lines("rejected").len(), 1);
    host.drain();
    let lines = host.lines("rejected");
    assert_eq!(lines.len(), 2);
    assert_eq!(lines[1]["count"], 4);
}

#[test]
fn a_drain_soon_after_a_batch_that_nobody_heard_tells_it_once_more() {
    let mut host = closed();
    let (stream, callout) = waiting(&mut host);
    host.reset(stream);
    host.tick(20);
    let batch = settle(&host);
    host.fail(batch.token, Failure::Refused);
    assert!(!host.drain(), "it finishes without a word about {}", callout.op());
    assert_eq!(settle(&host).told("cancels"), [callout.op()]);
    assert_clean(&host);
}
