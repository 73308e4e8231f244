//! A decision service that is imagined: the pure evaluation over memory, on a clock that the caller turns.
//!
//! `explain` and `replay` answer the filter's callouts with it. What it is asked is the question that the filter has put into
//! its callout, and its answer is the very JSON of the wire. Which stores do not answer is part of the picture.
//! Left out on purpose: leases (every decision is exact), budgets (memory is in time), and the journal of runs that passed
//! unrecorded (they are counted once metering is back, and here it never comes back).

pub mod counters;
pub mod filter;
pub mod scene;
pub mod sources;

use std::collections::HashMap;

use clap::ValueEnum;
use portcullis_decision::allowance::Allowances;
use portcullis_decision::charge::ChargePlan;
use portcullis_decision::config::Profile;
use portcullis_decision::cost::cost_micro_dollars;
use portcullis_decision::evaluation::{Evaluation, LimiterAnswer, Operator, Step, Taken, request_fault};
use portcullis_decision::json;
use portcullis_decision::launch_rate::LaunchRate;
use portcullis_decision::ledger::{Ledger, Settled};
use portcullis_decision::metering::{Cost, MeterLedger, MeterPlan, Metered, Month};
use portcullis_decision::operation::OperationId;
use portcullis_decision::policy::{Lookup, Org, PolicyFile, PolicyView};
use portcullis_decision::usage::Usage;
use portcullis_decision::verdict::{Bypass, Verdict};
use portcullis_decision::wire::{Bill, DecideAnswer, DecideRequest, SettleAnswer, SettleRequest};

use crate::metering::memory::month_at;

/// What can be imagined not to answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outage {
    /// Counters and slots
    Limiter,
    /// Orgs, models, plans and prices
    Policy,
    /// Runs and cost by month
    Metering,
    /// The decision service itself
    Decision,
}

/// One question to a store, with its answer.
#[derive(Debug, Clone)]
pub enum Told {
    /// The policy store.
    Policy(PolicyView),
    /// The limiter.
    Charge(ChargePlan, LimiterAnswer),
    /// The launch rate: so many milliseconds to wait, if it was denied.
    Launch(Option<u64>),
    /// The metering store, with the runs and micro-dollars of the month so far.
    Meter(MeterPlan, Option<Metered>, (u64, u64)),
}

/// One decision, and how it came about.
#[derive(Debug, Clone)]
pub struct Decided {
    /// What was asked.
    pub request: DecideRequest,
    /// What it came to.
    pub verdict: Verdict,
    /// Gates that were opened, also of a request that was refused in the end.
    pub bypassed: Vec<Bypass>,
    /// What the stores said, in order.
    pub told: Vec<Told>,
}

/// An answer as it would be on the wire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WireAnswer {
    /// `:status`.
    pub status: u16,
    /// The JSON body.
    pub body: Vec<u8>,
}

impl WireAnswer {
    const fn nothing(status: u16) -> Self {
        Self {
            status,
            body: Vec::new(),
        }
    }

    fn json(answer: &impl serde::Serialize) -> Self {
        serde_json::to_vec(answer).map_or(Self::nothing(503), |body| Self { status: 200, body })
    }
}

/// A policy, with its organizations by id: a file may have many.
#[derive(Debug, Clone)]
struct Policy {
    file: PolicyFile,
    orgs: HashMap<String, Org>,
}

/// The service with its stores.
#[derive(Debug, Clone)]
pub struct ImaginedService {
    /// A filter of another profile is not answered.
    pub profile: Profile,
    /// The operator's tiers and the service's window.
    pub operator: Operator,
    /// False: the service was configured without a limiter.
    pub has_limiter: bool,
    /// Without a policy its store counts as unavailable, as in a service without one.
    policy: Option<Policy>,
    /// What does not answer.
    pub outages: Vec<Outage>,
    pub(crate) ledger: Ledger,
    pub(crate) meter: MeterLedger,
    pub(crate) launches: LaunchRate,
    allowances: Allowances,
}

impl ImaginedService {
    /// A service that has counted nothing yet.
    pub fn new(profile: Profile, operator: Operator) -> Self {
        Self {
            profile,
            operator,
            has_limiter: true,
            policy: None,
            outages: Vec::new(),
            ledger: Ledger::default(),
            meter: MeterLedger::default(),
            launches: LaunchRate::default(),
            allowances: Allowances::default(),
        }
    }

    /// With this policy.
    #[must_use]
    pub fn with_policy(mut self, file: PolicyFile) -> Self {
        let org = |(id, _): &(String, _)| Some((id.clone(), file.org(id)?));
        let orgs = file.orgs.iter().filter_map(org).collect();
        self.policy = Some(Policy { file, orgs });
        self
    }

    /// The policy, if there is one.
    pub fn policy(&self) -> Option<&PolicyFile> {
        self.policy.as_ref().map(|policy| &policy.file)
    }

    /// Whether this does not answer.
    pub fn is_down(&self, what: Outage) -> bool {
        self.outages.contains(&what)
    }

    /// Answers the question of `POST /v1/decide` at a time in milliseconds since 1970. `witness` gets what happened.
    pub fn decide(&mut self, request: &DecideRequest, now_ms: u64, witness: Option<&mut Vec<Decided>>) -> WireAnswer {
        if self.is_down(Outage::Decision) {
            return WireAnswer::nothing(503);
        }
        if request.profile != self.profile {
            return WireAnswer::nothing(503);
        }
        if request_fault(request).is_some() {
            return WireAnswer::nothing(400);
        }
        let mut told = witness.as_ref().map(|_| Vec::new());
        let mut allowances = std::mem::take(&mut self.allowances);
        let (verdict, bypassed) = self.evaluate(request, now_ms, &mut allowances, told.as_mut());
        self.allowances = allowances;
        let answer = DecideAnswer {
            op: request.op,
            verdict,
        };
        let wire = WireAnswer::json(&answer);
        if let (Some(witness), Some(told)) = (witness, told) {
            witness.push(Decided {
                request: request.clone(),
                verdict: answer.verdict,
                bypassed,
                told,
            });
        }
        wire
    }

    fn evaluate(
        &mut self,
        request: &DecideRequest,
        now_ms: u64,
        allowances: &mut Allowances,
        mut told: Option<&mut Vec<Told>>,
    ) -> (Verdict, Vec<Bypass>) {
        let operator = self.operator.clone();
        let month = month_at(now_ms);
        let mut tell = |what: Told| {
            if let Some(told) = told.as_deref_mut() {
                told.push(what);
            }
        };
        let mut given_back = Vec::new();
        let mut evaluation = Evaluation::new(request, &operator);
        let verdict = loop {
            let mut allow = |class, choice| allowances.admit(class, choice, now_ms);
            match evaluation.step(&mut allow) {
                Step::Policy {
                    org,
                    provider_of,
                    price_of,
                } => {
                    let view = self.look_up(&org, provider_of.as_deref(), price_of.as_deref());
                    tell(Told::Policy(view.clone()));
                    evaluation.policy(view);
                }
                Step::Launch { org, per_minute, burst } => {
                    let answer = self.launches.take(&org, per_minute, burst, now_ms);
                    tell(Told::Launch(answer.err()));
                    evaluation.launched(answer);
                }
                Step::Charge(plan) => {
                    let answer = if !self.has_limiter {
                        LimiterAnswer::NoLimiter
                    } else if self.is_down(Outage::Limiter) {
                        LimiterAnswer::Unavailable
                    } else {
                        LimiterAnswer::Charged(self.ledger.charge(now_ms, &plan, operator.slot_ttl_ms))
                    };
                    tell(Told::Charge(plan, answer.clone()));
                    evaluation.charged(answer, &mut allow);
                }
                Step::Meter(plan) => {
                    let so_far = (self.meter.runs(&month, &plan.org), self.meter.cost(&month, &plan.org));
                    let answer = (!self.is_down(Outage::Metering)).then(|| self.meter.record(&month, &plan));
                    evaluation.metered(answer, &month, &mut allow);
                    tell(Told::Meter(plan, answer, so_far));
                }
                Step::GiveBack(taken) => {
                    given_back.extend(taken.allowances.iter().copied());
                    self.give_back(taken, &month, now_ms);
                }
                Step::Done(verdict) => break verdict,
            }
        };
        given_back.into_iter().for_each(|class| allowances.give_back(class));
        (verdict, evaluation.bypassed().to_vec())
    }

    fn give_back(&mut self, taken: Taken, month: &Month, now_ms: u64) {
        if let Some(op) = taken.limiter {
            self.ledger.cancel(now_ms, op);
            self.ledger.forget(op);
        }
        if let Some(op) = taken.metering {
            self.meter.cancel(month, op);
            self.meter.forget(op);
        }
        if let Some((org, per_minute)) = taken.launch {
            self.launches.give_back(&org, per_minute);
        }
    }

    fn look_up(&self, org: &str, provider_of: Option<&str>, price_of: Option<&str>) -> PolicyView {
        let Some(policy) = self.policy.as_ref().filter(|_| !self.is_down(Outage::Policy)) else {
            return PolicyView::UNAVAILABLE;
        };
        let provider = provider_of
            .and_then(|model| policy.file.provider(model))
            .map(str::to_owned);
        PolicyView {
            org: Lookup::Known(policy.orgs.get(org).cloned()),
            provider: Lookup::Known(provider),
            price: Lookup::Known(price_of.and_then(|model| policy.file.price(model)).copied()),
            fresh_for_ms: None,
        }
    }

    /// Answers the body of `POST /v1/settle`. An operation that has ended is forgotten: nobody names it again.
    pub fn settle(&mut self, body: &[u8], now_ms: u64) -> WireAnswer {
        if self.is_down(Outage::Decision) {
            return WireAnswer::nothing(503);
        }
        let Ok(batch) = json::read::<SettleRequest>(body) else {
            return WireAnswer::nothing(400);
        };
        for op in batch.cancels {
            self.ledger.cancel(now_ms, op);
            self.forget(op);
        }
        for op in batch.releases {
            self.ledger.settle(Settled { op, tokens: None });
            self.forget(op);
        }
        let month = month_at(now_ms);
        for settlement in batch.settles {
            let (op, tokens) = (settlement.op, settlement.tokens);
            self.ledger.settle(Settled { op, tokens });
            if let Some(bill) = settlement.bill {
                self.bill(op, &bill, &month);
            }
            self.forget(op);
        }
        let ttl_ms = self.operator.slot_ttl_ms;
        let mut lost = batch.renewals;
        lost.retain(|op| !self.ledger.renew(now_ms, *op, ttl_ms));
        WireAnswer::json(&SettleAnswer { lost, put_down: false })
    }

    fn forget(&mut self, op: OperationId) {
        self.ledger.forget(op);
        self.meter.forget(op);
    }

    /// Adds what a call has cost, if its model has a price.
    fn bill(&mut self, op: OperationId, bill: &Bill, month: &Month) {
        let Some(price) = self.policy.as_ref().and_then(|policy| policy.file.price(&bill.model)) else {
            return;
        };
        let usage = Usage {
            input: Some(bill.input),
            cached_input: Some(bill.cached_input),
            output: Some(bill.output),
            is_complete: true,
        };
        if let Some(micro_dollars) = cost_micro_dollars(&usage, price) {
            let org = bill.org.clone();
            self.meter.settle(month, &Cost { op, org, micro_dollars });
        }
    }
}
