//! A log that real Envoy has written, with the two blocks of `docs/replay.md`, is replayed: what was refused then is refused
//! again, and under another limit what that means.

use std::path::Path;
use std::process::Command;

use portcullis_wasm_tests::{Call, DEADLINE, Envelope, GatewayPlan, Service, Upstream, portcullis, until};
use serde_json::{Value, json};
use tempfile::TempDir;

/// The YAML blocks of the document, in order.
fn blocks() -> Vec<Value> {
    let document = include_str!("../../../docs/replay.md");
    document
        .split("```yaml\n")
        .skip(1)
        .map(|rest| serde_yaml_ng::from_str(rest.split("```").next().unwrap()).expect("the block is YAML"))
        .collect()
}

fn replay(log: &Path, more: &[&str]) -> Value {
    let mut command = Command::new(portcullis());
    command.args(["replay", "--from", "envoy", "--json", "--rules", "contract-limits"]);
    let output = command.args(more).arg(log).output().expect("portcullis replay runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_of_envoy_in_the_documented_format_is_replayed() {
    let folder = TempDir::new().expect("a temporary folder");
    let log = folder.path().join("access.jsonl");
    let [keeper, mut logger] = <[Value; 2]>::try_from(blocks()).expect("two blocks");
    logger["typed_config"]["path"] = json!(log);
    let upstream = Upstream::start().await;
    let service = Service::start(json!({"profile": "development", "limiter": {"url": "memory:"}})).await;
    let plan = GatewayPlan::new("contract-limits", upstream.address)
        .decision(service.address)
        .in_front(keeper)
        .manager(json!({"access_log": [logger]}));
    let mut gateway = plan.start().await;
    let envelope = Envelope::owner("o").org("g").requests("org", 3);
    let mut statuses = Vec::new();
    for _ in 0..5 {
        statuses.push(gateway.call(&Call::get("/v1/models").envelope(&envelope)).await.status);
    }
    statuses.push(gateway.call(&Call::get("/v1/models")).await.status);
    assert_eq!((statuses, upstream.hits()), (vec![200, 200, 200, 429, 429, 200], 4));
    let text = until("six lines of the access log", DEADLINE, async || {
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        (text.lines().count() == 6).then_some(text)
    })
    .await;
    gateway.assert_sound();
    let report = replay(&log, &[]);
    assert_eq!(
        (&report["requests"], &report["refused"], &report["malformed"]),
        (&json!(6), &json!(2), &json!(0)),
        "{text}"
    );
    assert_eq!(
        (&report["newly_refused"], &report["newly_admitted"]),
        (&json!(0), &json!(0)),
        "as it was: {text}"
    );
    assert_eq!(report["unchecked"], json!({"envelope_missing": 1}));
    assert_eq!(report["by_scope"], json!({"org": 2}));
    let report = replay(&log, &["--limit", "org:*:requests=1"]);
    assert_eq!((&report["refused"], &report["newly_refused"]), (&json!(4), &json!(2)));
    assert_eq!(
        (&report["first_hit"][0]["tenant"], &report["first_hit"][0]["refused"]),
        (&json!("org:g"), &json!(4))
    );
    let report = replay(&log, &["--limit", "org:g:requests=none"]);
    assert_eq!((&report["refused"], &report["newly_admitted"]), (&json!(0), &json!(2)));
}
