//! Bills of settlements: what a call has cost stands in its org's month, to the micro-dollar and once, whatever fails
//! meanwhile, and then counts against the cap.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::Instant;

use crate::billing::{config, decide, metric, request, runs, settle, up};
use crate::postgres::Postgres;
use crate::process::Service;
use crate::stores::eventually;
use crate::wire;

/// How long an answer to a settlement may take, on a loaded machine.
const SOON: Duration = Duration::from_secs(3);
/// What [`bill`] costs: 600 tokens of 2.5 micro-dollars, 400 cached ones of 1.25, and 10 of 10.
const COST: u64 = 2_100;

/// A policy with a cap of two calls for the org `g`.
fn policy() -> Value {
    json!({
        "prices": {"gpt-*": {"input": 2_500_000, "cached_input": 1_250_000, "output": 10_000_000}},
        "plans": {"team": {"monthly_cost": 2 * COST}},
        "orgs": {"g": {"status": "active", "plan": "team", "models": []}}
    })
}

/// A policy file, and services that read it.
struct Prices {
    _folder: TempDir,
    file: PathBuf,
}

impl Prices {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let prices = Self {
            file: folder.path().join("policy.json"),
            _folder: folder,
        };
        prices.put(&policy().to_string());
        prices
    }

    fn put(&self, text: &str) {
        // Nobody may read half of it.
        let new = self.file.with_extension("new");
        fs::write(&new, text).unwrap();
        fs::rename(&new, &self.file).unwrap();
    }

    fn config(&self, metering: Value) -> Value {
        let mut config = config(metering);
        config["policy"] = json!({"url": format!("file:{}", self.file.display()), "max_staleness_ms": 200});
        // A machine under test is slow, and an admission that timed out is none.
        config["limiter"]["op_timeout_ms"] = json!(4_000);
        config
    }

    async fn serve(&self, server: &Postgres) -> Service {
        let service = Service::start(self.config(json!(server.url()))).await;
        up(&service).await;
        service
    }
}

fn bill(op: &Value, model: &str) -> Value {
    let bill = json!({"org": "g", "model": model, "input": 1_000, "cached_input": 400, "output": 10});
    json!({"op": op, "tokens": 1_010, "bill": bill})
}

fn run(model: &str, cap: &str) -> Value {
    let gates = json!([
        {"gate": "cost_cap", "when_unavailable": cap}, {"gate": "metering", "when_unavailable": "reject"}
    ]);
    let mut request = request(gates);
    request["subject"]["model"] = json!(model);
    request["budget_ms"] = json!(9_000);
    request
}

async fn spent(server: &Postgres) -> u64 {
    let rows = server.run("SELECT coalesce(sum(cost), 0) FROM portcullis_months").await;
    rows[0][0].parse().unwrap()
}

async fn waiting(service: &Service) -> f64 {
    metric(service, "portcullis_bills_waiting").await
}

async fn spends(server: &Postgres, service: &Service, expected: u64) {
    eventually("every bill is added", async || {
        (waiting(service).await == 0.0 && spent(server).await == expected).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bill_raises_the_month_to_the_micro_dollar_and_once_and_a_cap_that_is_reached_denies() {
    let (server, prices) = (Postgres::start().await, Prices::new());
    let services = [prices.serve(&server).await, prices.serve(&server).await];
    let first = run("gpt-4o", "reject");
    assert_eq!(decide(&services[0], &first).await["verdict"], "admit");
    for _ in 0..3 {
        // A filter tells again what was not answered, and perhaps somebody else.
        for service in &services {
            settle(
                service,
                json!({"settles": [bill(&first["op"], "gpt-4o"), {"op": wire::op()}]}),
            )
            .await;
        }
    }
    for service in &services {
        spends(&server, service, COST).await;
    }

    let second = run("gpt-4o-mini", "reject");
    assert_eq!(decide(&services[1], &second).await["verdict"], "admit", "below the cap");
    let mut of_hold = bill(&second["op"], "gpt-4o-mini");
    of_hold["bill"]["is_hold"] = json!(true);
    settle(&services[0], json!({"settles": [of_hold]})).await;
    spends(&server, &services[0], 2 * COST).await;
    assert_eq!(metric(&services[0], "portcullis_bills_of_holds_total").await, 1.0);
    for service in &services {
        let denied = decide(service, &run("gpt-4o", "reject")).await;
        assert_eq!(
            (denied["code"].as_str(), denied["gate"].as_str()),
            (Some("COST_CAP_EXCEEDED"), Some("cost_cap"))
        );
    }
    assert_eq!(runs(&server).await, "2");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_metering_store_that_is_down_holds_up_no_settlement_and_gets_each_bill_once_after_its_return() {
    let (mut server, prices) = (Postgres::start().await, Prices::new());
    let service = prices.serve(&server).await;
    server.kill();
    let settles: Vec<Value> = (0..40).map(|_| bill(&json!(wire::op()), "gpt-4o")).collect();
    for _ in 0..2 {
        let asked = Instant::now();
        settle(&service, json!({"settles": settles})).await;
        assert!(asked.elapsed() < SOON, "{:?}", asked.elapsed());
    }
    assert_eq!(waiting(&service).await, 40.0);
    server.restart().await;
    spends(&server, &service, 40 * COST).await;

    server.freeze();
    let asked = Instant::now();
    settle(&service, json!({"settles": [bill(&json!(wire::op()), "gpt-4o")]})).await;
    assert!(asked.elapsed() < SOON, "{:?}", asked.elapsed());
    server.thaw();
    spends(&server, &service, 41 * COST).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_amid_settlements_loses_and_doubles_nothing() {
    let (mut server, prices) = (Postgres::start().await, Prices::new());
    let service = prices.serve(&server).await;
    let end = Instant::now() + Duration::from_millis(2_000);
    let load = async {
        let mut told = 0;
        while Instant::now() < end {
            let settles: Vec<Value> = (0..20).map(|_| bill(&json!(wire::op()), "gpt-4o")).collect();
            settle(&service, json!({"settles": settles})).await;
            told += 20;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        told
    };
    let trouble = async {
        for _ in 0..4 {
            tokio::time::sleep(Duration::from_millis(200)).await;
            server.terminate_backends().await;
        }
        server.kill();
        server.restart().await;
    };
    let (told, ()) = tokio::join!(load, trouble);
    spends(&server, &service, told * COST).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_without_a_price_is_counted_and_named_and_holds_up_no_other() {
    let (server, prices) = (Postgres::start().await, Prices::new());
    let service = prices.serve(&server).await;
    let closed = decide(&service, &run("mistral", "reject")).await;
    let verdict = json!({"op": closed["op"], "verdict": "unavailable", "dependency": "policy", "gate": "cost_cap"});
    assert_eq!(closed, verdict);
    assert_eq!(runs(&server).await, "0");
    let line = service.line("unpriced").await;
    let words = ["level", "class", "gate", "org"].map(|key| line[key].as_str().unwrap());
    assert_eq!(words, ["WARN", "policy_unavailable", "cost_cap", "g"]);
    let says = |line: &Value| line["message"].as_str().unwrap().contains("no price for model mistral");
    assert!(says(&line), "{line}");

    let open = run("mistral", "admit");
    let answer = decide(&service, &open).await;
    let bypassed = json!([{"class": "policy_unavailable", "gate": "cost_cap"}]);
    assert_eq!(
        (&answer["verdict"], &answer["bypassed"]),
        (&json!("admit"), &bypassed),
        "{answer}"
    );
    assert_eq!(runs(&server).await, "1");
    assert_eq!(
        service.line("bypassed").await["message"],
        "fail-open, cost_cap unchecked"
    );
    let counted = "portcullis_bypassed_total{class=\"policy_unavailable\",gate=\"cost_cap\"}";
    assert_eq!(metric(&service, counted).await, 1.0);

    let other = json!(wire::op());
    let batch = json!({"settles": [bill(&open["op"], "mistral"), bill(&other, "gpt-4o")]});
    for _ in 0..2 {
        settle(&service, batch.clone()).await;
    }
    spends(&server, &service, COST).await;
    assert_eq!(metric(&service, "portcullis_unpriced_total").await, 1.0);
    let line = service.line("bill_unpriced").await;
    assert_eq!(
        (line["level"].as_str(), line["org"].as_str()),
        (Some("WARN"), Some("g"))
    );
    assert!(says(&line), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_that_cannot_be_read_delays_bills_until_it_can() {
    let (server, prices) = (Postgres::start().await, Prices::new());
    let service = prices.serve(&server).await;
    prices.put("{");
    let op = json!(wire::op());
    eventually("nobody can read the policy", async || {
        let answer = decide(&service, &run("gpt-4o", "reject")).await;
        (answer["dependency"] == "policy").then_some(())
    })
    .await;
    settle(&service, json!({"settles": [bill(&op, "gpt-4o")]})).await;
    let failures = "portcullis_dependency_errors_total{dependency=\"policy\",kind=\"not_sensible\"}";
    let before = metric(&service, failures).await;
    eventually("the price list was asked for in vain", async || {
        (metric(&service, failures).await > before + 1.0).then_some(())
    })
    .await;
    assert_eq!((waiting(&service).await, spent(&server).await), (1.0, 0));
    prices.put(&policy().to_string());
    spends(&server, &service, COST).await;
    assert_eq!(metric(&service, "portcullis_unpriced_total").await, 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_ends_delivers_its_bills_first_and_says_what_it_could_not() {
    let (mut server, prices) = (Postgres::start().await, Prices::new());
    let mut service = prices.serve(&server).await;
    server.kill();
    settle(&service, json!({"settles": [bill(&json!(wire::op()), "gpt-4o")]})).await;
    assert_eq!(waiting(&service).await, 1.0);
    server.restart().await;
    service.signal("TERM");
    assert_eq!(service.end().await, Some(0));
    assert_eq!(spent(&server).await, COST);
    assert!(!service.log().contains("bills_lost"), "{}", service.log());

    // Without a store there is nobody to tell.
    for metering in [json!("postgres://x@127.0.0.1:1/x"), Value::Null] {
        let mut service = Service::start(prices.config(metering)).await;
        settle(&service, json!({"settles": [bill(&json!(wire::op()), "gpt-4o")]})).await;
        assert_eq!(waiting(&service).await, 1.0);
        service.signal("TERM");
        assert_eq!(service.end().await, Some(0));
        let lost = service.line("bills_lost").await;
        assert_eq!(
            (lost["level"].as_str(), lost["count"].as_u64()),
            (Some("ERROR"), Some(1))
        );
    }
}
