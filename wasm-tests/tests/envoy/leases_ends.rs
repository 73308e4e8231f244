//! A lease that ends before all of it was handed out: with the service gone, with its gateway gone, and with the
//! configuration under it gone. What is left comes back or lapses; it is never handed out twice.

use std::time::{Duration, Instant};

use portcullis_wasm_tests::{Call, DEADLINE, Envelope, until};
use serde_json::json;

use crate::expect::{DECISION_UNAVAILABLE, refused, served};
use crate::leases::{Leasing, passed};
use crate::world::concurrent_burst;

/// So long that no block ends by its age in these tests, unless they wait for it.
const OLD: Duration = Duration::from_secs(40);
const LIMIT: usize = 500;

fn limited(limit: usize) -> Call {
    Call::get("/v1/models").envelope(&Envelope::owner("o").org("g").requests("org", limit))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_block_outlives_the_service_until_its_end_and_then_the_rules_decide() {
    let max_age = Duration::from_secs(3);
    let mut world = Leasing::start(max_age).await;
    let call = limited(1_000_000);
    world.warm(&call).await;
    let hits = world.hits().await;
    world.service.kill();
    let killed = Instant::now();
    let mut passed = 0_i64;
    let mut refusals = 0;
    while killed.elapsed() < max_age {
        let answer = world.gateway.call(&call).await;
        if answer.status == 200 {
            served(&answer);
            passed += 1;
        } else {
            refused(&answer, DECISION_UNAVAILABLE);
            refusals += 1;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(passed > 0, "the block ended with the service");
    assert_eq!(world.hits().await - hits, passed, "each of them was of a block");
    eprintln!("{passed} served and {refusals} refused within {max_age:?} after the service's end");
    for _ in 0..10 {
        refused(&world.gateway.call(&call).await, DECISION_UNAVAILABLE);
    }
    assert_eq!(world.upstream.hits(), usize::try_from(world.gateway.counter("portcullis_admitted").await).unwrap());
    world.service.restart().await;
    until("it to be served again", DEADLINE, async || {
        (world.gateway.call(&call).await.status == 200).then_some(())
    })
    .await;
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listener_that_drains_gives_back_what_its_leases_have_left() {
    let world = Leasing::start(OLD).await;
    let mut gateway = world.plan().updatable().start().await;
    let call = limited(LIMIT);
    assert_eq!(passed(&concurrent_burst(gateway.address(), &call, 4, 40).await), 160);
    let used = "portcullis:{org:g}:requests:60";
    let charged = world.redis.number(&["GET", used]).await;
    assert!(charged > 160, "{charged}: no block has anything left");
    // Another configuration has leases of its own.
    assert!(gateway.update(&world.plan().plugin(json!({"reply": {"limit_headers": "always"}}))).await);
    until("what is unspent to come back", DEADLINE, async || {
        (world.redis.number(&["GET", used]).await == 160).then_some(())
    })
    .await;
    gateway.stop().await;
    let answers = concurrent_burst(world.gateway.address(), &call, 4, 100).await;
    assert_eq!(passed(&answers), LIMIT - 160);
    assert_eq!(world.upstream.hits(), LIMIT);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_gateway_had_left_is_lost_and_never_handed_out_twice() {
    let mut world = Leasing::start(OLD).await;
    let mut killed = world.plan().start().await;
    let call = limited(LIMIT);
    assert_eq!(passed(&concurrent_burst(killed.address(), &call, 4, 40).await), 160);
    let charged = world.redis.number(&["GET", "portcullis:{org:g}:requests:60"]).await;
    killed.kill();
    let rest = passed(&concurrent_burst(world.gateway.address(), &call, 4, 100).await);
    eprintln!("{charged} were charged for 160; {rest} of {LIMIT} were left");
    assert_eq!(i64::try_from(rest).unwrap(), i64::try_from(LIMIT).unwrap() - charged);
    assert_eq!(world.upstream.hits(), 160 + rest);
    assert!(charged > 160, "nothing was left to be lost");
    world.gateway.assert_sound();
}
