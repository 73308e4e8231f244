//! The case table (`wasm-tests/cases/`) in real Envoy with the real service: the same data that drives the pure crate.
//! Status, code, class, scope, headers, upstream hits, counters and log lines are compared; what a case leaves out is not.

use std::fs;
use std::net::SocketAddr;

use portcullis_wasm_tests::{Answer, Call, GatewayPlan, Service, Upstream, closed_port, repository};
use serde_json::{Value, json};
use tokio::task::{JoinSet, LocalSet};

/// Cases that run at once: each starts an Envoy, and a machine may have two cores.
const AT_ONCE: usize = 3;

fn cases(file: &str) -> Vec<Value> {
    let path = repository().join("wasm-tests/cases").join(file);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    match serde_json::from_str(&text) {
        Ok(Value::Array(cases)) => cases,
        other => panic!("{}: {other:?}", path.display()),
    }
}

fn is_down(case: &Value, what: &str) -> bool {
    case["down"]
        .as_array()
        .is_some_and(|down| down.iter().any(|d| d == what))
}

/// The limiter and nothing else: a dead one is an address where nobody listens.
fn service(case: &Value) -> Value {
    let limiter = if is_down(case, "limiter") {
        json!({"url": format!("redis://{}", closed_port())})
    } else if case["limiter"] == "none" {
        Value::Null
    } else {
        json!({"url": "memory:"})
    };
    json!({"profile": "development", "limiter": limiter, "capacity": case["capacity"]})
}

async fn run(case: Value) -> Result<(), String> {
    let name = case["name"].as_str().expect("a case has a name").to_owned();
    let upstream = Upstream::start().await;
    let (service, decision): (Option<Service>, SocketAddr) = if is_down(&case, "decision") {
        (None, closed_port())
    } else {
        let service = Service::start(service(&case)).await;
        let address = service.address;
        (Some(service), address)
    };
    let mut plan = GatewayPlan::new(case["rules"].clone(), upstream.address).decision(decision);
    if case["filter"].is_object() {
        plan = plan.plugin(case["filter"].clone());
    }
    let mut gateway = plan.start().await;
    let outcome = async {
        for (at, request) in case["requests"]
            .as_array()
            .expect("a case has requests")
            .iter()
            .enumerate()
        {
            let expect = &request["expect"];
            let mut call = Call::get("/v1/models");
            for (name, value) in request["headers"].as_object().into_iter().flatten() {
                call = call.header(
                    &format!("x-admission-{name}"),
                    value.as_str().expect("a header is text"),
                );
            }
            let counter = expect["count"].as_str();
            let counted = match counter {
                Some(counter) => gateway.counter(counter).await,
                None => 0,
            };
            let times = request["times"].as_u64().unwrap_or(1);
            for time in 0..times {
                let before = upstream.hits();
                let answer = gateway.call(&call).await;
                let reached = u64::try_from(upstream.hits() - before).unwrap_or(u64::MAX);
                difference(&answer, reached, expect).map_err(|difference| {
                    format!("{name}: request {at}, time {time}: {difference}, expected {expect}")
                })?;
            }
            if let Some(counter) = counter {
                gateway
                    .await_metric(counter, counted + i64::try_from(times).unwrap_or(i64::MAX))
                    .await;
            }
            if let Some(keys) = expect["log"].as_object() {
                gateway
                    .await_log(&format!("{name}: {keys:?}"), |line| {
                        keys.iter().all(|(key, value)| line[key] == *value)
                    })
                    .await;
            }
        }
        Ok(())
    }
    .await;
    gateway.assert_sound();
    drop(service);
    outcome
}

/// What differs from an expectation, in words.
fn difference(answer: &Answer, reached: u64, expect: &Value) -> Result<(), String> {
    if expect["status"] != answer.status || expect["upstream"] != reached {
        return Err(format!(
            "status {}, upstream {reached}, {}",
            answer.status,
            answer.text()
        ));
    }
    if expect["code"].is_null() {
        return Ok(());
    }
    let error = answer.error();
    if expect["code"] != error["code"] || expect["scope"] != error["scope"] {
        return Err(format!("code {}, scope {}", error["code"], error["scope"]));
    }
    let class = answer.header("x-portcullis-class");
    if expect["class"].as_str() != class || error["type"].as_str() != class {
        return Err(format!("class {class:?}, type {}", error["type"]));
    }
    let range = expect["retry_after"]
        .as_array()
        .map(|range| (range[0].as_u64(), range[1].as_u64()));
    let fits = match (answer.retry_after(), range) {
        (None, None) => true,
        (Some(seconds), Some((least, most))) => least <= Some(seconds) && Some(seconds) <= most,
        _ => false,
    };
    if !fits || error["retry_after"].as_u64() != answer.retry_after() {
        return Err(format!("retry-after {:?}", answer.retry_after()));
    }
    let should_retry = answer.header("x-should-retry");
    if expect["should_retry"].as_bool().map(|yes| yes.to_string()).as_deref() != should_retry {
        return Err(format!("x-should-retry {should_retry:?}"));
    }
    Ok(())
}

/// A few at a time, on this thread: what waits for a condition need not be `Send`.
async fn run_all(waiting: Vec<Value>) {
    let count = waiting.len();
    let local = LocalSet::new();
    let outcomes = local.run_until(async {
        let mut running: JoinSet<Result<(), String>> = JoinSet::new();
        let mut outcomes = Vec::with_capacity(count);
        for case in waiting {
            if running.len() >= AT_ONCE {
                outcomes.extend(running.join_next().await);
            }
            running.spawn_local(run(case));
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
}

#[tokio::test(flavor = "multi_thread")]
async fn envelopes_are_answered_as_the_case_table_says() {
    run_all(cases("envelope.json")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_are_answered_as_the_case_table_says() {
    run_all(cases("limits.json")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn outages_are_answered_as_the_case_table_says() {
    run_all(cases("outages.json")).await;
}
