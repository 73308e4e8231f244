//! What the tests share: configurations, envelopes, and the service's answers.

use portcullis_test_host::{Callout, ContextId, Personality, TestHost};
use serde_json::{Value, json};

/// The filter's timeout in every configuration here, in milliseconds.
pub(crate) const TIMEOUT_MS: u64 = 250;
/// By when a paused request has ended at the latest: the timeout, its slack, and two ticks.
pub(crate) const PATIENCE_MS: u64 = TIMEOUT_MS + 20 + 40;

/// Rules with one gate that reject (or admit) whatever is not decided.
pub(crate) fn rules(name: &str, when_unavailable: &str) -> Value {
    json!({
        "name": name,
        "envelope": {"when_missing": when_unavailable},
        "gates": [{"gate": "contract", "when_unavailable": when_unavailable}],
        "decision": {"when_unavailable": when_unavailable}
    })
}

/// A filter configuration around rules.
pub(crate) fn configuration(rules: &Value) -> Value {
    json!({
        "profile": "production",
        "rules": rules,
        "decision": {"upstream": "portcullis", "authority": "portcullis", "timeout_ms": TIMEOUT_MS}
    })
}

/// A host with this configuration.
pub(crate) fn host(configuration: &Value) -> TestHost {
    let mut host = TestHost::new(Personality::ENVOY);
    host.configure(&configuration.to_string())
        .expect("a configuration without faults");
    host
}

/// A host whose rules reject whatever is not decided.
pub(crate) fn closed() -> TestHost {
    host(&configuration(&rules("closed", "reject")))
}

/// A host whose rules admit whatever is not decided.
pub(crate) fn open() -> TestHost {
    host(&configuration(&rules("open", "admit")))
}

/// A request with an owner and a limit of 30.
pub(crate) const ENVELOPE: [(&str, &str); 6] = [
    (":method", "POST"),
    (":path", "/v1/chat"),
    (":authority", "gateway"),
    ("x-request-id", "req-1"),
    ("x-admission-owner-id", "owner-1"),
    ("x-admission-owner-rate-limit-requests", "30"),
];

/// The same with more lines.
pub(crate) fn envelope_and<'a>(more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    ENVELOPE.iter().chain(more).copied().collect()
}

/// A request that waits for its decision, with the callout.
pub(crate) fn waiting(host: &mut TestHost) -> (ContextId, Callout) {
    let stream = host.request(&ENVELOPE);
    let callout = decide_of(host, stream);
    (stream, callout)
}

/// The decision that a stream waits for.
pub(crate) fn decide_of(host: &TestHost, stream: ContextId) -> Callout {
    let pending = host.pending_callouts();
    let callout = pending
        .into_iter()
        .find(|callout| callout.context == stream && callout.is_decide());
    callout.unwrap_or_else(|| panic!("stream {stream} waits for no decision: {host:#?}"))
}

/// The settle batch that is out.
pub(crate) fn settle(host: &TestHost) -> Callout {
    let pending = host.pending_callouts();
    let callout = pending.into_iter().find(Callout::is_settle);
    callout.unwrap_or_else(|| panic!("no settle batch is out: {host:#?}"))
}

/// Every settle batch that is out or has been.
pub(crate) fn settles(host: &TestHost) -> Vec<Callout> {
    host.sent()
        .iter()
        .filter(|callout| callout.is_settle())
        .cloned()
        .collect()
}

/// Answers a decision with a verdict; the operation id is echoed.
pub(crate) fn verdict(host: &mut TestHost, callout: &Callout, mut verdict: Value) {
    verdict["op"] = json!(callout.op());
    host.answer(callout.token, 200, verdict.to_string().as_bytes());
}

/// Admits.
pub(crate) fn admit(host: &mut TestHost, callout: &Callout) {
    verdict(host, callout, json!({"verdict": "admit"}));
}

/// Admits with a slot that lapses after 30 s.
pub(crate) fn admit_with_slot(host: &mut TestHost, callout: &Callout) {
    verdict(host, callout, json!({"verdict": "admit", "slot_ttl_ms": 30_000}));
}

/// Denies for a spent contract.
pub(crate) fn deny(host: &mut TestHost, callout: &Callout) {
    let limit = json!({"scope": "owner", "resource": "requests", "limit": 30, "remaining": 0,
                       "reset_ms": 41_000, "window_s": 60});
    let denial = json!({"verdict": "deny", "code": "RATE_LIMITED", "gate": "contract", "limit": limit,
                        "retry_after_s": 41});
    verdict(host, callout, denial);
}

/// The filter has broken no rule.
#[track_caller]
pub(crate) fn assert_clean(host: &TestHost) {
    assert!(host.violations().is_empty(), "{:#?}", host.violations());
}

/// The request was refused for want of a decision, and the upstream saw nothing.
#[track_caller]
pub(crate) fn assert_degraded(host: &TestHost, stream: ContextId) {
    let stream = host.stream(stream);
    let reply = stream.reply();
    let seen = (
        reply.status,
        reply.code(),
        reply.header("x-portcullis-class"),
        reply.header("retry-after"),
    );
    let expected = (
        503,
        "SERVICE_DEGRADED".to_owned(),
        Some("decision_unavailable"),
        Some("1"),
    );
    assert_eq!(seen, expected);
    assert!(!stream.has_passed(), "the upstream was reached");
    assert_clean(host);
}

/// The request went up without a decision, and that is told.
#[track_caller]
pub(crate) fn assert_bypassed(host: &TestHost, stream: ContextId) {
    assert!(
        host.stream(stream).has_passed(),
        "the upstream was not reached: {host:#?}"
    );
    assert!(host.stream(stream).replies.is_empty());
    assert!(host.counter("bypassed_decision_unavailable") > 0);
    assert!(!host.lines("bypassed").is_empty());
    assert_clean(host);
}
