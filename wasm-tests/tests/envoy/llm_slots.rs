//! A concurrency slot lives as long as its stream: free within a second of its end whatever ended it, lapsed after a crash,
//! and held for as long as the stream goes on.

use std::time::{Duration, Instant};

use portcullis_wasm_tests::{Answer, Behaviour, Call, Envelope, Gateway, GatewayPlan, until};
use serde_json::json;

use crate::expect::{CONCURRENCY_LIMITED, refused};
use crate::llm_world::{Llm, SETTLED, begun, chat, chat_stream, post};

/// Of the slots here, in seconds.
const SLOT_TTL_S: u64 = 2;

fn one() -> Envelope {
    Envelope::owner("o").concurrency("owner", 1)
}

/// Asks until it is served, for at most `patience`; every other answer has to be the slot's refusal.
async fn served_within(gateway: &Gateway, call: &Call, patience: Duration) -> Answer {
    until("the slot to be free", patience, async || {
        let answer = gateway.call(call).await;
        if answer.status != 200 {
            refused(&answer, CONCURRENCY_LIMITED);
        }
        (answer.status == 200).then_some(answer)
    })
    .await
}

fn paused() -> Behaviour {
    Behaviour {
        pause_after: Some(3),
        ..Behaviour::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_ends_a_stream_frees_its_slot_within_a_second() {
    let timeout = |plan: GatewayPlan| plan.route(json!({"route": {"timeout": "1s"}}));
    let mut world = Llm::with(json!({}), timeout).await;
    let next = chat().call(&one());
    let stream = chat_stream().call(&one());

    world.provider.behave(paused());
    let mut client = begun(&world.gateway, &stream).await;
    client.await_bytes(b"data:").await;
    refused(&world.gateway.call(&next).await, CONCURRENCY_LIMITED);
    client.reset();
    world.provider.behave(Behaviour::default());
    served_within(&world.gateway, &next, SETTLED).await;

    served_within(&world.gateway, &next, SETTLED).await;
    world.provider.behave(Behaviour {
        hold: true,
        ..Behaviour::default()
    });
    until("a stream to begin", SETTLED, async || {
        let answer = world.gateway.call(&stream).await;
        (answer.status == 504).then_some(())
    })
    .await;
    world.provider.behave(Behaviour::default());
    served_within(&world.gateway, &next, SETTLED).await;

    world.provider.behave(Behaviour {
        bytes: Some("{\"usage\": [".to_owned()),
        ..Behaviour::default()
    });
    served_within(&world.gateway, &next, SETTLED).await;
    world.provider.behave(Behaviour::default());
    served_within(&world.gateway, &next, SETTLED).await;

    world.provider.behave(Behaviour {
        cut_after: Some(2),
        ..Behaviour::default()
    });
    until("the slot to be free", SETTLED, async || {
        (world.slots("o").await == 0).then_some(())
    })
    .await;
    let cut = begun(&world.gateway, &stream).await.rest().await;
    assert!(cut.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&cut));
    world.provider.behave(Behaviour::default());
    served_within(&world.gateway, &next, SETTLED).await;

    let before = world.provider.hits();
    let bad = world
        .gateway
        .call(&post("/v1/chat/completions", "{\"model\": ").envelope(&one()))
        .await;
    assert_eq!((bad.status, bad.code().as_str()), (400, "BODY_UNREADABLE"));
    assert_eq!(world.provider.hits(), before);
    served_within(&world.gateway, &next, SETTLED).await;
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_slot_of_a_killed_gateway_lapses() {
    let mut world = Llm::with(json!({"slot_ttl_s": SLOT_TTL_S}), |plan| plan).await;
    let mut second = world.another_gateway().await;
    world.provider.behave(paused());
    let mut client = begun(&world.gateway, &chat_stream().call(&one())).await;
    client.await_bytes(b"data:").await;
    let next = chat().call(&one());
    refused(&second.call(&next).await, CONCURRENCY_LIMITED);
    world.provider.behave(Behaviour::default());
    world.gateway.kill();
    let killed = Instant::now();
    let patience = Duration::from_secs(SLOT_TTL_S) + SETTLED;
    served_within(&second, &next, patience).await;
    eprintln!("free after {:?}", killed.elapsed());
    second.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_of_three_and_a_half_lives_keeps_its_slot() {
    let mut world = Llm::with(json!({"slot_ttl_s": SLOT_TTL_S}), |plan| plan).await;
    world.provider.behave(paused());
    let mut client = begun(&world.gateway, &chat_stream().call(&one())).await;
    client.await_bytes(b"data:").await;
    let next = chat().call(&one());
    let start = Instant::now();
    let long = Duration::from_millis(SLOT_TTL_S * 3_500);
    until("three and a half lives of the slot", long * 2, async || {
        refused(&world.gateway.call(&next).await, CONCURRENCY_LIMITED);
        (start.elapsed() > long).then_some(())
    })
    .await;
    assert_eq!(world.provider.hits(), 1);
    world.provider.release();
    client.await_bytes(b"[DONE]").await;
    served_within(&world.gateway, &next, SETTLED).await;
    assert_eq!(world.provider.hits(), 2);
    assert!(
        world.service.metric("portcullis_slot_lost_total").await < 1.0,
        "no slot was lost"
    );
    world.gateway.assert_sound();
}
