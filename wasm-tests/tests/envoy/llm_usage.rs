//! What a call is charged in the end: exactly what the provider reports, the estimate where it failed, and the hold where
//! nobody knows; within a second of the stream's end, however it ends.

use portcullis_wasm_tests::{Behaviour, Connection, DEADLINE, Envelope, GatewayPlan, until};
use serde_json::json;

use crate::llm_world::{DEFAULT_OUTPUT, Llm, PLENTY, begun, chat, chat_stream, documents, left, streams, tokens};

const UNKNOWN: &str = "portcullis_usage_unknown";

#[tokio::test(flavor = "multi_thread")]
async fn a_whole_answer_is_charged_exactly_what_it_used() {
    let mut world = Llm::start().await;
    let mut used = Vec::new();
    for (name, asked) in documents().into_iter().chain(streams()) {
        let answer = world.served(&asked.call(&tokens(name, PLENTY))).await;
        used.push((name, world.provider.last_used().total()));
        let direct = Connection::open(world.provider.address)
            .await
            .call(&asked.call(&tokens(name, PLENTY)))
            .await;
        assert_eq!(answer.text(), direct.text(), "the client's bytes are the provider's");
        world.becomes(name, used.last().unwrap().1).await;
    }
    assert!(
        used.iter().all(|(_, used)| (1..200).contains(used)),
        "the provider computes: {used:?}"
    );
    // And the next request sees it.
    let (name, used) = used[0];
    let next = chat();
    let answer = world.served(&next.call(&tokens(name, PLENTY))).await;
    assert_eq!(PLENTY - left(&answer), used + next.hold(DEFAULT_OUTPUT));
    assert_eq!(world.gateway.counter(UNKNOWN).await, 0);
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_is_read_at_any_cut_of_its_bytes() {
    let mut world = Llm::start().await;
    let cuts: [&[usize]; 6] = [&[1], &[2], &[3, 1, 11], &[7], &[64, 5], &[100_000]];
    for (name, asked) in streams() {
        for (at, sizes) in cuts.iter().enumerate() {
            world.provider.behave(Behaviour {
                sizes: sizes.to_vec(),
                ..Behaviour::default()
            });
            let owner = format!("{name}-{at}");
            world.served(&asked.call(&tokens(&owner, PLENTY))).await;
            world.becomes(&owner, world.provider.last_used().total()).await;
        }
    }
    assert_eq!(world.gateway.counter(UNKNOWN).await, 0);
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_counted_is_asked_for_uncompressed() {
    let world = Llm::start().await;
    let call = |envelope: &Envelope| chat().call(envelope).header("accept-encoding", "gzip, br");
    world.served(&call(&tokens("o", PLENTY))).await;
    assert_eq!(
        world.provider.last_header("accept-encoding").as_deref(),
        Some("identity")
    );
    world.becomes("o", world.provider.last_used().total()).await;
    // Where nothing depends on the report, the client gets what it asked for.
    let uncounted = Envelope::owner("p").requests("owner", 10);
    world.served(&call(&uncounted)).await;
    assert_eq!(
        world.provider.last_header("accept-encoding").as_deref(),
        Some("gzip, br")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_does_not_say_its_usage_is_charged_the_hold() {
    let mut world = Llm::start().await;
    let silent = chat().and(json!({"stream": true, "max_tokens": 99}));
    let plain = || chat().and(json!({"max_tokens": 99}));
    let saying = |text: &str| Behaviour {
        bytes: Some(text.to_owned()),
        ..Behaviour::default()
    };
    let gzip = Behaviour {
        gzip: true,
        ..Behaviour::default()
    };
    let rows = [
        ("no-include-usage", silent, Behaviour::default()),
        ("gzip", plain(), gzip.clone()),
        ("gzip-stream", chat_stream().and(json!({"max_tokens": 99})), gzip),
        ("no-usage", plain(), saying(r#"{"choices":[]}"#)),
        (
            "not-json",
            plain(),
            saying(r#"{"usage":{"prompt_tokens":1,"completion_tokens":1}"#),
        ),
        (
            "negative",
            plain(),
            saying(r#"{"usage":{"prompt_tokens":-1,"completion_tokens":1}}"#),
        ),
        (
            "huge",
            plain(),
            saying(r#"{"usage":{"prompt_tokens":1e99,"completion_tokens":1}}"#),
        ),
        (
            "null",
            plain(),
            saying(r#"{"usage":{"prompt_tokens":null,"completion_tokens":null}}"#),
        ),
        (
            "in-a-message",
            plain(),
            saying(r#"{"choices":[{"usage":{"prompt_tokens":0,"completion_tokens":0}}]}"#),
        ),
    ];
    for (at, (name, asked, behaviour)) in rows.iter().enumerate() {
        world.provider.behave(behaviour.clone());
        world.served(&asked.call(&tokens(name, PLENTY))).await;
        world.stays(name, asked.hold(99)).await;
        world
            .gateway
            .await_metric(UNKNOWN, i64::try_from(at + 1).unwrap())
            .await;
    }
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_provider_that_fails_is_charged_the_estimate_of_the_input() {
    let mut world = Llm::start().await;
    let asked = chat().and(json!({"max_tokens": 99}));
    for status in [301, 400, 401, 404, 422, 429, 500, 502, 503, 529] {
        world.provider.behave(Behaviour {
            fail: Some(status),
            ..Behaviour::default()
        });
        let owner = format!("o{status}");
        let answer = world.gateway.call(&asked.call(&tokens(&owner, PLENTY))).await;
        assert_eq!(answer.status, status);
        world.becomes(&owner, asked.estimate()).await;
    }
    // A timeout says nothing of what was generated before.
    for status in [408, 504] {
        world.provider.behave(Behaviour {
            fail: Some(status),
            ..Behaviour::default()
        });
        let owner = format!("o{status}");
        let answer = world.gateway.call(&asked.call(&tokens(&owner, PLENTY))).await;
        assert_eq!(answer.status, status);
        world.stays(&owner, asked.hold(99)).await;
    }
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_no_route_takes_is_charged_the_estimate() {
    let narrow = |plan: GatewayPlan| plan.route(json!({"match": {"prefix": "/elsewhere/"}}));
    let mut world = Llm::with(json!({}), narrow).await;
    let asked = chat().and(json!({"max_tokens": 99}));
    let answer = world.gateway.call(&asked.call(&tokens("o", PLENTY))).await;
    assert_eq!(answer.status, 404);
    world.becomes("o", asked.estimate()).await;
    assert_eq!(world.provider.hits(), 0);
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_provider_that_cannot_be_reached_is_charged_the_estimate() {
    let mut world = Llm::with(json!({}), |plan| plan).await;
    let closed = portcullis_wasm_tests::closed_port();
    let plan = GatewayPlan::new(crate::world::strict(), closed).decision(world.service.address);
    world.gateway = plan
        .patient_connects()
        .plugin(crate::backed::patient())
        .plugin(crate::llm_world::by_body())
        .start()
        .await;
    let asked = chat().and(json!({"max_tokens": 99}));
    let answer = world.gateway.call(&asked.call(&tokens("o", PLENTY))).await;
    assert_eq!(answer.status, 503);
    world.becomes("o", asked.estimate()).await;
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_the_provider_cuts_is_charged_the_hold() {
    let mut world = Llm::start().await;
    for (name, asked) in streams() {
        // Cut before its last event, which is where usage comes; Gemini's last event is its last text.
        for after in [1, 3] {
            world.provider.behave(Behaviour {
                cut_after: Some(after),
                ..Behaviour::default()
            });
            let owner = format!("{name}-{after}");
            let answer = begun(&world.gateway, &asked.call(&tokens(&owner, PLENTY)))
                .await
                .rest()
                .await;
            assert!(
                answer.starts_with(b"HTTP/1.1 200 "),
                "{}",
                String::from_utf8_lossy(&answer)
            );
            let output = if name == "message-stream" { 64 } else { DEFAULT_OUTPUT };
            world.stays(&owner, asked.hold(output)).await;
        }
    }
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_goes_away_is_charged_between_estimate_and_hold() {
    let mut world = Llm::start().await;
    let asked = chat_stream().and(json!({"max_tokens": 99}));
    let waiting = [
        Behaviour {
            hold: true,
            ..Behaviour::default()
        },
        Behaviour {
            pause_after: Some(4),
            ..Behaviour::default()
        },
    ];
    for (at, behaviour) in waiting.into_iter().enumerate() {
        let has_begun = behaviour.pause_after.is_some();
        world.provider.behave(behaviour);
        let owner = format!("o{at}");
        let mut client = begun(&world.gateway, &asked.call(&tokens(&owner, PLENTY))).await;
        world.provider.await_hits(at + 1).await;
        if has_begun {
            client.await_bytes("w\u{F6}rd".as_bytes()).await;
        }
        assert_eq!(world.charged(&owner).await, Some(asked.hold(99)), "held while it lasts");
        assert_eq!(world.slots(&owner).await, 1);
        client.reset();
        until("the slot to be free", crate::llm_world::SETTLED, async || {
            (world.slots(&owner).await == 0).then_some(())
        })
        .await;
        let charged = world.charged(&owner).await.expect("a window");
        assert!(
            (asked.estimate()..=asked.hold(99)).contains(&charged),
            "{charged} is not between {} and {}",
            asked.estimate(),
            asked.hold(99)
        );
        world.provider.release();
    }
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_given_back_after_its_window_has_gone_changes_nothing() {
    let short = |plan: GatewayPlan| plan.plugin(json!({"window_s": 1}));
    let mut world = Llm::with(json!({"window_s": 1}), short).await;
    let window = "portcullis:{owner:o}:tokens:1";
    world.provider.behave(Behaviour {
        pause_after: Some(2),
        ..Behaviour::default()
    });
    let slow = chat_stream().and(json!({"max_tokens": 5_000}));
    let mut client = begun(&world.gateway, &slow.call(&tokens("o", PLENTY))).await;
    assert_eq!(client.answer_head().await, 200);
    assert!(world.redis.number(&["GET", window]).await >= 5_000);
    until("its window to be over", DEADLINE, async || {
        (world.redis.number(&["EXISTS", window]).await == 0).then_some(())
    })
    .await;
    world.provider.release();
    client.await_bytes(b"[DONE]").await;
    until("its settlement", DEADLINE, async || {
        (world.slots("o").await == 0).then_some(())
    })
    .await;
    assert!(
        world.redis.number(&["GET", window]).await >= 0,
        "nothing goes below zero"
    );
    let next = chat();
    let answer = world.served(&next.call(&tokens("o", PLENTY))).await;
    assert_eq!(PLENTY - left(&answer), next.hold(DEFAULT_OUTPUT), "a fresh window");
    world.gateway.assert_sound();
}
