//! The service over a PostgreSQL that works: what is recorded, given back, told by filters, and listed.

use serde_json::{Value, json};

use crate::postgres::{PASSWORD, Postgres};
use crate::process::{Service, ended, file, portcullis};
use crate::stores::eventually;
use crate::wire;

/// A service with an embedded limiter over this metering store.
pub(crate) fn config(metering: Value) -> Value {
    json!({
        "profile": "development", "listen": "127.0.0.1:0",
        "limiter": {"url": "memory:", "op_timeout_ms": 100}, "metering": {"url": metering}
    })
}

pub(crate) fn launch(when_unavailable: &str) -> Value {
    json!({"gate": "metering", "when_unavailable": when_unavailable})
}

/// A request for one run of the org `g` through these gates.
pub(crate) fn request(gates: Value) -> Value {
    wire::request(json!({
        "gates": gates, "subject": {"owner": "o", "org": "g"}, "limits": {}, "rules": "launch-gate", "budget_ms": 220
    }))
}

pub(crate) async fn decide(service: &Service, request: &Value) -> Value {
    let answer = service.post("/v1/decide", request).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

pub(crate) async fn settle(service: &Service, batch: Value) -> Value {
    let mut body = json!({"profile": "development"});
    body.as_object_mut().unwrap().extend(batch.as_object().unwrap().clone());
    let answer = service.post("/v1/settle", &body).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

/// Starts, and waits until the metering store answers.
pub(crate) async fn start(server: &Postgres) -> Service {
    let service = Service::start(config(json!(server.url()))).await;
    up(&service).await;
    service
}

pub(crate) async fn up(service: &Service) {
    eventually("metering is up", async || {
        let state = service.get("/ready").await.json()["dependencies"]["metering"]["state"].clone();
        (state == "up").then_some(())
    })
    .await;
}

pub(crate) async fn runs(server: &Postgres) -> String {
    server.run("SELECT coalesce(sum(runs), 0) FROM portcullis_months").await[0][0].clone()
}

pub(crate) async fn metric(service: &Service, name: &str) -> f64 {
    let text = service.get("/metrics").await.body;
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
    value.unwrap_or(0.0)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_denial_by_a_later_gate_gives_the_run_back_and_one_by_an_earlier_gate_makes_no_metering_query() {
    let server = Postgres::start().await;
    let service = start(&server).await;
    let answer = decide(&service, &request(json!([launch("reject")]))).await;
    assert_eq!(
        (answer["verdict"].as_str(), runs(&server).await.as_str()),
        (Some("admit"), "1")
    );

    let contract = json!({"gate": "contract", "when_unavailable": "reject"});
    let mut later = request(json!([launch("reject"), contract]));
    later["limits"] = json!({"owner": {"requests": 0}});
    let answer = decide(&service, &later).await;
    assert_eq!(answer["code"], "RATE_LIMITED");
    assert_eq!(runs(&server).await, "1", "given back before the answer");

    let rate = json!({"gate": "launch_rate", "per_minute": 1, "burst": 1});
    let gates = json!([rate, launch("reject")]);
    assert_eq!(decide(&service, &request(gates.clone())).await["verdict"], "admit");
    let before = server.statements("portcullis_record");
    for _ in 0..5 {
        let answer = decide(&service, &request(gates.clone())).await;
        assert_eq!(answer["code"], "LAUNCH_RATE_LIMITED");
    }
    assert_eq!(
        (server.statements("portcullis_record"), runs(&server).await.as_str()),
        (before, "2")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_decision_is_not_billed_whether_the_cancel_comes_before_or_after() {
    let server = Postgres::start().await;
    let service = start(&server).await;
    let (early, late) = (request(json!([launch("reject")])), request(json!([launch("reject")])));
    decide(&service, &early).await;
    settle(&service, json!({"cancels": [early["op"], late["op"]]})).await;
    let answer = decide(&service, &late).await;
    assert_eq!(
        (answer["verdict"].as_str(), answer["dependency"].as_str()),
        (Some("unavailable"), Some("metering"))
    );
    assert_eq!(runs(&server).await, "0");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_filter_let_pass_is_journaled_billed_once_and_listed() {
    let server = Postgres::start().await;
    let service = start(&server).await;
    // The filter gave up on the first, which was recorded all the same; its cancel comes in the same batch.
    let first = request(json!([launch("admit")]));
    decide(&service, &first).await;
    let told = |op: &Value, org: &str| json!({"op": op, "org": org, "owner": "o", "rules": "launch-gate", "age_ms": 5_000, "request_id": "r-9"});
    let batch = json!({
        "cancels": [first["op"]], "unmetered": [told(&first["op"], "g"), told(&json!(wire::op()), "h\u{1b}[2J")]
    });
    for _ in 0..2 {
        settle(&service, batch.clone()).await;
    }
    eventually("the journal is empty", async || {
        (metric(&service, "portcullis_unmetered_waiting").await == 0.0).then_some(())
    })
    .await;
    let rows = "SELECT org, source, request_id, extract(epoch FROM now() - at) BETWEEN 5 AND 30 \
                FROM portcullis_unmetered ORDER BY at, op";
    let row = |org: &str| [org, "filter", "r-9", "t"].map(str::to_owned).to_vec();
    eventually("both stand in the table", async || {
        (server.run(rows).await == [row("g"), row("h\u{1b}[2J")]).then_some(())
    })
    .await;
    eventually("both are billed", async || (runs(&server).await == "2").then_some(())).await;

    let url = server.url();
    let list = |arguments: &[&str]| {
        ended(
            portcullis(&[("POSTGRES_DSN", &url)])
                .args(["unmetered", "list"])
                .args(arguments),
        )
    };
    let (code, table, errors) = list(&[]);
    assert_eq!((code, errors.as_str()), (Some(0), ""));
    assert!(
        table.starts_with("AT ") && table.ends_with("2 unmetered runs\n") && !table.contains('\u{1b}'),
        "{table}"
    );
    let (code, lines, _) = list(&["--json", "--org", "g"]);
    let only: Value = serde_json::from_str(&lines).unwrap();
    assert_eq!(
        (code, &only["op"], &only["source"]),
        (Some(0), &first["op"], &json!("filter"))
    );
    let (code, lines, _) = list(&["--json", "--org", "nobody"]);
    assert_eq!((code, lines.as_str()), (Some(0), ""));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_without_a_database_says_so_and_never_shows_a_password() {
    let server = Postgres::start().await;
    let dead = format!("postgres://postgres:{PASSWORD}@127.0.0.1:1/postgres");
    let wrong = server.url().replace(PASSWORD, "another-secret");
    for (settings, arguments, expected) in [
        (vec![], vec![], 2),
        (vec![("POSTGRES_DSN", "")], vec![], 2),
        (vec![("POSTGRES_DSN", "hunter2-of-the-store")], vec![], 2),
        (vec![("POSTGRES_DSN", dead.as_str())], vec![], 1),
        (vec![], vec!["--database", dead.as_str()], 1),
        (vec![("POSTGRES_DSN", wrong.as_str())], vec![], 1),
        (vec![("POSTGRES_DSN", dead.as_str())], vec!["--help"], 0),
        (vec![("POSTGRES_DSN", dead.as_str())], vec!["--nonsense"], 2),
    ] {
        let (code, out, errors) = ended(portcullis(&settings).args(["unmetered", "list"]).args(&arguments));
        assert_eq!(code, Some(expected), "{settings:?} {arguments:?}: {errors}");
        if dead == settings.first().map_or("", |(_, url)| *url) && expected == 1 {
            assert!(errors.contains(": the connection was refused: "), "{errors}");
        }
        for text in [out, errors] {
            assert!(!text.contains(PASSWORD) && !text.contains("another-secret"), "{text}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_store_what_passed_unmetered_is_kept_and_named_as_lost_at_the_end() {
    let mut service = Service::start(config(Value::Null)).await;
    for _ in 0..3 {
        let answer = decide(&service, &request(json!([launch("admit")]))).await;
        assert_eq!(
            answer["bypassed"],
            json!([{"class": "metering_unavailable", "gate": "metering"}])
        );
    }
    let closed = decide(&service, &request(json!([launch("reject")]))).await;
    assert_eq!(closed["dependency"], "metering");
    assert_eq!(metric(&service, "portcullis_unmetered_waiting").await, 3.0);
    service.signal("TERM");
    assert_eq!(service.end().await, Some(0));
    let lost = service.line("unmetered_lost").await;
    assert_eq!(
        (lost["level"].as_str(), lost["count"].as_u64()),
        (Some("ERROR"), Some(3))
    );
}

/// A service whose policy gives the org `g` these monthly figures, over this metering store.
async fn with_plan(folder: &std::path::Path, server: &Postgres, plan: &Value) -> Service {
    let policy = json!({"plans": {"team": plan}, "orgs": {"g": {"status": "active", "plan": "team", "models": []}}});
    let file = file(folder, "policy.json", &policy.to_string());
    let mut config = config(json!(server.url()));
    config["policy"] = json!({"url": format!("file:{}", file.display())});
    // A machine under test is slow, and an admission that timed out is none.
    config["limiter"]["op_timeout_ms"] = json!(4_000);
    let service = Service::start(config).await;
    up(&service).await;
    service
}

fn quota_gates() -> Value {
    let gate = |name: &str| json!({"gate": name, "when_unavailable": "reject"});
    json!([
        gate("org_status"),
        gate("monthly_quota"),
        gate("cost_cap"),
        gate("metering")
    ])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_requests_against_ten_remaining_runs_of_the_plan_admit_ten_and_a_lowered_cap_denies() {
    let (server, folder) = (Postgres::start().await, tempfile::tempdir().unwrap());
    let service = with_plan(
        folder.path(),
        &server,
        &json!({"monthly_runs": 10, "monthly_cost": 500}),
    )
    .await;
    let ask = || {
        let mut request = request(quota_gates());
        request["budget_ms"] = json!(9_000);
        request
    };
    let requests: Vec<_> = (0..100).map(|_| ask()).collect();
    let answers = futures_util::future::join_all(requests.iter().map(|request| decide(&service, request))).await;
    let count = |word: &str| answers.iter().filter(|answer| answer["verdict"] == word).count();
    assert_eq!(
        (count("admit"), count("deny"), runs(&server).await.as_str()),
        (10, 90, "10")
    );
    let denied = answers.iter().find(|answer| answer["verdict"] == "deny").unwrap();
    let words = ["code", "gate"].map(|key| denied[key].as_str().unwrap());
    assert_eq!(words, ["RUN_QUOTA_EXCEEDED", "monthly_quota"]);
    let retry_after_s = denied["retry_after_s"].as_u64().unwrap();
    assert!((1..=31 * 86_400).contains(&retry_after_s), "{denied}");
    assert_eq!(denied["limit"]["limit"], 10);

    server.run("UPDATE portcullis_months SET cost = 400").await;
    let service = with_plan(
        folder.path(),
        &server,
        &json!({"monthly_runs": 20, "monthly_cost": 300}),
    )
    .await;
    let answer = decide(&service, &ask()).await;
    assert_eq!(
        (answer["code"].as_str(), runs(&server).await.as_str()),
        (Some("COST_CAP_EXCEEDED"), "10")
    );
    let service = with_plan(
        folder.path(),
        &server,
        &json!({"monthly_runs": 20, "monthly_cost": 401}),
    )
    .await;
    assert_eq!(decide(&service, &ask()).await["verdict"], "admit");
}
