//! What an operator is told while Redis comes and goes: each gate's state, and the canary.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::sleep;

use crate::process::Service;
use crate::stores::{PATIENCE, Store, eventually, eventually_within};
use crate::wire::request;

async fn becomes(service: &Service, path: &[&str], state: &str) -> Value {
    // What was not enforced once is shown for ten seconds.
    eventually_within(PATIENCE * 3, &format!("{path:?} to be {state}"), async || {
        let ready = service.get("/ready").await.json();
        let entry = path.iter().fold(&ready, |value, key| &value[*key]).clone();
        (entry["state"] == state).then_some(entry)
    })
    .await
}

async fn ask(service: &Service, when_unavailable: &str) {
    let gates = json!([{"gate": "contract", "when_unavailable": when_unavailable, "limits": "envelope"}]);
    service.post("/v1/decide", &request(json!({"gates": gates}))).await;
}

#[tokio::test]
async fn the_gate_and_the_canary_follow_a_redis_that_is_killed_and_comes_back() {
    let mut redis = Store::redis().await;
    let config = json!({
        "profile": "development", "listen": "127.0.0.1:0", "limiter": {"url": redis.url()}, "canary": {"interval_ms": 200}
    });
    let service = Service::start(config).await;
    becomes(&service, &["canary"], "denied").await;
    becomes(&service, &["dependencies", "limiter"], "up").await;
    ask(&service, "reject").await;
    becomes(&service, &["gates", "contract"], "enforcing").await;
    // What the canary leaves behind lapses by itself.
    let keys = redis.keys().await;
    let canaries: Vec<_> = keys.iter().filter(|key| key.contains("portcullis-canary")).collect();
    assert!(!canaries.is_empty(), "{keys:?}");
    for key in canaries {
        let left_s = redis.number(&["TTL", key]).await;
        assert!((1..=120).contains(&left_s), "{key} lives for {left_s} s");
    }

    redis.kill();
    becomes(&service, &["dependencies", "limiter"], "down").await;
    ask(&service, "reject").await;
    let entry = becomes(&service, &["gates", "contract"], "no_store").await;
    assert!(entry["reason"].as_str().unwrap().contains("limiter"), "{entry}");
    ask(&service, "admit").await;
    becomes(&service, &["gates", "contract"], "bypassing").await;
    let canary = becomes(&service, &["canary"], "unanswered").await;
    let metrics = service.get("/metrics").await.body;
    assert!(
        metrics.contains("portcullis_canary_denied{} 1"),
        "an outage admits nothing: {metrics}"
    );
    eventually("the age to grow", async || {
        let now = service.get("/ready").await.json()["canary"]["age_s"].as_u64()?;
        (now > canary["age_s"].as_u64()?).then_some(())
    })
    .await;

    redis.restart().await;
    becomes(&service, &["canary"], "denied").await;
    becomes(&service, &["dependencies", "limiter"], "up").await;
    ask(&service, "reject").await;
    becomes(&service, &["gates", "contract"], "enforcing").await;
}

#[tokio::test]
async fn a_redis_that_is_late_at_times_is_never_said_not_to_enforce() {
    let redis = Store::redis().await;
    let config = json!({
        "profile": "development", "listen": "127.0.0.1:0", "limiter": {"url": redis.url(), "op_timeout_ms": 50},
        "canary": {"interval_ms": 100}
    });
    let service = Service::start(config).await;
    becomes(&service, &["canary"], "denied").await;
    // A pause begins and ends anywhere in a round, also between its two requests.
    for at in 0..20 {
        redis.run(&["CLIENT", "PAUSE", &(60 + at % 7 * 10).to_string()]).await;
        sleep(Duration::from_millis(131)).await;
    }
    service.line("canary_unanswered").await;
    becomes(&service, &["canary"], "denied").await;
    let told = service
        .lines()
        .into_iter()
        .find(|line| line["event"] == "canary_admitted");
    assert_eq!(told, None);
}
