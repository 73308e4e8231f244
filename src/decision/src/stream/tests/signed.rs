//! Requests under a configuration that wants envelopes signed.

use std::string::String;
use std::vec::Vec;

#[cfg(target_arch = "wasm32")]
use wasm_bindgen_test::wasm_bindgen_test as test;

use super::*;
use crate::signature::{Secret, sign};

const NOW: u64 = 1_764_000_000;
const SECRET: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
const LIMITED: [(&str, &str); 2] = [
    ("x-admission-owner-id", "o"),
    ("x-admission-owner-rate-limit-requests", "30"),
];

fn run(missing: &str, more: &str) -> Run {
    let signature =
        std::format!(r#", "envelope": {{"signature": {{"keys": {{"k1": {{"secret": "{SECRET}"}}}}}}}} {more}"#);
    let mut run = Run::with(&rules(missing, "\"reject\"", "\"reject\""), &signature);
    run.host.unix_s = Some(NOW);
    run
}

/// What an edge makes of these headers for the path that `Run` sends.
fn signature(path: &str, headers: &[(&str, &str)], at_s: u64) -> String {
    let headers: Vec<Header<'_>> = headers.iter().map(|(n, v)| (n.as_bytes(), v.as_bytes())).collect();
    let request = signature::Request {
        method: b"POST",
        path: path.as_bytes(),
        headers: &headers,
    };
    sign(
        "x-admission-",
        request,
        "k1",
        &Secret::from_base64(SECRET).unwrap(),
        at_s,
    )
    .unwrap()
}

fn and_signed<'a>(headers: &[(&'a str, &'a str)], value: &'a str) -> Vec<(&'a str, &'a str)> {
    headers
        .iter()
        .copied()
        .chain([("X-Admission-Signature", value)])
        .collect()
}

fn reason(run: &Run) -> String {
    let line = run.effects.iter().find_map(|effect| match effect {
        Effect::Log(line) => Some(line.to_json()),
        _ => None,
    });
    line.unwrap_or_default()
}

fn untrusted() -> Option<(u16, String)> {
    Some((503, "ENVELOPE_UNTRUSTED".into()))
}

#[test]
fn a_signed_envelope_is_asked_about_stripped_with_its_signature_and_never_called_unknown() {
    let mut run = run("\"reject\"", "");
    let value = signature("/v1/chat", &LIMITED, NOW);
    run.headers(0, &and_signed(&LIMITED, &value));
    assert!(run.dispatched());
    assert!(
        run.effects
            .contains(&Effect::RemoveRequestHeader("X-Admission-Signature".into()))
    );
    assert_eq!(reason(&run), "");
}

#[test]
fn an_envelope_that_is_not_trusted_is_refused_with_its_reason_whatever_the_rules_open() {
    let good = signature("/v1/chat", &LIMITED, NOW);
    let stale = signature("/v1/chat", &LIMITED, NOW - 61);
    let elsewhere = signature("/v1/other", &LIMITED, NOW);
    let raised = [LIMITED[0], ("x-admission-owner-rate-limit-requests", "31")];
    for (headers, why) in [
        (LIMITED.to_vec(), "unsigned"),
        (and_signed(&LIMITED, &stale), "signed 61 s ago, and 60 are allowed"),
        (and_signed(&LIMITED, &elsewhere), "altered"),
        (and_signed(&raised, &good), "altered"),
        (and_signed(&LIMITED[..1], &good), "altered"),
        (and_signed(&LIMITED, "v1;key=k1"), "is not of the form"),
        (
            std::vec![("x_admission_owner_id", "o")],
            "looks like one of the envelope's",
        ),
    ] {
        let mut run = run("\"admit\"", "");
        run.headers(0, &headers);
        assert_eq!(run.reply(), untrusted(), "{headers:?}");
        assert!(!run.dispatched() && run.stream.is_held());
        assert!(run.counted(Counter::Rejected(FailureClass::EnvelopeMalformed)));
        let line = reason(&run);
        assert!(line.contains(why) && line.contains("ENVELOPE_UNTRUSTED"), "{line}");
        assert!(!line.contains(SECRET) && !line.contains(&good[20..]), "{line}");
    }
}

#[test]
fn a_host_without_a_wall_clock_admits_nothing_that_is_signed() {
    let mut run = run("\"admit\"", "");
    run.host.unix_s = None;
    let value = signature("/v1/chat", &LIMITED, NOW);
    run.headers(0, &and_signed(&LIMITED, &value));
    assert_eq!(run.reply(), untrusted());
}

#[test]
fn untrusted_is_named_before_malformed_and_partial_and_a_signature_mends_neither() {
    let bad = [("x-admission-owner-rate-limit-requests", "05")];
    let partial = [("x-admission-owner-rate-limit-requests", "5")];
    for (headers, code) in [(bad, "ENVELOPE_MALFORMED"), (partial, "ENVELOPE_PARTIAL")] {
        let mut run = run("\"reject\"", "");
        run.headers(0, &headers);
        assert_eq!(run.reply(), untrusted());
        run.next_stream();
        let value = signature("/v1/chat", &headers, NOW);
        run.headers(0, &and_signed(&headers, &value));
        assert_eq!(run.reply(), Some((503, code.into())));
    }
}

#[test]
fn without_any_header_of_the_prefix_the_rules_choose_and_that_is_said_at_the_start() {
    let mut closed = run("\"reject\"", "");
    closed.headers(0, &[]);
    assert_eq!(closed.reply(), Some((503, "ENVELOPE_MISSING".into())));
    let warned = |run: &Run| {
        run.gatehouse.started().iter().any(
            |effect| matches!(effect, Effect::Log(line) if line.level == Level::Warn && line.to_json().contains("signatures_can_be_left_out")),
        )
    };
    assert!(!warned(&closed));
    let mut open = run("\"admit\"", "");
    open.headers(0, &[]);
    assert!(open.reply().is_none() && !open.stream.is_held());
    assert!(warned(&open));
    assert!(
        !warned(&Run::open()),
        "without signatures there is nothing to go around"
    );
}

#[test]
fn shadow_lets_an_untrusted_envelope_pass_and_counts_it() {
    let mut run = run("\"reject\"", r#", "mode": "shadow""#);
    run.headers(0, &LIMITED);
    assert!(run.reply().is_none() && !run.stream.is_held());
    assert!(run.counted(Counter::ShadowRejected(FailureClass::EnvelopeMalformed)));
}

#[test]
fn without_signatures_configured_nothing_is_checked() {
    let mut run = Run::closed();
    run.headers(0, &and_signed(&LIMITED, "banana"));
    assert!(run.dispatched());
    assert!(reason(&run).contains("x-admission-signature is not a header of the envelope: ignored"));
}
