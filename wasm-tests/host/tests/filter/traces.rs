//! The trace of a request goes with its decision: as headers of the callout, as they came, and never half of them.

use portcullis_test_host::{Callout, ContextId, TestHost, first};

use crate::lease_scene::{fetch, grant, hear, hits, leased};
use crate::scene::{admit, assert_clean, closed, decide_of, envelope_and, settles};

const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// A request with more lines that waits for its decision, with the callout.
fn asked(host: &mut TestHost, more: &[(&str, &str)]) -> (ContextId, Callout) {
    let stream = host.request(&envelope_and(more));
    let callout = decide_of(host, stream);
    (stream, callout)
}

/// `traceparent` and `tracestate` of a callout.
fn carried(callout: &Callout) -> [Option<&str>; 2] {
    ["traceparent", "tracestate"].map(|name| Some(std::str::from_utf8(first(&callout.headers, name)?).expect("UTF-8")))
}

#[test]
fn a_decision_carries_the_trace_of_its_request_and_so_does_its_second_try() {
    let mut host = closed();
    let lines = [
        ("traceparent", PARENT),
        ("tracestate", "edge=1"),
        ("tracestate", "other=2"),
    ];
    let (stream, callout) = asked(&mut host, &lines);
    assert_eq!(carried(&callout), [Some(PARENT), Some("edge=1,other=2")]);
    host.answer(callout.token, 503, b"upstream connect error");
    let again = decide_of(&host, stream);
    assert_ne!(again.token, callout.token);
    assert_eq!(again.json()["retry"], true);
    assert_eq!(carried(&again), carried(&callout));
    admit(&mut host, &again);
    let upstream = host.stream(stream).upstream.clone().expect("it goes up");
    assert_eq!(
        first(&upstream, "traceparent"),
        Some(PARENT.as_bytes()),
        "the client's own is not touched"
    );
    host.finish(stream);
    hear(&mut host);
    assert_clean(&host);
}

#[test]
fn a_request_without_a_well_formed_trace_carries_none() {
    let upper = PARENT.to_uppercase();
    let zero_trace = format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32));
    let zero_span = format!("00-4bf92f3577b34da6a3ce929d0e0e4736-{}-01", "0".repeat(16));
    let (longer, forbidden) = (format!("{PARENT}-more"), PARENT.replacen("00", "ff", 1));
    let mut malformed: Vec<Vec<(&str, &str)>> = [
        "",
        "00",
        &PARENT[1..],
        &upper,
        &zero_trace,
        &zero_span,
        &longer,
        &forbidden,
    ]
    .map(|value| vec![("traceparent", value), ("tracestate", "edge=1")])
    .into();
    malformed.push(vec![("tracestate", "edge=1")]);
    malformed.push(vec![("traceparent", PARENT), ("TraceParent", PARENT)]);
    for lines in malformed {
        let mut host = closed();
        let (stream, callout) = asked(&mut host, &lines);
        assert_eq!(carried(&callout), [None, None], "{lines:?}");
        admit(&mut host, &callout);
        assert!(host.stream(stream).has_passed(), "{lines:?}");
        assert_clean(&host);
    }
}

#[test]
fn a_tracestate_that_is_too_long_is_left_behind_and_the_trace_goes_on() {
    let mut host = closed();
    let state = format!("edge={}", "1".repeat(508));
    let (_, callout) = asked(&mut host, &[("traceparent", PARENT), ("tracestate", &state)]);
    assert_eq!(carried(&callout), [Some(PARENT), None]);
}

#[test]
fn a_trace_costs_no_host_call() {
    let cost = |more: &[(&str, &str)]| {
        let mut host = closed();
        let before = host.ledger().clone();
        let (stream, callout) = asked(&mut host, more);
        admit(&mut host, &callout);
        host.finish(stream);
        let calls = host.ledger().since(&before).host_calls;
        calls
            .into_iter()
            .map(|(name, tally)| (name, tally.calls))
            .collect::<Vec<_>>()
    };
    assert_eq!(cost(&[("traceparent", PARENT), ("tracestate", "edge=1")]), cost(&[]));
}

#[test]
fn what_is_told_later_or_fetched_for_nobody_belongs_to_no_trace() {
    let mut host = leased();
    let traced = |host: &mut TestHost| host.request(&envelope_and(&[("traceparent", PARENT)]));
    let stream = traced(&mut host);
    let callout = decide_of(&host, stream);
    assert_eq!(carried(&callout), [Some(PARENT), None]);
    grant(&mut host, &callout, 20);
    host.finish(stream);
    assert_eq!(hits(&mut host, 9), 9);
    let stream = traced(&mut host);
    assert!(host.stream(stream).has_passed(), "it was leased");
    assert_eq!(carried(&fetch(&host)), [None, None]);
    host.finish(stream);
    host.tick(2_000);
    let told = settles(&host);
    assert!(!told.is_empty(), "nothing was told");
    assert!(told.iter().all(|callout| carried(callout) == [None, None]), "{told:#?}");
}
