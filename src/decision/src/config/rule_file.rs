//! Rule files: the text, its faults, and the shipped files, which are compiled in.

use alloc::string::String;
use alloc::vec::Vec;

use super::faults::{Faults, hint, shown};
use super::section::{Section, retired_switch, root, word_of};
use super::{Mode, ModelSource, Profile};
use crate::class::Dependency;
use crate::json::Node;
use crate::rules::{Choice, Gate, GateRule, LimitSource, Rules};

/// The rule files that a configuration can name, with their texts.
pub const SHIPPED_RULES: [(&str, &str); 5] = [
    (
        "contract-limits",
        include_str!("../../../../rules/contract-limits.json"),
    ),
    (
        "operator-admission",
        include_str!("../../../../rules/operator-admission.json"),
    ),
    ("fail-closed", include_str!("../../../../rules/fail-closed.json")),
    (
        "fail-closed-metered",
        include_str!("../../../../rules/fail-closed-metered.json"),
    ),
    ("launch-gate", include_str!("../../../../rules/launch-gate.json")),
];

/// Parses a rule file by itself. What depends on the profile is checked where the rules are used.
///
/// # Errors
/// All faults of the text.
pub fn parse_rule_file(text: &[u8]) -> Result<Rules, Faults> {
    let mut faults = Faults::default();
    let rules = root(text, &mut faults).and_then(|node| read_rules("", &node, &mut faults));
    faults.into_result(rules)
}

/// The rules that a filter configuration names or holds.
pub(super) fn named_or_inline(path: &str, node: &Node, faults: &mut Faults) -> Option<Rules> {
    let Node::Text(name) = node else {
        return read_rules(path, node, faults);
    };
    let names: Vec<&str> = SHIPPED_RULES.iter().map(|(name, _)| *name).collect();
    let Some((_, text)) = SHIPPED_RULES.iter().find(|(shipped, _)| shipped == name) else {
        let shipped = names.join(", ");
        // Whoever names a file may mean one of ours, or one of their own, which no filter could read.
        let file = name.rsplit('/').next().unwrap_or(name);
        let bare = file.strip_suffix(".json").unwrap_or(file);
        let own = if bare.len() == name.len() {
            ""
        } else {
            "; rules of one's own stand here as the object itself, not as the name of a file"
        };
        let hint = hint(bare, &names);
        faults.add(
            path,
            alloc::format!(
                "no shipped rule file is named {}; there are: {shipped}{own}{hint}",
                shown(node)
            ),
        );
        return None;
    };
    root(text.as_bytes(), faults).and_then(|node| read_rules(path, &node, faults))
}

pub(super) fn read_rules(path: &str, node: &Node, faults: &mut Faults) -> Option<Rules> {
    let mut section = Section::of(path, node, faults)?;
    retired_switch(&mut section, faults);
    let name = read_name(&mut section, faults);
    let when_missing = section.required("envelope", faults).and_then(|node| {
        let mut envelope = Section::of(&section.path("envelope"), node, faults)?;
        let choice = envelope.choice("when_missing", faults);
        envelope.finish(faults);
        choice
    });
    let gates_path = section.path("gates");
    let gates = section
        .required("gates", faults)
        .and_then(|node| read_gates(&gates_path, node, faults));
    let decision = section.required("decision", faults).and_then(|node| {
        let mut decision = Section::of(&section.path("decision"), node, faults)?;
        let choice = decision.choice("when_unavailable", faults);
        decision.finish(faults);
        choice
    });
    let missing_path = section.path("envelope.when_missing");
    section.finish(faults);
    if let Some(gates) = &gates {
        check_order(&gates_path, gates, faults);
        let capacity = gates.iter().flatten().any(|rule| rule.gate() == Gate::Capacity);
        if capacity && when_missing.is_some_and(|choice| choice != Choice::Reject) {
            faults.add(
                missing_path,
                "must be \"reject\" while the gate \"capacity\" is listed: a request without an envelope would use \
                 capacity that no tier counts",
            );
        }
    }
    let gates = gates?.into_iter().collect::<Option<Vec<GateRule>>>()?;
    Some(Rules {
        name: name?,
        when_missing: when_missing?,
        gates,
        decision: decision?,
    })
}

fn read_name(section: &mut Section<'_>, faults: &mut Faults) -> Option<String> {
    section.required("name", faults)?;
    let name = section.text("name", faults)?;
    let well_formed = (1..=64).contains(&name.len())
        && name
            .bytes()
            .all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_'))
        && name.starts_with(|c: char| c.is_ascii_lowercase());
    if !well_formed {
        faults.add(
            section.path("name"),
            alloc::format!(
                "must be 1 to 64 of a-z, 0-9, - and _, starting with a letter (it is part of a gauge's name), is {}",
                shown(&Node::Text(name.into()))
            ),
        );
        return None;
    }
    Some(name.into())
}

/// One entry per listed gate; `None` for one that could not be read, so that the order of the rest is still checked.
fn read_gates(path: &str, node: &Node, faults: &mut Faults) -> Option<Vec<Option<GateRule>>> {
    let Node::List(items) = node else {
        faults.add(path, alloc::format!("must be an array, is {}", node.kind()));
        return None;
    };
    if items.is_empty() {
        faults.add(path, "must list at least one gate");
        return None;
    }
    Some(
        items
            .iter()
            .enumerate()
            .map(|(at, item)| read_gate(&alloc::format!("{path}[{at}]"), item, faults))
            .collect(),
    )
}

fn read_gate(path: &str, node: &Node, faults: &mut Faults) -> Option<GateRule> {
    let mut section = Section::of(path, node, faults)?;
    let gate = section.required("gate", faults).and_then(|node| {
        let gates = Gate::ALL.map(|gate| (gate.name(), gate));
        word_of(&section.path("gate"), node, &gates, faults)
    })?;
    let rule = if gate == Gate::LaunchRate {
        let per_minute = section.required("per_minute", faults).is_some();
        let per_minute = section
            .integer("per_minute", 0..=1_000_000_000, faults)
            .filter(|_| per_minute);
        let burst = section.required("burst", faults).is_some();
        let burst = section.integer("burst", 1..=1_000_000_000, faults).filter(|_| burst);
        if section.get("when_unavailable").is_some() {
            faults.add(
                section.path("when_unavailable"),
                "\"launch_rate\" has no dependency that could be unavailable: remove this key",
            );
        }
        match (per_minute, burst) {
            (Some(per_minute), Some(burst)) => Some(GateRule::LaunchRate { per_minute, burst }),
            _ => None,
        }
    } else {
        let limits = if gate == Gate::Contract {
            let words = [
                ("envelope", LimitSource::Envelope),
                ("envelope_or_plan", LimitSource::EnvelopeOrPlan),
            ];
            let given = section.get("limits").is_some();
            let limits = section.word("limits", &words, faults);
            if given { limits } else { Some(LimitSource::Envelope) }
        } else {
            Some(LimitSource::Envelope)
        };
        section
            .choice("when_unavailable", faults)
            .zip(limits)
            .map(|(when_unavailable, limits)| match gate {
                Gate::OrgStatus => GateRule::OrgStatus { when_unavailable },
                Gate::ModelPolicy => GateRule::ModelPolicy { when_unavailable },
                Gate::Concurrency => GateRule::Concurrency { when_unavailable },
                Gate::Capacity => GateRule::Capacity { when_unavailable },
                Gate::Contract => GateRule::Contract {
                    when_unavailable,
                    limits,
                },
                Gate::MonthlyQuota => GateRule::MonthlyQuota { when_unavailable },
                Gate::CostCap => GateRule::CostCap { when_unavailable },
                Gate::Metering | Gate::LaunchRate => GateRule::Metering { when_unavailable },
            })
    };
    section.finish(faults);
    rule
}

/// What is wrong with the order and the company of gates (DESIGN, rules).
fn check_order(path: &str, gates: &[Option<GateRule>], faults: &mut Faults) {
    let listed: Vec<(usize, Gate)> = gates
        .iter()
        .enumerate()
        .filter_map(|(at, rule)| rule.as_ref().map(|rule| (at, rule.gate())))
        .collect();
    let position = |wanted: Gate| listed.iter().find(|(_, gate)| *gate == wanted).map(|(at, _)| *at);
    let before = |at: usize| listed.iter().filter(move |(other, _)| *other < at);
    let add = |faults: &mut Faults, at: usize, message: String| faults.add(alloc::format!("{path}[{at}]"), message);
    for (at, gate) in &listed {
        let (at, name) = (*at, gate.name());
        if let Some((first, _)) = before(at).find(|(_, earlier)| earlier == gate) {
            add(
                faults,
                at,
                alloc::format!("the gate {name:?} is listed twice (first at {path}[{first}])"),
            );
            continue;
        }
        if !gate.charges()
            && let Some((_, charging)) = before(at).find(|(_, earlier)| earlier.charges())
        {
            let charging = charging.name();
            add(
                faults,
                at,
                alloc::format!("{name:?} must stand before {charging:?}, which charges: a policy denial costs nothing"),
            );
        }
        if *gate == Gate::Capacity && position(Gate::Contract).is_some_and(|contract| contract < at) {
            add(
                faults,
                at,
                "\"capacity\" must stand before \"contract\": exhausted together, capacity answers".into(),
            );
        }
        if matches!(gate, Gate::Concurrency | Gate::LaunchRate) {
            let metering = before(at).find(|(_, earlier)| earlier.dependency() == Some(Dependency::Metering));
            if let Some((_, earlier)) = metering {
                let earlier = earlier.name();
                add(
                    faults,
                    at,
                    alloc::format!("{name:?} must stand before {earlier:?}: cheap gates before dear ones"),
                );
            }
        }
    }
    check_adjacent(path, &listed, Dependency::Limiter, faults);
    check_adjacent(path, &listed, Dependency::Metering, faults);
    let metered = position(Gate::Metering).is_some();
    for (at, gate) in &listed {
        if !metered && matches!(gate, Gate::MonthlyQuota | Gate::CostCap) {
            let name = gate.name();
            add(
                faults,
                *at,
                alloc::format!("{name:?} needs the gate \"metering\", which is not listed"),
            );
        }
    }
}

/// Gates of one store are one question: apart, the second would be answered by what the first has taken.
fn check_adjacent(path: &str, listed: &[(usize, Gate)], dependency: Dependency, faults: &mut Faults) {
    let gates: Vec<&(usize, Gate)> = listed
        .iter()
        .filter(|(_, gate)| gate.dependency() == Some(dependency))
        .collect();
    for pair in gates.windows(2) {
        let [(earlier_at, earlier), (at, gate)] = pair else {
            continue;
        };
        if *at != earlier_at.saturating_add(1) && earlier != gate {
            let (earlier, name, store) = (earlier.name(), gate.name(), dependency.name());
            faults.add(
                alloc::format!("{path}[{at}]"),
                alloc::format!("{name:?} must stand next to {earlier:?}: {store} gates are decided in one step"),
            );
        }
    }
}

/// Faults that only show together with the profile, the mode and the source of the model. `at` is the path that their keys
/// have in common, with its dot, or empty.
pub(super) fn check_with_profile(
    at: &str,
    rules: &Rules,
    profile: Option<Profile>,
    mode: Mode,
    model: ModelSource,
    faults: &mut Faults,
) {
    let Some(policy) = rules.gate(Gate::ModelPolicy) else {
        return;
    };
    if model == ModelSource::None {
        faults.add(
            alloc::format!("{at}model.from"),
            "must be \"header\" or \"body\" while the gate \"model_policy\" is listed, is \"none\"",
        );
    }
    let Some(profile) = profile.filter(|profile| *profile != Profile::Development) else {
        return;
    };
    let mut must_reject = |path: &str, choice: Choice| {
        if choice != Choice::Reject {
            faults.add(
                alloc::format!("{at}{path}"),
                alloc::format!(
                    "must be \"reject\" in {profile} while the gate \"model_policy\" is listed: a policy is not opened"
                ),
            );
        }
    };
    if let Some(choice) = policy.when_unavailable() {
        must_reject("rules.gates[model_policy].when_unavailable", choice);
    }
    must_reject("rules.decision.when_unavailable", rules.decision);
    must_reject("rules.envelope.when_missing", rules.when_missing);
    if mode == Mode::Shadow {
        faults.add(
            alloc::format!("{at}mode"),
            alloc::format!("\"shadow\" is not allowed in {profile} while the gate \"model_policy\" is listed"),
        );
    }
}
