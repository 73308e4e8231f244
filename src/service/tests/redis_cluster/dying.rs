//! A process that dies between two groups of one charge.

use std::sync::atomic::Ordering;

use serde_json::json;

use crate::process::Service;
use crate::proxy::Proxy;
use crate::stores::cluster::Cluster;
use crate::stores::eventually;
use crate::wire::request;

/// How late the answers of the last member are.
const LATE_MS: u64 = 1_500;

async fn service_over(cluster: &Cluster) -> Service {
    let config = json!({"profile": "development", "listen": "127.0.0.1:0",
                        "limiter": {"url": format!("redis-cluster://127.0.0.1:{}", cluster.members[0].port),
                                    "op_timeout_ms": 10_000}});
    let service = Service::start(config).await;
    eventually("ready", async || {
        (service.get("/ready").await.status == 200).then_some(())
    })
    .await;
    service
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_process_charged_that_died_halfway_goes_back_by_its_id_and_lapses_at_the_latest() {
    let cluster = Cluster::of_three().await;
    let last = &cluster.members[2];
    let (owner, org) = (
        cluster.name_on(0, |n| format!("owner:w{n}")).await,
        cluster.name_on(2, |n| format!("org:s{n}")).await,
    );
    // The last member is reached through something that can hold its answers back.
    let proxy = Proxy::start(last.port, format!("{{{org}}}")).await;
    last.run(&["CONFIG", "SET", "cluster-announce-port", &proxy.port.to_string()])
        .await;
    eventually("the others know", async || {
        let slots = cluster.members[0].run(&["CLUSTER", "SLOTS"]).await;
        format!("{slots:?}")
            .contains(&format!("int({})", proxy.port))
            .then_some(())
    })
    .await;
    let body = |budget_ms: u64| {
        request(json!({
            "gates": [{"gate": "contract", "when_unavailable": "reject", "limits": "envelope"}],
            "subject": {"owner": owner.strip_prefix("owner:"), "org": org.strip_prefix("org:")},
            "limits": {"owner": {"requests": 100, "concurrency": 100}, "org": {"requests": 100}},
            "budget_ms": budget_ms,
        }))
    };
    let service = service_over(&cluster).await;
    eventually("counted", async || {
        (service.post("/v1/decide", &body(2_000)).await.json()["verdict"] == "admit").then_some(())
    })
    .await;
    let keys = [
        format!("portcullis:{{{owner}}}:requests:60"),
        format!("portcullis:{{{org}}}:requests:60"),
    ];
    let first = &cluster.members[0];
    let before = (
        first.number(&["GET", &keys[0]]).await,
        last.number(&["GET", &keys[1]]).await,
    );

    // The look reaches the last member, its answer is late, and then the member stops: what comes next stays undone.
    proxy.mood.delay_ms.store(LATE_MS, Ordering::SeqCst);
    let replies = proxy.mood.marked_replies.load(Ordering::SeqCst);
    let dying = body(9_000);
    let op = dying["op"].as_str().unwrap().to_owned();
    let mut client = service.client().await;
    client
        .write(&crate::wire::head("POST", "/v1/decide", dying.to_string().len()))
        .await;
    client.write(&dying.to_string()).await;
    eventually("the look", async || {
        (proxy.mood.marked_replies.load(Ordering::SeqCst) > replies).then_some(())
    })
    .await;
    last.freeze();
    eventually("the first group is charged", async || {
        (first.number(&["GET", &keys[0]]).await == before.0 + 1).then_some(())
    })
    .await;
    service.signal("KILL");
    drop(service);
    last.thaw();
    proxy.mood.delay_ms.store(0, Ordering::SeqCst);

    // Nobody gives it back: it lasts no longer than the window and the slot.
    assert_eq!(first.number(&["GET", &keys[0]]).await, before.0 + 1);
    for key in [keys[0].clone(), format!("portcullis:{{{owner}}}:concurrency")] {
        let ttl = first.number(&["PTTL", &key]).await;
        assert!((1..=60_000).contains(&ttl), "{key} lives for {ttl} ms");
    }
    let slots = first
        .number(&["ZCARD", &format!("portcullis:{{{owner}}}:concurrency")])
        .await;
    assert_eq!(slots, before.0 + 1);
    // Another process is told that nobody waits for the answer, and knows nothing but the id.
    let other = service_over(&cluster).await;
    let answer = other
        .post("/v1/settle", &json!({"profile": "development", "cancels": [op]}))
        .await;
    assert_eq!(answer.status, 200, "{answer:?}");
    eventually("it goes back", async || {
        let slots = first
            .number(&["ZCARD", &format!("portcullis:{{{owner}}}:concurrency")])
            .await;
        let now = (
            first.number(&["GET", &keys[0]]).await,
            last.number(&["GET", &keys[1]]).await,
        );
        (now == before && slots == before.0).then_some(())
    })
    .await;
    // What still lay on its way to the last member changes nothing any more.
    let again = other.post("/v1/decide", &dying).await.json();
    assert_eq!(again["verdict"], "unavailable", "{again}");
    assert_eq!(last.number(&["GET", &keys[1]]).await, before.1);
}
