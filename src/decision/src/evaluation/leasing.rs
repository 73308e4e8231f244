//! Leases: whether a decision may charge more than its own request, and how long what it charged may be handed out.
//!
//! Nothing is leased that was opened or not enforced, and a decision that no request waits for (`ahead`) opens nothing:
//! it spends no allowance, and where no block can be had it charges nothing.
//!
//! Left out on purpose: how much a bundle is in demand and how many gateways share it, which the driver knows; and how
//! large a block is, which the limiter says.

use super::Evaluation;
use crate::charge::{BlockAsk, ChargePlan, EntryState};
use crate::lease::is_leasable;
use crate::verdict::{Admission, Grant, Verdict};

/// What the driver knows about the demand for a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseTerms {
    /// The most admissions that are worth charging at once.
    pub most: u64,
    /// A block takes at most one of so many parts of what a limit has left.
    pub parts: u64,
}

impl<'a> Evaluation<'a> {
    /// With these terms for the lease that the request asks for. Without them none is granted.
    #[must_use]
    pub fn leasing(mut self, terms: LeaseTerms) -> Self {
        self.terms = Some(terms);
        self
    }

    /// Whether no request waits for this decision.
    pub(super) fn is_ahead(&self) -> bool {
        self.request.lease.is_some_and(|ask| ask.ahead)
    }

    /// Whether a lease may come of this decision, as far as is known.
    fn may_lease(&self) -> bool {
        self.request.lease.is_some()
            && self.terms.is_some()
            && self.request.gates.iter().all(|rule| is_leasable(rule.gate()))
            && self.admission.bypassed.is_empty()
            && !self.admission.unenforced
            && self.longest_ms() > 0
    }

    /// Whether nobody waits for this decision, and no lease can come of it either.
    pub(super) fn is_pointless(&self) -> bool {
        self.is_ahead() && !self.may_lease()
    }

    /// The longest that a lease may last: as old as the filter lets it get, and never older than the policy under it.
    fn longest_ms(&self) -> u64 {
        let policy_ms = self.view.as_ref().and_then(|view| view.fresh_for_ms);
        let asked_ms = self.request.lease.map_or(0, |ask| ask.max_age_ms);
        policy_ms.map_or(asked_ms, |policy_ms| asked_ms.min(policy_ms))
    }

    /// The most admissions of a block.
    fn most(&self) -> u64 {
        let (terms, ask) = (self.terms, self.request.lease);
        let most = terms.zip(ask).map(|(terms, ask)| terms.most.min(ask.max_requests));
        most.unwrap_or(0).max(1)
    }

    /// The block that a plan asks for. A gate after it may still deny, so its gates have to be the last.
    pub(super) fn block(&self, plan: &ChargePlan, gates: usize) -> Option<BlockAsk> {
        let is_last = self.cursor.saturating_add(gates) >= self.request.gates.len();
        if !self.may_lease() || !is_last || plan.takes_slot() {
            return None;
        }
        Some(BlockAsk {
            most: self.most(),
            parts: self.terms?.parts,
            ahead: self.is_ahead(),
        })
    }

    /// The lease of a plan that was charged so many times.
    pub(super) fn grant(&self, plan: &ChargePlan, states: &[EntryState], admissions: u64) -> Option<Grant> {
        let requests = admissions.saturating_sub(u64::from(!self.is_ahead()));
        let reset_ms = states.iter().map(|state| state.reset_ms).min();
        let grant = Grant {
            requests,
            tokens: plan.held_tokens().map(|tokens| tokens.saturating_mul(requests)),
            largest_hold: plan.smallest_token_limit(),
            ends_in_ms: self.longest_ms().min(reset_ms.unwrap_or(u64::MAX)),
        };
        (requests > 0 && self.may_lease()).then_some(grant)
    }

    /// The lease of a request that no limit binds: nothing is charged for it, and all that can end it is its age.
    pub(super) fn uncounted_grant(&self) -> Option<Grant> {
        let most = self.most();
        if self.is_charged || most < BlockAsk::SMALLEST || !self.may_lease() {
            return None;
        }
        Some(Grant {
            requests: most.saturating_sub(u64::from(!self.is_ahead())),
            tokens: None,
            largest_hold: None,
            ends_in_ms: self.longest_ms(),
        })
    }

    /// Ends a decision that nobody waits for without a lease.
    pub(super) fn no_lease(&mut self) {
        self.verdict = Some(Verdict::Admit(Admission {
            unenforced: self.admission.unenforced,
            ..Admission::default()
        }));
    }
}

#[cfg(test)]
mod tests;
