//! Which state each sighting and each store comes to, on a clock that is turned by hand.

use portcullis_decision::class::FailureClass;
use portcullis_decision::config::{Environment, ServiceConfig};
use portcullis_decision::verdict::{Admission, Bypass, Denial, Unavailability, Verdict};
use portcullis_decision::wire::DecideRequest;
use tokio::time::advance;

use super::*;
use crate::limiter::memory::MemoryLimiter;

/// A service with a limiter in memory, no policy store and no tiers.
fn gates(text: &str) -> Gates {
    let config = ServiceConfig::parse(text.as_bytes(), &Environment::default()).unwrap();
    let metrics: Arc<Metrics> = Arc::default();
    let readiness = Readiness::new(&config, Some(&MemoryLimiter::default()), Arc::clone(&metrics));
    Gates::new(Arc::default(), Arc::new(readiness), None, &config.capacity, metrics)
}

fn in_memory() -> Gates {
    gates(r#"{"profile": "development", "listen": "127.0.0.1:0", "metering": {"url": "memory:"}}"#)
}

fn asking(changes: Value) -> DecideRequest {
    let mut request = json!({
        "op": "00000000000000000000000000000001", "profile": "development", "rules": "r", "mode": "enforce",
        "gates": [{"gate": "contract", "when_unavailable": "admit", "limits": "envelope"}],
        "budget_ms": 100, "window_s": 60, "subject": {"owner": "o"}, "tokens": 1
    });
    let (keys, changes) = (request.as_object_mut().unwrap(), changes.as_object().unwrap().clone());
    keys.extend(changes);
    serde_json::from_value(request).unwrap()
}

fn admitted() -> Verdict {
    Verdict::Admit(Admission::default())
}

fn opened(gate: Gate, class: FailureClass) -> Verdict {
    Verdict::Admit(Admission {
        bypassed: vec![Bypass { class, gate }],
        ..Admission::default()
    })
}

fn state(gates: &Gates, gate: &str) -> String {
    gates.report()[gate]["state"].as_str().unwrap().to_owned()
}

#[tokio::test(start_paused = true)]
async fn before_anybody_has_asked_every_gate_is_never_seen_and_the_gauges_say_so() {
    let gates = in_memory();
    let report = gates.report();
    assert_eq!(report.as_object().unwrap().len(), Gate::ALL.len());
    for gate in Gate::ALL {
        let entry = &report[gate.name()];
        assert_eq!(entry["state"], "never_seen", "{entry}");
        assert!(
            entry.get("asked_s_ago").is_none() && entry.get("rules").is_none(),
            "{entry}"
        );
        let line = format!(
            "portcullis_gate_state{{gate=\"{}\",state=\"never_seen\"}} 1",
            gate.name()
        );
        assert!(gates.metrics.encode().contains(&line), "{line}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_denial_or_an_admission_makes_listed_gates_enforcing_and_no_others() {
    for verdict in [
        admitted(),
        Verdict::Deny(Denial::plain(
            portcullis_decision::class::Code::RateLimited,
            Some(Gate::Contract),
        )),
    ] {
        let gates = in_memory();
        gates.seen.note(&asking(json!({})), &verdict);
        advance(Duration::from_secs(3)).await;
        let report = gates.report();
        let entry = &report["contract"];
        assert_eq!(
            (&entry["state"], &entry["rules"], &entry["asked_s_ago"]),
            (&json!("enforcing"), &json!("r"), &json!(3)),
            "{entry}"
        );
        assert_eq!(report["capacity"]["state"], "never_seen");
        let metrics = gates.metrics.encode();
        assert!(metrics.contains(r#"portcullis_gate_state{gate="contract",state="enforcing"} 1"#));
        assert!(metrics.contains(r#"portcullis_gate_state{gate="contract",state="never_seen"} 0"#));
    }
}

#[tokio::test(start_paused = true)]
async fn a_gate_that_was_passed_unchecked_is_bypassing_for_ten_seconds() {
    let gates = in_memory();
    let request = asking(json!({}));
    gates
        .seen
        .note(&request, &opened(Gate::Contract, FailureClass::LimiterUnavailable));
    let entry = gates.report()["contract"].clone();
    assert_eq!(entry["state"], "bypassing");
    assert!(
        entry["reason"].as_str().unwrap().contains("limiter_unavailable"),
        "{entry}"
    );
    gates.seen.note(&request, &admitted());
    advance(Duration::from_millis(9_999)).await;
    assert_eq!(state(&gates, "contract"), "bypassing");
    advance(Duration::from_millis(1)).await;
    assert_eq!(state(&gates, "contract"), "enforcing");
}

#[tokio::test(start_paused = true)]
async fn without_a_limiter_every_limiter_gate_that_is_listed_is_bypassing() {
    let gates = in_memory();
    let listed = json!([
        {"gate": "capacity", "when_unavailable": "reject"}, {"gate": "contract", "when_unavailable": "reject"},
        {"gate": "launch_rate", "per_minute": 1, "burst": 1}
    ]);
    let unenforced = Verdict::Admit(Admission {
        unenforced: true,
        ..Admission::default()
    });
    gates.seen.note(&asking(json!({"gates": listed})), &unenforced);
    let states = ["capacity", "contract", "launch_rate"].map(|gate| state(&gates, gate));
    assert_eq!(states, ["bypassing", "bypassing", "enforcing"]);
}

#[tokio::test(start_paused = true)]
async fn a_stamped_limit_that_the_rules_do_not_list_makes_the_contract_bypassing() {
    let gates = in_memory();
    let changes = json!({
        "gates": [{"gate": "launch_rate", "per_minute": 1, "burst": 1}], "limits": {"owner": {"requests": 5}}
    });
    gates.seen.note(&asking(changes), &admitted());
    let entry = gates.report()["contract"].clone();
    assert_eq!(entry["state"], "bypassing");
    assert!(entry["reason"].as_str().unwrap().contains("do not list"), "{entry}");
}

#[tokio::test(start_paused = true)]
async fn shadow_lasts_until_ten_seconds_of_enforcement_and_outlasts_silence() {
    let gates = in_memory();
    gates
        .seen
        .note(&asking(json!({"mode": "shadow", "rules": "tried"})), &admitted());
    advance(Duration::from_secs(3_600)).await;
    let entry = gates.report()["contract"].clone();
    assert_eq!(entry["state"], "shadow");
    assert!(entry["reason"].as_str().unwrap().contains("tried"), "{entry}");
    gates.seen.note(&asking(json!({})), &admitted());
    assert_eq!(state(&gates, "contract"), "enforcing", "the filter has been changed");
    // One of two filters is in shadow mode.
    gates.seen.note(&asking(json!({"mode": "shadow"})), &admitted());
    advance(Duration::from_secs(1)).await;
    gates.seen.note(&asking(json!({})), &admitted());
    assert_eq!(state(&gates, "contract"), "shadow");
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_absent_or_down_is_no_store_also_for_gates_that_read_its_plans() {
    let gates =
        gates(r#"{"profile": "development", "listen": "127.0.0.1:0", "metering": {"url": "postgres://127.0.0.1/x"}}"#);
    let listed = json!([
        {"gate": "org_status", "when_unavailable": "reject"}, {"gate": "concurrency", "when_unavailable": "reject"},
        {"gate": "contract", "when_unavailable": "reject"}, {"gate": "metering", "when_unavailable": "reject"}
    ]);
    let closed = Verdict::Unavailable(Unavailability {
        dependency: Dependency::Policy,
        gate: Some(Gate::OrgStatus),
    });
    gates.seen.note(&asking(json!({"gates": listed})), &closed);
    let report = gates.report();
    let states = ["org_status", "concurrency", "contract", "metering"].map(|gate| report[gate]["state"].clone());
    assert_eq!(states, ["no_store", "no_store", "enforcing", "no_store"]);
    let reason = |gate: &str| report[gate]["reason"].as_str().unwrap().to_owned();
    assert!(reason("concurrency").contains("no policy store"), "{report}");
    assert!(reason("metering").contains("not reached yet"), "{report}");
}

#[tokio::test(start_paused = true)]
async fn an_outage_that_the_rules_close_is_no_store_at_once_for_ten_seconds() {
    let gates = in_memory();
    let closed = Verdict::Unavailable(Unavailability {
        dependency: Dependency::Limiter,
        gate: Some(Gate::Contract),
    });
    gates.seen.note(&asking(json!({})), &closed);
    let entry = gates.report()["contract"].clone();
    assert_eq!(entry["state"], "no_store");
    assert!(entry["reason"].as_str().unwrap().contains("limiter"), "{entry}");
    advance(RECENT).await;
    assert_eq!(state(&gates, "contract"), "enforcing");
}

#[tokio::test(start_paused = true)]
async fn capacity_without_tiers_says_that_there_is_nothing_to_check() {
    let listed = json!({"gates": [{"gate": "capacity", "when_unavailable": "reject"}]});
    for (tiers, says) in [("{}", true), (r#"{"platform": {"requests": 5}}"#, false)] {
        let gates = gates(&format!(
            r#"{{"profile": "development", "listen": "127.0.0.1:0", "capacity": {tiers}}}"#
        ));
        gates.seen.note(&asking(listed.clone()), &admitted());
        let entry = gates.report()["capacity"].clone();
        assert_eq!(entry["state"], "enforcing");
        assert_eq!(entry["reason"].as_str().unwrap().contains("no tier"), says, "{entry}");
    }
}

#[tokio::test(start_paused = true)]
async fn since_changes_with_the_state_and_only_with_it() {
    let gates = in_memory();
    let since = |gates: &Gates| gates.report()["contract"]["since"].as_str().unwrap().to_owned();
    let start = since(&gates);
    gates.seen.note(&asking(json!({})), &admitted());
    let first = since(&gates);
    assert_ne!(first, start);
    gates.seen.note(&asking(json!({})), &admitted());
    assert_eq!(since(&gates), first);
}
