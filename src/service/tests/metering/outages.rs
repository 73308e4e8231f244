//! The service over a PostgreSQL that is killed, frozen or restarted: closed or open by the rules, within the budget, and
//! every run billed exactly once afterwards.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;

use crate::billing::{config, decide, launch, metric, request, runs, settle, start, up};
use crate::postgres::{PASSWORD, Postgres};
use crate::process::Service;
use crate::stores::eventually;

/// The budget of a request, and what a loaded machine may add.
const SOON: Duration = Duration::from_secs(3);

fn is_bypassed(answer: &Value) -> bool {
    answer["bypassed"] == json!([{"class": "metering_unavailable", "gate": "metering"}])
}

/// Opened and closed requests during an outage; returns how many passed.
async fn during(service: &Service) -> usize {
    let mut passed = 0;
    for _ in 0..8 {
        let asked = Instant::now();
        let open = decide(service, &request(json!([launch("admit")]))).await;
        assert!(is_bypassed(&open), "{open}");
        passed += 1;
        let closed = decide(service, &request(json!([launch("reject")]))).await;
        let verdict =
            json!({"op": closed["op"], "verdict": "unavailable", "dependency": "metering", "gate": "metering"});
        assert_eq!(closed, verdict);
        assert!(asked.elapsed() < SOON * 2, "{:?}", asked.elapsed());
    }
    passed
}

async fn billed(server: &Postgres, service: &Service, expected: usize) {
    eventually("every run is billed", async || {
        let all_told = metric(service, "portcullis_unmetered_waiting").await == 0.0;
        (all_told && runs(server).await == expected.to_string()).then_some(())
    })
    .await;
}

fn assert_no_secrets(service: &Service) {
    let log = service.log();
    assert!(!log.contains(PASSWORD) && !log.contains("postgres://"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_postgres_is_metering_unavailable_and_what_passed_is_billed_after_its_return() {
    let mut server = Postgres::start().await;
    let service = start(&server).await;
    assert_eq!(
        decide(&service, &request(json!([launch("admit")]))).await["bypassed"],
        Value::Null
    );
    server.kill();
    let passed = during(&service).await;
    assert_eq!(metric(&service, "portcullis_unmetered_waiting").await, 8.0);
    let line = service
        .lines()
        .into_iter()
        .find(|line| line["event"] == "bypassed")
        .unwrap();
    let expected = [
        "fail-open, launch unmetered",
        "metering_unavailable",
        "metering",
        "WARN",
        "g",
        "r-1",
    ];
    let keys = ["message", "class", "gate", "level", "org", "request_id"];
    assert_eq!(keys.map(|key| line[key].as_str().unwrap()), expected);
    let down = eventually("metering is down", async || {
        let metering = service.get("/ready").await.json()["dependencies"]["metering"].clone();
        (metering["state"] == "down").then_some(metering)
    })
    .await;
    assert!(
        down["since"].is_string() && !down["detail"].as_str().unwrap().contains("127.0.0.1"),
        "{down}"
    );
    assert_eq!(
        metric(&service, "portcullis_dependency_up{dependency=\"metering\"}").await,
        0.0
    );
    server.restart().await;
    billed(&server, &service, passed + 1).await;
    up(&service).await;
    assert_eq!(
        server.run("SELECT count(*) FROM portcullis_unmetered").await[0][0],
        passed.to_string()
    );
    assert_eq!(
        decide(&service, &request(json!([launch("reject")]))).await["verdict"],
        "admit"
    );
    assert_eq!(metric(&service, "portcullis_unmetered_total").await, 8.0);
    eventually("every bypass has been said", async || {
        let lines = service.lines().into_iter().filter(|line| line["event"] == "bypassed");
        let counts: Vec<u64> = lines.map(|line| line["count"].as_u64().unwrap_or(1)).collect();
        (counts.iter().sum::<u64>() == 8).then_some(())
    })
    .await;
    assert_no_secrets(&service);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_postgres_costs_no_more_than_the_budget_and_no_run_is_billed_twice() {
    let server = Postgres::start().await;
    let service = start(&server).await;
    assert_eq!(
        decide(&service, &request(json!([launch("admit")]))).await["bypassed"],
        Value::Null
    );
    server.freeze();
    let passed = during(&service).await;
    server.thaw();
    billed(&server, &service, passed + 1).await;
    // What was recorded while nobody listened any more has been given back by now, or is.
    up(&service).await;
    eventually("nothing is left of the closed requests", async || {
        let recorded = server
            .run("SELECT count(*) FROM portcullis_operations WHERE state = 'recorded'")
            .await;
        (recorded[0][0] == "1" && runs(&server).await == (passed + 1).to_string()).then_some(())
    })
    .await;
    assert_eq!(
        server.run("SELECT count(*) FROM portcullis_unmetered").await[0][0],
        passed.to_string()
    );
    // On a loaded machine some run out of time before anything is asked.
    let mut errors = 0.0;
    for kind in ["timeout", "budget_spent"] {
        let name = format!("portcullis_dependency_errors_total{{dependency=\"metering\",kind=\"{kind}\"}}");
        errors += metric(&service, &name).await;
    }
    assert!(errors >= 16.0, "{errors}");
    assert_no_secrets(&service);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_under_load_bills_exactly_what_was_admitted() {
    let mut server = Postgres::start().await;
    let service = start(&server).await;
    let end = Instant::now() + Duration::from_millis(2_500);
    let load = async {
        let workers = (0..6).map(|_| async {
            let mut client = service.client().await;
            let (mut open, mut closed) = (0_usize, 0_usize);
            while Instant::now() < end {
                for when_unavailable in ["admit", "reject"] {
                    let body = request(json!([launch(when_unavailable)])).to_string();
                    let answer = client.send("POST", "/v1/decide", &body).await.json();
                    match (when_unavailable, answer["verdict"].as_str()) {
                        ("admit", Some("admit")) => open += 1,
                        ("reject", Some("admit")) => closed += 1,
                        ("reject", Some("unavailable")) => assert_eq!(answer["dependency"], "metering"),
                        other => panic!("{other:?} {answer}"),
                    }
                }
            }
            open + closed
        });
        futures_util::future::join_all(workers).await.into_iter().sum::<usize>()
    };
    let trouble = async {
        for _ in 0..3 {
            tokio::time::sleep(Duration::from_millis(300)).await;
            server.terminate_backends().await;
        }
        server.kill();
        server.restart().await;
    };
    let (admitted, ()) = tokio::join!(load, trouble);
    eventually("the books are even", async || {
        let all_told = metric(&service, "portcullis_unmetered_waiting").await == 0.0;
        (all_told && runs(&server).await == admitted.to_string()).then_some(())
    })
    .await;
    assert_no_secrets(&service);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_ends_delivers_its_journal_first_and_says_what_it_could_not() {
    let mut server = Postgres::start().await;
    let mut service = start(&server).await;
    server.kill();
    decide(&service, &request(json!([launch("admit")]))).await;
    let voided = request(json!([launch("admit")]));
    assert!(is_bypassed(&decide(&service, &voided).await));
    settle(&service, json!({"cancels": [voided["op"]]})).await;
    eventually("the voided run waits no more", async || {
        (metric(&service, "portcullis_unmetered_waiting").await == 1.0).then_some(())
    })
    .await;
    server.restart().await;
    service.signal("TERM");
    assert_eq!(service.end().await, Some(0));
    assert_eq!(runs(&server).await, "1");
    assert!(!service.log().contains("unmetered_lost"), "{}", service.log());

    let mut service = start(&server).await;
    server.kill();
    decide(&service, &request(json!([launch("admit")]))).await;
    service.signal("TERM");
    assert_eq!(service.end().await, Some(0));
    assert_eq!(service.line("unmetered_lost").await["count"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_starts_before_its_database_recovers_by_itself() {
    let mut server = Postgres::start().await;
    server.kill();
    let service = Service::start(config(json!(server.url()))).await;
    assert!(is_bypassed(&decide(&service, &request(json!([launch("admit")]))).await));
    server.restart().await;
    billed(&server, &service, 1).await;
    assert_eq!(
        decide(&service, &request(json!([launch("reject")]))).await["verdict"],
        "admit"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_password_is_an_outage_with_a_kind_and_shows_no_secret() {
    let server = Postgres::start().await;
    let service = Service::start(config(json!(server.url().replace(PASSWORD, "another-secret")))).await;
    let closed = decide(&service, &request(json!([launch("reject")]))).await;
    assert_eq!(
        (closed["verdict"].as_str(), closed["dependency"].as_str()),
        (Some("unavailable"), Some("metering"))
    );
    eventually("its kind is counted", async || {
        let name = "portcullis_dependency_errors_total{dependency=\"metering\",kind=\"access_denied\"}";
        (metric(&service, name).await >= 1.0).then_some(())
    })
    .await;
    assert!(!service.log().contains("another-secret"));
}
