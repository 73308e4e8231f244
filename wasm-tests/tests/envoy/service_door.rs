//! The door between the filter and the service in real Envoy: a token, its replacement without one refused request, and
//! mTLS as `docs/service-door.md` writes it. Whoever is not let in is a `decision_unavailable`, and under closed rules nothing
//! of it reaches the upstream.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use portcullis_wasm_tests::{
    Call, Connection, DEADLINE, Envelope, Gateway, GatewayPlan, Service, Upstream, development_service, merge,
    repository, until,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::backed::patient;
use crate::certificates::{Authority, Pair};
use crate::expect::{DECISION_UNAVAILABLE, RATE_LIMITED, refused, served};
use crate::world::{burst, strict};

const OLD: &str = "gateway-token-0123456789-abcdefgh";
const NEW: &str = "gateway-token-9876543210-hgfedcba";
const NAME: &str = "portcullis.internal";

fn limited(owner: &str, requests: u64) -> Call {
    Call::get("/v1/models").envelope(&Envelope::owner(owner).requests("owner", requests))
}

fn write(folder: &TempDir, name: &str, text: &str) {
    // By a rename, as a mounted secret changes.
    let new = folder.path().join("new");
    std::fs::write(&new, text).expect("the file can be written");
    std::fs::rename(&new, folder.path().join(name)).expect("the file can be renamed");
}

async fn needing_tokens(folder: &TempDir, tokens: &str) -> Service {
    write(folder, "tokens", tokens);
    let mut config = development_service(json!({}));
    config["limiter"]["op_timeout_ms"] = json!(1_500);
    config["tokens_file"] = json!(folder.path().join("tokens"));
    Service::start(config).await
}

fn bringing(token: Option<&str>) -> Value {
    let mut plugin = patient();
    if let Some(token) = token {
        merge(&mut plugin, json!({"decision": {"token": token}}));
    }
    plugin
}

fn plan(upstream: &Upstream, service: &Service, token: Option<&str>) -> GatewayPlan {
    GatewayPlan::new(strict(), upstream.address)
        .decision(service.address)
        .plugin(bringing(token))
        .patient_connects()
}

/// Nobody decided, and nothing went up.
async fn shut_out(gateway: &mut Gateway, upstream: &Upstream) {
    let before = upstream.hits();
    for _ in 0..3 {
        refused(&gateway.call(&limited("o", 100)).await, DECISION_UNAVAILABLE);
    }
    assert_eq!(upstream.hits(), before);
    gateway
        .await_metric("portcullis_rejected_decision_unavailable", 3)
        .await;
    gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_with_the_token_is_answered_and_one_without_or_with_another_is_not() {
    let folder = TempDir::new().unwrap();
    let (upstream, service) = (
        Upstream::start().await,
        needing_tokens(&folder, &format!("{OLD}\n")).await,
    );
    let mut good = plan(&upstream, &service, Some(OLD)).start().await;
    let answers = burst(good.address(), &limited("o", 3), 5).await;
    answers[..3].iter().for_each(served);
    for answer in &answers[3..] {
        refused(answer, RATE_LIMITED);
    }
    assert_eq!(upstream.hits(), 3);
    for (token, name) in [(None, "none"), (Some(NEW), "another")] {
        let mut gateway = plan(&upstream, &service, token).start().await;
        shut_out(&mut gateway, &upstream).await;
        let (level, line) = gateway
            .await_log("the status", |line| line["event"] == "decision_status")
            .await;
        assert_eq!(level, "warning", "{name}");
        assert_eq!(
            line["message"], "the call for a decision was answered with status 401",
            "{name}"
        );
        assert!(!gateway.log().contains(NEW));
    }
    let told = service
        .await_log("who was not let in", |line| line["event"] == "unauthorized")
        .await;
    assert_eq!(told["level"], "WARN");
    // The filter settles with its token too: a slot is free again at once.
    let slot = Call::get("/v1/models").envelope(&Envelope::owner("s").concurrency("owner", 1));
    burst(good.address(), &slot, 1).await.iter().for_each(served);
    until("the slot to be free", DEADLINE, async || {
        (good.call(&slot).await.status == 200).then_some(())
    })
    .await;
    good.assert_sound();
    assert!(!good.log().contains(OLD) && !service.log().contains(OLD) && !service.log().contains(NEW));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_replaced_on_both_sides_without_one_refused_request() {
    let folder = TempDir::new().unwrap();
    let (upstream, service) = (
        Upstream::start().await,
        needing_tokens(&folder, &format!("{OLD}\n")).await,
    );
    let mut gateway = plan(&upstream, &service, Some(OLD)).updatable().start().await;
    let (ended, count) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let running = {
        let (address, ended, count) = (gateway.address(), Arc::clone(&ended), Arc::clone(&count));
        tokio::spawn(async move {
            while !ended.load(Ordering::SeqCst) {
                let answer = Connection::open(address).await.call(&limited("o", 1_000_000)).await;
                served(&answer);
                count.fetch_add(1, Ordering::SeqCst);
            }
        })
    };
    let more = async || {
        let before = count.load(Ordering::SeqCst);
        until("more requests", DEADLINE, async || {
            (count.load(Ordering::SeqCst) >= before + 20).then_some(())
        })
        .await;
    };
    let loaded = async |times: usize| {
        until("the tokens to be read", DEADLINE, async || {
            let lines = service.log_lines();
            (lines.iter().filter(|line| line["event"] == "tokens_loaded").count() == times).then_some(())
        })
        .await;
    };
    more().await;
    write(&folder, "tokens", &format!("{OLD}\n{NEW}\n"));
    loaded(1).await;
    assert!(
        gateway.update(&plan(&upstream, &service, Some(NEW))).await,
        "{}",
        gateway.log()
    );
    more().await;
    // The old listener drains: what is still open on it has the old token.
    until("the end of the old listener", DEADLINE, async || {
        let draining = gateway.envoy_stat("listener_manager.total_listeners_draining").await;
        (draining == 0).then_some(())
    })
    .await;
    write(&folder, "tokens", &format!("{NEW}\n"));
    loaded(2).await;
    more().await;
    ended.store(true, Ordering::SeqCst);
    running.await.expect("every request was served");
    assert_eq!(
        service
            .metric("portcullis_turned_away_total{reason=\"unauthorized\"}")
            .await,
        0.0
    );
    // What says which configuration runs does not say which token.
    let hashes: Vec<Value> = gateway
        .log_lines()
        .into_iter()
        .filter(|line| line["event"] == "configured")
        .map(|line| line["message"].clone())
        .collect();
    assert!(
        hashes.len() >= 2 && hashes.iter().all(|hash| *hash == hashes[0]),
        "{hashes:?}"
    );
    assert!(!gateway.log().contains(OLD) && !gateway.log().contains(NEW));
    gateway.assert_sound();
}

/// The part of the cluster that the document writes under this heading.
fn part_under(heading: &str) -> Value {
    let document = std::fs::read_to_string(repository().join("docs/service-door.md")).unwrap();
    let text = document
        .split_once(&format!("\n## {heading}\n"))
        .and_then(|(_, rest)| rest.split("```yaml\n").nth(1))
        .and_then(|rest| rest.split("```").next());
    let text = text.unwrap_or_else(|| panic!("nothing for the cluster under {heading}"));
    serde_yaml_ng::from_str(text).expect("it is YAML")
}

/// A gateway in whose configuration the service's cluster has this part.
fn with_part(plan: GatewayPlan, part: Value) -> GatewayPlan {
    plan.rewrite(move |tree| {
        let clusters = tree["static_resources"]["clusters"].as_array_mut().expect("clusters");
        let cluster = clusters.iter_mut().find(|cluster| cluster["name"] == "portcullis");
        let cluster = cluster.expect("the service's cluster");
        // In place of the example's own: of two versions of HTTP only one may stand there.
        for (key, of_document) in part.as_object().expect("a part of a cluster") {
            cluster[key] = of_document.clone();
        }
    })
}

/// The part with these files in place of the document's.
fn documented(own: &Pair, trusted: &Authority) -> Value {
    let mut part = part_under("TLS and mTLS");
    for (place, path) in [
        ("tls_certificates/0/certificate_chain", own.certificate.clone()),
        ("tls_certificates/0/private_key", own.key.clone()),
        ("validation_context/trusted_ca", trusted.certificate()),
    ] {
        let place = format!("/transport_socket/typed_config/common_tls_context/{place}/filename");
        let file = part
            .pointer_mut(&place)
            .unwrap_or_else(|| panic!("no {place} in the document"));
        *file = json!(path);
    }
    part
}

#[tokio::test(flavor = "multi_thread")]
async fn with_mtls_only_a_gateway_with_the_right_certificate_is_answered() {
    let folder = TempDir::new().unwrap();
    let [ours, theirs] = ["ours", "theirs"].map(|name| Authority::new(folder.path(), name));
    let own = ours.sign("service", NAME);
    let (gateway, stranger) = (ours.sign("gateway", "gateway"), theirs.sign("stranger", "gateway"));
    let mut config = development_service(json!({}));
    config["limiter"]["op_timeout_ms"] = json!(1_500);
    config["tls"] = json!({"certificate": own.certificate, "key": own.key, "client_ca": ours.certificate()});
    let (upstream, service) = (Upstream::start().await, Service::start(config).await);
    let with = |part: Value| with_part(plan(&upstream, &service, None), part);
    let right = documented(&gateway, &ours);
    let mut good = with(right.clone()).start().await;
    let answers = burst(good.address(), &limited("o", 3), 5).await;
    answers[..3].iter().for_each(served);
    for answer in &answers[3..] {
        refused(answer, RATE_LIMITED);
    }
    assert_eq!(upstream.hits(), 3);
    good.assert_sound();
    let mut without = right.clone();
    let tls = &mut without["transport_socket"]["typed_config"]["common_tls_context"];
    tls.as_object_mut().unwrap().remove("tls_certificates");
    // The stranger also trusts us, so that it is our own refusal that is seen.
    for part in [without, documented(&stranger, &ours), json!({})] {
        let mut gateway = with(part).start().await;
        shut_out(&mut gateway, &upstream).await;
    }
    // A service that is not the one that the gateway trusts is not asked either.
    let mut distrustful = with(documented(&gateway, &theirs)).start().await;
    shut_out(&mut distrustful, &upstream).await;
    let told = service
        .await_log("a handshake", |line| line["event"] == "handshake_failed")
        .await;
    assert_eq!(told["level"], "WARN");
    assert_eq!(upstream.hits(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn over_http2_one_connection_carries_all_calls() {
    let mut config = development_service(json!({}));
    config["limiter"]["op_timeout_ms"] = json!(1_500);
    let (upstream, mut service) = (Upstream::start().await, Service::start(config).await);
    let plan = with_part(plan(&upstream, &service, None).workers(1), part_under("HTTP/2"));
    let mut gateway = plan.start().await;
    let answers = burst(gateway.address(), &limited("o", 12), 20).await;
    let passed = answers.iter().filter(|answer| answer.status == 200).count();
    assert_eq!((passed, upstream.hits()), (12, 12));
    for answer in answers.iter().filter(|answer| answer.status != 200) {
        refused(answer, RATE_LIMITED);
    }
    let connections = |version: &'static str| {
        let name = format!("cluster.portcullis.upstream_cx_{version}_total");
        let gateway = &gateway;
        async move { gateway.envoy_stat(&name).await }
    };
    assert_eq!((connections("http2").await, connections("http1").await), (1, 0));
    // A connection that breaks under all of them at once is an outage, and no admission.
    service.kill();
    shut_out(&mut gateway, &upstream).await;
}
