//! `POST /v1/settle`: cancels in any order, releases, settlements, renewals and the ones that came too late.

use serde_json::{Value, json};

use crate::process::{Service, in_memory};
use crate::wire::{op, request};

async fn decide(service: &Service, op: &str, limits: Value) -> Value {
    service
        .post("/v1/decide", &request(json!({"op": op, "limits": {"owner": limits}})))
        .await
        .json()
}

async fn settle(service: &Service, mut batch: Value) -> Value {
    batch["profile"] = json!("development");
    let answer = service.post("/v1/settle", &batch).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

#[tokio::test]
async fn a_cancel_gives_back_what_was_charged() {
    let service = Service::start(in_memory()).await;
    let (first, second) = (op(), op());
    assert_eq!(
        decide(&service, &first, json!({"requests": 1})).await["verdict"],
        "admit"
    );
    for _ in 0..2 {
        assert_eq!(settle(&service, json!({"cancels": [first]})).await, json!({}));
    }
    assert_eq!(
        decide(&service, &second, json!({"requests": 1})).await["verdict"],
        "admit"
    );
    assert_eq!(decide(&service, &op(), json!({"requests": 1})).await["verdict"], "deny");
}

#[tokio::test]
async fn a_decision_that_arrives_after_its_cancel_charges_nothing() {
    let service = Service::start(in_memory()).await;
    let late = op();
    settle(&service, json!({"cancels": [late]})).await;
    let closed = json!([{"gate": "contract", "when_unavailable": "reject"}]);
    let asked = request(json!({"op": late, "gates": closed, "limits": {"owner": {"requests": 1}}}));
    let answer = service.post("/v1/decide", &asked).await.json();
    assert_eq!(
        (&answer["verdict"], &answer["dependency"]),
        (&json!("unavailable"), &json!("limiter"))
    );
    assert_eq!(
        decide(&service, &op(), json!({"requests": 1})).await["verdict"],
        "admit"
    );
}

#[tokio::test]
async fn a_slot_is_free_again_when_it_is_released() {
    let service = Service::start(in_memory()).await;
    let holder = op();
    let admitted = decide(&service, &holder, json!({"concurrency": 1})).await;
    assert_eq!(admitted["slot_ttl_ms"], 30_000);
    let denied = decide(&service, &op(), json!({"concurrency": 1})).await;
    assert_eq!(
        (&denied["code"], &denied["retry_after_s"]),
        (&json!("CONCURRENCY_LIMITED"), &json!(1))
    );
    settle(&service, json!({"releases": [holder]})).await;
    assert_eq!(
        decide(&service, &op(), json!({"concurrency": 1})).await["verdict"],
        "admit"
    );
}

/// A decision about so many of the owner's hundred tokens.
async fn hold(service: &Service, op: &str, tokens: u64) -> Value {
    let changes = json!({"op": op, "tokens": tokens, "limits": {"owner": {"tokens": 100, "concurrency": 2}}});
    service.post("/v1/decide", &request(changes)).await.json()
}

#[tokio::test]
async fn a_settlement_gives_back_what_was_held_and_not_used_once_and_frees_the_slot() {
    let service = Service::start(in_memory()).await;
    let (first, second) = (op(), op());
    let admitted = hold(&service, &first, 60).await;
    assert_eq!(
        (&admitted["verdict"], &admitted["held_tokens"]),
        (&json!("admit"), &json!(60))
    );
    assert_eq!(hold(&service, &op(), 50).await["code"], "TOKENS_LIMITED");
    for tokens in [10, 0, 90] {
        let answer = settle(&service, json!({"settles": [{"op": first, "tokens": tokens}]})).await;
        assert_eq!(answer, json!({}), "{tokens}");
    }
    let admitted = hold(&service, &second, 50).await;
    assert_eq!(admitted["verdict"], "admit");
    assert_eq!(admitted["tightest"]["remaining"], 40);
    // Both slots would be taken had the settlement not freed one.
    assert_eq!(hold(&service, &op(), 40).await["verdict"], "admit");
    assert_eq!(hold(&service, &op(), 0).await["code"], "CONCURRENCY_LIMITED");
}

#[tokio::test]
async fn a_settlement_above_the_hold_is_charged_over_the_limit_and_a_cancel_gives_it_back() {
    let service = Service::start(in_memory()).await;
    let greedy = op();
    assert_eq!(hold(&service, &greedy, 10).await["verdict"], "admit");
    settle(&service, json!({"settles": [{"op": greedy, "tokens": 500}]})).await;
    let denied = hold(&service, &op(), 1).await;
    assert_eq!(
        (&denied["code"], &denied["limit"]["remaining"]),
        (&json!("TOKENS_LIMITED"), &json!(0))
    );
    settle(&service, json!({"cancels": [greedy]})).await;
    assert_eq!(hold(&service, &op(), 100).await["verdict"], "admit");
}

#[tokio::test]
async fn one_batch_may_release_settle_cancel_and_renew_and_a_settlement_without_tokens_keeps_the_hold() {
    let service = Service::start(in_memory()).await;
    let [released, silent, settled, cancelled, both] = [op(), op(), op(), op(), op()];
    let limits = json!({"tokens": 1000, "concurrency": 50});
    for op in [&released, &silent, &settled, &cancelled, &both] {
        let changes = json!({"op": op, "tokens": 100, "limits": {"owner": limits}});
        let answer = service.post("/v1/decide", &request(changes)).await.json();
        assert_eq!(answer["verdict"], "admit");
    }
    let batch = json!({
        "releases": [released, both],
        "settles": [{"op": silent}, {"op": settled, "tokens": 7}, {"op": cancelled, "tokens": 9}, {"op": both, "tokens": 1}],
        "cancels": [cancelled],
        "renewals": [released, silent, settled, cancelled, both],
    });
    for _ in 0..2 {
        assert_eq!(
            settle(&service, batch.clone()).await,
            json!({}),
            "what ended is not lost"
        );
    }
    let changes = json!({"tokens": 0, "limits": {"owner": {"tokens": 1000, "concurrency": 1}}});
    let answer = service.post("/v1/decide", &request(changes)).await.json();
    assert_eq!(answer["verdict"], "admit", "a slot was not freed: {answer}");
    assert_eq!(answer["tightest"]["remaining"], 1000 - 100 - 100 - 7 - 1, "{answer}");
}

#[tokio::test]
async fn a_settlement_leaves_requests_charged_and_one_that_nobody_knows_is_accepted() {
    let service = Service::start(in_memory()).await;
    let only = op();
    assert_eq!(
        decide(&service, &only, json!({"requests": 1})).await["verdict"],
        "admit"
    );
    settle(
        &service,
        json!({"settles": [{"op": only, "tokens": 0}, {"op": op(), "tokens": 5}, {"op": op()}]}),
    )
    .await;
    assert_eq!(
        decide(&service, &op(), json!({"requests": 1})).await["code"],
        "RATE_LIMITED"
    );
}

#[tokio::test]
async fn tokens_that_are_no_count_are_refused_with_the_whole_batch() {
    let service = Service::start(in_memory()).await;
    let held = op();
    assert_eq!(hold(&service, &held, 60).await["verdict"], "admit");
    for tokens in [json!(-1), json!(1.5), json!("7"), json!(1e300), json!([])] {
        let batch = json!({"profile": "development", "settles": [{"op": held, "tokens": tokens}]});
        assert_eq!(service.post("/v1/settle", &batch).await.status, 400, "{tokens}");
    }
    let unknown = json!({"profile": "development", "settles": [{"op": held, "token": 1}]});
    assert_eq!(service.post("/v1/settle", &unknown).await.status, 400);
    assert_eq!(
        hold(&service, &op(), 41).await["code"],
        "TOKENS_LIMITED",
        "the hold stands"
    );
}

#[tokio::test]
async fn a_renewal_keeps_a_slot_and_one_that_lapsed_is_lost_and_counted() {
    let mut config = in_memory();
    config["limiter"]["slot_ttl_s"] = json!(1);
    let service = Service::start(config).await;
    let (kept, stranger) = (op(), op());
    assert_eq!(
        decide(&service, &kept, json!({"concurrency": 2})).await["slot_ttl_ms"],
        1000
    );
    let answer = settle(&service, json!({"renewals": [kept, stranger]})).await;
    assert_eq!(answer, json!({"lost": [stranger]}));
    // A slot's life is the store's second; nobody renews it while another request waits for its place.
    crate::process::until("the slot to lapse", async || {
        let answer = decide(&service, &op(), json!({"concurrency": 1})).await;
        (answer["verdict"] == "admit").then_some(())
    })
    .await;
    assert_eq!(
        settle(&service, json!({"renewals": [kept]})).await,
        json!({"lost": [kept]})
    );
    let metrics = service.get("/metrics").await.body;
    assert!(metrics.contains("portcullis_slot_lost_total 2\n"), "{metrics}");
}

#[tokio::test]
async fn a_batch_may_be_a_megabyte_and_not_more_and_has_no_unknown_keys() {
    let service = Service::start(in_memory()).await;
    let ops: Vec<_> = (0..25_000).map(|_| op()).collect();
    settle(&service, json!({"releases": ops})).await;
    let twice: Vec<_> = ops.iter().chain(&ops).collect();
    let too_large = service
        .post("/v1/settle", &json!({"profile": "development", "releases": twice}))
        .await;
    assert_eq!(too_large.status, 413);
    let unknown = service
        .post("/v1/settle", &json!({"profile": "development", "release": [op()]}))
        .await;
    assert_eq!(unknown.status, 400);
}

#[tokio::test]
async fn without_a_limiter_nothing_is_held_so_every_renewal_is_lost() {
    let service = Service::start(json!({"profile": "development", "listen": "127.0.0.1:0"})).await;
    let held = op();
    let answer = settle(
        &service,
        json!({"renewals": [held], "cancels": [op()], "releases": [op()], "settles": [{"op": op(), "tokens": 1}]}),
    )
    .await;
    assert_eq!(answer, json!({"lost": [held]}));
}

#[tokio::test]
async fn what_ends_in_the_same_batch_is_not_renewed_and_not_lost() {
    for config in [in_memory(), json!({"profile": "development", "listen": "127.0.0.1:0"})] {
        let service = Service::start(config).await;
        let [released, cancelled, stranger] = [op(), op(), op()];
        for op in [&released, &cancelled] {
            decide(&service, op, json!({"concurrency": 2})).await;
        }
        let batch = json!({
            "releases": [released], "cancels": [cancelled], "renewals": [released, stranger, cancelled]
        });
        for _ in 0..2 {
            assert_eq!(settle(&service, batch.clone()).await, json!({"lost": [stranger]}));
        }
        let metrics = service.get("/metrics").await.body;
        assert!(metrics.contains("portcullis_slot_lost_total 2\n"), "{metrics}");
    }
}

/// A decision about one launch a minute of an org.
async fn launch(service: &Service, op: &str) -> Value {
    let gates = json!([{"gate": "launch_rate", "per_minute": 1, "burst": 1}]);
    let subject = json!({"owner": "o", "org": "g"});
    let changes = json!({"op": op, "gates": gates, "subject": subject, "limits": {}, "rules": "launch-gate"});
    service.post("/v1/decide", &request(changes)).await.json()
}

#[tokio::test]
async fn a_launch_is_taken_once_by_an_operation_and_free_again_when_that_is_cancelled() {
    let service = Service::start(in_memory()).await;
    let [first, second, third] = [op(), op(), op()];
    for _ in 0..2 {
        assert_eq!(launch(&service, &first).await["verdict"], "admit");
    }
    assert_eq!(launch(&service, &second).await["code"], "LAUNCH_RATE_LIMITED");
    for _ in 0..2 {
        settle(&service, json!({"cancels": [first]})).await;
    }
    assert_eq!(launch(&service, &second).await["verdict"], "admit");
    assert_eq!(
        launch(&service, &third).await["code"],
        "LAUNCH_RATE_LIMITED",
        "given back once"
    );
    settle(&service, json!({"releases": [second]})).await;
    assert_eq!(launch(&service, &third).await["verdict"], "deny", "it was launched");
}

#[tokio::test]
async fn a_launch_that_arrives_after_its_cancel_takes_nothing() {
    let service = Service::start(in_memory()).await;
    let late = op();
    settle(&service, json!({"cancels": [late]})).await;
    assert_eq!(launch(&service, &late).await["verdict"], "unavailable");
    assert_eq!(launch(&service, &op()).await["verdict"], "admit");
}
