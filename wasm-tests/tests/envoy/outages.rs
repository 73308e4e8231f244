//! The decision service fails in every way: the answer follows the rules, within the deadline, with our own body, and a
//! closed gateway lets nothing up. One Envoy has both a listener that rejects and one that admits; one worker, so that
//! both share a VM and its breaker.

use std::time::Duration;

use portcullis_wasm_tests::{
    Answer, Call, DEADLINE, Decision, Envelope, FakeDecision, Gateway, GatewayPlan, Service, Upstream, closed_port,
    development_service, until,
};
use serde_json::{Value, json};

use crate::expect::{CONCURRENCY_LIMITED, DECISION_UNAVAILABLE, RATE_LIMITED, TOKENS_LIMITED, refused, served};
use crate::world::{Scripted, burst, concurrent_burst, strict};

const TIMEOUT: Duration = Duration::from_millis(250);
/// What a busy machine may add to the timeout.
const SLACK: Duration = Duration::from_secs(2);

fn limited() -> Call {
    Call::get("/v1/models").envelope(&Envelope::owner("o").requests("owner", 100))
}

/// `ingress` rejects, `open` admits.
fn both_ways(plan: GatewayPlan) -> GatewayPlan {
    plan.workers(1).listener("open", "contract-limits")
}

async fn start_both(upstream: &Upstream, decision: std::net::SocketAddr) -> Gateway {
    both_ways(GatewayPlan::new(strict(), upstream.address).decision(decision))
        .start()
        .await
}

#[track_caller]
fn in_time(answer: &Answer) {
    assert!(answer.took < TIMEOUT + SLACK, "took {:?}", answer.took);
}

/// One call under each of the rules while the service is unavailable.
async fn follows_the_rules(gateway: &mut Gateway, upstream: &Upstream) {
    let before = (
        upstream.hits(),
        gateway.counter("portcullis_rejected_decision_unavailable").await,
    );
    let opened = gateway.counter("portcullis_bypassed_decision_unavailable").await;
    let closed = gateway.call(&limited()).await;
    refused(&closed, DECISION_UNAVAILABLE);
    in_time(&closed);
    assert_eq!(upstream.hits(), before.0, "a closed gateway lets nothing up");
    let open = gateway.call_on("open", &limited()).await;
    served(&open);
    in_time(&open);
    assert_eq!(upstream.hits(), before.0 + 1);
    gateway
        .await_metric("portcullis_rejected_decision_unavailable", before.1 + 1)
        .await;
    gateway
        .await_metric("portcullis_bypassed_decision_unavailable", opened + 1)
        .await;
    gateway.await_metric("portcullis_enforcing_contract-limits", 0).await;
    gateway.assert_sound();
}

async fn scripted_failure(decision: Decision) {
    let mut world = Scripted::with(strict(), decision, both_ways).await;
    follows_the_rules(&mut world.gateway, &world.upstream).await;
    assert!(!world.decision.decides().is_empty(), "the service was asked");
    world.decision.behave(Decision::Admit);
    served(&world.gateway.call(&limited()).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hanging_service_is_by_the_rules() {
    scripted_failure(Decision::Hang).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_slow_by_300_ms_is_by_the_rules() {
    scripted_failure(Decision::AdmitAfter(Duration::from_millis(300))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_slow_by_95_ms_is_waited_for() {
    let world = Scripted::with(strict(), Decision::AdmitAfter(Duration::from_millis(95)), both_ways).await;
    let answers = burst(world.gateway.address(), &limited(), 3).await;
    answers.iter().for_each(served);
    assert!(
        answers.iter().all(|answer| answer.took >= Duration::from_millis(90)),
        "{answers:?}"
    );
    served(&world.gateway.call_on("open", &limited()).await);
    assert_eq!(world.upstream.hits(), 4);
    assert_eq!(
        world.gateway.counter("portcullis_bypassed_decision_unavailable").await,
        0
    );
    assert_eq!(
        world.gateway.counter("portcullis_rejected_decision_unavailable").await,
        0
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_500_is_by_the_rules() {
    scripted_failure(Decision::Status(500)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_403_is_by_the_rules() {
    scripted_failure(Decision::Status(403)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_429_is_an_outage_and_never_a_denial() {
    scripted_failure(Decision::Status(429)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_201_that_would_admit_is_by_the_rules() {
    scripted_failure(Decision::Status(201)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_body_is_by_the_rules() {
    scripted_failure(Decision::Body(Vec::new())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_brace_is_by_the_rules() {
    scripted_failure(Decision::Body(b"{".to_vec())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_are_not_utf8_are_by_the_rules() {
    scripted_failure(Decision::Body(vec![0xC0, 0xA7, 0xFF])).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_megabytes_are_by_the_rules() {
    scripted_failure(Decision::Body(vec![b' '; 2 * 1024 * 1024])).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_verdict_is_by_the_rules() {
    scripted_failure(Decision::Verdict(json!({"verdict": "perhaps"}))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_code_of_denial_is_by_the_rules() {
    scripted_failure(Decision::Deny(json!({"code": "NO_SUCH_CODE", "gate": "contract"}))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_operations_id_is_by_the_rules() {
    scripted_failure(Decision::OtherOperation).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_dropped_without_an_answer_is_by_the_rules() {
    scripted_failure(Decision::Drop).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_dies_in_its_body_is_by_the_rules() {
    scripted_failure(Decision::DieMidBody).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusing_service_is_by_the_rules() {
    let upstream = Upstream::start().await;
    let mut gateway = start_both(&upstream, closed_port()).await;
    follows_the_rules(&mut gateway, &upstream).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_service_is_by_the_rules_and_works_again_after_a_restart() {
    let upstream = Upstream::start().await;
    let mut service = Service::start(development_service(Value::Null)).await;
    let mut gateway = start_both(&upstream, service.address).await;
    served(&gateway.call(&limited()).await);
    service.kill();
    follows_the_rules(&mut gateway, &upstream).await;
    service.restart().await;
    until("the gateway to ask again", DEADLINE, async || {
        (gateway.call(&limited()).await.status == 200).then_some(())
    })
    .await;
    let denied = Call::get("/").envelope(&Envelope::owner("p").requests("owner", 1));
    served(&gateway.call_on("open", &denied).await);
    refused(&gateway.call_on("open", &denied).await, RATE_LIMITED);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_service_is_by_the_rules_and_works_again_once_it_thaws() {
    let upstream = Upstream::start().await;
    let service = Service::start(development_service(Value::Null)).await;
    let mut gateway = start_both(&upstream, service.address).await;
    served(&gateway.call(&limited()).await);
    service.freeze();
    follows_the_rules(&mut gateway, &upstream).await;
    service.thaw();
    until("the gateway to ask again", DEADLINE, async || {
        (gateway.call(&limited()).await.status == 200).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unavailability_told_by_the_service_names_the_dependency() {
    let verdict = json!({"verdict": "unavailable", "dependency": "limiter", "gate": "contract"});
    let world = Scripted::start(strict(), Decision::Verdict(verdict)).await;
    let degraded = crate::expect::Refusal {
        class: "limiter_unavailable",
        ..DECISION_UNAVAILABLE
    };
    refused(&world.gateway.call(&limited()).await, degraded);
    assert_eq!(world.upstream.hits(), 0);
    world
        .gateway
        .await_metric("portcullis_rejected_limiter_unavailable", 1)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_of_zero_denies_while_the_service_is_down_whatever_the_rules() {
    let upstream = Upstream::start().await;
    let mut gateway = start_both(&upstream, closed_port()).await;
    for listener in ["ingress", "open"] {
        for scope in ["owner", "org", "auth"] {
            let ids = || Envelope::owner("o").org("g").auth("a");
            for (envelope, refusal) in [
                (ids().requests(scope, 0), RATE_LIMITED),
                (ids().tokens(scope, 0), TOKENS_LIMITED),
                (ids().concurrency(scope, 0), CONCURRENCY_LIMITED),
            ] {
                let denied = gateway.call_on(listener, &Call::get("/").envelope(&envelope)).await;
                refused(&denied, refusal);
                assert_eq!(denied.header("x-should-retry"), Some("false"), "{denied:?}");
                assert_eq!(denied.error()["scope"], scope);
                in_time(&denied);
            }
        }
    }
    assert_eq!(upstream.hits(), 0);
    gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_opened_decision_is_logged_at_warning_and_not_once_per_request() {
    let upstream = Upstream::start().await;
    let gateway = start_both(&upstream, closed_port()).await;
    burst(gateway.address_of("open"), &limited(), 20)
        .await
        .iter()
        .for_each(served);
    let open = |line: &Value| {
        line["message"]
            .as_str()
            .is_some_and(|text| text.contains("fail-open, launch unmetered"))
    };
    let (level, line) = gateway.await_log("fail-open, launch unmetered", open).await;
    assert_eq!(
        (level.as_str(), &line["class"]),
        ("warning", &json!("decision_unavailable"))
    );
    let lines = gateway.log_lines().iter().filter(|line| open(line)).count();
    assert!(lines <= 4, "{lines} lines for 20 requests");
    assert_eq!(upstream.hits(), 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_emergency_allowance_is_open_until_it_is_spent() {
    let mut rules = strict();
    rules["decision"]["when_unavailable"] = json!({"admit": {"max_per_minute": 3}});
    let upstream = Upstream::start().await;
    let gateway = GatewayPlan::new(rules, upstream.address).workers(1).start().await;
    let answers = burst(gateway.address(), &limited(), 6).await;
    answers[..3].iter().for_each(served);
    answers[3..].iter().for_each(|answer| {
        refused(answer, DECISION_UNAVAILABLE);
    });
    assert_eq!(upstream.hits(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn after_five_failures_the_breaker_answers_at_once_and_closes_again() {
    let world = Scripted::with(strict(), Decision::Hang, |plan| plan.workers(1)).await;
    let answers = burst(world.gateway.address(), &limited(), 5).await;
    answers.iter().for_each(|answer| {
        refused(answer, DECISION_UNAVAILABLE);
    });
    world.gateway.await_metric("portcullis_breaker_open", 1).await;
    let asked = world.decision.decides().len();
    let answers = burst(world.gateway.address(), &limited(), 20).await;
    for answer in &answers {
        refused(answer, DECISION_UNAVAILABLE);
    }
    let quick = answers
        .iter()
        .filter(|answer| answer.took < Duration::from_millis(100))
        .count();
    assert!(
        quick >= 18,
        "{:?}",
        answers.iter().map(|answer| answer.took).collect::<Vec<_>>()
    );
    assert!(world.decision.decides().len() <= asked + 2, "at most a probe a second");
    assert_eq!(world.upstream.hits(), 0);
    world.decision.behave(Decision::Admit);
    until("the breaker to close", DEADLINE, async || {
        (world.gateway.call(&limited()).await.status == 200).then_some(())
    })
    .await;
    world.gateway.await_metric("portcullis_breaker_open", 0).await;
    served(&world.gateway.call(&limited()).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stale_keep_alive_connection_loses_no_request() {
    let world = Scripted::with(strict(), Decision::Admit, |plan| plan.workers(1)).await;
    world.decision.answers_per_connection(1);
    burst(world.gateway.address(), &limited(), 10)
        .await
        .iter()
        .for_each(served);
    assert_eq!(world.upstream.hits(), 10);
    let asked = world.decision.decides();
    let mut operations: Vec<_> = asked.iter().filter_map(|decide| decide["op"].as_str()).collect();
    operations.dedup();
    assert_eq!(operations.len(), 10, "a retry keeps its operation id: {asked:?}");
    assert!(asked.len() > 10, "some connection was stale");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_connection_is_retried_once_and_not_more() {
    let world = Scripted::with(strict(), Decision::Drop, |plan| plan.workers(1)).await;
    refused(&world.gateway.call(&limited()).await, DECISION_UNAVAILABLE);
    let asked = world.decision.decides();
    assert_eq!(asked.len(), 2, "{asked:?}");
    assert_eq!(asked[0]["op"], asked[1]["op"]);
    assert_eq!(world.upstream.hits(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_restart_under_load_loses_no_request() {
    let upstream = Upstream::start().await;
    let mut service = Service::start_on(portcullis_wasm_tests::free_port(), generous(), &["--reuse-port"]).await;
    let port = service.address.port();
    let mut gateway = GatewayPlan::new(strict(), upstream.address)
        .decision(service.address)
        .plugin(crate::backed::patient())
        .start()
        .await;
    let address = gateway.address();
    let call = Call::get("/").envelope(&Envelope::owner("o").requests("owner", 1_000_000));
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let mut load = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let (call, stopped) = (call.clone(), stopped.clone());
        load.spawn(async move {
            let mut answers = Vec::new();
            while !*stopped.borrow() {
                answers.extend(burst(address, &call, 20).await);
            }
            answers
        });
    }
    for _ in 0..3 {
        let seen = upstream.hits();
        until("some load", DEADLINE, async || {
            (upstream.hits() > seen + 100).then_some(())
        })
        .await;
        let newer = Service::start_on(port, generous(), &["--reuse-port"]).await;
        assert_eq!(service.stop().await, Some(0), "{}", service.log());
        service = newer;
    }
    let seen = upstream.hits();
    until("some load", DEADLINE, async || {
        (upstream.hits() > seen + 100).then_some(())
    })
    .await;
    stop.send_replace(true);
    let answers: Vec<_> = load.join_all().await.into_iter().flatten().collect();
    assert_eq!(
        crate::expect::summary(&answers),
        [(200, String::new(), answers.len())],
        "{}",
        gateway.metrics().await
    );
    assert_eq!(upstream.hits(), answers.len());
    gateway.assert_sound();
}

fn generous() -> Value {
    development_service(Value::Null)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_of_another_profile_is_told_unavailable_and_the_service_logs_it() {
    let upstream = Upstream::start().await;
    let service = Service::start(development_service(Value::Null)).await;
    let plan = GatewayPlan::new(strict(), upstream.address).plugin(json!({"profile": "staging"}));
    let gateway = plan.decision(service.address).start().await;
    refused(&gateway.call(&limited()).await, DECISION_UNAVAILABLE);
    assert_eq!(upstream.hits(), 0);
    until("an ERROR line about the profile", DEADLINE, async || {
        let lines = service.log_lines();
        let told = |line: &Value| {
            line["level"]
                .as_str()
                .is_some_and(|level| level.eq_ignore_ascii_case("error"))
                && line.to_string().contains("profile")
        };
        lines.iter().any(told).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_at_once_are_all_answered_while_the_service_hangs() {
    let mut world = Scripted::with(strict(), Decision::Hang, both_ways).await;
    let closed = concurrent_burst(world.gateway.address(), &limited(), 40, 1).await;
    for answer in &closed {
        refused(answer, DECISION_UNAVAILABLE);
        in_time(answer);
    }
    let open = concurrent_burst(world.gateway.address_of("open"), &limited(), 40, 1).await;
    open.iter().for_each(served);
    open.iter().for_each(in_time);
    assert_eq!(world.upstream.hits(), 40);
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_passed_its_deadline_is_cancelled() {
    let decision = FakeDecision::start(Decision::AdmitAfter(Duration::from_millis(400))).await;
    let upstream = Upstream::start().await;
    let gateway = start_both(&upstream, decision.address).await;
    refused(&gateway.call(&limited()).await, DECISION_UNAVAILABLE);
    let operation = decision.decides()[0]["op"].as_str().unwrap().to_owned();
    until("the cancel", DEADLINE, async || {
        decision.settled("cancels").contains(&operation).then_some(())
    })
    .await;
    assert_eq!(upstream.hits(), 0);
}
