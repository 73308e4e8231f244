//! The lease desk: how much each bundle is in demand, and how many gateways share what is left.
//!
//! A block is worth charging where a bundle is asked for often: at most half of what it is likely to hand out before it
//! ends, so that little is left over when demand falls. What is counted is what was handed out here, by the decision or by
//! the block, less what came back.
//!
//! Bounded: a fixed number of bundles and of gateways, however many there are. A bundle that finds no place takes that of
//! the least wanted one among a few; one that has lost its place is asked about exactly until it has shown its demand anew.
//! Two bundles whose keys have the same hash would count as one, which costs accuracy of the size and nothing else.
//!
//! Left out on purpose: what is left of the limits, which only the limiter knows.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher as _, Hash as _, Hasher as _, RandomState};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use portcullis_decision::charge::BlockAsk;
use portcullis_decision::evaluation::LeaseTerms;
use portcullis_decision::lease::is_leasable;
use portcullis_decision::limits::{Resource, Scope};
use portcullis_decision::operation::OperationId;
use portcullis_decision::wire::{DecideRequest, LeaseAsk, Return};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::{locked, millis_since};

/// Bundles whose demand is known at most: some 2 MB. A power of two.
const BUNDLES: usize = 65_536;
/// Places in which one bundle may be found.
const WAYS: usize = 4;
/// Blocks of which it is remembered whose they are.
const MOST_BLOCKS: usize = 16_384;
/// Gateways that are told apart at most.
const MOST_GATEWAYS: usize = 1_024;
/// How long a gateway is remembered after it has asked.
const GATEWAY_MS: u64 = 10_000;
/// Between two sweeps for gateways that are gone.
const SWEEP_MS: u64 = 1_000;
/// The span over which demand is observed.
const SPAN_MS: u64 = 1_000;
/// Each gateway gets about this part of what is left, so that as many askers in a row find something.
const PARTS_OF_A_GATEWAY: u64 = 8;

/// The demand for one bundle.
#[derive(Debug, Clone, Copy, Default)]
struct Demand {
    /// The hash of its key; 0 is nobody's.
    bundle: u64,
    /// Which span this is, counted from the desk's beginning.
    span: u64,
    /// Admissions handed out in this span, and in the one before.
    now: u64,
    before: u64,
}

impl Demand {
    /// The same, as it stands in a later span.
    fn at(self, span: u64) -> Self {
        match span.saturating_sub(self.span) {
            0 => self,
            1 => Self {
                span,
                now: 0,
                before: self.now,
                ..self
            },
            _ => Self {
                span,
                now: 0,
                before: 0,
                ..self
            },
        }
    }

    /// Admissions per span, of late: the part of the span before that is still in sight counts.
    fn rate(self, now_ms: u64) -> u64 {
        let (span, passed_ms) = span(now_ms);
        let of = self.at(span);
        let in_sight = of.before.saturating_mul(SPAN_MS.saturating_sub(passed_ms));
        of.now.saturating_add(in_sight.checked_div(SPAN_MS).unwrap_or_default())
    }
}

/// Which span this is, and how much of it has passed.
fn span(now_ms: u64) -> (u64, u64) {
    let span = now_ms.checked_div(SPAN_MS).unwrap_or_default();
    (span, now_ms.saturating_sub(span.saturating_mul(SPAN_MS)))
}

#[derive(Debug)]
struct Desk {
    demands: Vec<[Demand; WAYS]>,
    /// Whose blocks these are, for their returns, and in which order they came.
    blocks: HashMap<OperationId, u64>,
    oldest: VecDeque<OperationId>,
    /// When each gateway asked last.
    gateways: HashMap<OperationId, u64>,
    next_sweep_ms: u64,
}

impl Desk {
    fn set(&mut self, bundle: u64) -> Option<&mut [Demand; WAYS]> {
        let sets = u64::try_from(self.demands.len()).ok()?;
        let at = usize::try_from(bundle.checked_rem(sets)?).ok()?;
        self.demands.get_mut(at)
    }

    fn rate(&mut self, bundle: u64, now_ms: u64) -> u64 {
        let known = self
            .set(bundle)
            .and_then(|set| set.iter().find(|of| of.bundle == bundle));
        known.map_or(0, |of| of.rate(now_ms))
    }

    fn add(&mut self, bundle: u64, admissions: u64, now_ms: u64) {
        let Some(set) = self.set(bundle) else { return };
        // Its own place counts as wanted least of all.
        let place = |of: &&mut Demand| (of.bundle != bundle, of.rate(now_ms));
        let Some(of) = set.iter_mut().min_by_key(place) else {
            return;
        };
        let (span, _) = span(now_ms);
        *of = if of.bundle == bundle {
            of.at(span)
        } else {
            Demand {
                bundle,
                span,
                ..Demand::default()
            }
        };
        of.now = of.now.saturating_add(admissions);
    }

    fn take_off(&mut self, bundle: u64, admissions: u64, now_ms: u64) {
        let Some(of) = self
            .set(bundle)
            .and_then(|set| set.iter_mut().find(|of| of.bundle == bundle))
        else {
            return;
        };
        *of = of.at(span(now_ms).0);
        // Handed out in this span or in the one before: nobody knows.
        let rest = admissions.saturating_sub(of.now);
        of.now = of.now.saturating_sub(admissions);
        of.before = of.before.saturating_sub(rest);
    }

    /// Notes a gateway; how many there are.
    fn gateways(&mut self, gateway: OperationId, now_ms: u64) -> u64 {
        if now_ms >= self.next_sweep_ms {
            self.sweep(now_ms);
        }
        if self.gateways.len() < MOST_GATEWAYS || self.gateways.contains_key(&gateway) {
            self.gateways.insert(gateway, now_ms);
        }
        u64::try_from(self.gateways.len()).unwrap_or(u64::MAX).max(1)
    }

    /// Forgets gateways that are gone.
    fn sweep(&mut self, now_ms: u64) {
        self.next_sweep_ms = now_ms.saturating_add(SWEEP_MS);
        self.gateways
            .retain(|_, at_ms| now_ms.saturating_sub(*at_ms) < GATEWAY_MS);
    }

    fn remember(&mut self, block: OperationId, bundle: u64) {
        if self.blocks.insert(block, bundle).is_none() {
            self.oldest.push_back(block);
        }
        while self.oldest.len() > MOST_BLOCKS {
            if let Some(gone) = self.oldest.pop_front() {
                self.blocks.remove(&gone);
            }
        }
    }
}

/// What there is to know about leases in this process.
#[derive(Debug)]
pub struct LeaseDesk {
    hasher: RandomState,
    epoch: Instant,
    /// Until when leases are wanted here at all.
    wanted_until_ms: AtomicU64,
    desk: Mutex<Desk>,
}

/// A bundle, as the desk knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bundle(u64);

impl Default for LeaseDesk {
    fn default() -> Self {
        Self::of(BUNDLES)
    }
}

impl LeaseDesk {
    fn of(bundles: usize) -> Self {
        let sets = bundles.checked_div(WAYS).unwrap_or(1).max(1);
        Self {
            hasher: RandomState::new(),
            epoch: Instant::now(),
            wanted_until_ms: AtomicU64::new(0),
            desk: Mutex::new(Desk {
                demands: vec![[Demand::default(); WAYS]; sets],
                blocks: HashMap::new(),
                oldest: VecDeque::new(),
                gateways: HashMap::new(),
                next_sweep_ms: 0,
            }),
        }
    }

    /// The bundle of a request, if its demand counts: one request of a gateway asks for a lease while others like it are
    /// decided exactly. Where nobody asks for leases nothing is kept.
    pub fn watched(&self, request: &DecideRequest) -> Option<Bundle> {
        let now_ms = millis_since(self.epoch);
        if request.lease.is_some() {
            let until_ms = now_ms.saturating_add(GATEWAY_MS);
            self.wanted_until_ms.store(until_ms, Ordering::Relaxed);
        }
        let is_wanted = now_ms < self.wanted_until_ms.load(Ordering::Relaxed);
        let counts = is_wanted && request.gates.iter().all(|rule| is_leasable(rule.gate()));
        counts.then(|| self.bundle(request))
    }

    /// The bundle of a request: its subject and limits, under its gates and window.
    fn bundle(&self, request: &DecideRequest) -> Bundle {
        let mut hasher = self.hasher.build_hasher();
        let subject = &request.subject;
        subject.owner.hash(&mut hasher);
        for id in [
            &subject.org,
            &subject.auth,
            &subject.graph,
            &subject.lane,
            &subject.model,
        ] {
            id.hash(&mut hasher);
        }
        for scope in Scope::CONTRACT {
            for resource in [Resource::Requests, Resource::Tokens] {
                request.limits.of(scope).get(resource).figure().hash(&mut hasher);
            }
        }
        for rule in &request.gates {
            rule.gate().hash(&mut hasher);
        }
        request.window_s.hash(&mut hasher);
        Bundle(hasher.finish().max(1))
    }

    /// What a lease may be for a bundle that is asked for now.
    pub fn terms(&self, bundle: Bundle, ask: &LeaseAsk) -> LeaseTerms {
        let now_ms = millis_since(self.epoch);
        let mut desk = locked(&self.desk);
        let gateways = desk.gateways(ask.gateway, now_ms);
        let rate = desk.rate(bundle.0, now_ms);
        drop(desk);
        let until_its_end = rate.saturating_mul(ask.max_age_ms).checked_div(SPAN_MS);
        let half = until_its_end.unwrap_or_default().checked_div(2).unwrap_or_default();
        LeaseTerms {
            most: match half.min(ask.max_requests) {
                most if most >= BlockAsk::SMALLEST => most,
                _ => 1,
            },
            parts: PARTS_OF_A_GATEWAY.saturating_mul(gateways),
        }
    }

    /// Notes that an operation has handed out so many admissions, all but the first as a block.
    pub fn handed_out(&self, bundle: Bundle, op: OperationId, admissions: u64) {
        let now_ms = millis_since(self.epoch);
        let mut desk = locked(&self.desk);
        desk.add(bundle.0, admissions, now_ms);
        if admissions > 1 {
            desk.remember(op, bundle.0);
        }
    }

    /// What there is to see of leases, as JSON.
    pub fn json(&self) -> Value {
        let now_ms = millis_since(self.epoch);
        let mut desk = locked(&self.desk);
        desk.sweep(now_ms);
        json!({
            "wanted": now_ms < self.wanted_until_ms.load(Ordering::Relaxed),
            "gateways": desk.gateways.len(),
            "blocks_remembered": desk.blocks.len()
        })
    }

    /// Notes what came back.
    pub fn came_back(&self, parts: &[Return]) {
        let now_ms = millis_since(self.epoch);
        let mut desk = locked(&self.desk);
        for part in parts {
            if let Some(bundle) = desk.blocks.get(&part.lease).copied() {
                desk.take_off(bundle, part.requests, now_ms);
            }
        }
    }
}

#[cfg(test)]
mod tests;
