//! Stores that fail as a lost connection while their switch is on, and are the real ones else.

use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use portcullis_decision::charge::{ChargePlan, Charged};
use portcullis_decision::class::Dependency;
use portcullis_decision::ledger::Settled;
use portcullis_decision::metering::{Cost, MeterPlan, Metered};
use portcullis_decision::operation::OperationId;
use portcullis_decision::policy::Org;
use portcullis_decision::wire::Return;
use tokio::time::Instant;

use super::FaultSwitch;
use crate::limiter::{Answer, Limiter, StoreFault};
use crate::metering::{Cancel, Meter, Tended};
use crate::policy::{PolicyStore, Prices, Registry};
use crate::unmetered::Admission;

/// The same stores, each with a switch that lets it fail, where there are switches.
#[expect(clippy::type_complexity, reason = "three stores in, three out")]
pub fn switchable(
    faults: Option<&Arc<FaultSwitch>>,
    limiter: Option<Arc<dyn Limiter>>,
    policy: Option<Arc<dyn PolicyStore>>,
    meter: Option<Arc<dyn Meter>>,
) -> (
    Option<Arc<dyn Limiter>>,
    Option<Arc<dyn PolicyStore>>,
    Option<Arc<dyn Meter>>,
) {
    let Some(faults) = faults else {
        return (limiter, policy, meter);
    };
    (
        limiter.map(|store| Arc::new(FailingLimiter::new(store, Arc::clone(faults))) as Arc<dyn Limiter>),
        policy.map(|store| Arc::new(FailingPolicy::new(store, Arc::clone(faults))) as Arc<dyn PolicyStore>),
        meter.map(|store| Arc::new(FailingMeter::new(store, Arc::clone(faults))) as Arc<dyn Meter>),
    )
}

/// The answer of a store that can't be reached, or the real one's.
fn unless<'a, T: Send + 'a>(
    faults: &FaultSwitch,
    dependency: Dependency,
    answer: impl FnOnce() -> Answer<'a, T>,
) -> Answer<'a, T> {
    if faults.fails(dependency) {
        Box::pin(ready(Err(StoreFault::Connection)))
    } else {
        answer()
    }
}

/// A limiter with a switch.
pub(super) struct FailingLimiter {
    limiter: Arc<dyn Limiter>,
    faults: Arc<FaultSwitch>,
}

impl FailingLimiter {
    /// `limiter`, with the switch of `faults`.
    pub(super) fn new(limiter: Arc<dyn Limiter>, faults: Arc<FaultSwitch>) -> Self {
        Self { limiter, faults }
    }

    fn unless<'a, T: Send + 'a>(&self, answer: impl FnOnce() -> Answer<'a, T>) -> Answer<'a, T> {
        unless(&self.faults, Dependency::Limiter, answer)
    }
}

impl Limiter for FailingLimiter {
    fn scheme(&self) -> &'static str {
        self.limiter.scheme()
    }

    fn is_shared(&self) -> bool {
        self.limiter.is_shared()
    }

    fn charge<'a>(&'a self, plan: &'a ChargePlan, slot_ttl: Duration, deadline: Instant) -> Answer<'a, Charged> {
        self.unless(|| self.limiter.charge(plan, slot_ttl, deadline))
    }

    fn cancel<'a>(&'a self, ops: &'a [OperationId], deadline: Instant) -> Answer<'a, ()> {
        self.unless(|| self.limiter.cancel(ops, deadline))
    }

    fn settle<'a>(&'a self, settled: &'a [Settled], deadline: Instant) -> Answer<'a, ()> {
        self.unless(|| self.limiter.settle(settled, deadline))
    }

    fn give_back_parts<'a>(&'a self, parts: &'a [Return], deadline: Instant) -> Answer<'a, ()> {
        self.unless(|| self.limiter.give_back_parts(parts, deadline))
    }

    fn renew<'a>(
        &'a self,
        ops: &'a [OperationId],
        slot_ttl: Duration,
        deadline: Instant,
    ) -> Answer<'a, Vec<OperationId>> {
        self.unless(|| self.limiter.renew(ops, slot_ttl, deadline))
    }

    fn ping(&self, deadline: Instant) -> Answer<'_, ()> {
        self.unless(|| self.limiter.ping(deadline))
    }

    fn may_evict(&self, deadline: Instant) -> Answer<'_, bool> {
        self.unless(|| self.limiter.may_evict(deadline))
    }
}

/// A policy store with a switch.
pub(super) struct FailingPolicy {
    store: Arc<dyn PolicyStore>,
    faults: Arc<FaultSwitch>,
}

impl FailingPolicy {
    /// `store`, with the switch of `faults`.
    pub(super) fn new(store: Arc<dyn PolicyStore>, faults: Arc<FaultSwitch>) -> Self {
        Self { store, faults }
    }

    fn unless<'a, T: Send + 'a>(&self, answer: impl FnOnce() -> Answer<'a, T>) -> Answer<'a, T> {
        unless(&self.faults, Dependency::Policy, answer)
    }
}

impl PolicyStore for FailingPolicy {
    fn scheme(&self) -> &'static str {
        self.store.scheme()
    }

    fn org<'a>(&'a self, id: &'a str, deadline: Instant) -> Answer<'a, Option<Arc<Org>>> {
        self.unless(|| self.store.org(id, deadline))
    }

    fn registry(&self, deadline: Instant) -> Answer<'_, Arc<Registry>> {
        self.unless(|| self.store.registry(deadline))
    }

    fn prices(&self, deadline: Instant) -> Answer<'_, Arc<Prices>> {
        self.unless(|| self.store.prices(deadline))
    }

    fn ping(&self, deadline: Instant) -> Answer<'_, ()> {
        self.unless(|| self.store.ping(deadline))
    }
}

/// A metering store with a switch.
pub(super) struct FailingMeter {
    meter: Arc<dyn Meter>,
    faults: Arc<FaultSwitch>,
}

impl FailingMeter {
    /// `meter`, with the switch of `faults`.
    pub(super) fn new(meter: Arc<dyn Meter>, faults: Arc<FaultSwitch>) -> Self {
        Self { meter, faults }
    }

    fn unless<'a, T: Send + 'a>(&self, answer: impl FnOnce() -> Answer<'a, T>) -> Answer<'a, T> {
        unless(&self.faults, Dependency::Metering, answer)
    }
}

impl Meter for FailingMeter {
    fn scheme(&self) -> &'static str {
        self.meter.scheme()
    }

    fn is_shared(&self) -> bool {
        self.meter.is_shared()
    }

    fn record<'a>(&'a self, plan: &'a MeterPlan, deadline: Instant) -> Answer<'a, Metered> {
        self.unless(|| self.meter.record(plan, deadline))
    }

    fn cancel<'a>(&'a self, ops: &'a [OperationId], why: Cancel, deadline: Instant) -> Answer<'a, ()> {
        self.unless(|| self.meter.cancel(ops, why, deadline))
    }

    fn add_costs<'a>(&'a self, costs: &'a [Cost], deadline: Instant) -> Answer<'a, ()> {
        self.unless(|| self.meter.add_costs(costs, deadline))
    }

    fn journal<'a>(&'a self, admissions: &'a [Admission], deadline: Instant) -> Option<Answer<'a, ()>> {
        // Whether a store keeps any is no question of its answer.
        let answer = self.meter.journal(admissions, deadline)?;
        Some(self.unless(|| answer))
    }

    fn ping(&self, deadline: Instant) -> Answer<'_, ()> {
        self.unless(|| self.meter.ping(deadline))
    }

    fn tend(&self) -> Answer<'_, Tended> {
        self.unless(|| self.meter.tend())
    }
}
