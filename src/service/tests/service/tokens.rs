//! Bearer tokens between the gateways and the service: who needs one, what is told of who has none, and their replacement.

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::process::{Service, ended, file, in_memory, is_faulty, portcullis, until};
use crate::wire::{Answer, Client, request};

const TOKEN: &str = "gateway-token-0123456789-abcdefgh";
const OTHER: &str = "gateway-token-9876543210-hgfedcba";

fn needing(folder: &TempDir, tokens: &str) -> Value {
    let mut config = in_memory();
    config["tokens_file"] = json!(file(folder.path(), "tokens", tokens));
    config["ext_authz"] = json!({"rules": "contract-limits"});
    config
}

async fn ask(client: &mut Client, path: &str, token: Option<&str>, body: &str) -> Answer {
    let token = token.map_or_else(String::new, |token| format!("authorization: Bearer {token}\r\n"));
    let length = body.len();
    client
        .write(&format!(
            "POST {path} HTTP/1.1\r\nhost: portcullis\r\n{token}content-length: {length}\r\n\r\n{body}"
        ))
        .await;
    client.answer().await
}

#[tokio::test]
async fn whoever_asks_needs_a_token_and_whoever_looks_does_not() {
    let folder = TempDir::new().unwrap();
    let config = needing(&folder, &format!("{TOKEN}\n"));
    let service = Service::start_with(config, &[], &[("RUST_LOG", "trace")]).await;
    assert_eq!(service.line("started").await["door"], "token");
    let decide = request(json!({})).to_string();
    let settle = json!({"profile": "development", "cancels": []}).to_string();
    let asked = [
        ("/v1/decide", decide.as_str()),
        ("/v1/settle", &settle),
        ("/v1/ext_authz/v1/x", ""),
    ];
    for (path, body) in asked {
        let answer = ask(&mut service.client().await, path, Some(TOKEN), body).await;
        assert_eq!(answer.status, 200, "{path}: {answer:?}");
    }
    let nearly = format!("{}X", &TOKEN[..TOKEN.len() - 1]);
    for token in [None, Some(nearly.as_str()), Some(OTHER)] {
        for (path, body) in asked {
            let answer = ask(&mut service.client().await, path, token, body).await;
            assert_eq!(answer.status, 401, "{path}: {answer:?}");
            assert_eq!(answer.json(), json!({"error": "a token of tokens_file is needed"}));
            assert!(answer.head.contains("www-authenticate: bearer\r\n"), "{answer:?}");
        }
    }
    for path in ["/live", "/metrics"] {
        assert_eq!(service.get(path).await.status, 200, "{path}");
    }
    assert_eq!(service.get("/ready").await.json()["ready"], false);
    let metrics = service.get("/metrics").await.body;
    assert!(
        metrics.contains(r#"portcullis_turned_away_total{reason="unauthorized"} 9"#),
        "{metrics}"
    );
    // One decision, and one check, were answered.
    assert!(metrics.contains("portcullis_decide_seconds_count 1\n"), "{metrics}");
    let told = service.line("unauthorized").await;
    assert_eq!(told["level"], "WARN");
    assert!(told["message"].as_str().unwrap().contains("from 127.0.0.1:"), "{told}");
    let shown = service.log() + &metrics;
    for secret in [TOKEN, OTHER, &nearly] {
        assert!(!shown.contains(secret), "{shown}");
    }
}

#[tokio::test]
async fn who_has_no_token_is_told_so_before_the_body_is_there() {
    let folder = TempDir::new().unwrap();
    let service = Service::start(needing(&folder, &format!("{TOKEN}\n"))).await;
    let mut client = service.client().await;
    client
        .write("POST /v1/decide HTTP/1.1\r\nhost: portcullis\r\ncontent-length: 1000\r\n\r\n{")
        .await;
    assert_eq!(client.answer().await.status, 401);
    client.closed().await;
}

#[tokio::test]
async fn a_token_is_replaced_without_a_restart_and_without_one_refused_request() {
    let folder = TempDir::new().unwrap();
    let service = Service::start(needing(&folder, &format!("{TOKEN}\n"))).await;
    let mut client = service.client().await;
    let mut status = async |token| {
        let body = request(json!({"limits": {}})).to_string();
        ask(&mut client, "/v1/decide", Some(token), &body).await.status
    };
    assert_eq!(status(OTHER).await, 401);
    file(folder.path(), "tokens", &format!("{TOKEN}\n{OTHER}\n"));
    until("the new token", async || {
        assert_eq!(status(TOKEN).await, 200, "the old one holds all the while");
        (status(OTHER).await == 200).then_some(())
    })
    .await;
    file(folder.path(), "tokens", &format!("{OTHER}\n"));
    until("the old one's end", async || {
        assert_eq!(status(OTHER).await, 200, "the new one holds all the while");
        (status(TOKEN).await == 401).then_some(())
    })
    .await;
    // What can't be used locks nobody out.
    file(folder.path(), "tokens", "");
    let told = service.line("tokens_unusable").await;
    assert_eq!(told["level"], "ERROR");
    assert_eq!((status(OTHER).await, status(TOKEN).await), (200, 401));
}

#[test]
fn files_that_hold_no_tokens_are_exit_code_2_and_show_nothing() {
    let folder = TempDir::new().unwrap();
    file(folder.path(), "short", "# old\nhunter2\n");
    file(folder.path(), "spaced", "hunter2 hunter2 hunter2 hunter2 hunter2\n");
    file(folder.path(), "empty", "\n");
    for (name, expected) in [
        (
            "absent",
            "tokens_file: cannot be read: No such file or directory (os error 2)",
        ),
        ("empty", "tokens_file: has no token: at least one line must hold one"),
        (
            "short",
            "tokens_file: line 2 must be 32 to 512 of A-Z, a-z, 0-9 and -._~+/= ; its value is not shown",
        ),
        (
            "spaced",
            "tokens_file: line 1 must be 32 to 512 of A-Z, a-z, 0-9 and -._~+/= ; its value is not shown",
        ),
    ] {
        let mut config = in_memory();
        config["tokens_file"] = json!(name);
        is_faulty(folder.path(), &config, expected, &["hunter2"]);
    }
}

#[test]
fn a_filters_token_that_is_none_is_named_and_not_shown() {
    let folder = TempDir::new().unwrap();
    let filter = |token: Value| {
        json!({"profile": "production", "rules": "contract-limits", "decision": {"upstream": "p", "token": token}})
            .to_string()
    };
    file(folder.path(), "good.json", &filter(json!(TOKEN)));
    let (code, out, err) = ended(portcullis(&[]).current_dir(folder.path()).args(["check", "good.json"]));
    assert_eq!((code, err.as_str()), (Some(0), ""), "{out}");
    for (token, expected) in [
        (
            json!("hunter2"),
            "filter.json: decision.token: must be 32 to 512 of A-Z",
        ),
        (
            json!("hunter2 hunter2 hunter2 hunter2 hunter2"),
            "filter.json: decision.token: must be 32 to 512 of A-Z",
        ),
        (
            json!(["hunter2"]),
            "filter.json: decision.token: must be a string, is an array",
        ),
    ] {
        file(folder.path(), "filter.json", &filter(token));
        let (code, _, err) = ended(
            portcullis(&[])
                .current_dir(folder.path())
                .args(["check", "filter.json"]),
        );
        assert_eq!(code, Some(2), "{err}");
        assert!(err.contains(expected) && !err.contains("hunter2"), "{err}");
    }
}
