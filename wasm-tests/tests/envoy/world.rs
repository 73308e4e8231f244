//! What most tests start: the upstream, a decision service (real or scripted) and the gateway between them; and bursts.

use std::net::SocketAddr;

use portcullis_wasm_tests::{
    Answer, Call, Connection, Decision, FakeDecision, Gateway, GatewayPlan, Service, Upstream, development_service,
};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::backed::patient;

/// The real service behind the gateway.
pub(crate) struct World {
    pub(crate) gateway: Gateway,
    pub(crate) service: Service,
    pub(crate) upstream: Upstream,
}

/// A scripted service behind the gateway.
pub(crate) struct Scripted {
    pub(crate) gateway: Gateway,
    pub(crate) decision: FakeDecision,
    pub(crate) upstream: Upstream,
}

impl World {
    /// Shipped rules or an object, and the operator's tiers.
    pub(crate) async fn start(rules: impl Into<Value>, capacity: Value) -> Self {
        // Nothing here is about timeouts, and a busy machine must not bring any about.
        let mut service = development_service(capacity);
        service["limiter"]["op_timeout_ms"] = json!(1_500);
        Self::with(rules, service, |plan| plan.plugin(patient()).patient_connects()).await
    }

    pub(crate) async fn with(
        rules: impl Into<Value>,
        service: Value,
        change: impl FnOnce(GatewayPlan) -> GatewayPlan,
    ) -> Self {
        let upstream = Upstream::start().await;
        let service = Service::start(service).await;
        let plan = GatewayPlan::new(rules, upstream.address).decision(service.address);
        Self {
            gateway: change(plan).start().await,
            service,
            upstream,
        }
    }
}

impl Scripted {
    pub(crate) async fn start(rules: impl Into<Value>, decision: Decision) -> Self {
        Self::with(rules, decision, |plan| plan).await
    }

    pub(crate) async fn with(
        rules: impl Into<Value>,
        decision: Decision,
        change: impl FnOnce(GatewayPlan) -> GatewayPlan,
    ) -> Self {
        let upstream = Upstream::start().await;
        let decision = FakeDecision::start(decision).await;
        let plan = GatewayPlan::new(rules, upstream.address).decision(decision.address);
        Self {
            gateway: change(plan).start().await,
            decision,
            upstream,
        }
    }
}

/// Contract limits that hold or nothing passes: rejects whatever is missing or unavailable.
pub(crate) fn strict() -> Value {
    json!({
        "name": "strict",
        "envelope": {"when_missing": "reject"},
        "gates": [{"gate": "contract", "when_unavailable": "reject"}],
        "decision": {"when_unavailable": "reject"}
    })
}

/// `count` calls one after the other, on one connection.
pub(crate) async fn burst(address: SocketAddr, call: &Call, count: usize) -> Vec<Answer> {
    let mut connection = Connection::open(address).await;
    let mut answers = Vec::with_capacity(count);
    for _ in 0..count {
        answers.push(connection.call(call).await);
    }
    answers
}

/// `count` calls on each of `connections` connections, all at once.
pub(crate) async fn concurrent_burst(
    address: SocketAddr,
    call: &Call,
    connections: usize,
    count: usize,
) -> Vec<Answer> {
    let mut running = JoinSet::new();
    for _ in 0..connections {
        let call = call.clone();
        running.spawn(async move { burst(address, &call, count).await });
    }
    running.join_all().await.into_iter().flatten().collect()
}
