//! The life of one request in the filter, as a state machine: events in, effects out.
//!
//! ```text
//! New ──headers──▶ Reading ──end of the body──▶ Deciding ──answer, failure or deadline──▶ Passed | Refused
//!  │                └──its first fault, or deadline─────────────────────────────────────▶ Refused
//!  ├──headers are enough──────────────────────▶ Deciding
//!  └──not guarded, no decision needed, or known at once────────────────────────────────▶ Passed | Refused
//! ```
//!
//! Every path out of `Reading` and `Deciding` gives exactly one reply or one resume, and no state leads back. What was
//! asked and not decided is cancelled by operation id; what was granted is settled when the stream ends. The host's names
//! do not appear here.

mod account;
mod answer;
mod asking;
mod ending;
mod reading;
mod withholding;

use account::Account;
pub use answer::CalloutAnswer;
pub(crate) use answer::sensible_verdict;
use asking::Taken;
pub use ending::bypass_message;
use reading::{Body, Reading};
pub use withholding::HeaderLine;

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use crate::class::{Code, FailureClass};
use crate::config::{FilterConfig, LimitHeaders, Mode, ModelSource};
use crate::envelope;
use crate::gatehouse::{Effect, Gatehouse};
use crate::hold::Hold;
use crate::lease::{Bundle, Host, Take};
use crate::log_line::Level;
use crate::metric::Counter;
use crate::operation::OperationId;
use crate::outbox::Note;
use crate::reply::{CLASS_HEADER, Refusal, limit_headers};
use crate::signature;
use crate::trace::TraceContext;
use crate::verdict::{Denial, LimitState};
use crate::wire::DecideRequest;

/// How long after the deadline the guest stops waiting for the host's own timer, in milliseconds.
const DEADLINE_SLACK_MS: u64 = 20;
/// Longest `x-request-id` that is repeated, in bytes.
const LONGEST_REQUEST_ID: usize = 256;

/// Stands for the id of a request that is never sent, since the host has no random bits.
const NO_ID: OperationId = OperationId::from_random([0; 16]);

/// One header as the host gave it.
pub type Header<'a> = (&'a [u8], &'a [u8]);

/// What replies and lines say about a request.
#[derive(Debug, Clone, Default)]
struct Caller {
    /// Its `content-type`, if it is one of gRPC's.
    grpc_content_type: Option<String>,
    org: Option<String>,
    request_id: Option<String>,
    trace: Option<TraceContext>,
}

#[derive(Debug)]
struct Deciding {
    request: DecideRequest,
    hold: Hold,
    /// What its lease would be, if its rules can be leased.
    bundle: Option<Bundle>,
    /// When it was first asked about.
    asked_ms: u64,
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
    Reading(alloc::boxed::Box<Reading>),
    Deciding(alloc::boxed::Box<Deciding>),
    Passed {
        account: Option<alloc::boxed::Box<Account>>,
    },
    Refused,
    /// If it ended while it was held, a host that still gives more of it must not let that go on.
    Ended {
        held: bool,
    },
}

/// What a held request waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// The rest of its body.
    Body,
    /// A decision.
    Decision,
}

/// A request's headers, as the host gave them.
#[derive(Debug, Clone, Copy)]
pub struct RequestHead<'a> {
    /// The headers; `None` if the host could not give them.
    pub headers: Option<&'a [Header<'a>]>,
    /// Neither a body nor trailers follow, as far as the host says.
    pub ends_here: bool,
}

/// One request.
#[derive(Debug, Default)]
pub struct Stream {
    state: State,
    caller: Caller,
    tightest: Option<LimitState>,
    is_paused: bool,
    /// The client would take a compressed response.
    takes_compressed: bool,
    /// What the request lacks while it is held.
    withheld: Vec<HeaderLine>,
}

impl Stream {
    /// Whether the request is to be held: its body or a decision is awaited, or it has been refused.
    pub const fn is_held(&self) -> bool {
        match self.state {
            State::Reading(_) | State::Deciding(_) | State::Refused => true,
            State::Ended { held } => held,
            State::New | State::Passed { .. } => false,
        }
    }

    /// What the request waits for, and when the guest stops waiting.
    pub const fn wait(&self) -> Option<(Wait, u64)> {
        match &self.state {
            State::Reading(reading) => Some((Wait::Body, reading.deadline_ms)),
            State::Deciding(deciding) => Some((Wait::Decision, deciding.deadline_ms.saturating_add(DEADLINE_SLACK_MS))),
            _ => None,
        }
    }

    /// What is asked about this request, while that is awaited.
    pub fn asked(&self) -> Option<&DecideRequest> {
        match &self.state {
            State::Deciding(deciding) => Some(&deciding.request),
            _ => None,
        }
    }

    /// The request's headers are here.
    pub fn on_request_headers(
        &mut self,
        gatehouse: &mut Gatehouse,
        head: RequestHead<'_>,
        host: &mut dyn Host,
        now_ms: u64,
    ) -> Vec<Effect> {
        let mut effects = gatehouse.passed_in_request(now_ms);
        if !matches!(self.state, State::New) {
            return effects;
        }
        let Some(headers) = head.headers else {
            self.unavailable(gatehouse, None, now_ms, &mut effects);
            return effects;
        };
        let config = gatehouse.config();
        if config.strip {
            strip(headers, &config.prefix, &mut effects);
        }
        let (method, path) = (
            first(headers, ":method").unwrap_or_default(),
            first(headers, ":path").unwrap_or_default(),
        );
        if !crate::routes::is_guarded(config.routes.as_deref(), method, path) {
            self.state = State::Passed { account: None };
            return effects;
        }
        if config.mode == Mode::Shadow {
            effects.push(Effect::Count(Counter::ShadowRequests, 1));
        }
        self.takes_compressed = first(headers, "accept-encoding").is_some();
        if let Some(signatures) = &config.signatures {
            let request = signature::Request { method, path, headers };
            if let Err(untrusted) = signatures.check(&config.prefix, request, || host.unix_s()) {
                self.note_caller(headers);
                let why = untrusted.to_string();
                self.ill_formed(gatehouse, Code::EnvelopeUntrusted, why, now_ms, &mut effects);
                self.withhold(&gatehouse.config().withhold, headers, &mut effects);
                return effects;
            }
        }
        let needs_org = config.rules.gates.iter().any(crate::rules::GateRule::needs_org);
        let is_checked = |name: &[u8]| config.signatures.is_some() && signature::is_signature(name, &config.prefix);
        let fields = headers.iter().copied().filter(|(name, _)| !is_checked(name));
        let reading = envelope::read(fields, &config.prefix, needs_org);
        let taken = match &reading {
            envelope::Reading::Present(envelope) => asking::take_at_once(gatehouse, host, envelope, now_ms),
            _ => None,
        };
        if let Some(Taken {
            hold,
            take: Take::Leased(share),
            ..
        }) = &taken
            && !share.fetch
        {
            // What most requests come to: nothing was kept of this one, and nothing is told.
            self.pass_leased(gatehouse, *hold, *share, &mut effects);
            return effects;
        }
        self.note_caller(headers);
        match reading {
            envelope::Reading::Missing => self.missing(gatehouse, now_ms, &mut effects),
            envelope::Reading::Malformed(why) => {
                self.ill_formed(gatehouse, Code::EnvelopeMalformed, why, now_ms, &mut effects);
            }
            envelope::Reading::Partial(why) => {
                self.ill_formed(gatehouse, Code::EnvelopePartial, why, now_ms, &mut effects);
            }
            envelope::Reading::Present(envelope) => {
                let body = if gatehouse.config().model == ModelSource::Body {
                    reading::body_of(headers, head.ends_here)
                } else {
                    Body::None
                };
                self.decide(gatehouse, host, envelope, (body, path, taken), now_ms, &mut effects);
            }
        }
        self.withhold(&gatehouse.config().withhold, headers, &mut effects);
        effects
    }

    /// Keeps what replies and lines say about the request.
    fn note_caller(&mut self, headers: &[Header<'_>]) {
        self.caller.grpc_content_type = first(headers, "content-type")
            .filter(|value| value.starts_with(b"application/grpc") && value.len() <= LONGEST_REQUEST_ID)
            .and_then(|value| core::str::from_utf8(value).ok())
            .map(ToString::to_string);
        self.caller.request_id = first(headers, "x-request-id").and_then(request_id);
        self.caller.trace = TraceContext::of(headers.iter().copied());
    }

    fn missing(&mut self, gatehouse: &mut Gatehouse, now_ms: u64, effects: &mut Vec<Effect>) {
        let class = FailureClass::EnvelopeMissing;
        let choice = gatehouse.config().rules.when_missing;
        if !gatehouse.allow(class, choice, now_ms) {
            let refusal = Refusal::Denied(Denial::plain(Code::EnvelopeMissing, None));
            return self.refuse_plainly(gatehouse, &refusal, now_ms, effects);
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
        self.refuse(gatehouse, &refusal, Level::Warn, Some(why), now_ms, effects);
    }

    /// Trailers of the request pass. They come too late to be an envelope for us, and must not be one for the upstream.
    pub fn on_request_trailers(config: &FilterConfig, trailers: &[Header<'_>]) -> Vec<Effect> {
        let mut effects = Vec::new();
        if config.strip {
            for (name, _) in trailers {
                if let (true, Ok(name)) = (
                    signature::is_like_prefix(name, &config.prefix),
                    core::str::from_utf8(name),
                ) {
                    effects.push(Effect::RemoveRequestTrailer(name.to_string()));
                }
            }
        }
        effects
    }

    /// The guest's own clock: ends the wait if it is over. Nothing happens before.
    pub fn on_clock(&mut self, gatehouse: &mut Gatehouse, now_ms: u64) -> Vec<Effect> {
        let mut effects = Vec::new();
        match self.wait() {
            Some((Wait::Body, deadline_ms)) if now_ms >= deadline_ms => {
                self.body_is_late(gatehouse, now_ms, &mut effects);
            }
            Some((Wait::Decision, deadline_ms)) if now_ms >= deadline_ms => {
                if let State::Deciding(deciding) = core::mem::take(&mut self.state) {
                    self.undecided(gatehouse, &deciding, now_ms, &mut effects);
                }
            }
            _ => {}
        }
        effects
    }

    /// Whether the headers of the response are to be looked at: a copy of them costs something.
    pub fn reads_response_headers(&self) -> bool {
        matches!(&self.state, State::Passed { account: Some(account) } if account.counts_usage())
    }

    /// Response headers pass: the upstream's, or those of our own reply.
    pub fn on_response_headers(
        &mut self,
        limit_headers_wanted: LimitHeaders,
        headers: Option<&[Header<'_>]>,
    ) -> Vec<Effect> {
        match &mut self.state {
            State::Refused => return Vec::new(),
            State::Passed { account: Some(account) } if account.counts_usage() => {
                account.on_response_headers(headers.unwrap_or_default());
            }
            _ => {}
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

    /// Whether the body of the response is to be looked at. It is never held.
    pub fn reads_response(&self) -> bool {
        matches!(&self.state, State::Passed { account: Some(account) } if account.reads_response())
    }

    /// The next piece of the response's body, or `None` if the host could not give it.
    pub fn on_response_body(&mut self, piece: Option<&[u8]>) {
        if let State::Passed { account: Some(account) } = &mut self.state {
            account.on_response_body(piece);
        }
    }

    /// Whether the end of the stream has to be told: only then does its time matter.
    pub const fn leaves_something(&self) -> bool {
        matches!(&self.state, State::Deciding(_) | State::Passed { account: Some(_) })
    }

    /// The stream is over, whatever the reason.
    pub fn on_end(&mut self, gatehouse: &mut Gatehouse, now_ms: u64) -> Vec<Effect> {
        let mut effects = Vec::new();
        let held = self.is_held();
        match core::mem::replace(&mut self.state, State::Ended { held }) {
            State::Deciding(deciding) if deciding.has_left => {
                gatehouse.tell(Note::Cancel(deciding.request.op), now_ms);
            }
            State::Passed { account: Some(account) } => {
                let closing = account.close();
                if closing.is_hold {
                    effects.push(Effect::Count(Counter::UsageUnknown, 1));
                }
                if let Some((lease, tokens)) = closing.returned {
                    gatehouse.give_back(lease, tokens, now_ms);
                }
                if let Some(settlement) = closing.settlement {
                    gatehouse.settle(settlement, now_ms);
                }
            }
            _ => {}
        }
        effects
    }
}

/// The value of a header's first line.
fn first<'a>(headers: &[Header<'a>], name: &str) -> Option<&'a [u8]> {
    let mut lines = headers.iter();
    let (_, value) = lines.find(|(n, _)| n.eq_ignore_ascii_case(name.as_bytes()))?;
    Some(value)
}

/// Removes the envelope, each name once, as the host gave it.
fn strip(headers: &[Header<'_>], prefix: &str, effects: &mut Vec<Effect>) {
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
