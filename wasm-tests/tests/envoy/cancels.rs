//! A client that goes away, at every point of a request's life: no slot stays taken, nothing is charged for a request
//! that never went up, nothing traps and the next request is served.

use std::time::{Duration, Instant};

use portcullis_wasm_tests::{
    Call, Connection, DEADLINE, Decision, Envelope, GatewayPlan, Http2, Reply, development_service, until,
};
use serde_json::{Value, json};

use crate::expect::{CONCURRENCY_LIMITED, RATE_LIMITED, refused, served};
use crate::world::{Scripted, World, strict};

/// Calls until `count` were served. Denied calls in between charge nothing.
async fn admits(world: &World, call: &Call, count: usize) {
    let mut served = 0;
    until(&format!("{count} admissions"), DEADLINE, async || {
        if world.gateway.call(call).await.status == 200 {
            served += 1;
        }
        (served == count).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_while_the_decision_is_out_charges_nothing() {
    let mut world = World::start(strict(), Value::Null).await;
    let call = Call::get("/").envelope(&Envelope::owner("o").requests("owner", 3));
    world.service.freeze();
    for _ in 0..3 {
        let mut client = Connection::open(world.gateway.address()).await;
        let before = world.gateway.counter("portcullis_callouts").await;
        client.send(&call.bytes()).await;
        world.gateway.await_metric("portcullis_callouts", before + 1).await;
        client.reset();
    }
    world.service.thaw();
    admits(&world, &call, 3).await;
    refused(&world.gateway.call(&call).await, RATE_LIMITED);
    assert_eq!(world.upstream.hits(), 3, "what was reset never went up");
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_while_the_decision_is_out_leaves_no_slot_taken() {
    let mut world = World::start(strict(), Value::Null).await;
    let call = Call::get("/").envelope(&Envelope::owner("o").concurrency("owner", 1));
    for _ in 0..2 {
        world.service.freeze();
        let before = world.gateway.counter("portcullis_callouts").await;
        let mut client = Connection::open(world.gateway.address()).await;
        client.send(&call.bytes()).await;
        world.gateway.await_metric("portcullis_callouts", before + 1).await;
        client.reset();
        world.service.thaw();
        admits(&world, &call, 1).await;
    }
    assert_eq!(world.upstream.hits(), 2);
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_while_the_decision_is_out_is_cancelled_by_its_operation_id() {
    let mut world = Scripted::start(strict(), Decision::AdmitAfter(Duration::from_millis(150))).await;
    let mut client = Connection::open(world.gateway.address()).await;
    client
        .send(
            &Call::get("/")
                .envelope(&Envelope::owner("o").requests("owner", 3))
                .bytes(),
        )
        .await;
    let operation = world.decision.await_decides(1).await[0]["op"]
        .as_str()
        .unwrap()
        .to_owned();
    client.reset();
    until("the cancel", DEADLINE, async || {
        world.decision.settled("cancels").contains(&operation).then_some(())
    })
    .await;
    assert_eq!(world.decision.settled("cancels"), [operation]);
    assert_eq!(world.upstream.hits(), 0);
    world.gateway.assert_sound();
}

/// Where a client goes away.
#[derive(Clone, Copy, Debug)]
enum Point {
    Connected,
    InHeaders,
    AfterHeaders,
    InBody,
    AtUpstream,
    InAnswer,
    AfterAnswer,
}

async fn reset_at(point: Point) {
    let mut world = World::start("contract-limits", Value::Null).await;
    for round in 0..3 {
        // An owner of its own, since a slot is given back a moment after the answer.
        let envelope = Envelope::owner(&format!("owner-{round}")).concurrency("owner", 1);
        let call = Call::post("/", vec![b'b'; 2000]).envelope(&envelope);
        let hits = world.upstream.hits();
        let mut client = Connection::open(world.gateway.address()).await;
        let (head, whole) = (call.head(), call.bytes());
        match point {
            Point::Connected => {}
            Point::InHeaders => client.send(&head[..head.len() / 2]).await,
            Point::AfterHeaders | Point::InBody => {
                let part = if matches!(point, Point::InBody) { 1000 } else { 0 };
                client.send(&whole[..head.len() + part]).await;
                world.gateway.await_metric("portcullis_admitted", round * 2 + 1).await;
            }
            Point::AtUpstream => {
                world.upstream.reply(Reply {
                    hold: true,
                    ..Reply::default()
                });
                client.send(&whole).await;
                world.upstream.await_hits(hits + 1).await;
            }
            Point::InAnswer => {
                world.upstream.reply(Reply {
                    stream: true,
                    ..Reply::default()
                });
                client.send(&whole).await;
                assert_eq!(client.answer_head().await, 200);
                refused(&world.gateway.call(&call).await, CONCURRENCY_LIMITED);
            }
            Point::AfterAnswer => {
                client.send(&whole).await;
                served(&client.answer("POST").await);
            }
        }
        client.reset();
        world.upstream.reply(Reply::default());
        admits(&world, &call, 1).await;
    }
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_before_the_first_byte() {
    reset_at(Point::Connected).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_in_the_headers() {
    reset_at(Point::InHeaders).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_after_the_headers() {
    reset_at(Point::AfterHeaders).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_in_the_body() {
    reset_at(Point::InBody).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_while_the_upstream_works() {
    reset_at(Point::AtUpstream).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_in_the_answer() {
    reset_at(Point::InAnswer).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_after_the_answer() {
    reset_at(Point::AfterAnswer).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn http2_streams_reset_at_every_point_leave_no_slot_taken() {
    let mut world = World::with(strict(), development_service(Value::Null), |plan| plan.upstream_http2()).await;
    let client = Http2::open(world.gateway.address()).await;
    let of = |owner: &str| Call::post("/", "body").envelope(&Envelope::owner(owner).concurrency("owner", 1));
    // While the decision is out.
    let call = of("first");
    world.service.freeze();
    let open = client.begin(&call, true).await;
    world.gateway.await_metric("portcullis_callouts", 1).await;
    open.reset();
    world.service.thaw();
    admits(&world, &call, 1).await;
    // In the request's body.
    let call = of("second");
    let hits = world.upstream.hits();
    let mut open = client.begin(&call, true).await;
    open.data(b"part", false);
    world.upstream.await_hits(hits + 1).await;
    open.reset();
    admits(&world, &call, 1).await;
    // In the answer.
    let call = of("third");
    world.upstream.reply(Reply {
        stream: true,
        ..Reply::default()
    });
    let mut open = client.begin(&call, true).await;
    open.finish(&call);
    assert_eq!(open.head().await, 200);
    open.reset();
    world.upstream.reply(Reply::default());
    admits(&world, &call, 1).await;
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn many_resets_at_once_leave_nothing_behind() {
    let mut world = World::start(strict(), Value::Null).await;
    let call = Call::get("/").envelope(&Envelope::owner("o").concurrency("owner", 5).requests("owner", 1000));
    let mut clients = Vec::new();
    for _ in 0..60 {
        let mut client = Connection::open(world.gateway.address()).await;
        client.send(&call.bytes()).await;
        clients.push(client);
    }
    clients.into_iter().for_each(Connection::reset);
    world.upstream.reply(Reply {
        stream: true,
        ..Reply::default()
    });
    let hits = world.upstream.hits();
    let address = world.gateway.address();
    // All five slots can be held at once again.
    let mut held = Vec::new();
    until("five slots", DEADLINE, async || {
        let mut client = Connection::open(address).await;
        client.send(&call.bytes()).await;
        if client.answer_head().await == 200 {
            held.push(client);
        }
        (held.len() == 5).then_some(())
    })
    .await;
    assert!(world.upstream.hits() >= hits + 5);
    refused(&world.gateway.call(&call).await, CONCURRENCY_LIMITED);
    world.upstream.release();
    world.gateway.assert_sound();
}

/// A call whose answer is under way, holding the owner's only slot.
async fn hold(world: &World, call: &Call) -> Connection {
    world.upstream.reply(Reply {
        stream: true,
        ..Reply::default()
    });
    let mut client = Connection::open(world.gateway.address()).await;
    client.send(&call.bytes()).await;
    assert_eq!(client.answer_head().await, 200);
    world.upstream.reply(Reply::default());
    client
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listener_that_drains_gives_its_slots_back() {
    let mut world = World::with(strict(), development_service(Value::Null), |plan| plan.updatable()).await;
    let call = Call::get("/").envelope(&Envelope::owner("o").concurrency("owner", 1));
    let _client = hold(&world, &call).await;
    let plan = GatewayPlan::new(strict(), world.upstream.address).decision(world.service.address);
    assert!(
        world
            .gateway
            .update(&plan.plugin(json!({"reply": {"limit_headers": "always"}})))
            .await
    );
    refused(&world.gateway.call(&call).await, CONCURRENCY_LIMITED);
    // The old connections are closed after the drain time of a second, far sooner than a slot lapses (30 s).
    admits(&world, &call, 1).await;
    world.gateway.assert_sound();
}

/// Envoy ends within milliseconds of SIGTERM and waits for no callout, so without a drain before it the slots of open
/// streams may be left to lapse, as they are after SIGKILL.
#[tokio::test(flavor = "multi_thread")]
async fn the_slots_of_a_gateway_that_went_away_lapse_at_the_latest() {
    let mut service = development_service(Value::Null);
    service["limiter"]["slot_ttl_s"] = json!(2);
    for terminated in [true, false] {
        let mut world = World::with(strict(), service.clone(), |plan| plan).await;
        let call = Call::get("/").envelope(&Envelope::owner("o").concurrency("owner", 1));
        let _client = hold(&world, &call).await;
        if terminated {
            world.gateway.stop().await;
        }
        let plan = GatewayPlan::new(strict(), world.upstream.address).decision(world.service.address);
        world.gateway = plan.start().await;
        admits(&world, &call, 1).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_outlives_its_time_to_live_while_the_answer_goes_on() {
    let mut service = development_service(Value::Null);
    service["limiter"]["slot_ttl_s"] = json!(1);
    let world = World::with(strict(), service, |plan| plan).await;
    let call = Call::get("/").envelope(&Envelope::owner("o").concurrency("owner", 1));
    let _client = hold(&world, &call).await;
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(2500) {
        refused(&world.gateway.call(&call).await, CONCURRENCY_LIMITED);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(world.upstream.hits(), 1);
}
