//! What is held against each other at the end of a run.

use std::collections::BTreeSet;

use portcullis_test_host::{Callout, Stream};

use super::Run;
use crate::interleavings::step::Request;

impl Run {
    /// What does not fit.
    pub(crate) fn audit(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        let any_broken = |calls: &[&str]| calls.iter().any(|call| self.broken.contains(call));
        // A host that does not know a context any more is taken at its word.
        if !any_broken(&["proxy_set_effective_context"]) {
            wrong.extend(
                self.hung
                    .iter()
                    .map(|stream| format!("stream {stream} is held for ever")),
            );
        }
        for stream in self.host.streams() {
            wrong.extend(self.wrong_with(stream));
        }
        let asked: BTreeSet<_> = self
            .host
            .sent()
            .iter()
            .filter(|c| c.is_decide())
            .map(Callout::op)
            .collect();
        let fetched: BTreeSet<_> = self
            .host
            .sent()
            .iter()
            .filter(|c| c.is_fetch())
            .map(Callout::op)
            .collect();
        let hits = self.hits();
        wrong.extend(self.blocks.audit(&self.host, hits));
        for batch in self.host.sent().iter().filter(|callout| callout.is_settle()) {
            let is_stranger = |op: &String| !asked.contains(op) && !fetched.contains(op);
            let strangers = batch.told("cancels").into_iter().filter(is_stranger);
            wrong.extend(strangers.map(|op| format!("{op} is cancelled and was never asked for")));
            let given_back = batch.told("releases").into_iter().chain(batch.told("renewals"));
            let strangers = given_back.filter(|op| !self.slots.contains_key(op));
            wrong.extend(strangers.map(|op| format!("{op} is released or renewed and never had a slot")));
            wrong.extend(self.accounts.wrong_in(&batch.settles(), &self.slots));
        }
        let heard = |key, op: &String| {
            self.heard
                .get(key)
                .and_then(|ops| ops.get(op))
                .copied()
                .unwrap_or_default()
        };
        // A clock that fails makes entries look old, and old ones are dropped.
        if !any_broken(&["clock_time_get", "proxy_get_current_time_nanoseconds"]) {
            let forgotten = asked
                .iter()
                .filter(|op| !self.decided.contains(*op) && heard("cancels", op) == 0);
            wrong.extend(forgotten.map(|op| format!("{op} was asked for, not decided, and not cancelled")));
            let forgotten = fetched
                .iter()
                .filter(|op| !self.blocks.is_answered(op) && heard("cancels", op) == 0);
            wrong.extend(forgotten.map(|op| format!("{op} was fetched, not answered, and not cancelled")));
            // An answer that could not be read leaves the operation to the second try.
            if !any_broken(&["proxy_get_header_map_pairs", "proxy_get_buffer_bytes"]) {
                let given = |op: &String| heard("releases", op) + heard("settles", op) + heard("cancels", op);
                let kept = self.slots.keys().filter(|op| given(op) == 0);
                wrong.extend(kept.map(|op| format!("the slot of {op} is not given back")));
                let owed = self.accounts.owed().filter(|op| given(op) == 0);
                wrong.extend(owed.map(|op| format!("{op} is not settled")));
            }
        }
        if self.broken.is_empty() {
            let lost = self.decided.iter().filter(|op| heard("cancels", op) > 0);
            wrong.extend(lost.map(|op| format!("{op} was decided in time and is cancelled")));
            let told = |op: &String| heard("releases", op) + heard("settles", op) + heard("cancels", op);
            let twice = asked.iter().filter(|op| !self.heard_late && told(op) > 1);
            wrong.extend(twice.map(|op| format!("the end of {op} is told twice, and was heard")));
        }
        wrong
    }

    /// Whether a stream waits for nobody's decision.
    fn needs_nobody(&self, stream: &Stream) -> bool {
        match self.requests.get(&stream.id) {
            Some(Request::Options) => true,
            // A run is recorded whatever its limits.
            Some(Request::Unlimited) => stream.root != self.roots[3].0,
            _ => false,
        }
    }

    fn was_admitted(&self, stream: &Stream) -> bool {
        let sent = self.host.sent().iter();
        sent.filter(|callout| callout.context == stream.id && callout.is_decide())
            .any(|callout| self.admitted.contains(&callout.op()))
    }

    /// Requests that went up past closed rules by a lease alone, where nothing else can explain it.
    fn hits(&self) -> Option<u64> {
        let is_hit = |stream: &&Stream| {
            stream.root == self.closed
                && stream.has_passed()
                && !self.needs_nobody(stream)
                && !self.was_admitted(stream)
        };
        let was_gone = self.broken.contains("proxy_set_effective_context");
        (!was_gone).then(|| self.host.streams().filter(is_hit).count() as u64)
    }

    fn wrong_with(&self, stream: &Stream) -> Option<String> {
        let id = stream.id;
        let request = self.requests.get(&id);
        let ends = stream.replies.len() + stream.resumes as usize;
        if ends > 1 {
            return Some(format!(
                "stream {id} has {} replies and {} resumes",
                stream.replies.len(),
                stream.resumes
            ));
        }
        let is_metered = stream.root == self.roots[3].0;
        // With leases, what goes up without a decision of its own is counted.
        let is_closed = is_metered || (stream.root == self.closed && !self.leases);
        // What the host had called gone has ended: nothing holds a body that it gives all the same.
        let was_gone = self.broken.contains("proxy_set_effective_context");
        if is_closed && stream.has_passed() && !self.needs_nobody(stream) && !was_gone && !self.was_admitted(stream) {
            return Some(format!(
                "stream {id} ({request:?}) went up past closed rules without an admission"
            ));
        }
        if stream.root == self.roots[2].0 && !stream.replies.is_empty() {
            return Some(format!("stream {id} was replied to in shadow mode"));
        }
        let up = if stream.has_passed() {
            stream.sent.as_slice()
        } else {
            b""
        };
        if stream.forwarded != up && !stream.is_ended {
            return Some(format!("the body of stream {id} does not go up as it came"));
        }
        None
    }
}
