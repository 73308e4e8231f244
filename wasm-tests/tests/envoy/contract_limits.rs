//! Limits stamped on the envelope hold: exactly as many requests go up as the tightest limit says, in every scope and
//! resource, and what is denied charges nothing.

use portcullis_wasm_tests::{Call, DEADLINE, Envelope, Reply, development_service, until};
use serde_json::{Value, json};

use crate::expect::{CONCURRENCY_LIMITED, RATE_LIMITED, TOKENS_LIMITED, refused, served, shows_limit, summary};
use crate::world::{World, burst, concurrent_burst};

const SCOPES: [&str; 3] = ["owner", "org", "auth"];

/// Every scope, on the ordinary route and on the one matched by a header: 35 calls under a limit of 30.
async fn thirty_of_thirty_five(rules: &str, capacity: Value) {
    let mut world = World::start(rules, capacity).await;
    for scope in SCOPES {
        for route in ["ordinary", "special"] {
            let id = |kind: &str| format!("{kind}-{scope}-{route}");
            let envelope = Envelope::owner(&id("owner"))
                .org(&id("org"))
                .auth(&id("auth"))
                .requests(scope, 30);
            let call = Call::get("/v1/models").envelope(&envelope).header("x-route", route);
            let before = world.upstream.hits();
            let answers = burst(world.gateway.address(), &call, 35).await;
            let (passed, denied) = answers.split_at(30);
            for answer in passed {
                served(answer);
                assert_eq!(answer.header("x-by-header").is_some(), route == "special");
            }
            for answer in denied {
                refused(answer, RATE_LIMITED);
                shows_limit(answer, "requests", 30, 0);
                assert_eq!(answer.error()["scope"], scope);
                assert_eq!(answer.header("x-should-retry"), None, "waiting cures it");
            }
            assert_eq!(world.upstream.hits() - before, 30, "{scope} on the {route} route");
        }
    }
    world.gateway.await_metric("portcullis_admitted", 180).await;
    world
        .gateway
        .await_metric("portcullis_rejected_quota_exhausted", 30)
        .await;
    let gauge = format!("portcullis_enforcing_{rules}");
    assert_eq!(
        world.gateway.metric(&gauge).await,
        Some(1),
        "{}",
        world.gateway.metrics().await
    );
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn thirty_of_thirty_five_pass_with_no_tiers() {
    thirty_of_thirty_five("contract-limits", Value::Null).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn thirty_of_thirty_five_pass_with_empty_tiers() {
    thirty_of_thirty_five(
        "contract-limits",
        json!({"organization": {}, "platform": {}, "lanes": {}}),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn thirty_of_thirty_five_pass_with_null_tiers() {
    let tiers = json!({"organization": null, "platform": null, "graph": null, "organization_model": null});
    thirty_of_thirty_five("contract-limits", tiers).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn thirty_of_thirty_five_pass_under_operator_admission() {
    thirty_of_thirty_five(
        "operator-admission",
        json!({"platform": {"requests": 100_000}, "organization": {}}),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn thirty_of_thirty_five_pass_under_operator_admission_without_tiers() {
    thirty_of_thirty_five("operator-admission", json!({})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn exactly_the_limit_passes_when_all_come_at_once() {
    let world = World::start("contract-limits", Value::Null).await;
    let call = Call::get("/").envelope(&Envelope::owner("o").requests("owner", 30));
    let answers = concurrent_burst(world.gateway.address(), &call, 20, 5).await;
    assert_eq!(
        answers.iter().filter(|answer| answer.status == 200).count(),
        30,
        "{:?}",
        summary(&answers)
    );
    answers.iter().filter(|answer| answer.status != 200).for_each(|answer| {
        refused(answer, RATE_LIMITED);
    });
    assert_eq!(world.upstream.hits(), 30);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tighter_limit_decides() {
    let world = World::start("contract-limits", Value::Null).await;
    let envelope = Envelope::owner("o").org("g").requests("owner", 3).requests("org", 10);
    let answers = burst(world.gateway.address(), &Call::get("/").envelope(&envelope), 5).await;
    answers[..3].iter().for_each(served);
    for answer in &answers[3..] {
        refused(answer, RATE_LIMITED);
        assert_eq!(answer.error()["scope"], "owner");
        shows_limit(answer, "requests", 3, 0);
    }
    assert_eq!(world.upstream.hits(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_denied_request_charges_no_scope() {
    let world = World::start("contract-limits", Value::Null).await;
    let call = |owner: &str, limit: u64| {
        Call::get("/").envelope(
            &Envelope::owner(owner)
                .org("g")
                .requests("owner", limit)
                .requests("org", 10),
        )
    };
    let greedy = burst(world.gateway.address(), &call("greedy", 3), 6).await;
    greedy[..3].iter().for_each(served);
    greedy[3..]
        .iter()
        .for_each(|answer| assert_eq!(answer.error()["scope"], "owner"));
    let other = burst(world.gateway.address(), &call("other", 100), 10).await;
    other[..7].iter().for_each(served);
    for answer in &other[7..] {
        refused(answer, RATE_LIMITED);
        assert_eq!(answer.error()["scope"], "org");
    }
    assert_eq!(world.upstream.hits(), 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_limited_by_what_each_request_reserves() {
    let world = World::start("contract-limits", Value::Null).await;
    for scope in SCOPES {
        let envelope = Envelope::owner(scope).org(scope).auth(scope).tokens(scope, 2500);
        let before = world.upstream.hits();
        let answers = burst(world.gateway.address(), &Call::get("/").envelope(&envelope), 4).await;
        answers[..2].iter().for_each(served);
        for answer in &answers[2..] {
            refused(answer, TOKENS_LIMITED);
            shows_limit(answer, "tokens", 2500, 452);
            assert_eq!(answer.error()["scope"], scope);
        }
        assert_eq!(world.upstream.hits() - before, 2, "{scope}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_limit_below_the_reservation_still_serves_one_request() {
    let world = World::start("contract-limits", Value::Null).await;
    let call = Call::get("/").envelope(&Envelope::owner("o").tokens("owner", 100));
    let answers = burst(world.gateway.address(), &call, 2).await;
    served(&answers[0]);
    refused(&answers[1], TOKENS_LIMITED);
    assert_eq!(world.upstream.hits(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_is_held_until_the_answer_ends() {
    let world = World::start("contract-limits", Value::Null).await;
    for scope in SCOPES {
        let before = world.upstream.hits();
        let envelope = Envelope::owner(scope).org(scope).auth(scope).concurrency(scope, 2);
        let call = Call::get("/").envelope(&envelope);
        world.upstream.reply(Reply {
            stream: true,
            ..Reply::default()
        });
        let address = world.gateway.address();
        let held = tokio::spawn({
            let call = call.clone();
            async move { concurrent_burst(address, &call, 2, 1).await }
        });
        world.upstream.await_hits(before + 2).await;
        let denied = world.gateway.call(&call).await;
        assert_eq!(refused(&denied, CONCURRENCY_LIMITED), 1, "{scope}");
        assert_eq!(denied.error()["scope"], scope);
        assert_eq!(world.upstream.hits(), before + 2, "{scope}");
        world.upstream.release();
        held.await.unwrap().iter().for_each(served);
        until("the slots to be free again", DEADLINE, async || {
            (world.gateway.call(&call).await.status == 200).then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_absent_limit_is_unlimited_and_zero_blocks() {
    let world = World::start("contract-limits", Value::Null).await;
    let unlimited = Call::get("/").envelope(&Envelope::owner("o").org("g").auth("a"));
    burst(world.gateway.address(), &unlimited, 50)
        .await
        .iter()
        .for_each(served);
    for scope in SCOPES {
        let ids = || Envelope::owner("o").org("g").auth("a");
        for (envelope, refusal) in [
            (ids().requests(scope, 0), RATE_LIMITED),
            (ids().tokens(scope, 0), TOKENS_LIMITED),
            (ids().concurrency(scope, 0), CONCURRENCY_LIMITED),
        ] {
            let denied = world.gateway.call(&Call::get("/").envelope(&envelope)).await;
            refused(&denied, refusal);
            assert_eq!(denied.header("x-should-retry"), Some("false"));
            assert_eq!(denied.error()["scope"], scope);
        }
    }
    assert_eq!(world.upstream.hits(), 50);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_calls_with_one_request_id_are_charged_a_thousand_times() {
    let world = World::start("contract-limits", Value::Null).await;
    let envelope = Envelope::owner("o").requests("owner", 1000);
    let call = Call::get("/")
        .envelope(&envelope)
        .header("x-request-id", "11111111-2222-4333-8444-555555555555");
    let answers = concurrent_burst(world.gateway.address(), &call, 10, 100).await;
    assert_eq!(summary(&answers), [(200, String::new(), 1000)]);
    let denied = world.gateway.call(&call).await;
    refused(&denied, RATE_LIMITED);
    assert_eq!(denied.error()["request_id"], "11111111-2222-4333-8444-555555555555");
    assert_eq!(world.upstream.hits(), 1000);
}

#[tokio::test(flavor = "multi_thread")]
async fn tenants_never_share_a_counter_whatever_their_ids_hold() {
    let world = World::start("contract-limits", Value::Null).await;
    let ids = [
        "a:b",
        "a",
        "b",
        "b:c",
        "{x}",
        "x",
        "{x",
        "a b",
        "a  b",
        "\u{1F512}",
        "\u{1F513}",
        "a/b",
        "a%3Ab",
        "a|b",
        "a\\b",
        "owner:a",
        "*",
        "é",
        "e\u{301}",
        "A",
        "\"a\"",
        "a,b",
        "null",
    ];
    let mut hits = 0;
    for scope in SCOPES {
        for id in ids {
            let envelope = match scope {
                "owner" => Envelope::owner(id).requests(scope, 1),
                "org" => Envelope::owner("o").org(id).requests(scope, 1),
                _ => Envelope::owner("o").auth(id).requests(scope, 1),
            };
            let answers = burst(world.gateway.address(), &Call::get("/").envelope(&envelope), 2).await;
            served(&answers[0]);
            refused(&answers[1], RATE_LIMITED);
            hits += 1;
        }
    }
    assert_eq!(world.upstream.hits(), hits);
}

#[tokio::test(flavor = "multi_thread")]
async fn ids_that_join_to_the_same_text_are_different_tenants() {
    let world = World::start("contract-limits", Value::Null).await;
    for (owner, org) in [("a:b", "c"), ("a", "b:c"), ("a:b:c", ""), ("", "a:b:c")] {
        let mut envelope = Envelope::owner(if owner.is_empty() { "-" } else { owner }).requests("owner", 1);
        if !org.is_empty() {
            envelope = envelope.org(org).requests("org", 1);
        }
        let answers = burst(world.gateway.address(), &Call::get("/").envelope(&envelope), 2).await;
        served(&answers[0]);
        refused(&answers[1], RATE_LIMITED);
    }
    assert_eq!(world.upstream.hits(), 4);
}

fn short_windows() -> Value {
    let mut service = development_service(Value::Null);
    service["limiter"]["window_s"] = json!(2);
    service
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_as_long_as_retry_after_says_is_enough() {
    let world = World::with("contract-limits", short_windows(), |plan| {
        plan.plugin(json!({"window_s": 2}))
    })
    .await;
    let call = Call::get("/").envelope(&Envelope::owner("o").requests("owner", 2));
    let answers = burst(world.gateway.address(), &call, 3).await;
    answers[..2].iter().for_each(served);
    let wait = refused(&answers[2], RATE_LIMITED);
    assert!(wait <= 2, "longer than the window: {wait}");
    // The one pause that is what is being tested.
    tokio::time::sleep(std::time::Duration::from_secs(wait)).await;
    served(&world.gateway.call(&call).await);
    assert_eq!(world.upstream.hits(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_several_exhausted_limits_the_longest_wait_is_told() {
    let world = World::with("contract-limits", short_windows(), |plan| {
        plan.plugin(json!({"window_s": 2}))
    })
    .await;
    let call = |owner: &str, org: &str, org_limit: u64| {
        Call::get("/").envelope(
            &Envelope::owner(owner)
                .org(org)
                .requests("owner", 2)
                .requests("org", org_limit),
        )
    };
    served(&world.gateway.call(&call("o", "elsewhere", 100)).await);
    let opened = std::time::Instant::now();
    until("a second of the owner's window to pass", DEADLINE, async || {
        (opened.elapsed().as_millis() > 1050).then_some(())
    })
    .await;
    served(&world.gateway.call(&call("o", "here", 1)).await);
    // The owner's window ends within a second, the org's in two.
    let denied = world.gateway.call(&call("o", "here", 1)).await;
    assert_eq!(refused(&denied, RATE_LIMITED), 2);
    assert_eq!(denied.error()["scope"], "org");
    assert_eq!(world.upstream.hits(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_tie_owner_comes_before_org_and_auth_and_requests_before_tokens() {
    let world = World::start("contract-limits", Value::Null).await;
    let envelope = Envelope::owner("o").org("g").auth("a");
    let envelope = SCOPES
        .iter()
        .fold(envelope, |all, scope| all.tokens(scope, 1024).requests(scope, 1));
    let answers = burst(world.gateway.address(), &Call::get("/").envelope(&envelope), 2).await;
    served(&answers[0]);
    refused(&answers[1], RATE_LIMITED);
    assert_eq!(answers[1].error()["scope"], "owner");
    assert_eq!(world.upstream.hits(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn admitted_requests_show_the_tightest_limit_only_when_asked_to() {
    let envelope = || Envelope::owner("o").org("g").requests("owner", 5).requests("org", 30);
    let quiet = World::start("contract-limits", Value::Null).await;
    let answer = quiet.gateway.call(&Call::get("/").envelope(&envelope())).await;
    served(&answer);
    assert_eq!(answer.header("x-ratelimit-limit-requests"), None);
    drop(quiet);
    let service = development_service(json!({"platform": {"requests": 3}}));
    let change = |plan: portcullis_wasm_tests::GatewayPlan| plan.plugin(json!({"reply": {"limit_headers": "always"}}));
    let open = World::with("operator-admission", service, change).await;
    let answer = open.gateway.call(&Call::get("/").envelope(&envelope())).await;
    served(&answer);
    shows_limit(&answer, "requests", 5, 4);
    assert_eq!(open.upstream.hits(), 1);
}
