//! The life of one request in the filter, as a state machine: events in, effects out.
//!
//! ```text
//! New ──headers──▶ Deciding ──answer, failure or deadline──▶ Passed | Refused
//!  └──not guarded, no decision needed, or known at once────▶ Passed | Refused
//! ```
//!
//! Every path out of `Deciding` gives exactly one reply or one resume, and no state leads back. What was asked and not
//! decided is cancelled by operation id. The host's names do not appear here.

mod answer;
mod ending;

pub use answer::CalloutAnswer;
use answer::sensible_verdict;
pub use ending::bypass_message;

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use crate::breaker::Permission;
use crate::charge::is_unchecked;
use crate::class::{Code, FailureClass};
use crate::config::{LimitHeaders, Mode, ModelSource};
use crate::envelope::{self, Envelope, Reading};
use crate::evaluation::needs_decision;
use crate::gatehouse::{Callout, Effect, Gatehouse};
use crate::log_line::Level;
use crate::metric::Counter;
use crate::operation::OperationId;
use crate::outbox::Note;
use crate::reply::{CLASS_HEADER, Refusal, limit_headers};
use crate::rules::Gate;
use crate::verdict::{Denial, LimitState};
use crate::wire::{DECIDE_PATH, DecideRequest};

/// What the service keeps of a callout's time for the way there and back, in milliseconds.
const TRANSPORT_MS: u64 = 30;
/// Less than this is not worth a second try, in milliseconds.
const LEAST_RETRY_MS: u64 = 40;
/// How long after the deadline the guest stops waiting for the host's own timer, in milliseconds.
const DEADLINE_SLACK_MS: u64 = 20;
/// Longest `x-request-id` that is repeated, in bytes.
const LONGEST_REQUEST_ID: usize = 256;

/// Stands for the id of a request that is never sent, since the host has no random bits.
const NO_ID: OperationId = OperationId::from_random([0; 16]);

/// One header as the host gave it.
pub type Header = (Vec<u8>, Vec<u8>);

/// What replies and lines say about a request.
#[derive(Debug, Clone, Default)]
struct Caller {
    /// Its `content-type`, if it is one of gRPC's.
    grpc_content_type: Option<String>,
    org: Option<String>,
    request_id: Option<String>,
}

#[derive(Debug)]
struct Deciding {
    request: DecideRequest,
    deadline_ms: u64,
    dispatched_ms: u64,
    /// A call has left, so the service may have charged.
    has_left: bool,
    retried: bool,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    New,
    Deciding(alloc::boxed::Box<Deciding>),
    Passed {
        slot: Option<OperationId>,
    },
    Refused,
    Ended,
}

/// One request.
#[derive(Debug, Default)]
pub struct Stream {
    state: State,
    caller: Caller,
    tightest: Option<LimitState>,
    is_paused: bool,
}

impl Stream {
    /// Whether the request is to be held: a callout is out, or it has been refused.
    pub const fn is_held(&self) -> bool {
        matches!(self.state, State::Deciding(_) | State::Refused)
    }

    /// When the guest stops waiting, if it waits.
    pub const fn deadline_ms(&self) -> Option<u64> {
        match &self.state {
            State::Deciding(deciding) => Some(deciding.deadline_ms.saturating_add(DEADLINE_SLACK_MS)),
            _ => None,
        }
    }

    /// The request's headers are here. `headers` is `None` if the host could not give them; `random` gives 128 random
    /// bits, or `None` if the host has none.
    pub fn on_request_headers(
        &mut self,
        gatehouse: &mut Gatehouse,
        headers: Option<&[Header]>,
        now_ms: u64,
        random: &mut dyn FnMut() -> Option<[u8; 16]>,
    ) -> Vec<Effect> {
        let mut effects = gatehouse.passed(now_ms);
        if !matches!(self.state, State::New) {
            return effects;
        }
        let Some(headers) = headers else {
            self.unavailable(gatehouse, None, now_ms, &mut effects);
            return effects;
        };
        let config = gatehouse.config();
        if config.strip {
            strip(headers, &config.prefix, &mut effects);
        }
        let single = |name: &str| {
            headers
                .iter()
                .find(|(n, _)| n.eq_ignore_ascii_case(name.as_bytes()))
                .map(|(_, value)| value.as_slice())
        };
        let (method, path) = (
            single(":method").unwrap_or_default(),
            single(":path").unwrap_or_default(),
        );
        if !crate::routes::is_guarded(config.routes.as_deref(), method, path) {
            self.state = State::Passed { slot: None };
            return effects;
        }
        if config.mode == Mode::Shadow {
            effects.push(Effect::Count(Counter::ShadowRequests, 1));
        }
        self.caller.grpc_content_type = single("content-type")
            .filter(|value| value.starts_with(b"application/grpc") && value.len() <= LONGEST_REQUEST_ID)
            .and_then(|value| core::str::from_utf8(value).ok())
            .map(ToString::to_string);
        self.caller.request_id = single("x-request-id").and_then(request_id);
        let needs_org = config.rules.gates.iter().any(crate::rules::GateRule::needs_org);
        let fields = headers.iter().map(|(name, value)| (name.as_slice(), value.as_slice()));
        match envelope::read(fields, &config.prefix, needs_org) {
            Reading::Missing => self.missing(gatehouse, now_ms, &mut effects),
            Reading::Malformed(why) => self.ill_formed(gatehouse, Code::EnvelopeMalformed, why, now_ms, &mut effects),
            Reading::Partial(why) => self.ill_formed(gatehouse, Code::EnvelopePartial, why, now_ms, &mut effects),
            Reading::Present(envelope) => self.decide(gatehouse, *envelope, now_ms, random, &mut effects),
        }
        effects
    }

    fn missing(&mut self, gatehouse: &mut Gatehouse, now_ms: u64, effects: &mut Vec<Effect>) {
        let class = FailureClass::EnvelopeMissing;
        let choice = gatehouse.config().rules.when_missing;
        if !gatehouse.allow(class, choice, now_ms) {
            let refusal = Refusal::Denied(Denial::plain(Code::EnvelopeMissing, None));
            return self.refuse(gatehouse, &refusal, None, now_ms, effects);
        }
        effects.push(Effect::Count(Counter::Bypassed(class), 1));
        let mut line = self.line(Level::Info, "admitted_without_envelope", "no envelope: no gate was run");
        line.class = Some(class);
        line.action = Some("admit");
        gatehouse.log(line, now_ms, effects);
        self.pass(None, effects);
    }

    fn ill_formed(
        &mut self,
        gatehouse: &mut Gatehouse,
        code: Code,
        why: String,
        now_ms: u64,
        effects: &mut Vec<Effect>,
    ) {
        let refusal = Refusal::Denied(Denial::plain(code, None));
        self.refuse(gatehouse, &refusal, Some(why), now_ms, effects);
    }

    fn decide(
        &mut self,
        gatehouse: &mut Gatehouse,
        envelope: Envelope,
        now_ms: u64,
        random: &mut dyn FnMut() -> Option<[u8; 16]>,
        effects: &mut Vec<Effect>,
    ) {
        let Envelope {
            mut subject,
            limits,
            unknown_header,
        } = envelope;
        self.caller.org.clone_from(&subject.org);
        if let Some(name) = unknown_header {
            gatehouse.unknown_header(&name, now_ms, effects);
        }
        let config = gatehouse.config();
        if config.model == ModelSource::None {
            // Without a source the model binds no tier; the envelope's own is not trusted to be the request's.
            subject.model = None;
        }
        let contract_is_listed = config.rules.gate(Gate::Contract).is_some();
        if is_unchecked(&limits, contract_is_listed) {
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
        let op = random().map(OperationId::from_random);
        let request = DecideRequest {
            op: op.unwrap_or(NO_ID),
            profile: config.profile,
            rules: config.rules.name.clone(),
            mode: config.mode,
            gates: config.rules.gates.clone(),
            budget_ms: config.decision.timeout_ms.saturating_sub(TRANSPORT_MS).max(1),
            window_s: config.window_s,
            subject,
            limits,
            tokens: config.default_output_reservation,
            request_id: self.caller.request_id.clone(),
            retry: false,
        };
        if !needs_decision(&request) {
            return self.pass(None, effects);
        }
        if op.is_none() {
            return self.unavailable(gatehouse, Some(&request), now_ms, effects);
        }
        match gatehouse.breaker.ask(now_ms) {
            Permission::Refused => self.unavailable(gatehouse, Some(&request), now_ms, effects),
            Permission::Call | Permission::Probe => {
                let deadline_ms = now_ms.saturating_add(gatehouse.config().decision.timeout_ms);
                let deciding = Deciding {
                    request,
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

    fn dispatch(&mut self, mut deciding: Deciding, now_ms: u64, effects: &mut Vec<Effect>) {
        let left_ms = deciding.deadline_ms.saturating_sub(now_ms).max(1);
        deciding.request.budget_ms = left_ms.saturating_sub(TRANSPORT_MS).max(1);
        deciding.dispatched_ms = now_ms;
        let body = serde_json::to_vec(&deciding.request).unwrap_or_default();
        effects.push(Effect::Dispatch(Callout {
            path: DECIDE_PATH,
            body,
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
            self.undecided(gatehouse, &deciding, now_ms, &mut effects);
        }
        effects
    }

    /// A callout of this stream has ended.
    pub fn on_callout_answer(
        &mut self,
        gatehouse: &mut Gatehouse,
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
            self.carry_out(gatehouse, &deciding.request, verdict, now_ms, &mut effects);
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
            self.undecided(gatehouse, &deciding, now_ms, &mut effects);
        }
        effects
    }

    /// The guest's own clock: ends the wait if it is over. Nothing happens before.
    pub fn on_clock(&mut self, gatehouse: &mut Gatehouse, now_ms: u64) -> Vec<Effect> {
        let mut effects = Vec::new();
        if self.deadline_ms().is_some_and(|deadline_ms| now_ms >= deadline_ms)
            && let State::Deciding(deciding) = core::mem::take(&mut self.state)
        {
            self.undecided(gatehouse, &deciding, now_ms, &mut effects);
        }
        effects
    }

    /// The request's body or trailers come and no headers were ever seen: a fresh context in the middle of a stream.
    pub fn on_unannounced_body(&mut self, gatehouse: &mut Gatehouse, now_ms: u64) -> Vec<Effect> {
        let mut effects = Vec::new();
        if matches!(self.state, State::New) {
            self.unavailable(gatehouse, None, now_ms, &mut effects);
        }
        effects
    }

    /// Response headers pass: the upstream's, or those of our own reply.
    pub fn on_response_headers(&mut self, limit_headers_wanted: LimitHeaders) -> Vec<Effect> {
        if matches!(self.state, State::Refused) {
            return Vec::new();
        }
        let mut effects = alloc::vec![Effect::RemoveResponseHeader(CLASS_HEADER)];
        if limit_headers_wanted == LimitHeaders::Always
            && let Some(tightest) = &self.tightest
        {
            let headers = limit_headers(tightest);
            effects.extend(
                headers
                    .into_iter()
                    .map(|(name, value)| Effect::AddResponseHeader(name, value)),
            );
        }
        effects
    }

    /// The stream is over, whatever the reason.
    pub fn on_end(&mut self, gatehouse: &mut Gatehouse, now_ms: u64) {
        match core::mem::replace(&mut self.state, State::Ended) {
            State::Deciding(deciding) if deciding.has_left => {
                gatehouse.tell(Note::Cancel(deciding.request.op), now_ms);
            }
            State::Passed { slot: Some(op) } => gatehouse.release_slot(op, now_ms),
            _ => {}
        }
    }
}

/// Removes the envelope, each name once, as the host gave it.
fn strip(headers: &[Header], prefix: &str, effects: &mut Vec<Effect>) {
    for (at, (name, _)) in headers.iter().enumerate() {
        if !envelope::has_prefix(name, prefix) || headers.iter().take(at).any(|(earlier, _)| earlier == name) {
            continue;
        }
        if let Ok(name) = core::str::from_utf8(name) {
            effects.push(Effect::RemoveRequestHeader(name.to_string()));
        }
    }
}

/// A request id that may be repeated in replies and lines.
fn request_id(value: &[u8]) -> Option<String> {
    let text = core::str::from_utf8(value).ok()?;
    let fine = (1..=LONGEST_REQUEST_ID).contains(&text.len()) && !text.chars().any(char::is_control);
    fine.then(|| text.to_string())
}

#[cfg(test)]
mod tests;
