//! A policy as JSON in the policy file's format, and what sets two of them apart.

use std::fmt;

use portcullis_decision::limits::Limit;
use portcullis_decision::policy::{DeclaredOrg, Plan, PolicyFile, Price};
use serde_json::{Map, Value, json};

/// The sections of a policy file, each an object whose keys are the user's own.
pub(super) const SECTIONS: [&str; 4] = ["providers", "prices", "plans", "orgs"];

/// A policy in the format of its file, every section present.
pub(super) fn of(policy: &PolicyFile) -> Value {
    let providers = policy
        .providers
        .iter()
        .map(|(model, name)| (model.as_str(), json!(name)));
    let prices = policy
        .prices
        .iter()
        .map(|(model, entry)| (model.as_str(), price(entry)));
    let plans = policy
        .plans
        .iter()
        .map(|(name, figures)| (name.as_str(), plan(figures)));
    let orgs = policy.orgs.iter().map(|(id, declared)| (id.as_str(), org(declared)));
    json!({
        "providers": object(providers), "prices": object(prices), "plans": object(plans), "orgs": object(orgs)
    })
}

fn object<'a>(entries: impl Iterator<Item = (&'a str, Value)>) -> Value {
    Value::Object(entries.map(|(key, value)| (key.to_owned(), value)).collect())
}

fn price(price: &Price) -> Value {
    json!({"input": price.input, "cached_input": price.cached_input, "output": price.output})
}

fn plan(plan: &Plan) -> Value {
    let figures = [
        ("concurrency", plan.concurrency),
        ("requests", plan.requests),
        ("tokens", plan.tokens),
        ("monthly_runs", plan.monthly_runs),
        ("monthly_cost", plan.monthly_cost),
    ];
    // Absent is unlimited.
    object(
        figures
            .into_iter()
            .filter_map(|(key, limit): (_, Limit)| Some((key, json!(limit.figure()?)))),
    )
}

fn org(org: &DeclaredOrg) -> Value {
    let models: Vec<&str> = org
        .models
        .iter()
        .map(portcullis_decision::policy::ModelPattern::as_str)
        .collect();
    let mut entry = json!({"status": org.status.name(), "models": models});
    if let (Some(plan), Some(entry)) = (&org.plan, entry.as_object_mut()) {
        entry.insert("plan".to_owned(), json!(plan));
    }
    entry
}

/// One entry that is not the same on both sides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) section: &'static str,
    pub(super) key: String,
    pub(super) before: Option<Value>,
    pub(super) after: Option<Value>,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { section, key, .. } = self;
        let key = Value::String(key.clone());
        match (&self.before, &self.after) {
            (Some(before), Some(after)) => write!(f, "~ {section} {key}: {before} -> {after}"),
            (None, Some(after)) => write!(f, "+ {section} {key}: {after}"),
            (Some(before), None) => write!(f, "- {section} {key}: {before}"),
            (None, None) => Ok(()),
        }
    }
}

/// What turns one document into another, by section and key.
pub(super) fn changes(before: &Value, after: &Value) -> Vec<Change> {
    let nothing = Map::new();
    let mut changes = Vec::new();
    for section in SECTIONS {
        let side = |document: &'_ Value| document.get(section).and_then(Value::as_object).cloned();
        let (old, new) = (
            side(before).unwrap_or_default(),
            side(after).unwrap_or_else(|| nothing.clone()),
        );
        let gone = old.keys().filter(|key| !new.contains_key(*key));
        for key in new.keys().chain(gone) {
            let (before, after) = (old.get(key).cloned(), new.get(key).cloned());
            if before != after {
                changes.push(Change {
                    section,
                    key: key.clone(),
                    before,
                    after,
                });
            }
        }
    }
    changes
}

#[cfg(test)]
mod tests {
    use super::*;
    use portcullis_decision::config::parse_policy_file;

    const POLICY: &str = r#"{
        "providers": {"gpt-4o": "openai", "claude-*": "anthropic"},
        "prices": {"gpt-4o": {"input": 2500000, "cached_input": 1250000, "output": 10000000}},
        "plans": {"team": {"concurrency": 10, "requests": 0}, "free": {}},
        "orgs": {"org-1": {"status": "read_only", "plan": "team", "models": ["gpt-4o", "claude-*"]},
                 "org-2": {"status": "active", "models": []}}
    }"#;

    #[test]
    fn a_policy_is_printed_as_it_was_written() {
        let policy = parse_policy_file(POLICY.as_bytes()).unwrap();
        assert_eq!(of(&policy), serde_json::from_str::<Value>(POLICY).unwrap());
    }

    #[test]
    fn changes_name_what_is_new_other_and_gone() {
        let before = json!({"plans": {"a": {"requests": 1}, "b": {}}, "orgs": {}});
        let after = json!({"plans": {"a": {"requests": 2}, "c": {}}});
        let lines: Vec<String> = changes(&before, &after).iter().map(ToString::to_string).collect();
        let expected = [
            r#"~ plans "a": {"requests":1} -> {"requests":2}"#,
            r#"+ plans "c": {}"#,
            r#"- plans "b": {}"#,
        ];
        assert_eq!(lines, expected);
        assert!(changes(&after, &after).is_empty());
    }
}
