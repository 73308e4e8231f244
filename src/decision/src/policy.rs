//! Policy: who an organization is, which models it may use, who serves them, and what its plan allows.
//!
//! These are answers of a policy store, as values. Absent and unreadable are different: an organization that the store
//! does not know is a denial, one that it could not be asked about is an outage.

use alloc::string::String;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::limits::Limit;

/// What an organization may do at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum OrgStatus {
    /// Everything that its policy and plan allow.
    Active,
    /// Nothing.
    Suspended,
    /// Nothing that this gateway guards: what costs is refused.
    ReadOnly,
}

impl OrgStatus {
    /// The statuses with their names.
    pub const NAMED: [(&'static str, Self); 3] = [
        ("active", Self::Active),
        ("suspended", Self::Suspended),
        ("read_only", Self::ReadOnly),
    ];

    /// The name in files and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Suspended => "suspended",
            Self::ReadOnly => "read_only",
        }
    }
}

/// What a plan allows. An absent figure is unlimited, 0 blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Plan {
    /// Slots held at once, by the whole organization.
    pub concurrency: Limit,
    /// Requests per window, where the envelope stamps no limit.
    pub requests: Limit,
    /// Tokens per window, where the envelope stamps no limit.
    pub tokens: Limit,
    /// Runs in a calendar month (UTC, by the store's clock).
    pub monthly_runs: Limit,
    /// Cost in a calendar month, in micro-dollars.
    pub monthly_cost: Limit,
}

/// A model's exact name, or a prefix followed by `*`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ModelPattern(String);

impl ModelPattern {
    /// The pattern of this text: 1 to 256 bytes, no control characters, at most one `*`, at its end.
    pub fn parse(text: &str) -> Option<Self> {
        let fine = (1..=256).contains(&text.len())
            && !text.chars().any(char::is_control)
            && text.find('*').is_none_or(|at| at.saturating_add(1) == text.len());
        fine.then(|| Self(text.into()))
    }

    /// As it was written.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether this model is meant. Bytes are compared: no case folding, no normalization.
    pub fn matches(&self, model: &str) -> bool {
        match self.0.strip_suffix('*') {
            Some(prefix) => model.starts_with(prefix),
            None => model == self.0,
        }
    }

    /// How closely it means a model: an exact name beats every prefix, a longer prefix a shorter one.
    pub fn closeness(&self) -> (bool, usize) {
        (!self.0.ends_with('*'), self.0.len())
    }
}

/// The value whose pattern means a model most closely.
pub fn closest<'a, T>(entries: &'a [(ModelPattern, T)], model: &str) -> Option<&'a T> {
    let matching = entries.iter().filter(|(pattern, _)| pattern.matches(model));
    matching
        .max_by_key(|(pattern, _)| pattern.closeness())
        .map(|(_, value)| value)
}

/// An organization as the store knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Org {
    /// What it may do at all.
    pub status: OrgStatus,
    /// Its plan's figures; without a plan everything is unlimited.
    pub plan: Plan,
    /// The models that it may use.
    pub models: Vec<ModelPattern>,
}

impl Org {
    /// Whether a model is on its list. An empty list allows none.
    pub fn allows(&self, model: &str) -> bool {
        self.models.iter().any(|pattern| pattern.matches(model))
    }
}

/// What a store said when asked for one thing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lookup<T> {
    /// It knows, or knows that there is none.
    Known(Option<T>),
    /// It could not answer, or its answer is too old.
    Unavailable,
}

/// What the policy store says about one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyView {
    /// The organization.
    pub org: Lookup<Org>,
    /// The provider that serves the model; known to be none if no model was asked about.
    pub provider: Lookup<String>,
    /// What the model costs; known to have no price if no model was asked about.
    pub price: Lookup<Price>,
    /// How long all of this may still be believed, in milliseconds; `None` where it can't grow too old.
    pub fresh_for_ms: Option<u64>,
}

impl PolicyView {
    /// Nothing could be asked.
    pub const UNAVAILABLE: Self = Self {
        org: Lookup::Unavailable,
        provider: Lookup::Unavailable,
        price: Lookup::Unavailable,
        fresh_for_ms: None,
    };
}

/// A price list entry, in micro-dollars per million tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Price {
    /// Input tokens.
    pub input: u64,
    /// Input tokens that the provider had in its cache.
    pub cached_input: u64,
    /// Output tokens.
    pub output: u64,
}

/// An organization as a policy file declares it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeclaredOrg {
    /// What it may do at all.
    pub status: OrgStatus,
    /// The name of its plan.
    pub plan: Option<String>,
    /// The models that it may use.
    pub models: Vec<ModelPattern>,
}

/// A whole policy, as declared.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PolicyFile {
    /// Which provider serves which model.
    pub providers: Vec<(ModelPattern, String)>,
    /// What models cost.
    pub prices: Vec<(ModelPattern, Price)>,
    /// Plans by name.
    pub plans: Vec<(String, Plan)>,
    /// Organizations by id.
    pub orgs: Vec<(String, DeclaredOrg)>,
}

impl PolicyFile {
    /// The organization of this id, with its plan's figures.
    pub fn org(&self, id: &str) -> Option<Org> {
        let (_, declared) = self.orgs.iter().find(|(declared, _)| declared == id)?;
        let plan = declared
            .plan
            .as_ref()
            .and_then(|name| self.plans.iter().find(|(plan, _)| plan == name));
        Some(Org {
            status: declared.status,
            plan: plan.map_or_else(Plan::default, |(_, plan)| *plan),
            models: declared.models.clone(),
        })
    }

    /// The provider that serves a model.
    pub fn provider(&self, model: &str) -> Option<&str> {
        closest(&self.providers, model).map(String::as_str)
    }

    /// What a model costs.
    pub fn price(&self, model: &str) -> Option<&Price> {
        closest(&self.prices, model)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(target_arch = "wasm32")]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    fn pattern(text: &str) -> ModelPattern {
        ModelPattern::parse(text).unwrap()
    }

    #[test]
    fn a_pattern_is_an_exact_name_or_a_prefix() {
        assert!(pattern("gpt-4o").matches("gpt-4o") && !pattern("gpt-4o").matches("gpt-4o-mini"));
        assert!(pattern("claude-*").matches("claude-opus") && !pattern("claude-*").matches("Claude-opus"));
        assert!(pattern("*").matches("anything"));
        for bad in ["", "a*b", "**", "a\n"] {
            assert_eq!(ModelPattern::parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn the_closest_pattern_wins() {
        let entries = [
            (pattern("*"), 1),
            (pattern("gpt-*"), 2),
            (pattern("gpt-4*"), 3),
            (pattern("gpt-4o"), 4),
        ];
        for (model, expected) in [("gpt-4o", 4), ("gpt-4o-mini", 3), ("gpt-3", 2), ("o1", 1)] {
            assert_eq!(closest(&entries, model), Some(&expected), "{model}");
        }
    }
}
