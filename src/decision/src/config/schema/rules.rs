//! A rule file as it is written. The gates are the real ones ([`GateRule`]).

use alloc::borrow::Cow;
use alloc::string::{String, ToString as _};
use alloc::vec::Vec;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

use crate::rules::{Choice, GateRule};

/// The largest allowance or rate in a minute.
const LARGEST_RATE: u64 = 1_000_000_000;

/// Rules of Portcullis: which gates run, in which order, and what happens when each cannot answer. There are no defaults for
/// that choice.
#[derive(JsonSchema)]
#[schemars(title = "Portcullis rules", deny_unknown_fields)]
#[expect(dead_code, reason = "it is never made: its schema is what is wanted")]
pub(super) struct RulesFile {
    /// Its name, which becomes part of a gauge's name.
    #[schemars(regex(pattern = "^[a-z][a-z0-9_-]{0,63}$"))]
    name: String,
    /// The envelope: the trusted headers that say who is calling.
    envelope: Missing,
    /// The gates, in the order in which they run. The first that denies is the answer.
    #[schemars(length(min = 1))]
    gates: Vec<GateRule>,
    /// The decision service itself, seen from the filter.
    decision: Unavailable,
    #[schemars(default)]
    allow_passthrough: Retired,
}

/// What happens without an envelope.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
#[expect(dead_code, reason = "as above")]
struct Missing {
    /// A request without any envelope: no owner id and no limit.
    when_missing: Choice,
}

/// What happens without an answer.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
#[expect(dead_code, reason = "as above")]
struct Unavailable {
    /// No sensible answer of the service in time.
    when_unavailable: Choice,
}

impl JsonSchema for Choice {
    fn schema_name() -> Cow<'static, str> {
        "Choice".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "oneOf": [
                {"type": "string", "const": "reject", "description": "Fail closed."},
                {"type": "string", "const": "admit", "description": "Fail open; logged and counted."},
                {
                    "type": "object",
                    "description": "Fail open within an emergency allowance per class, then closed.",
                    "properties": {
                        "admit": {
                            "type": "object",
                            "properties": {
                                "max_per_minute": {
                                    "type": "integer",
                                    "minimum": 1,
                                    "maximum": LARGEST_RATE,
                                    "description": "Requests that may pass in a minute, of each filter VM or service process."
                                }
                            },
                            "required": ["max_per_minute"],
                            "additionalProperties": false
                        }
                    },
                    "required": ["admit"],
                    "additionalProperties": false
                }
            ]
        })
    }
}

/// A switch that was retired and enables nothing.
#[derive(Default, serde::Serialize)]
#[serde(transparent)]
pub(super) struct Retired(Option<bool>);

impl JsonSchema for Retired {
    fn schema_name() -> Cow<'static, str> {
        "Retired".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "Retired: it enables nothing, and only a value that switches it off is taken. Remove it.",
            "deprecated": true,
            "enum": [null, false, 0, "", "0", "false"]
        })
    }
}
