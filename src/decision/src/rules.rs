//! Rules: which gates run, in which order, and what happens when each cannot answer.
//!
//! There are no defaults for that choice, and none of the known denials has one: the types below have no place for it.

use alloc::string::String;
use alloc::vec::Vec;

use serde::de::Error as _;
use serde::{Deserialize, Serialize};

use crate::class::Dependency;

/// One check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gate {
    /// The org is active, suspended or read-only.
    OrgStatus,
    /// The model is on the org's allow-list, and a provider serves it.
    ModelPolicy,
    /// The plan's slots.
    Concurrency,
    /// Launches per minute, in the memory of the service process.
    LaunchRate,
    /// The operator's tiers.
    Capacity,
    /// The limits stamped on the envelope.
    Contract,
    /// Runs in this month.
    MonthlyQuota,
    /// Cost in this month.
    CostCap,
    /// The record of what ran.
    Metering,
}

impl Gate {
    /// All gates.
    pub const ALL: [Self; 9] = [
        Self::OrgStatus,
        Self::ModelPolicy,
        Self::Concurrency,
        Self::LaunchRate,
        Self::Capacity,
        Self::Contract,
        Self::MonthlyQuota,
        Self::CostCap,
        Self::Metering,
    ];

    /// The name in rule files, logs and on the wire.
    pub const fn name(self) -> &'static str {
        match self {
            Self::OrgStatus => "org_status",
            Self::ModelPolicy => "model_policy",
            Self::Concurrency => "concurrency",
            Self::LaunchRate => "launch_rate",
            Self::Capacity => "capacity",
            Self::Contract => "contract",
            Self::MonthlyQuota => "monthly_quota",
            Self::CostCap => "cost_cap",
            Self::Metering => "metering",
        }
    }

    /// The gate of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|gate| gate.name() == name)
    }

    /// What the gate needs to answer; `None` for `launch_rate`, which lives in the service's own memory.
    pub const fn dependency(self) -> Option<Dependency> {
        match self {
            Self::OrgStatus | Self::ModelPolicy => Some(Dependency::Policy),
            Self::Concurrency | Self::Capacity | Self::Contract => Some(Dependency::Limiter),
            Self::MonthlyQuota | Self::CostCap | Self::Metering => Some(Dependency::Metering),
            Self::LaunchRate => None,
        }
    }

    /// Whether passing the gate takes something that a later denial has to give back.
    pub const fn charges(self) -> bool {
        !matches!(self, Self::OrgStatus | Self::ModelPolicy)
    }
}

/// What happens when a dependency, or the envelope, is not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Choice {
    /// Fail closed.
    Reject,
    /// Fail open; logged and counted.
    Admit,
    /// Fail open within an emergency allowance per class, then closed.
    AdmitAtMost {
        /// Requests that may pass in a minute.
        max_per_minute: u64,
    },
}

impl Serialize for Choice {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeMap;
        match self {
            Self::Reject => serializer.serialize_str("reject"),
            Self::Admit => serializer.serialize_str("admit"),
            Self::AdmitAtMost { max_per_minute } => {
                let mut map = serializer.serialize_map(Some(1))?;
                map.serialize_entry(
                    "admit",
                    &Bound {
                        max_per_minute: *max_per_minute,
                    },
                )?;
                map.end()
            }
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Bound {
    max_per_minute: u64,
}

impl<'de> Deserialize<'de> for Choice {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(rename_all = "lowercase")]
        enum Word {
            Reject,
            Admit,
        }
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            Word(Word),
            Bounded { admit: Bound },
        }
        Ok(match Form::deserialize(deserializer)? {
            Form::Word(Word::Reject) => Self::Reject,
            Form::Word(Word::Admit) => Self::Admit,
            Form::Bounded { admit } => Self::AdmitAtMost {
                max_per_minute: admit.max_per_minute,
            },
        })
    }
}

/// Where the limits of the `contract` gate come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum LimitSource {
    /// The envelope alone.
    #[default]
    Envelope,
    /// The envelope; a scope without a stamped limit takes its org's plan.
    EnvelopeOrPlan,
}

/// A gate with what a rule file says about it.
// `deny_unknown_fields` is for the schema; what is read is a `FlatRule`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(tag = "gate", rename_all = "snake_case", deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum GateRule {
    /// The org is active, suspended or read-only.
    OrgStatus {
        /// When the policy store cannot answer.
        when_unavailable: Choice,
    },
    /// The model is on the org's allow-list, and a provider serves it.
    ModelPolicy {
        /// When the policy store cannot answer.
        when_unavailable: Choice,
    },
    /// The plan's slots.
    Concurrency {
        /// When the limiter, or the plan, cannot be read.
        when_unavailable: Choice,
    },
    /// Launches per minute, in the memory of the service process.
    LaunchRate {
        /// Launches per minute, org and service process.
        #[cfg_attr(feature = "schema", schemars(range(max = 1_000_000_000)))]
        per_minute: u64,
        /// Launches that may come at once.
        #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 1_000_000_000)))]
        burst: u64,
    },
    /// The operator's tiers.
    Capacity {
        /// When the limiter cannot answer.
        when_unavailable: Choice,
    },
    /// The limits stamped on the envelope.
    Contract {
        /// When the limiter, or a plan that is needed, cannot be read.
        when_unavailable: Choice,
        /// Where the limits come from.
        #[serde(default)]
        limits: LimitSource,
    },
    /// Runs in this month.
    MonthlyQuota {
        /// When the metering store, or the plan, cannot be read.
        when_unavailable: Choice,
    },
    /// Cost in this month.
    CostCap {
        /// When the metering store, or the plan, cannot be read.
        when_unavailable: Choice,
    },
    /// The record of what ran.
    Metering {
        /// When the metering store cannot answer.
        when_unavailable: Choice,
    },
}

/// A gate as it stands in a question, all kinds in one: it is read in one pass, where serde would keep it as a tree until it
/// knows the kind.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a gate with its keys")]
struct FlatRule {
    gate: Gate,
    #[serde(default, deserialize_with = "present")]
    when_unavailable: Option<Choice>,
    #[serde(default, deserialize_with = "present")]
    limits: Option<LimitSource>,
    #[serde(default, deserialize_with = "present")]
    per_minute: Option<u64>,
    #[serde(default, deserialize_with = "present")]
    burst: Option<u64>,
}

/// What a key that is there says: `null` says nothing, and is a fault.
fn present<'de, D: serde::Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}

impl<'de> Deserialize<'de> for GateRule {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let flat = FlatRule::deserialize(deserializer)?;
        let missing = |key| move || D::Error::missing_field(key);
        let choice = || flat.when_unavailable.ok_or_else(missing("when_unavailable"));
        let rule = match flat.gate {
            Gate::OrgStatus => Self::OrgStatus {
                when_unavailable: choice()?,
            },
            Gate::ModelPolicy => Self::ModelPolicy {
                when_unavailable: choice()?,
            },
            Gate::Concurrency => Self::Concurrency {
                when_unavailable: choice()?,
            },
            Gate::LaunchRate => Self::LaunchRate {
                per_minute: flat.per_minute.ok_or_else(missing("per_minute"))?,
                burst: flat.burst.ok_or_else(missing("burst"))?,
            },
            Gate::Capacity => Self::Capacity {
                when_unavailable: choice()?,
            },
            Gate::Contract => Self::Contract {
                when_unavailable: choice()?,
                limits: flat.limits.unwrap_or_default(),
            },
            Gate::MonthlyQuota => Self::MonthlyQuota {
                when_unavailable: choice()?,
            },
            Gate::CostCap => Self::CostCap {
                when_unavailable: choice()?,
            },
            Gate::Metering => Self::Metering {
                when_unavailable: choice()?,
            },
        };
        // A key that the kind does not have might be a restriction, and is not passed over.
        let is_launch_rate = flat.gate == Gate::LaunchRate;
        let stray = [
            ("when_unavailable", is_launch_rate && flat.when_unavailable.is_some()),
            ("limits", flat.gate != Gate::Contract && flat.limits.is_some()),
            ("per_minute", !is_launch_rate && flat.per_minute.is_some()),
            ("burst", !is_launch_rate && flat.burst.is_some()),
        ];
        match stray.into_iter().find(|(_, is_there)| *is_there) {
            Some((key, _)) => {
                let gate = flat.gate.name();
                Err(D::Error::custom(alloc::format!("the gate {gate} has no key {key:?}")))
            }
            None => Ok(rule),
        }
    }
}

impl GateRule {
    /// Which gate.
    pub const fn gate(&self) -> Gate {
        match self {
            Self::OrgStatus { .. } => Gate::OrgStatus,
            Self::ModelPolicy { .. } => Gate::ModelPolicy,
            Self::Concurrency { .. } => Gate::Concurrency,
            Self::LaunchRate { .. } => Gate::LaunchRate,
            Self::Capacity { .. } => Gate::Capacity,
            Self::Contract { .. } => Gate::Contract,
            Self::MonthlyQuota { .. } => Gate::MonthlyQuota,
            Self::CostCap { .. } => Gate::CostCap,
            Self::Metering { .. } => Gate::Metering,
        }
    }

    /// What happens when it cannot answer; `None` for a gate without a dependency.
    pub const fn when_unavailable(&self) -> Option<Choice> {
        match *self {
            Self::LaunchRate { .. } => None,
            Self::OrgStatus { when_unavailable }
            | Self::ModelPolicy { when_unavailable }
            | Self::Concurrency { when_unavailable }
            | Self::Capacity { when_unavailable }
            | Self::Contract { when_unavailable, .. }
            | Self::MonthlyQuota { when_unavailable }
            | Self::CostCap { when_unavailable }
            | Self::Metering { when_unavailable } => Some(when_unavailable),
        }
    }

    /// Whether the gate reads the org's plan.
    pub const fn reads_plan(&self) -> bool {
        matches!(
            self,
            Self::Concurrency { .. }
                | Self::MonthlyQuota { .. }
                | Self::CostCap { .. }
                | Self::Contract {
                    limits: LimitSource::EnvelopeOrPlan,
                    ..
                }
        )
    }

    /// Whether the gate cannot be asked without the org's id.
    pub const fn needs_org(&self) -> bool {
        self.reads_plan()
            || matches!(
                self,
                Self::OrgStatus { .. } | Self::ModelPolicy { .. } | Self::LaunchRate { .. }
            )
    }
}

/// A whole rule file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    /// Its name, part of a gauge's name.
    pub name: String,
    /// What happens without an envelope.
    pub when_missing: Choice,
    /// The gates, in order.
    pub gates: Vec<GateRule>,
    /// What happens when the decision service gives no sensible answer.
    pub decision: Choice,
}

impl Rules {
    /// The rule of a gate, if it is listed.
    pub fn gate(&self, gate: Gate) -> Option<&GateRule> {
        self.gates.iter().find(|rule| rule.gate() == gate)
    }

    /// Whether a gate of metering is listed: then a run that passes unchecked has to be billed later.
    pub fn meters(&self) -> bool {
        self.gates
            .iter()
            .any(|rule| rule.gate().dependency() == Some(Dependency::Metering))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(target_arch = "wasm32")]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    #[test]
    fn a_gate_is_read_as_it_was_written() {
        let when_unavailable = Choice::Reject;
        let limits = LimitSource::EnvelopeOrPlan;
        let rules = [
            GateRule::OrgStatus { when_unavailable },
            GateRule::ModelPolicy { when_unavailable },
            GateRule::Concurrency { when_unavailable },
            GateRule::LaunchRate {
                per_minute: 3,
                burst: 4,
            },
            GateRule::Capacity { when_unavailable },
            GateRule::Contract {
                when_unavailable,
                limits,
            },
            GateRule::MonthlyQuota { when_unavailable },
            GateRule::CostCap { when_unavailable },
            GateRule::Metering { when_unavailable },
        ];
        for rule in rules {
            let text = serde_json::to_string(&rule).unwrap();
            assert_eq!(serde_json::from_str::<GateRule>(&text).unwrap(), rule, "{text}");
        }
        let text = r#"{"gate": "contract", "when_unavailable": "admit"}"#;
        let expected = GateRule::Contract {
            when_unavailable: Choice::Admit,
            limits: LimitSource::Envelope,
        };
        assert_eq!(serde_json::from_str::<GateRule>(text).unwrap(), expected);
    }

    #[test]
    fn a_gate_with_a_key_too_few_or_too_many_is_none() {
        for (rest, why) in [
            (r#""gate": "capacity""#, "missing field `when_unavailable`"),
            (r#""gate": "launch_rate", "per_minute": 1"#, "missing field `burst`"),
            (
                r#""gate": "launch_rate", "per_minute": 1, "burst": 1, "when_unavailable": "admit""#,
                r#"the gate launch_rate has no key "when_unavailable""#,
            ),
            (
                r#""gate": "capacity", "when_unavailable": "admit", "limits": "envelope""#,
                r#"the gate capacity has no key "limits""#,
            ),
            (
                r#""gate": "metering", "when_unavailable": "admit", "burst": 1"#,
                r#"the gate metering has no key "burst""#,
            ),
            (
                r#""gate": "contract", "when_unavailable": "admit", "per_minute": 1"#,
                r#"the gate contract has no key "per_minute""#,
            ),
            (
                r#""gate": "capacity", "when_unavailable": "admit", "until": 1"#,
                "unknown field `until`",
            ),
            (
                r#""gate": "contracts", "when_unavailable": "admit""#,
                "unknown variant `contracts`",
            ),
            (r#""when_unavailable": "admit""#, "missing field `gate`"),
            (
                r#""gate": "contract", "when_unavailable": "admit", "limits": null"#,
                "expected value",
            ),
            (
                r#""gate": "capacity", "when_unavailable": "admit", "burst": null"#,
                "invalid type: null",
            ),
            (
                r#""gate": "launch_rate", "per_minute": null, "burst": 1"#,
                "invalid type: null",
            ),
        ] {
            let fault = serde_json::from_str::<GateRule>(&alloc::format!("{{{rest}}}")).unwrap_err();
            assert!(alloc::string::ToString::to_string(&fault).contains(why), "{fault}");
        }
    }
}
