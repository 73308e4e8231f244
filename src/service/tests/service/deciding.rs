//! `POST /v1/decide` over the limiter in memory.

use serde_json::{Value, json};

use crate::process::{Service, in_memory};
use crate::wire::{op, request};

async fn decide(service: &Service, changes: Value) -> Value {
    let answer = service.post("/v1/decide", &request(changes)).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

#[tokio::test]
async fn thirty_of_thirty_five_pass_and_the_rest_are_told_how_long_to_wait() {
    let service = Service::start(in_memory()).await;
    let mut client = service.client().await;
    for n in 1..=35_u64 {
        let request = request(json!({}));
        let answer = client.send("POST", "/v1/decide", &request.to_string()).await;
        assert!(answer.head.contains("content-type: application/json"), "{answer:?}");
        let answer = answer.json();
        assert_eq!(answer["op"], request["op"]);
        if n <= 30 {
            assert_eq!(
                (&answer["verdict"], &answer["tightest"]["remaining"]),
                (&json!("admit"), &json!(30 - n))
            );
        } else {
            assert_eq!(
                (&answer["verdict"], &answer["code"]),
                (&json!("deny"), &json!("RATE_LIMITED"))
            );
            let wait = answer["retry_after_s"].as_u64().unwrap();
            assert!((1..=60).contains(&wait), "{answer}");
            assert_eq!(answer["limit"]["scope"], "owner");
        }
    }
}

#[tokio::test]
async fn one_operation_is_charged_once_however_often_it_is_asked() {
    let service = Service::start(in_memory()).await;
    let limits = json!({"owner": {"requests": 2}});
    let op = op();
    for _ in 0..5 {
        assert_eq!(
            decide(&service, json!({"op": op, "limits": limits})).await["verdict"],
            "admit"
        );
    }
    assert_eq!(decide(&service, json!({"limits": limits})).await["verdict"], "admit");
    assert_eq!(decide(&service, json!({"limits": limits})).await["verdict"], "deny");
}

#[tokio::test]
async fn a_denied_request_charges_no_scope() {
    let service = Service::start(in_memory()).await;
    let by = |owner: &str| json!({"subject": {"owner": owner, "org": "g"}, "limits": {"owner": {"requests": 3}, "org": {"requests": 10}}});
    for n in 0..6 {
        let answer = decide(&service, by("one")).await;
        assert_eq!(answer["verdict"], if n < 3 { "admit" } else { "deny" }, "{answer}");
    }
    let answer = decide(
        &service,
        json!({"subject": {"owner": "two", "org": "g"}, "limits": {"org": {"requests": 10}}}),
    )
    .await;
    assert_eq!(answer["tightest"]["remaining"], 6);
}

#[tokio::test]
async fn capacity_answers_before_the_contract_when_both_are_exhausted() {
    let mut config = in_memory();
    config["capacity"] =
        json!({"platform": {"requests": 1}, "organization": {}, "graph": null, "lanes": {"batch": {}}});
    let service = Service::start(config).await;
    let gates =
        json!([{"gate": "capacity", "when_unavailable": "admit"}, {"gate": "contract", "when_unavailable": "admit"}]);
    let changes = json!({"gates": gates, "limits": {"owner": {"requests": 1}}});
    assert_eq!(decide(&service, changes.clone()).await["verdict"], "admit");
    let denied = decide(&service, changes).await;
    assert_eq!(
        (&denied["code"], &denied["gate"]),
        (&json!("CAPACITY_EXHAUSTED"), &json!("capacity"))
    );
    assert!(denied["retry_after_s"].as_u64().unwrap() >= 1);
    // Tiers bind only if the rules list the gate.
    assert_eq!(
        decide(&service, json!({"subject": {"owner": "p"}})).await["verdict"],
        "admit"
    );
    assert_eq!(service.line("started").await["capacity"], "platform");
}

#[tokio::test]
async fn a_spent_budget_follows_the_gates_rule_and_charges_nothing() {
    let service = Service::start(in_memory()).await;
    let open = decide(&service, json!({"budget_ms": 0})).await;
    assert_eq!(
        open["bypassed"],
        json!([{"class": "limiter_unavailable", "gate": "contract"}])
    );
    let gates = json!([{"gate": "contract", "when_unavailable": "reject"}]);
    let closed = decide(&service, json!({"budget_ms": 0, "gates": gates})).await;
    assert_eq!(
        (&closed["verdict"], &closed["dependency"], &closed["gate"]),
        (&json!("unavailable"), &json!("limiter"), &json!("contract"))
    );
    assert_eq!(decide(&service, json!({})).await["tightest"]["remaining"], 29);
    let line = service.line("bypassed").await;
    assert_eq!(
        (
            &line["message"],
            &line["level"],
            &line["class"],
            &line["action"],
            &line["request_id"],
            &line["dependency"]
        ),
        (
            &json!("fail-open, contract unchecked"),
            &json!("WARN"),
            &json!("limiter_unavailable"),
            &json!("admit"),
            &json!("r-1"),
            &json!("limiter")
        )
    );
    assert_eq!(service.line("short_budget").await["level"], "WARN");
}

#[tokio::test]
async fn what_cannot_be_read_is_400_with_the_reason() {
    let service = Service::start(in_memory()).await;
    let nested = json!([{"gate": "contract", "when_unavailable": "admit", "limit": 1}]);
    for (changes, reason) in [
        (json!({"leases": 1}), "unknown field `leases`"),
        (json!({"gates": nested}), "unknown field `limit`"),
        (
            json!({"gates": [{"gate": "banana", "when_unavailable": "admit"}]}),
            "unknown variant `banana`",
        ),
        (json!({"gates": []}), "no gate is listed"),
        (json!({"op": "1"}), "32 lower-case hexadecimal digits"),
        (json!({"profile": "banana"}), "unknown variant `banana`"),
        (
            json!({"limits": {"org": {"requests": 1}}}),
            "limits.org without subject.org",
        ),
        (json!({"limits": {"owner": {"requests": -1}}}), "invalid value"),
        (json!({"window_s": 0}), "window_s is not from 1 to 86400"),
    ] {
        let answer = service.post("/v1/decide", &request(changes)).await;
        assert_eq!(answer.status, 400, "{answer:?}");
        let said = answer.json()["error"].as_str().unwrap().to_owned();
        assert!(said.contains(reason), "{reason}: {said}");
    }
    let line = service.line("request_refused").await;
    assert_eq!(
        (&line["level"], &line["class"]),
        (&json!("WARN"), &json!("decision_unavailable"))
    );
    assert!(
        line["message"].as_str().unwrap().contains("unknown field `leases`"),
        "{line}"
    );
    for body in ["", "{", "[]", "null"] {
        assert_eq!(
            service.client().await.send("POST", "/v1/decide", body).await.status,
            400,
            "{body}"
        );
    }
}

#[tokio::test]
async fn a_body_over_64_kib_is_refused_and_the_service_goes_on() {
    let service = Service::start(in_memory()).await;
    let answer = service
        .post("/v1/decide", &request(json!({"rules": "x".repeat(64 * 1024)})))
        .await;
    assert_eq!(answer.status, 413);
    assert!(answer.json()["error"].is_string());
    assert_eq!(
        decide(&service, json!({"rules": "x".repeat(32 * 1024)})).await["verdict"],
        "admit"
    );
}

#[tokio::test]
async fn a_filter_of_another_profile_is_not_answered_and_the_log_names_both() {
    let service = Service::start(in_memory()).await;
    for _ in 0..3 {
        let answer = service
            .post("/v1/decide", &request(json!({"profile": "production"})))
            .await;
        assert_eq!(answer.status, 503);
    }
    let settled = service.post("/v1/settle", &json!({"profile": "staging"})).await;
    assert_eq!(settled.status, 503);
    let line = service.line("profile_mismatch").await;
    let message = line["message"].as_str().unwrap();
    assert_eq!(line["level"], "ERROR");
    assert!(
        message.contains("production") && message.contains("development"),
        "{message}"
    );
    // The others are told by one line, a second later.
    crate::process::until("the rest", async || {
        let lines = service.lines();
        let counts = lines.iter().filter(|line| line["event"] == "profile_mismatch");
        let told: u64 = counts.map(|line| line["count"].as_u64().unwrap_or(1)).sum();
        (told == 4).then_some(())
    })
    .await;
    assert_eq!(
        service
            .lines()
            .iter()
            .filter(|line| line["event"] == "profile_mismatch")
            .count(),
        2
    );
}

#[tokio::test]
async fn without_a_limiter_every_verdict_and_the_log_say_that_nothing_is_enforced() {
    let service = Service::start(json!({"profile": "development", "listen": "127.0.0.1:0"})).await;
    let line = service.line("unenforced").await;
    assert_eq!(line["level"], "ERROR");
    assert!(
        line["message"]
            .as_str()
            .unwrap()
            .contains("contract limits are not enforced")
    );
    for _ in 0..40 {
        let answer = decide(&service, json!({})).await;
        assert_eq!(
            (&answer["verdict"], &answer["unenforced"]),
            (&json!("admit"), &json!(true))
        );
    }
    assert_eq!(service.get("/live").await.status, 200);
    let ready = service.get("/ready").await;
    assert_eq!(
        (ready.status, &ready.json()["dependencies"]["limiter"]["state"]),
        (503, &json!("absent"))
    );
    let metrics = service.get("/metrics").await.body;
    assert!(metrics.contains("portcullis_unenforced_total 40\n"), "{metrics}");
    assert!(metrics.contains("portcullis_limits_enforced 0\n"), "{metrics}");
}
