//! The wait for a request's body, from which its model and its hold are read. Nothing is asked before it has ended.
//!
//! The body stays with the host; pieces are looked at and forgotten, and what was looked at is what goes on.
//!
//! - A guarded request with a body must be one JSON object, whatever its content type says. The first fault is the answer.
//! - Without a body there is no model, and the default reservation is held. So it is for what is decided on the headers:
//!   `CONNECT`, a WebSocket's `GET`, and `Expect: 100-continue` (where the host leaves that to the upstream: the body would
//!   wait for us, and we for it). Rules that need a model refuse those.
//! - A body that doesn't arrive in time is never opened: its sender could bring that about.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::asking::Question;
use super::{Header, State, Stream};
use crate::body::{BodyFault, BodyReader, model_of_path, reconcile};
use crate::class::Dependency;
use crate::gatehouse::{Effect, Gatehouse};
use crate::hold::Hold;
use crate::lease::Host;
use crate::log_line::Level;
use crate::reply::Refusal;
use crate::rules::{Gate, GateRule, Rules};
use crate::verdict::{Denial, Unavailability};

/// A host that has not given any of a body: most likely it was not told to.
const NOT_GIVEN: &str = "the host gave nothing of the request's body: in Envoy the plugin needs \
                         allow_on_headers_stop_iteration: true; or the client sent nothing of it";
const NOT_READABLE: &str = "the host could not give a piece of the request's body";
const NOT_IN_TIME: BodyFault = BodyFault::Unreadable("did not arrive in time");

#[derive(Debug)]
pub(super) struct Reading {
    question: Question,
    reader: BodyReader,
    path_model: Option<String>,
    pub(super) deadline_ms: u64,
    read_bytes: u64,
}

/// What is to be read of a request's body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Body {
    /// There is none.
    None,
    /// It is waited for.
    Follows,
    /// It would wait for us, and we for it: the headers have to be enough.
    Withheld,
}

/// Whether a body follows that is waited for. Some hosts always say that the headers end the request, others never.
pub(super) fn body_of(headers: &[Header<'_>], ends_here: bool) -> Body {
    let values = |name: &'static [u8]| {
        let lines = headers.iter().filter(move |(n, _)| n.eq_ignore_ascii_case(name));
        lines.map(|(_, value)| *value)
    };
    let has_word = |name, word: &str| {
        values(name).any(|value| {
            let mut words = value.split(|byte| *byte == b',');
            words.any(|one| one.trim_ascii().eq_ignore_ascii_case(word.as_bytes()))
        })
    };
    let is = |method: &[u8]| values(b":method").next() == Some(method);
    let is_websocket = is(b"GET") && has_word(b"upgrade", "websocket") && has_word(b"connection", "upgrade");
    // As Envoy understands it: in any other form the body doesn't wait for an answer.
    let expects_continue = {
        let mut lines = values(b"expect");
        lines
            .next()
            .is_some_and(|value| value.trim_ascii().eq_ignore_ascii_case(b"100-continue"))
            && lines.next().is_none()
    };
    if is(b"CONNECT") || is_websocket || expects_continue {
        return Body::Withheld;
    }
    let announces =
        values(b"content-length").any(|length| length != b"0") || values(b"transfer-encoding").next().is_some();
    if !ends_here || announces {
        Body::Follows
    } else {
        Body::None
    }
}

/// Whether a gate looks at the model: then a request that has one has to name it.
fn needs_model(rules: &Rules) -> bool {
    let looks = |rule: &GateRule| matches!(rule.gate(), Gate::ModelPolicy | Gate::Capacity | Gate::CostCap);
    rules.gates.iter().any(looks)
}

impl Stream {
    /// Refuses a request whose body can't be waited for, where a gate looks at the model in it: by such a header nobody gets
    /// past that gate.
    pub(super) fn refuses_unread_body(
        &mut self,
        gatehouse: &mut Gatehouse,
        now_ms: u64,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let refuses = needs_model(&gatehouse.config().rules);
        if refuses {
            self.refuse_body(gatehouse, BodyFault::ModelRequired, now_ms, effects);
        }
        refuses
    }

    /// Waits for the body, or refuses a request whose path is ambiguous.
    pub(super) fn read_body(
        &mut self,
        gatehouse: &mut Gatehouse,
        question: Question,
        path: &[u8],
        now_ms: u64,
        effects: &mut Vec<Effect>,
    ) {
        let path = core::str::from_utf8(path).map_err(|_| BodyFault::AmbiguousPath);
        let path_model = match path.and_then(model_of_path) {
            Ok(model) => model,
            Err(fault) => return self.refuse_body(gatehouse, fault, now_ms, effects),
        };
        let limits = gatehouse.config().body;
        self.is_paused = true;
        self.state = State::Reading(alloc::boxed::Box::new(Reading {
            question,
            reader: BodyReader::new(limits.max_bytes),
            path_model,
            deadline_ms: now_ms.saturating_add(limits.timeout_ms),
            read_bytes: 0,
        }));
    }

    /// How much of the body has been looked at, in bytes, while more of it is wanted.
    pub const fn body_read(&self) -> Option<u64> {
        match &self.state {
            State::Reading(reading) => Some(reading.read_bytes),
            _ => None,
        }
    }

    /// The next piece of the request's body, or `None` if the host could not give it.
    pub fn on_body_piece(&mut self, gatehouse: &mut Gatehouse, piece: Option<&[u8]>, now_ms: u64) -> Vec<Effect> {
        let mut effects = Vec::new();
        let State::Reading(reading) = &mut self.state else {
            return effects;
        };
        match piece {
            None => self.body_withheld(gatehouse, NOT_READABLE, now_ms, &mut effects),
            Some(piece) => {
                let length = u64::try_from(piece.len()).unwrap_or(u64::MAX);
                reading.read_bytes = reading.read_bytes.saturating_add(length);
                if let Err(fault) = reading.reader.feed(piece) {
                    self.refuse_body(gatehouse, fault, now_ms, &mut effects);
                }
            }
        }
        effects
    }

    /// The request's body is over. A body, or trailers, for which no headers were ever seen: a fresh context in the middle
    /// of a stream, which is undecided.
    pub fn on_body_end(&mut self, gatehouse: &mut Gatehouse, host: &mut dyn Host, now_ms: u64) -> Vec<Effect> {
        let mut effects = Vec::new();
        match core::mem::take(&mut self.state) {
            State::New => self.unavailable(gatehouse, None, now_ms, &mut effects),
            State::Reading(reading) => self.finish_body(gatehouse, host, *reading, now_ms, &mut effects),
            other => self.state = other,
        }
        effects
    }

    fn finish_body(
        &mut self,
        gatehouse: &mut Gatehouse,
        host: &mut dyn Host,
        reading: Reading,
        now_ms: u64,
        effects: &mut Vec<Effect>,
    ) {
        let Reading {
            mut question,
            reader,
            path_model,
            read_bytes,
            ..
        } = reading;
        if read_bytes == 0 && path_model.is_none() {
            // Announced, and then empty: like a request without a body.
            return self.ask(gatehouse, host, question, now_ms, effects);
        }
        let facts = match reader.finish() {
            Ok(facts) => facts,
            Err(fault) => return self.refuse_body(gatehouse, fault, now_ms, effects),
        };
        let config = gatehouse.config();
        let needs_model = needs_model(&config.rules);
        question.hold = Hold::of(&facts, config.default_output_reservation);
        question.subject.model = match reconcile(path_model, facts.model) {
            Ok(model) => Some(model),
            Err(BodyFault::ModelRequired) if !needs_model => None,
            Err(fault) => return self.refuse_body(gatehouse, fault, now_ms, effects),
        };
        self.ask(gatehouse, host, question, now_ms, effects);
    }

    /// The guest's own clock, while it waits for the body.
    pub(super) fn body_is_late(&mut self, gatehouse: &mut Gatehouse, now_ms: u64, effects: &mut Vec<Effect>) {
        if self.body_read() == Some(0) {
            self.body_withheld(gatehouse, NOT_GIVEN, now_ms, effects);
        } else {
            self.refuse_body(gatehouse, NOT_IN_TIME, now_ms, effects);
        }
    }

    fn refuse_body(&mut self, gatehouse: &mut Gatehouse, fault: BodyFault, now_ms: u64, effects: &mut Vec<Effect>) {
        let refusal = Refusal::Denied(Denial::plain(fault.code(), None));
        self.refuse(
            gatehouse,
            &refusal,
            Level::Info,
            Some(fault.to_string()),
            now_ms,
            effects,
        );
    }

    /// Nobody could read the body, so nothing was checked. Not opened by any rule: a client that keeps its body back must
    /// not get past the gates by it.
    fn body_withheld(&mut self, gatehouse: &mut Gatehouse, why: &str, now_ms: u64, effects: &mut Vec<Effect>) {
        let refusal = Refusal::Unavailable(Unavailability {
            dependency: Dependency::Decision,
            gate: None,
        });
        self.refuse(gatehouse, &refusal, Level::Warn, Some(why.to_string()), now_ms, effects);
    }
}
