//! Which probes a configuration brings about, and which are left out with which reason.

use portcullis_decision::config::{Environment, ServiceConfig};
use serde_json::{Value, json};

use super::*;

fn plan_of(config: &Value, capacity: &Value, outages: Result<&[Outage], &str>) -> Plan {
    plan_with(config, capacity, Refused::default(), outages)
}

fn plan_with(config: &Value, capacity: &Value, refused: Refused<'_>, outages: Result<&[Outage], &str>) -> Plan {
    let config = FilterConfig::parse(config.to_string().as_bytes()).unwrap();
    let service = json!({"profile": "development", "listen": "127.0.0.1:1", "capacity": capacity});
    let service = ServiceConfig::parse(service.to_string().as_bytes(), &Environment::default()).unwrap();
    let header = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let tenant = Request {
        method: "POST".to_owned(),
        path: "/".to_owned(),
        headers: vec![header("x-admission-org-id", "drill"), header("accept", "*/*")],
        ..Request::default()
    };
    Planner::new(&config, &tenant, "run").plan(Some(&service.capacity), refused, outages)
}

fn config(rules: &str, changes: Value) -> Value {
    let mut config = json!({"profile": "development", "rules": rules, "decision": {"upstream": "p"}});
    let keys = config.as_object_mut().unwrap();
    keys.extend(changes.as_object().unwrap().clone());
    config
}

fn probe<'a>(plan: &'a Plan, name: &str) -> Option<&'a Probe> {
    plan.probes.iter().find(|probe| probe.name == name)
}

fn why<'a>(plan: &'a Plan, class: &str) -> &'a str {
    let left = plan.not_driven.iter().find(|(left, _)| *left == class);
    &left.unwrap_or_else(|| panic!("{class} is driven: {plan:?}")).1
}

#[test]
fn every_probe_has_an_owner_of_its_own_and_only_the_bare_one_has_none() {
    let plan = plan_of(
        &config("contract-limits", json!({})),
        &json!({}),
        Ok(&[Outage::Limiter]),
    );
    let owner = |probe: &Probe| {
        let owner = probe
            .request
            .headers
            .iter()
            .find(|(name, _)| name == "x-admission-owner-id");
        owner.map(|(_, owner)| owner.clone())
    };
    let mut owners: Vec<String> = plan.probes.iter().filter_map(owner).collect();
    assert!(owners.iter().all(|owner| owner.starts_with("portcullis-drill-run-")));
    let count = owners.len();
    owners.sort();
    owners.dedup();
    assert_eq!(owners.len(), count, "two probes share a window");
    let bare = probe(&plan, "no envelope").unwrap();
    assert_eq!(bare.request.headers, [("accept".to_owned(), "*/*".to_owned())]);
}

#[test]
fn a_tier_is_spent_only_where_nobody_is_disturbed() {
    let rules = config("operator-admission", json!({}));
    let none: Result<&[Outage], &str> = Err("none");
    for (capacity, name, times) in [
        (
            json!({"lanes": {"batch": {"requests": 0}}}),
            "the lane batch, which is closed",
            1,
        ),
        (json!({"graph": {"requests": 3}}), "a graph after 3 requests", 4),
        (json!({"organization": {"requests": 2}}), "an org after 2 requests", 3),
    ] {
        let plan = plan_of(&rules, &capacity, none);
        let found = probe(&plan, name).unwrap_or_else(|| panic!("no {name} in {plan:?}"));
        assert_eq!(found.times, Times::Exactly(times));
    }
    for capacity in [
        json!({}),
        json!({"platform": {"requests": 3}}),
        json!({"graph": {"requests": 201}}),
        json!({"lanes": {"batch": {"requests": 5}}}),
    ] {
        let plan = plan_of(&rules, &capacity, none);
        assert!(
            why(&plan, "capacity_exhausted").contains("without disturbing callers"),
            "{capacity}"
        );
    }
    let contract = plan_of(&config("contract-limits", json!({})), &json!({}), none);
    assert_eq!(why(&contract, "capacity_exhausted"), "the rules do not list capacity");
}

#[test]
fn a_body_is_broken_and_its_model_replaced_where_the_filter_reads_bodies() {
    let none: Result<&[Outage], &str> = Err("none");
    let plan = plan_of(
        &config("fail-closed", json!({"model": {"from": "body"}})),
        &json!({}),
        none,
    );
    let broken = probe(&plan, "a body that breaks off").unwrap();
    assert!(serde_json::from_slice::<Value>(&broken.request.body).is_err());
    let other = probe(&plan, "a model that is not allowed").unwrap();
    let body: Value = serde_json::from_slice(&other.request.body).unwrap();
    assert!(body["model"].as_str().unwrap().starts_with(MADE_UP), "{body}");
    let plan = plan_of(
        &config("fail-closed", json!({"model": {"from": "header"}})),
        &json!({}),
        none,
    );
    assert!(why(&plan, "request_malformed").contains("model.from"));
}

#[test]
fn an_unsigned_envelope_is_sent_only_where_signed_ones_are_wanted() {
    let keys = json!({"envelope": {"signature": {"keys": {"edge-1":
        {"secret": "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="}}}}});
    let name = "an envelope without its signature";
    let signed = plan_of(&config("contract-limits", keys), &json!({}), Err("none"));
    assert!(!probe(&signed, name).unwrap().is_signed);
    let plain = plan_of(&config("contract-limits", json!({})), &json!({}), Err("none"));
    assert!(probe(&plain, name).is_none());
}

#[test]
fn without_a_switch_every_outage_is_left_with_the_reason() {
    let plan = plan_of(
        &config("contract-limits", json!({})),
        &json!({}),
        Err("no --admin was given"),
    );
    for outage in [Outage::Limiter, Outage::Policy, Outage::Metering, Outage::Decision] {
        assert_eq!(why(&plan, class_of(outage).name()), "no --admin was given");
    }
    assert!(plan.probes.iter().all(|probe| probe.down.is_none()));
}

#[test]
fn a_model_that_nobody_serves_is_asked_for_where_the_filter_finds_it() {
    let unserved = Refused {
        unserved_model: Some("a\"b"),
        ..Refused::default()
    };
    let name = "the model a\"b, which nobody serves";
    let of = |rules: &str, changes: Value, refused| plan_with(&config(rules, changes), &json!({}), refused, Ok(&[]));
    let plan = of("fail-closed", json!({"model": {"from": "header"}}), unserved);
    let headers = &probe(&plan, name).unwrap().request.headers;
    assert!(
        headers.contains(&("x-admission-model".to_owned(), "a\"b".to_owned())),
        "{headers:?}"
    );
    let plan = of("fail-closed", json!({"model": {"from": "body"}}), unserved);
    let body: Value = serde_json::from_slice(&probe(&plan, name).unwrap().request.body).unwrap();
    assert_eq!(body["model"], "a\"b");
    let class = "provider_unconfigured";
    let plan = of("fail-closed", json!({"model": {"from": "header"}}), Refused::default());
    assert!(why(&plan, class).contains("--unserved-model"));
    let plan = of("contract-limits", json!({}), unserved);
    assert!(why(&plan, class).contains("model_policy") && probe(&plan, name).is_none());
}
