//! The driver of a decision: does what `Evaluation` asks for, within the request's budget, and tells what came out.
//!
//! **Nothing is charged after the budget.** The limiter is not asked once it is spent; an answer that comes later is no
//! answer, and what it may have taken is given back by operation id. Who waits for the verdict is told
//! `limiter_unavailable`, by the rule of the gate that asked.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use portcullis_decision::allowance::Allowances;
use portcullis_decision::charge::ChargePlan;
use portcullis_decision::class::{Dependency, FailureClass};
use portcullis_decision::config::{Profile, ServiceConfig};
use portcullis_decision::evaluation::{Evaluation, LeaseTerms, LimiterAnswer, Operator, Step};
use portcullis_decision::log_line::{Level, LogLine};
use portcullis_decision::operation::OperationId;
use portcullis_decision::policy::PolicyView;
use portcullis_decision::rules::Choice;
use portcullis_decision::verdict::{Unavailability, Verdict};
use portcullis_decision::wire::{DecideAnswer, DecideRequest};
use tokio::time::Instant;

use crate::bills::Bills;
use crate::flights::{Flights, Seat};
use crate::gates::Sightings;
use crate::give_back::{GiveBack, GiveBacks};
use crate::launches::{Launch, Launches};
use crate::leases::LeaseDesk;
use crate::limiter::Limiter;
use crate::limiter::watched::WatchedLimiter;
use crate::logs::Journal;
use crate::metering::Meter;
use crate::metering::memory::this_month;
use crate::metering::watched::WatchedMeter;
use crate::metrics::Metrics;
use crate::policy::PolicyStore;
use crate::policy::cache::PolicyCache;
use crate::recent::Recent;
use crate::spans::{Arrival, Spans, Traced};
use crate::unmetered::UnmeteredJournal;
use crate::{after, locked, millis_since};

mod metered;
mod told;

use told::About;

/// What a budget has to leave beside one store operation, in milliseconds.
const BUDGET_SLACK_MS: u64 = 20;

/// The verdict of a decision that ended without one, or that was cancelled before it came.
const NO_ANSWER: Verdict = Verdict::Unavailable(Unavailability {
    dependency: Dependency::Limiter,
    gate: None,
});

/// A verdict, and what it left to do.
struct Reached {
    verdict: Verdict,
    /// Whether something was or will be given back.
    gave_back: bool,
    /// The model whose missing price made a gate unavailable.
    unpriced_model: Option<String>,
}

/// Decides requests.
pub struct Decider {
    /// The only profile whose filters are answered.
    pub profile: Profile,
    /// `None`: there is no limiter (development only).
    pub(crate) limiter: Option<WatchedLimiter>,
    /// `None`: no policy store is configured, and a policy is unavailable to every gate.
    pub(crate) policy: Option<PolicyCache>,
    /// `None`: metering is not configured, and unavailable to every gate.
    pub(crate) meter: Option<WatchedMeter>,
    pub(crate) unmetered: Arc<UnmeteredJournal>,
    pub(crate) bills: Arc<Bills>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) journal: Arc<Journal>,
    operator: Operator,
    op_timeout_ms: u64,
    pub(crate) give_back: GiveBacks,
    flights: Flights,
    allowances: Mutex<Allowances>,
    pub(crate) launches: Mutex<Launches>,
    pub(crate) leases: LeaseDesk,
    spans: Spans,
    pub(crate) sightings: Arc<Sightings>,
    pub(crate) recent: Recent,
    epoch: Instant,
    short_budget_is_told: AtomicBool,
}

impl Decider {
    /// A decider by this configuration, over `limiter`, which `open` made of it.
    pub fn new(
        config: &ServiceConfig,
        limiter: Option<Arc<dyn Limiter>>,
        metrics: Arc<Metrics>,
        journal: Arc<Journal>,
    ) -> Self {
        let op_timeout = Duration::from_millis(config.limiter.op_timeout_ms);
        let slot_ttl = Duration::from_secs(config.limiter.slot_ttl_s);
        let watch = |limiter| {
            WatchedLimiter::new(
                limiter,
                op_timeout,
                slot_ttl,
                Arc::clone(&metrics),
                Arc::clone(&journal),
            )
        };
        Self {
            profile: config.profile,
            limiter: limiter.map(watch),
            policy: None,
            meter: None,
            unmetered: Arc::new(UnmeteredJournal::new(Arc::clone(&metrics), Arc::clone(&journal))),
            bills: Arc::new(Bills::new(Arc::clone(&metrics), Arc::clone(&journal))),
            operator: Operator {
                tiers: config.capacity.clone(),
                window_s: config.limiter.window_s,
                slot_ttl_ms: config.limiter.slot_ttl_s.saturating_mul(1000),
            },
            op_timeout_ms: config.limiter.op_timeout_ms,
            give_back: GiveBacks::new(&metrics),
            flights: Flights::default(),
            allowances: Mutex::default(),
            launches: Mutex::default(),
            leases: LeaseDesk::default(),
            spans: Spans::default(),
            sightings: Arc::default(),
            recent: Recent::default(),
            epoch: Instant::now(),
            short_budget_is_told: AtomicBool::new(false),
            metrics,
            journal,
        }
    }

    /// With this policy store.
    #[must_use]
    pub fn with_policy(mut self, store: Option<Arc<dyn PolicyStore>>, max_staleness: Duration) -> Self {
        let op_timeout = Duration::from_millis(self.op_timeout_ms);
        let (metrics, journal) = (&self.metrics, &self.journal);
        self.policy = store.map(|store| {
            PolicyCache::new(
                store,
                max_staleness,
                op_timeout,
                Arc::clone(metrics),
                Arc::clone(journal),
            )
        });
        self
    }

    /// With these spans.
    #[must_use]
    pub fn with_spans(mut self, spans: Spans) -> Self {
        self.spans = spans;
        self
    }

    /// The policy store, if there is one.
    pub fn policy(&self) -> Option<&PolicyCache> {
        self.policy.as_ref()
    }

    /// With this metering store.
    #[must_use]
    pub fn with_meter(mut self, meter: Option<Arc<dyn Meter>>) -> Self {
        let op_timeout = Duration::from_millis(self.op_timeout_ms);
        let (metrics, journal) = (&self.metrics, &self.journal);
        self.meter = meter.map(|meter| WatchedMeter::new(meter, op_timeout, Arc::clone(metrics), Arc::clone(journal)));
        self
    }

    /// The give-backs to the limiter that wait.
    pub fn give_back(&self) -> Arc<GiveBack> {
        Arc::clone(&self.give_back.limiter)
    }

    /// All give-backs that wait.
    pub fn give_backs(&self) -> GiveBacks {
        self.give_back.clone()
    }

    /// The metering store, if there is one.
    pub fn meter(&self) -> Option<&WatchedMeter> {
        self.meter.as_ref()
    }

    /// The admissions that wait to be billed.
    pub fn unmetered(&self) -> Arc<UnmeteredJournal> {
        Arc::clone(&self.unmetered)
    }

    /// The bills that wait to be added to their months.
    pub fn bills(&self) -> Arc<Bills> {
        Arc::clone(&self.bills)
    }

    /// What decisions have said of each gate.
    pub fn sightings(&self) -> Arc<Sightings> {
        Arc::clone(&self.sightings)
    }

    /// The limiter, if there is one.
    pub fn limiter(&self) -> Option<&WatchedLimiter> {
        self.limiter.as_ref()
    }

    /// Decides a request that arrived then. A repetition of an operation under way gets its answer, and is not traced.
    pub async fn decide(&self, request: &DecideRequest, arrival: impl Into<Arrival>) -> DecideAnswer {
        let arrival = arrival.into();
        match self.flights.board(request.op) {
            Seat::Pilot(pilot) => {
                let traced = self.spans.begin(&arrival, request);
                let (answer, gave_back) = self.evaluate(request, arrival.at, &traced).await;
                traced.end(&answer.verdict);
                pilot.land(&answer, gave_back);
                answer
            }
            Seat::Passenger(passenger) => passenger.answer().await.unwrap_or(DecideAnswer {
                op: request.op,
                verdict: NO_ANSWER,
            }),
        }
    }

    /// The answer, and whether something was or will be given back.
    async fn evaluate(&self, request: &DecideRequest, arrived: Instant, traced: &Traced) -> (DecideAnswer, bool) {
        self.warn_of_a_short_budget(request);
        let bundle = self.leases.watched(request);
        // What an earlier attempt has charged may still be given back whole, by another process: no block may hang on that.
        let asked = request.lease.as_ref().filter(|_| !request.retry);
        let terms = bundle.zip(asked).map(|(bundle, ask)| self.leases.terms(bundle, ask));
        let Reached {
            verdict,
            gave_back,
            unpriced_model,
        } = self.reach(request, terms, arrived, traced).await;
        let is_ahead = request.lease.is_some_and(|ask| ask.ahead);
        if request.lease.is_some() {
            self.metrics.lease(&verdict);
        }
        if let (Some(bundle), Verdict::Admit(admission)) = (bundle, &verdict) {
            let block = admission.lease.map_or(0, |grant| grant.requests);
            let admissions = block.saturating_add(u64::from(!is_ahead));
            self.leases.handed_out(bundle, request.op, admissions);
            if block > 0 {
                self.recent.leased(block);
            }
        }
        // What is fetched ahead is no request's verdict.
        if !is_ahead {
            self.decided(request, &verdict, arrived, traced.trace_id());
            self.journal_unmetered(request, &verdict);
            if let Some(model) = unpriced_model {
                self.tell_of_no_price(request, &model, traced.trace_id());
            }
        }
        (
            DecideAnswer {
                op: request.op,
                verdict,
            },
            gave_back,
        )
    }

    /// The verdict on a request of the service's own: neither counted nor told nor traced, and no sighting of its gates.
    pub(crate) async fn untold(&self, request: &DecideRequest, arrived: Instant) -> Verdict {
        self.reach(request, None, arrived, &Traced::default()).await.verdict
    }

    /// The least budget that lets one limiter operation take its time, in milliseconds.
    pub(crate) const fn least_budget_ms(&self) -> u64 {
        self.op_timeout_ms.saturating_add(BUDGET_SLACK_MS)
    }

    /// Does what the evaluation asks for, up to the verdict.
    async fn reach(
        &self,
        request: &DecideRequest,
        terms: Option<LeaseTerms>,
        arrived: Instant,
        traced: &Traced,
    ) -> Reached {
        let deadline = after(arrived, Duration::from_millis(request.budget_ms));
        let mut allow = |class: FailureClass, choice: Choice| {
            locked(&self.allowances).admit(class, choice, millis_since(self.epoch))
        };
        let mut evaluation = Evaluation::new(request, &self.operator);
        if let Some(terms) = terms {
            evaluation = evaluation.leasing(terms);
        }
        let mut gave_back = false;
        let verdict = loop {
            match evaluation.step(&mut allow) {
                Step::Charge(plan) => {
                    let answer = self.charge(&plan, deadline, &mut gave_back, traced).await;
                    evaluation.charged(answer, &mut allow);
                }
                Step::Policy {
                    org,
                    provider_of,
                    price_of,
                } => {
                    let (provider_of, price_of) = (provider_of.as_deref(), price_of.as_deref());
                    let view = match &self.policy {
                        Some(policy) => {
                            let view = policy.view(&org, provider_of, price_of, deadline);
                            traced.asked("policy.view", Dependency::Policy, view).await
                        }
                        None => PolicyView::UNAVAILABLE,
                    };
                    evaluation.policy(view);
                }
                Step::Meter(plan) => {
                    let answer = self.meter_a_run(&plan, deadline, &mut gave_back, traced).await;
                    evaluation.metered(answer, &this_month(), &mut allow);
                }
                Step::Launch { org, per_minute, burst } => {
                    let launch = locked(&self.launches).take(request.op, &org, per_minute, burst);
                    match launch {
                        Launch::Taken => evaluation.launched(Ok(())),
                        Launch::Denied(wait_ms) => evaluation.launched(Err(wait_ms)),
                        // What the limiter has taken is given back by the same cancel.
                        Launch::Cancelled => break NO_ANSWER,
                    }
                }
                Step::GiveBack(taken) => gave_back |= self.give_back_taken(request.op, taken, deadline, traced).await,
                Step::Done(verdict) => break verdict,
            }
        };
        Reached {
            verdict,
            gave_back,
            unpriced_model: evaluation.unpriced_model().map(str::to_owned),
        }
    }

    /// Counts and tells a verdict on what arrived at `arrived`, in this trace.
    pub(crate) fn decided(&self, request: &DecideRequest, verdict: &Verdict, arrived: Instant, trace_id: Option<&str>) {
        self.metrics.decide_seconds.observe(arrived.elapsed().as_secs_f64());
        self.metrics.verdict(verdict);
        self.sightings.note(request, verdict);
        self.recent.note(request, verdict);
        self.tell(About { request, trace_id }, verdict);
    }

    /// Nobody waits for this decision any more: what it took, or will take, is given back.
    pub(crate) fn abandon(&self, op: OperationId) {
        locked(&self.launches).cancel(&[op]);
        if self.limiter.is_some() {
            self.give_back.limiter.later(op);
        }
    }

    async fn charge(
        &self,
        plan: &ChargePlan,
        deadline: Instant,
        gave_back: &mut bool,
        traced: &Traced,
    ) -> LimiterAnswer {
        let Some(limiter) = &self.limiter else {
            return LimiterAnswer::NoLimiter;
        };
        if Instant::now() >= deadline {
            self.metrics.dependency_error(Dependency::Limiter, "budget_spent");
            return LimiterAnswer::Unavailable;
        }
        let charged = limiter.charge(plan, deadline);
        match traced.asked("limiter.charge", Dependency::Limiter, charged).await {
            Ok(charged) => {
                self.recent.charged(plan, &charged);
                LimiterAnswer::Charged(charged)
            }
            Err(fault) => {
                if fault.may_have_happened() {
                    *gave_back = true;
                    self.give_back.limiter.later(plan.op);
                }
                LimiterAnswer::Unavailable
            }
        }
    }

    /// A filter that can't wait for one store operation gets outages instead of answers; said once, since its
    /// configuration doesn't change while it runs.
    fn warn_of_a_short_budget(&self, request: &DecideRequest) {
        let least_ms = self.least_budget_ms();
        // A second attempt has what the first has left, which says nothing of a configuration.
        if request.retry || request.budget_ms >= least_ms || self.short_budget_is_told.swap(true, Ordering::Relaxed) {
            return;
        }
        let message = format!(
            "a filter allows {} ms for a decision, less than the {least_ms} ms that one limiter operation may need: raise \
             its decision.timeout_ms or lower limiter.op_timeout_ms",
            request.budget_ms
        );
        let mut line = LogLine::new(Level::Warn, "short_budget", message);
        line.rules = Some(request.rules.clone());
        self.journal.write(None, line);
    }
}

#[cfg(test)]
pub(crate) mod tests;
