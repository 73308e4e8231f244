//! The failure classes: every way in which a request can fail to pass, with its status, its codes and its messages.
//!
//! This is the only place that knows a status code. A class says what *kind* of answer it is (the caller's policy, the
//! caller's quota, the operator's capacity, an outage), and no class can turn into another on the way to the client:
//! the class is a type, not a number that is guessed back from a status.

use serde::{Deserialize, Serialize};

/// A dependency whose absence makes an answer unavailable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dependency {
    /// Counters and slots: the gates `concurrency`, `capacity` and `contract`.
    Limiter,
    /// Orgs, models and plans: the gates `org_status` and `model_policy`.
    Policy,
    /// Runs and cost: the gates `monthly_quota`, `cost_cap` and `metering`.
    Metering,
    /// The decision service itself, as seen from the filter.
    Decision,
}

impl Dependency {
    /// The class that an answer has when this dependency could not give one.
    pub const fn class(self) -> FailureClass {
        match self {
            Self::Limiter => FailureClass::LimiterUnavailable,
            Self::Policy => FailureClass::PolicyUnavailable,
            Self::Metering => FailureClass::MeteringUnavailable,
            Self::Decision => FailureClass::DecisionUnavailable,
        }
    }

    /// The name in logs, metrics and on the wire.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Limiter => "limiter",
            Self::Policy => "policy",
            Self::Metering => "metering",
            Self::Decision => "decision",
        }
    }
}

/// Why a request was not let through by its right. Ordered as in the table of failure classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureClass {
    /// No envelope, and the rules require one.
    EnvelopeMissing,
    /// Badly signed, malformed, duplicated or partial.
    EnvelopeMalformed,
    /// The model is needed and cannot be read without doubt.
    RequestMalformed,
    /// The policy says no.
    PolicyDenied,
    /// The policy allows, and nothing serves the model.
    ProviderUnconfigured,
    /// A contract, plan or concurrency limit is used up.
    QuotaExhausted,
    /// An operator's tier is used up.
    CapacityExhausted,
    /// The limiter could not answer in time, or not sensibly.
    LimiterUnavailable,
    /// The policy store could not answer in time, or not sensibly.
    PolicyUnavailable,
    /// The metering store could not answer in time, or not sensibly.
    MeteringUnavailable,
    /// The decision service could not answer in time, or not sensibly.
    DecisionUnavailable,
}

impl FailureClass {
    /// All classes, in the order of the table.
    pub const ALL: [Self; 11] = [
        Self::EnvelopeMissing,
        Self::EnvelopeMalformed,
        Self::RequestMalformed,
        Self::PolicyDenied,
        Self::ProviderUnconfigured,
        Self::QuotaExhausted,
        Self::CapacityExhausted,
        Self::LimiterUnavailable,
        Self::PolicyUnavailable,
        Self::MeteringUnavailable,
        Self::DecisionUnavailable,
    ];

    /// The name in `x-portcullis-class`, logs, metrics and on the wire.
    pub const fn name(self) -> &'static str {
        match self {
            Self::EnvelopeMissing => "envelope_missing",
            Self::EnvelopeMalformed => "envelope_malformed",
            Self::RequestMalformed => "request_malformed",
            Self::PolicyDenied => "policy_denied",
            Self::ProviderUnconfigured => "provider_unconfigured",
            Self::QuotaExhausted => "quota_exhausted",
            Self::CapacityExhausted => "capacity_exhausted",
            Self::LimiterUnavailable => "limiter_unavailable",
            Self::PolicyUnavailable => "policy_unavailable",
            Self::MeteringUnavailable => "metering_unavailable",
            Self::DecisionUnavailable => "decision_unavailable",
        }
    }

    /// Whether a rule file may open this class. Known denials cannot be opened.
    pub const fn can_be_opened(self) -> bool {
        matches!(
            self,
            Self::EnvelopeMissing
                | Self::LimiterUnavailable
                | Self::PolicyUnavailable
                | Self::MeteringUnavailable
                | Self::DecisionUnavailable
        )
    }
}

/// The `code` of a reply: the stable word that a client may program against.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
#[allow(
    missing_docs,
    reason = "each code is its own name, and its class and message stand below"
)]
pub enum Code {
    EnvelopeMissing,
    EnvelopeUntrusted,
    EnvelopeMalformed,
    EnvelopePartial,
    ModelRequired,
    ModelAmbiguous,
    BodyUnreadable,
    BodyTooLarge,
    ModelNotAllowed,
    OrgSuspended,
    OrgReadOnly,
    OrgUnknown,
    ProviderNotConfigured,
    RateLimited,
    TokensLimited,
    ConcurrencyLimited,
    LaunchRateLimited,
    RunQuotaExceeded,
    CostCapExceeded,
    CapacityExhausted,
    ServiceDegraded,
}

impl Code {
    /// The word as the client sees it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::EnvelopeMissing => "ENVELOPE_MISSING",
            Self::EnvelopeUntrusted => "ENVELOPE_UNTRUSTED",
            Self::EnvelopeMalformed => "ENVELOPE_MALFORMED",
            Self::EnvelopePartial => "ENVELOPE_PARTIAL",
            Self::ModelRequired => "MODEL_REQUIRED",
            Self::ModelAmbiguous => "MODEL_AMBIGUOUS",
            Self::BodyUnreadable => "BODY_UNREADABLE",
            Self::BodyTooLarge => "BODY_TOO_LARGE",
            Self::ModelNotAllowed => "MODEL_NOT_ALLOWED",
            Self::OrgSuspended => "ORG_SUSPENDED",
            Self::OrgReadOnly => "ORG_READ_ONLY",
            Self::OrgUnknown => "ORG_UNKNOWN",
            Self::ProviderNotConfigured => "PROVIDER_NOT_CONFIGURED",
            Self::RateLimited => "RATE_LIMITED",
            Self::TokensLimited => "TOKENS_LIMITED",
            Self::ConcurrencyLimited => "CONCURRENCY_LIMITED",
            Self::LaunchRateLimited => "LAUNCH_RATE_LIMITED",
            Self::RunQuotaExceeded => "RUN_QUOTA_EXCEEDED",
            Self::CostCapExceeded => "COST_CAP_EXCEEDED",
            Self::CapacityExhausted => "CAPACITY_EXHAUSTED",
            Self::ServiceDegraded => "SERVICE_DEGRADED",
        }
    }

    /// The class of a denial with this code; `None` for `SERVICE_DEGRADED`, whose class is the dependency's.
    pub const fn class(self) -> Option<FailureClass> {
        Some(match self {
            Self::EnvelopeMissing => FailureClass::EnvelopeMissing,
            Self::EnvelopeUntrusted | Self::EnvelopeMalformed | Self::EnvelopePartial => {
                FailureClass::EnvelopeMalformed
            }
            Self::ModelRequired | Self::ModelAmbiguous | Self::BodyUnreadable | Self::BodyTooLarge => {
                FailureClass::RequestMalformed
            }
            Self::ModelNotAllowed | Self::OrgSuspended | Self::OrgReadOnly | Self::OrgUnknown => {
                FailureClass::PolicyDenied
            }
            Self::ProviderNotConfigured => FailureClass::ProviderUnconfigured,
            Self::RateLimited
            | Self::TokensLimited
            | Self::ConcurrencyLimited
            | Self::LaunchRateLimited
            | Self::RunQuotaExceeded
            | Self::CostCapExceeded => FailureClass::QuotaExhausted,
            Self::CapacityExhausted => FailureClass::CapacityExhausted,
            Self::ServiceDegraded => return None,
        })
    }

    /// The HTTP status (RFC 9110; 429 from RFC 6585).
    pub const fn status(self) -> u16 {
        match self {
            Self::EnvelopeMissing
            | Self::EnvelopeUntrusted
            | Self::EnvelopeMalformed
            | Self::EnvelopePartial
            | Self::CapacityExhausted
            | Self::ServiceDegraded => 503,
            Self::ModelRequired | Self::ModelAmbiguous | Self::BodyUnreadable => 400,
            Self::BodyTooLarge => 413,
            Self::ModelNotAllowed | Self::OrgSuspended | Self::OrgReadOnly | Self::OrgUnknown => 403,
            Self::ProviderNotConfigured => 501,
            Self::RateLimited
            | Self::TokensLimited
            | Self::ConcurrencyLimited
            | Self::LaunchRateLimited
            | Self::RunQuotaExceeded
            | Self::CostCapExceeded => 429,
        }
    }

    /// The gRPC status: RESOURCE_EXHAUSTED, PERMISSION_DENIED, UNAVAILABLE, UNIMPLEMENTED, INVALID_ARGUMENT.
    pub const fn grpc_status(self) -> u8 {
        match self.status() {
            429 => 8,
            403 => 7,
            501 => 12,
            400 | 413 => 3,
            _ => 14,
        }
    }

    /// The sentence for the client. It never names a store, a tier's size or another tenant.
    pub const fn message(self) -> &'static str {
        match self {
            Self::EnvelopeMissing => "the request carries no admission envelope",
            Self::EnvelopeUntrusted => "the admission envelope is not signed by a known edge",
            Self::EnvelopeMalformed => "the admission envelope is malformed",
            Self::EnvelopePartial => "the admission envelope is incomplete",
            Self::ModelRequired => "the request names no model",
            Self::ModelAmbiguous => "the request names its model ambiguously",
            Self::BodyUnreadable => "the request body cannot be read",
            Self::BodyTooLarge => "the request body is too large",
            Self::ModelNotAllowed => "the model is not allowed for this organization",
            Self::OrgSuspended => "the organization is suspended",
            Self::OrgReadOnly => "the organization is read-only",
            Self::OrgUnknown => "the organization is not known",
            Self::ProviderNotConfigured => "no provider is configured for the model",
            Self::RateLimited | Self::TokensLimited | Self::ConcurrencyLimited => {
                "shared inference rate limit exceeded"
            }
            Self::LaunchRateLimited => "launch rate limit exceeded",
            Self::RunQuotaExceeded => "monthly run quota exceeded",
            Self::CostCapExceeded => "monthly cost cap exceeded",
            Self::CapacityExhausted => "the operator's capacity is exhausted",
            Self::ServiceDegraded => "a dependency of admission is unavailable",
        }
    }

    /// Whether waiting can cure this denial at all. A limit of zero is the caller's to add.
    pub const fn waiting_helps(self) -> bool {
        matches!(
            self,
            Self::RateLimited
                | Self::TokensLimited
                | Self::ConcurrencyLimited
                | Self::LaunchRateLimited
                | Self::CapacityExhausted
                | Self::ServiceDegraded
        )
    }
}

/// The HTTP status of a gRPC status that [`Code::grpc_status`] gives; of the two that are 3, the one that needs no body.
pub const fn status_of_grpc(grpc_status: u8) -> u16 {
    match grpc_status {
        8 => 429,
        7 => 403,
        12 => 501,
        3 => 400,
        _ => 503,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(target_arch = "wasm32")]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    #[test]
    fn names_on_the_wire_are_the_names_in_the_reply() {
        for class in FailureClass::ALL {
            assert_eq!(serde_json::to_value(class).unwrap(), class.name());
        }
        for code in [
            Code::RateLimited,
            Code::EnvelopePartial,
            Code::ServiceDegraded,
            Code::OrgReadOnly,
        ] {
            assert_eq!(serde_json::to_value(code).unwrap(), code.name());
        }
    }

    #[test]
    fn only_what_could_not_be_decided_can_be_opened() {
        let open: std::vec::Vec<_> = FailureClass::ALL
            .iter()
            .filter(|c| c.can_be_opened())
            .map(|c| c.name())
            .collect();
        assert_eq!(
            open,
            [
                "envelope_missing",
                "limiter_unavailable",
                "policy_unavailable",
                "metering_unavailable",
                "decision_unavailable"
            ]
        );
    }

    #[test]
    fn a_quota_is_never_an_outage_and_an_outage_never_a_quota() {
        for code in [
            Code::RateLimited,
            Code::TokensLimited,
            Code::ConcurrencyLimited,
            Code::RunQuotaExceeded,
        ] {
            assert_eq!((code.status(), code.grpc_status()), (429, 8));
        }
        assert_eq!(
            (Code::ServiceDegraded.status(), Code::ServiceDegraded.grpc_status()),
            (503, 14)
        );
    }
}
