//! The section `canary` of the service's configuration: whether it tries by itself that a limit holds, and how often.
//!
//! Left out on purpose: what is tried, which is the service's.

use super::faults::Faults;
use super::section::Section;
use crate::json::Node;

/// How often it is tried where nothing says so, in milliseconds.
const INTERVAL_MS: u64 = 10_000;

/// A request that must be denied, tried again and again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CanaryConfig {
    /// Between two tries, in milliseconds.
    pub interval_ms: u64,
}

/// Reads the section; null is none.
pub(super) fn read(node: &Node, faults: &mut Faults) -> Option<CanaryConfig> {
    if *node == Node::Null {
        return None;
    }
    let mut section = Section::of("canary", node, faults)?;
    let interval_ms = section.integer("interval_ms", 100..=3_600_000, faults);
    section.finish(faults);
    Some(CanaryConfig {
        interval_ms: interval_ms.unwrap_or(INTERVAL_MS),
    })
}
