//! What filter and service say to each other: JSON bodies of `POST /v1/decide` and `POST /v1/settle`.
//!
//! Requests refuse unknown keys: a key that an older service does not know might be a restriction, and ignoring it would
//! be a check that is silently not made. Answers tolerate them, but not an unknown verdict. Both are UTF-8 as a whole
//! (RFC 8259, section 8.1), also where they are not looked at.

use alloc::borrow::Cow;
use alloc::string::String;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::class::{Code, Dependency};
use crate::config::{Mode, Profile};
use crate::limits::StampedLimits;
use crate::operation::OperationId;
use crate::rules::{Gate, GateRule};
use crate::verdict::{Admission, Bypass, Denial, Grant, LimitState, Unavailability, Verdict};

/// Path of a decision.
pub const DECIDE_PATH: &str = "/v1/decide";
/// Path of what streams leave behind.
pub const SETTLE_PATH: &str = "/v1/settle";
/// Largest answer that the filter reads, in bytes.
pub const LARGEST_ANSWER: usize = 64 * 1024;

/// Who is calling. Ids are compared byte for byte.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Subject {
    /// The owner; never empty in a well-formed envelope.
    pub owner: String,
    /// The organization.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub org: Option<String>,
    /// The credential.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auth: Option<String>,
    /// The graph.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub graph: Option<String>,
    /// The lane.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lane: Option<String>,
    /// The model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
}

/// A request for one decision.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecideRequest {
    /// Makes charge and give-back idempotent.
    pub op: OperationId,
    /// The filter's profile; a service of another one does not decide.
    pub profile: Profile,
    /// The rules' name, for logs and metrics.
    pub rules: String,
    /// Whether a rejection will be carried out.
    pub mode: Mode,
    /// The gates, in order.
    pub gates: Vec<GateRule>,
    /// How long the answer may take, in milliseconds.
    pub budget_ms: u64,
    /// A window of contract limits, in seconds.
    pub window_s: u64,
    /// Who is calling.
    pub subject: Subject,
    /// What the envelope allows.
    #[serde(default, skip_serializing_if = "StampedLimits::is_empty")]
    pub limits: StampedLimits,
    /// Tokens to hold, before clamping.
    pub tokens: u64,
    /// The client's `x-request-id`, which only correlates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// The second attempt at this operation: its budget is what the first has left, and says nothing of a configuration.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub retry: bool,
    /// The filter would hand out admissions by itself; absent where the decision has to be exact.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<LeaseAsk>,
}

/// What a filter would hand out by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeaseAsk {
    /// The most admissions of one block.
    pub max_requests: u64,
    /// How long a block may be handed out, in milliseconds.
    pub max_age_ms: u64,
    /// Tells gateways apart: each has a memory of its own.
    pub gateway: OperationId,
    /// No request waits for this decision: all of the block is to be handed out.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub ahead: bool,
}

/// An answer: the request's operation id and a verdict.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecideAnswer {
    /// Echo of the request's id.
    pub op: OperationId,
    /// The verdict.
    pub verdict: Verdict,
}

/// An answer as it stands in JSON, all kinds in one: it is read and written in one pass, where a flattened verdict would be
/// kept as a tree in between.
#[derive(Serialize, Deserialize)]
struct FlatAnswer<'a> {
    op: OperationId,
    verdict: Word,
    #[serde(default, skip_serializing_if = "<[Bypass]>::is_empty")]
    bypassed: Cow<'a, [Bypass]>,
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    unenforced: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    tightest: Option<LimitState>,
    #[serde(skip_serializing_if = "Option::is_none")]
    slot_ttl_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    held_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lease: Option<Grant>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dependency: Option<Dependency>,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<Code>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gate: Option<Gate>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit: Option<LimitState>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after_s: Option<u64>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Word {
    Admit,
    Deny,
    Unavailable,
}

impl FlatAnswer<'_> {
    /// An answer of this kind that says nothing else.
    const fn plain(op: OperationId, verdict: Word) -> Self {
        Self {
            op,
            verdict,
            bypassed: Cow::Borrowed(&[]),
            unenforced: false,
            tightest: None,
            slot_ttl_ms: None,
            held_tokens: None,
            lease: None,
            dependency: None,
            code: None,
            gate: None,
            limit: None,
            retry_after_s: None,
        }
    }
}

impl Serialize for DecideAnswer {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let flat = match &self.verdict {
            Verdict::Admit(admission) => FlatAnswer {
                bypassed: Cow::Borrowed(&admission.bypassed),
                unenforced: admission.unenforced,
                tightest: admission.tightest,
                slot_ttl_ms: admission.slot_ttl_ms,
                held_tokens: admission.held_tokens,
                lease: admission.lease,
                ..FlatAnswer::plain(self.op, Word::Admit)
            },
            Verdict::Deny(denial) => FlatAnswer {
                code: Some(denial.code),
                gate: denial.gate,
                limit: denial.limit,
                retry_after_s: denial.retry_after_s,
                ..FlatAnswer::plain(self.op, Word::Deny)
            },
            Verdict::Unavailable(unavailable) => FlatAnswer {
                dependency: Some(unavailable.dependency),
                gate: unavailable.gate,
                ..FlatAnswer::plain(self.op, Word::Unavailable)
            },
        };
        flat.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for DecideAnswer {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let flat = FlatAnswer::deserialize(deserializer)?;
        let verdict = match flat.verdict {
            Word::Admit => Verdict::Admit(Admission {
                bypassed: flat.bypassed.into_owned(),
                unenforced: flat.unenforced,
                tightest: flat.tightest,
                slot_ttl_ms: flat.slot_ttl_ms,
                held_tokens: flat.held_tokens,
                lease: flat.lease,
            }),
            Word::Deny => Verdict::Deny(Denial {
                code: flat.code.ok_or_else(|| serde::de::Error::missing_field("code"))?,
                gate: flat.gate,
                limit: flat.limit,
                retry_after_s: flat.retry_after_s,
            }),
            Word::Unavailable => Verdict::Unavailable(Unavailability {
                dependency: flat
                    .dependency
                    .ok_or_else(|| serde::de::Error::missing_field("dependency"))?,
                gate: flat.gate,
            }),
        };
        Ok(Self { op: flat.op, verdict })
    }
}

/// What streams have left behind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SettleRequest {
    /// The filter's profile.
    pub profile: Profile,
    /// Streams that have ended and leave nothing to settle: their slots are freed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub releases: Vec<OperationId>,
    /// Streams that have ended: their slots are freed too, and their holds replaced by what they used.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub settles: Vec<Settlement>,
    /// Parts of blocks that were not handed out, or not used.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub returns: Vec<Return>,
    /// Slots of streams that go on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub renewals: Vec<OperationId>,
    /// Decisions that nobody waits for any more: whatever they took is given back, whichever arrives first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cancels: Vec<OperationId>,
    /// Requests that the filter let pass without a decision while its rules list `metering`: to be billed later.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unmetered: Vec<Unmetered>,
}

/// What a stream that has ended has used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settlement {
    /// Makes it idempotent: an operation is settled once.
    pub op: OperationId,
    /// What its token windows are charged in place of its hold; absent if it held none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
    /// What is priced and added to its org's month; absent where the rules record no runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bill: Option<Bill>,
}

/// A part of a block that goes back: what nobody was admitted by, or what a request that was has not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Return {
    /// Makes it idempotent.
    pub id: OperationId,
    /// The operation that charged the block.
    pub lease: OperationId,
    /// Requests that go back.
    #[serde(default)]
    pub requests: u64,
    /// Tokens that go back; negative where more was used than was held.
    #[serde(default)]
    pub tokens: i64,
}

/// The tokens of one call, to be priced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bill {
    /// Who pays.
    pub org: String,
    /// The model, by whose price.
    pub model: String,
    /// Input tokens, cached ones included.
    pub input: u64,
    /// The part of the input that came from the provider's cache.
    #[serde(default)]
    pub cached_input: u64,
    /// Output tokens.
    pub output: u64,
    /// The provider did not say: these are the tokens that the request had reserved.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub is_hold: bool,
}

/// A request that went on and was recorded nowhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unmetered {
    /// Makes its record idempotent.
    pub op: OperationId,
    /// Whose run it is; absent if the envelope named no organization.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub org: Option<String>,
    /// The owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// The rules' name.
    pub rules: String,
    /// The client's `x-request-id`, which only correlates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// How long ago it was, in milliseconds: a filter has no clock that the service could compare with its own.
    pub age_ms: u64,
}

/// The answer to a settle batch.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SettleAnswer {
    /// Renewals whose slot had lapsed: the stream goes on, and is counted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<OperationId>,
    /// In an answer other than 200: the bills and the unmetered admissions of the batch were put down all the same, and only
    /// the rest is to be told again.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub put_down: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(target_arch = "wasm32")]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    #[test]
    fn an_answer_is_read_as_it_was_written_and_half_an_answer_is_none() {
        let op = OperationId::from_random([3; 16]);
        let limit = LimitState {
            scope: crate::limits::Scope::Org,
            resource: crate::limits::Resource::Tokens,
            limit: 5,
            remaining: 0,
            reset_ms: 7,
            window_s: 60,
        };
        let grant = Grant {
            requests: 8,
            tokens: Some(3),
            largest_hold: None,
            ends_in_ms: 4,
        };
        let verdicts = [
            Verdict::Admit(Admission::default()),
            Verdict::Admit(Admission {
                bypassed: alloc::vec![Bypass {
                    class: crate::class::FailureClass::LimiterUnavailable,
                    gate: Gate::Contract,
                }],
                unenforced: true,
                tightest: Some(limit),
                slot_ttl_ms: Some(1),
                held_tokens: Some(2),
                lease: Some(grant),
            }),
            Verdict::Deny(Denial {
                code: Code::TokensLimited,
                gate: Some(Gate::Contract),
                limit: Some(limit),
                retry_after_s: Some(9),
            }),
            Verdict::Unavailable(Unavailability {
                dependency: Dependency::Policy,
                gate: None,
            }),
        ];
        for verdict in verdicts {
            let answer = DecideAnswer { op, verdict };
            let text = serde_json::to_string(&answer).unwrap();
            assert_eq!(serde_json::from_str::<DecideAnswer>(&text).unwrap(), answer, "{text}");
        }
        for half in [
            r#""verdict": "deny""#,
            r#""verdict": "unavailable""#,
            r#""verdict": "Admit""#,
            r#""verdict": "admit", "bypassed": null"#,
            r#""code": "RATE_LIMITED""#,
        ] {
            let text = alloc::format!(r#"{{"op": "{op}", {half}}}"#);
            assert!(serde_json::from_str::<DecideAnswer>(&text).is_err(), "{half}");
        }
    }
}
