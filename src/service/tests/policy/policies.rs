//! A policy to test with, services that read it, and requests that depend on it.

use std::fs;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::process::{Service, ended, portcullis};
use crate::stores::eventually;
use crate::wire::request;

/// One organization of each kind.
pub(crate) fn policy() -> Value {
    json!({
        "providers": {"gpt-4o": "openai", "claude-*": "anthropic"},
        "prices": {"gpt-4o": {"input": 2_500_000, "cached_input": 1_250_000, "output": 10_000_000}},
        "plans": {"team": {"requests": 1000}, "none": {"requests": 0}},
        "orgs": {
            "good": {"status": "active", "plan": "team", "models": ["gpt-4o", "claude-*", "mistral"]},
            "suspended": {"status": "suspended", "plan": "team", "models": ["gpt-4o"]},
            "reader": {"status": "read_only", "models": ["gpt-4o"]},
            "blocked": {"status": "active", "plan": "none", "models": ["gpt-4o"]}
        }
    })
}

/// Runs `portcullis policy apply` with these arguments against a database.
pub(crate) fn apply(url: &str, policy: &Value, arguments: &[&str]) -> (Option<i32>, String, String) {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("policy.json");
    fs::write(&file, policy.to_string()).unwrap();
    let mut command = portcullis(&[("POSTGRES_DSN", url)]);
    ended(command.args(["policy", "apply"]).arg(file).args(arguments))
}

/// Makes the database hold exactly this policy.
pub(crate) fn put(url: &str, policy: &Value) {
    let (code, _, err) = apply(url, policy, &["--prune"]);
    assert_eq!(code, Some(0), "{err}");
}

/// A configuration that reads policies here. Operations may take as long as a busy machine needs.
pub(crate) fn config(url: &str, max_staleness_ms: u64) -> Value {
    json!({
        "profile": "development", "listen": "127.0.0.1:0", "limiter": {"url": "memory:", "op_timeout_ms": 2000},
        "policy": {"url": url, "max_staleness_ms": max_staleness_ms}
    })
}

/// The gates of `fail-closed`.
pub(crate) fn gates() -> Value {
    json!([
        {"gate": "org_status", "when_unavailable": "reject"},
        {"gate": "model_policy", "when_unavailable": "reject"},
        {"gate": "contract", "when_unavailable": "reject", "limits": "envelope_or_plan"}
    ])
}

/// What the service says about a model of an organization: a code, `admit`, or `unavailable: DEPENDENCY`.
pub(crate) async fn decide(service: &Service, org: &str, model: &str) -> String {
    decide_within(service, org, model, 5000).await
}

pub(crate) async fn decide_within(service: &Service, org: &str, model: &str, budget_ms: u64) -> String {
    let subject = json!({"owner": "o", "org": org, "model": model});
    let body = request(json!({
        "rules": "fail-closed", "gates": gates(), "subject": subject, "limits": {}, "budget_ms": budget_ms
    }));
    let answer = service.post("/v1/decide", &body).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    let answer = answer.json();
    match answer["verdict"].as_str() {
        Some("deny") => answer["code"].as_str().unwrap().to_owned(),
        Some("unavailable") => format!("unavailable: {}", answer["dependency"].as_str().unwrap()),
        Some(verdict) => verdict.to_owned(),
        None => panic!("{answer}"),
    }
}

/// What is said while nothing can be known.
pub(crate) const UNKNOWABLE: &str = "unavailable: policy";

/// Asks until this is the answer.
pub(crate) async fn becomes(service: &Service, org: &str, model: &str, expected: &str) {
    let what = format!("{org} and {model}: {expected}");
    eventually(&what, async || {
        (decide(service, org, model).await == expected).then_some(())
    })
    .await;
}

/// The state of the policy in `/ready`.
pub(crate) async fn state(service: &Service) -> String {
    let body = service.get("/ready").await.json();
    body["dependencies"]["policy"]["state"].as_str().unwrap().to_owned()
}

pub(crate) async fn state_becomes(service: &Service, expected: &str) {
    eventually(&format!("policy {expected}"), async || {
        (state(service).await == expected).then_some(())
    })
    .await;
}

/// The value of a metric, 0 if it isn't there.
pub(crate) async fn metric(service: &Service, name: &str) -> u64 {
    let text = service.get("/metrics").await.body;
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    value.unwrap_or(0)
}

/// Errors of the policy store of one kind.
pub(crate) async fn errors(service: &Service, kind: &str) -> u64 {
    let labels = format!("{{dependency=\"policy\",kind=\"{kind}\"}}");
    metric(service, &format!("portcullis_dependency_errors_total{labels}")).await
}
