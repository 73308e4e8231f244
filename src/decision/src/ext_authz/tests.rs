//! What Envoy's `ext_authz` is told otherwise than a host.

#[cfg(target_arch = "wasm32")]
use wasm_bindgen_test::wasm_bindgen_test as test;

use alloc::string::ToString;

use super::*;
use crate::class::{Code, Dependency};
use crate::config::FilterConfig;
use crate::reply::Refusal;
use crate::verdict::{Admission, Denial};

fn gatehouse(choice: &str) -> Gatehouse {
    let text = alloc::format!(
        r#"{{"profile": "development", "decision": {{"upstream": "x"}}, "rules": {{"name": "r",
            "envelope": {{"when_missing": "reject"}}, "decision": {{"when_unavailable": "reject"}},
            "gates": [{{"gate": "contract", "when_unavailable": {choice}}}]}}}}"#
    );
    Gatehouse::new(FilterConfig::parse(text.as_bytes()).unwrap(), text.as_bytes())
}

fn request(choice: &str, limits: &str) -> DecideRequest {
    let text = alloc::format!(
        r#"{{"op": "{:032x}", "profile": "development", "rules": "r", "mode": "enforce", "budget_ms": 1, "window_s": 60,
            "gates": [{{"gate": "contract", "when_unavailable": {choice}}}], "subject": {{"owner": "o"}}, "tokens": 1,
            "limits": {{"owner": {limits}}}}}"#,
        1
    );
    serde_json::from_str(&text).unwrap()
}

#[test]
fn a_slot_is_closed_or_taken_out_by_the_choice_of_the_gate_that_would_count_it() {
    let both = r#"{"concurrency": 2, "requests": 5}"#;
    let mut closed = request(r#""reject""#, both);
    let Slots::Refused(verdict) = without_slots(&mut gatehouse(r#""reject""#), &mut closed, 0) else {
        panic!("not refused")
    };
    assert_eq!(verdict.class(), Some(FailureClass::LimiterUnavailable));

    let bounded = r#"{"admit": {"max_per_minute": 1}}"#;
    let (mut gatehouse, mut first) = (gatehouse(bounded), request(bounded, both));
    let Slots::Unchecked(bypass) = without_slots(&mut gatehouse, &mut first, 0) else {
        panic!("not opened")
    };
    assert_eq!(first.limits.owner.concurrency, Limit::Unlimited);
    assert_eq!(first.limits.owner.requests, Limit::of(5), "the other limits are kept");
    let mut second = request(bounded, both);
    assert!(
        matches!(without_slots(&mut gatehouse, &mut second, 0), Slots::Refused(_)),
        "the allowance is spent"
    );

    let Verdict::Admit(admission) = with_bypass(&mut gatehouse, Verdict::Admit(Admission::default()), bypass) else {
        panic!("not admitted")
    };
    assert_eq!(admission.bypassed, [bypass]);
}

#[test]
fn the_allowance_is_for_those_who_pass_and_not_for_those_who_are_refused_for_another_reason() {
    let bounded = r#"{"admit": {"max_per_minute": 2}}"#;
    let mut gatehouse = gatehouse(bounded);
    let mut ask = |decided: Verdict| {
        let mut request = request(bounded, r#"{"concurrency": 2, "requests": 5}"#);
        match without_slots(&mut gatehouse, &mut request, 0) {
            Slots::Unchecked(bypass) => with_bypass(&mut gatehouse, decided, bypass),
            Slots::Refused(verdict) => verdict,
            Slots::NotTaken => panic!("no slot is stamped"),
        }
    };
    let spent = Verdict::Deny(Denial::plain(Code::RateLimited, None));
    for at in 0..3 {
        assert_eq!(ask(spent.clone()), spent, "denial {at}");
    }
    let mut passes = || matches!(ask(Verdict::Admit(Admission::default())), Verdict::Admit(_));
    assert_eq!([passes(), passes(), passes()], [true, true, false]);
}

#[test]
fn nothing_is_said_of_slots_where_none_would_be_taken() {
    for limits in [
        r#"{"requests": 5}"#,
        r#"{"concurrency": 0}"#,
        r#"{"concurrency": 3, "tokens": 0}"#,
    ] {
        let (asked, mut request) = (request(r#""reject""#, limits), request(r#""reject""#, limits));
        assert_eq!(
            without_slots(&mut gatehouse(r#""reject""#), &mut request, 0),
            Slots::NotTaken,
            "{limits}"
        );
        assert_eq!(request, asked);
    }
}

#[test]
fn a_grpc_refusal_is_no_200_and_any_other_is_as_it_was() {
    let unavailable = Unavailability {
        dependency: Dependency::Limiter,
        gate: None,
    };
    let degraded = Refusal::Unavailable(unavailable);
    let plain = degraded.reply(None, None);
    assert_eq!(told(plain.clone()), plain);
    for (refusal, code) in [
        (degraded, Code::ServiceDegraded),
        (
            Refusal::Denied(Denial::plain(Code::RateLimited, None)),
            Code::RateLimited,
        ),
        (
            Refusal::Denied(Denial::plain(Code::OrgSuspended, None)),
            Code::OrgSuspended,
        ),
        (
            Refusal::Denied(Denial::plain(Code::ModelRequired, None)),
            Code::ModelRequired,
        ),
        (
            Refusal::Denied(Denial::plain(Code::ProviderNotConfigured, None)),
            Code::ProviderNotConfigured,
        ),
    ] {
        let reply = told(refusal.reply(Some("application/grpc"), None));
        assert_eq!((reply.status, reply.grpc), (code.status(), None));
        assert!(reply.headers.contains(&("grpc-status", code.grpc_status().to_string())));
        assert_eq!(reply.body, code.message().as_bytes());
    }
    assert!(is_grpc(b"application/grpc+proto") && !is_grpc(b"application/grpc-web"));
}
