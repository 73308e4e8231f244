//! Everything that a host knows besides the module: contexts, callouts, metrics, lines, clocks, and the script of faults.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use wasmtime::{Memory, TypedFunc};

use crate::ContextId;
use crate::callout::Callout;
use crate::clock::{Clock, Random};
use crate::fault::Faults;
use crate::headers::Headers;
use crate::ledger::Ledger;
use crate::metrics::Metrics;
use crate::personality::Personality;
use crate::shared_data::SharedData;
use crate::stream::Stream;
use crate::violation::Violation;

/// A line that the module wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogLine {
    /// 2 is INFO, 3 WARN, 4 ERROR.
    pub level: u32,
    /// The line.
    pub text: String,
}

impl LogLine {
    /// Its JSON; null if it is none.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.text).unwrap_or_default()
    }

    /// Its `event`.
    pub fn event(&self) -> String {
        self.json()["event"].as_str().unwrap_or_default().to_owned()
    }
}

/// A root context.
#[derive(Debug, Clone, Default)]
pub(crate) struct Root {
    pub(crate) configuration: Vec<u8>,
    /// 0: no ticks.
    pub(crate) tick_period_ms: u64,
    pub(crate) next_tick_ms: u64,
    /// It has been asked to finish, and has not said that it has.
    pub(crate) is_finishing: bool,
    pub(crate) is_deleted: bool,
    /// Its configuration waits for a request.
    pub(crate) is_due: bool,
}

/// What Envoy does only after the module has returned.
#[derive(Debug, Clone, Copy)]
pub(crate) enum AfterCall {
    /// A local reply passes the stream's own response callbacks.
    Reply(ContextId),
    /// A paused request goes up.
    Resume(ContextId),
    /// A root context has finished.
    Done(ContextId),
}

/// The host's state.
pub(crate) struct World {
    pub(crate) personality: Personality,
    pub(crate) memory: Option<Memory>,
    pub(crate) allocate: Option<TypedFunc<u32, u32>>,
    pub(crate) clock: Clock,
    pub(crate) random: Random,
    pub(crate) faults: Faults,
    pub(crate) ledger: Ledger,
    pub(crate) metrics: Metrics,
    /// What the host's workers share.
    pub(crate) shared: Rc<RefCell<SharedData>>,
    pub(crate) logs: Vec<LogLine>,
    pub(crate) violations: Vec<Violation>,
    pub(crate) roots: BTreeMap<ContextId, Root>,
    pub(crate) streams: BTreeMap<ContextId, Stream>,
    /// Calls that are out, by token.
    pub(crate) callouts: BTreeMap<u32, Callout>,
    /// Every call that ever left.
    pub(crate) sent: Vec<Callout>,
    pub(crate) next_token: u32,
    pub(crate) next_context: ContextId,
    /// The context that calls act on.
    pub(crate) effective: ContextId,
    /// The callback that runs, or an empty string.
    pub(crate) callback: &'static str,
    /// The stream in whose request phase the host is.
    pub(crate) in_request: Option<ContextId>,
    /// The answer that `proxy_on_http_call_response` can read: headers and body.
    pub(crate) answer: Option<(Headers, Vec<u8>)>,
    /// Bytes that stand in for the serialized request headers.
    pub(crate) raw_request_map: Option<Vec<u8>>,
    pub(crate) after_call: Vec<AfterCall>,
    /// Contexts for which a reply or a resume was offered, taken or not.
    pub(crate) offered: BTreeSet<ContextId>,
    /// Contexts that a fault has called gone.
    pub(crate) disowned: BTreeSet<ContextId>,
    /// The next callback gets this much fuel, and traps when it is used up.
    pub(crate) fuel: Option<u64>,
    /// The module has trapped; nothing of it runs any more.
    pub(crate) is_dead: bool,
}

impl World {
    pub(crate) fn new(personality: Personality, seed: u64, shared: Rc<RefCell<SharedData>>) -> Self {
        Self {
            personality,
            memory: None,
            allocate: None,
            clock: Clock::new(),
            random: Random::new(seed),
            faults: Faults::default(),
            ledger: Ledger::default(),
            metrics: Metrics::default(),
            shared,
            logs: Vec::new(),
            violations: Vec::new(),
            roots: BTreeMap::new(),
            streams: BTreeMap::new(),
            callouts: BTreeMap::new(),
            sent: Vec::new(),
            next_token: 1,
            next_context: 1,
            effective: 0,
            callback: "",
            in_request: None,
            answer: None,
            raw_request_map: None,
            after_call: Vec::new(),
            offered: BTreeSet::new(),
            disowned: BTreeSet::new(),
            fuel: None,
            is_dead: false,
        }
    }

    /// The root of a context, itself if it is one.
    pub(crate) fn root_of(&self, context: ContextId) -> Option<ContextId> {
        if self.roots.get(&context).is_some_and(|root| !root.is_deleted) {
            return Some(context);
        }
        self.streams
            .get(&context)
            .filter(|stream| !stream.is_deleted)
            .map(|stream| stream.root)
    }

    /// Whether a call that was made for this stream, or in its request, is out.
    pub(crate) fn has_call_out(&self, stream: ContextId) -> bool {
        let mut callouts = self.callouts.values();
        callouts.any(|callout| callout.context == stream || callout.request == Some(stream))
    }

    /// Whether a decision about this stream is out.
    pub(crate) fn has_decision_out(&self, stream: ContextId) -> bool {
        self.callouts
            .values()
            .any(|callout| callout.context == stream && callout.is_decide())
    }

    pub(crate) fn violate(&mut self, violation: Violation) {
        self.violations.push(violation);
    }
}
