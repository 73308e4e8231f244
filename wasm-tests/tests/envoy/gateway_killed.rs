//! A gateway that is killed takes its slots with it to the grave: nothing is counted twice, and they lapse in the store.

use std::time::Duration;

use portcullis_wasm_tests::{Call, DEADLINE, Envelope, GatewayPlan, Http2, Reply, Service, Upstream, until};
use serde_json::json;

use crate::backed::{over_redis, patient};
use crate::expect::{CONCURRENCY_LIMITED, refused, served};
use crate::stores::Store;
use crate::world::strict;

const STREAMS: usize = 100;
const SLOTS: &str = "portcullis:{owner:o}:concurrency";
const WINDOW: &str = "portcullis:{owner:o}:requests:60";

/// Slots that have not lapsed by the store's own clock.
async fn live(redis: &Store) -> i64 {
    let script = "local t = redis.call('TIME') \
                  return redis.call('ZCOUNT', KEYS[1], '(' .. (t[1] * 1000 + math.floor(t[2] / 1000)), '+inf')";
    redis.number(&["EVAL", script, "1", SLOTS]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_slots_of_a_killed_gateway_are_counted_once_until_they_lapse() {
    let redis = Store::redis().await;
    let mut config = over_redis(&redis.url());
    config["limiter"]["slot_ttl_s"] = json!(2);
    let service = Service::start(config).await;
    service.await_state("limiter", "up").await;
    let upstream = Upstream::start().await;
    let plan = || {
        GatewayPlan::new(strict(), upstream.address)
            .decision(service.address)
            .plugin(patient())
    };
    let (mut killed, mut next) = tokio::join!(plan().start(), plan().start());
    let call = Call::get("/v1/models").envelope(
        &Envelope::owner("o")
            .requests("owner", 1_000_000)
            .concurrency("owner", STREAMS),
    );
    upstream.reply(Reply {
        stream: true,
        ..Reply::default()
    });
    let client = Http2::open(killed.address()).await;
    let mut open = Vec::new();
    for _ in 0..STREAMS {
        let mut stream = client.begin(&call, false).await;
        assert_eq!(stream.head().await, 200);
        open.push(stream);
    }
    assert_eq!(upstream.hits(), STREAMS);
    // They are renewed for longer than a slot lives.
    let start = std::time::Instant::now();
    until("the slots to outlive their time", DEADLINE, async || {
        assert_eq!(redis.number(&["ZCARD", SLOTS]).await, 100);
        (start.elapsed() > Duration::from_millis(2_500)).then_some(())
    })
    .await;
    assert_eq!(live(&redis).await, 100, "a slot lapsed under a living stream");
    refused(&next.call(&call).await, CONCURRENCY_LIMITED);

    killed.kill();
    // What the dead gateway had sent is still answered, and nothing is to be told by it any more.
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(redis.number(&["ZCARD", SLOTS]).await, 100);
    assert_eq!(redis.number(&["GET", WINDOW]).await, 100);
    let denied = next.call(&call).await;
    if live(&redis).await == 100 {
        refused(&denied, CONCURRENCY_LIMITED);
        assert_eq!(upstream.hits(), STREAMS);
    }
    upstream.reply(Reply::default());
    until("the slots to lapse", DEADLINE, async || {
        assert!(live(&redis).await <= 100);
        let answer = next.call(&call).await;
        match answer.status {
            200 => served(&answer),
            _ => drop(refused(&answer, CONCURRENCY_LIMITED)),
        }
        (answer.status == 200).then_some(())
    })
    .await;
    // The one that was admitted, and no ghost: its own slot is released when it ends.
    assert_eq!(redis.number(&["GET", WINDOW]).await, 101);
    assert_eq!(upstream.hits(), STREAMS + 1);
    until("all slots to be gone", DEADLINE, async || {
        (live(&redis).await == 0).then_some(())
    })
    .await;
    next.assert_sound();
}
