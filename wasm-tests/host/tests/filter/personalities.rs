//! What each kind of host does where hosts differ, seen through the module: that the test host imitates it, and that the
//! module comes to a clear end all the same. The outcomes of whole requests are in the case table (`cases.rs`).

use portcullis_test_host::{Personality, TestHost, filter_module, status};
use serde_json::{Value, json};
use wasmtime::{Config, Engine, Module};

use crate::cases::HOSTS;
use crate::llm::{BODY, CALL, PATIENCE_FOR_BODY_MS, reading};
use crate::scene::{
    ENVELOPE, admit, admit_with_slot, assert_clean, assert_degraded, configuration, decide_of, deny, rules, settles,
    waiting,
};

fn on(personality: Personality, mut configuration: Value) -> TestHost {
    let mut host = TestHost::new(personality);
    configuration["decision"]["upstream"] = json!(personality.decision_upstream());
    host.configure(&configuration.to_string()).expect("no faults");
    host
}

fn closed_on(personality: Personality) -> TestHost {
    on(personality, configuration(&rules("closed", "reject")))
}

/// A module that imports what a host does not link is not loaded there.
#[test]
fn every_host_links_what_the_module_imports_and_not_what_other_modules_break_on() {
    for personality in HOSTS {
        // Making a host holds each import against its list.
        TestHost::new(personality);
    }
    for missing in ["proxy_get_metric", "proxy_get_log_level"] {
        assert!(!Personality::APISIX.links.contains(missing), "APISIX links {missing}");
    }
}

/// The oldest runtime is wasmtime 0.38, of which these features were on.
#[test]
fn the_module_uses_no_feature_of_wasm_that_the_oldest_runtime_lacks() {
    let mut config = Config::new();
    config
        .wasm_tail_call(false)
        .wasm_relaxed_simd(false)
        .wasm_multi_memory(false);
    config.wasm_memory64(false).wasm_extended_const(false);
    let engine = Engine::new(&config).expect("an engine");
    let bytes = std::fs::read(filter_module()).expect("the module");
    let valid = Module::validate(&engine, &bytes);
    assert!(valid.is_ok(), "{valid:?}");
}

#[test]
fn a_host_that_configures_in_requests_answers_503_itself_while_the_module_refuses() {
    let mut host = TestHost::new(Personality::APISIX);
    host.configure("{}").expect("nothing is looked at yet");
    assert_eq!(host.logs(), []);
    for _ in 0..2 {
        let lines = host.lines("configuration_rejected").len();
        let stream = host.request(&ENVELOPE);
        assert_eq!(
            (host.stream(stream).host_status, host.stream(stream).has_passed()),
            (Some(503), false)
        );
        assert!(
            host.lines("configuration_rejected").len() > lines,
            "each request tries again"
        );
        host.finish(stream);
    }
    let mut host = closed_on(Personality::APISIX);
    let (stream, callout) = waiting(&mut host);
    assert_eq!(host.lines("configured").len(), 1);
    admit(&mut host, &callout);
    assert!(host.stream(stream).has_passed());
    assert_clean(&host);
}

/// The host gives bodies only after the headers have gone on, and the filter lets none go before it has read the body.
#[test]
fn where_bodies_do_not_come_while_headers_are_held_a_model_in_the_body_is_never_admitted() {
    let mut host = on(Personality::WASMX, reading(&rules("reading", "admit")));
    let stream = host.begin(&CALL);
    host.body(stream, BODY.as_bytes(), true);
    host.tick(PATIENCE_FOR_BODY_MS);
    assert_degraded(&host, stream);
    assert_eq!(host.sent(), []);

    let mut host = on(Personality::APISIX, reading(&rules("reading", "admit")));
    let stream = host.begin(&CALL);
    host.body(stream, BODY.as_bytes(), true);
    assert_eq!(
        (host.stream(stream).host_status, host.stream(stream).has_passed()),
        (Some(503), false)
    );
}

/// A host that says of every request that something follows: without a model to read nothing is waited for.
#[test]
fn whatever_a_host_says_about_the_end_of_headers_a_request_is_asked_about_at_once() {
    for personality in HOSTS {
        for has_body in [false, true] {
            let mut host = closed_on(personality);
            let stream = if has_body {
                host.begin(&ENVELOPE)
            } else {
                host.request(&ENVELOPE)
            };
            let callout = decide_of(&host, stream);
            admit(&mut host, &callout);
            host.body(stream, b"{}", true);
            assert_eq!(host.stream(stream).forwarded, b"{}", "{}", personality.name);
            assert_clean(&host);
        }
    }
}

#[test]
fn where_ticks_may_be_asked_for_once_a_second_configuration_of_a_root_asks_no_more() {
    let mut host = closed_on(Personality::WASMX);
    let root = host.root();
    let text = configuration(&rules("other", "reject")).to_string();
    host.reconfigure(root, &text.replace("\"portcullis\"", "\"127.0.0.1:1\""))
        .expect("no faults");
    assert_clean(&host);
    let (stream, callout) = waiting(&mut host);
    host.reset(stream);
    host.tick(20);
    assert_eq!(settles(&host)[0].told("cancels"), [callout.op()]);
    assert_clean(&host);
}

#[test]
fn where_metrics_are_accepted_and_not_kept_requests_are_decided_all_the_same() {
    let mut host = closed_on(Personality::APISIX);
    let (stream, callout) = waiting(&mut host);
    deny(&mut host, &callout);
    assert_eq!((host.stream(stream).reply().status, host.counters()), (429, Vec::new()));
    assert_eq!(host.lines("rejected").len(), 1);
    assert_clean(&host);
}

/// The decision of a request comes first; what earlier ones have left behind is told once that call is over.
#[test]
fn with_one_call_at_a_time_the_decision_comes_first_and_what_was_left_behind_is_told_after_it() {
    let mut host = closed_on(Personality::APISIX);
    let (first, held) = waiting(&mut host);
    admit_with_slot(&mut host, &held);
    host.finish(first);
    let (second, callout) = waiting(&mut host);
    assert_eq!(host.pending_callouts().len(), 1, "a second call in one request");
    assert_eq!(
        host.ledger().tally("proxy_http_call").calls,
        3,
        "two decisions, and a batch that was refused"
    );
    admit(&mut host, &callout);
    assert!(host.stream(second).has_passed());
    let told: Vec<_> = settles(&host).iter().flat_map(|batch| batch.told("releases")).collect();
    assert_eq!(told, [held.op()]);
    assert_clean(&host);
}

/// A name that only another kind of host could call ends the host's own call or the request, never in an admission.
#[test]
fn a_name_of_another_hosts_upstream_lets_nothing_through() {
    let configuration = configuration(&rules("closed", "reject")).to_string();
    let mut host = TestHost::new(Personality::APISIX);
    host.configure(&configuration).expect("nothing is looked at yet");
    let stream = host.request(&ENVELOPE);
    assert_degraded(&host, stream);

    let mut host = TestHost::new(Personality::WASMX);
    host.configure(&configuration).expect("no faults");
    let stream = host.request(&ENVELOPE);
    assert!(host.has_trapped() && !host.stream(stream).has_passed());
}

#[test]
fn a_host_without_the_time_of_its_own_is_asked_for_wasis() {
    let mut host = closed_on(Personality::APISIX);
    host.faults().always("clock_time_get", status::UNIMPLEMENTED);
    let (stream, callout) = waiting(&mut host);
    admit(&mut host, &callout);
    assert!(host.stream(stream).has_passed(), "it has no clock at all, and decides");
    assert_clean(&host);
}
