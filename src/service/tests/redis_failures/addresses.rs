//! Where the limiter's address comes from, and TLS.

use std::path::Path;

use serde_json::{Value, json};

use crate::certificates::openssl;
use crate::counting::connected;
use crate::outages::counts;
use crate::process::{Service, ended, file, portcullis};
use crate::stores::{Store, eventually, free_port, open};

/// Somewhere nobody listens.
fn nowhere() -> String {
    format!("redis://127.0.0.1:{}", free_port())
}

async fn counts_in(store: &Store, config: Value, settings: &[(&str, &str)]) {
    let service = Service::start_with(config, &[], settings).await;
    eventually("counting", async || counts(&service).await.then_some(())).await;
    assert_eq!(store.number(&["EXISTS", "portcullis:{owner:o}:requests:60"]).await, 1);
    eventually("ready", async || {
        (service.get("/ready").await.status == 200).then_some(())
    })
    .await;
}

#[tokio::test]
async fn the_address_comes_from_redis_url_first() {
    let store = Store::redis().await;
    let config = json!({"profile": "development", "listen": "127.0.0.1:0", "store_url": nowhere(),
                        "limiter": {"url": nowhere()}});
    counts_in(&store, config, &[("REDIS_URL", &store.url())]).await;
}

#[tokio::test]
async fn the_address_comes_from_the_limiters_url_next() {
    let store = Store::redis().await;
    let config = json!({"profile": "development", "listen": "127.0.0.1:0", "store_url": nowhere(),
                        "limiter": {"url": store.url()}});
    counts_in(&store, config, &[("REDIS_URL", "")]).await;
}

#[tokio::test]
async fn the_address_comes_from_the_store_url_last() {
    let store = Store::redis().await;
    let config = json!({"profile": "development", "listen": "127.0.0.1:0", "store_url": store.url()});
    counts_in(&store, config, &[]).await;
}

#[test]
fn no_address_at_all_outside_development_ends_the_start_with_code_2() {
    let folder = tempfile::tempdir().unwrap();
    for profile in ["staging", "production"] {
        let text = json!({"profile": profile, "listen": "127.0.0.1:0", "policy": null, "metering": null});
        let config = file(folder.path(), "service.json", &text.to_string());
        let (code, _, err) = ended(portcullis(&[]).arg("serve").arg("--config").arg(&config));
        assert_eq!(code, Some(2), "{err}");
        assert!(err.contains("REDIS_URL, limiter.url or store_url"), "{err}");
    }
}

/// A certificate for 127.0.0.1 that vouches for itself.
fn certify(folder: &Path) {
    let more = [
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-addext",
        "basicConstraints=CA:FALSE",
    ];
    openssl(folder, "store", &more);
}

#[tokio::test]
async fn rediss_speaks_tls_and_trusts_only_who_it_is_told_to_trust() {
    let folder = tempfile::tempdir().unwrap();
    certify(folder.path());
    let path = |name| folder.path().join(name).to_str().unwrap().to_owned();
    let (certificate, key, tls_port) = (path("store.pem"), path("store.key"), free_port().to_string());
    let store = Store::start(
        "redis-server",
        &[
            "--tls-port",
            &tls_port,
            "--tls-cert-file",
            &certificate,
            "--tls-key-file",
            &key,
            "--tls-auth-clients",
            "no",
        ],
    )
    .await;
    let url = format!("rediss://127.0.0.1:{tls_port}");
    let config = json!({"profile": "development", "listen": "127.0.0.1:0", "limiter": {"url": url}});
    counts_in(&store, config.clone(), &[("SSL_CERT_FILE", &certificate)]).await;

    let stranger = Service::start(config).await;
    eventually("not ready", async || {
        (stranger.get("/ready").await.status == 503).then_some(())
    })
    .await;
    assert!(!counts(&stranger).await, "an unknown certificate was trusted");

    connected(&open(&format!("{url}#insecure"), 1_000)).await;
}
