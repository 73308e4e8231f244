//! Tokens under leases: a block holds what its requests may use, and in the end each is charged what the provider reported.

use std::time::{Duration, Instant};

use portcullis_wasm_tests::{Answer, DEADLINE, Envelope, GatewayPlan, until};
use serde_json::json;

use crate::expect::{DECISION_UNAVAILABLE, Refusal, TOKENS_LIMITED, refused};
use crate::leases::{leased, warm};
use crate::llm_world::{DEFAULT_OUTPUT, Llm, PLENTY, chat};
use crate::world::concurrent_burst;

fn leasing(max_age: Duration) -> impl FnOnce(GatewayPlan) -> GatewayPlan {
    move |plan| plan.plugin(leased(max_age))
}

/// No slots: those are held for the length of a stream, and never leased.
fn tokens(owner: &str, limit: u64) -> Envelope {
    Envelope::owner(owner).tokens("owner", limit)
}

/// The sum of what the provider reported.
fn reported(world: &Llm) -> u64 {
    world.provider.used().iter().map(|used| used.total()).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn leased_calls_are_charged_what_they_used_in_the_end() {
    let max_age = Duration::from_secs(2);
    let mut world = Llm::with(json!({}), leasing(max_age)).await;
    let call = chat().call(&tokens("o", PLENTY));
    let warm = warm(&world.gateway, &call).await;
    let answers = concurrent_burst(world.gateway.address(), &call, 4, 50).await;
    assert!(answers.iter().all(|answer| answer.status == 200), "all are served");
    assert_eq!(world.provider.hits(), warm + 200);
    let hits = world.gateway.counter("portcullis_lease_hits").await;
    assert!(hits > 50, "{hits} leased");
    let start = Instant::now();
    let used = reported(&world);
    let mut seen = None;
    until("the window to hold what was used", DEADLINE, async || {
        let charged = world.charged("o").await;
        if charged != seen {
            eprintln!("{charged:?} of {used} after {:?}", start.elapsed());
            seen = charged;
        }
        (charged == Some(used)).then_some(())
    })
    .await;
    assert!(
        start.elapsed() < max_age + Duration::from_secs(2),
        "took {:?}",
        start.elapsed()
    );
    eprintln!("{hits} of {} were leased", warm + 200);
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn holds_of_leased_calls_never_go_over_the_limit() {
    let max_age = Duration::from_secs(1);
    let mut world = Llm::with(json!({}), leasing(max_age)).await;
    let asked = chat();
    let hold = asked.hold(DEFAULT_OUTPUT);
    let limit = hold * 150;
    let call = asked.call(&tokens("o", limit));
    let warm = warm(&world.gateway, &call).await;
    let used = reported(&world);
    // Nothing ends while the provider waits, so that each call keeps its hold.
    world.provider.behave(portcullis_wasm_tests::Behaviour {
        hold: true,
        ..Default::default()
    });
    let held = |world: &Llm| (world.provider.hits() - warm) as u64;
    let address = world.gateway.address();
    let calls = tokio::spawn(async move { concurrent_burst(address, &call, 250, 1).await });
    let mut most = 0;
    until("as many calls to be held as fit", DEADLINE * 2, async || {
        let charged = world.charged("o").await.unwrap_or(0);
        most = most.max(charged);
        assert!(charged <= limit, "{charged} of {limit} tokens");
        assert!(held(&world) * hold + used <= limit, "{} calls are held", held(&world));
        let admitted = world.gateway.counter("portcullis_admitted").await;
        let mut refused = world.gateway.counter("portcullis_rejected_quota_exhausted").await;
        // 250 at once may be more than a loaded machine's store answers in time.
        for class in ["limiter", "decision"] {
            refused += world
                .gateway
                .counter(&format!("portcullis_rejected_{class}_unavailable"))
                .await;
        }
        (admitted + refused == i64::try_from(warm + 250).unwrap()).then_some(())
    })
    .await;
    let held = held(&world);
    world.provider.release();
    let answers: Vec<Answer> = calls.await.unwrap();
    let passed = answers.iter().filter(|answer| answer.status == 200).count() as u64;
    let (undecided, denied): (Vec<&Answer>, Vec<&Answer>) = answers
        .iter()
        .filter(|answer| answer.status != 200)
        .partition(|answer| answer.status == 503);
    for answer in denied {
        refused(answer, TOKENS_LIMITED);
    }
    for answer in &undecided {
        let of_the_limiter = answer.header("x-portcullis-class") == Some("limiter_unavailable");
        let class = if of_the_limiter {
            "limiter_unavailable"
        } else {
            DECISION_UNAVAILABLE.class
        };
        refused(
            answer,
            Refusal {
                class,
                ..DECISION_UNAVAILABLE
            },
        );
    }
    eprintln!(
        "{passed} of 150 passed, {} by a lease, {most} of {limit} tokens at most",
        world.gateway.counter("portcullis_lease_hits").await
    );
    assert_eq!(passed, held);
    assert_eq!(world.provider.hits() as u64, warm as u64 + passed);
    // One is denied only while the whole window is held, by calls that passed or by such as a loaded machine decided too late.
    assert!(passed > 10, "{passed} passed, {} were not decided", undecided.len());
    assert!(passed + undecided.len() as u64 > 100, "{passed} passed");
    let used = reported(&world);
    until("the window to hold what was used", DEADLINE, async || {
        (world.charged("o").await == Some(used)).then_some(())
    })
    .await;
    world.gateway.assert_sound();
}
