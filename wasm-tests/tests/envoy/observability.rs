//! `examples/observability/`: the alerts are rules that Prometheus takes and that fire as their own tests say, and alerts and
//! dashboard name only what a real service and a real Envoy print. Not here: Grafana, and Prometheus as a server.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;

use portcullis_wasm_tests::{Call, Envelope, GatewayPlan, Service, Upstream, repository};
use serde_json::{Value, json};

use crate::backed::{OP_TIMEOUT_MS, over_redis, patient};
use crate::expect::{DECISION_UNAVAILABLE, ENVELOPE_MALFORMED, ENVELOPE_MISSING, RATE_LIMITED, refused, served};
use crate::stores::Store;
use crate::world::strict;

fn folder() -> PathBuf {
    repository().join("examples/observability")
}

fn text(name: &str) -> String {
    std::fs::read_to_string(folder().join(name)).unwrap()
}

fn yaml(name: &str) -> Value {
    serde_yaml_ng::from_str(&text(name)).unwrap()
}

fn dashboard() -> Value {
    serde_json::from_str(&text("dashboard.json")).unwrap()
}

fn alerts() -> Vec<Value> {
    let file = yaml("alerts.yml");
    let groups = file["groups"].as_array().unwrap().iter();
    groups
        .flat_map(|group| group["rules"].as_array().unwrap().clone())
        .collect()
}

fn text_of<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_else(|| panic!("no {key} in {value}"))
}

/// Every expression, with where it stands.
fn expressions() -> Vec<(String, String)> {
    let of_alerts = alerts()
        .into_iter()
        .map(|alert| (text_of(&alert, "alert").to_owned(), text_of(&alert, "expr").to_owned()));
    let of_panels = panels().into_iter().flat_map(|panel| {
        let title = text_of(&panel, "title").to_owned();
        let targets = panel["targets"].as_array().cloned().unwrap_or_default();
        targets
            .into_iter()
            .map(move |target| (title.clone(), text_of(&target, "expr").to_owned()))
    });
    of_alerts.chain(of_panels).collect()
}

/// The panels that show something.
fn panels() -> Vec<Value> {
    let panels = dashboard()["panels"].as_array().unwrap().clone();
    panels.into_iter().filter(|panel| panel["type"] != "row").collect()
}

/// A name in an expression, or the beginning of one, with the labels that are asked of it.
#[derive(Debug, PartialEq, Eq)]
struct Named {
    name: String,
    is_beginning: bool,
    labels: Vec<(String, String)>,
}

/// Our names in an expression.
fn named(expression: &str) -> Vec<Named> {
    let is_part = |byte: char| byte.is_ascii_alphanumeric() || byte == '_';
    let mut found = Vec::new();
    for (at, _) in expression.match_indices("portcullis_") {
        if expression[..at].ends_with(is_part) {
            continue;
        }
        let rest = &expression[at..];
        let end = rest.find(|byte| !is_part(byte)).unwrap_or(rest.len());
        let (name, rest) = rest.split_at(end);
        let inside = rest.strip_prefix('{').and_then(|rest| rest.split_once('}'));
        let pairs = inside.map_or("", |(inside, _)| inside).split(',');
        let label = |pair: &str| {
            let (key, value) = pair.split_once('=')?;
            let value = value.trim_start_matches('~').trim_matches('"');
            Some((key.trim().trim_end_matches('!').to_owned(), value.to_owned()))
        };
        found.push(Named {
            name: name.to_owned(),
            is_beginning: rest.starts_with(['.', '(']),
            labels: pairs.filter_map(label).collect(),
        });
    }
    found
}

/// What was printed: names, with the values of each label.
type Printed = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

fn note(printed: &mut Printed, text: &str) {
    for line in text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        let end = line.find(['{', ' ']).unwrap_or(line.len());
        let (name, rest) = line.split_at(end);
        let labels = printed.entry(name.to_owned()).or_default();
        let inside = rest.strip_prefix('{').and_then(|rest| rest.split_once('}'));
        for pair in inside.map_or("", |(inside, _)| inside).split("\",") {
            if let Some((key, value)) = pair.split_once('=') {
                let value = value.trim_matches('"').to_owned();
                labels.entry(key.to_owned()).or_default().insert(value);
            }
        }
    }
}

/// Why an expression asks for something that nobody prints.
fn unprinted(expression: &str, printed: &Printed) -> Option<String> {
    for Named {
        name,
        is_beginning,
        labels,
    } in named(expression)
    {
        if is_beginning {
            if !printed.keys().any(|known| known.starts_with(&name)) {
                return Some(format!("nothing begins with {name}"));
            }
            continue;
        }
        let Some(known) = printed.get(&name) else {
            return Some(format!("{name} is not printed"));
        };
        // Prometheus itself adds these.
        for (label, value) in labels.iter().filter(|(label, _)| label != "job" && label != "instance") {
            let Some(values) = known.get(label) else {
                return Some(format!("{name} has no label {label}"));
            };
            if let Some(word) = value.split('|').find(|word| !values.contains(*word)) {
                return Some(format!("{name} has no {label}={word}"));
            }
        }
    }
    None
}

#[test]
fn the_alerts_are_rules_that_fire_as_their_tests_say() {
    for arguments in [
        &["check", "rules", "alerts.yml"][..],
        &["check", "config", "prometheus.yml"],
        &["test", "rules", "alerts.test.yml"],
    ] {
        let run = Command::new("promtool").args(arguments).current_dir(folder()).output();
        let Ok(output) = run else {
            eprintln!("left out: promtool is not installed (scripts/setup installs it where it may)");
            return;
        };
        let said = [output.stdout, output.stderr].concat();
        assert!(
            output.status.success(),
            "promtool {arguments:?}: {}",
            String::from_utf8_lossy(&said)
        );
    }
}

#[test]
fn every_alert_has_a_test_in_which_it_fires_and_one_in_which_it_does_not() {
    let tests = yaml("alerts.test.yml");
    let tests = tests["tests"].as_array().unwrap().iter();
    let cases: Vec<Value> = tests
        .flat_map(|test| test["alert_rule_test"].as_array().unwrap().clone())
        .collect();
    for alert in alerts() {
        for fires in [true, false] {
            let is_it = |case: &&Value| case["alertname"] == alert["alert"] && case["exp_alerts"].is_array() == fires;
            assert!(
                cases.iter().any(|case| is_it(&case)),
                "{}: fires {fires}",
                alert["alert"]
            );
        }
    }
}

#[test]
fn every_alert_leads_to_a_heading_of_the_runbook() {
    let readme = std::fs::read_to_string(repository().join("rules/README.md")).unwrap();
    let anchor = |line: &str| {
        let heading = line.trim_start_matches('#').strip_prefix(' ')?.to_lowercase();
        let kept = heading.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        Some(kept.collect::<String>().replace(' ', "-"))
    };
    let headings: BTreeSet<String> = readme
        .lines()
        .filter(|line| line.starts_with('#'))
        .filter_map(anchor)
        .collect();
    for alert in alerts() {
        let annotations = &alert["annotations"];
        assert!(!text_of(annotations, "summary").is_empty());
        let (file, heading) = text_of(annotations, "runbook").split_once('#').unwrap();
        assert_eq!(file, "rules/README.md", "{alert}");
        assert!(headings.contains(heading), "{heading} is none of {headings:?}");
        let severity = text_of(&alert["labels"], "severity");
        assert!(["critical", "warning"].contains(&severity), "{alert}");
    }
}

#[test]
fn the_dashboard_is_one_that_grafana_reads_with_any_prometheus() {
    let dashboard = dashboard();
    assert_eq!(dashboard["schemaVersion"], 39);
    let variables: Vec<&Value> = dashboard["templating"]["list"].as_array().unwrap().iter().collect();
    let names: Vec<&str> = variables.iter().map(|variable| text_of(variable, "name")).collect();
    assert_eq!((names[0], &variables[0]["type"]), ("datasource", &json!("datasource")));
    let panels = panels();
    assert!(panels.len() >= 10, "{} panels", panels.len());
    let ids: BTreeSet<u64> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len(), "an id stands twice");
    for panel in &panels {
        assert!(!text_of(panel, "description").is_empty(), "{panel}");
        let targets = panel["targets"].as_array().unwrap();
        assert!(!targets.is_empty(), "{panel}");
        for source in targets
            .iter()
            .map(|target| &target["datasource"])
            .chain([&panel["datasource"]])
        {
            assert_eq!(source["uid"], "${datasource}", "a source that only one Grafana has");
        }
    }
    for (place, expression) in expressions() {
        for (at, _) in expression.match_indices('$') {
            let name: String = expression[at + 1..]
                .chars()
                .take_while(|c| c.is_alphanumeric() || *c == '_')
                .collect();
            // A group of label_replace, and what Grafana itself knows.
            let is_known = name == "1" || name == "__rate_interval" || names.contains(&name.as_str());
            assert!(is_known, "{place}: ${name}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn alerts_and_dashboard_name_only_what_a_service_and_an_envoy_print() {
    let mut redis = Store::redis().await;
    let upstream = Upstream::start().await;
    let mut config = over_redis(&redis.url());
    config["canary"] = json!({"interval_ms": OP_TIMEOUT_MS});
    let mut service = Service::start(config).await;
    service.await_state("limiter", "up").await;
    let gateway = GatewayPlan::new("contract-limits", upstream.address)
        .decision(service.address)
        .plugin(patient())
        .listener("closed", strict())
        .plugin(patient())
        .listener("trial", strict())
        .plugin(json!({"mode": "shadow"}))
        .plugin(patient())
        .start()
        .await;
    let limited = |owner: &str| Call::get("/").envelope(&Envelope::owner(owner).requests("owner", 1));

    served(&gateway.call(&limited("a")).await);
    refused(&gateway.call(&limited("a")).await, RATE_LIMITED);
    served(&gateway.call(&Call::get("/")).await);
    refused(&gateway.call_on("closed", &Call::get("/")).await, ENVELOPE_MISSING);
    let malformed = Call::get("/").envelope(&Envelope::owner("o").requests("owner", "x"));
    refused(&gateway.call(&malformed).await, ENVELOPE_MALFORMED);
    served(&gateway.call_on("trial", &limited("b")).await);
    served(&gateway.call_on("trial", &limited("b")).await);
    redis.kill();
    service.await_state("limiter", "down").await;
    served(&gateway.call(&limited("c")).await);
    assert_eq!(gateway.call_on("closed", &limited("c")).await.status, 503);

    let mut printed = Printed::new();
    note(&mut printed, &service.get("/metrics").await.text());
    service.kill();
    served(&gateway.call(&limited("d")).await);
    refused(&gateway.call_on("closed", &limited("d")).await, DECISION_UNAVAILABLE);
    gateway
        .await_metric("portcullis_bypassed_decision_unavailable", 1)
        .await;
    note(&mut printed, &gateway.prometheus().await);

    let wrong: Vec<String> = expressions()
        .iter()
        .filter_map(|(place, expression)| Some(format!("{place}: {}", unprinted(expression, &printed)?)))
        .collect();
    let ours: Vec<&String> = printed.keys().filter(|name| name.contains("portcullis")).collect();
    assert!(wrong.is_empty(), "{}\nprinted: {ours:#?}", wrong.join("\n"));
    // The names that the scrape configuration keeps are those of the filter.
    assert!(printed.keys().any(|name| name == "portcullis_admitted"), "{ours:#?}");
    assert_eq!(gateway.metric("portcullis_enforcing_contract-limits").await, Some(0));
}

#[test]
fn a_name_that_nobody_prints_would_be_noticed() {
    let mut printed = Printed::new();
    note(
        &mut printed,
        "# HELP x\nportcullis_a_total{state=\"up\",kind=\"x\"} 1\nportcullis_b_c 2\n",
    );
    assert_eq!(
        unprinted(
            "rate(portcullis_a_total{job=~\"$job\", state=~\"up\"}[5m]) > 0",
            &printed
        ),
        None
    );
    assert_eq!(unprinted("{__name__=~\"portcullis_b_.+\"} == 0", &printed), None);
    for wrong in [
        "rate(portcullis_a[5m])",
        "portcullis_a_total{state=\"up|down\"}",
        "portcullis_a_total{other=\"up\"}",
        "{__name__=~\"portcullis_c_.+\"}",
    ] {
        assert!(unprinted(wrong, &printed).is_some(), "{wrong}");
    }
}
