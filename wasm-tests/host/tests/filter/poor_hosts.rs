//! Hosts that lack what Envoy has: ticks, clocks, random bytes, metrics. What depends on them degrades, and is told.

use portcullis_test_host::{Personality, TestHost, status};

use crate::scene::{
    ENVELOPE, PATIENCE_MS, admit, assert_bypassed, assert_clean, assert_degraded, closed, configuration, deny, open,
    rules, settle, waiting,
};

/// A host without a call, from before its configuration.
fn without(calls: &[&'static str], status: u32, when_unavailable: &str) -> TestHost {
    let mut host = TestHost::new(Personality::ENVOY);
    for call in calls {
        host.faults().always(call, status);
    }
    host.configure(&configuration(&rules("poor", when_unavailable)).to_string())
        .expect("no faults");
    host
}

#[test]
fn without_ticks_the_next_request_tells_what_streams_have_left_behind() {
    let mut host = without(&["proxy_set_tick_period_milliseconds"], status::UNIMPLEMENTED, "reject");
    let (stream, callout) = waiting(&mut host);
    host.reset(stream);
    host.tick(5_000);
    assert_eq!(host.sent().len(), 1, "there are no ticks");
    let (next, decide) = waiting(&mut host);
    let batch = settle(&host);
    assert_eq!(batch.told("cancels"), [callout.op()]);
    admit(&mut host, &decide);
    assert!(host.stream(next).has_passed());
    host.answer(batch.token, 200, b"{}");
    assert_clean(&host);
}

#[test]
fn without_ticks_the_hosts_own_timer_ends_the_wait() {
    let mut host = without(&["proxy_set_tick_period_milliseconds"], status::UNIMPLEMENTED, "reject");
    let (stream, callout) = waiting(&mut host);
    host.jump(250);
    host.fail(callout.token, portcullis_test_host::Failure::Died);
    assert_degraded(&host, stream);
}

#[test]
fn without_a_monotonic_clock_the_hosts_own_clock_ends_the_wait() {
    let mut host = without(&["clock_time_get"], 28, "reject");
    let (stream, _) = waiting(&mut host);
    host.tick(PATIENCE_MS);
    assert_degraded(&host, stream);
}

#[test]
fn a_monotonic_clock_that_fails_once_hangs_nothing() {
    let mut host = closed();
    let (before, _) = waiting(&mut host);
    host.faults().once("clock_time_get", 28);
    let (after, _) = waiting(&mut host);
    host.tick(PATIENCE_MS);
    assert_degraded(&host, before);
    assert_degraded(&host, after);
}

#[test]
fn without_any_clock_the_hosts_own_timer_ends_the_wait() {
    let mut host = without(&["clock_time_get", "proxy_get_current_time_nanoseconds"], 12, "reject");
    let (stream, callout) = waiting(&mut host);
    host.tick(PATIENCE_MS);
    host.fail(callout.token, portcullis_test_host::Failure::TimedOut);
    assert_degraded(&host, stream);
}

#[test]
fn without_random_bytes_nothing_can_be_asked() {
    let mut host = without(&["random_get"], 58, "reject");
    let stream = host.request(&ENVELOPE);
    assert_degraded(&host, stream);
    assert_eq!(host.sent(), []);

    let mut host = open();
    host.faults().always("random_get", 58);
    let stream = host.request(&ENVELOPE);
    assert_bypassed(&host, stream);
}

#[test]
fn without_metrics_everything_else_works() {
    let calls = ["proxy_define_metric", "proxy_increment_metric", "proxy_record_metric"];
    for status in status::FAILURES {
        let mut host = without(&calls, status, "reject");
        let (stream, callout) = waiting(&mut host);
        deny(&mut host, &callout);
        assert_eq!(host.stream(stream).reply().status, 429);
        let (stream, callout) = waiting(&mut host);
        admit(&mut host, &callout);
        assert!(host.stream(stream).has_passed());
        assert_eq!(host.counters(), []);
        assert_clean(&host);
    }
}

#[test]
fn metrics_are_defined_at_configuration_only_and_never_incremented_by_nothing() {
    let mut host = closed();
    let defined = host.ledger().tally("proxy_define_metric").calls;
    for _ in 0..3 {
        let (stream, callout) = waiting(&mut host);
        deny(&mut host, &callout);
        host.finish(stream);
        host.tick(100);
    }
    assert_eq!(host.ledger().tally("proxy_define_metric").calls, defined);
    assert_clean(&host);
}

#[test]
fn a_host_without_a_log_has_its_requests_answered() {
    let mut host = without(&["proxy_log"], 12, "reject");
    let (stream, callout) = waiting(&mut host);
    deny(&mut host, &callout);
    assert_eq!(host.stream(stream).reply().status, 429);
    assert_eq!(host.logs(), []);
    assert_clean(&host);
}
