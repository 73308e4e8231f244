//! Verdicts: what the gates together have said. A denial is a value, not an error.

use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::class::{Code, Dependency, FailureClass};
use crate::limits::{Resource, Scope};
use crate::rules::Gate;

/// Where a limit stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitState {
    /// Whom it binds.
    pub scope: Scope,
    /// What it counts.
    pub resource: Resource,
    /// The figure.
    pub limit: u64,
    /// What is left of it.
    pub remaining: u64,
    /// Milliseconds until the window ends, by the store's clock.
    pub reset_ms: u64,
    /// The window, in seconds.
    pub window_s: u64,
}

/// A gate that was unavailable, and opened by the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bypass {
    /// The class that was opened.
    pub class: FailureClass,
    /// The gate that was not asked.
    pub gate: Gate,
}

/// The request may go on.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Admission {
    /// Gates that were opened, in order.
    pub bypassed: Vec<Bypass>,
    /// There is no limiter: nothing was counted.
    pub unenforced: bool,
    /// The tightest contract limit.
    pub tightest: Option<LimitState>,
    /// A slot is held; it lapses after this many milliseconds without renewal.
    pub slot_ttl_ms: Option<u64>,
    /// What its token windows were charged until its usage is known; absent if no token limit binds it.
    pub held_tokens: Option<u64>,
    /// Admissions beside this one that the filter may hand out by itself.
    pub lease: Option<Grant>,
}

/// A block of admissions that the operation has charged beside its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// How many.
    pub requests: u64,
    /// Tokens for all of them; absent if no token limit binds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
    /// The most that one of them holds: the smallest token limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub largest_hold: Option<u64>,
    /// How long they may be handed out, in milliseconds from when the service was asked.
    pub ends_in_ms: u64,
}

impl Admission {
    /// The first gate of each class that was opened: what is counted and logged, so that a count is one of requests.
    pub fn first_of_each_class(&self) -> impl Iterator<Item = &Bypass> {
        let all = &self.bypassed;
        all.iter().enumerate().filter_map(|(at, bypass)| {
            let is_first = !all.iter().take(at).any(|earlier| earlier.class == bypass.class);
            is_first.then_some(bypass)
        })
    }
}

/// The request may not go on, for a reason that is known.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Denial {
    /// The word for the client; its class follows from it.
    pub code: Code,
    /// The gate that denied; the envelope and the request's form belong to none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gate: Option<Gate>,
    /// The limit that denied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<LimitState>,
    /// Whole seconds after which a retry can succeed, or a window for a limit of 0; absent where waiting means nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_s: Option<u64>,
}

impl Denial {
    /// A denial that no limit is behind.
    pub const fn plain(code: Code, gate: Option<Gate>) -> Self {
        Self {
            code,
            gate,
            limit: None,
            retry_after_s: None,
        }
    }

    /// A denial by a contract limit of 0, which is known without asking anybody.
    pub const fn blocked(scope: Scope, resource: Resource, window_s: u64) -> Self {
        let limit = LimitState {
            scope,
            resource,
            limit: 0,
            remaining: 0,
            reset_ms: window_s.saturating_mul(1000),
            window_s,
        };
        Self {
            code: contract_code(resource),
            gate: Some(Gate::Contract),
            limit: Some(limit),
            retry_after_s: Some(window_s),
        }
    }

    /// A denial by the launch rate: this many a minute, the next one free after `wait_ms`.
    pub fn launch_rate(per_minute: u64, wait_ms: u64) -> Self {
        let limit = LimitState {
            scope: Scope::Org,
            resource: Resource::Requests,
            limit: per_minute,
            remaining: 0,
            reset_ms: wait_ms,
            window_s: 60,
        };
        Self {
            code: Code::LaunchRateLimited,
            gate: Some(Gate::LaunchRate),
            limit: Some(limit),
            retry_after_s: Some(wait_ms.div_ceil(1000).clamp(1, 60)),
        }
    }

    /// The same denial, said again this much later.
    #[must_use]
    pub fn later(&self, ms: u64) -> Self {
        let limit = self.limit.map(|limit| LimitState {
            // A limit of 0 never ends.
            reset_ms: if limit.limit == 0 {
                limit.reset_ms
            } else {
                limit.reset_ms.saturating_sub(ms)
            },
            ..limit
        });
        let retry_after_s = match (self.retry_after_s, limit) {
            (Some(_), Some(limit)) => Some(limit.reset_ms.div_ceil(1000).clamp(1, limit.window_s.max(1))),
            (retry_after_s, _) => retry_after_s,
        };
        Self {
            limit,
            retry_after_s,
            ..self.clone()
        }
    }

    /// Whether a client that waits has a chance.
    pub fn waiting_helps(&self) -> bool {
        self.code.waiting_helps() && self.limit.is_none_or(|limit| limit.limit > 0)
    }
}

/// The code of a spent contract limit.
pub const fn contract_code(resource: Resource) -> Code {
    match resource {
        Resource::Requests => Code::RateLimited,
        Resource::Tokens => Code::TokensLimited,
        Resource::Concurrency => Code::ConcurrencyLimited,
    }
}

/// A dependency could not answer, and the rules say reject.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unavailability {
    /// What did not answer.
    pub dependency: Dependency,
    /// The gate that asked it.
    pub gate: Option<Gate>,
}

/// What the gates have said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Go on.
    Admit(Admission),
    /// A known denial.
    Deny(Denial),
    /// Not decided, and closed.
    Unavailable(Unavailability),
}

impl Verdict {
    /// The failure class, or `None` for an admission.
    pub fn class(&self) -> Option<FailureClass> {
        match self {
            Self::Admit(_) => None,
            Self::Deny(denial) => denial.code.class(),
            Self::Unavailable(unavailable) => Some(unavailable.dependency.class()),
        }
    }
}
