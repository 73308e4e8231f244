//! What the service answers by the policy of a database, how often it asks, and how soon it follows.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::time::Instant;

use crate::policies::{becomes, config, decide, metric, policy, put, state, state_becomes};
use crate::postgres::{PASSWORD, PgBouncer, Postgres};
use crate::process::Service;
use crate::stores::eventually;
use crate::wire::request;

const EVERY_ANSWER: [(&str, &str, &str); 8] = [
    ("good", "gpt-4o", "admit"),
    ("good", "claude-opus", "admit"),
    ("good", "gpt-5", "MODEL_NOT_ALLOWED"),
    ("good", "mistral", "PROVIDER_NOT_CONFIGURED"),
    ("suspended", "gpt-4o", "ORG_SUSPENDED"),
    ("reader", "gpt-4o", "ORG_READ_ONLY"),
    ("nobody", "gpt-4o", "ORG_UNKNOWN"),
    ("blocked", "gpt-4o", "RATE_LIMITED"),
];

#[tokio::test]
async fn every_answer_of_a_policy_has_its_code() {
    let database = Postgres::start().await;
    put(&database.url(), &policy());
    let service = Service::start(config(&database.url(), 60_000)).await;
    becomes(&service, "good", "gpt-4o", "admit").await;
    for (org, model, expected) in EVERY_ANSWER {
        assert_eq!(decide(&service, org, model).await, expected, "{org} {model}");
    }
    state_becomes(&service, "up").await;
    assert_eq!(metric(&service, "portcullis_policy_enforced").await, 1);
    assert_eq!(
        metric(&service, "portcullis_dependency_up{dependency=\"policy\"}").await,
        1
    );
    let line = service.line("denied").await;
    assert_eq!(
        (&line["gate"], &line["code"]),
        (&json!("model_policy"), &json!("MODEL_NOT_ALLOWED"))
    );
}

#[tokio::test]
async fn ids_that_look_like_statements_are_only_ids() {
    let database = Postgres::start().await;
    let id = r#"o'; DROP TABLE portcullis_orgs; -- "\ é"#;
    let mut policy = policy();
    policy["orgs"][id] = json!({"status": "active", "models": ["gpt-4o"]});
    put(&database.url(), &policy);
    let service = Service::start(config(&database.url(), 60_000)).await;
    becomes(&service, id, "gpt-4o", "admit").await;
    assert_eq!(decide(&service, "O'", "gpt-4o").await, "ORG_UNKNOWN");
}

#[tokio::test]
async fn everything_works_by_way_of_a_pgbouncer_that_shares_one_connection() {
    let database = Postgres::start().await;
    let Some(bouncer) = PgBouncer::start(&database).await else {
        eprintln!("skipped: pgbouncer is not installed");
        return;
    };
    let url = database.url_at(bouncer.port);
    let empty = Service::start(config(&url, 60_000)).await;
    state_becomes(&empty, "up").await;
    put(&url, &policy());
    let services = [
        Service::start(config(&url, 60_000)).await,
        Service::start(config(&url, 60_000)).await,
    ];
    for service in &services {
        becomes(service, "good", "gpt-4o", "admit").await;
    }
    for (org, model, expected) in EVERY_ANSWER {
        for service in &services {
            assert_eq!(decide(service, org, model).await, expected, "{org} {model}");
        }
    }
}

#[tokio::test]
async fn two_hundred_cold_requests_at_once_make_one_query_for_each_key() {
    let database = Postgres::start().await;
    put(&database.url(), &policy());
    let service = Arc::new(Service::start(config(&database.url(), 60_000)).await);
    let requests: Vec<_> = (0..200)
        .map(|_| {
            let service = Arc::clone(&service);
            tokio::spawn(async move { decide(&service, "good", "gpt-4o").await })
        })
        .collect();
    for request in requests {
        assert_eq!(request.await.unwrap(), "admit");
    }
    assert_eq!(database.statements("FROM portcullis_orgs o"), 1);
    assert_eq!(
        database.statements("FROM portcullis_providers"),
        1 + database.statements("FROM portcullis_prices")
    );
    let [hits, misses] = [
        metric(&service, "portcullis_policy_lookups_total{outcome=\"hit\"}").await,
        metric(&service, "portcullis_policy_lookups_total{outcome=\"miss\"}").await,
    ];
    assert_eq!(hits + misses, 400);
    assert!(misses > 0);
}

#[tokio::test]
async fn revoking_suspending_and_lowering_a_cap_take_effect_within_the_staleness() {
    let database = Postgres::start().await;
    put(&database.url(), &policy());
    let service = Service::start(config(&database.url(), 1_000)).await;
    becomes(&service, "good", "gpt-4o", "admit").await;
    let mut changed = policy();
    let changes = [
        ("/orgs/good/models", json!(["claude-*"]), "MODEL_NOT_ALLOWED"),
        ("/orgs/good/models", json!(["gpt-4o"]), "admit"),
        ("/orgs/good/status", json!("suspended"), "ORG_SUSPENDED"),
        ("/orgs/good/status", json!("active"), "admit"),
        ("/plans/team/requests", json!(0), "RATE_LIMITED"),
    ];
    for (pointer, value, expected) in changes {
        *changed.pointer_mut(pointer).unwrap() = value;
        put(&database.url(), &changed);
        let start = Instant::now();
        becomes(&service, "good", "gpt-4o", expected).await;
        assert!(
            start.elapsed() < Duration::from_millis(1_000 + 2_000),
            "{expected}: {:?}",
            start.elapsed()
        );
    }
}

#[tokio::test]
async fn services_that_start_at_once_on_an_empty_database_share_its_tables() {
    let database = Postgres::start().await;
    let services = [
        Service::start(config(&database.url(), 2_000)).await,
        Service::start(config(&database.url(), 2_000)).await,
        Service::start(config(&database.url(), 2_000)).await,
        Service::start(config(&database.url(), 2_000)).await,
    ];
    for service in &services {
        state_becomes(service, "up").await;
        becomes(service, "good", "gpt-4o", "ORG_UNKNOWN").await;
    }
    let versions = database
        .run("SELECT count(*), max(version) FROM portcullis_migrations")
        .await;
    assert_eq!(versions[0][0], versions[0][1]);
    let migrated = services
        .iter()
        .filter(|service| service.log().contains("\"migrated\""))
        .count();
    assert_eq!(migrated, 1);
}

#[tokio::test]
async fn a_user_without_the_right_to_create_tables_uses_those_that_are_there() {
    let database = Postgres::start().await;
    put(&database.url(), &policy());
    let create =
        format!("CREATE USER reader PASSWORD '{PASSWORD}'; GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader");
    database.run(&create).await;
    database.run("CREATE DATABASE empty").await;
    let url = database.url().replace("//postgres:", "//reader:");
    let service = Service::start(config(&url, 2_000)).await;
    becomes(&service, "good", "gpt-4o", "admit").await;
    state_becomes(&service, "up").await;

    let without = Service::start(config(&url.replace("/postgres", "/empty"), 2_000)).await;
    eventually("the fault is named", async || {
        let body = without.get("/ready").await.json();
        let policy = &body["dependencies"]["policy"];
        (policy["state"] == "down" && policy["detail"] == "the store refused access").then_some(())
    })
    .await;
    assert_eq!(state(&without).await, "down");
}

#[tokio::test]
async fn a_cap_needs_the_price_of_a_model_which_is_the_closest_of_the_list() {
    let database = Postgres::start().await;
    let mut policy = policy();
    policy["plans"]["team"]["monthly_cost"] = json!(1_000_000);
    put(&database.url(), &policy);
    let mut config = config(&database.url(), 1_000);
    config["metering"] = json!({"url": "memory:"});
    let service = Service::start(config).await;
    state_becomes(&service, "up").await;
    let ask = async |org: &str, model: Option<&str>| {
        let gates = json!([
            {"gate": "cost_cap", "when_unavailable": "reject"}, {"gate": "metering", "when_unavailable": "reject"}
        ]);
        let mut body = request(json!({
            "rules": "capped", "gates": gates, "subject": {"owner": "o", "org": org}, "limits": {}, "budget_ms": 5_000
        }));
        if let Some(model) = model {
            body["subject"]["model"] = json!(model);
        }
        let answer = service.post("/v1/decide", &body).await.json();
        let words = ["verdict", "dependency", "gate"].map(|key| answer[key].as_str().unwrap_or("").to_owned());
        words.join(" ").trim_end().to_owned()
    };
    const UNPRICED: &str = "unavailable policy cost_cap";
    assert_eq!(ask("good", Some("gpt-4o")).await, "admit");
    assert_eq!(ask("good", Some("claude-opus")).await, UNPRICED);
    assert_eq!(ask("good", None).await, "admit");
    assert_eq!(
        ask("blocked", Some("claude-opus")).await,
        "admit",
        "a plan without a cap"
    );
    policy["prices"]["claude-*"] = json!({"input": 1, "output": 1});
    put(&database.url(), &policy);
    eventually("the new price counts", async || {
        (ask("good", Some("claude-opus")).await == "admit").then_some(())
    })
    .await;
    database
        .run("ALTER TABLE portcullis_prices RENAME TO portcullis_prices_gone")
        .await;
    eventually("the list is stale", async || {
        (ask("good", Some("gpt-4o")).await == UNPRICED).then_some(())
    })
    .await;
    assert_eq!(ask("good", None).await, "admit");
}
