//! Carries out effects: one live configuration with its gatehouse, and the streams that began under it.
//!
//! No borrow of shared state is held across a host call, so a host that calls back in the middle of one finds everything
//! free.

use core::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use portcullis_decision::config::{LimitHeaders, Token};
use portcullis_decision::gatehouse::{Callout, Effect, Gatehouse};
use portcullis_decision::metric::Counter;
use portcullis_decision::operation::OperationId;
use portcullis_decision::reply::Reply;
use portcullis_decision::stream::{HeaderLine, Stream, Wait};
use portcullis_decision::trace::TraceContext;

use crate::header_map;
use crate::host::{self, Map};
use crate::memory::HostMemory;
use crate::metrics::Metrics;
use crate::vm;

/// One configuration of one root context, for as long as a stream that began under it lives.
#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) gatehouse: RefCell<Gatehouse>,
    metrics: Metrics,
    upstream: String,
    authority: String,
    token: Option<Token>,
    pub(crate) limit_headers: LimitHeaders,
    /// The host ticks: only then does anybody look at the streams that wait.
    pub(crate) ticks: Cell<bool>,
    /// Streams that wait for an answer, in the order of their deadlines.
    waiting: RefCell<VecDeque<u32>>,
    /// Streams that wait for the request's body, in the order of their deadlines.
    reading: RefCell<VecDeque<u32>>,
    /// Streams of which the host has not taken a reply or a resume.
    pub(crate) refused: RefCell<Vec<u32>>,
}

impl Live {
    pub(crate) fn new(gatehouse: Gatehouse) -> Self {
        let config = gatehouse.config();
        Self {
            metrics: Metrics::define(&config.rules.name),
            upstream: config.decision.upstream.clone(),
            authority: config.decision.authority.clone(),
            token: config.decision.token.clone(),
            limit_headers: config.limit_headers,
            ticks: Cell::new(false),
            waiting: RefCell::new(VecDeque::new()),
            reading: RefCell::new(VecDeque::new()),
            refused: RefCell::new(Vec::new()),
            gatehouse: RefCell::new(gatehouse),
        }
    }

    /// Streams that wait for this.
    pub(crate) const fn queue(&self, wait: Wait) -> &RefCell<VecDeque<u32>> {
        match wait {
            Wait::Body => &self.reading,
            Wait::Decision => &self.waiting,
        }
    }

    /// Carries out an effect that needs no stream; returns it if it needs one.
    pub(crate) fn carry_out(&self, effect: Effect) -> Option<Effect> {
        match effect {
            Effect::Count(counter, by) => self.metrics.count(counter, by),
            Effect::Enforcing(enforcing) => self.metrics.enforcing(enforcing),
            Effect::BreakerOpen(open) => self.metrics.breaker_open(open),
            Effect::CalloutMs(ms) => self.metrics.callout_ms(ms),
            Effect::Log(line) => host::log(line.level, &line.to_json()),
            other => return Some(other),
        }
        None
    }

    /// Carries out effects none of which needs a stream.
    pub(crate) fn carry_out_all(&self, effects: Vec<Effect>) {
        for effect in effects {
            self.carry_out(effect);
        }
    }

    /// The last that is carried out for it.
    pub(crate) fn farewell(&self, now_ms: u64) {
        let effects = self.gatehouse.try_borrow_mut().map(|mut house| house.farewell(now_ms));
        self.carry_out_all(effects.unwrap_or_default());
    }

    /// Calls the decision service.
    pub(crate) fn call(&self, callout: &Callout) -> Result<u32, host::Refused> {
        let trace = callout.trace.as_ref();
        let mut headers = vec![
            (":method", "POST"),
            (":path", callout.path),
            (":authority", &self.authority),
            (":scheme", "http"),
            ("content-type", "application/json"),
            (
                "authorization",
                self.token.as_ref().map_or("", |token| token.authorization()),
            ),
            ("traceparent", trace.map_or("", TraceContext::parent)),
            ("tracestate", trace.and_then(TraceContext::state).unwrap_or_default()),
        ];
        // What has no value is not sent.
        headers.retain(|(_, value)| !value.is_empty());
        let headers = header_map::serialize(&headers);
        let timeout_ms = u32::try_from(callout.timeout_ms).unwrap_or(u32::MAX);
        host::http_call(&self.upstream, &headers, &callout.body, timeout_ms)
    }
}

/// What the host has not taken yet. It is tried again at each tick.
#[derive(Debug)]
enum Refusal {
    Reply(Box<Reply>),
    Resume,
}

/// One stream.
#[derive(Debug)]
pub(crate) struct StreamContext {
    pub(crate) live: Rc<Live>,
    pub(crate) stream: RefCell<Stream>,
    refused_by_host: RefCell<Option<Refusal>>,
    /// It has been told that it is over.
    pub(crate) has_ended: Cell<bool>,
    /// The host is inside a callback for the request, whose return value lets it go on.
    in_request: Cell<bool>,
}

impl StreamContext {
    pub(crate) const fn new(live: Rc<Live>, stream: Stream) -> Self {
        Self {
            live,
            stream: RefCell::new(stream),
            refused_by_host: RefCell::new(None),
            has_ended: Cell::new(false),
            in_request: Cell::new(false),
        }
    }

    /// Lets the pure stream see an event; `None` if the state is in use, which only a host that calls back in the middle
    /// of a pure computation could bring about.
    pub(crate) fn event(
        &self,
        event: impl FnOnce(&mut Stream, &mut Gatehouse, &mut HostMemory) -> Vec<Effect>,
    ) -> Option<Vec<Effect>> {
        let mut stream = self.stream.try_borrow_mut().ok()?;
        let mut gatehouse = self.live.gatehouse.try_borrow_mut().ok()?;
        Some(event(&mut stream, &mut gatehouse, &mut HostMemory))
    }

    /// Whether the request is to be held.
    pub(crate) fn is_held(&self) -> bool {
        self.stream.try_borrow().map_or(true, |stream| stream.is_held())
    }

    /// When the guest stops waiting, if the stream waits for this.
    pub(crate) fn waits_for(&self, wait: Wait) -> Option<u64> {
        let (waits_for, deadline_ms) = self.stream.try_borrow().ok()?.wait()?;
        (waits_for == wait).then_some(deadline_ms)
    }

    /// How much of the request's body has been looked at, in bytes, while more of it is wanted.
    pub(crate) fn body_read(&self) -> Option<usize> {
        let read = self.stream.try_borrow().ok()?.body_read()?;
        usize::try_from(read).ok()
    }

    /// Carries out the effects of an event of the request itself: its return value will say whether it goes on.
    pub(crate) fn carry_out_in_request(&self, context: u32, effects: Vec<Effect>) {
        self.in_request.set(true);
        self.carry_out(context, effects);
        self.in_request.set(false);
    }

    /// Carries out effects. The effective context is this stream's.
    pub(crate) fn carry_out(&self, context: u32, effects: Vec<Effect>) {
        for effect in effects {
            let Some(effect) = self.live.carry_out(effect) else {
                continue;
            };
            match effect {
                Effect::RemoveRequestHeader(name) => {
                    let _ = host::remove_header(Map::Request, &name);
                }
                Effect::RemoveRequestTrailer(name) => {
                    let _ = host::remove_header(Map::RequestTrailers, &name);
                }
                Effect::SetRequestHeader(name, value) => {
                    let _ = host::remove_header(Map::Request, name);
                    let _ = host::add_header(Map::Request, name, value.as_bytes());
                }
                Effect::WithholdRequestHeader(name) => self.withhold(&name),
                Effect::PutBackRequestHeader(line) => self.put_back(&line),
                Effect::RemoveResponseHeader(name) => {
                    let _ = host::remove_header(Map::Response, name);
                }
                Effect::AddResponseHeader(name, value) => {
                    let _ = host::add_header(Map::Response, name, value.as_bytes());
                }
                Effect::Dispatch(callout) => self.dispatch(context, &callout),
                Effect::Fetch(op, callout) => self.fetch(op, &callout),
                Effect::Reply(reply) => self.reply(context, Box::new(reply)),
                Effect::Resume => self.resume(context),
                // The rest needs no stream, and was carried out above.
                _ => {}
            }
        }
    }

    fn withhold(&self, name: &str) {
        if host::remove_header(Map::Request, name).is_err() {
            let now_ms = vm::now_ms();
            let more = self.event(|stream, house, _| stream.on_not_withheld(house, name, now_ms));
            self.live.carry_out_all(more.unwrap_or_default());
        }
    }

    fn put_back(&self, line: &HeaderLine) {
        if host::add_header(Map::Request, &line.name, &line.value).is_err() {
            let now_ms = vm::now_ms();
            let more = self.event(|stream, house, _| stream.on_not_put_back(house, &line.name, now_ms));
            self.live.carry_out_all(more.unwrap_or_default());
        }
    }

    fn dispatch(&self, context: u32, callout: &Callout) {
        let more = match self.live.call(callout) {
            Ok(token) => {
                vm::expect_answer(token, vm::Asker::Stream(context));
                self.wait(context, Wait::Decision);
                self.event(|stream, _, _| stream.on_dispatched())
            }
            Err(host::Refused) => {
                let now_ms = vm::now_ms();
                self.event(|stream, gatehouse, _| stream.on_dispatch_refused(gatehouse, now_ms))
            }
        };
        self.carry_out(context, more.unwrap_or_default());
    }

    /// Nobody waits for this call: the stream may be gone before its answer comes.
    fn fetch(&self, op: OperationId, callout: &Callout) {
        match self.live.call(callout) {
            Ok(token) => {
                vm::expect_answer(token, vm::Asker::Fetch(Rc::clone(&self.live), op));
                self.live.carry_out(Effect::Count(Counter::Callouts, 1));
            }
            Err(host::Refused) => {
                if let Ok(mut house) = self.live.gatehouse.try_borrow_mut() {
                    house.fetch_refused(op);
                }
            }
        }
    }

    fn reply(&self, context: u32, reply: Box<Reply>) {
        let fields: Vec<(&str, &str)> = reply
            .headers
            .iter()
            .map(|(name, value)| (*name, value.as_str()))
            .collect();
        let headers = header_map::serialize(&fields);
        let sent = match reply.grpc {
            // The host turns body and status into grpc-message and grpc-status.
            Some((status, message)) => {
                host::send_local_response(reply.status, message.as_bytes(), &headers, i32::from(status))
            }
            None => host::send_local_response(reply.status, &reply.body, &headers, -1),
        };
        if sent.is_err() {
            self.try_again(context, Refusal::Reply(reply));
        }
    }

    fn resume(&self, context: u32) {
        if !self.in_request.get() && host::resume_request().is_err() {
            self.try_again(context, Refusal::Resume);
        }
    }

    fn try_again(&self, context: u32, refusal: Refusal) {
        if let Ok(mut slot) = self.refused_by_host.try_borrow_mut() {
            *slot = Some(refusal);
        }
        if let Ok(mut refused) = self.live.refused.try_borrow_mut()
            && self.live.ticks.get()
        {
            refused.push(context);
        }
    }

    /// Nothing is offered for a stream that is over.
    pub(crate) fn offer_nothing(&self) {
        if let Ok(mut slot) = self.refused_by_host.try_borrow_mut() {
            *slot = None;
        }
    }

    /// Has the deadline of its wait looked at.
    pub(crate) fn wait(&self, context: u32, wait: Wait) {
        if let Ok(mut queue) = self.live.queue(wait).try_borrow_mut()
            && self.live.ticks.get()
        {
            queue.push_back(context);
        }
    }

    /// Offers the host once more what it has not taken.
    pub(crate) fn offer_again(&self, context: u32) {
        let refusal = self
            .refused_by_host
            .try_borrow_mut()
            .ok()
            .and_then(|mut slot| slot.take());
        match refusal {
            Some(Refusal::Reply(reply)) => self.reply(context, reply),
            Some(Refusal::Resume) => self.resume(context),
            None => {}
        }
    }
}
