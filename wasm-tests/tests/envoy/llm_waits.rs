//! Requests whose body the filter can't wait for: one that stops arriving, one that the host keeps back, and those that are
//! decided on their headers because their body comes only after an answer.

use std::time::{Duration, Instant};

use portcullis_wasm_tests::{Call, Connection, Envelope, GatewayPlan};
use serde_json::{Value, json};

use crate::expect::{DECISION_UNAVAILABLE, TOKENS_LIMITED, refused};
use crate::llm_model::{BODY_UNREADABLE, Judged, MODEL_REQUIRED, envelope};
use crate::llm_world::{DEFAULT_OUTPUT, Llm, PLENTY, begun, chat, left, tokens};

/// Of the bodies here.
const BODY_TIMEOUT: Duration = Duration::from_millis(700);
const SLACK: Duration = Duration::from_millis(2_500);
const CHAT: &str = "/v1/chat/completions";

fn hasty() -> Value {
    json!({"body_timeout_ms": u64::try_from(BODY_TIMEOUT.as_millis()).unwrap()})
}

fn hasty_plan(plan: GatewayPlan) -> GatewayPlan {
    plan.plugin(json!({"model": hasty()}))
}

/// It waited as long as it may, and no longer.
#[track_caller]
fn in_body_time(start: Instant) {
    let took = start.elapsed();
    assert!((BODY_TIMEOUT..BODY_TIMEOUT + SLACK).contains(&took), "{took:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_stops_arriving_is_unreadable_after_its_time() {
    let mut world = Judged::start(hasty(), |plan| plan).await;
    let call = Call::post(CHAT, r#"{"model":"good"}"#).envelope(&envelope());
    let mut connection = Connection::open(world.gateway.address()).await;
    connection.send(&call.head()).await;
    let start = Instant::now();
    connection.send(br#"{"model":"#).await;
    refused(&connection.answer("POST").await, BODY_UNREADABLE);
    in_body_time(start);
    // The time is that of the whole body: a trickle does not prolong it.
    let mut trickle = Connection::open(world.gateway.address()).await;
    let head = Call::new("POST", CHAT)
        .envelope(&envelope())
        .header("content-length", "100000")
        .head();
    trickle.send(&head).await;
    let start = Instant::now();
    trickle.send(b"{").await;
    let (mut reads, mut writes) = (trickle, 0);
    let answer = loop {
        tokio::select! {
            answer = reads.answer_head() => break answer,
            () = tokio::time::sleep(Duration::from_millis(100)) => {}
        }
        writes += 1;
        assert!(writes < 100, "a trickle is waited for");
        reads.send(b" ").await;
    };
    assert_eq!(answer, 400);
    in_body_time(start);
    assert_eq!(world.provider.hits(), 0);
    // Others are served meanwhile and after.
    world.passes(CHAT, r#"{"model":"good"}"#).await;
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_keeps_bodies_back_is_told_of_and_nothing_is_opened() {
    let keeps = |plan: GatewayPlan| plan.no_body_while_paused();
    let mut closed = Judged::start(hasty(), keeps).await;
    let start = Instant::now();
    let call = Call::post(CHAT, r#"{"model":"good"}"#).envelope(&envelope());
    closed.refuses(&call, DECISION_UNAVAILABLE).await;
    in_body_time(start);
    let (level, line) = closed
        .gateway
        .await_log("the setting's name", |line| {
            line.to_string().contains("allow_on_headers_stop_iteration")
        })
        .await;
    assert_eq!(
        (level.as_str(), &line["class"]),
        ("warning", &json!("decision_unavailable")),
        "{line}"
    );
    closed.gateway.assert_sound();
    drop(closed);

    // Rules that admit when the decision is unavailable don't admit here: the fault is the configuration's.
    let mut open = Llm::with(json!({}), |plan| {
        hasty_plan(plan)
            .no_body_while_paused()
            .plugin(json!({"rules": "contract-limits"}))
    })
    .await;
    let answer = open.gateway.call(&chat().call(&tokens("o", PLENTY))).await;
    refused(&answer, DECISION_UNAVAILABLE);
    assert_eq!(open.provider.hits(), 0);
    assert_eq!(
        open.gateway.counter("portcullis_bypassed_decision_unavailable").await,
        0
    );
    // What has no body needs no setting.
    let answer = open
        .gateway
        .call(&Call::get("/v1/models").envelope(&tokens("o", PLENTY)))
        .await;
    assert_eq!(answer.status, 200);
    open.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_goes_away_while_its_body_is_awaited_is_forgotten() {
    let mut world = Llm::start().await;
    for at in 0..20 {
        let call = chat().call(&tokens("o", PLENTY));
        let mut connection = Connection::open(world.gateway.address()).await;
        connection.send(&call.head()).await;
        if at % 2 == 0 {
            connection.send(b"{\"model\"").await;
        }
        connection.reset();
    }
    world.served(&chat().call(&tokens("p", PLENTY))).await;
    assert_eq!(world.charged("o").await, None, "nothing was decided");
    assert_eq!(world.slots("o").await, 0);
    world.gateway.assert_sound();
}

fn spent() -> Envelope {
    Envelope::owner("spent").tokens("owner", 0)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_websocket_is_decided_on_its_headers() {
    let websockets = json!({"upgrade_configs": [{"upgrade_type": "websocket"}]});
    let mut world = Llm::with(json!({}), |plan| hasty_plan(plan).manager(websockets.clone())).await;
    let upgrade = |envelope: &Envelope| {
        Call::get("/v1/realtime?model=gpt-4o")
            .envelope(envelope)
            .header("connection", "Upgrade")
            .header("upgrade", "websocket")
            .header("sec-websocket-version", "13")
            .header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==")
    };
    let start = Instant::now();
    let mut open = begun(&world.gateway, &upgrade(&tokens("o", PLENTY))).await;
    assert_eq!(open.answer_head().await, 101);
    refused(&world.gateway.call(&upgrade(&spent())).await, TOKENS_LIMITED);
    assert!(start.elapsed() < BODY_TIMEOUT, "no body was awaited");
    assert_eq!(world.provider.hits(), 1);
    world.stays("o", DEFAULT_OUTPUT).await;
    world.gateway.assert_sound();
    drop(world);

    let judged = Judged::start(json!({}), |plan| plan.manager(websockets)).await;
    judged.refuses(&upgrade(&envelope()), MODEL_REQUIRED).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connect_is_decided_on_its_headers() {
    let connects = json!({"upgrade_configs": [{"upgrade_type": "CONNECT"}]});
    let mut world = Llm::with(json!({}), |plan| hasty_plan(plan).manager(connects)).await;
    let connect = |envelope: &Envelope| Call::new("CONNECT", "elsewhere:443").envelope(envelope);
    let start = Instant::now();
    refused(&world.gateway.call(&connect(&spent())).await, TOKENS_LIMITED);
    // Nothing takes it in this gateway, so what it was decided is seen in its answer's absence of ours.
    let answer = world.gateway.call(&connect(&tokens("o", PLENTY))).await;
    assert_eq!((answer.status, answer.header("x-portcullis-class")), (404, None));
    assert!(start.elapsed() < BODY_TIMEOUT, "no body was awaited");
    world.stays("o", 0).await;
    world.gateway.assert_sound();
}

/// Sends the headers alone, which is what `Expect: 100-continue` is for.
async fn expecting(world: &Llm, envelope: &Envelope) -> (Connection, Vec<u8>) {
    let call = chat().call(envelope).header("expect", "100-continue");
    let mut connection = Connection::open(world.gateway.address()).await;
    connection.send(&call.head()).await;
    (connection, chat().body.to_string().into_bytes())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_waits_for_a_hundred_continue_is_decided_on_the_headers() {
    let passes = |plan: GatewayPlan| hasty_plan(plan).manager(json!({"proxy_100_continue": true}));
    let mut world = Llm::with(json!({}), passes).await;
    let start = Instant::now();
    let (mut connection, _) = expecting(&world, &spent()).await;
    refused(&connection.answer("POST").await, TOKENS_LIMITED);
    let (mut connection, body) = expecting(&world, &tokens("o", PLENTY)).await;
    assert_eq!(connection.answer_head().await, 100);
    assert!(start.elapsed() < BODY_TIMEOUT, "no body was awaited");
    connection.send(&body).await;
    let answer = connection.answer("POST").await;
    assert_eq!((answer.status, PLENTY - left(&answer)), (200, DEFAULT_OUTPUT));
    assert_eq!(world.provider.last_body(), body);
    world.becomes("o", world.provider.last_used().total()).await;
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn where_the_host_answers_the_expectation_the_body_is_read() {
    let mut world = Llm::with(json!({}), hasty_plan).await;
    let (mut connection, body) = expecting(&world, &tokens("o", PLENTY)).await;
    assert_eq!(connection.answer_head().await, 100);
    connection.send(&body).await;
    let answer = connection.answer("POST").await;
    assert_eq!(
        (answer.status, PLENTY - left(&answer)),
        (200, chat().hold(DEFAULT_OUTPUT))
    );
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expectation_that_the_host_does_not_know_hides_no_body() {
    let mut world = Llm::with(json!({}), hasty_plan).await;
    let greedy = chat().and(json!({"max_tokens": 500_000}));
    let expectations = [
        "100-continue",
        "100-Continue",
        "x, 100-continue",
        "100-continue, x",
        "100-continue;q=1",
        "100-continue ,",
        "x",
    ];
    for (at, expectation) in expectations.iter().enumerate() {
        let envelope = tokens(&format!("o{at}"), PLENTY);
        let call = greedy.call(&envelope).header("expect", expectation);
        // The body comes at once, whatever is said to the expectation.
        let mut connection = begun(&world.gateway, &call).await;
        let answer = connection.answer("POST").await;
        assert_eq!(
            (answer.status, PLENTY - left(&answer)),
            (200, greedy.hold(500_000)),
            "{expectation}"
        );
    }
    world.gateway.assert_sound();
}
