//! A configuration fault stops the start, in Envoy and in `portcullis check` alike, with the same text. The invalid
//! rule files are the repository's own, each with the exact faults beside it.

use std::fs;
use std::path::{Path, PathBuf};

use portcullis_wasm_tests::{
    Call, DEADLINE, Decision, Envelope, GatewayPlan, Upstream, check, closed_port, development_service, repository,
    until,
};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::expect::{DECISION_UNAVAILABLE, ENVELOPE_MISSING, RATE_LIMITED, refused, served};
use crate::world::{Scripted, World, strict};

fn files(folder: &str) -> Vec<PathBuf> {
    let folder = repository().join(folder);
    let entries = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    files
}

/// The fault lines beside a file.
fn faults(file: &Path) -> Vec<String> {
    let expected = file.with_extension("txt");
    let text = fs::read_to_string(&expected).unwrap_or_else(|error| panic!("{}: {error}", expected.display()));
    text.lines()
        .filter(|line| !line.trim().is_empty())
        .map(str::to_owned)
        .collect()
}

/// The plugin configuration for a file: a filter's own as it stands, rules within the smallest one. The text is not parsed
/// here, since some faults (a key that stands twice) are in the text only.
fn plugin_of(file: &Path) -> String {
    let text = fs::read_to_string(file).unwrap();
    if name_of(file).starts_with("filter-") {
        return text;
    }
    format!(r#"{{"profile": "development", "rules": {text}, "decision": {{"upstream": "portcullis"}}}}"#)
}

fn name_of(file: &Path) -> String {
    file.file_name().unwrap().to_string_lossy().into_owned()
}

#[test]
fn check_finds_exactly_the_faults_beside_each_invalid_file() {
    let files = files("rules/invalid");
    assert!(files.len() >= 10, "only {} invalid files", files.len());
    for file in files {
        let expected = faults(&file);
        let (code, printed) = check(&file);
        let name = name_of(&file);
        assert_eq!(code, Some(2), "{name}: {printed}");
        for fault in &expected {
            assert!(
                printed.lines().any(|line| line.ends_with(fault.as_str())),
                "{name} lacks {fault:?}:\n{printed}"
            );
        }
        let told = printed.lines().filter(|line| line.contains(&name)).count();
        assert_eq!(told, expected.len(), "{name}:\n{printed}");
    }
}

#[test]
fn check_passes_every_shipped_rule_file_and_the_examples_own() {
    for file in files("rules").into_iter().chain(files("examples/envoy")) {
        let (code, printed) = check(&file);
        assert_eq!(code, Some(0), "{}: {printed}", file.display());
    }
}

/// Starts Envoy with a plugin configuration that it must refuse, and gives the log.
async fn refused_by_envoy(plugin: &str) -> String {
    let plan = GatewayPlan::new("contract-limits", closed_port()).exact_plugin(plugin);
    match plan.try_start().await {
        Ok(_) => panic!("Envoy started with {plugin}"),
        Err(log) => log,
    }
}

/// The log as a reader sees it (quotes within JSON strings are escaped there), with paths from the rules' own root: a rule
/// file's `gates[0]` is `rules.gates[0]` in a filter's configuration.
fn from_the_rules_root(text: &str) -> String {
    text.replace("\\\"", "\"").replace("rules.", "")
}

#[tokio::test(flavor = "multi_thread")]
async fn envoy_refuses_to_start_on_each_invalid_file_and_says_why() {
    let mut waiting = files("rules/invalid");
    assert!(!waiting.is_empty());
    let mut running = JoinSet::new();
    while let Some(file) = waiting.pop() {
        if running.len() >= 3 {
            judge(running.join_next().await.unwrap().unwrap());
        }
        running.spawn(async move {
            let log = refused_by_envoy(&plugin_of(&file)).await;
            (file, log)
        });
    }
    while let Some(done) = running.join_next().await {
        judge(done.unwrap());
    }
}

fn judge((file, log): (PathBuf, String)) {
    let log = from_the_rules_root(&log);
    for fault in faults(&file) {
        assert!(
            log.contains(&from_the_rules_root(&fault)),
            "{}: the log lacks {fault:?}:\n{log}",
            file.display()
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_fault_of_a_configuration_is_listed_at_once() {
    let log = refused_by_envoy(
        &json!({
            "rules": "contract-limit",
            "mode": "enforced",
            "decisions": {},
            "decision": {"upstream": "", "timeout_ms": "250"},
            "window_s": -1
        })
        .to_string(),
    )
    .await;
    for key in [
        "profile",
        "contract-limits",
        "mode",
        "decisions",
        "decision.upstream",
        "decision.timeout_ms",
        "window_s",
    ] {
        assert!(log.contains(key), "{key} is not told:\n{log}");
    }
    assert!(log.contains("did you mean"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_update_leaves_the_running_configuration_in_force() {
    let world = World::with(
        "contract-limits",
        development_service(Value::Null),
        GatewayPlan::updatable,
    )
    .await;
    let envelope = Envelope::owner("o").requests("owner", 3);
    let call = Call::get("/").envelope(&envelope);
    served(&world.gateway.call(&call).await);
    let plan = || GatewayPlan::new("contract-limits", world.upstream.address).decision(world.service.address);
    assert!(
        !world.gateway.update(&plan().plugin(json!({"window": 60}))).await,
        "an unknown key"
    );
    served(&world.gateway.call(&call).await);
    assert!(world.gateway.update(&plan().plugin(json!({"mode": "shadow"}))).await);
    until("the new configuration", DEADLINE, async || {
        (world.gateway.metric("portcullis_enforcing_contract-limits").await == Some(0)).then_some(())
    })
    .await;
    assert!(world.gateway.update(&plan()).await);
    served(&world.gateway.call(&call).await);
    refused(&world.gateway.call(&call).await, RATE_LIMITED);
    assert_eq!(world.upstream.hits(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_or_foreign_configuration_is_refused() {
    for plugin in ["", "[]", "contract-limits", "{"] {
        refused_by_envoy(plugin).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retired_switch_is_refused_when_on_and_means_nothing_when_off() {
    let log = refused_by_envoy(
        &json!({
            "profile": "development", "rules": "contract-limits", "decision": {"upstream": "portcullis"},
            "allow_passthrough": true
        })
        .to_string(),
    )
    .await;
    assert!(log.contains("allow_passthrough"), "{log}");
    let off = |value: Value| move |plan: GatewayPlan| plan.plugin(json!({"allow_passthrough": value}));
    for value in [json!(false), json!(""), json!("0")] {
        let world = Scripted::with(strict(), Decision::Status(500), off(value)).await;
        let call = Call::get("/");
        refused(&world.gateway.call(&call).await, ENVELOPE_MISSING);
        assert_eq!(world.upstream.hits(), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_that_the_host_does_not_have_is_unavailability() {
    let upstream = Upstream::start().await;
    let plan = GatewayPlan::new(strict(), upstream.address).plugin(json!({"decision": {"upstream": "nowhere"}}));
    let mut gateway = plan.start().await;
    let envelope = Envelope::owner("o").requests("owner", 5);
    let call = Call::get("/").envelope(&envelope);
    refused(&gateway.call(&call).await, DECISION_UNAVAILABLE);
    assert_eq!(upstream.hits(), 0);
    gateway.assert_sound();
}
