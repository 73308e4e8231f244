//! What was charged for each admitted operation of a run, and what may and must be told of it at the end of its stream.

use std::collections::BTreeMap;

use portcullis_test_host::{Callout, ContextId};
use serde_json::Value;

/// An admitted operation.
#[derive(Debug)]
struct Account {
    stream: ContextId,
    /// What it asked to hold, and what it was charged.
    asked_tokens: u64,
    held_tokens: Option<u64>,
    /// Its cost is recorded.
    has_payer: bool,
}

/// All of a run.
#[derive(Debug, Default)]
pub(crate) struct Accounts {
    by_op: BTreeMap<String, Account>,
    /// The status of each response that has begun.
    statuses: BTreeMap<ContextId, &'static str>,
}

impl Accounts {
    /// The service admits, and the stream hears of it.
    pub(crate) fn admitted(&mut self, callout: &Callout, held_tokens: Option<u64>, is_metered: bool) {
        let asked = callout.json();
        let subject = &asked["subject"];
        let account = Account {
            stream: callout.context,
            asked_tokens: asked["tokens"].as_u64().unwrap_or_default(),
            held_tokens,
            has_payer: is_metered && subject["org"].is_string() && subject["model"].is_string(),
        };
        self.by_op.insert(callout.op(), account);
    }

    /// A response begins.
    pub(crate) fn answered(&mut self, stream: ContextId, status: &'static str) {
        self.statuses.insert(stream, status);
    }

    /// Nobody charges for this answer.
    fn is_unserved(&self, account: &Account) -> bool {
        let status = self.statuses.get(&account.stream);
        status.is_some_and(|status| !matches!(*status, "200" | "408" | "504"))
    }

    /// Operations of which a settlement must be told: their cost is recorded.
    pub(crate) fn owed(&self) -> impl Iterator<Item = &String> {
        let owes = |account: &Account| account.has_payer && !self.is_unserved(account);
        self.by_op
            .iter()
            .filter(move |(_, account)| owes(account))
            .map(|(op, _)| op)
    }

    /// What does not fit in the settlements of a batch.
    pub(crate) fn wrong_in(&self, settlements: &[(String, Value)], slots: &BTreeMap<String, ContextId>) -> Vec<String> {
        let check = |(op, told): &(String, Value)| self.wrong_with(op, told, slots.contains_key(op));
        settlements.iter().filter_map(check).collect()
    }

    fn wrong_with(&self, op: &String, told: &Value, has_slot: bool) -> Option<String> {
        let Some(account) = self.by_op.get(op) else {
            return Some(format!("{told} is of an operation that was not admitted"));
        };
        let (tokens, bill) = (told["tokens"].as_u64(), &told["bill"]);
        let is_unserved = self.is_unserved(account);
        let reported = bill["input"].as_u64().zip(bill["output"].as_u64());
        let reported = reported.map(|(input, output)| input + output);
        let is_hold = bill["is_hold"] == true;
        let faults = [
            (tokens.is_none() && bill.is_null() && !has_slot, "settles nothing"),
            (
                tokens.is_some() && account.held_tokens.is_none(),
                "settles a charge that was not made",
            ),
            (!bill.is_null() && !account.has_payer, "has a bill that nobody pays"),
            (!bill.is_null() && is_unserved, "has a bill for an error"),
            (
                is_unserved && tokens > account.held_tokens,
                "charges an error more than was held",
            ),
            (is_hold && tokens.is_some(), "changes a charge without a report"),
            (
                is_hold && reported < Some(account.asked_tokens),
                "is billed less than it reserved",
            ),
            (
                !is_hold && !bill.is_null() && tokens.or(account.held_tokens).is_some_and(|sum| Some(sum) != reported),
                "charges another sum than it bills",
            ),
        ];
        let fault = faults.into_iter().find(|(is_wrong, _)| *is_wrong);
        fault.map(|(_, what)| format!("{told} {what}: {account:?}"))
    }
}
