//! What operators look at: `/live`, `/ready`, `/metrics` and the log.

use serde_json::json;

use crate::process::{Service, in_memory, until};
use crate::wire::request;

#[tokio::test]
async fn a_limiter_in_memory_is_alive_and_not_ready_and_says_why() {
    let service = Service::start(in_memory()).await;
    assert_eq!(service.get("/live").await.json(), json!({"live": true}));
    let ready = service.get("/ready").await;
    assert_eq!(ready.status, 503);
    let body = ready.json();
    assert_eq!(body["ready"], false);
    let limiter = &body["dependencies"]["limiter"];
    assert_eq!(limiter["state"], "embedded");
    assert!(limiter["detail"].as_str().unwrap().contains("shared"), "{limiter}");
    assert!(limiter["since"].as_str().unwrap().ends_with('Z'), "{limiter}");
    assert_eq!(body["dependencies"]["policy"]["state"], "absent");
    assert_eq!(body["dependencies"]["metering"]["state"], "absent");
}

#[tokio::test]
async fn unknown_paths_and_methods_are_refused() {
    let service = Service::start(in_memory()).await;
    assert_eq!(service.get("/").await.status, 404);
    assert_eq!(service.get("/v1/decide").await.status, 405);
    assert_eq!(service.post("/live", &json!({})).await.status, 405);
}

#[tokio::test]
async fn the_metrics_name_what_runs_and_what_was_decided() {
    let service = Service::start(in_memory()).await;
    let denied = json!({"limits": {"owner": {"requests": 0}}});
    for changes in [json!({}), json!({"budget_ms": 0}), denied] {
        service.post("/v1/decide", &request(changes)).await;
    }
    let answer = service.get("/metrics").await;
    assert!(answer.head.contains("text"), "{}", answer.head);
    let hash = service.line("started").await["config_hash"]
        .as_str()
        .unwrap()
        .to_owned();
    let version = env!("CARGO_PKG_VERSION");
    for line in [
        r#"portcullis_verdicts_total{verdict="admit",class="none"} 2"#,
        r#"portcullis_verdicts_total{verdict="deny",class="quota_exhausted"} 1"#,
        r#"portcullis_bypassed_total{class="limiter_unavailable",gate="contract"} 1"#,
        r#"portcullis_dependency_errors_total{dependency="limiter",kind="budget_spent"} 1"#,
        r#"portcullis_dependency_up{dependency="limiter"} 1"#,
        "portcullis_policy_enforced 0",
        "portcullis_limits_enforced 1",
        "portcullis_slot_lost_total 0",
        "portcullis_unenforced_total 0",
        "portcullis_decide_seconds_count 3",
        "portcullis_limiter_seconds_count 2",
        &format!(
            r#"portcullis_build_info{{profile="development",config_hash="{hash}",limiter="memory",version="{version}"}} 1"#
        ),
    ] {
        assert!(answer.body.contains(line), "{line} is not in\n{}", answer.body);
    }
}

#[tokio::test]
async fn every_log_line_is_one_object_with_its_keys_at_the_top_and_repetitions_are_counted() {
    let service = Service::start_with(in_memory(), &[], &[("RUST_LOG", "info")]).await;
    let mut client = service.client().await;
    for _ in 0..50 {
        let changes =
            json!({"budget_ms": 0, "subject": {"owner": "o\"\n}", "org": "g\u{2028}\n"}, "request_id": "a\"b"});
        client.send("POST", "/v1/decide", &request(changes).to_string()).await;
    }
    let denied = json!({"limits": {"owner": {"requests": 0}}, "mode": "shadow"});
    service.post("/v1/decide", &request(denied)).await;
    until("all bypasses in the log", async || {
        let lines = service.lines();
        let bypasses = lines.iter().filter(|line| line["event"] == "bypassed");
        let told: u64 = bypasses.map(|line| line["count"].as_u64().unwrap_or(1)).sum();
        (told == 50).then_some(())
    })
    .await;
    let lines = service.lines();
    assert!(
        lines.iter().filter(|line| line["event"] == "bypassed").count() < 10,
        "{lines:#?}"
    );
    for line in &lines {
        for key in ["timestamp", "level", "event", "message"] {
            assert!(line[key].is_string(), "{key} is missing: {line}");
        }
        assert!(line.get("fields").is_none() && line.get("span").is_none(), "{line}");
    }
    let denied = service.line("denied").await;
    assert_eq!(
        (
            &denied["level"],
            &denied["code"],
            &denied["action"],
            &denied["gate"],
            &denied["class"]
        ),
        (
            &json!("INFO"),
            &json!("RATE_LIMITED"),
            &json!("shadow"),
            &json!("contract"),
            &json!("quota_exhausted")
        )
    );
    let started = service.line("started").await;
    assert_eq!(
        (&started["profile"], &started["limiter"]),
        (&json!("development"), &json!("memory"))
    );
}

#[tokio::test]
async fn a_policy_address_never_shows_and_its_gates_are_unavailable() {
    let mut config = in_memory();
    config["policy"] = json!({"url": "postgres://user:hunter2@db.internal/policy"});
    config["metering"] = json!({"url": "postgres://user:hunter2@db.internal/metering"});
    let service = Service::start_with(config, &[], &[("RUST_LOG", "trace")]).await;
    let gates = json!([{"gate": "org_status", "when_unavailable": "reject"}]);
    let subject = json!({"owner": "o", "org": "g"});
    let answer = service
        .post("/v1/decide", &request(json!({"gates": gates, "subject": subject})))
        .await;
    assert_eq!(
        (&answer.json()["verdict"], &answer.json()["dependency"]),
        (&json!("unavailable"), &json!("policy"))
    );
    let ready = service.get("/ready").await;
    assert_eq!(ready.json()["dependencies"]["policy"]["state"], "down");
    let shown = service.log() + &ready.body + &service.get("/metrics").await.body;
    assert!(!shown.contains("hunter2") && !shown.contains("db.internal"), "{shown}");
}
