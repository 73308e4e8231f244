//! A store that may drop counters to make room: said once, and never held against it.

use serde_json::json;

use crate::process::Service;
use crate::stores::{Store, eventually};

/// The service over this store, once it has been pinged and is ready; so it has been asked about eviction by then.
async fn ready_over(url: &str) -> Service {
    let limiter = json!({"url": url, "op_timeout_ms": 1_500});
    let service = Service::start(json!({"profile": "development", "listen": "127.0.0.1:0", "limiter": limiter})).await;
    is_ready(&service).await;
    service
}

async fn is_ready(service: &Service) {
    eventually("ready", async || {
        (service.get("/ready").await.status == 200).then_some(())
    })
    .await;
}

fn warnings(service: &Service) -> usize {
    let lines = service.lines();
    lines.iter().filter(|line| line["event"] == "eviction_possible").count()
}

#[tokio::test]
async fn a_store_that_may_drop_counters_is_warned_about_once() {
    let store = Store::start(
        "redis-server",
        &["--maxmemory", "100mb", "--maxmemory-policy", "volatile-lru"],
    )
    .await;
    let service = ready_over(&store.url()).await;
    let line = service.line("eviction_possible").await;
    assert_eq!(line["level"], "WARN");
    assert!(line["message"].as_str().unwrap().contains("noeviction"), "{line}");
    for _ in 0..3 {
        store.run(&["DEL", "portcullis:ping"]).await;
        eventually("pinged again", async || {
            (store.number(&["EXISTS", "portcullis:ping"]).await == 1).then_some(())
        })
        .await;
    }
    assert_eq!(warnings(&service), 1);
}

#[tokio::test]
async fn nothing_is_said_of_a_store_that_keeps_all_or_does_not_tell() {
    for arguments in [
        ["--maxmemory", "100mb", "--maxmemory-policy", "noeviction"],
        ["--maxmemory", "0", "--maxmemory-policy", "allkeys-lru"],
    ] {
        let store = Store::start("redis-server", &arguments).await;
        assert_eq!(warnings(&ready_over(&store.url()).await), 0, "{arguments:?}");
    }
    let arguments = ["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"];
    let store = Store::start("redis-server", &arguments).await;
    store
        .run(&[
            "ACL",
            "SETUSER",
            "narrow",
            "on",
            ">secret",
            "~portcullis:*",
            "+@all",
            "-config",
        ])
        .await;
    let unknown = Store::start(
        "redis-server",
        &[&arguments[..], &["--rename-command", "CONFIG", ""]].concat(),
    )
    .await;
    for url in [format!("redis://narrow:secret@127.0.0.1:{}", store.port), unknown.url()] {
        let service = ready_over(&url).await;
        assert!(!service.log().contains("dependency_error"), "{}", service.log());
        assert_eq!(warnings(&service), 0);
    }
}
