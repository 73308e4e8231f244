//! One run: it takes the steps that a host could take, remembers what the service was asked and said, and at its end
//! holds the two against each other.

mod end;

use std::collections::{BTreeMap, BTreeSet};

use portcullis_test_host::{Callout, ContextId, Personality, Phase, Stream, TestHost, headers, serialize};
use proptest::sample::Index;
use serde_json::{Value, json};

use crate::interleavings::accounts::Accounts;
use crate::interleavings::leased::Blocks;
use crate::interleavings::step::{Answer, Request, Response, Step};
use crate::lease_scene::leasing;
use crate::llm::{BODY, CALL, DIALECTS, EVENTS, JSON, metered_rules, reading};
use crate::scene::{ENVELOPE, PATIENCE_MS, configuration, rules};

/// How long a body may take to arrive, in milliseconds.
const BODY_TIMEOUT_MS: u64 = 300;

/// The configuration of a root that lets nothing through undecided.
pub(crate) fn closed_configuration() -> String {
    configuration(&rules("closed", "reject")).to_string()
}

fn open_configuration() -> String {
    configuration(&rules("open", "admit")).to_string()
}

fn shadow_configuration() -> String {
    let mut shadow = configuration(&rules("watched", "reject"));
    shadow["mode"] = json!("shadow");
    shadow.to_string()
}

/// Rules that charge tokens and record costs, with the model from the body.
fn metered_configuration() -> String {
    let mut metered = reading(&metered_rules());
    metered["model"]["body_timeout_ms"] = json!(BODY_TIMEOUT_MS);
    metered.to_string()
}

/// One run.
pub(crate) struct Run {
    pub(crate) host: TestHost,
    closed: ContextId,
    roots: Vec<(ContextId, String)>,
    /// What each stream's headers were.
    requests: BTreeMap<ContextId, Request>,
    /// Operations that were admitted, and those that were decided in any way, while their stream waited for it.
    admitted: BTreeSet<String>,
    decided: BTreeSet<String>,
    /// Operations that were given a slot while their stream waited for it.
    slots: BTreeMap<String, ContextId>,
    /// What was charged, and what has to be settled for it.
    accounts: Accounts,
    /// The closed and the open root lease, and what they were granted.
    leases: bool,
    blocks: Blocks,
    /// What is left of each response that has begun.
    responses: BTreeMap<ContextId, &'static [u8]>,
    /// What the service has heard, by key, with how often.
    heard: BTreeMap<&'static str, BTreeMap<String, u32>>,
    /// Calls that have failed in this run.
    broken: BTreeSet<&'static str>,
    /// A batch was answered after its time, when it may have been told again.
    heard_late: bool,
    /// Requests that were still held when every wait had to be over.
    hung: Vec<ContextId>,
}

impl Run {
    pub(crate) fn new(seed: u64, leases: bool) -> Self {
        let mut host = TestHost::with_seed(Personality::ENVOY, seed);
        let texts = [
            if leases {
                leasing(&rules("closed", "reject")).to_string()
            } else {
                closed_configuration()
            },
            if leases {
                leasing(&rules("open", "admit")).to_string()
            } else {
                open_configuration()
            },
            shadow_configuration(),
            metered_configuration(),
        ];
        let roots: Vec<_> = texts
            .into_iter()
            .map(|text| (host.configure(&text).expect("no faults"), text))
            .collect();
        Self {
            host,
            closed: roots[0].0,
            roots,
            requests: BTreeMap::new(),
            admitted: BTreeSet::new(),
            decided: BTreeSet::new(),
            slots: BTreeMap::new(),
            accounts: Accounts::default(),
            leases,
            blocks: Blocks::default(),
            responses: BTreeMap::new(),
            heard: BTreeMap::new(),
            broken: BTreeSet::new(),
            heard_late: false,
            hung: Vec::new(),
        }
    }

    fn pick(&self, index: &Index, wanted: impl Fn(&Stream) -> bool) -> Option<ContextId> {
        let ids: Vec<_> = self
            .host
            .streams()
            .filter(|stream| wanted(stream))
            .map(|stream| stream.id)
            .collect();
        (!ids.is_empty()).then(|| *index.get(&ids))
    }

    pub(crate) fn take(&mut self, step: &Step) {
        let is_open = |stream: &Stream| !stream.is_ended;
        match step {
            Step::Open(root) => {
                let root = root.get(&self.roots).0;
                self.host.open(root);
            }
            Step::Request(root, request) => {
                let root = root.get(&self.roots).0;
                let stream = self.host.open(root);
                self.headers(stream, *request);
            }
            Step::Headers(index, request) => {
                if let Some(stream) = self.pick(index, |stream| is_open(stream) && stream.phase == Phase::Created) {
                    self.headers(stream, *request);
                }
            }
            // A fresh context in the middle of a stream is one whose headers never came.
            Step::Body(index, bytes, ends) => {
                if let Some(stream) = self.pick(index, |stream| is_open(stream) && !stream.has_sent_all) {
                    self.body(stream, *bytes, *ends);
                }
            }
            Step::Trailers(index) => {
                if let Some(stream) = self.pick(index, |stream| is_open(stream) && !stream.has_sent_all) {
                    self.host.trailers(stream);
                }
            }
            Step::Respond(index, response) => {
                let responses = &self.responses;
                let is_due = |stream: &Stream| {
                    is_open(stream) && stream.phase == Phase::Passed && !responses.contains_key(&stream.id)
                };
                if let Some(stream) = self.pick(index, is_due) {
                    self.respond(stream, *response);
                }
            }
            Step::Piece(index, bytes, ends) => {
                let responses = &self.responses;
                let is_due = |stream: &Stream| is_open(stream) && responses.contains_key(&stream.id);
                if let Some(stream) = self.pick(index, is_due) {
                    let left = self.responses[&stream];
                    let (piece, left) = left.split_at((*bytes).min(left.len()));
                    self.responses.insert(stream, left);
                    self.host.response_body(stream, piece, *ends);
                }
            }
            Step::Answer(index, answer) => {
                let pending = self.host.pending_callouts();
                if !pending.is_empty() {
                    self.answer(index.get(&pending), *answer, true);
                }
            }
            Step::Again(index, answer) => {
                let sent = self.host.sent().to_vec();
                if !sent.is_empty() {
                    let callout = index.get(&sent);
                    let is_out = self
                        .host
                        .pending_callouts()
                        .iter()
                        .any(|other| other.token == callout.token);
                    self.answer(callout, *answer, is_out);
                }
            }
            Step::Unknown(token, answer) => {
                if self.host.sent().iter().all(|callout| callout.token != *token) {
                    self.deliver(*token, &"0".repeat(32), *answer, None);
                }
            }
            Step::Tick(ms) => self.host.tick(*ms),
            Step::Jump(ms) => self.host.jump(*ms),
            Step::Finish(index) => {
                if let Some(stream) = self.pick(index, |stream| !stream.is_deleted) {
                    self.host.finish(stream);
                }
            }
            Step::End(index, end) => {
                if let Some(stream) = self.pick(index, |stream| !stream.is_deleted) {
                    self.host.end(stream, *end);
                }
            }
            Step::Reconfigure(index, is_fine) => {
                let (root, text) = index.get(&self.roots).clone();
                let text = if *is_fine { text } else { "{}".to_owned() };
                let _ = self.host.reconfigure(root, &text);
            }
            Step::Break(call, status, always) => {
                self.broken.insert(call);
                if *always {
                    self.host.faults().always(call, *status);
                } else {
                    self.host.faults().once(call, *status);
                }
            }
            Step::Meddle(meddle) => self.host.shared_data().meddle([meddle.clone()]),
            Step::Heal => self.host.faults().heal_all(),
        }
    }

    /// The next bytes of the body, or some that make it none.
    fn body(&mut self, stream: ContextId, bytes: usize, ends: bool) {
        let sent = self.host.stream(stream).sent.len();
        let rest = BODY.as_bytes().get(sent..).unwrap_or_default();
        let piece: &[u8] = if bytes == 1 {
            b"\x00"
        } else {
            &rest[..bytes.min(rest.len())]
        };
        self.host.body(stream, piece, ends);
    }

    fn respond(&mut self, stream: ContextId, response: Response) {
        let dialect = &DIALECTS[stream as usize % DIALECTS.len()];
        let compressed = [EVENTS[0], EVENTS[1], ("content-encoding", "br")];
        let (head, body): (&[_], _) = match response {
            Response::Json => (&JSON, dialect.json),
            Response::Events => (&EVENTS, dialect.stream),
            Response::Compressed => (&compressed, dialect.stream),
            Response::Status(status) => (&[(":status", status), JSON[1]], dialect.json),
        };
        self.responses.insert(stream, body.as_bytes());
        self.accounts.answered(stream, head[0].1);
        self.host.response_headers(stream, head, false);
    }

    fn headers(&mut self, stream: ContextId, request: Request) {
        self.requests.insert(stream, request);
        let mut lines = vec![
            (":method", "POST"),
            (":path", "/v1/chat"),
            ("x-admission-owner-id", "o"),
        ];
        match request {
            Request::Limited | Request::Garbled => lines = ENVELOPE.to_vec(),
            Request::Grpc => {
                lines = ENVELOPE.to_vec();
                lines.push(("content-type", "application/grpc"));
            }
            Request::Call => lines = CALL.to_vec(),
            Request::Blocked => lines.push(("x-admission-owner-rate-limit-requests", "0")),
            Request::Unlimited => {}
            Request::Missing => lines.truncate(2),
            Request::Malformed => lines.push(("x-admission-owner-rate-limit-requests", "+5")),
            Request::Partial => lines[2] = ("x-admission-owner-rate-limit-requests", "5"),
            Request::Options => lines[0] = (":method", "OPTIONS"),
        }
        let map = headers(&lines);
        if request == Request::Garbled {
            let bytes = serialize(&map);
            self.host.garble_request_map(Some(bytes[..bytes.len() / 2].to_vec()));
        }
        self.host.send_headers(stream, map, false);
        self.host.garble_request_map(None);
    }

    fn answer(&mut self, callout: &Callout, answer: Answer, is_out: bool) {
        if callout.is_settle() {
            return self.answer_settle(callout, answer, is_out);
        }
        let op = callout.op();
        let mut lease = None;
        if let Answer::Admit(_, held_tokens) = answer
            && is_out
        {
            lease = self.blocks.grant(callout, held_tokens);
        }
        if callout.is_fetch() {
            let is_sensible = match answer {
                Answer::Admit(..) | Answer::Deny | Answer::Unavailable => true,
                Answer::Bypassed => callout.root == self.roots[1].0,
                _ => false,
            };
            if is_out && is_sensible {
                self.blocks.answered(op.clone());
            }
            return self.deliver(callout.token, &op, answer, lease);
        }
        let stream = self.host.stream(callout.context);
        let waits = is_out && !stream.is_ended && stream.phase == Phase::Paused;
        if waits {
            match answer {
                Answer::Admit(slot_ttl_ms, held_tokens) => {
                    self.admitted.insert(op.clone());
                    self.decided.insert(op.clone());
                    let is_metered = stream.root == self.roots[3].0;
                    self.accounts.admitted(callout, held_tokens, is_metered);
                    if slot_ttl_ms.is_some() {
                        self.slots.insert(op.clone(), callout.context);
                    }
                }
                Answer::Bypassed if stream.root == self.roots[1].0 => {
                    self.admitted.insert(op.clone());
                    self.decided.insert(op.clone());
                }
                Answer::Deny | Answer::Unavailable => {
                    self.decided.insert(op.clone());
                }
                _ => {}
            }
        }
        self.deliver(callout.token, &op, answer, lease);
    }

    fn answer_settle(&mut self, callout: &Callout, answer: Answer, is_out: bool) {
        let is_heard = !matches!(answer, Answer::Status(_) | Answer::Failure(_));
        if is_out && is_heard {
            self.heard_late |= self.host.now_ms() > callout.left_ms + u64::from(callout.timeout_ms);
            for key in ["releases", "renewals", "cancels"] {
                for op in callout.told(key) {
                    *self.heard.entry(key).or_default().entry(op).or_default() += 1;
                }
            }
            for (op, _) in callout.settles() {
                *self.heard.entry("settles").or_default().entry(op).or_default() += 1;
            }
        }
        match answer {
            Answer::Status(status) => self.host.answer(callout.token, status, b"{}"),
            Answer::Failure(failure) => self.host.fail(callout.token, failure),
            Answer::Cut => self.host.answer(callout.token, 200, b"{"),
            Answer::Deny => {
                let lost = json!({"lost": callout.told("renewals")}).to_string();
                self.host.answer(callout.token, 200, lost.as_bytes());
            }
            _ => self.host.answer(callout.token, 200, b"{}"),
        }
    }

    fn deliver(&mut self, token: u32, op: &str, answer: Answer, lease: Option<Value>) {
        let (status, body) = match answer {
            Answer::Admit(slot_ttl_ms, held_tokens) => {
                let mut admission = json!({"op": op, "verdict": "admit"});
                if let Some(ttl_ms) = slot_ttl_ms {
                    admission["slot_ttl_ms"] = json!(ttl_ms);
                }
                if let Some(tokens) = held_tokens {
                    admission["held_tokens"] = json!(tokens);
                }
                if let Some(lease) = lease {
                    admission["lease"] = lease;
                }
                (200, admission)
            }
            Answer::Bypassed => {
                let bypassed = json!([{"class": "limiter_unavailable", "gate": "contract"}]);
                (200, json!({"op": op, "verdict": "admit", "bypassed": bypassed}))
            }
            Answer::Deny => {
                let denial = json!({"op": op, "verdict": "deny", "code": "RATE_LIMITED", "gate": "contract"});
                (200, denial)
            }
            Answer::Unavailable => {
                let unavailable = json!({"op": op, "verdict": "unavailable", "dependency": "limiter"});
                (200, unavailable)
            }
            Answer::Foreign => (200, json!({"op": "f".repeat(32), "verdict": "admit"})),
            Answer::Status(status) => (status, json!({"op": op, "verdict": "admit"})),
            Answer::Cut => return self.host.answer(token, 200, b"{\"op\":"),
            Answer::Failure(failure) => return self.host.fail(token, failure),
        };
        self.host.answer(token, status, body.to_string().as_bytes());
    }

    /// The host recovers, time passes, streams end, and the service hears what there is to tell.
    pub(crate) fn finish(&mut self, drains: bool) {
        self.host.faults().heal_all();
        self.host.tick(BODY_TIMEOUT_MS + PATIENCE_MS);
        self.hear_everything();
        let left: Vec<_> = self
            .host
            .streams()
            .filter(|stream| !stream.is_deleted)
            .map(|stream| stream.id)
            .collect();
        let is_held = |id: &ContextId| {
            let stream = self.host.stream(*id);
            !stream.is_ended && stream.phase == Phase::Paused
        };
        self.hung = left.iter().copied().filter(is_held).collect();
        left.iter().for_each(|stream| self.host.finish(*stream));
        if drains {
            self.host.drain();
            while let Some(batch) = self.host.pending_callouts().into_iter().find(Callout::is_settle) {
                self.answer_settle(&batch, Answer::Admit(None, None), true);
            }
        } else {
            self.hear_everything();
        }
    }

    fn hear_everything(&mut self) {
        for _ in 0..8 {
            for batch in self.host.pending_callouts().into_iter().filter(Callout::is_settle) {
                self.answer_settle(&batch, Answer::Admit(None, None), true);
            }
            self.host.tick(260);
        }
    }
}
