//! Nothing of a store's address shows: not in logs at any level, not in metrics, not in answers, whatever goes wrong.

use serde_json::json;

use crate::outages::counts;
use crate::process::{Service, ended, file, portcullis};
use crate::stores::{Store, eventually};

const USER: &str = "gatekeeper-user";
const PASSWORD: &str = "hunter2/with space";
const ENCODED: &str = "hunter2%2Fwith%20space";

#[tokio::test]
async fn no_secret_of_the_address_shows_at_any_log_level_whatever_goes_wrong() {
    let store = Store::redis().await;
    let may = ["ACL", "SETUSER", USER, "on", &format!(">{PASSWORD}"), "~*", "+@all"];
    store.run(&may).await;
    let url = format!("redis://{USER}:{ENCODED}@127.0.0.1:{}", store.port);
    let config = json!({"profile": "development", "listen": "127.0.0.1:0"});
    let service = Service::start_with(config, &[], &[("REDIS_URL", &url), ("RUST_LOG", "trace")]).await;
    eventually("counting", async || counts(&service).await.then_some(())).await;
    let mut said = String::new();
    let mut look = async |service: &Service| {
        for path in ["/ready", "/metrics", "/live"] {
            said += &service.get(path).await.body;
        }
    };

    // Another password, and then a name that the server puts into its error.
    store.run(&["ACL", "SETUSER", USER, "resetpass", ">another"]).await;
    store.run(&["CLIENT", "KILL", "USER", USER]).await;
    eventually("refused", async || (!counts(&service).await).then_some(())).await;
    look(&service).await;
    store
        .run(&["ACL", "SETUSER", USER, "resetpass", &format!(">{PASSWORD}")])
        .await;
    eventually("counting again", async || counts(&service).await.then_some(())).await;
    store.run(&["ACL", "SETUSER", USER, "-@all"]).await;
    eventually("forbidden", async || (!counts(&service).await).then_some(())).await;
    look(&service).await;
    store.freeze();
    eventually("frozen", async || (!counts(&service).await).then_some(())).await;
    look(&service).await;
    drop(store);
    eventually("noticed", async || service.log().contains("circuit_open").then_some(())).await;
    eventually("not ready", async || {
        (service.get("/ready").await.status == 503).then_some(())
    })
    .await;
    look(&service).await;

    said += &service.log();
    assert!(said.contains("dependency_error"), "{said}");
    for secret in [USER, PASSWORD, ENCODED, "hunter2", "redis://"] {
        let at = said.find(secret);
        assert_eq!(
            at,
            None,
            "{secret:?} shows: …{}…",
            at.map_or("", |at| &said[at.saturating_sub(200)..at])
        );
    }
}

#[test]
fn an_address_that_cannot_be_used_ends_the_start_with_code_2_and_is_not_shown() {
    let folder = tempfile::tempdir().unwrap();
    let config = file(
        folder.path(),
        "service.json",
        r#"{"profile": "development", "listen": "127.0.0.1:0"}"#,
    );
    for (url, words) in [
        ("redis://user:hunter2@host:port", "redis[s]://"),
        ("redis://:hunter2@", "redis[s]://"),
        ("redis://:hunter2@host/database", "redis[s]://"),
        ("rediss://:hunter2@host#sure", "redis[s]://"),
        ("redis-cluster://:hunter2@host:port", "redis[s]-cluster://"),
        ("redis-cluster://:hunter2@host,", "redis[s]-cluster://"),
        ("rediss-cluster://:hunter2@host/1", "redis[s]-cluster://"),
        ("hunter2", "REDIS_URL"),
    ] {
        let mut command = portcullis(&[("REDIS_URL", url)]);
        let (code, out, err) = ended(command.arg("serve").arg("--config").arg(&config));
        assert_eq!(code, Some(2), "{url}: {err}");
        assert!(err.contains(words), "{url}: {err}");
        assert!(!(out + &err).contains("hunter2"), "{url}");
    }
}
