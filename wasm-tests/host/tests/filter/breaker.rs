//! The breaker: a dead service costs no timeout per request, and is found again when it is back.

use portcullis_test_host::{Failure, TestHost};

use crate::scene::{ENVELOPE, admit, assert_bypassed, assert_clean, assert_degraded, closed, open, waiting};

fn five_failures(host: &mut TestHost) {
    for _ in 0..5 {
        let (_, callout) = waiting(host);
        host.fail(callout.token, Failure::TimedOut);
    }
}

#[test]
fn five_failures_in_a_row_open_it_and_requests_are_answered_at_once() {
    let mut host = closed();
    assert_eq!(host.gauge("breaker_open"), Some(0));
    five_failures(&mut host);
    assert_eq!(host.gauge("breaker_open"), Some(1));
    assert_eq!(host.lines("breaker_open").len(), 1);
    let sent = host.sent().len();
    let stream = host.request(&ENVELOPE);
    assert_degraded(&host, stream);
    assert!(
        host.sent()[sent..].iter().all(|callout| !callout.is_decide()),
        "it asked all the same"
    );
}

#[test]
fn an_open_breaker_probes_once_a_second_and_closes_on_a_verdict() {
    let mut host = closed();
    five_failures(&mut host);
    for _ in 0..3 {
        host.tick(1_000);
        let before = host.sent().iter().filter(|callout| callout.is_decide()).count();
        for _ in 0..20 {
            host.request(&ENVELOPE);
            host.tick(10);
        }
        let asked = host.sent().iter().filter(|callout| callout.is_decide()).count() - before;
        assert_eq!(asked, 1);
        host.tick(800);
    }
    host.tick(1_000);
    let (stream, probe) = waiting(&mut host);
    admit(&mut host, &probe);
    assert!(host.stream(stream).has_passed());
    assert_eq!(host.gauge("breaker_open"), Some(0));
    let (stream, callout) = waiting(&mut host);
    admit(&mut host, &callout);
    assert!(host.stream(stream).has_passed());
    assert_clean(&host);
}

#[test]
fn an_open_breaker_follows_the_rules_that_admit() {
    let mut host = open();
    five_failures(&mut host);
    let stream = host.request(&ENVELOPE);
    assert_bypassed(&host, stream);
    assert_eq!(host.gauge("enforcing_open"), Some(0));
}

#[test]
fn a_denial_in_between_keeps_it_closed() {
    let mut host = closed();
    for _ in 0..4 {
        for _ in 0..4 {
            let (_, callout) = waiting(&mut host);
            host.fail(callout.token, Failure::TimedOut);
        }
        let (_, callout) = waiting(&mut host);
        crate::scene::deny(&mut host, &callout);
    }
    assert_eq!(host.gauge("breaker_open"), Some(0));
}
