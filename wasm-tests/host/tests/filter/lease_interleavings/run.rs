//! One run of two workers: what the service was asked, granted and heard, and what was handed out for it.

use std::collections::{BTreeMap, BTreeSet};

use portcullis_test_host::{Callout, ContextId, Failure, Personality, TestHost, Violation};
use proptest::sample::Index;
use serde_json::{Value, json};

use crate::lease_interleavings::{Answer, Bundle, Step};
use crate::lease_scene::{MAX_AGE_MS, leasing};
use crate::scene::{ENVELOPE, PATIENCE_MS, envelope_and, rules};

/// What a request with a token limit holds.
const HOLD: u64 = 1_024;

/// What was granted to one operation.
#[derive(Debug)]
struct Block {
    requests: u64,
    tokens: Option<u64>,
}

/// One worker, also one that is gone.
struct Worker {
    host: TestHost,
    /// What each stream asks for.
    streams: BTreeMap<ContextId, Bundle>,
    changed: bool,
}

impl Worker {
    fn new(mut host: TestHost) -> Self {
        host.configure(&text(&host, false)).expect("no faults");
        Self {
            host,
            streams: BTreeMap::new(),
            changed: false,
        }
    }
}

fn text(host: &TestHost, changed: bool) -> String {
    let mut leasing = leasing(&rules("leased", "reject"));
    // So few that bundles meet.
    leasing["decision"]["upstream"] = json!(host.personality().decision_upstream());
    leasing["leases"]["slots"] = json!(if changed { 3 } else { 2 });
    leasing.to_string()
}

pub(crate) struct Run {
    workers: Vec<Worker>,
    gone: Vec<Worker>,
    seed: u64,
    blocks: BTreeMap<String, Block>,
    /// Operations of requests that were admitted by their own decision.
    admitted: BTreeSet<String>,
    /// When a bundle was denied last.
    denied_ms: BTreeMap<&'static str, u64>,
    /// What does not fit, as it was seen.
    wrong: Vec<String>,
}

const fn name(bundle: Bundle) -> &'static str {
    match bundle {
        Bundle::First => "first",
        Bundle::Second => "second",
        Bundle::Tokens => "tokens",
        Bundle::Changed => "changed",
    }
}

impl Run {
    pub(crate) fn new(personality: Personality, seed: u32) -> Self {
        let seed = u64::from(seed) << 16;
        let first = TestHost::with_seed(personality, seed);
        let second = TestHost::beside(&first, seed + 1);
        Self {
            workers: [first, second].into_iter().map(Worker::new).collect(),
            gone: Vec::new(),
            seed: seed + 2,
            blocks: BTreeMap::new(),
            admitted: BTreeSet::new(),
            denied_ms: BTreeMap::new(),
            wrong: Vec::new(),
        }
    }

    fn all(&self) -> impl Iterator<Item = &Worker> {
        self.workers.iter().chain(&self.gone)
    }

    pub(crate) fn violations(&self) -> Vec<&Violation> {
        self.all().flat_map(|worker| worker.host.violations()).collect()
    }

    pub(crate) fn take(&mut self, step: &Step) {
        match step {
            Step::Request(worker, bundle) => self.request(*worker, *bundle),
            Step::Answer(index, answer) => {
                let calls = self.calls();
                if !calls.is_empty() {
                    let (worker, callout) = index.get(&calls);
                    self.answer(*worker, callout, *answer);
                }
            }
            Step::Finish(index) => {
                let streams: Vec<_> = (0..self.workers.len()).flat_map(|at| self.open(at)).collect();
                if !streams.is_empty() {
                    let (worker, stream) = *index.get(&streams);
                    self.workers[worker].host.finish(stream);
                }
            }
            Step::Tick(ms) => self.tick(*ms),
            Step::Jump(ms) => self.workers.iter_mut().for_each(|worker| worker.host.jump(*ms)),
            Step::Meddle(meddle) => self.workers[0].host.shared_data().meddle([meddle.clone()]),
            Step::Evict(index) => {
                let mut memory = self.workers[0].host.shared_data();
                let keys = memory.keys();
                if !keys.is_empty() {
                    memory.evict(&keys[index.index(keys.len())]);
                }
            }
            Step::Put(index, bytes, cut) => self.put(index, bytes, cut.as_ref()),
            Step::Break(worker, call, status, always) => {
                let faults = self.workers[*worker].host.faults();
                if *always {
                    faults.always(call, *status);
                } else {
                    faults.once(call, *status);
                }
            }
            Step::Heal => self.heal(),
            Step::Replace(worker, drains) => self.replace(*worker, *drains),
            Step::Reconfigure(worker, changes) => {
                let worker = &mut self.workers[*worker];
                worker.changed ^= *changes;
                let root = worker.host.root();
                let _ = worker.host.reconfigure(root, &text(&worker.host, worker.changed));
            }
        }
    }

    fn put(&self, index: &Index, bytes: &[u8], cut: Option<&Index>) {
        let mut memory = self.workers[0].host.shared_data();
        let keys = memory.keys();
        if keys.is_empty() {
            return;
        }
        let key = &keys[index.index(keys.len())];
        let present = memory.value(key).unwrap_or_default().to_vec();
        // A part of what is there is the hardest to tell from the whole.
        let part = cut.map(|cut| &present[..cut.index(present.len() + 1).min(present.len().saturating_sub(1))]);
        memory.put(key, part.unwrap_or(bytes));
    }

    fn request(&mut self, at: usize, bundle: Bundle) {
        let mut lines = match bundle {
            Bundle::First => ENVELOPE.to_vec(),
            Bundle::Second => envelope_and(&[("x-admission-lane", "second")]),
            Bundle::Tokens => envelope_and(&[("x-admission-owner-rate-limit-tokens", "5000")]),
            Bundle::Changed => ENVELOPE.to_vec(),
        };
        if bundle == Bundle::Changed {
            lines[5].1 = "29";
        }
        let worker = &mut self.workers[at];
        let stream = worker.host.request(&lines);
        worker.streams.insert(stream, bundle);
        let is_asked = worker
            .host
            .sent()
            .iter()
            .any(|callout| callout.context == stream && callout.is_decide());
        let now_ms = worker.host.now_ms();
        let seen = worker.host.stream(stream);
        let is_denied = seen.replies.last().is_some_and(|reply| reply.status == 429);
        if is_denied && !is_asked {
            let since_ms = self.denied_ms.get(name(bundle)).map(|at_ms| now_ms - at_ms);
            if since_ms.is_none_or(|ms| ms >= MAX_AGE_MS) {
                self.wrong.push(format!(
                    "{bundle:?} is denied from memory, {since_ms:?} ms after it was denied"
                ));
            }
        }
    }

    /// Calls that are out, with their worker.
    fn calls(&self) -> Vec<(usize, Callout)> {
        let of = |(at, worker): (usize, &Worker)| {
            let calls = worker.host.pending_callouts();
            calls.into_iter().map(move |callout| (at, callout)).collect::<Vec<_>>()
        };
        self.workers.iter().enumerate().flat_map(of).collect()
    }

    fn open(&self, at: usize) -> Vec<(usize, ContextId)> {
        let streams = self.workers[at].host.streams();
        streams
            .filter(|stream| !stream.is_ended)
            .map(|stream| (at, stream.id))
            .collect()
    }

    fn answer(&mut self, at: usize, callout: &Callout, answer: Answer) {
        let worker = &mut self.workers[at];
        let (token, op) = (callout.token, callout.op());
        if callout.is_settle() {
            return match answer {
                Answer::Lost => worker.host.fail(token, Failure::TimedOut),
                _ => worker.host.answer(token, 200, b"{}"),
            };
        }
        let asked = callout.json();
        let body = match answer {
            Answer::Lost => return worker.host.fail(token, Failure::TimedOut),
            Answer::Garbage => return worker.host.answer(token, 200, br#"{"op":"#),
            Answer::Unavailable => json!({"op": op, "verdict": "unavailable", "dependency": "limiter"}),
            Answer::Deny(reset_ms) => {
                if let Some(bundle) = bundle_of(&asked) {
                    self.denied_ms.insert(bundle, worker.host.now_ms());
                }
                let limit = json!({"scope": "owner", "resource": "requests", "limit": 30, "remaining": 0,
                                   "reset_ms": reset_ms, "window_s": 60});
                json!({"op": op, "verdict": "deny", "code": "RATE_LIMITED", "gate": "contract", "limit": limit})
            }
            Answer::Grant(most, ends_ms) => {
                let mut admission = json!({"op": op, "verdict": "admit"});
                let has_tokens = !asked["limits"]["owner"]["tokens"].is_null();
                if has_tokens {
                    admission["held_tokens"] = asked["tokens"].clone();
                }
                if !asked["lease"].is_null() {
                    // Not a multiple of the hold: the last one leaves some.
                    let tokens = has_tokens.then_some(most * HOLD + 7);
                    let mut lease = json!({"requests": most, "ends_in_ms": ends_ms});
                    if let Some(tokens) = tokens {
                        lease["tokens"] = json!(tokens);
                        lease["largest_hold"] = json!(5_000);
                    }
                    admission["lease"] = lease;
                    let block = Block { requests: most, tokens };
                    self.blocks.insert(op.clone(), block);
                }
                if !callout.is_ahead {
                    self.admitted.insert(op);
                }
                admission
            }
        };
        worker.host.answer(token, 200, body.to_string().as_bytes());
    }

    fn tick(&mut self, ms: u64) {
        self.workers.iter_mut().for_each(|worker| worker.host.tick(ms));
    }

    fn heal(&mut self) {
        self.workers
            .iter_mut()
            .for_each(|worker| worker.host.faults().heal_all());
    }

    /// A worker ends, and another one takes its place.
    fn replace(&mut self, at: usize, drains: bool) {
        let fresh = TestHost::beside(&self.workers[at].host, self.seed);
        self.seed += 1;
        if drains {
            self.workers[at].host.faults().heal_all();
            for (_, stream) in self.open(at) {
                self.workers[at].host.finish(stream);
            }
            self.workers[at].host.drain();
            while let Some(batch) = self.workers[at]
                .host
                .pending_callouts()
                .into_iter()
                .find(Callout::is_settle)
            {
                self.workers[at].host.answer(batch.token, 200, b"{}");
            }
        }
        let old = std::mem::replace(&mut self.workers[at], Worker::new(fresh));
        self.gone.push(old);
    }

    /// The host recovers, every block ends, and the service hears what there is to tell.
    pub(crate) fn finish(&mut self) {
        self.heal();
        self.workers[0].host.shared_data().leave_alone();
        self.tick(PATIENCE_MS);
        for at in 0..self.workers.len() {
            for (_, stream) in self.open(at) {
                self.workers[at].host.finish(stream);
            }
        }
        self.tick(2 * MAX_AGE_MS);
        for _ in 0..12 {
            // Where no tick comes, a request is the clock; its owner has no limits in common with the others.
            for worker in &mut self.workers {
                let stream = worker
                    .host
                    .request(&[ENVELOPE[0], ENVELOPE[1], ("x-admission-owner-id", "nobody")]);
                worker.host.finish(stream);
            }
            for (at, batch) in self.calls() {
                if batch.is_settle() {
                    self.answer(at, &batch, Answer::Unavailable);
                }
            }
            self.tick(400);
        }
    }

    /// Requests that were admitted without a decision of their own.
    pub(crate) fn hits(&self) -> u64 {
        let of = |worker: &Worker| {
            let mut by_stream: BTreeMap<ContextId, Vec<String>> = BTreeMap::new();
            for callout in worker.host.sent().iter().filter(|callout| callout.is_decide()) {
                by_stream.entry(callout.context).or_default().push(callout.op());
            }
            let is_hit = |id: &&ContextId| {
                let decided = by_stream
                    .get(id)
                    .is_some_and(|ops| ops.iter().any(|op| self.admitted.contains(op)));
                // What the host lets go by itself was not handed out.
                let stream = worker.host.stream(**id);
                stream.has_passed() && !stream.was_let_go && !decided
            };
            worker.streams.keys().filter(is_hit).count() as u64
        };
        self.all().map(of).sum()
    }

    /// What was told, of each key, over all workers; a return once for each id.
    fn told(&self) -> (BTreeSet<String>, Vec<Value>) {
        let (mut cancels, mut returns) = (BTreeSet::new(), BTreeMap::new());
        for batch in self
            .all()
            .flat_map(|worker| worker.host.sent())
            .filter(|callout| callout.is_settle())
        {
            cancels.extend(batch.told("cancels"));
            for told in batch.returns() {
                if let Some(before) = returns.insert(told["id"].to_string(), told.clone()) {
                    assert_eq!(before, told, "one id says two things");
                }
            }
        }
        (cancels, returns.into_values().collect())
    }

    /// What does not fit, whatever has happened.
    pub(crate) fn audit(&self) -> Vec<String> {
        let mut wrong = self.wrong.clone();
        let (cancels, returns) = self.told();
        let mut back: BTreeMap<&str, (u64, u64, i64)> = BTreeMap::new();
        for told in &returns {
            let lease = told["lease"].as_str().unwrap_or_default();
            let sum = back.entry(lease).or_default();
            let requests = told["requests"].as_u64().unwrap_or_default();
            sum.0 += u64::from(requests > 0);
            sum.1 += requests;
            sum.2 += told["tokens"].as_i64().unwrap_or_default();
        }
        for (lease, (times, requests, tokens)) in &back {
            let Some(block) = self.blocks.get(*lease) else {
                wrong.push(format!("{lease} was not granted, and {requests} go back"));
                continue;
            };
            if *times > 1 {
                wrong.push(format!("{lease} goes back {times} times"));
            }
            // No stream here has a response, so each keeps its hold.
            let held = HOLD * block.requests.saturating_sub(*requests);
            let left = block.tokens.unwrap_or(0).saturating_sub(held);
            if *requests > block.requests || *tokens > left.cast_signed() {
                wrong.push(format!("{requests} and {tokens} tokens of {lease} go back: {block:?}"));
            }
            if cancels.contains(*lease) && *times > 0 {
                wrong.push(format!("{lease} is cancelled and goes back"));
            }
        }
        let heard = self.blocks.iter().filter(|(op, _)| !cancels.contains(*op));
        let granted: u64 = heard.map(|(_, block)| block.requests).sum();
        let returned: u64 = back.values().map(|(_, requests, _)| requests).sum();
        let hits = self.hits();
        if hits + returned > granted {
            wrong.push(format!("{hits} are handed out and {returned} go back of {granted}"));
        }
        wrong
    }

    /// What does not fit where nothing was lost.
    pub(crate) fn audit_of_the_whole(&self) -> Option<String> {
        let (cancels, returns) = self.told();
        let heard = self.blocks.iter().filter(|(op, _)| !cancels.contains(*op));
        let granted: u64 = heard.map(|(_, block)| block.requests).sum();
        let returned: u64 = returns
            .iter()
            .map(|told| told["requests"].as_u64().unwrap_or_default())
            .sum();
        let hits = self.hits();
        (hits + returned != granted).then(|| format!("{hits} are handed out and {returned} go back, of {granted}"))
    }
}

/// The name of the bundle that a request to the service is about.
fn bundle_of(asked: &Value) -> Option<&'static str> {
    let owner = &asked["limits"]["owner"];
    let bundle = if asked["subject"]["lane"] == "second" {
        Bundle::Second
    } else if !owner["tokens"].is_null() {
        Bundle::Tokens
    } else if owner["requests"] == 29 {
        Bundle::Changed
    } else {
        Bundle::First
    };
    Some(name(bundle))
}
