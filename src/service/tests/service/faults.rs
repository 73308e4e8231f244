//! The fault switch over HTTP: what is switched off fails as a real outage does, shows, ends by itself, and is not there in
//! production.

use std::net::SocketAddr;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::admin::{TOKEN, address};
use crate::process::{Service, file, in_memory};
use crate::wire::{Answer, Client, request};

const PATH: &str = "/admin/v1/faults";

async fn switchable() -> (Service, SocketAddr) {
    let mut config = in_memory();
    config["admin"] = json!({"listen": "127.0.0.1:0"});
    let service = Service::start(config).await;
    let address = address(&service).await;
    (service, address)
}

async fn order(address: SocketAddr, body: &str) -> Answer {
    order_as(address, "POST", "", body).await
}

async fn order_as(address: SocketAddr, method: &str, line: &str, body: &str) -> Answer {
    let mut client = Client::connect(address).await;
    let length = body.len();
    client
        .write(&format!(
            "{method} {PATH} HTTP/1.1\r\nhost: localhost\r\n{line}content-length: {length}\r\n\r\n{body}"
        ))
        .await;
    client.answer().await
}

/// What a request under these rules comes to.
async fn decided(service: &Service, when_unavailable: &str) -> Value {
    let gates = json!([{"gate": "contract", "when_unavailable": when_unavailable, "limits": "envelope"}]);
    service
        .post("/v1/decide", &request(json!({"gates": gates})))
        .await
        .json()
}

#[tokio::test]
async fn a_limiter_that_is_let_fail_is_an_outage_by_the_rules() {
    let (service, address) = switchable().await;
    assert_eq!(decided(&service, "reject").await["verdict"], "admit");
    let answer = order(address, r#"{"dependencies": ["limiter"], "for_s": 300}"#).await;
    assert_eq!(
        (answer.status, &answer.json()["settles_in_ms"]),
        (200, &json!(0)),
        "{answer:?}"
    );
    let closed = decided(&service, "reject").await;
    assert_eq!(
        (&closed["verdict"], &closed["dependency"], &closed["gate"]),
        (&json!("unavailable"), &json!("limiter"), &json!("contract"))
    );
    let open = decided(&service, "admit").await;
    assert_eq!(
        (&open["verdict"], &open["bypassed"]),
        (
            &json!("admit"),
            &json!([{"class": "limiter_unavailable", "gate": "contract"}])
        )
    );
    let errors = "dependency_errors_total{dependency=\"limiter\",kind=\"connection\"}";
    assert!(
        service.get("/metrics").await.body.contains(errors),
        "as a lost connection"
    );
    order(address, r#"{"dependencies": []}"#).await;
    assert_eq!(decided(&service, "reject").await["verdict"], "admit");
}

#[tokio::test]
async fn a_fault_ends_by_itself_and_says_so() {
    let (service, address) = switchable().await;
    order(address, r#"{"dependencies": ["limiter"], "for_s": 1}"#).await;
    for event in ["fault_on", "fault_off"] {
        let line = service.line(event).await;
        assert_eq!(
            (&line["level"], &line["dependency"]),
            (&json!("WARN"), &json!("limiter")),
            "{line}"
        );
    }
    assert_eq!(decided(&service, "reject").await["verdict"], "admit");
    assert!(service.get("/ready").await.json().get("faults").is_none());
}

#[tokio::test]
async fn a_long_fault_shows_in_ready_and_metrics_and_an_empty_order_ends_it() {
    let (service, address) = switchable().await;
    let answer = order(address, r#"{"dependencies": ["decision", "metering"], "for_s": 300}"#).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    let faults = service.get("/ready").await.json()["faults"].clone();
    assert_eq!(faults.as_object().unwrap().len(), 2, "{faults}");
    let gauge = r#"portcullis_fault_active{dependency="decision"} 1"#;
    assert!(service.get("/metrics").await.body.contains(gauge));
    for (path, body) in [
        ("/v1/decide", request(json!({}))),
        ("/v1/settle", json!({"profile": "development"})),
    ] {
        let answer = service.post(path, &body).await;
        assert_eq!(answer.status, 503, "{path}: {answer:?}");
    }
    assert_eq!(service.get("/live").await.status, 200);
    let answer = order(address, r#"{"dependencies": []}"#).await;
    assert_eq!(answer.json()["faults"], json!({}), "{answer:?}");
    assert_eq!(service.post("/v1/decide", &request(json!({}))).await.status, 200);
    assert!(!service.get("/metrics").await.body.contains(gauge));
}

#[tokio::test]
async fn an_order_that_makes_no_sense_is_refused_by_name_and_value_and_changes_nothing() {
    let (service, address) = switchable().await;
    for (body, says) in [
        (
            r#"{"dependencies": ["limiter"]}"#,
            "for_s: required, and missing: for how many seconds, 1 to 300",
        ),
        (
            r#"{"dependencies": ["limiter"], "for_s": 0}"#,
            "for_s: must be 1 to 300, is 0",
        ),
        (
            r#"{"dependencies": ["limiter"], "for_s": 301}"#,
            "for_s: must be 1 to 300, is 301",
        ),
        (r#"{"dependencies": ["redis"], "for_s": 1}"#, "redis"),
        (r#"{"dependencies": [], "for": 1}"#, "for"),
        ("", "EOF"),
    ] {
        let answer = order(address, body).await;
        assert_eq!(answer.status, 400, "{body}: {answer:?}");
        assert!(
            answer.json()["error"].as_str().unwrap().contains(says),
            "{body}: {answer:?}"
        );
    }
    assert_eq!(order_as(address, "GET", "", "").await.status, 405);
    assert!(service.get("/ready").await.json().get("faults").is_none());
    assert_eq!(decided(&service, "reject").await["verdict"], "admit");
}

#[tokio::test]
async fn production_has_no_such_path_and_staging_wants_the_token() {
    let folder = TempDir::new().unwrap();
    let tokens = file(folder.path(), "tokens", &format!("{TOKEN}\n"));
    for (profile, status) in [("production", 404), ("staging", 200)] {
        let service = Service::start(json!({
            "profile": profile, "listen": "127.0.0.1:0", "limiter": {"url": "redis://127.0.0.1:1"}, "policy": null,
            "metering": null, "admin": {"listen": "127.0.0.1:0", "token_file": tokens}
        }))
        .await;
        let address = address(&service).await;
        let body = r#"{"dependencies": ["limiter"], "for_s": 5}"#;
        assert_eq!(order(address, body).await.status, 401, "{profile}");
        let token = format!("authorization: Bearer {TOKEN}\r\n");
        for method in ["POST", "GET"] {
            let expected = if method == "GET" && status == 200 { 405 } else { status };
            let answer = order_as(address, method, &token, body).await;
            assert_eq!(answer.status, expected, "{profile} {method}: {answer:?}");
        }
    }
}
