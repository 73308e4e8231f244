//! A lease is never older than the policy answer under it, whichever store gave it.

use std::fs;
use std::time::Duration;

use serde_json::json;
use tempfile::TempDir;
use tokio::time::Instant;

use crate::policies::{becomes, config, gates, policy, put};
use crate::postgres::Postgres;
use crate::process::Service;
use crate::stores::eventually;
use crate::wire::{op, request};

const STALENESS_MS: u64 = 700;

/// Asks for leases of up to ten seconds: none may last longer than a policy answer may be believed.
async fn leases_are_as_old_as_the_policy(url: &str) {
    let service = Service::start(config(url, STALENESS_MS)).await;
    becomes(&service, "good", "gpt-4o", "admit").await;
    let gateway = op();
    let (mut most_ms, mut least_ms) = (0, u64::MAX);
    let start = Instant::now();
    eventually("leases at every age of an answer", async || {
        let body = request(json!({
            "rules": "fail-closed", "gates": gates(), "limits": {}, "tokens": 1,
            "subject": {"owner": "o", "org": "good", "model": "gpt-4o"},
            "lease": {"max_requests": 10, "max_age_ms": 10_000, "gateway": gateway, "ahead": true}
        }));
        // The demand; the plan's limit is 1000 a minute.
        crate::policies::decide(&service, "good", "claude-opus").await;
        let mut waiting = body.clone();
        waiting["lease"]["ahead"] = json!(false);
        waiting["op"] = json!(op());
        for body in [waiting, body] {
            let answer = service.post("/v1/decide", &body).await.json();
            if let Some(ends_in_ms) = answer["lease"]["ends_in_ms"].as_u64() {
                assert!((1..=STALENESS_MS).contains(&ends_in_ms), "{answer}");
                (most_ms, least_ms) = (most_ms.max(ends_in_ms), least_ms.min(ends_in_ms));
            }
        }
        let is_told = most_ms > STALENESS_MS / 2 && least_ms < most_ms.saturating_sub(50);
        (is_told || start.elapsed() > Duration::from_secs(15)).then_some(())
    })
    .await;
    assert!(
        most_ms > STALENESS_MS / 2 && least_ms < most_ms,
        "from {least_ms} to {most_ms} ms"
    );
}

#[tokio::test]
async fn a_lease_never_outlives_the_answer_of_a_file() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("policy.json");
    fs::write(&file, policy().to_string()).unwrap();
    leases_are_as_old_as_the_policy(&format!("file:{}", file.display())).await;
}

#[tokio::test]
async fn a_lease_never_outlives_the_answer_of_a_database() {
    let database = Postgres::start().await;
    put(&database.url(), &policy());
    leases_are_as_old_as_the_policy(&database.url()).await;
}
