//! The HTTP flavour of Envoy's `ext_authz`: the filter's state machine, run here for hosts that only ask. What Envoy forwards
//! of a request goes in, a 200 or the filter's own refusal comes out.
//!
//! An answer that nobody waits for any more charges nothing: what its decision took is given back. What such an answer
//! can't keep is refused with the configuration, or stands in `portcullis_decision::ext_authz`.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::Response;
use portcullis_decision::class::{Dependency, FailureClass};
use portcullis_decision::config::{FilterConfig, LimitHeaders};
use portcullis_decision::ext_authz::{CHECK_PATH, REMOVED_HEADERS, Slots, is_grpc, told, with_bypass, without_slots};
use portcullis_decision::gatehouse::{Effect, Gatehouse};
use portcullis_decision::lease::{Host, SharedMemory};
use portcullis_decision::log_line::{Level, LogLine};
use portcullis_decision::operation::OperationId;
use portcullis_decision::reply::{Refusal, Reply};
use portcullis_decision::rules::Gate;
use portcullis_decision::stream::{CalloutAnswer, RequestHead, Stream};
use portcullis_decision::trace::TraceContext;
use portcullis_decision::verdict::{Bypass, Unavailability, Verdict};
use portcullis_decision::wire::{DecideAnswer, DecideRequest};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::decide::Decider;
use crate::logs::Journal;
use crate::metrics::Metrics;
use crate::outliving::Outliving;
use crate::spans::Arrival;
use crate::{locked, millis_since, random, unix_s};

/// How often it is looked for what time alone brings about: lines that were held back, and the gauge.
const TICK: Duration = Duration::from_millis(200);

const UNDECIDED: Unavailability = Unavailability {
    dependency: Dependency::Decision,
    gate: None,
};

/// Answers checks by one configuration.
pub struct Checks {
    gatehouse: Mutex<Gatehouse>,
    limit_headers: LimitHeaders,
    rules: String,
    decider: Arc<Decider>,
    metrics: Arc<Metrics>,
    journal: Arc<Journal>,
    epoch: Instant,
}

/// What came out of one event of a request.
#[derive(Default)]
struct Outcome {
    removed: Vec<String>,
    added: Vec<(&'static str, String)>,
    reply: Option<Reply>,
}

/// Random bits of the operating system; no memory, since nothing is leased.
struct System;

impl SharedMemory for System {}

impl Host for System {
    fn random(&mut self) -> Option<[u8; 16]> {
        random()
    }

    fn unix_s(&mut self) -> Option<u64> {
        unix_s()
    }
}

/// A decision that somebody waits for; dropped before it was answered, what it took is given back, also of the allowance.
struct Awaited<'a> {
    op: Option<OperationId>,
    unchecked: Option<Bypass>,
    checks: &'a Checks,
}

impl Drop for Awaited<'_> {
    fn drop(&mut self) {
        let Some(op) = self.op else { return };
        self.checks.decider.abandon(op);
        if let Some(bypass) = self.unchecked {
            locked(&self.checks.gatehouse).give_back_allowance(bypass.class);
        }
    }
}

impl Checks {
    /// Answers by `config`, which is a part of the configuration of this hash, over what `decider` decides.
    pub fn new(config: FilterConfig, config_hash: &str, decider: Arc<Decider>) -> Self {
        Self {
            limit_headers: config.limit_headers,
            rules: config.rules.name.clone(),
            // Not each request looks at what time brings about: a task does.
            gatehouse: Mutex::new(Gatehouse::new(config, config_hash.as_bytes()).with_ticks(true)),
            metrics: Arc::clone(&decider.metrics),
            journal: Arc::clone(&decider.journal),
            decider,
            epoch: Instant::now(),
        }
    }

    /// Says what it answers by, and from then on what time alone brings about; for ever.
    pub async fn run(self: Arc<Self>) {
        let mut started = locked(&self.gatehouse).started();
        // The service's own first line says by what it answers.
        started.retain(|effect| !matches!(effect, Effect::Log(line) if line.event == "configured"));
        self.carry_out(started, true);
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let passed = locked(&self.gatehouse).passed(millis_since(self.epoch));
            self.carry_out(passed, true);
        }
    }

    /// Answers one check that arrived then. `under_way` is held until its decision has come to its end.
    pub async fn answer(&self, parts: &Parts, arrival: Arrival, under_way: mpsc::Sender<()>) -> Response {
        let target = parts.uri.path_and_query().map_or("", |target| target.as_str());
        let path = target.strip_prefix(CHECK_PATH).unwrap_or(target);
        let mut headers: Vec<(&[u8], &[u8])> = Vec::with_capacity(parts.headers.len().saturating_add(2));
        headers.push((b":method", parts.method.as_str().as_bytes()));
        headers.push((b":path", path.as_bytes()));
        let is_ours =
            |name: &HeaderName, value: &HeaderValue| *name != header::CONTENT_TYPE || is_grpc(value.as_bytes());
        let fields = parts.headers.iter().filter(|(name, value)| is_ours(name, value));
        headers.extend(fields.map(|(name, value)| (name.as_str().as_bytes(), value.as_bytes())));
        let head = RequestHead {
            headers: Some(&headers),
            ends_here: true,
        };
        let mut stream = Stream::default();
        let (effects, asked) = {
            let mut gatehouse = locked(&self.gatehouse);
            let now_ms = millis_since(self.epoch);
            let effects = stream.on_request_headers(&mut gatehouse, head, &mut System, now_ms);
            let asked = stream.asked().cloned().map(|mut request| {
                let slots = without_slots(&mut gatehouse, &mut request, now_ms);
                (request, slots)
            });
            (effects, asked)
        };
        let mut outcome = self.carry_out(effects, true);
        if let Some((request, slots)) = asked {
            let answer = self.decide(request, slots, arrival, under_way).await;
            let body = serde_json::to_vec(&answer).ok();
            let callout = CalloutAnswer {
                status: Some(200),
                body: body.as_deref(),
            };
            let effects = {
                let mut gatehouse = locked(&self.gatehouse);
                stream.on_callout_answer(&mut gatehouse, &mut System, callout, millis_since(self.epoch))
            };
            // What a decision says is told by who decided.
            outcome.reply = self.carry_out(effects, body.is_none()).reply;
        }
        match outcome.reply {
            Some(reply) => refused(told(reply)),
            // An answer of our own that makes no sense to us: never an admission.
            None if stream.is_held() => refused(Refusal::Unavailable(UNDECIDED).reply(None, None)),
            None => {
                let effects = stream.on_response_headers(self.limit_headers, None);
                outcome.added = self.carry_out(effects, true).added;
                admitted(outcome)
            }
        }
    }

    /// The answer to what the stream asks.
    async fn decide(
        &self,
        request: DecideRequest,
        slots: Slots,
        arrival: Arrival,
        under_way: mpsc::Sender<()>,
    ) -> DecideAnswer {
        let op = request.op;
        let unchecked = match slots {
            Slots::Refused(verdict) => {
                self.tell_of_slots(&request);
                let trace_id = arrival.trace.as_ref().map(TraceContext::trace_id);
                self.decider.decided(&request, &verdict, arrival.at, trace_id);
                return DecideAnswer { op, verdict };
            }
            Slots::Unchecked(bypass) => Some(bypass),
            Slots::NotTaken => None,
        };
        let mut awaited = Awaited {
            op: Some(op),
            unchecked,
            checks: self,
        };
        let decider = Arc::clone(&self.decider);
        let decision = Outliving::new(async move {
            let answer = decider.decide(&request, arrival).await;
            drop(under_way);
            (answer, request)
        });
        let (answer, request) = decision.await;
        awaited.op = None;
        let Some(bypass) = unchecked else {
            return answer;
        };
        self.tell_of_slots(&request);
        if matches!(answer.verdict, Verdict::Admit(_)) {
            self.decider.sightings.opened(bypass.gate, bypass.class);
        }
        let verdict = with_bypass(&mut locked(&self.gatehouse), answer.verdict, bypass);
        DecideAnswer { op, verdict }
    }

    /// Says why a request was closed, or a limit of it not checked.
    fn tell_of_slots(&self, request: &DecideRequest) {
        let message = "the envelope stamps a concurrency limit, which ext_authz can't keep: use the filter";
        let mut line = LogLine::new(Level::Warn, "unchecked_limit", message);
        line.class = Some(FailureClass::LimiterUnavailable);
        line.gate = Some(Gate::Contract.name().to_owned());
        line.org.clone_from(&request.subject.org);
        line.request_id.clone_from(&request.request_id);
        line.rules = Some(self.rules.clone());
        self.journal.write(None, line);
    }

    /// Does what the state machine says; lines only if `tells`.
    fn carry_out(&self, effects: Vec<Effect>, tells: bool) -> Outcome {
        let mut outcome = Outcome::default();
        for effect in effects {
            match effect {
                Effect::Count(counter, by) => self.metrics.check(&counter.name(), by),
                Effect::Enforcing(is) => self.metrics.enforcing(&self.rules, is),
                Effect::Log(line) if tells => self.journal.write(None, line),
                Effect::RemoveRequestHeader(name) => outcome.removed.push(name),
                Effect::AddResponseHeader(name, value) => outcome.added.push((name, value)),
                Effect::Reply(reply) => outcome.reply = Some(reply),
                // The question is taken from the stream, what is fetched ahead needs leases, the breaker never opens, and
                // neither the response nor the rest of the request passes here.
                Effect::Log(_)
                | Effect::Dispatch(_)
                | Effect::Fetch(..)
                | Effect::BreakerOpen(_)
                | Effect::CalloutMs(_)
                | Effect::SetRequestHeader(..)
                | Effect::RemoveRequestTrailer(_)
                | Effect::RemoveResponseHeader(_)
                | Effect::WithholdRequestHeader(_)
                | Effect::PutBackRequestHeader(_)
                | Effect::Resume => {}
            }
        }
        outcome
    }
}

fn admitted(outcome: Outcome) -> Response {
    let mut response = Response::new(Body::empty());
    let headers = response.headers_mut();
    for (name, value) in outcome.added {
        if let Ok(value) = HeaderValue::try_from(value) {
            headers.insert(HeaderName::from_static(name), value);
        }
    }
    if !outcome.removed.is_empty()
        && let Ok(value) = HeaderValue::try_from(outcome.removed.join(","))
    {
        headers.insert(HeaderName::from_static(REMOVED_HEADERS), value);
    }
    response
}

/// A status that can't be written would be an admission, so it is an outage.
fn refused(reply: Reply) -> Response {
    let mut response = Response::new(Body::from(reply.body));
    *response.status_mut() = StatusCode::from_u16(reply.status).unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
    for (name, value) in reply.headers {
        if let Ok(value) = HeaderValue::try_from(value) {
            response.headers_mut().insert(HeaderName::from_static(name), value);
        }
    }
    response
}
