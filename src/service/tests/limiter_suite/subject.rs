//! A limiter under test, and the plans that it is given.

use std::sync::Arc;
use std::time::Duration;

use portcullis_decision::charge::{ChargeEntry, ChargePlan, Charged, EntryState, key};
use portcullis_decision::ledger::Settled;
use portcullis_decision::limits::{Resource, Scope};
use portcullis_decision::operation::OperationId;
use portcullis_decision::rules::Gate;
use portcullis_service::limiter::Limiter;
use tokio::time::Instant;

use crate::stores::{Store, cluster, eventually, is_installed, open, open_under};

pub(crate) const SLOT_TTL: Duration = Duration::from_millis(400);
pub(crate) const LARGEST: u64 = (1 << 53) - 1;

/// A limiter and what it needs to live.
pub(crate) struct Subject {
    pub(crate) limiter: Arc<dyn Limiter>,
    _store: Option<Store>,
}

impl Subject {
    pub(crate) fn memory() -> Option<Self> {
        Some(Self {
            limiter: open("memory:", 100),
            _store: None,
        })
    }

    pub(crate) async fn store(program: &'static str) -> Option<Self> {
        let store = Store::start(program, &[]).await;
        Some(Self {
            limiter: open(&store.url(), 2_000),
            _store: Some(store),
        })
    }

    /// One cluster for all cases: it takes seconds to form, and prefixes keep them apart.
    pub(crate) async fn cluster() -> Option<Self> {
        let url = cluster::shared().await.url();
        let limiter = open_under(&url, 2_000, &cluster::fresh_prefix());
        // These live on all of its members, and nothing fits into the first.
        let names = (0..16).map(|n| entry(&format!("everywhere-{n}"), Resource::Requests, n, 1));
        let everywhere = plan(999_999, &names.collect::<Vec<_>>());
        eventually("every member answers", async || {
            limiter.charge(&everywhere, SLOT_TTL, soon()).await.ok()
        })
        .await;
        Some(Self { limiter, _store: None })
    }

    pub(crate) async fn valkey() -> Option<Self> {
        if is_installed("valkey-server") {
            Self::store("valkey-server").await
        } else {
            None
        }
    }

    pub(crate) async fn charge(&self, plan: &ChargePlan) -> Charged {
        self.limiter.charge(plan, SLOT_TTL, soon()).await.unwrap()
    }

    pub(crate) async fn is_granted(&self, op: u32, entries: &[ChargeEntry]) -> bool {
        matches!(self.charge(&plan(op, entries)).await, Charged::Granted(_))
    }

    /// What every entry counts, by a charge that is denied: an entry in front that nothing fits in.
    pub(crate) async fn used(&self, entries: &[ChargeEntry]) -> Vec<u64> {
        let mut all = vec![entry("blocked", Resource::Requests, 0, 1)];
        all.extend_from_slice(entries);
        let Charged::Denied(states) = self.charge(&plan(999_999, &all)).await else {
            panic!("a limit of 0 admitted")
        };
        states.iter().skip(1).map(|state| state.used).collect()
    }

    pub(crate) async fn cancel(&self, op: u32) {
        self.limiter.cancel(&[id(op)], soon()).await.unwrap();
    }

    pub(crate) async fn settle(&self, op: u32, tokens: Option<u64>) {
        let settled = Settled { op: id(op), tokens };
        self.limiter.settle(&[settled], soon()).await.unwrap();
    }

    pub(crate) async fn renew(&self, op: u32) -> bool {
        self.limiter
            .renew(&[id(op)], SLOT_TTL, soon())
            .await
            .unwrap()
            .is_empty()
    }
}

pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(5)
}

pub(crate) fn id(n: u32) -> OperationId {
    OperationId::from_random(u128::from(n).to_be_bytes())
}

pub(crate) fn entry(name: &str, resource: Resource, limit: u64, cost: u64) -> ChargeEntry {
    let key = key(Scope::Org, resource, &[name]);
    ChargeEntry {
        gate: Gate::Contract,
        scope: Scope::Org,
        resource,
        key,
        limit,
        cost,
        window_s: 60,
    }
}

pub(crate) fn brief(name: &str, limit: u64, cost: u64) -> ChargeEntry {
    ChargeEntry {
        window_s: 1,
        ..entry(name, Resource::Requests, limit, cost)
    }
}

pub(crate) fn slot(name: &str, limit: u64) -> ChargeEntry {
    entry(name, Resource::Concurrency, limit, 1)
}

pub(crate) fn plan(op: u32, entries: &[ChargeEntry]) -> ChargePlan {
    ChargePlan {
        op: id(op),
        entries: entries.to_vec(),
        block: None,
    }
}

pub(crate) fn granted(charged: Charged) -> Vec<EntryState> {
    match charged {
        Charged::Granted(states) => states,
        other => panic!("not granted: {other:?}"),
    }
}
