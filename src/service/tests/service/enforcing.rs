//! Whether it is really enforced, as an operator sees it: the gates in `/ready` and metrics, and the canary.

use serde_json::{Value, json};

use crate::process::{Service, ended, file, in_memory, portcullis, until};
use crate::wire::request;

async fn ready(service: &Service) -> Value {
    service.get("/ready").await.json()
}

/// Waits for a gate's state.
async fn gate_becomes(service: &Service, gate: &str, state: &str) -> Value {
    until(&format!("{gate} to be {state}"), async || {
        let entry = ready(service).await["gates"][gate].clone();
        (entry["state"] == state).then_some(entry)
    })
    .await
}

async fn metric(service: &Service, name: &str) -> Option<String> {
    let text = service.get("/metrics").await.body;
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' ').map(str::to_owned))
}

fn with_canary(mut config: Value) -> Value {
    config["canary"] = json!({"interval_ms": 100});
    config
}

/// Waits for the canary's state.
async fn canary_becomes(service: &Service, state: &str) -> Value {
    until(&format!("the canary to be {state}"), async || {
        let canary = ready(service).await["canary"].clone();
        (canary["state"] == state).then_some(canary)
    })
    .await
}

#[tokio::test]
async fn each_gate_has_its_state_in_ready_and_a_gauge_and_readiness_stays_what_it_was() {
    let service = Service::start(in_memory()).await;
    let before = service.get("/ready").await;
    assert_eq!(before.status, 503, "a limiter in memory is not shared");
    let gates = before.json()["gates"].clone();
    assert_eq!(gates.as_object().unwrap().len(), 9);
    assert!(
        gates
            .as_object()
            .unwrap()
            .values()
            .all(|gate| gate["state"] == "never_seen")
    );
    assert!(before.json().get("canary").is_none(), "no canary is configured");

    service.post("/v1/decide", &request(json!({}))).await;
    let contract = ready(&service).await["gates"]["contract"].clone();
    assert_eq!(
        (&contract["state"], &contract["rules"]),
        (&json!("enforcing"), &json!("contract-limits")),
        "{contract}"
    );
    let gauge = |state: &str| format!("portcullis_gate_state{{gate=\"contract\",state=\"{state}\"}}");
    assert_eq!(metric(&service, &gauge("enforcing")).await.as_deref(), Some("1"));
    assert_eq!(metric(&service, &gauge("never_seen")).await.as_deref(), Some("0"));
    assert_eq!(metric(&service, "portcullis_canary_denied{}").await, None);
    assert_eq!(service.get("/ready").await.status, 503);
}

#[tokio::test]
async fn shadow_a_bypass_and_an_absent_store_show_and_are_told() {
    let service = Service::start(in_memory()).await;
    service.post("/v1/decide", &request(json!({"mode": "shadow"}))).await;
    gate_becomes(&service, "contract", "shadow").await;

    let policy = json!({
        "gates": [{"gate": "org_status", "when_unavailable": "reject"}], "subject": {"owner": "o", "org": "g"}
    });
    service.post("/v1/decide", &request(policy.clone())).await;
    let entry = gate_becomes(&service, "org_status", "no_store").await;
    assert!(entry["reason"].as_str().unwrap().contains("no policy store"), "{entry}");

    let mut open = policy;
    open["gates"][0]["when_unavailable"] = json!("admit");
    service.post("/v1/decide", &request(open)).await;
    let entry = gate_becomes(&service, "org_status", "bypassing").await;
    assert!(
        entry["reason"].as_str().unwrap().contains("policy_unavailable"),
        "{entry}"
    );
    let told = until("a line of the change", async || {
        let is_it = |line: &Value| line["event"] == "gate_state" && line["state"] == "bypassing";
        service.lines().into_iter().find(is_it)
    })
    .await;
    assert_eq!(
        (&told["level"], &told["gate"]),
        (&json!("WARN"), &json!("org_status")),
        "{told}"
    );
}

#[tokio::test]
async fn the_canary_is_denied_by_a_limiter_that_counts_and_disturbs_nobody() {
    let service = Service::start(with_canary(in_memory())).await;
    let canary = canary_becomes(&service, "denied").await;
    assert_eq!(canary["age_s"], 0, "{canary}");
    assert_eq!(
        metric(&service, "portcullis_canary_denied{}").await.as_deref(),
        Some("1")
    );
    assert_eq!(
        metric(&service, "portcullis_canary_age_seconds{}").await.as_deref(),
        Some("0")
    );
    assert_eq!(service.line("canary_denied").await["level"], "INFO");
    // Verdicts are those of callers, and so are the gates.
    let metrics = service.get("/metrics").await.body;
    assert!(!metrics.contains("portcullis_verdicts_total{"), "{metrics}");
    assert_eq!(ready(&service).await["gates"]["contract"]["state"], "never_seen");
    assert!(service.lines().iter().all(|line| line["event"] != "denied"));
    // Thirty of thirty for a caller, while the canary goes on.
    let mut client = service.client().await;
    for at in 0..31 {
        let answer = client.send("POST", "/v1/decide", &request(json!({})).to_string()).await;
        let expected = if at < 30 { "admit" } else { "deny" };
        assert_eq!(answer.json()["verdict"], expected, "request {at}");
    }
}

#[tokio::test]
async fn a_canary_that_is_admitted_is_an_error_in_the_log_a_zero_and_in_ready() {
    let no_limiter = json!({"profile": "development", "listen": "127.0.0.1:0"});
    let service = Service::start(with_canary(no_limiter)).await;
    let canary = canary_becomes(&service, "admitted").await;
    assert!(canary["detail"].as_str().unwrap().contains("not enforced"), "{canary}");
    assert_eq!(
        metric(&service, "portcullis_canary_denied{}").await.as_deref(),
        Some("0")
    );
    let line = service.line("canary_admitted").await;
    assert_eq!(line["level"], "ERROR", "{line}");
}

#[test]
fn a_canary_that_is_misconfigured_is_a_fault_that_names_the_key() {
    let folder = tempfile::tempdir().unwrap();
    for (canary, says) in [
        (json!({"interval_ms": 5}), "canary.interval_ms"),
        (json!({"interval": 500}), "interval_ms"),
        (json!("often"), "canary"),
    ] {
        let mut config = in_memory();
        config["canary"] = canary;
        let path = file(folder.path(), "service.json", &config.to_string());
        let (code, _, err) = ended(portcullis(&[]).arg("check").arg(path));
        assert_eq!(code, Some(2), "{err}");
        assert!(err.contains(says), "{err}");
    }
}
