//! What was granted in a run with leases, and that no more was handed out than that.

use std::collections::{BTreeMap, BTreeSet};

use portcullis_test_host::{Callout, TestHost};
use serde_json::{Value, json};

use crate::lease_scene::{MAX_AGE_MS, returned};

/// Admissions of each block.
const REQUESTS: u64 = 5;

/// The blocks of one root in one run.
#[derive(Debug, Default)]
pub(crate) struct Blocks {
    granted: BTreeMap<String, Option<u64>>,
    /// Fetches that no request waited for and that were answered.
    answered: BTreeSet<String>,
}

impl Blocks {
    /// The block that comes with an admission, if one is asked for: tokens for as many holds as there are requests.
    pub(crate) fn grant(&mut self, callout: &Callout, held_tokens: Option<u64>) -> Option<Value> {
        if callout.json()["lease"].is_null() {
            return None;
        }
        let tokens = held_tokens.map(|held| held * REQUESTS);
        self.granted.insert(callout.op(), tokens);
        let mut lease = json!({"requests": REQUESTS, "ends_in_ms": MAX_AGE_MS});
        if let Some(tokens) = tokens {
            (lease["tokens"], lease["largest_hold"]) = (json!(tokens), json!(tokens / REQUESTS));
        }
        Some(lease)
    }

    /// A fetch was answered.
    pub(crate) fn answered(&mut self, op: String) {
        self.answered.insert(op);
    }

    pub(crate) fn is_answered(&self, op: &String) -> bool {
        self.answered.contains(op)
    }

    /// What does not fit in what was returned; `hits` is how many requests went on by these blocks alone, if that is known.
    pub(crate) fn audit(&self, host: &TestHost, hits: Option<u64>) -> Vec<String> {
        let mut wrong = Vec::new();
        let settles = || host.sent().iter().filter(|callout| callout.is_settle());
        let cancelled: BTreeSet<_> = settles().flat_map(|batch| batch.told("cancels")).collect();
        let (mut back, mut sum): (BTreeMap<String, (u64, i64)>, u64) = (BTreeMap::new(), 0);
        for (lease, requests, tokens) in returned(host) {
            let of_lease = back.entry(lease.clone()).or_default();
            of_lease.0 += requests;
            of_lease.1 += tokens;
            sum += requests;
            match self.granted.get(&lease) {
                None => wrong.push(format!("{lease} goes back and was not granted")),
                Some(tokens) => {
                    let most = (REQUESTS, tokens.unwrap_or(0).cast_signed());
                    if of_lease.0 > most.0 || of_lease.1 > most.1 {
                        wrong.push(format!("{of_lease:?} of {lease} goes back, granted were {most:?}"));
                    }
                }
            }
            if requests > 0 && cancelled.contains(&lease) {
                wrong.push(format!("{lease} is cancelled and goes back"));
            }
        }
        let granted = self.granted.keys().filter(|op| !cancelled.contains(*op)).count() as u64 * REQUESTS;
        if let Some(hits) = hits.filter(|hits| hits + sum > granted) {
            wrong.push(format!("{hits} are handed out and {sum} go back of {granted}"));
        }
        wrong
    }
}
