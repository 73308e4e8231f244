//! A lease that ends before all of it was handed out: with the service gone, with its gateway gone, and with the
//! configuration under it gone. What is left comes back or lapses; it is never handed out twice.

use std::time::{Duration, Instant};

use portcullis_wasm_tests::{Call, DEADLINE, Envelope, until};
use serde_json::json;

use crate::expect::{DECISION_UNAVAILABLE, refused, served};
use crate::leases::{Leasing, leased, passed, warm};
use crate::world::{concurrent_burst, strict};

/// So long that no block ends by its age in these tests, unless they wait for it.
const OLD: Duration = Duration::from_secs(40);
const LIMIT: usize = 500;

fn limited(limit: usize) -> Call {
    Call::get("/v1/models").envelope(&Envelope::owner("o").org("g").requests("org", limit))
}

/// Ends the service while a block is there, and asserts that it is handed out until `end`, and nothing from then on.
async fn outlives_the_service(world: &mut Leasing, call: &Call, end: impl AsyncFnOnce(&Leasing) -> Instant) {
    let hits = world.hits().await;
    let end = end(world).await;
    world.service.kill();
    let (mut passed, mut refusals) = (0, 0);
    loop {
        let is_over = Instant::now() >= end;
        let answer = world.gateway.call(call).await;
        match answer.status {
            200 if !is_over => {
                served(&answer);
                passed += 1;
            }
            _ => {
                refused(&answer, DECISION_UNAVAILABLE);
                refusals += 1;
            }
        }
        if is_over {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    for _ in 0..10 {
        refused(&world.gateway.call(call).await, DECISION_UNAVAILABLE);
    }
    eprintln!("{passed} served and {refusals} refused after the service's end, until the block's");
    assert!(passed > 0, "the block ended with the service");
    assert_eq!(world.hits().await - hits, passed, "each of them was of a block");
    world.service.restart().await;
    until("it to be served again", DEADLINE, async || {
        (world.gateway.call(call).await.status == 200).then_some(())
    })
    .await;
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_block_outlives_the_service_until_its_end_and_then_the_rules_decide() {
    let max_age = Duration::from_secs(3);
    let mut world = Leasing::start(max_age).await;
    let call = limited(1_000_000);
    world.warm(&call).await;
    outlives_the_service(&mut world, &call, async |_| Instant::now() + max_age).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_block_ends_with_the_window_that_it_was_charged_to() {
    let mut plugin = leased(OLD);
    plugin["window_s"] = json!(4);
    let mut world = Leasing::with(strict(), json!({}), plugin).await;
    let call = limited(1_000_000);
    let left_ms = async |world: &Leasing| world.redis.number(&["PTTL", "portcullis:{org:g}:requests:4"]).await;
    until("a block in a window with time left", DEADLINE * 2, async || {
        world.warm(&call).await;
        (left_ms(&world).await > 1_500).then_some(())
    })
    .await;
    outlives_the_service(&mut world, &call, async |world| {
        let left_ms = left_ms(world).await;
        assert!(left_ms > 0, "no window");
        Instant::now() + Duration::from_millis(left_ms.try_into().unwrap())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listener_that_drains_gives_back_what_its_leases_have_left() {
    let world = Leasing::start(OLD).await;
    let mut gateway = world.plan().updatable().start().await;
    let call = limited(LIMIT);
    let used = warm(&gateway, &call).await;
    let window = "portcullis:{org:g}:requests:60";
    let charged = world.redis.number(&["GET", window]).await;
    assert!(
        charged > i64::try_from(used).unwrap(),
        "{charged} for {used}: no block has anything left"
    );
    // Another configuration has leases of its own.
    assert!(
        gateway
            .update(&world.plan().plugin(json!({"reply": {"limit_headers": "always"}})))
            .await
    );
    until("what is unspent to come back", DEADLINE, async || {
        (world.redis.number(&["GET", window]).await == i64::try_from(used).unwrap()).then_some(())
    })
    .await;
    gateway.stop().await;
    let answers = concurrent_burst(world.gateway.address(), &call, 4, 150).await;
    assert_eq!(used + passed(&answers), LIMIT);
    assert_eq!(world.upstream.hits(), LIMIT);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_gateway_had_left_is_lost_and_never_handed_out_twice() {
    let mut world = Leasing::start(OLD).await;
    let mut killed = world.plan().start().await;
    let call = limited(LIMIT);
    let used = warm(&killed, &call).await;
    let charged = world.redis.number(&["GET", "portcullis:{org:g}:requests:60"]).await;
    let charged = usize::try_from(charged).unwrap();
    assert!(charged > used, "nothing is left to be lost");
    killed.kill();
    let rest = passed(&concurrent_burst(world.gateway.address(), &call, 4, 150).await);
    eprintln!("{charged} were charged for {used}; {rest} of {LIMIT} were left");
    assert_eq!(rest, LIMIT - charged);
    assert_eq!(world.upstream.hits(), used + rest);
    world.gateway.assert_sound();
}
