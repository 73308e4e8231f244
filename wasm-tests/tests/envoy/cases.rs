//! The case table (`wasm-tests/cases/`) in real Envoy with the real service: the same data that drives the pure crate and
//! the test host. Cases with a policy run against real PostgreSQL and real Redis, each with a database and keys of its own.
//! Before each request `portcullis explain` says what will come, and then that has to come.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::process::Command;
use std::rc::Rc;

use portcullis_wasm_tests::{
    Answer, Call, DEADLINE, Gateway, GatewayPlan, Service, Upstream, closed_port, filter_module_sha256, portcullis,
    until,
};
use serde_json::{Value, json};
use tempfile::NamedTempFile;
use tokio::task::{JoinSet, LocalSet};

use crate::explained::{self, Explainer, Got};
use crate::postgres::Postgres;
use crate::stores::Store;
use crate::table::{self, Outcome, difference, fields, is_down};

/// Cases that run at once: each starts an Envoy, and a machine may have two cores.
const AT_ONCE: usize = 3;

fn cases(file: &str) -> Vec<Value> {
    let (_, text) = table::FILES
        .iter()
        .find(|(name, _)| *name == file)
        .expect("a file of the table");
    serde_json::from_str(text).expect("the table is JSON")
}

/// The stores of cases with a policy.
struct Stores {
    redis: Store,
    postgres: Postgres,
}

impl Stores {
    async fn start() -> Rc<Self> {
        let (redis, postgres) = tokio::join!(Store::redis(), Postgres::start());
        Rc::new(Self { redis, postgres })
    }

    /// A database with the case's policy and what its orgs have spent.
    async fn database(&self, at: usize, case: &Value) -> String {
        self.postgres.run(&format!("CREATE DATABASE case_{at}")).await;
        let url = self.postgres.url();
        let server = url.strip_suffix("/postgres").expect("the database's name comes last");
        let url = format!("{server}/case_{at}");
        let file = NamedTempFile::new().expect("a temporary file");
        std::fs::write(file.path(), case["policy"].to_string()).expect("the policy can be written");
        let mut apply = Command::new(portcullis());
        apply
            .args(["policy", "apply"])
            .arg(file.path())
            .env("POSTGRES_DSN", &url);
        let output = apply.output().expect("portcullis policy apply runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        for (org, cost) in case["spent"].as_object().into_iter().flatten() {
            let month = "date_trunc('month', now() AT TIME ZONE 'UTC')::date";
            self.sql(
                &url,
                &format!("INSERT INTO portcullis_months (org, month, cost) VALUES ('{org}', {month}, {cost})"),
            )
            .await;
        }
        url
    }

    async fn sql(&self, url: &str, script: &str) -> Vec<Vec<String>> {
        self.postgres.run_at(url, script).await
    }
}

/// The service's configuration: a dead store is an address where nobody listens.
fn configuration(at: usize, case: &Value, stores: Option<&(Rc<Stores>, String)>) -> Value {
    let dead = |scheme: &str| json!(format!("{scheme}://x@{}/x", closed_port()));
    let limiter = match stores {
        _ if is_down(case, "limiter") => json!({"url": format!("redis://{}", closed_port())}),
        _ if case["limiter"] == "none" => Value::Null,
        Some((stores, _)) => json!({"url": stores.redis.url(), "key_prefix": format!("case-{at}")}),
        None => json!({"url": "memory:"}),
    };
    let mut config = json!({"profile": "development", "limiter": limiter, "capacity": case["capacity"]});
    if let Some((_, database)) = stores {
        // Time is not what these cases are about, and an unoptimised service takes long to log in.
        config["limiter"]["op_timeout_ms"] = json!(1_500);
        for store in ["policy", "metering"] {
            config[store]["url"] = if is_down(case, store) {
                dead("postgres")
            } else {
                json!(database)
            };
        }
    }
    config
}

/// Waits until every store that should answer does, so that a case starts from a known state.
async fn settled(service: &Service, case: &Value) {
    until("the stores", DEADLINE, async || {
        let ready: Value = serde_json::from_slice(&service.get("/ready").await.body).unwrap_or_default();
        let is_settled = |store: &str| {
            let state = &ready["dependencies"][store]["state"];
            let expected = if is_down(case, store) { "down" } else { "up" };
            *state == expected || *state == "absent" || *state == "embedded"
        };
        ["limiter", "policy", "metering"]
            .iter()
            .all(|store| is_settled(store))
            .then_some(())
    })
    .await;
}

fn outcome(answer: &Answer, upstream: usize) -> Outcome {
    Outcome {
        status: answer.status,
        headers: answer.headers.clone(),
        body: answer.body.clone(),
        upstream: u64::try_from(upstream).unwrap_or(u64::MAX),
        counted: None,
    }
}

async fn run(at: usize, case: Value, stores: Option<Rc<Stores>>) -> Result<(), String> {
    let stores = match stores {
        Some(stores) => {
            let url = stores.database(at, &case).await;
            Some((stores, url))
        }
        None => None,
    };
    let upstream = Upstream::start().await;
    let (service, decision): (Option<Service>, SocketAddr) = if is_down(&case, "decision") {
        (None, closed_port())
    } else {
        let service = Service::start(configuration(at, &case, stores.as_ref())).await;
        if stores.is_some() {
            settled(&service, &case).await;
        }
        let address = service.address;
        (Some(service), address)
    };
    let mut plan = GatewayPlan::new(case["rules"].clone(), upstream.address).decision(decision);
    if case["filter"].is_object() {
        plan = plan.plugin(case["filter"].clone());
    }
    if stores.is_some() {
        plan = plan.plugin(json!({"decision": {"timeout_ms": 4_000}}));
    }
    let mut gateway = plan.start().await;
    let compared = compare(&case, &gateway, &upstream).await;
    gateway.assert_sound();
    compared.map_err(|difference| {
        let log = service.as_ref().map(Service::log).unwrap_or_default();
        format!("{}: {difference}\n{log}", case["name"])
    })?;
    for (org, runs) in case["runs_after"].as_object().into_iter().flatten() {
        let Some((stores, url)) = &stores else { continue };
        let rows = stores
            .sql(
                url,
                &format!("SELECT coalesce(sum(runs), 0) FROM portcullis_months WHERE org = '{org}'"),
            )
            .await;
        if rows != [[runs.to_string()]] {
            return Err(format!(
                "{}: {rows:?} runs recorded for {org}, expected {runs}",
                case["name"]
            ));
        }
    }
    Ok(())
}

/// What `explain` says of every request of a case, in order. All of it before the first call: a window begins with that, and
/// a process takes its time on a busy machine.
fn explanations(case: &Value) -> Vec<Value> {
    let mut explainer = Explainer::of(case, &table::filter(case));
    let mut told = Vec::new();
    for request in case["requests"].as_array().expect("a case has requests") {
        for _ in 0..request["times"].as_u64().unwrap_or(1) {
            told.push(explainer.explain(Command::new(portcullis()), &fields(request)));
        }
    }
    told
}

async fn compare(case: &Value, gateway: &Gateway, upstream: &Upstream) -> Result<(), String> {
    let explained = case.clone();
    // Other cases go on meanwhile, on this thread.
    let told = tokio::task::spawn_blocking(move || explanations(&explained)).await;
    let mut told = told.expect("every request is explained").into_iter();
    for (at, request) in case["requests"]
        .as_array()
        .expect("a case has requests")
        .iter()
        .enumerate()
    {
        let expect = &request["expect"];
        let mut call = Call::get("/v1/models");
        for (name, value) in fields(request) {
            call = call.header(&name, value);
        }
        let before = counters(gateway).await;
        let times = request["times"].as_u64().unwrap_or(1);
        for time in 0..times {
            let report = told.next().expect("each request was explained");
            let hits = upstream.hits();
            let answer = gateway.call(&call).await;
            let outcome = outcome(&answer, upstream.hits() - hits);
            if let Some(difference) = difference(&outcome, expect) {
                return Err(format!("request {at}, time {time}: {difference}, expected {expect}"));
            }
            let got = Got {
                status: outcome.status,
                headers: &outcome.headers,
                body: &outcome.body,
                upstream: outcome.upstream,
            };
            if let Some(difference) = explained::difference(&report, &got, expect) {
                return Err(format!("request {at}, time {time}: {difference}"));
            }
        }
        if let Some(counter) = expect["count"].as_str() {
            let was = before.get(counter).copied().unwrap_or(0);
            gateway
                .await_metric(counter, was + i64::try_from(times).unwrap_or(i64::MAX))
                .await;
        }
        stood_still(&before, &counters(gateway).await, expect["status"] == 200)?;
        if let Some(keys) = expect["log"].as_object() {
            let has_all = |line: &Value| keys.iter().all(|(key, value)| line[key] == *value);
            gateway.await_log(&format!("{keys:?}"), has_all).await;
        }
    }
    Ok(())
}

/// Every counter that says how a request ended.
async fn counters(gateway: &Gateway) -> HashMap<String, i64> {
    let mut counters = HashMap::new();
    for counter in portcullis_decision::metric::Counter::all() {
        let name = counter.name();
        counters.insert(name.clone(), gateway.counter(&name).await);
    }
    counters
}

/// Counters of the other outcome did not move: a refusal admits nothing, an admission refuses nothing.
fn stood_still(before: &HashMap<String, i64>, after: &HashMap<String, i64>, passed: bool) -> Result<(), String> {
    let other = if passed {
        "portcullis_rejected_"
    } else {
        "portcullis_admitted"
    };
    for (name, now) in after.iter().filter(|(name, _)| name.starts_with(other)) {
        let was = before.get(name).copied().unwrap_or(0);
        if *now != was {
            return Err(format!("{name} moved from {was} to {now}"));
        }
    }
    Ok(())
}

/// A few at a time, on this thread: what waits for a condition need not be `Send`.
async fn run_all(waiting: Vec<Value>, with_stores: bool) {
    let count = waiting.len();
    let module = filter_module_sha256();
    let local = LocalSet::new();
    let outcomes = local.run_until(async {
        let stores = if with_stores { Some(Stores::start().await) } else { None };
        let mut running: JoinSet<Result<(), String>> = JoinSet::new();
        let mut outcomes = Vec::with_capacity(count);
        for (at, case) in waiting.into_iter().enumerate() {
            if running.len() >= AT_ONCE {
                outcomes.extend(running.join_next().await);
            }
            running.spawn_local(run(at, case, stores.clone()));
        }
        while let Some(outcome) = running.join_next().await {
            outcomes.push(outcome);
        }
        outcomes
    });
    let wrong: Vec<String> = outcomes
        .await
        .into_iter()
        .filter_map(|outcome| outcome.expect("a case does not panic").err())
        .collect();
    assert!(
        wrong.is_empty(),
        "{} of {count} cases:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    assert_eq!(
        filter_module_sha256(),
        module,
        "the module was built anew under the test"
    );
    println!("{count} cases in Envoy, as the table says; module {module}");
}

#[tokio::test(flavor = "multi_thread")]
async fn envelopes_are_answered_as_the_case_table_says() {
    run_all(cases("envelope.json"), false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_are_answered_as_the_case_table_says() {
    run_all(cases("limits.json"), false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn outages_are_answered_as_the_case_table_says() {
    run_all(cases("outages.json"), false).await;
}

/// Real PostgreSQL and real Redis behind the service.
#[tokio::test(flavor = "multi_thread")]
async fn gates_over_real_stores_are_answered_as_the_case_table_says() {
    run_all(cases("gates.json"), true).await;
}
