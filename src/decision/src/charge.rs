//! Charge plans: which counters and slots one request touches, and what their states mean.
//!
//! A plan is charged by a limiter in one atomic step: every entry or none. The gates' order is the entries' order, so that
//! `capacity` before `contract` is settled here, and a store only counts. What a store reports back is turned into a
//! denial here as well: the longest wait of the first gate that denies.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt::Write as _;

use crate::class::Code;
use crate::config::Tiers;
use crate::limits::{Limit, Resource, Scope, ScopeLimits, StampedLimits};
use crate::operation::OperationId;
use crate::policy::Plan;
use crate::rules::Gate;
use crate::verdict::{Denial, LimitState, contract_code};
use crate::wire::Subject;

/// How long a caller turned away for want of a slot should wait, in milliseconds: slots come free at any time.
const SLOT_WAIT_MS: u64 = 1_000;

/// One counter or set of slots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChargeEntry {
    /// The gate that asks; entries of one gate stand together.
    pub gate: Gate,
    /// Whom the limit binds.
    pub scope: Scope,
    /// What it counts.
    pub resource: Resource,
    /// The store's key without its prefix. Two subjects never share one.
    pub key: String,
    /// The figure; 0 is always exhausted.
    pub limit: u64,
    /// What this request takes.
    pub cost: u64,
    /// Length of the window that a first charge starts, in seconds.
    pub window_s: u64,
}

/// All entries of one request for adjacent limiter gates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChargePlan {
    /// Makes the charge idempotent.
    pub op: OperationId,
    /// The entries, in the gates' order.
    pub entries: Vec<ChargeEntry>,
    /// Charge more than this one request, if there is room. A plan that takes a slot has no block: a slot is one stream's.
    pub block: Option<BlockAsk>,
}

/// A wish for a block of admissions, charged as a whole. How large it is the limiter says, in the same atomic step: from
/// what is left, so that a block never goes over a limit, and small enough that others find something left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockAsk {
    /// The most admissions.
    pub most: u64,
    /// The block is at most one of so many parts of what is left; at least 1.
    pub parts: u64,
    /// No request waits for it: a block that would be too small is none, and charges nothing.
    pub ahead: bool,
}

impl BlockAsk {
    /// A smaller block is not worth its bookkeeping: then only the request itself is charged.
    pub const SMALLEST: u64 = 8;

    /// How many admissions to charge to these entries, whose states say that one fits.
    pub fn size<'a>(&self, entries: impl Iterator<Item = (&'a ChargeEntry, &'a EntryState)>) -> u64 {
        let fitting = |(entry, state): (&ChargeEntry, &EntryState)| {
            // What costs nothing binds nobody.
            let left = entry.limit.saturating_sub(state.used).checked_div(entry.cost)?;
            left.checked_div(self.parts.max(1))
        };
        match entries.filter_map(fitting).fold(self.most, u64::min) {
            size if size >= Self::SMALLEST => size,
            _ if self.ahead => 0,
            _ => 1,
        }
    }
}

/// Where one entry stands, by the store's clock: before the charge if it was denied, after it if it was granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EntryState {
    /// Charged so far in this window, or slots held.
    pub used: u64,
    /// Milliseconds until the window ends; a whole window if none runs.
    pub reset_ms: u64,
    /// The cost does not fit.
    pub exhausted: bool,
}

/// What a limiter did with a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Charged {
    /// Every entry was charged (or had been, by the same operation).
    Granted(Vec<EntryState>),
    /// The same for a plan that asks for a block: every entry was charged so many times.
    Block {
        /// How many admissions, the one of the request that waits included; 0 if none does and the block would have been
        /// too small: then nothing was charged.
        admissions: u64,
        /// Where the entries stand.
        states: Vec<EntryState>,
    },
    /// At least one entry was exhausted, and nothing was charged.
    Denied(Vec<EntryState>),
    /// The operation was cancelled before: nothing was charged, and nobody waits for the answer.
    Cancelled,
}

/// The ids of a scope, or `None` if the subject does not have them: then the scope does not bind it.
fn ids<'a>(scope: Scope, subject: &'a Subject, tiers: &Tiers) -> Option<Vec<&'a str>> {
    Some(match scope {
        Scope::Platform => Vec::new(),
        Scope::Owner => alloc::vec![subject.owner.as_str()],
        Scope::Org | Scope::Organization => alloc::vec![subject.org.as_deref()?],
        Scope::Auth => alloc::vec![subject.auth.as_deref()?],
        Scope::Graph => alloc::vec![subject.graph.as_deref()?],
        Scope::OrganizationModel => alloc::vec![subject.org.as_deref()?, subject.model.as_deref()?],
        Scope::Lane => {
            let lane = subject.lane.as_deref()?;
            tiers
                .lanes
                .iter()
                .any(|(name, _)| name == lane)
                .then(|| alloc::vec![lane])?
        }
    })
}

/// Longer than most keys, in bytes.
const USUAL_KEY: usize = 96;

/// Whether a byte of an id stands for itself in a key.
const fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_')
}

/// `{scope:id:id}:resource`. The braces are a cluster's hash tag, so that all resources of one scope live together; ids
/// are percent-encoded down to letters, digits, `-` and `_`, so that neither `:` nor braces in an id can make two subjects
/// meet.
pub fn key(scope: Scope, resource: Resource, ids: &[&str]) -> String {
    let mut key = String::with_capacity(USUAL_KEY);
    key.push('{');
    key.push_str(scope.name());
    for id in ids {
        key.push(':');
        if id.bytes().all(is_plain) {
            key.push_str(id);
            continue;
        }
        for byte in id.bytes() {
            if is_plain(byte) {
                key.push(char::from(byte));
            } else {
                key.push_str(&alloc::format!("%{byte:02X}"));
            }
        }
    }
    key.push_str("}:");
    key.push_str(resource.name());
    key
}

/// Collects the entries of limiter gates.
#[derive(Debug)]
pub struct PlanBuilder<'a> {
    subject: &'a Subject,
    tiers: &'a Tiers,
    hold: u64,
    entries: Vec<ChargeEntry>,
}

impl<'a> PlanBuilder<'a> {
    /// Starts a plan for a subject whose token hold is `hold`, before clamping.
    pub const fn new(subject: &'a Subject, tiers: &'a Tiers, hold: u64) -> Self {
        Self {
            subject,
            tiers,
            hold,
            entries: Vec::new(),
        }
    }

    fn scope(&mut self, gate: Gate, scope: Scope, limits: ScopeLimits, window_s: u64) {
        if limits.is_empty() {
            return;
        }
        let Some(ids) = ids(scope, self.subject, self.tiers) else {
            return;
        };
        for resource in Resource::ALL {
            let Some(limit) = limits.get(resource).figure() else {
                continue;
            };
            let cost = if resource == Resource::Tokens { self.hold } else { 1 };
            let mut key = key(scope, resource, &ids);
            if resource != Resource::Concurrency {
                // Windows of different lengths are different counters: the one that began first would bind the other.
                // Writing to a `String` does not fail.
                let _ = write!(key, ":{window_s}");
            }
            self.entries.push(ChargeEntry {
                gate,
                scope,
                resource,
                key,
                limit,
                cost,
                window_s,
            });
        }
    }

    /// Adds the limits of the contract, by the filter's window.
    pub fn contract(&mut self, limits: &StampedLimits, window_s: u64) {
        for scope in Scope::CONTRACT {
            self.scope(Gate::Contract, scope, limits.of(scope), window_s);
        }
    }

    /// Adds the slots of an org's plan. They are counted apart from slots that an envelope limits.
    pub fn plan_slots(&mut self, plan: &Plan, window_s: u64) {
        let (Some(limit), Some(org)) = (plan.concurrency.figure(), self.subject.org.as_deref()) else {
            return;
        };
        let mut key = key(Scope::Org, Resource::Concurrency, &[org]);
        key.push_str("-plan");
        let (scope, resource) = (Scope::Org, Resource::Concurrency);
        self.entries.push(ChargeEntry {
            gate: Gate::Concurrency,
            scope,
            resource,
            key,
            limit,
            cost: 1,
            window_s,
        });
    }

    /// Adds the operator's tiers, by the service's window.
    pub fn capacity(&mut self, window_s: u64) {
        let tiers = self.tiers;
        for (scope, limits) in [
            (Scope::Platform, tiers.platform),
            (Scope::Graph, tiers.graph),
            (Scope::Organization, tiers.organization),
            (Scope::OrganizationModel, tiers.organization_model),
        ] {
            self.scope(Gate::Capacity, scope, limits, window_s);
        }
        let lane = self.subject.lane.as_deref();
        if let Some((_, limits)) = tiers.lanes.iter().find(|(name, _)| Some(name.as_str()) == lane) {
            self.scope(Gate::Capacity, Scope::Lane, *limits, window_s);
        }
    }

    /// The plan. The token hold is clamped to the smallest token limit, so that a fresh window always has room for one
    /// request.
    pub fn build(mut self, op: OperationId) -> ChargePlan {
        let tokens = |entry: &&ChargeEntry| entry.resource == Resource::Tokens && entry.limit > 0;
        let smallest = self.entries.iter().filter(tokens).map(|entry| entry.limit).min();
        if let Some(smallest) = smallest {
            for entry in self
                .entries
                .iter_mut()
                .filter(|entry| entry.resource == Resource::Tokens)
            {
                entry.cost = entry.cost.min(smallest);
            }
        }
        ChargePlan {
            op,
            entries: self.entries,
            block: None,
        }
    }
}

impl ChargeEntry {
    /// Milliseconds after which this entry can have room again, as far as its own figure is concerned.
    fn wait_ms(&self, state: &EntryState) -> u64 {
        if self.limit == 0 {
            self.window_s.saturating_mul(1000)
        } else if self.resource == Resource::Concurrency {
            SLOT_WAIT_MS
        } else {
            state.reset_ms
        }
    }

    /// Where the limit stands, for a reply.
    fn report(&self, state: &EntryState) -> LimitState {
        LimitState {
            scope: self.scope,
            resource: self.resource,
            limit: self.limit,
            remaining: self.limit.saturating_sub(state.used),
            reset_ms: self.wait_ms(state),
            window_s: self.window_s,
        }
    }
}

impl ChargePlan {
    /// Whether a slot is taken when this plan is granted.
    pub fn takes_slot(&self) -> bool {
        self.entries.iter().any(|entry| entry.resource == Resource::Concurrency)
    }

    /// The block that is asked for, if there can be one.
    pub fn asked_block(&self) -> Option<BlockAsk> {
        self.block.filter(|_| !self.takes_slot())
    }

    /// The smallest token limit, which is the most that one request holds; `None` if no token limit binds.
    pub fn smallest_token_limit(&self) -> Option<u64> {
        let of_tokens = self.entries.iter().filter(|entry| entry.resource == Resource::Tokens);
        of_tokens.map(|entry| entry.limit).min()
    }

    /// The tokens that every token window is charged; `None` without such a window.
    pub fn held_tokens(&self) -> Option<u64> {
        let of_tokens = self.entries.iter().find(|entry| entry.resource == Resource::Tokens);
        of_tokens.map(|entry| entry.cost)
    }

    /// The first gate, in order, with a limit of 0: known without the store.
    pub fn blocked_gate(&self) -> Option<Gate> {
        self.entries
            .iter()
            .find(|entry| entry.limit == 0)
            .map(|entry| entry.gate)
    }

    /// The denial by the limits of 0 of one gate.
    pub fn blocked_denial(&self, gate: Gate) -> Option<Denial> {
        let blocked = |entry: &ChargeEntry| EntryState {
            used: 0,
            reset_ms: entry.window_s.saturating_mul(1000),
            exhausted: entry.limit == 0 && entry.gate == gate,
        };
        self.denial(&self.entries.iter().map(blocked).collect::<Vec<_>>())
    }

    /// The denial that some states mean, or `None` if nothing is exhausted: of the first gate that denies, the limit
    /// with the longest wait; on a tie by scope, then by resource.
    pub fn denial(&self, states: &[EntryState]) -> Option<Denial> {
        let exhausted = || self.entries.iter().zip(states).filter(|(_, state)| state.exhausted);
        let gate = exhausted().next()?.0.gate;
        let (entry, state) = exhausted()
            .filter(|(entry, _)| entry.gate == gate)
            .min_by_key(|(entry, state)| (core::cmp::Reverse(entry.wait_ms(state)), entry.scope, entry.resource))?;
        let code = if gate == Gate::Capacity {
            Code::CapacityExhausted
        } else {
            contract_code(entry.resource)
        };
        let window_s = entry.window_s.max(1);
        Some(Denial {
            code,
            gate: Some(gate),
            limit: Some(entry.report(state)),
            retry_after_s: Some(entry.wait_ms(state).div_ceil(1000).clamp(1, window_s)),
        })
    }

    /// The contract limit with the smallest part left, for the fields of an admitted reply. Slots are left out: with a
    /// limit of one, every admitted request would report them as spent.
    pub fn tightest(&self, states: &[EntryState]) -> Option<LimitState> {
        let windowed = |entry: &ChargeEntry| entry.gate == Gate::Contract && entry.resource != Resource::Concurrency;
        let mut tightest: Option<LimitState> = None;
        for (entry, state) in self.entries.iter().zip(states).filter(|(entry, _)| windowed(entry)) {
            let report = entry.report(state);
            // a.remaining / a.limit < b.remaining / b.limit, without division.
            let part =
                |of: &LimitState, other: &LimitState| u128::from(of.remaining).saturating_mul(u128::from(other.limit));
            if tightest.is_none_or(|so_far| part(&report, &so_far) < part(&so_far, &report)) {
                tightest = Some(report);
            }
        }
        tightest
    }
}

/// Whether a limit of an envelope is looked at by no gate that is listed.
pub fn is_unchecked(limits: &StampedLimits, contract_is_listed: bool) -> bool {
    !contract_is_listed && limits.stamped().any(|(_, _, limit)| limit != Limit::Unlimited)
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(target_arch = "wasm32")]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    #[test]
    fn subjects_never_share_a_key_whatever_their_ids_contain() {
        let pair = |a, b| key(Scope::OrganizationModel, Resource::Requests, &[a, b]);
        assert_ne!(pair("a:b", "c"), pair("a", "b:c"));
        assert_ne!(pair("a%3Ab", "c"), pair("a:b", "c"));
        let one = |id| key(Scope::Org, Resource::Requests, &[id]);
        let ids = ["{x}", "x", " x", "x ", "x}:tokens", "🦀", "%F0", "a:b", "a"];
        for (at, id) in ids.iter().enumerate() {
            assert!(ids.iter().skip(at + 1).all(|other| one(id) != one(other)), "{id}");
            assert_eq!(one(id).matches(['{', '}']).count(), 2, "{id}");
        }
        assert_ne!(
            key(Scope::Org, Resource::Requests, &["x"]),
            key(Scope::Organization, Resource::Requests, &["x"])
        );
    }

    fn plan(limits: &StampedLimits, hold: u64) -> ChargePlan {
        let subject = Subject {
            owner: "o".into(),
            org: Some("g".into()),
            auth: Some("a".into()),
            ..Subject::default()
        };
        let tiers = Tiers::default();
        let mut builder = PlanBuilder::new(&subject, &tiers, hold);
        builder.contract(limits, 60);
        builder.build(OperationId::from_random([0; 16]))
    }

    fn limits(figures: &[(Scope, Resource, u64)]) -> StampedLimits {
        let mut limits = StampedLimits::default();
        for (scope, resource, figure) in figures {
            limits.set(*scope, *resource, Limit::of(*figure));
        }
        limits
    }

    #[test]
    fn the_longest_wait_denies_and_ties_go_by_scope_then_resource() {
        let plan = plan(
            &limits(&[
                (Scope::Owner, Resource::Concurrency, 1),
                (Scope::Org, Resource::Requests, 5),
                (Scope::Org, Resource::Tokens, 5),
                (Scope::Auth, Resource::Requests, 5),
            ]),
            1,
        );
        let state = |reset_ms| EntryState {
            used: 9,
            reset_ms,
            exhausted: true,
        };
        let denial = plan
            .denial(&[state(0), state(20_001), state(20_001), state(7_000)])
            .unwrap();
        let limit = denial.limit.unwrap();
        assert_eq!(
            (limit.scope, limit.resource, denial.retry_after_s),
            (Scope::Org, Resource::Requests, Some(21))
        );
        assert_eq!((denial.code, limit.remaining), (Code::RateLimited, 0));
    }

    #[test]
    fn a_limit_of_zero_waits_a_whole_window_and_waiting_does_not_help() {
        let plan = plan(
            &limits(&[(Scope::Org, Resource::Requests, 5), (Scope::Auth, Resource::Tokens, 0)]),
            1,
        );
        let denial = plan.blocked_denial(plan.blocked_gate().unwrap()).unwrap();
        assert_eq!((denial.code, denial.retry_after_s), (Code::TokensLimited, Some(60)));
        assert!(!denial.waiting_helps());
    }

    #[test]
    fn windows_of_different_lengths_are_different_counters_and_slots_have_none() {
        let subject = Subject {
            owner: "o".into(),
            ..Subject::default()
        };
        let tiers = Tiers::default();
        let keys = |window_s| {
            let mut builder = PlanBuilder::new(&subject, &tiers, 1);
            let stamped = [
                (Scope::Owner, Resource::Requests, 5),
                (Scope::Owner, Resource::Concurrency, 5),
            ];
            builder.contract(&limits(&stamped), window_s);
            let plan = builder.build(OperationId::from_random([0; 16]));
            plan.entries.into_iter().map(|entry| entry.key).collect::<Vec<_>>()
        };
        assert_eq!(keys(60), ["{owner:o}:requests:60", "{owner:o}:concurrency"]);
        assert_eq!(keys(3600)[0], "{owner:o}:requests:3600");
    }

    #[test]
    fn the_hold_is_clamped_to_the_smallest_token_limit() {
        let plan = plan(
            &limits(&[
                (Scope::Owner, Resource::Tokens, 500),
                (Scope::Org, Resource::Tokens, 20),
            ]),
            1024,
        );
        assert!(plan.entries.iter().all(|entry| entry.cost == 20));
    }

    #[test]
    fn the_tightest_limit_is_the_one_with_the_smallest_part_left() {
        let plan = plan(
            &limits(&[
                (Scope::Owner, Resource::Requests, 100),
                (Scope::Org, Resource::Requests, 10),
            ]),
            1,
        );
        let state = |used| EntryState {
            used,
            reset_ms: 1,
            exhausted: false,
        };
        assert_eq!(plan.tightest(&[state(50), state(4)]).unwrap().scope, Scope::Owner);
        assert_eq!(plan.tightest(&[state(50), state(6)]).unwrap().scope, Scope::Org);
    }
}
