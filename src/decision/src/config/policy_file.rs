//! Policy files: what `portcullis policy apply` loads, and what `file:` reads in development.

use alloc::borrow::ToOwned;
use alloc::string::String;
use alloc::vec::Vec;

use hashbrown::HashSet;

use super::faults::{Faults, hint, shown};
use super::section::{Section, integer_of, root, word_of};
use crate::envelope::LONGEST_ID;
use crate::json::Node;
use crate::limits::{LARGEST_LIMIT, Limit};
use crate::policy::{DeclaredOrg, ModelPattern, OrgStatus, Plan, PolicyFile, Price};

/// Parses a policy file.
///
/// # Errors
/// All faults of the text.
pub fn parse_policy_file(text: &[u8]) -> Result<PolicyFile, Faults> {
    let mut faults = Faults::default();
    let file = root(text, &mut faults).and_then(|node| read(&node, &mut faults));
    faults.into_result(file)
}

fn read(node: &Node, faults: &mut Faults) -> Option<PolicyFile> {
    let mut section = Section::of("", node, faults)?;
    let mut file = PolicyFile::default();
    for (model, path, node) in entries(&mut section, "providers", faults) {
        let provider = text(&path, node, faults);
        file.providers.extend(pattern(&path, model, faults).zip(provider));
    }
    for (model, path, node) in entries(&mut section, "prices", faults) {
        let price = read_price(&path, node, faults);
        file.prices.extend(pattern(&path, model, faults).zip(price));
    }
    for (name, path, node) in entries(&mut section, "plans", faults) {
        file.plans
            .extend(id(&path, name, faults).zip(read_plan(&path, node, faults)));
    }
    let plans: Vec<&str> = file.plans.iter().map(|(name, _)| name.as_str()).collect();
    let mut orgs = Vec::new();
    for (name, path, node) in entries(&mut section, "orgs", faults) {
        orgs.extend(id(&path, name, faults).zip(read_org(&path, node, &plans, faults)));
    }
    file.orgs = orgs;
    section.finish(faults);
    Some(file)
}

/// The entries of an object whose keys are the user's own, with their paths; a key that stands twice is a fault.
fn entries<'a>(section: &mut Section<'a>, key: &'static str, faults: &mut Faults) -> Vec<(&'a str, String, &'a Node)> {
    match section.get(key) {
        None | Some(Node::Null) => Vec::new(),
        Some(Node::Object(entries)) => {
            let mut list: Vec<(&str, String, &Node)> = Vec::with_capacity(entries.len());
            let mut seen = HashSet::with_capacity(entries.len());
            for (name, node) in entries {
                let path = alloc::format!("{key}.{}", shown(name));
                if !seen.insert(name.as_str()) {
                    faults.add(path.as_str(), "stands twice");
                }
                list.push((name, path, node));
            }
            list
        }
        Some(other) => {
            faults.add(key, alloc::format!("must be an object, is {}", other.kind()));
            Vec::new()
        }
    }
}

fn pattern(path: &str, model: &str, faults: &mut Faults) -> Option<ModelPattern> {
    let pattern = ModelPattern::parse(model);
    if pattern.is_none() {
        let is = shown(&Node::Text(model.to_owned()));
        faults.add(
            path,
            alloc::format!("must be a model's name or a prefix that ends in *, of at most 256 bytes, is {is}"),
        );
    }
    pattern
}

fn id(path: &str, name: &str, faults: &mut Faults) -> Option<String> {
    let fine = (1..=LONGEST_ID).contains(&name.len()) && !name.chars().any(char::is_control);
    if !fine {
        faults.add(
            path,
            alloc::format!("a name must be 1 to {LONGEST_ID} bytes without control characters"),
        );
    }
    fine.then(|| name.to_owned())
}

fn text(path: &str, node: &Node, faults: &mut Faults) -> Option<String> {
    match node {
        Node::Text(text) if !text.is_empty() => Some(text.clone()),
        other => {
            faults.add(path, alloc::format!("must be a non-empty string, is {}", shown(other)));
            None
        }
    }
}

fn read_price(path: &str, node: &Node, faults: &mut Faults) -> Option<Price> {
    let mut section = Section::of(path, node, faults)?;
    let mut figure = |key, faults: &mut Faults| {
        section.required(key, faults)?;
        section.integer(key, 0..=LARGEST_LIMIT, faults)
    };
    let (input, output) = (figure("input", faults), figure("output", faults));
    // A provider without a cache discount charges cached input as input.
    let cached_input = section.integer("cached_input", 0..=LARGEST_LIMIT, faults).or(input);
    section.finish(faults);
    Some(Price {
        input: input?,
        cached_input: cached_input?,
        output: output?,
    })
}

fn read_plan(path: &str, node: &Node, faults: &mut Faults) -> Option<Plan> {
    let mut section = Section::of(path, node, faults)?;
    let mut figure = |key: &'static str| match section.get(key) {
        None | Some(Node::Null) => Limit::Unlimited,
        Some(node) => integer_of(&section.path(key), node, 0..=LARGEST_LIMIT, faults).map_or(Limit::Blocked, Limit::of),
    };
    let plan = Plan {
        concurrency: figure("concurrency"),
        requests: figure("requests"),
        tokens: figure("tokens"),
        monthly_runs: figure("monthly_runs"),
        monthly_cost: figure("monthly_cost"),
    };
    section.finish(faults);
    Some(plan)
}

fn read_org(path: &str, node: &Node, plans: &[&str], faults: &mut Faults) -> Option<DeclaredOrg> {
    let mut section = Section::of(path, node, faults)?;
    let status = section
        .required("status", faults)
        .and_then(|node| word_of(&section.path("status"), node, &OrgStatus::NAMED, faults));
    let plan = match section.get("plan") {
        None | Some(Node::Null) => None,
        Some(_) => section.text("plan", faults),
    };
    if let Some(plan) = plan.filter(|plan| !plans.contains(plan)) {
        let is = shown(&Node::Text(plan.to_owned()));
        faults.add(
            section.path("plan"),
            alloc::format!("no plan of this file is named {is}{}", hint(plan, plans)),
        );
    }
    let mut models = Vec::new();
    match section.get("models") {
        None => {}
        Some(Node::List(items)) => {
            for (at, item) in items.iter().enumerate() {
                let path = alloc::format!("{}[{at}]", section.path("models"));
                models.extend(text(&path, item, faults).and_then(|model| pattern(&path, &model, faults)));
            }
        }
        Some(other) => faults.add(
            section.path("models"),
            alloc::format!("must be an array, is {}", other.kind()),
        ),
    }
    section.finish(faults);
    Some(DeclaredOrg {
        status: status?,
        plan: plan.map(ToOwned::to_owned),
        models,
    })
}
