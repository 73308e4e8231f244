//! Verdicts: what reaches the upstream, what the client gets, and what is counted.

use portcullis_test_host::{Personality, TestHost, first};
use serde_json::json;

use crate::scene::{
    ENVELOPE, admit, assert_clean, closed, configuration, deny, envelope_and, host, rules, verdict, waiting,
};

#[test]
fn an_admitted_request_goes_up_without_its_envelope() {
    let mut host = closed();
    let (stream, callout) = waiting(&mut host);
    assert!(!host.stream(stream).has_passed(), "it goes up before it is decided");
    assert_eq!((callout.upstream.as_str(), callout.timeout_ms), ("portcullis", 250));
    let asked = callout.json();
    assert_eq!(asked["subject"], json!({"owner": "owner-1"}));
    assert_eq!(asked["limits"], json!({"owner": {"requests": 30}}));
    assert_eq!(asked["budget_ms"], 220);
    admit(&mut host, &callout);
    let upstream = host.stream(stream).upstream.clone().expect("it goes up");
    let names: Vec<_> = upstream.iter().map(|(name, _)| String::from_utf8_lossy(name)).collect();
    assert_eq!(names, [":method", ":path", ":authority", "x-request-id"]);
    assert_eq!(host.stream(stream).resumes, 1);
    assert_eq!(
        host.counters(),
        [("portcullis_admitted", 1), ("portcullis_callouts", 1)]
    );
    assert_eq!(host.samples("callout_ms"), [0]);
    assert_clean(&host);
}

#[test]
fn a_denied_request_gets_the_reply_and_the_upstream_sees_nothing() {
    let mut host = closed();
    let (stream, callout) = waiting(&mut host);
    deny(&mut host, &callout);
    let reply = host.stream(stream).reply();
    assert_eq!((reply.status, reply.code()), (429, "RATE_LIMITED".to_owned()));
    assert_eq!(reply.header("retry-after"), Some("41"));
    assert_eq!(reply.header("x-portcullis-class"), Some("quota_exhausted"));
    assert_eq!(reply.json()["error"]["request_id"], "req-1");
    assert!(!host.stream(stream).has_passed());
    let response = &host.stream(stream).response;
    let class = first(response, "x-portcullis-class");
    assert_eq!(
        class,
        Some(b"quota_exhausted".as_slice()),
        "its own response callback took its class away"
    );
    host.finish(stream);
    host.tick(1_000);
    assert_eq!(host.counter("rejected_quota_exhausted"), 1);
    assert_eq!(host.pending_callouts(), [], "a denial has charged nothing");
    assert_clean(&host);
}

#[test]
fn a_grpc_call_is_denied_with_a_grpc_status() {
    let mut host = closed();
    let stream = host.request(&envelope_and(&[("content-type", "application/grpc+proto")]));
    let callout = host.callout();
    deny(&mut host, &callout);
    let reply = host.stream(stream).reply();
    assert_eq!((reply.status, reply.grpc_status), (200, Some(8)));
    assert_eq!(reply.body, b"shared inference rate limit exceeded");
    assert_clean(&host);
}

#[test]
fn a_dependency_that_stayed_closed_is_named_in_the_reply() {
    let mut host = closed();
    let (stream, callout) = waiting(&mut host);
    verdict(
        &mut host,
        &callout,
        json!({"verdict": "unavailable", "dependency": "limiter", "gate": "contract"}),
    );
    let reply = host.stream(stream).reply();
    assert_eq!((reply.status, reply.code()), (503, "SERVICE_DEGRADED".to_owned()));
    assert_eq!(reply.header("x-portcullis-class"), Some("limiter_unavailable"));
    assert_clean(&host);
}

#[test]
fn a_limit_of_zero_is_denied_by_the_filter_when_nobody_answers() {
    let mut host = crate::scene::open();
    host.faults().always("proxy_http_call", 10);
    let stream = host.request(&envelope_and(&[("x-admission-owner-rate-limit-tokens", "0")]));
    assert_eq!(host.stream(stream).reply().code(), "TOKENS_LIMITED");
    assert!(!host.stream(stream).has_passed());
    assert_clean(&host);
}

#[test]
fn a_bypassed_gate_is_counted_logged_and_shown_in_the_gauge_for_ten_seconds() {
    let mut host = host(&configuration(&rules("soft", "admit")));
    assert_eq!(host.gauge("enforcing_soft"), Some(1));
    let (stream, callout) = waiting(&mut host);
    let bypassed = json!([{"class": "limiter_unavailable", "gate": "contract"}]);
    verdict(&mut host, &callout, json!({"verdict": "admit", "bypassed": bypassed}));
    assert!(host.stream(stream).has_passed());
    assert_eq!(host.counter("bypassed_limiter_unavailable"), 1);
    assert_eq!(host.lines("bypassed")[0]["message"], "fail-open, contract unchecked");
    assert_eq!(host.gauge("enforcing_soft"), Some(0));
    host.tick(9_900);
    assert_eq!(host.gauge("enforcing_soft"), Some(0));
    host.tick(200);
    assert_eq!(host.gauge("enforcing_soft"), Some(1));
    assert_clean(&host);
}

#[test]
fn shadow_mode_decides_counts_and_lets_everything_through() {
    let mut configuration = configuration(&rules("closed", "reject"));
    configuration["mode"] = json!("shadow");
    let mut host = host(&configuration);
    assert_eq!(host.gauge("enforcing_closed"), Some(0));
    let (stream, callout) = waiting(&mut host);
    assert_eq!(callout.json()["mode"], "shadow");
    deny(&mut host, &callout);
    assert!(host.stream(stream).has_passed());
    assert_eq!(
        (
            host.counter("shadow_requests"),
            host.counter("shadow_rejected_quota_exhausted")
        ),
        (1, 1)
    );
    assert_clean(&host);
}

#[test]
fn the_upstreams_own_class_is_removed_and_the_tightest_limit_shown_if_wanted() {
    let mut configuration = configuration(&rules("closed", "reject"));
    configuration["reply"] = json!({"limit_headers": "always"});
    let mut host = host(&configuration);
    let (stream, callout) = waiting(&mut host);
    let tightest = json!({"scope": "owner", "resource": "requests", "limit": 30, "remaining": 12,
                          "reset_ms": 41_000, "window_s": 60});
    verdict(&mut host, &callout, json!({"verdict": "admit", "tightest": tightest}));
    let response = host.respond(stream, &[(":status", "200"), ("x-portcullis-class", "forged")]);
    assert_eq!(first(&response, "x-portcullis-class"), None);
    assert_eq!(
        first(&response, "x-ratelimit-remaining-requests"),
        Some(b"12".as_slice())
    );
    assert_clean(&host);
}

#[test]
fn unguarded_and_unlimited_requests_cost_no_callout() {
    let mut host = closed();
    let options = host.request(&[(":method", "OPTIONS"), (":path", "/")]);
    let unlimited = host.request(&[(":method", "GET"), (":path", "/"), ("x-admission-owner-id", "o")]);
    assert!(host.stream(options).has_passed() && host.stream(unlimited).has_passed());
    assert_eq!(host.sent(), []);
    assert_clean(&host);
}

#[test]
fn operation_ids_are_never_taken_from_a_header_and_never_repeat() {
    let mut host = TestHost::with_seed(Personality::ENVOY, 7);
    host.configure(&configuration(&rules("closed", "reject")).to_string())
        .unwrap();
    for _ in 0..100 {
        host.request(&ENVELOPE);
    }
    let mut ops: Vec<_> = host.sent().iter().map(portcullis_test_host::Callout::op).collect();
    ops.sort();
    ops.dedup();
    assert_eq!(ops.len(), 100);
    assert!(ops.iter().all(|op| op.len() == 32));
}

#[test]
fn a_request_costs_the_same_each_time() {
    let mut host = closed();
    let mut cost = || {
        let before = host.ledger().clone();
        let (stream, callout) = waiting(&mut host);
        admit(&mut host, &callout);
        host.finish(stream);
        host.ledger().since(&before)
    };
    cost();
    let (second, third) = (cost(), cost());
    assert_eq!(second.host_calls, third.host_calls);
    assert_eq!(second.tally("proxy_http_call").calls, 1);
    assert!(second.tally("proxy_http_call").bytes > 200);
    assert!(second.total().calls > 5 && second.total().calls < 40, "{second:#?}");
    assert!(second.fuel() > 10_000, "{second:#?}");
}
