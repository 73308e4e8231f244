//! What a request's handler leaves behind when nobody waits for it any more.

use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use portcullis_decision::config::{Environment, ServiceConfig};
use tokio::time::timeout;
use tower_service::Service as _;

use super::*;
use crate::decide::tests::{Mood, given_back, over, request};
use crate::limiter::StoreFault;
use crate::locked;

/// An app, and what ends when no decision is under way any more.
fn app(decider: Arc<Decider>) -> (App, mpsc::Receiver<()>) {
    let text = br#"{"profile": "development", "listen": "127.0.0.1:0"}"#;
    let config = ServiceConfig::parse(text, &Environment::default()).unwrap();
    let metrics = Arc::clone(&decider.metrics);
    let readiness = Arc::new(Readiness::new(&config, None, Arc::clone(&metrics)));
    let gates = Arc::new(Gates::new(
        decider.sightings(),
        Arc::clone(&readiness),
        None,
        &config.capacity,
        Arc::clone(&metrics),
    ));
    let (under_way, all_done) = mpsc::channel(1);
    (
        App {
            decider,
            readiness,
            gates,
            canary: None,
            faults: None,
            metrics,
            checks: None,
            tokens: None,
            body_timeout: Duration::from_secs(10),
            under_way,
        },
        all_done,
    )
}

fn post(path: &str, body: &impl serde::Serialize) -> Request {
    Request::post(path)
        .body(Body::from(serde_json::to_vec(body).unwrap()))
        .unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_decision_goes_on_to_its_end_when_its_connection_goes_away() {
    let (decider, moody) = over(&[Mood::GrantAfter(300)]);
    let (app, mut all_done) = app(decider);
    let decider = Arc::clone(&app.decider);
    let request = request(1, json!({}));
    let handler = router(app).call(post(DECIDE_PATH, &request));
    timeout(Duration::from_millis(10), handler).await.unwrap_err();
    assert!(
        !decider.metrics.encode().contains("portcullis_verdicts_total"),
        "not decided yet"
    );
    timeout(Duration::from_secs(1), all_done.recv()).await.unwrap();
    assert!(
        decider
            .metrics
            .encode()
            .contains(r#"portcullis_verdicts_total{verdict="unavailable""#)
    );
    assert_eq!(given_back(&decider, &moody).await, [request.op]);
}

#[tokio::test(start_paused = true)]
async fn a_settle_batch_that_the_limiter_does_not_take_is_503_without_the_stores_words() {
    let (decider, moody) = over(&[]);
    moody.fail_cancels(1);
    let (app, _all_done) = app(decider);
    let batch = json!({"profile": "development", "cancels": [request(1, json!({})).op]});
    let mut router = router(app);
    let refused = router.call(post(SETTLE_PATH, &batch)).await.unwrap();
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    let body = axum::body::to_bytes(refused.into_body(), 1024).await.unwrap();
    assert_eq!(
        body,
        format!(
            r#"{{"error":"the limiter failed: {}","put_down":true}}"#,
            StoreFault::Connection
        )
    );
    assert_eq!(
        router.call(post(SETTLE_PATH, &batch)).await.unwrap().status(),
        StatusCode::OK
    );
}

#[tokio::test(start_paused = true)]
async fn a_cancel_that_fails_keeps_no_slot_from_its_renewal_and_nothing_is_counted_twice() {
    let (decider, moody) = over(&[]);
    moody.fail_cancels(1);
    let (app, _all_done) = app(Arc::clone(&decider));
    let [cancelled, settled, renewed] = [1, 2, 3].map(|n| request(n, json!({})).op);
    let batch = json!({"profile": "development", "cancels": [cancelled], "renewals": [renewed],
                       "settles": [{"op": settled, "tokens": 7}]});
    let mut router = router(app);
    let settled_so_far = || {
        let text = decider.metrics.encode();
        let line = text.lines().find(|line| line.starts_with("portcullis_settled_total "));
        line.map(|line| line.rsplit(' ').next().unwrap().to_owned())
    };
    let refused = router.call(post(SETTLE_PATH, &batch)).await.unwrap();
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    let so_far = (locked(&moody.settled).clone(), locked(&moody.renewed).clone());
    assert_eq!(so_far, (vec![settled], vec![renewed]));
    assert_eq!(settled_so_far().as_deref(), Some("0"), "it comes again");
    let taken = router.call(post(SETTLE_PATH, &batch)).await.unwrap();
    assert_eq!(
        (taken.status(), settled_so_far().as_deref()),
        (StatusCode::OK, Some("1"))
    );
}

fn check_app(decider: Arc<Decider>) -> (App, mpsc::Receiver<()>) {
    check_app_by(&json!("contract-limits"), decider)
}

fn check_app_by(rules: &Value, decider: Arc<Decider>) -> (App, mpsc::Receiver<()>) {
    let text = json!({"profile": "development", "listen": "127.0.0.1:0", "ext_authz": {"rules": rules}}).to_string();
    let config = ServiceConfig::parse(text.as_bytes(), &Environment::default()).unwrap();
    let (mut app, all_done) = app(Arc::clone(&decider));
    app.checks = config
        .ext_authz
        .map(|config| Arc::new(Checks::new(config, "", decider)));
    (app, all_done)
}

fn check() -> Request {
    Request::get("/v1/ext_authz/")
        .header("x-admission-owner-id", "o")
        .header("x-admission-owner-rate-limit-requests", "3")
        .body(Body::empty())
        .unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_check_that_nobody_waits_for_any_more_gives_back_what_it_was_granted_and_no_other_does() {
    let (decider, moody) = over(&[Mood::GrantAfter(60)]);
    let (app, mut all_done) = check_app(decider);
    let decider = Arc::clone(&app.decider);
    let mut router = router(app);
    timeout(Duration::from_millis(10), router.call(check()))
        .await
        .unwrap_err();
    assert_eq!(given_back(&decider, &moody).await.len(), 1);
    assert_eq!(router.call(check()).await.unwrap().status(), StatusCode::OK);
    drop(router);
    timeout(Duration::from_secs(1), all_done.recv()).await.unwrap();
    assert!(
        decider
            .metrics
            .encode()
            .contains(r#"portcullis_verdicts_total{verdict="admit",class="none"} 2"#),
        "the first decision went on to its end"
    );
    assert_eq!(given_back(&decider, &moody).await.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_check_is_answered_within_its_own_time_however_long_the_store_takes() {
    let (decider, moody) = over(&[Mood::GrantAfter(5_000)]);
    let (app, _all_done) = check_app(decider);
    let decider = Arc::clone(&app.decider);
    let start = Instant::now();
    let answer = router(app).call(check()).await.unwrap();
    // `contract-limits` lets an outage pass; the store's operation may take 100 ms.
    assert_eq!((answer.status(), start.elapsed().as_millis()), (StatusCode::OK, 100));
    assert_eq!(given_back(&decider, &moody).await.len(), 1);
    let metrics = decider.metrics.encode();
    assert!(
        metrics.contains(r#"portcullis_ext_authz_total{outcome="bypassed_limiter_unavailable"} 1"#),
        "{metrics}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_check_that_nobody_waits_for_any_more_uses_up_nothing_of_the_allowance_for_unchecked_slots() {
    let rules = json!({
        "name": "bounded", "envelope": {"when_missing": "reject"}, "decision": {"when_unavailable": "reject"},
        "gates": [{"gate": "contract", "when_unavailable": {"admit": {"max_per_minute": 1}}}]
    });
    let (decider, _) = over(&[Mood::GrantAfter(60)]);
    let (app, _all_done) = check_app_by(&rules, decider);
    let mut router = router(app);
    let check = || {
        let mut check = check();
        let limit = HeaderValue::from_static("2");
        check.headers_mut().insert("x-admission-owner-concurrency-limit", limit);
        check
    };
    timeout(Duration::from_millis(10), router.call(check()))
        .await
        .unwrap_err();
    let mut statuses = Vec::new();
    for _ in 0..2 {
        statuses.push(router.call(check()).await.unwrap().status());
    }
    assert_eq!(statuses, [StatusCode::OK, StatusCode::SERVICE_UNAVAILABLE]);
}
