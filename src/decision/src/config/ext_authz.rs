//! The service's section `ext_authz`: a filter's configuration for Envoy's own `ext_authz`, which asks the service before a
//! request goes up and never tells what became of it.
//!
//! Refused here is what such an answer can't keep: slots, which nobody would give back, and cost and runs, which are told at
//! a request's end. Left out on purpose: what a single request stamps, which is seen when it comes (`crate::ext_authz`).

use alloc::string::String;

use super::faults::Faults;
use super::filter::{DecisionTarget, FilterConfig, ModelSource, read_keys, read_timeout, subsection};
use super::section::Section;
use super::{Profile, Tiers};
use crate::json::Node;
use crate::rules::{Gate, GateRule, LimitSource, Rules};

/// Reads the section. The profile is the service's own.
pub(super) fn read(node: &Node, profile: Option<Profile>, tiers: &Tiers, faults: &mut Faults) -> Option<FilterConfig> {
    let mut section = Section::of("ext_authz", node, faults)?;
    if section.get("leases").is_some() {
        faults.add(
            section.path("leases"),
            "the service is asked about each request, so there is nobody to hand out a lease: remove this key",
        );
    }
    if section.get("pause").is_some() {
        faults.add(
            section.path("pause"),
            "the gateway holds the request as it came, so there is nothing to withhold: remove this key",
        );
    }
    let config = read_keys(section, profile, read_decision, faults)?;
    if config.model == ModelSource::Body {
        faults.add(
            "ext_authz.model.from",
            "\"body\" is not possible here: no body is read; say \"header\", or use the filter",
        );
    }
    check_gates(&config.rules, tiers, faults);
    Some(config)
}

/// Only the time: the one who is asked is the service itself.
fn read_decision(section: &mut Section<'_>, faults: &mut Faults) -> Option<DecisionTarget> {
    let timeout_ms = subsection(section, "decision", faults, |decision, faults| {
        Some(read_timeout(decision, faults))
    });
    Some(DecisionTarget {
        upstream: String::new(),
        authority: String::new(),
        token: None,
        timeout_ms: timeout_ms.unwrap_or(250),
    })
}

fn check_gates(rules: &Rules, tiers: &Tiers, faults: &mut Faults) {
    for rule in &rules.gates {
        let (key, why) = match rule {
            GateRule::Concurrency { .. } => ("", "a slot would stay taken until it lapses"),
            GateRule::MonthlyQuota { .. } | GateRule::CostCap { .. } | GateRule::Metering { .. } => {
                ("", "what the request has used would be billed to nobody")
            }
            GateRule::Contract {
                limits: LimitSource::EnvelopeOrPlan,
                ..
            } => (".limits", "a slot of the plan would stay taken until it lapses"),
            GateRule::Capacity { .. } if tiers.take_slots() => {
                ("", "a slot of a tier would stay taken until it lapses")
            }
            _ => continue,
        };
        faults.add(
            path(rule.gate(), key),
            alloc::format!(
                "can't be kept here: Envoy's ext_authz never says when a request has ended, so {why}; use the filter"
            ),
        );
    }
}

fn path(gate: Gate, key: &str) -> String {
    alloc::format!("ext_authz.rules.gates[{}]{key}", gate.name())
}
