//! `POST /v1/settle`: cancels in any order, releases, renewals and the ones that came too late.

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
        json!({"renewals": [held], "cancels": [op()], "releases": [op()]}),
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
