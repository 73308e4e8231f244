//! A host for tests: configurations, requests, answers and time, in the words of a test.
//!
//! Every step that a real host would not take can be forced with [`TestHost::callback`]. Bodies have a file of their own.

mod bodies;

use std::cell::RefMut;
use std::fmt;
use std::rc::Rc;

use crate::ContextId;
use crate::callout::{Callout, Failure};
use crate::fault::Faults;
use crate::guest::Guest;
use crate::headers::{Headers, headers};
use crate::ledger::Ledger;
use crate::personality::{Configures, End, EndOfHeaders, Personality};
use crate::shared_data::SharedData;
use crate::stream::{Phase, Stream};
use crate::violation::Violation;
use crate::world::{LogLine, Root, World};

/// A configuration that the module refused, with the lines that it wrote about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejected {
    /// The lines.
    pub lines: Vec<LogLine>,
}

/// The host.
pub struct TestHost {
    guest: Guest,
}

impl fmt::Debug for TestHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestHost")
            .field("now_ms", &self.now_ms())
            .field("violations", &self.violations())
            .field("callouts", &self.world().callouts)
            .field("streams", &self.world().streams)
            .field("logs", &self.world().logs)
            .finish_non_exhaustive()
    }
}

impl TestHost {
    /// A host with a fresh instance of the module.
    pub fn new(personality: Personality) -> Self {
        Self::with_seed(personality, 1)
    }

    /// The same, whose random bytes come from this seed.
    pub fn with_seed(personality: Personality, seed: u64) -> Self {
        Self {
            guest: Guest::new(personality, seed, Rc::default()),
        }
    }

    /// Another worker of the same host, now: its module has a memory of its own, and shares data with the first.
    pub fn beside(other: &Self, seed: u64) -> Self {
        let shared = Rc::clone(&other.world().shared);
        let mut guest = Guest::new(other.world().personality, seed, shared);
        guest.world_mut().clock = other.world().clock.clone();
        Self { guest }
    }

    fn world(&self) -> &World {
        self.guest.world()
    }

    fn world_mut(&mut self) -> &mut World {
        self.guest.world_mut()
    }

    fn next_context(&mut self) -> ContextId {
        let world = self.world_mut();
        let id = world.next_context;
        world.next_context += 1;
        id
    }

    // Configurations.

    /// Configures a new root context. Where the host does that in requests, nothing of it happens yet, and a module that
    /// refuses has its requests answered with 503.
    ///
    /// # Errors
    /// The lines of a module that refuses.
    pub fn configure(&mut self, text: &str) -> Result<ContextId, Rejected> {
        if self.world().personality.configures == Configures::InRequests {
            let id = self.next_context();
            let root = Root {
                configuration: text.as_bytes().to_vec(),
                is_due: true,
                ..Root::default()
            };
            self.world_mut().roots.insert(id, root);
            return Ok(id);
        }
        let root = self.open_root();
        self.reconfigure(root, text).map(|()| root)
    }

    /// A root context without a configuration.
    pub fn open_root(&mut self) -> ContextId {
        let is_first = self.world().roots.is_empty();
        let root = self.next_context();
        self.world_mut().roots.insert(root, Root::default());
        self.guest.callback("proxy_on_context_create", root, &[root, 0]);
        if is_first && self.world().personality.starts_vm {
            self.guest.callback("proxy_on_vm_start", root, &[root, 0]);
        }
        root
    }

    /// Configures a root context once more.
    ///
    /// # Errors
    /// The lines of a module that refuses.
    pub fn reconfigure(&mut self, root: ContextId, text: &str) -> Result<(), Rejected> {
        let before = self.world().logs.len();
        if let Some(root) = self.world_mut().roots.get_mut(&root) {
            root.configuration = text.as_bytes().to_vec();
        }
        let size = u32::try_from(text.len()).unwrap_or(u32::MAX);
        match self.guest.callback("proxy_on_configure", root, &[root, size]) {
            Some(0) | None => Err(Rejected {
                lines: self.world().logs[before..].to_vec(),
            }),
            Some(_) => Ok(()),
        }
    }

    /// The first root context that is there.
    pub fn root(&self) -> ContextId {
        let root = self.world().roots.iter().find(|(_, root)| !root.is_deleted);
        *root.expect("a configured host").0
    }

    // Requests.

    /// A request without a body, on the first root context.
    pub fn request(&mut self, lines: &[(&str, &str)]) -> ContextId {
        self.request_on(self.root(), lines)
    }

    /// A request without a body.
    pub fn request_on(&mut self, root: ContextId, lines: &[(&str, &str)]) -> ContextId {
        let stream = self.open(root);
        self.send_headers(stream, headers(lines), true);
        stream
    }

    /// What a host that configures in requests does first. Whether the module has taken the configuration.
    fn configure_in_request(&mut self, root: ContextId) -> bool {
        let Some(due) = self.world().roots.get(&root).filter(|root| root.is_due) else {
            return true;
        };
        let size = u32::try_from(due.configuration.len()).unwrap_or(u32::MAX);
        self.guest.callback("proxy_on_context_create", root, &[root, 0]);
        let is_taken = self.guest.callback("proxy_on_configure", root, &[root, size]) == Some(1);
        if let Some(root) = self.world_mut().roots.get_mut(&root) {
            root.is_due = !is_taken;
        }
        is_taken
    }

    /// A stream whose headers have not come yet.
    pub fn open(&mut self, root: ContextId) -> ContextId {
        let is_configured = self.configure_in_request(root);
        let id = self.next_context();
        self.world_mut().streams.insert(id, Stream::new(id, root));
        if !is_configured {
            self.record(id).refuse(503);
            return id;
        }
        self.guest.callback("proxy_on_context_create", id, &[id, root]);
        id
    }

    /// The request's headers come.
    pub fn send_headers(&mut self, stream: ContextId, mut map: Headers, end_of_stream: bool) {
        if self.world().personality.lower_case_names {
            map.iter_mut().for_each(|(name, _)| name.make_ascii_lowercase());
        }
        let count = u32::try_from(map.len()).unwrap_or(u32::MAX);
        let says_it_ends = match self.world().personality.end_of_headers {
            EndOfHeaders::AsItIs => end_of_stream,
            EndOfHeaders::Never => false,
            EndOfHeaders::Always => true,
        };
        let record = self.record(stream);
        record.request = map;
        record.has_sent_all |= end_of_stream;
        if record.host_status.is_some() {
            return;
        }
        record.phase = Phase::InRequestHeaders;
        self.guest.request_callback(
            "proxy_on_request_headers",
            stream,
            &[stream, count, u32::from(says_it_ends)],
        );
    }

    /// The stream ends: its response has been sent, or its client has gone.
    pub fn finish(&mut self, stream: ContextId) {
        for end in self.world().personality.end {
            self.end(stream, *end);
        }
    }

    /// The client resets the stream. To the module this looks like any other end.
    pub fn reset(&mut self, stream: ContextId) {
        self.finish(stream);
    }

    /// One callback of a stream's end.
    pub fn end(&mut self, stream: ContextId, end: End) {
        let record = self.record(stream);
        record.is_ended = true;
        let has_context = record.host_status.is_none();
        let name = match end {
            End::Log => "proxy_on_log",
            End::Done => "proxy_on_done",
            End::Delete => "proxy_on_delete",
        };
        if has_context {
            self.guest.callback(name, stream, &[stream]);
        }
        if end == End::Delete {
            self.record(stream).is_deleted = true;
        }
    }

    /// A callback with any arguments, in any order; what it returns is not applied to any stream.
    pub fn callback(&mut self, name: &'static str, context: ContextId, arguments: &[u32]) -> Option<u32> {
        self.guest.callback(name, context, arguments)
    }

    // Callouts.

    /// The calls that are out, in the order in which they left.
    pub fn pending_callouts(&self) -> Vec<Callout> {
        self.world().callouts.values().cloned().collect()
    }

    /// The only call that is out.
    pub fn callout(&self) -> Callout {
        let pending = self.pending_callouts();
        assert!(
            pending.len() == 1,
            "{} calls are out, not one: {pending:#?}",
            pending.len()
        );
        pending[0].clone()
    }

    /// Every call that ever left.
    pub fn sent(&self) -> &[Callout] {
        &self.world().sent
    }

    /// The service answers a call. A token that is not out is delivered all the same, on the first root context.
    pub fn answer(&mut self, token: u32, status: u16, body: &[u8]) {
        let status = status.to_string();
        let map = headers(&[(":status", &status), ("content-type", "application/json")]);
        self.deliver(token, map, body.to_vec());
    }

    /// A call ends without an answer of the service.
    pub fn fail(&mut self, token: u32, failure: Failure) {
        let (status, body) = if self.world().personality.makes_up_answers {
            failure.answer()
        } else {
            (None, "")
        };
        let status = status.map(|status| status.to_string());
        let map = status.map_or_else(Vec::new, |status| headers(&[(":status", &status)]));
        self.deliver(token, map, body.as_bytes().to_vec());
    }

    /// A call ends with these headers and this body.
    pub fn deliver(&mut self, token: u32, map: Headers, body: Vec<u8>) {
        let callout = self.world_mut().callouts.remove(&token);
        let (of, in_request) = callout
            .as_ref()
            .map_or((None, None), |callout| (Some(callout.context), callout.request));
        let root = callout.map_or_else(|| self.root(), |callout| callout.root);
        let count = u32::try_from(map.len()).unwrap_or(u32::MAX);
        let size = u32::try_from(body.len()).unwrap_or(u32::MAX);
        self.world_mut().answer = Some((map, body));
        self.world_mut().in_request = in_request.filter(|_| self.world().personality.calls_out_of_requests_only);
        self.guest
            .call("proxy_on_http_call_response", root, &[root, token, count, size, 0]);
        self.world_mut().in_request = None;
        self.world_mut().answer = None;
        self.guest.settle();
        if let Some(stream) = of {
            self.guest.let_go_by_itself(stream);
        }
    }

    /// The next callback traps after this many instructions, if it has not returned by then. No fault of the module.
    pub fn trap_after(&mut self, instructions: u64) {
        self.world_mut().fuel = Some(instructions);
    }

    /// Whether the module has trapped.
    pub fn has_trapped(&self) -> bool {
        self.world().is_dead
    }

    // Time.

    /// The monotonic clock, in milliseconds.
    pub fn now_ms(&self) -> u64 {
        self.world().clock.now_ms()
    }

    /// Time jumps: nothing ticks in between.
    pub fn jump(&mut self, ms: u64) {
        self.world_mut().clock.advance(ms);
    }

    /// Somebody sets the wall clock.
    pub fn step_wall_clock(&mut self, ms: i64) {
        self.world_mut().clock.step_wall(ms);
    }

    /// Time passes, with a tick each time that a root context has asked for one.
    pub fn tick(&mut self, ms: u64) {
        let end_ms = self.now_ms() + ms;
        loop {
            let next = self.world().roots.iter().filter(|(_, root)| root.tick_period_ms > 0);
            let next = next.map(|(id, root)| (root.next_tick_ms.max(self.now_ms()), *id)).min();
            let Some((at_ms, id)) = next.filter(|(at_ms, _)| *at_ms <= end_ms) else {
                break;
            };
            let now_ms = self.now_ms();
            self.world_mut().clock.advance(at_ms - now_ms);
            if let Some(root) = self.world_mut().roots.get_mut(&id) {
                root.next_tick_ms = at_ms + root.tick_period_ms;
            }
            self.guest.callback("proxy_on_tick", id, &[id]);
        }
        let now_ms = self.now_ms();
        self.world_mut().clock.advance(end_ms.saturating_sub(now_ms));
    }

    /// The end of the process: every root context is asked to finish. Returns whether all have, at once.
    pub fn drain(&mut self) -> bool {
        let roots: Vec<_> = self
            .world()
            .roots
            .iter()
            .filter(|(_, root)| !root.is_deleted)
            .map(|(id, _)| *id)
            .collect();
        for id in roots {
            if let Some(root) = self.world_mut().roots.get_mut(&id) {
                root.is_finishing = true;
            }
            if self.guest.callback("proxy_on_done", id, &[id]) == Some(1) {
                self.guest.delete_root(id);
            } else if let Some(root) = self.world_mut().roots.get_mut(&id) {
                // No tick comes any more.
                root.tick_period_ms = 0;
            }
        }
        self.is_drained()
    }

    /// Whether every root context has finished.
    pub fn is_drained(&self) -> bool {
        self.world().roots.values().all(|root| root.is_deleted)
    }

    // What there is to see.

    /// What kind of host this is.
    pub fn personality(&self) -> Personality {
        self.world().personality
    }

    /// The script of faults.
    pub fn faults(&mut self) -> &mut Faults {
        &mut self.world_mut().faults
    }

    /// What the workers of this host share.
    pub fn shared_data(&self) -> RefMut<'_, SharedData> {
        self.world().shared.borrow_mut()
    }

    /// Bytes that stand in for the request's header map, whatever its headers are; `None` ends it.
    pub fn garble_request_map(&mut self, bytes: Option<Vec<u8>>) {
        self.world_mut().raw_request_map = bytes;
    }

    /// A stream, also one that is gone.
    pub fn stream(&self, stream: ContextId) -> &Stream {
        &self.world().streams[&stream]
    }

    /// Every stream that ever was.
    pub fn streams(&self) -> impl Iterator<Item = &Stream> {
        self.world().streams.values()
    }

    fn record(&mut self, stream: ContextId) -> &mut Stream {
        self.world_mut()
            .streams
            .get_mut(&stream)
            .expect("a stream of this host")
    }

    /// Every line.
    pub fn logs(&self) -> &[LogLine] {
        &self.world().logs
    }

    /// The lines of one event.
    pub fn lines(&self, event: &str) -> Vec<serde_json::Value> {
        let lines = self.logs().iter().filter(|line| line.event() == event);
        lines.map(LogLine::json).collect()
    }

    /// A counter's value, without `portcullis_`; 0 if there is none.
    pub fn counter(&self, name: &str) -> u64 {
        self.world().metrics.counter(&format!("portcullis_{name}"))
    }

    /// A gauge's value, without `portcullis_`; `None` if it was never set.
    pub fn gauge(&self, name: &str) -> Option<u64> {
        self.world().metrics.gauge(&format!("portcullis_{name}"))
    }

    /// A histogram's samples, without `portcullis_`.
    pub fn samples(&self, name: &str) -> &[u64] {
        self.world().metrics.samples(&format!("portcullis_{name}"))
    }

    /// The counters that are not 0, with their whole names.
    pub fn counters(&self) -> Vec<(&str, u64)> {
        self.world()
            .metrics
            .counters()
            .filter(|(_, value)| *value > 0)
            .collect()
    }

    /// What the module has done that it must not do.
    pub fn violations(&self) -> &[Violation] {
        &self.world().violations
    }

    /// What the module has cost so far.
    pub fn ledger(&self) -> &Ledger {
        &self.world().ledger
    }

    /// The module's memory, in bytes. It never shrinks.
    pub fn memory_bytes(&self) -> usize {
        self.guest.memory_bytes()
    }

    /// Forgets what is over: streams whose contexts are gone, answered calls, lines. For runs of many requests.
    pub fn forget(&mut self) {
        let world = self.world_mut();
        world.streams.retain(|_, stream| !stream.is_deleted);
        let streams: Vec<_> = world.streams.keys().copied().collect();
        world.offered.retain(|id| streams.contains(id));
        world.sent.clear();
        world.logs.clear();
        world.metrics.forget_samples();
    }
}
