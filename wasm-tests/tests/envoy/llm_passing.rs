//! Bodies that pass though nothing was decided by them (shadow, an outage that the rules open), and answers far larger than
//! anything that a filter may hold.

use portcullis_wasm_tests::{Behaviour, Call, Connection, Envelope, GatewayPlan, closed_port};
use serde_json::json;

use crate::llm_model::{Judged, envelope};
use crate::llm_world::{DEFAULT_OUTPUT, Llm, PLENTY, chat, chat_stream, post, tokens};

const CHAT: &str = "/v1/chat/completions";
const ENVOY_GROWS_AT_MOST_KB: u64 = 40_000;

#[tokio::test(flavor = "multi_thread")]
async fn in_shadow_every_body_passes_as_it_is_and_the_refusal_is_counted() {
    let shadow = |plan: GatewayPlan| plan.plugin(json!({"mode": "shadow", "rules": "contract-limits"}));
    let mut world = Judged::start(json!({"max_body_bytes": 1_000}), shadow).await;
    let long = format!("{{\"model\":\"good\",\"x\":\"{}\"}}", "y".repeat(300_000));
    let bodies = [r#"{"model":"good","model":"bad"}"#, "--x\r\nno JSON\r\n--x--", &long];
    for (at, body) in bodies.into_iter().enumerate() {
        let before = world.provider.hits();
        let call = post(CHAT, body).envelope(&envelope().tokens("owner", PLENTY));
        let answer = world.gateway.call(&call).await;
        assert_eq!(answer.header("x-portcullis-class"), None, "{}", answer.text());
        assert_eq!(world.provider.hits(), before + 1, "{body:.50}");
        assert!(world.provider.last_body() == body.as_bytes(), "{body:.50}");
        let counted = world
            .gateway
            .counter("portcullis_shadow_rejected_request_malformed")
            .await;
        assert_eq!(counted, i64::try_from(at + 1).unwrap());
    }
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_that_the_rules_open_passes_the_body_whole() {
    let opened = |plan: GatewayPlan| plan.decision(closed_port()).plugin(json!({"rules": "contract-limits"}));
    let mut world = Llm::with(json!({}), opened).await;
    let body = format!("{{\"model\":\"m\",\"x\":\"{}\"}}", "y".repeat(700_000));
    for _ in 0..8 {
        let answer = world
            .gateway
            .call(&post(CHAT, body.clone()).envelope(&tokens("o", PLENTY)))
            .await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert!(world.provider.last_body() == body.as_bytes());
    }
    // What is no readable body is refused all the same, also while the breaker is open.
    let bad = post(CHAT, "{").envelope(&tokens("o", PLENTY));
    assert_eq!(world.gateway.call(&bad).await.code(), "BODY_UNREADABLE");
    // And what is known without asking.
    let spent = chat().call(&Envelope::owner("o").tokens("owner", 0));
    assert_eq!(world.gateway.call(&spent).await.code(), "TOKENS_LIMITED");
    assert_eq!(world.provider.hits(), 8);
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_its_route_gives_up_is_charged_the_hold() {
    let timeout = |plan: GatewayPlan| plan.route(json!({"route": {"timeout": "0.5s"}}));
    let mut world = Llm::with(json!({}), timeout).await;
    world.provider.behave(Behaviour {
        hold: true,
        ..Behaviour::default()
    });
    let answer = world.gateway.call(&chat().call(&tokens("o", PLENTY))).await;
    assert_eq!(answer.status, 504);
    world.stays("o", chat().hold(DEFAULT_OUTPUT)).await;
    world.gateway.assert_sound();
}

/// A document, or events, of this many bytes and more, that reports its usage at the end.
fn vast(bytes: usize, streams: bool) -> String {
    let usage = r#""usage":{"prompt_tokens":7,"completion_tokens":11,"total_tokens":18}"#;
    if !streams {
        return format!(
            r#"{{"choices":[{{"message":{{"content":"{}"}}}}],{usage}}}"#,
            "z".repeat(bytes)
        );
    }
    let event = format!(
        "data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{}\"}}}}],\"usage\":null}}\n\n",
        "z".repeat(1_000)
    );
    let mut events = event.repeat(bytes / event.len() + 1);
    events.push_str(&format!("data: {{\"choices\":[],{usage}}}\n\ndata: [DONE]\n\n"));
    events
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vast_answer_is_accounted_without_being_held() {
    let bytes = if std::env::var_os("PORTCULLIS_QUICK").is_some() {
        10_000_000
    } else {
        100_000_000
    };
    let mut world = Llm::with(json!({}), |plan| plan.workers(1)).await;
    world.served(&chat().call(&tokens("warm", PLENTY))).await;
    for (name, asked) in [("document", chat()), ("stream", chat_stream())] {
        world.provider.behave(Behaviour {
            bytes: Some(vast(bytes, name == "stream")),
            ..Behaviour::default()
        });
        let before = world.gateway.resident_kb();
        let call = asked.call(&tokens(name, PLENTY));
        let length = drained(&world, &call).await;
        assert!(length > bytes, "{length} bytes came");
        world.becomes(name, 18).await;
        let grown = world.gateway.resident_kb().saturating_sub(before);
        assert!(grown < ENVOY_GROWS_AT_MOST_KB, "Envoy has grown by {grown} kB");
    }
    world.gateway.assert_sound();
}

/// Reads the answer and throws it away, and gives its length.
async fn drained(world: &Llm, call: &Call) -> usize {
    let mut connection = Connection::open(world.gateway.address()).await;
    connection
        .send(&call.clone().header("connection", "close").bytes())
        .await;
    connection.drain().await
}
