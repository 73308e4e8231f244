//! Configurations: faults, several roots in one VM, and a new one under running streams.

use serde_json::json;

use portcullis_test_host::{Personality, TestHost, status};

use crate::scene::{
    ENVELOPE, admit, admit_with_slot, assert_clean, assert_degraded, closed, configuration, decide_of, deny, host,
    rules, settle, waiting,
};

#[test]
fn a_configuration_with_faults_is_refused_with_a_line_for_each() {
    let mut faulty = configuration(&rules("closed", "reject"));
    faulty["profil"] = json!("production");
    faulty["mode"] = json!("audit");
    faulty["decision"]["timeout_ms"] = json!("250");
    let mut host = TestHost::new(Personality::ENVOY);
    let rejected = host.configure(&faulty.to_string()).expect_err("three faults");
    let messages: Vec<String> = rejected
        .lines
        .iter()
        .map(|line| {
            assert_eq!((line.level, line.event()), (4, "configuration_rejected".to_owned()));
            line.json()["message"].as_str().unwrap_or_default().to_owned()
        })
        .collect();
    assert_eq!(messages.len(), 3, "{messages:#?}");
    for path in ["profil", "mode", "decision.timeout_ms"] {
        assert!(
            messages.iter().any(|message| message.starts_with(path)),
            "{path}: {messages:#?}"
        );
    }
    assert!(
        messages.iter().any(|message| message.contains("did you mean")),
        "{messages:#?}"
    );
    assert_clean(&host);
}

#[test]
fn text_that_is_no_configuration_is_refused() {
    for text in [
        "",
        "{",
        "[]",
        "null",
        "\u{0}",
        "{\"profile\":\"production\"}",
        &"[".repeat(100_000),
    ] {
        let mut host = TestHost::new(Personality::ENVOY);
        let rejected = host.configure(text).expect_err("a fault");
        assert!(!rejected.lines.is_empty());
        assert_clean(&host);
    }
}

#[test]
fn a_configuration_that_the_host_does_not_hand_over_is_refused() {
    for status in status::FAILURES {
        let mut host = TestHost::new(Personality::ENVOY);
        host.faults().always("proxy_get_buffer_bytes", status);
        let rejected = host.configure(&configuration(&rules("closed", "reject")).to_string());
        assert!(!rejected.expect_err("no text").lines.is_empty());
        assert_clean(&host);
    }
}

#[test]
fn a_request_before_any_configuration_is_refused_once() {
    let mut host = TestHost::new(Personality::ENVOY);
    host.open_root();
    let stream = host.request(&ENVELOPE);
    assert_degraded(&host, stream);
    assert_eq!(host.lines("unconfigured").len(), 1);
}

#[test]
fn a_faulty_update_leaves_the_rules_in_force() {
    let mut host = closed();
    let root = host.root();
    host.reconfigure(root, "{}").expect_err("faults");
    let stream = host.request(&[(":method", "GET"), (":path", "/")]);
    assert_eq!(host.stream(stream).reply().code(), "ENVELOPE_MISSING");
    assert_clean(&host);
}

#[test]
fn two_roots_in_one_vm_keep_their_rules_gauges_and_breakers_apart() {
    let mut host = closed();
    let closed = host.root();
    let mut shadow = configuration(&rules("watched", "reject"));
    shadow["mode"] = json!("shadow");
    shadow["decision"]["upstream"] = json!("other");
    let shadow = host.configure(&shadow.to_string()).unwrap();
    assert_eq!(
        (host.gauge("enforcing_closed"), host.gauge("enforcing_watched")),
        (Some(1), Some(0))
    );
    let (enforced, watched) = (host.request_on(closed, &ENVELOPE), host.request_on(shadow, &ENVELOPE));
    let (of_enforced, of_watched) = (decide_of(&host, enforced), decide_of(&host, watched));
    assert_eq!((of_enforced.root, of_watched.root), (closed, shadow));
    assert_eq!(
        (of_enforced.upstream.as_str(), of_watched.upstream.as_str()),
        ("portcullis", "other")
    );
    deny(&mut host, &of_watched);
    deny(&mut host, &of_enforced);
    assert!(host.stream(watched).has_passed());
    assert_eq!(host.stream(enforced).reply().status, 429);
    for _ in 0..5 {
        let stream = host.request_on(shadow, &ENVELOPE);
        let callout = decide_of(&host, stream);
        host.fail(callout.token, portcullis_test_host::Failure::TimedOut);
    }
    let stream = host.request_on(closed, &ENVELOPE);
    let callout = decide_of(&host, stream);
    admit(&mut host, &callout);
    assert!(
        host.stream(stream).has_passed(),
        "the other root's breaker is no business of this one"
    );
    assert_clean(&host);
}

#[test]
fn the_gauge_of_rules_that_are_enforced_now_does_not_stay_as_their_shadow_left_it() {
    let enforced = configuration(&rules("closed", "reject"));
    let mut shadow = enforced.clone();
    shadow["mode"] = json!("shadow");
    let mut host = host(&shadow);
    let root = host.root();
    let (old, _) = waiting(&mut host);
    host.reconfigure(root, &enforced.to_string()).unwrap();
    assert_eq!(host.gauge("enforcing_closed"), Some(1));
    host.tick(1_500);
    assert_eq!(
        host.gauge("enforcing_closed"),
        Some(0),
        "a stream still runs in shadow mode"
    );
    host.finish(old);
    host.tick(1_000);
    let batch = settle(&host);
    host.answer(batch.token, 200, b"{}");
    host.tick(40);
    assert_eq!(host.gauge("enforcing_closed"), Some(1));
    host.tick(5_000);
    assert_eq!(host.gauge("enforcing_closed"), Some(1));
    assert_clean(&host);
}

#[test]
fn each_root_tells_its_own_batches_to_its_own_service() {
    let mut host = closed();
    let first = host.root();
    let mut other = configuration(&rules("other", "reject"));
    other["decision"]["upstream"] = json!("other");
    let second = host.configure(&other.to_string()).unwrap();
    for root in [first, second] {
        let stream = host.request_on(root, &ENVELOPE);
        host.reset(stream);
    }
    host.tick(40);
    let mut batches: Vec<_> = host
        .pending_callouts()
        .into_iter()
        .filter(|callout| callout.is_settle())
        .collect();
    batches.sort_by_key(|callout| callout.root);
    let told: Vec<_> = batches
        .iter()
        .map(|batch| (batch.root, batch.upstream.as_str()))
        .collect();
    assert_eq!(told, [(first, "portcullis"), (second, "other")]);
    assert_clean(&host);
}

#[test]
fn a_stream_ends_under_the_configuration_under_which_it_began() {
    let mut host = host(&configuration(&rules("closed", "reject")));
    let root = host.root();
    let (waits, callout) = waiting(&mut host);
    let (holds, held) = waiting(&mut host);
    admit_with_slot(&mut host, &held);
    let mut update = configuration(&rules("open", "admit"));
    update["decision"]["upstream"] = json!("new");
    host.reconfigure(root, &update.to_string()).unwrap();
    host.answer(callout.token, 500, b"");
    assert_degraded(&host, waits);
    let (later, new_callout) = waiting(&mut host);
    assert_eq!(new_callout.upstream, "new");
    admit(&mut host, &new_callout);
    assert!(host.stream(later).has_passed());
    host.finish(holds);
    host.tick(20);
    let batch = settle(&host);
    assert_eq!(batch.upstream, "portcullis");
    assert_eq!(
        (batch.told("releases"), batch.told("cancels")),
        (vec![held.op()], vec![callout.op()])
    );
    assert_clean(&host);
}
