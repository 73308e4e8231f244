//! A database that is wrong, slow, full, killed or gone: an outage with its name, never a denial, never a 500; and its
//! password shows nowhere.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep};

use crate::policies::{
    UNKNOWABLE, becomes, config, decide, decide_within, errors, metric, policy, put, state, state_becomes,
};
use crate::postgres::{PASSWORD, Postgres};
use crate::process::Service;
use crate::stores::{eventually, free_port};
use crate::wire::request;

/// Starts at the loudest, and with the address where no file shows it.
async fn start(url: &str, max_staleness_ms: u64) -> Service {
    start_at("trace", url, max_staleness_ms).await
}

async fn start_at(level: &str, url: &str, max_staleness_ms: u64) -> Service {
    let mut config: Value = config("postgres://elsewhere/unused", max_staleness_ms);
    config["limiter"]["op_timeout_ms"] = json!(200);
    Service::start_with(config, &[], &[("POSTGRES_DSN", url), ("RUST_LOG", level)]).await
}

async fn says_nothing_secret(service: &Service) {
    let said = [
        service.log(),
        service.get("/metrics").await.body,
        service.get("/ready").await.body,
    ];
    for text in said {
        assert!(!text.contains(PASSWORD) && !text.contains("wrong-secret"), "{text}");
        assert!(
            !text.contains("FATAL") && !text.contains("terminating connection"),
            "the database's words: {text}"
        );
    }
}

#[tokio::test]
async fn an_address_that_leads_nowhere_is_an_outage_that_names_its_kind() {
    let database = Postgres::start().await;
    put(&database.url(), &policy());
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent_port = silent.local_addr().unwrap().port();
    let cases = [
        (database.url().replace(PASSWORD, "wrong-secret"), "access_denied"),
        (database.url().replace("//postgres:", "//stranger:"), "access_denied"),
        (
            database
                .url()
                .replace("/postgres", "/nowhere")
                .replace("//nowhere", "//postgres"),
            "connection",
        ),
        (database.url_at(free_port()), "connection"),
        (database.url_at(silent_port), "timeout"),
    ];
    for (url, kind) in cases {
        let service = start(&url, 2_000).await;
        assert_eq!(decide(&service, "good", "gpt-4o").await, UNKNOWABLE, "{kind}");
        eventually(kind, async || (errors(&service, kind).await > 0).then_some(())).await;
        let ready = service.get("/ready").await;
        assert_eq!((ready.status, state(&service).await.as_str()), (503, "down"));
        assert_eq!(metric(&service, "portcullis_policy_enforced").await, 0);
        let line = eventually("a line", async || {
            let is_it = |line: &Value| line["class"] == "policy_unavailable" && line["kind"] == kind;
            service.lines().into_iter().find(is_it)
        })
        .await;
        assert_eq!(
            (&line["dependency"], &line["event"]),
            (&json!("policy"), &json!("dependency_error"))
        );
        says_nothing_secret(&service).await;
    }
}

#[tokio::test]
async fn a_hung_server_is_unavailable_in_time_and_its_return_is_noticed() {
    let database = Postgres::start().await;
    put(&database.url(), &policy());
    let service = start(&database.url(), 300).await;
    becomes(&service, "good", "gpt-4o", "admit").await;
    database.freeze();
    becomes(&service, "good", "gpt-4o", UNKNOWABLE).await;
    for _ in 0..3 {
        let start = Instant::now();
        assert_eq!(decide_within(&service, "good", "gpt-4o", 220).await, UNKNOWABLE);
        assert!(
            start.elapsed() < Duration::from_millis(220 + 2_000),
            "{:?}",
            start.elapsed()
        );
    }
    // A cold one, and one that is known to be refused.
    assert_eq!(decide(&service, "nobody", "gpt-4o").await, UNKNOWABLE);
    assert_eq!(decide(&service, "suspended", "gpt-4o").await, UNKNOWABLE);
    state_becomes(&service, "down").await;
    database.thaw();
    becomes(&service, "good", "gpt-4o", "admit").await;
    becomes(&service, "suspended", "gpt-4o", "ORG_SUSPENDED").await;
    state_becomes(&service, "up").await;
    says_nothing_secret(&service).await;
}

#[tokio::test]
async fn a_hung_policy_store_leaves_the_limiter_the_time_it_needs() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!(
        "postgres://u:{PASSWORD}@127.0.0.1:{}/d",
        silent.local_addr().unwrap().port()
    );
    let mut config = config(&url, 2_000);
    config["limiter"]["op_timeout_ms"] = json!(100);
    let service = Service::start(config).await;
    let gates = json!([
        {"gate": "org_status", "when_unavailable": "admit"}, {"gate": "contract", "when_unavailable": "reject"}
    ]);
    let request = || {
        request(json!({
            "gates": gates, "subject": {"owner": "o", "org": "good"}, "limits": {"owner": {"requests": 1}}, "budget_ms": 500
        }))
    };
    let admitted = service.post("/v1/decide", &request()).await.json();
    assert_eq!(
        admitted["bypassed"],
        json!([{"class": "policy_unavailable", "gate": "org_status"}])
    );
    let denied = service.post("/v1/decide", &request()).await.json();
    assert_eq!(
        (&denied["code"], &denied["gate"]),
        (&json!("RATE_LIMITED"), &json!("contract"))
    );
}

#[tokio::test]
async fn a_server_without_free_connections_is_unavailable() {
    let database = Postgres::start_with(&["max_connections=5", "superuser_reserved_connections=1"]).await;
    put(&database.url(), &policy());
    database
        .run(&format!(
            "CREATE USER guest PASSWORD '{PASSWORD}'; GRANT pg_read_all_data TO guest"
        ))
        .await;
    let url = database.url().replace("//postgres:", "//guest:");
    let mut others = Vec::new();
    for _ in 0..4 {
        let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        others.push(client);
    }
    let service = start(&url, 2_000).await;
    assert_eq!(decide(&service, "good", "gpt-4o").await, UNKNOWABLE);
    eventually("the kind", async || {
        (errors(&service, "pool_exhausted").await > 0).then_some(())
    })
    .await;
    says_nothing_secret(&service).await;
    drop(others);
    becomes(&service, "good", "gpt-4o", "admit").await;
}

#[tokio::test]
async fn backends_killed_under_load_cost_no_denial_and_no_error() {
    let database = Postgres::start().await;
    put(&database.url(), &policy());
    // So short that nearly every request asks.
    let service = start_at("info", &database.url(), 5).await;
    becomes(&service, "good", "gpt-4o", "admit").await;
    let end = Instant::now() + Duration::from_secs(2);
    let mut admitted = 0;
    while Instant::now() < end {
        database.terminate_backends().await;
        for _ in 0..5 {
            let answer = decide(&service, "good", "gpt-4o").await;
            assert!(answer == "admit" || answer == UNKNOWABLE, "{answer}");
            admitted += usize::from(answer == "admit");
        }
    }
    assert!(admitted > 0);
    // No library speaks for itself.
    assert!(
        service.lines().iter().all(|line| line["event"].is_string()),
        "{}",
        service.log()
    );
    becomes(&service, "good", "gpt-4o", "admit").await;
    says_nothing_secret(&service).await;
}

#[tokio::test]
async fn a_database_that_is_off_for_a_while_right_after_a_miss_causes_no_lasting_denial() {
    let mut database = Postgres::start().await;
    put(&database.url(), &policy());
    let service = start(&database.url(), 60_000).await;
    state_becomes(&service, "up").await;
    database.kill();
    assert_eq!(decide(&service, "good", "gpt-4o").await, UNKNOWABLE);
    // What it would take an operator to restart it; requests go on coming.
    let end = Instant::now() + Duration::from_secs(5);
    while Instant::now() < end {
        assert_eq!(decide(&service, "good", "gpt-4o").await, UNKNOWABLE);
        sleep(Duration::from_millis(20)).await;
    }
    database.restart().await;
    let start = Instant::now();
    becomes(&service, "good", "gpt-4o", "admit").await;
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    assert!(errors(&service, "connection").await > 0);
    says_nothing_secret(&service).await;
}

#[tokio::test]
async fn what_is_freshly_known_counts_while_the_database_is_gone_and_nothing_that_is_stale() {
    let mut database = Postgres::start().await;
    put(&database.url(), &policy());
    let (fresh, stale) = (start(&database.url(), 60_000).await, start(&database.url(), 300).await);
    let known = [
        ("good", "admit"),
        ("suspended", "ORG_SUSPENDED"),
        ("nobody", "ORG_UNKNOWN"),
    ];
    for service in [&fresh, &stale] {
        for (org, expected) in known {
            becomes(service, org, "gpt-4o", expected).await;
        }
    }
    database.kill();
    state_becomes(&fresh, "down").await;
    for (org, expected) in known {
        assert_eq!(decide(&fresh, org, "gpt-4o").await, expected);
        becomes(&stale, org, "gpt-4o", UNKNOWABLE).await;
        assert_eq!(decide(&stale, org, "gpt-4o").await, UNKNOWABLE);
    }
    assert_eq!(
        decide(&fresh, "blocked", "gpt-4o").await,
        UNKNOWABLE,
        "not asked about before"
    );
    assert_eq!(metric(&fresh, "portcullis_policy_enforced").await, 0);
}

#[tokio::test]
async fn a_service_starts_without_its_database_and_finds_it_later() {
    let mut database = Postgres::start().await;
    database.kill();
    let service = start(&database.url(), 2_000).await;
    assert_eq!(decide(&service, "good", "gpt-4o").await, UNKNOWABLE);
    assert_eq!(state(&service).await, "down");
    assert_eq!(service.get("/live").await.status, 200);
    database.restart().await;
    state_becomes(&service, "up").await;
    becomes(&service, "good", "gpt-4o", "ORG_UNKNOWN").await;
    put(&database.url(), &policy());
    becomes(&service, "good", "gpt-4o", "admit").await;
}

#[tokio::test]
async fn a_lock_on_the_tables_is_an_outage_and_not_a_denial() {
    let database = Postgres::start().await;
    put(&database.url(), &policy());
    let service = start(&database.url(), 300).await;
    becomes(&service, "good", "gpt-4o", "admit").await;
    let url = format!("{}?sslmode=disable", database.url());
    let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    client.batch_execute("BEGIN; LOCK TABLE portcullis_orgs").await.unwrap();
    becomes(&service, "good", "gpt-4o", UNKNOWABLE).await;
    client.batch_execute("COMMIT").await.unwrap();
    becomes(&service, "good", "gpt-4o", "admit").await;
}
