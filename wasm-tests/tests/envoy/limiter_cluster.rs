//! The limiter is a cluster of three: the limits of one request live on several of its members. Exact and leased, as many go
//! up as the tightest limit says, and a member that is lost follows the rules for those whose limits live there.

use std::time::Duration;

use portcullis_wasm_tests::{Call, DEADLINE, Envelope, Gateway, GatewayPlan, Service, Upstream, until};
use serde_json::json;

use crate::backed::{LIMITER_UNAVAILABLE, Watch, contract_rules, over_redis, patient};
use crate::expect::{RATE_LIMITED, refused};
use crate::leases::{leased, passed, warm};
use crate::stores::cluster::Cluster;
use crate::world::concurrent_burst;

struct World {
    cluster: Cluster,
    service: Service,
    upstream: Upstream,
}

impl World {
    async fn start() -> Self {
        let cluster = Cluster::of_three().await;
        let service = Service::start(over_redis(&cluster.url())).await;
        service.await_state("limiter", "up").await;
        let upstream = Upstream::start().await;
        Self {
            cluster,
            service,
            upstream,
        }
    }

    fn plan(&self) -> GatewayPlan {
        GatewayPlan::new("contract-limits", self.upstream.address)
            .decision(self.service.address)
            .patient_connects()
            .plugin(patient())
    }

    /// An owner, an organization and a credential, each on a member of its own.
    async fn subject(&self, turn: usize) -> Envelope {
        let [owner, org, auth] = self.names(turn).await;
        Envelope::owner(&owner).org(&org).auth(&auth)
    }

    async fn names(&self, turn: usize) -> [String; 3] {
        let mut names = Vec::new();
        for (at, scope) in ["owner", "org", "auth"].into_iter().enumerate() {
            let tag = self
                .cluster
                .name_on((at + turn) % 3, |n| format!("{scope}:{turn}-{n}"))
                .await;
            names.push(tag.split_once(':').unwrap().1.to_owned());
        }
        names.try_into().unwrap()
    }

    /// Requests to each member until one is counted there: its connection may still be on its way.
    async fn counts_everywhere(&self, gateway: &Gateway) {
        for turn in 9..12 {
            let [owner, ..] = self.names(turn).await;
            let envelope = Envelope::owner(&owner).requests("owner", 1_000_000);
            let call = Call::get("/v1/models").envelope(&envelope);
            let key = format!("portcullis:{{owner:{owner}}}:requests:60");
            let member = &self.cluster.members[turn % 3];
            until("counting", DEADLINE, async || {
                gateway.call(&call).await;
                (member.number(&["GET", &key]).await > 0).then_some(())
            })
            .await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn contract_limits_over_a_cluster_admit_exactly_the_tightest_limit() {
    let world = World::start().await;
    let mut gateway = world.plan().start().await;
    world.counts_everywhere(&gateway).await;
    let bypassed = gateway.counter("portcullis_bypassed_limiter_unavailable").await;
    for (turn, tightest) in ["owner", "org", "auth"].into_iter().enumerate() {
        let mut envelope = world.subject(turn).await;
        for scope in ["owner", "org", "auth"] {
            envelope = envelope.requests(scope, if scope == tightest { 30_u64 } else { 1_000 });
        }
        let call = Call::get("/v1/models").envelope(&envelope);
        let before = world.upstream.hits();
        let answers = concurrent_burst(gateway.address(), &call, 5, 9).await;
        assert_eq!(passed(&answers), 30, "{tightest}");
        assert_eq!(world.upstream.hits(), before + 30, "{tightest}");
        // A denial names the limit that denied, wherever it lives.
        let denied = gateway.call(&call).await;
        refused(&denied, RATE_LIMITED);
        assert_eq!(denied.error()["scope"], tightest);
    }
    let now = gateway.counter("portcullis_bypassed_limiter_unavailable").await;
    assert_eq!(now, bypassed, "an outage that was none");
    gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn leased_contract_limits_over_a_cluster_admit_exactly_the_limit_and_mostly_without_a_callout() {
    const LIMIT: usize = 1_000;
    let world = World::start().await;
    let mut gateway = world.plan().plugin(leased(Duration::from_secs(5))).start().await;
    world.counts_everywhere(&gateway).await;
    let bypassed = gateway.counter("portcullis_bypassed_limiter_unavailable").await;
    let envelope = world
        .subject(0)
        .await
        .requests("owner", LIMIT)
        .requests("org", 5_000_u64);
    let call = Call::get("/v1/models").envelope(&envelope);
    let before = world.upstream.hits();
    let warmed = warm(&gateway, &call).await;
    let answers = concurrent_burst(gateway.address(), &call, 10, 140).await;
    assert_eq!(warmed + passed(&answers), LIMIT);
    assert_eq!(world.upstream.hits(), before + LIMIT);
    let hits = gateway.counter("portcullis_lease_hits").await;
    assert!(hits > 300, "{hits} leased");
    let now = gateway.counter("portcullis_bypassed_limiter_unavailable").await;
    assert_eq!(now, bypassed, "an outage that was none");
    gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_member_follows_the_rules_for_its_own_groups_only() {
    let mut world = World::start().await;
    let mut gateway = GatewayPlan::new(
        contract_rules("closed", json!("reject"), "admit"),
        world.upstream.address,
    )
    .decision(world.service.address)
    .patient_connects()
    .plugin(patient())
    .listener("open", contract_rules("open", json!("admit"), "reject"))
    .plugin(patient())
    .start()
    .await;
    world.counts_everywhere(&gateway).await;
    let mut calls = Vec::new();
    for turn in 0..3 {
        let envelope = world.subject(turn).await.requests("owner", 100_000_u64);
        calls.push(Call::get("/v1/models").envelope(&envelope));
    }
    world.cluster.members[2].kill();
    until("the loss to show", DEADLINE, async || {
        (gateway.call(&calls[2]).await.status == 503).then_some(())
    })
    .await;
    let watch = Watch {
        gateway: &gateway,
        upstream: &world.upstream,
    };
    for _ in 0..10 {
        watch.refused("ingress", &calls[2], LIMITER_UNAVAILABLE).await;
        watch.served("open", &calls[2]).await;
        for call in &calls[..2] {
            watch.served("ingress", call).await;
        }
    }
    assert_eq!(gateway.counter("portcullis_bypassed_decision_unavailable").await, 0);
    assert_eq!(gateway.counter("portcullis_rejected_quota_exhausted").await, 0);
    world.cluster.members[2].restart().await;
    until("counting again", DEADLINE * 2, async || {
        (gateway.call(&calls[2]).await.status == 200).then_some(())
    })
    .await;
    gateway.assert_sound();
}
