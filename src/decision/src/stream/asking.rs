//! Asking the decision service: what is asked, once more where that helps, and what an answer comes to.

use alloc::string::ToString;
use alloc::vec::Vec;

use super::answer::sensible_verdict;
use super::reading::Body;
use super::{CalloutAnswer, Deciding, NO_ID, State, Stream};
use crate::breaker::Permission;
use crate::charge::is_unchecked;
use crate::config::{FilterConfig, ModelSource};
use crate::envelope::{Envelope, Ids};
use crate::evaluation::needs_decision;
use crate::gatehouse::{Callout, Effect, Gatehouse};
use crate::hold::Hold;
use crate::lease::{Bundle, Host, Take};
use crate::limits::StampedLimits;
use crate::log_line::Level;
use crate::metric::Counter;
use crate::operation::OperationId;
use crate::reply::Refusal;
use crate::rules::Gate;
use crate::wire::{DECIDE_PATH, DecideRequest, Subject};

/// What the service keeps of a callout's time for the way there and back, in milliseconds.
const TRANSPORT_MS: u64 = 30;
/// Less than this is not worth a second try, in milliseconds.
const LEAST_RETRY_MS: u64 = 40;

/// What is to be decided about.
#[derive(Debug)]
pub(super) struct Question {
    pub(super) subject: Subject,
    pub(super) limits: StampedLimits,
    pub(super) hold: Hold,
}

/// What the host's memory has said about a request.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) bundle: Bundle,
    pub(super) hold: Hold,
    pub(super) take: Take,
}

impl Taken {
    /// Asks the host's memory; `None` if the decision has to be exact.
    fn of(
        gatehouse: &mut Gatehouse,
        host: &mut dyn Host,
        (subject, limits): (Ids<'_>, &StampedLimits),
        hold: Hold,
        now_ms: u64,
    ) -> Option<Self> {
        let bundle = gatehouse.bundle(subject, limits)?;
        let take = gatehouse.take(host, &bundle, hold.tokens(), now_ms);
        Some(Self { bundle, hold, take })
    }
}

/// Who is asked about. The envelope's own model is not trusted to be the request's, unless it is the source. Without a
/// source the model binds no tier.
fn subject_of<'a>(config: &FilterConfig, envelope: &Envelope<'a>) -> Ids<'a> {
    let mut subject = envelope.subject;
    if config.model != ModelSource::Header {
        subject.model = None;
    }
    subject
}

fn stamps_unchecked(config: &FilterConfig, limits: &StampedLimits) -> bool {
    is_unchecked(limits, config.rules.gate(Gate::Contract).is_some())
}

/// Asks the host's memory while the request still lies where the host has put it; `None` if there is more to be read or said
/// about it first.
pub(super) fn take_at_once(
    gatehouse: &mut Gatehouse,
    host: &mut dyn Host,
    envelope: &Envelope<'_>,
    now_ms: u64,
) -> Option<Taken> {
    let (config, limits) = (gatehouse.config(), &envelope.limits);
    if config.model == ModelSource::Body
        || envelope.unknown_header.is_some()
        || stamps_unchecked(config, limits)
        || !needs_decision(&config.rules.gates, limits)
    {
        return None;
    }
    let hold = Hold::without_body(config.default_output_reservation);
    let subject = subject_of(config, envelope);
    Taken::of(gatehouse, host, (subject, limits), hold, now_ms)
}

impl Stream {
    /// An envelope is here. What is to be read of the body comes with the path, which may name the model as well.
    pub(super) fn decide(
        &mut self,
        gatehouse: &mut Gatehouse,
        host: &mut dyn Host,
        envelope: Envelope<'_>,
        (body, path, taken): (Body, &[u8], Option<Taken>),
        now_ms: u64,
        effects: &mut Vec<Effect>,
    ) {
        self.caller.org = envelope.subject.org.map(ToString::to_string);
        if let Some(name) = &envelope.unknown_header {
            gatehouse.unknown_header(name, now_ms, effects);
        }
        let (config, limits) = (gatehouse.config(), envelope.limits);
        let subject = subject_of(config, &envelope);
        if stamps_unchecked(config, &limits) {
            let mut line = self.line(
                Level::Warn,
                "unchecked_limit",
                "the envelope stamps a limit that no listed gate checks",
            );
            line.rules = Some(config.rules.name.clone());
            gatehouse.log(line, now_ms, effects);
            gatehouse.unenforced(now_ms, effects);
        }
        let config = gatehouse.config();
        if !needs_decision(&config.rules.gates, &limits) {
            return self.pass(None, effects);
        }
        let question = Question {
            subject: subject.into(),
            limits,
            hold: Hold::without_body(config.default_output_reservation),
        };
        match body {
            Body::Follows => self.read_body(gatehouse, question, path, now_ms, effects),
            Body::Withheld if self.refuses_unread_body(gatehouse, now_ms, effects) => {}
            Body::Withheld | Body::None => match taken {
                Some(taken) => self.ask_after(gatehouse, host, question, Some(taken), now_ms, effects),
                None => self.ask(gatehouse, host, question, now_ms, effects),
            },
        }
    }

    /// Asks the host's memory, and then the service, unless it is known not to answer.
    pub(super) fn ask(
        &mut self,
        gatehouse: &mut Gatehouse,
        host: &mut dyn Host,
        question: Question,
        now_ms: u64,
        effects: &mut Vec<Effect>,
    ) {
        let known = ((&question.subject).into(), &question.limits);
        let taken = Taken::of(gatehouse, host, known, question.hold, now_ms);
        self.ask_after(gatehouse, host, question, taken, now_ms, effects);
    }

    /// Does what the host's memory has said, or asks the service.
    fn ask_after(
        &mut self,
        gatehouse: &mut Gatehouse,
        host: &mut dyn Host,
        question: Question,
        taken: Option<Taken>,
        now_ms: u64,
        effects: &mut Vec<Effect>,
    ) {
        let hold = question.hold;
        let (mut lease, mut asks_for) = (None, None);
        if let Some(Taken { bundle, take, .. }) = taken {
            match take {
                Take::Leased(share) => {
                    if share.fetch {
                        let request = self.request(gatehouse, question);
                        gatehouse.fetch_ahead(host, &bundle, request, now_ms, effects);
                    }
                    return self.pass_leased(gatehouse, hold, share, effects);
                }
                Take::Denied(denial) => {
                    return self.refuse_plainly(gatehouse, &Refusal::Denied(denial), now_ms, effects);
                }
                Take::Ask { fetch } => {
                    lease = gatehouse.lease_ask(host, fetch);
                    asks_for = Some(bundle);
                }
            }
        }
        let request = DecideRequest {
            op: host.random().map_or(NO_ID, OperationId::from_random),
            lease,
            ..self.request(gatehouse, question)
        };
        if request.op == NO_ID {
            return self.unavailable(gatehouse, Some((&request, hold)), now_ms, effects);
        }
        match gatehouse.breaker.ask(now_ms) {
            Permission::Refused => self.unavailable(gatehouse, Some((&request, hold)), now_ms, effects),
            Permission::Call | Permission::Probe => {
                let deadline_ms = now_ms.saturating_add(gatehouse.config().decision.timeout_ms);
                let deciding = Deciding {
                    request,
                    hold,
                    bundle: asks_for,
                    asked_ms: now_ms,
                    deadline_ms,
                    dispatched_ms: now_ms,
                    has_left: false,
                    retried: false,
                };
                self.is_paused = true;
                self.dispatch(deciding, now_ms, effects);
            }
        }
    }

    /// The question as it is asked, still without an id.
    fn request(&self, gatehouse: &Gatehouse, question: Question) -> DecideRequest {
        let config = gatehouse.config();
        DecideRequest {
            op: NO_ID,
            profile: config.profile,
            rules: config.rules.name.clone(),
            mode: config.mode,
            gates: config.rules.gates.clone(),
            budget_ms: config.decision.timeout_ms.saturating_sub(TRANSPORT_MS).max(1),
            window_s: config.window_s,
            subject: question.subject,
            limits: question.limits,
            tokens: question.hold.tokens(),
            request_id: self.caller.request_id.clone(),
            retry: false,
            lease: None,
        }
    }

    fn dispatch(&mut self, mut deciding: Deciding, now_ms: u64, effects: &mut Vec<Effect>) {
        let left_ms = deciding.deadline_ms.saturating_sub(now_ms).max(1);
        deciding.request.budget_ms = left_ms.saturating_sub(TRANSPORT_MS).max(1);
        deciding.dispatched_ms = now_ms;
        let body = serde_json::to_vec(&deciding.request).unwrap_or_default();
        effects.push(Effect::Dispatch(Callout {
            path: DECIDE_PATH,
            body,
            trace: self.caller.trace.clone(),
            timeout_ms: left_ms,
        }));
        self.state = State::Deciding(alloc::boxed::Box::new(deciding));
    }

    /// The host accepted the callout of [`Effect::Dispatch`].
    pub fn on_dispatched(&mut self) -> Vec<Effect> {
        if let State::Deciding(deciding) = &mut self.state {
            deciding.has_left = true;
        }
        alloc::vec![Effect::Count(Counter::Callouts, 1)]
    }

    /// The host refused the callout of [`Effect::Dispatch`]. That is an answer, not an exception.
    pub fn on_dispatch_refused(&mut self, gatehouse: &mut Gatehouse, now_ms: u64) -> Vec<Effect> {
        let mut effects = Vec::new();
        if let State::Deciding(deciding) = core::mem::take(&mut self.state) {
            // Otherwise a name that the host does not know looks like a service that is down.
            let upstream = &gatehouse.config().decision.upstream;
            let message = alloc::format!(
                "the host takes no call to decision.upstream \"{upstream}\": it knows none by this name, or none of its endpoints \
                 may be called"
            );
            gatehouse.log(self.line(Level::Warn, "callout_refused", message), now_ms, &mut effects);
            self.undecided(gatehouse, &deciding, now_ms, &mut effects);
        }
        effects
    }

    /// A callout of this stream has ended.
    pub fn on_callout_answer(
        &mut self,
        gatehouse: &mut Gatehouse,
        host: &mut dyn Host,
        answer: CalloutAnswer<'_>,
        now_ms: u64,
    ) -> Vec<Effect> {
        let mut effects = Vec::new();
        let State::Deciding(_) = &self.state else {
            return effects;
        };
        let State::Deciding(mut deciding) = core::mem::take(&mut self.state) else {
            return effects;
        };
        effects.push(Effect::CalloutMs(now_ms.saturating_sub(deciding.dispatched_ms)));
        if let Some(verdict) = sensible_verdict(answer, &deciding.request) {
            if gatehouse.breaker.succeeded() {
                effects.push(Effect::BreakerOpen(false));
            }
            self.carry_out(gatehouse, host, &deciding, verdict, now_ms, &mut effects);
            return effects;
        }
        // No connection, or one that was closed under the call (a restart, an idle keep-alive): once more, as the same
        // operation, so that a decision that was made and lost is not made twice.
        let connection_failed = matches!(answer.status, None | Some(503));
        let left_ms = deciding.deadline_ms.saturating_sub(now_ms);
        if connection_failed && !deciding.retried && left_ms >= LEAST_RETRY_MS {
            deciding.retried = true;
            deciding.request.retry = true;
            self.dispatch(*deciding, now_ms, &mut effects);
        } else {
            // A 401 is a token that the service does not know, and no outage looks like it.
            if let Some(status) = answer.status.filter(|status| *status != 200) {
                let message = alloc::format!("the call for a decision was answered with status {status}");
                let line = self.line(Level::Warn, "decision_status", message);
                gatehouse.log(line, now_ms, &mut effects);
            }
            self.undecided(gatehouse, &deciding, now_ms, &mut effects);
        }
        effects
    }
}
