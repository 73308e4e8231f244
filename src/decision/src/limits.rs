//! Scopes, resources and limits: whom a limit binds, what it counts, and what a figure means.
//!
//! Absent, zero and a number are three variants. Nothing here uses a sentinel for "unlimited".

use core::num::NonZeroU64;

use serde::{Deserialize, Serialize};

/// The largest figure that a limit may have: integers up to here survive every JSON reader (RFC 8259, section 6) and
/// Redis' Lua numbers, which are IEEE 754 doubles.
pub const LARGEST_LIMIT: u64 = (1 << 53) - 1;

/// Whom a limit binds. The first three are the contract's, the rest are the operator's tiers. The order breaks ties.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// The owner of the key or account.
    Owner,
    /// The organization.
    Org,
    /// The credential.
    Auth,
    /// Everything behind this service.
    Platform,
    /// A graph (application) id.
    Graph,
    /// The organization, as the operator's tier.
    Organization,
    /// The pair of organization and model.
    OrganizationModel,
    /// A configured lane, such as `batch`.
    Lane,
}

impl Scope {
    /// The scopes that an envelope can stamp, in the order that breaks ties.
    pub const CONTRACT: [Self; 3] = [Self::Owner, Self::Org, Self::Auth];

    /// All scopes.
    pub const ALL: [Self; 8] = [
        Self::Owner,
        Self::Org,
        Self::Auth,
        Self::Platform,
        Self::Graph,
        Self::Organization,
        Self::OrganizationModel,
        Self::Lane,
    ];

    /// The name in replies, keys and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Owner => "owner",
            Self::Org => "org",
            Self::Auth => "auth",
            Self::Platform => "platform",
            Self::Graph => "graph",
            Self::Organization => "organization",
            Self::OrganizationModel => "organization_model",
            Self::Lane => "lane",
        }
    }
}

/// What a limit counts. The order breaks ties.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Resource {
    /// Requests per window.
    Requests,
    /// Tokens per window.
    Tokens,
    /// Slots held at this moment.
    Concurrency,
}

impl Resource {
    /// All resources, in the order that breaks ties.
    pub const ALL: [Self; 3] = [Self::Requests, Self::Tokens, Self::Concurrency];

    /// The name in replies, keys and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::Tokens => "tokens",
            Self::Concurrency => "concurrency",
        }
    }
}

/// A figure of a contract, a plan or a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Limit {
    /// No figure was given: this scope is not limited in this resource.
    #[default]
    Unlimited,
    /// The figure is 0: nothing may pass, and that is known without asking anybody.
    Blocked,
    /// At most this many.
    AtMost(NonZeroU64),
}

impl Limit {
    /// The limit that a figure stands for.
    pub const fn of(figure: u64) -> Self {
        match NonZeroU64::new(figure) {
            Some(figure) => Self::AtMost(figure),
            None => Self::Blocked,
        }
    }

    /// The figure, or `None` when unlimited.
    pub const fn figure(self) -> Option<u64> {
        match self {
            Self::Unlimited => None,
            Self::Blocked => Some(0),
            Self::AtMost(figure) => Some(figure.get()),
        }
    }
}

impl Serialize for Limit {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.figure().serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Limit {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Option::<u64>::deserialize(deserializer)?.map_or(Self::Unlimited, Self::of))
    }
}

/// The limits of one scope. Absent figures are left out on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ScopeLimits {
    /// Requests per window.
    #[serde(skip_serializing_if = "is_unlimited")]
    pub requests: Limit,
    /// Tokens per window.
    #[serde(skip_serializing_if = "is_unlimited")]
    pub tokens: Limit,
    /// Slots held at once.
    #[serde(skip_serializing_if = "is_unlimited")]
    pub concurrency: Limit,
}

fn is_unlimited(limit: &Limit) -> bool {
    *limit == Limit::Unlimited
}

impl ScopeLimits {
    /// The limit of one resource.
    pub const fn get(&self, resource: Resource) -> Limit {
        match resource {
            Resource::Requests => self.requests,
            Resource::Tokens => self.tokens,
            Resource::Concurrency => self.concurrency,
        }
    }

    /// Sets the limit of one resource.
    pub const fn set(&mut self, resource: Resource, limit: Limit) {
        match resource {
            Resource::Requests => self.requests = limit,
            Resource::Tokens => self.tokens = limit,
            Resource::Concurrency => self.concurrency = limit,
        }
    }

    /// Whether no resource is limited.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The limits that an envelope has stamped, by contract scope.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StampedLimits {
    /// Limits of the owner.
    #[serde(skip_serializing_if = "ScopeLimits::is_empty")]
    pub owner: ScopeLimits,
    /// Limits of the organization.
    #[serde(skip_serializing_if = "ScopeLimits::is_empty")]
    pub org: ScopeLimits,
    /// Limits of the credential.
    #[serde(skip_serializing_if = "ScopeLimits::is_empty")]
    pub auth: ScopeLimits,
}

impl StampedLimits {
    /// The limits of one contract scope; a tier's scope has none here.
    pub fn of(&self, scope: Scope) -> ScopeLimits {
        match scope {
            Scope::Owner => self.owner,
            Scope::Org => self.org,
            Scope::Auth => self.auth,
            _ => ScopeLimits::default(),
        }
    }

    /// Sets one figure.
    pub fn set(&mut self, scope: Scope, resource: Resource, limit: Limit) {
        match scope {
            Scope::Owner => self.owner.set(resource, limit),
            Scope::Org => self.org.set(resource, limit),
            Scope::Auth => self.auth.set(resource, limit),
            _ => {}
        }
    }

    /// Every figure that is stamped, in the order that breaks ties.
    pub fn stamped(&self) -> impl Iterator<Item = (Scope, Resource, Limit)> + '_ {
        Scope::CONTRACT
            .into_iter()
            .flat_map(move |scope| Resource::ALL.map(|resource| (scope, resource, self.of(scope).get(resource))))
            .filter(|(_, _, limit)| *limit != Limit::Unlimited)
    }

    /// Whether nothing is stamped.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The first figure of zero, in the order that breaks ties: a denial that is known without asking anybody.
    pub fn blocked(&self) -> Option<(Scope, Resource)> {
        self.stamped()
            .find(|(_, _, limit)| *limit == Limit::Blocked)
            .map(|(scope, resource, _)| (scope, resource))
    }
}
