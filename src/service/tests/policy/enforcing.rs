//! A policy that has grown too old is told as such: the gates that need it are stale, and enforce again when the database is
//! back.

use serde_json::Value;

use crate::policies::{becomes, config, decide, policy, put, state_becomes};
use crate::postgres::Postgres;
use crate::process::Service;
use crate::stores::{PATIENCE, eventually_within};

async fn gate_becomes(service: &Service, gate: &str, state: &str) -> Value {
    // What was not enforced once is shown for ten seconds.
    eventually_within(PATIENCE * 3, &format!("{gate} to be {state}"), async || {
        let entry = service.get("/ready").await.json()["gates"][gate].clone();
        (entry["state"] == state).then_some(entry)
    })
    .await
}

#[tokio::test]
async fn gates_of_a_policy_that_is_too_old_are_stale_and_recover() {
    let database = Postgres::start().await;
    put(&database.url(), &policy());
    let mut config = config(&database.url(), 2_000);
    config["limiter"]["op_timeout_ms"] = 300.into();
    let service = Service::start(config).await;
    becomes(&service, "good", "gpt-4o", "admit").await;
    for gate in ["org_status", "model_policy", "contract"] {
        gate_becomes(&service, gate, "enforcing").await;
    }
    database.freeze();
    for gate in ["org_status", "model_policy", "contract"] {
        let entry = gate_becomes(&service, gate, "stale").await;
        assert!(entry["reason"].as_str().unwrap().contains("too old"), "{entry}");
    }
    assert_eq!(decide(&service, "good", "gpt-4o").await, "unavailable: policy");
    gate_becomes(&service, "org_status", "stale").await;
    let gauge = r#"portcullis_gate_state{gate="org_status",state="stale"} 1"#;
    let metrics = service.get("/metrics").await.body;
    assert!(metrics.contains(gauge), "{metrics}");
    database.thaw();
    state_becomes(&service, "up").await;
    becomes(&service, "good", "gpt-4o", "admit").await;
    gate_becomes(&service, "org_status", "enforcing").await;
}
