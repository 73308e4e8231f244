//! The leases of one configuration in one VM: what it fetches, what it has put into the host's memory and has to take out
//! again, and what it learns from answers.

use alloc::string::String;
use alloc::vec::Vec;

use hashbrown::HashMap;

use super::{Callout, Effect, Gatehouse};
use crate::config::{FilterConfig, LeaseConfig};
use crate::envelope::Ids;
use crate::lease::{
    Bundle, Fetched, GATEWAY_SLOT, Host, Installed, Take, Times, Unspent, Written, are_leasable, install, nothing_came,
    remember, retire, take,
};
use crate::limits::StampedLimits;
use crate::metric::Counter;
use crate::operation::OperationId;
use crate::outbox::Note;
use crate::stream::{CalloutAnswer, sensible_verdict};
use crate::verdict::{Admission, Verdict};
use crate::wire::{DECIDE_PATH, DecideRequest, LeaseAsk, Return};

/// How long after its time the guest forgets a fetch of which the host never tells how it ended, in milliseconds.
const FETCH_SLACK_MS: u64 = 500;

/// A block that is being fetched.
#[derive(Debug)]
struct Fetch {
    bundle: Bundle,
    request: DecideRequest,
    asked_ms: u64,
}

#[derive(Debug, Default)]
pub(super) struct Leases {
    config: Option<LeaseConfig>,
    /// Tells this configuration's bundles from those of others in the same memory.
    configuration: String,
    fetch_ms: u64,
    gateway: Option<OperationId>,
    /// The next id of a return: counted up from random bits.
    next_return: Option<u128>,
    fetching: HashMap<OperationId, Fetch>,
    /// Requests that went on by a part of a block and are not told yet.
    hits: u64,
    installed: Vec<Installed>,
}

impl Leases {
    pub(super) fn of(config: &FilterConfig, fingerprint: &str) -> Self {
        let is_on = config.leases.max_requests > 0 && are_leasable(&config.rules);
        Self {
            config: is_on.then_some(config.leases),
            configuration: alloc::format!("{}/{fingerprint}", config.decision.upstream),
            fetch_ms: config.decision.timeout_ms,
            ..Self::default()
        }
    }

    pub(super) fn are_settled(&self) -> bool {
        self.installed.is_empty() && self.fetching.is_empty()
    }

    fn times(&self, now_ms: u64) -> Times {
        Times {
            now_ms,
            max_age_ms: self.config.map_or(0, |config| config.max_age_ms),
            fetch_ms: self.fetch_ms,
        }
    }
}

impl Gatehouse {
    /// The bundle of a request; `None` if its decision has to be exact.
    pub(crate) fn bundle(&self, subject: Ids<'_>, limits: &StampedLimits) -> Option<Bundle> {
        let config = self.leases.config?;
        Bundle::of(subject, limits, &self.leases.configuration, config.slots)
    }

    /// Hands out an admission of the bundle, if there is one.
    pub(crate) fn take(&mut self, host: &mut dyn Host, bundle: &Bundle, hold: u64, now_ms: u64) -> Take {
        if self.leases.next_return.is_none() {
            self.leases.next_return = host.random().map(u128::from_be_bytes);
        }
        if self.leases.next_return.is_none() {
            // Without ids nothing could be returned, so nothing is handed out.
            return Take::Ask { fetch: false };
        }
        let mut returns = Vec::new();
        let taken = take(host, bundle, hold, self.leases.times(now_ms), &mut returns);
        self.return_all(returns, now_ms);
        taken
    }

    /// What an exact decision asks for besides itself.
    pub(crate) fn lease_ask(&mut self, host: &mut dyn Host, fetch: bool) -> Option<LeaseAsk> {
        let config = self.leases.config.filter(|_| fetch)?;
        let gateway = self.gateway_id(host)?;
        Some(LeaseAsk {
            max_requests: config.max_requests,
            max_age_ms: config.max_age_ms,
            gateway,
            ahead: false,
        })
    }

    /// The id that all workers of this gateway share.
    fn gateway_id(&mut self, host: &mut dyn Host) -> Option<OperationId> {
        if self.leases.gateway.is_none() {
            let known = |host: &mut dyn Host| {
                let (value, _) = host.get(GATEWAY_SLOT).ok()??;
                value.first_chunk::<16>().copied()
            };
            let id = match known(host) {
                Some(id) => id,
                None => {
                    let id = host.random()?;
                    // Another worker may be as quick, and a host may let both write: what stands there the next time is
                    // the gateway's.
                    return match host.set(GATEWAY_SLOT, &id, 0) {
                        Written::Done | Written::Raced => known(host).map(OperationId::from_random),
                        Written::Refused => None,
                    };
                }
            };
            self.leases.gateway = Some(OperationId::from_random(id));
        }
        self.leases.gateway
    }

    /// Has the next block fetched, while the present one lasts.
    pub(crate) fn fetch_ahead(
        &mut self,
        host: &mut dyn Host,
        bundle: &Bundle,
        like: DecideRequest,
        now_ms: u64,
        effects: &mut Vec<Effect>,
    ) {
        if self.breaker.is_open() {
            return;
        }
        let (Some(lease), Some(op)) = (self.lease_ask(host, true), host.random()) else {
            return;
        };
        let request = DecideRequest {
            op: OperationId::from_random(op),
            request_id: None,
            lease: Some(LeaseAsk { ahead: true, ..lease }),
            ..like
        };
        effects.push(Effect::Fetch(
            request.op,
            Callout {
                path: DECIDE_PATH,
                body: serde_json::to_vec(&request).unwrap_or_default(),
                trace: None,
                timeout_ms: self.leases.fetch_ms,
            },
        ));
        let fetch = Fetch {
            bundle: bundle.clone(),
            request,
            asked_ms: now_ms,
        };
        self.leases.fetching.insert(fetch.request.op, fetch);
    }

    /// Counts a request that went on by a part of a block. Told in sums: a call for each would cost as much as the rest.
    pub(crate) const fn count_leased(&mut self) {
        self.leases.hits = self.leases.hits.saturating_add(1);
    }

    /// What was counted since the last call.
    pub(super) fn lease_counts(&mut self) -> impl Iterator<Item = Effect> + use<> {
        let hits = core::mem::take(&mut self.leases.hits);
        let counters = if hits > 0 {
            &[Counter::LeaseHits, Counter::Admitted][..]
        } else {
            &[]
        };
        counters.iter().map(move |counter| Effect::Count(*counter, hits))
    }

    /// The host refused the callout of [`Effect::Fetch`]: nothing was asked.
    pub fn fetch_refused(&mut self, op: OperationId) {
        self.leases.fetching.remove(&op);
    }

    /// A block that no request waits for has come, or has not.
    pub fn fetched(
        &mut self,
        host: &mut dyn Host,
        op: OperationId,
        answer: CalloutAnswer<'_>,
        now_ms: u64,
    ) -> Vec<Effect> {
        let Some(fetch) = self.leases.fetching.remove(&op) else {
            return Vec::new();
        };
        match sensible_verdict(answer, &fetch.request) {
            Some(verdict) => self.learn(host, &fetch.bundle, &fetch.request, &verdict, fetch.asked_ms, now_ms),
            // The service may have charged it.
            None => self.tell(Note::Cancel(op), now_ms),
        }
        alloc::vec![Effect::CalloutMs(now_ms.saturating_sub(fetch.asked_ms))]
    }

    /// Puts what an answer says about a bundle into the host's memory.
    pub(crate) fn learn(
        &mut self,
        host: &mut dyn Host,
        bundle: &Bundle,
        request: &DecideRequest,
        verdict: &Verdict,
        asked_ms: u64,
        now_ms: u64,
    ) {
        let times = self.leases.times(now_ms);
        match verdict {
            Verdict::Admit(Admission {
                lease: Some(grant),
                tightest,
                ..
            }) => {
                let mut returns = Vec::new();
                let fetched = Fetched {
                    lease: request.op,
                    grant: *grant,
                    tightest: *tightest,
                    asked_ms,
                };
                let installed = install(host, bundle, fetched, times, &mut returns);
                self.leases.installed.extend(installed);
                self.return_all(returns, now_ms);
            }
            Verdict::Admit(_) if request.lease.is_some() => nothing_came(host, bundle, times),
            Verdict::Deny(denial) => remember(host, bundle, denial, request.tokens, times),
            _ => {}
        }
    }

    /// A request that was admitted by a part of a block has used less than it held, or more.
    pub(crate) fn give_back(&mut self, lease: OperationId, tokens: i64, now_ms: u64) {
        if let Some(id) = self.return_id() {
            let part = Return {
                id,
                lease,
                requests: 0,
                tokens,
            };
            self.tell(Note::Return(part), now_ms);
        }
    }

    fn return_id(&mut self) -> Option<OperationId> {
        let id = self.leases.next_return?;
        self.leases.next_return = Some(id.wrapping_add(1));
        Some(OperationId::from_random(id.to_be_bytes()))
    }

    fn return_all(&mut self, returns: Vec<Unspent>, now_ms: u64) {
        for unspent in returns {
            let told = self.return_id().and_then(|id| unspent.told(id));
            if let Some(part) = told {
                self.tell(Note::Return(part), now_ms);
            }
        }
    }

    /// Takes blocks out of the host's memory whose time is over, and forgets fetches that the host never ends. Called from
    /// every tick, and from every request where the host does not tick.
    pub fn tend_leases(&mut self, host: &mut dyn Host, now_ms: u64) {
        self.retire(host, now_ms, |block| now_ms >= block.ends_ms);
        let late_ms = self.leases.fetch_ms.saturating_add(FETCH_SLACK_MS);
        let is_late = |fetch: &Fetch| now_ms >= fetch.asked_ms.saturating_add(late_ms);
        self.forget_fetches(now_ms, is_late);
    }

    /// Takes all blocks out of the host's memory that this VM has put there: it goes.
    pub fn end_leases(&mut self, host: &mut dyn Host, now_ms: u64) {
        self.retire(host, now_ms, |_| true);
        self.forget_fetches(now_ms, |_| true);
    }

    fn retire(&mut self, host: &mut dyn Host, now_ms: u64, is_over: impl Fn(&Installed) -> bool) {
        if !self.leases.installed.iter().any(&is_over) {
            return;
        }
        let (over, rest): (Vec<_>, Vec<_>) = core::mem::take(&mut self.leases.installed)
            .into_iter()
            .partition(is_over);
        self.leases.installed = rest;
        let returns = over.iter().filter_map(|block| retire(host, block, now_ms)).collect();
        self.return_all(returns, now_ms);
    }

    fn forget_fetches(&mut self, now_ms: u64, is_over: impl Fn(&Fetch) -> bool) {
        let over: Vec<OperationId> = self
            .leases
            .fetching
            .iter()
            .filter(|(_, fetch)| is_over(fetch))
            .map(|(op, _)| *op)
            .collect();
        for op in over {
            self.leases.fetching.remove(&op);
            self.tell(Note::Cancel(op), now_ms);
        }
    }
}
