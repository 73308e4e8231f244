//! Subjects that live on a given member, the plans that charge them, and what they count.

use std::sync::Arc;
use std::time::Duration;

use portcullis_decision::charge::{ChargeEntry, ChargePlan, Charged, key};
use portcullis_decision::limits::{Resource, Scope};
use portcullis_decision::operation::OperationId;
use portcullis_decision::rules::Gate;
use portcullis_service::limiter::{Limiter, StoreFault};
use tokio::time::Instant;

use crate::stores::cluster::Cluster;
use crate::stores::eventually;

pub(crate) const SLOT_TTL: Duration = Duration::from_secs(30);

pub(crate) fn id(n: u32) -> OperationId {
    OperationId::from_random((0xc1_0000_0000_u128 + u128::from(n)).to_be_bytes())
}

pub(crate) fn within(ms: u64) -> Instant {
    Instant::now() + Duration::from_millis(ms)
}

pub(crate) fn entry(org: &str, resource: Resource, limit: u64, cost: u64) -> ChargeEntry {
    ChargeEntry {
        gate: Gate::Contract,
        scope: Scope::Org,
        resource,
        key: key(Scope::Org, resource, &[org]),
        limit,
        cost,
        window_s: 60,
    }
}

pub(crate) fn requests(org: &str, limit: u64) -> ChargeEntry {
    entry(org, Resource::Requests, limit, 1)
}

pub(crate) fn plan(op: u32, entries: &[ChargeEntry]) -> ChargePlan {
    ChargePlan {
        op: id(op),
        entries: entries.to_vec(),
        block: None,
    }
}

/// An org on each primary of a cluster of three.
pub(crate) async fn orgs(cluster: &Cluster) -> [String; 3] {
    let mut found = Vec::new();
    for primary in 0..3 {
        let tag = cluster.name_on(primary, |n| format!("org:s{n}")).await;
        found.push(tag.strip_prefix("org:").unwrap().to_owned());
    }
    found.try_into().unwrap()
}

/// Waits until the limiter has seen the cluster and is connected to all of its primaries.
pub(crate) async fn connected(limiter: &Arc<dyn Limiter>, orgs: &[String; 3]) {
    for org in orgs {
        eventually("every member answers", async || {
            used(limiter, &[requests(org, 1)]).await.ok()
        })
        .await;
    }
}

/// What every entry counts, by a charge that is denied: an entry in front that nothing fits in.
pub(crate) async fn used(limiter: &Arc<dyn Limiter>, entries: &[ChargeEntry]) -> Result<Vec<u64>, StoreFault> {
    let mut all = vec![ChargeEntry {
        limit: 0,
        ..entries[0].clone()
    }];
    all[0].key.push_str(":looked-at");
    all.extend_from_slice(entries);
    match limiter.charge(&plan(u32::MAX, &all), SLOT_TTL, within(2_000)).await? {
        Charged::Denied(states) => Ok(states.iter().skip(1).map(|state| state.used).collect()),
        other => panic!("a limit of 0 admitted: {other:?}"),
    }
}

/// Gives back an operation, however often it takes to be heard.
pub(crate) async fn cancelled(limiter: &Arc<dyn Limiter>, op: u32) {
    eventually("a cancel is heard", async || {
        limiter.cancel(&[id(op)], within(1_000)).await.ok()
    })
    .await;
}
