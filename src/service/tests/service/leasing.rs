//! `POST /v1/decide` with a lease asked for: when one is granted, how large it is and when it ends; and what goes back.

use serde_json::{Value, json};

use crate::process::{Service, in_memory};
use crate::wire::{Client, op, request};

/// A request that asks for a lease for this gateway, with other keys on top.
fn asking(gateway: &str, changes: Value) -> Value {
    let lease = json!({"max_requests": 256, "max_age_ms": 10_000, "gateway": gateway});
    let mut request = request(json!({"lease": lease, "limits": {"owner": {"requests": 100_000}}}));
    request
        .as_object_mut()
        .unwrap()
        .extend(changes.as_object().unwrap().clone());
    request
}

/// The same, with nobody who waits.
fn ahead(mut request: Value) -> Value {
    request["lease"]["ahead"] = json!(true);
    request
}

async fn decide(client: &mut Client, request: &Value) -> Value {
    let answer = client.send("POST", "/v1/decide", &request.to_string()).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

/// Asks until a lease comes; how many requests were decided without, and the answer with it.
async fn granted(client: &mut Client, like: &Value) -> (u64, Value) {
    for exact in 0..10_000 {
        let mut request = like.clone();
        request["op"] = json!(op());
        let answer = decide(client, &request).await;
        assert_eq!(answer["verdict"], "admit", "{answer}");
        if answer["lease"].is_object() {
            return (exact, answer);
        }
    }
    panic!("no lease is granted")
}

async fn settle(service: &Service, returns: Value) {
    let batch = json!({"profile": "development", "returns": returns});
    let answer = service.post("/v1/settle", &batch).await;
    assert_eq!((answer.status, answer.body.as_str()), (200, "{}"), "{answer:?}");
}

fn has(metrics: &str, line: &str) {
    assert!(metrics.contains(&format!("{line}\n")), "{line} is not in\n{metrics}");
}

#[tokio::test]
async fn a_lease_is_granted_once_its_bundle_is_asked_for_often_and_is_charged_with_the_request() {
    let service = Service::start(in_memory()).await;
    let mut client = service.client().await;
    let gateway = op();
    // Two in a second would be half of eight in ten.
    let (exact, answer) = granted(&mut client, &asking(&gateway, json!({}))).await;
    assert!(exact >= 2, "after {exact} requests: {answer}");
    let block = answer["lease"]["requests"].as_u64().unwrap();
    assert!((7..=255).contains(&block), "{answer}");
    assert!(answer["lease"]["ends_in_ms"].as_u64().unwrap() <= 10_000);
    assert_eq!(answer["lease"].get("tokens"), None, "no token limit binds: {answer}");
    let left = answer["tightest"]["remaining"].as_u64().unwrap();
    assert_eq!(left, 100_000 - exact - 1 - block);
    // One without a wish for a lease gets none, whatever the demand.
    let plain = request(json!({"limits": {"owner": {"requests": 100_000}}}));
    let answer = decide(&mut client, &plain).await;
    assert_eq!((answer.get("lease"), answer["verdict"].as_str()), (None, Some("admit")));
}

#[tokio::test]
async fn one_gateway_gets_exactly_what_the_limit_allows_and_never_more() {
    let service = Service::start(in_memory()).await;
    let mut client = service.client().await;
    let gateway = op();
    let like = asking(&gateway, json!({"limits": {"owner": {"requests": 300}}}));
    let (mut admitted, mut asked, mut returned) = (0, 0, 0);
    let denied = loop {
        asked += 1;
        let id = op();
        let mut request = if asked % 3 == 0 {
            ahead(like.clone())
        } else {
            like.clone()
        };
        request["op"] = json!(id);
        let answer = decide(&mut client, &request).await;
        if answer["verdict"] == "deny" {
            break answer;
        }
        assert_eq!(answer["verdict"], "admit", "{answer}");
        let block = answer["lease"]["requests"].as_u64().unwrap_or(0);
        admitted += block + u64::from(asked % 3 != 0);
        if block > 20 && returned == 0 {
            returned = 20;
            let part = json!([{"id": op(), "lease": id, "requests": returned}]);
            settle(&service, part.clone()).await;
            settle(&service, part).await;
        }
    };
    assert_eq!((denied["code"].as_str(), returned), (Some("RATE_LIMITED"), 20));
    assert_eq!(admitted - returned, 300);
    assert!(asked < 200, "{asked} questions for 300 requests");
    has(
        &service.get("/metrics").await.body,
        "portcullis_lease_returned_total 40",
    );
}

#[tokio::test]
async fn a_lease_ends_with_its_window_and_holds_tokens_for_every_request() {
    let service = Service::start(in_memory()).await;
    let mut client = service.client().await;
    let limits = json!({"owner": {"tokens": 1_000_000}, "org": {"tokens": 50_000}});
    let changes = json!({"limits": limits, "tokens": 100, "window_s": 2, "subject": {"owner": "o", "org": "g"}});
    let (_, answer) = granted(&mut client, &asking(&op(), changes)).await;
    let lease = &answer["lease"];
    assert!((1..=2_000).contains(&lease["ends_in_ms"].as_u64().unwrap()), "{answer}");
    assert_eq!(
        (lease["tokens"].as_u64(), lease["largest_hold"].as_u64()),
        (Some(lease["requests"].as_u64().unwrap() * 100), Some(50_000))
    );
    assert_eq!(answer["held_tokens"], 100);
}

#[tokio::test]
async fn another_gateway_shrinks_the_blocks_of_all() {
    let service = Service::start(in_memory()).await;
    let mut client = service.client().await;
    let (first, second) = (op(), op());
    let like = |gateway: &str| asking(gateway, json!({"limits": {"owner": {"requests": 2_000}}}));
    // Until the demand asks for more than one part of what is left.
    let mut block = 0;
    while block < 200 {
        let (_, answer) = granted(&mut client, &like(&first)).await;
        let left = answer["tightest"]["remaining"].as_u64().unwrap();
        let whole = answer["lease"]["requests"].as_u64().unwrap() + 1;
        if whole == (left + whole) / 8 {
            block = whole;
            break;
        }
        assert!(left > 200, "{answer}");
    }
    let (_, answer) = granted(&mut client, &like(&second)).await;
    let left = answer["tightest"]["remaining"].as_u64().unwrap();
    let smaller = answer["lease"]["requests"].as_u64().unwrap() + 1;
    assert!(
        smaller < block && smaller == (left + smaller) / 16,
        "{block}, then {answer}"
    );
}

#[tokio::test]
async fn ahead_is_no_request_of_a_client() {
    let service = Service::start(in_memory()).await;
    let mut client = service.client().await;
    let gateway = op();
    let few = asking(&gateway, json!({"subject": {"owner": "few"}}));
    let answer = decide(&mut client, &ahead(few)).await;
    assert_eq!((answer["verdict"].as_str(), answer.get("lease")), (Some("admit"), None));
    assert_eq!(answer["tightest"]["remaining"], 100_000, "nothing is charged");
    let spent = asking(&gateway, json!({"limits": {"owner": {"requests": 0}}}));
    assert_eq!(decide(&mut client, &ahead(spent)).await["code"], "RATE_LIMITED");
    let metrics = service.get("/metrics").await.body;
    assert!(!metrics.contains("portcullis_verdicts_total{"), "{metrics}");
    has(&metrics, "portcullis_decide_seconds_count 0");
    has(&metrics, r#"portcullis_leases_total{outcome="exact"} 1"#);
    has(&metrics, r#"portcullis_leases_total{outcome="refused"} 1"#);
    assert!(
        service.lines().iter().all(|line| line["event"] != "denied"),
        "{}",
        service.log()
    );

    let like = asking(&gateway, json!({}));
    let (exact, first) = granted(&mut client, &like).await;
    let answer = decide(&mut client, &ahead(asking(&gateway, json!({})))).await;
    let blocks = [&first, &answer].map(|of| of["lease"]["requests"].as_u64().unwrap());
    assert!(blocks[1] >= 8, "{answer}");
    let metrics = service.get("/metrics").await.body;
    has(&metrics, r#"portcullis_leases_total{outcome="granted"} 2"#);
    has(
        &metrics,
        &format!("portcullis_lease_admissions_total {}", blocks[0] + blocks[1]),
    );
    has(
        &metrics,
        &format!(
            r#"portcullis_verdicts_total{{verdict="admit",class="none"}} {}"#,
            exact + 1
        ),
    );
}

#[tokio::test]
async fn the_same_operation_again_gets_the_same_lease_and_a_cancel_gives_it_back() {
    let service = Service::start(in_memory()).await;
    let mut client = service.client().await;
    let like = asking(&op(), json!({}));
    let (exact, _) = granted(&mut client, &like).await;
    let mut again = ahead(like.clone());
    again["op"] = json!(op());
    let (first, second) = (decide(&mut client, &again).await, decide(&mut client, &again).await);
    assert_eq!(
        first["lease"]["requests"], second["lease"]["requests"],
        "{first} {second}"
    );
    let left = first["tightest"]["remaining"].as_u64().unwrap();
    let block = first["lease"]["requests"].as_u64().unwrap();
    assert!(block >= 8, "after {exact}: {first}");
    let batch = json!({"profile": "development", "cancels": [again["op"]]});
    assert_eq!(service.post("/v1/settle", &batch).await.status, 200);
    let plain = request(json!({"limits": {"owner": {"requests": 100_000}}}));
    let answer = decide(&mut client, &plain).await;
    assert_eq!(answer["tightest"]["remaining"].as_u64().unwrap(), left + block - 1);
}

#[tokio::test]
async fn tokens_go_back_or_are_charged_and_an_unknown_lease_changes_nothing() {
    let service = Service::start(in_memory()).await;
    let mut client = service.client().await;
    let limits = json!({"owner": {"tokens": 1_000_000}});
    let like = asking(&op(), json!({"limits": limits, "tokens": 100}));
    let (_, answer) = granted(&mut client, &like).await;
    let lease = &answer["op"];
    let left = answer["tightest"]["remaining"].as_u64().unwrap();
    settle(
        &service,
        json!([
            {"id": op(), "lease": lease, "tokens": 60},
            {"id": op(), "lease": lease, "tokens": -25},
            {"id": op(), "lease": op(), "requests": 9, "tokens": 900},
        ]),
    )
    .await;
    let plain = request(json!({"limits": limits, "tokens": 0}));
    let now_left = decide(&mut client, &plain).await["tightest"]["remaining"].as_u64();
    assert_eq!(now_left, Some(left + 60 - 25));
}

#[tokio::test]
async fn a_wish_or_a_return_that_is_not_understood_is_refused() {
    let service = Service::start(in_memory()).await;
    for lease in [
        json!({"max_requests": 1, "max_age_ms": 1, "gateway": op(), "share": 1}),
        json!({"max_requests": -1, "max_age_ms": 1, "gateway": op()}),
        json!({"max_requests": 1, "max_age_ms": 1}),
        json!(true),
    ] {
        let answer = service.post("/v1/decide", &request(json!({"lease": lease}))).await;
        assert_eq!(answer.status, 400, "{lease}");
    }
    for part in [
        json!({"id": op(), "lease": op(), "requests": -1}),
        json!({"id": op(), "lease": op(), "request": 1}),
        json!({"lease": op(), "requests": 1}),
    ] {
        let batch = json!({"profile": "development", "returns": [part]});
        assert_eq!(service.post("/v1/settle", &batch).await.status, 400, "{batch}");
    }
}
