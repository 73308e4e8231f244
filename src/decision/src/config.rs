//! Configuration: rule files, the filter's configuration and the service's, parsed the same way everywhere.
//!
//! Every fault is listed at once, each with its path, and a near miss gets a hint. `on_configure`, `portcullis check` and
//! `portcullis serve` call these parsers and no others, so they find the same faults. Nothing here reads a file or an
//! environment variable: the caller passes both in.

mod canary;
mod door;
mod ext_authz;
mod faults;
mod filter;
mod pause;
mod policy_file;
mod rule_file;
#[cfg(feature = "schema")]
pub mod schema;
mod section;
mod service;
mod signature;
mod tracing;

pub use canary::CanaryConfig;
pub use door::{AdminConfig, HttpBounds, NO_TOKEN, TlsConfig, Token, is_token};
pub use faults::{Fault, Faults};
pub use filter::{
    BodyConfig, DecisionTarget, FilterConfig, LeaseConfig, LimitHeaders, Mode, ModelSource, prefix_fault,
};
pub use policy_file::parse_policy_file;
pub use rule_file::{SHIPPED_RULES, parse_rule_file};
pub use service::{Environment, LimiterConfig, MeteringConfig, PolicyConfig, ServiceConfig, StoreUrl, Tiers};
pub use signature::{DEFAULT_MAX_AGE_S, MAX_AGE_S};
pub use tracing::TracingConfig;

use alloc::string::String;
use core::fmt;

use serde::{Deserialize, Serialize};

/// Which kind of installation this is. Nothing fills it in: a missing profile is a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Profile {
    /// A developer's machine: embedded stores are allowed.
    Development,
    /// As production.
    Staging,
    /// Real users.
    Production,
}

impl Profile {
    const NAMES: [&'static str; 3] = ["development", "staging", "production"];

    /// The name in files, on the wire and in logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Development => "development",
            Self::Staging => "staging",
            Self::Production => "production",
        }
    }

    /// The profile of this name.
    pub fn named(name: &str) -> Option<Self> {
        [Self::Development, Self::Staging, Self::Production]
            .into_iter()
            .find(|profile| profile.name() == name)
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a file is, by its top-level keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// A rule file.
    Rules,
    /// The filter's configuration.
    Filter,
    /// The service's configuration.
    Service,
    /// A policy file.
    Policy,
}

impl FileKind {
    /// Guesses from the keys that only one kind has; `None` if none of them is there.
    pub fn of(node: &crate::json::Node) -> Option<Self> {
        let has = |keys: &[&str]| keys.iter().any(|key| node.get(key).is_some());
        if has(&["gates", "name"]) {
            Some(Self::Rules)
        } else if has(&["orgs", "plans", "providers", "prices"]) {
            Some(Self::Policy)
        } else if has(&[
            "listen",
            "limiter",
            "store_url",
            "policy",
            "metering",
            "capacity",
            "admin",
        ]) {
            Some(Self::Service)
        } else if has(&[
            "rules", "decision", "routes", "mode", "leases", "reply", "model", "tokens", "envelope",
        ]) {
            Some(Self::Filter)
        } else {
            None
        }
    }
}

/// A short fingerprint of a configuration text (FNV-1a, 64 bits), so that a rejected update is noticed: what runs says
/// which text it runs. It protects against nothing.
pub fn fingerprint(text: &[u8]) -> String {
    let hash = text.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    alloc::format!("{hash:016x}")
}

#[cfg(test)]
mod tests;
