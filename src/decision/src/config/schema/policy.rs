//! A policy file as it is written.

use alloc::collections::BTreeMap;
use alloc::string::{String, ToString as _};
use alloc::vec::Vec;

use schemars::JsonSchema;
use serde_json::json;

use crate::limits::LARGEST_LIMIT;
use crate::policy::OrgStatus;

/// A policy of Portcullis (`portcullis policy apply FILE`): providers, prices, plans and organizations. A model is an exact
/// name, or a prefix that ends in `*`; of several, an exact name counts, else the longest prefix.
#[derive(JsonSchema)]
#[schemars(title = "Portcullis policy", deny_unknown_fields)]
#[expect(dead_code, reason = "it is never made: its schema is what is wanted")]
pub(super) struct PolicyText {
    /// Which provider serves which model.
    #[schemars(default, extend("propertyNames" = model_name()))]
    providers: Option<BTreeMap<String, Named>>,
    /// What models cost, in micro-dollars per million tokens.
    #[schemars(default, extend("propertyNames" = model_name()))]
    prices: Option<BTreeMap<String, Price>>,
    /// Plans by name.
    #[schemars(default, extend("propertyNames" = id()))]
    plans: Option<BTreeMap<String, Plan>>,
    /// Organizations by id.
    #[schemars(default, extend("propertyNames" = id()))]
    orgs: Option<BTreeMap<String, Organization>>,
}

/// A name.
#[derive(JsonSchema)]
#[schemars(transparent)]
#[expect(dead_code, reason = "as above")]
struct Named(#[schemars(length(min = 1))] String);

/// What a model costs, in micro-dollars per million tokens.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
#[expect(dead_code, reason = "as above")]
struct Price {
    /// Input tokens.
    #[schemars(range(max = LARGEST_LIMIT))]
    input: u64,
    /// Input tokens that the provider had in its cache. Left out: as input.
    #[schemars(default, with = "u64", range(max = LARGEST_LIMIT))]
    cached_input: Option<u64>,
    /// Output tokens.
    #[schemars(range(max = LARGEST_LIMIT))]
    output: u64,
}

/// What a plan allows. Left out or `null`: unlimited; 0 blocks.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
#[expect(dead_code, reason = "as above")]
struct Plan {
    /// Slots held at once, by the whole organization.
    #[schemars(default, range(max = LARGEST_LIMIT))]
    concurrency: Option<u64>,
    /// Requests per window, where the envelope stamps no limit.
    #[schemars(default, range(max = LARGEST_LIMIT))]
    requests: Option<u64>,
    /// Tokens per window, where the envelope stamps no limit.
    #[schemars(default, range(max = LARGEST_LIMIT))]
    tokens: Option<u64>,
    /// Runs in a calendar month (UTC).
    #[schemars(default, range(max = LARGEST_LIMIT))]
    monthly_runs: Option<u64>,
    /// Cost in a calendar month (UTC), in micro-dollars.
    #[schemars(default, range(max = LARGEST_LIMIT))]
    monthly_cost: Option<u64>,
}

/// An organization.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
#[expect(dead_code, reason = "as above")]
struct Organization {
    /// What it may do at all.
    status: OrgStatus,
    /// The name of its plan, one of this file.
    #[schemars(default)]
    plan: Option<String>,
    /// The models that it may use.
    #[schemars(default)]
    models: Vec<Model>,
}

/// A model's exact name, or a prefix that ends in `*`.
#[derive(JsonSchema)]
#[schemars(transparent)]
#[expect(dead_code, reason = "as above")]
struct Model(#[schemars(length(min = 1, max = 256), regex(pattern = "^[^*]*\\*?$"))] String);

fn model_name() -> serde_json::Value {
    json!({"minLength": 1, "maxLength": 256, "pattern": "^[^*]*\\*?$"})
}

fn id() -> serde_json::Value {
    json!({"minLength": 1, "maxLength": 256})
}
