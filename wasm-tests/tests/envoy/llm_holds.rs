//! What a request reserves before it is answered: the rule of each figure, the clamp to the limit, and that no burst gets
//! more than there is.

use portcullis_wasm_tests::{Behaviour, Call, DEADLINE, Envelope, until};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::expect::{TOKENS_LIMITED, refused, shows_limit};
use crate::llm_world::{Asked, DEFAULT_OUTPUT, Llm, PLENTY, chat, left, message, response, tokens};

/// A limit that the largest figure of the interfaces is over.
const LARGEST: u64 = 9_007_199_254_740_991;

#[tokio::test(flavor = "multi_thread")]
async fn a_request_holds_its_input_and_the_most_output_that_it_allows() {
    let mut world = Llm::start().await;
    let many = |fields: Value| chat().and(fields);
    let rows = [
        (chat(), DEFAULT_OUTPUT),
        (many(json!({"max_tokens": 50})), 50),
        (many(json!({"max_tokens": 1, "max_completion_tokens": 5000})), 5000),
        (many(json!({"max_tokens": 5000, "max_completion_tokens": 1})), 5000),
        (many(json!({"max_tokens": 10, "n": 100})), 1000),
        (many(json!({"n": 100})), 100 * DEFAULT_OUTPUT),
        (many(json!({"max_tokens": 10, "n": 2, "best_of": 20})), 200),
        (many(json!({"max_tokens": 10, "n": -1})), 10),
        (many(json!({"max_tokens": -1})), DEFAULT_OUTPUT),
        (
            many(json!({"max_tokens": -1, "max_completion_tokens": 1})),
            DEFAULT_OUTPUT,
        ),
        (many(json!({"max_tokens": 0})), DEFAULT_OUTPUT),
        (many(json!({"max_tokens": 1e9})), 1_000_000_000),
        (many(json!({"max_tokens": "50"})), 50),
        (many(json!({"max_tokens": "fifty"})), DEFAULT_OUTPUT),
        (many(json!({"max_tokens": 1.5})), 2),
        (many(json!({"max_tokens": null})), DEFAULT_OUTPUT),
        (many(json!({"max_tokens": null, "max_completion_tokens": 1})), 1),
        (many(json!({"max_tokens": true})), DEFAULT_OUTPUT),
        (
            many(json!({"max_tokens": [9], "max_completion_tokens": 7})),
            DEFAULT_OUTPUT,
        ),
        (response().and(json!({"max_output_tokens": 300})), 300),
        (message().and(json!({"max_tokens": 300, "stream": true})), 300),
        (
            Asked {
                path: "/v1beta/models/gemini-x:generateContent",
                body: json!({"contents": [], "generationConfig": {"maxOutputTokens": 40, "candidateCount": 3}}),
            },
            120,
        ),
        (
            Asked {
                path: "/v1/completions",
                body: json!({"model": "gpt-4o", "prompt": ["a", "b", "c"], "max_tokens": 10}),
            },
            30,
        ),
    ];
    for (at, (asked, output)) in rows.iter().enumerate() {
        let envelope = tokens(&format!("o{at}"), PLENTY);
        let answer = world.gateway.call(&asked.call(&envelope)).await;
        assert_eq!(PLENTY - left(&answer), asked.hold(*output), "{}", asked.body);
    }
    assert_eq!(world.provider.hits(), rows.len());
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn figures_beyond_all_limits_hold_all_there_is_without_overflow() {
    let mut world = Llm::start().await;
    let figures = [
        r#"{"model":"m","max_tokens":1e300}"#,
        r#"{"model":"m","max_tokens":9007199254740992,"n":1e300}"#,
        r#"{"model":"m","max_tokens":18446744073709551616}"#,
        r#"{"model":"m","max_tokens":1000000000,"n":9007199254740991}"#,
        r#"{"model":"m","max_tokens":99999999999999999999999999999999999999999999999999999999999999999999999999999}"#,
    ];
    for (at, body) in figures.iter().enumerate() {
        for limit in [100, LARGEST] {
            let envelope = tokens(&format!("o{at}-{limit}"), limit);
            let call = crate::llm_world::post("/v1/chat/completions", *body).envelope(&envelope);
            let answer = world.gateway.call(&call).await;
            assert_eq!(left(&answer), 0, "{body} {limit}");
        }
    }
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_is_clamped_to_the_smallest_limit_and_the_next_request_is_refused() {
    let world = Llm::start().await;
    world.provider.behave(Behaviour {
        hold: true,
        ..Behaviour::default()
    });
    let envelope = tokens("o", 5_000)
        .org("g")
        .tokens("org", 100)
        .auth("a")
        .tokens("auth", 700);
    let call = chat().and(json!({"max_tokens": 5_000})).call(&envelope);
    let first = crate::llm_world::begun(&world.gateway, &call).await;
    world.provider.await_hits(1).await;
    assert_eq!(world.charged("o").await, Some(100), "the org's limit is the smallest");
    let denied = world.gateway.call(&call).await;
    refused(&denied, TOKENS_LIMITED);
    shows_limit(&denied, "tokens", 100, 0);
    assert_eq!(denied.error()["scope"], "org");
    assert_eq!(world.provider.hits(), 1);
    drop(first);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_without_a_body_holds_the_default_reservation() {
    let mut world = Llm::start().await;
    for (at, method) in ["GET", "HEAD", "DELETE", "POST"].iter().enumerate() {
        let call = Call::new(method, "/v1/models").envelope(&tokens(&format!("o{at}"), PLENTY));
        let call = if *method == "POST" {
            call.header("content-length", "0")
        } else {
            call
        };
        let answer = world.gateway.call(&call).await;
        assert_eq!(
            (answer.status, left(&answer)),
            (200, PLENTY - DEFAULT_OUTPUT),
            "{method}"
        );
    }
    world.gateway.assert_sound();
}

/// A request that holds exactly this many tokens.
fn holding(hold: u64) -> Asked {
    let asked = |output| chat().and(json!({"max_tokens": output}));
    let output = (10..hold).find(|output| asked(*output).hold(*output) == hold);
    let output = output.expect("the hold is larger than the body");
    asked(output)
}

#[tokio::test(flavor = "multi_thread")]
async fn of_fifty_parallel_requests_of_forty_tokens_a_hundred_admit_two() {
    let world = Llm::start().await;
    let second = world.another_gateway().await;
    world.provider.behave(Behaviour {
        hold: true,
        ..Behaviour::default()
    });
    let call = holding(40).call(&Envelope::owner("o").tokens("owner", 100));
    let mut running = JoinSet::new();
    for at in 0..50 {
        let address = if at % 2 == 0 { &world.gateway } else { &second }.address();
        let call = call.clone();
        running.spawn(async move { portcullis_wasm_tests::Connection::open(address).await.call(&call).await });
    }
    let mut denied = 0;
    while denied < 48 {
        let answer = running.join_next().await.expect("48 are refused").unwrap();
        refused(&answer, TOKENS_LIMITED);
        shows_limit(&answer, "tokens", 100, 20);
        denied += 1;
    }
    assert_eq!(world.provider.hits(), 2);
    assert_eq!(world.charged("o").await, Some(80));
    world.provider.release();
    for answer in running.join_all().await {
        assert_eq!(answer.status, 200);
    }
    assert_eq!(world.provider.hits(), 2);
    // What they did not use is there again for the next.
    let used = 2 * world.provider.last_used().total();
    world.becomes("o", used).await;
    until("a third to be served", DEADLINE, async || {
        (world.gateway.call(&call).await.status == 200).then_some(())
    })
    .await;
}
