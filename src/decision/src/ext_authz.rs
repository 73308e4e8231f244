//! Envoy's own `ext_authz`, in its HTTP flavour: what it can't keep of a single request, and how a refusal has to look so
//! that Envoy passes it on as the filter would have written it.
//!
//! A request is judged by the filter's own state machine ([`crate::stream`]); here is only what differs. A 200 lets the
//! request go on, whatever else it says, and a 5xx is an outage to Envoy, which then answers by itself (`status_on_error`).
//!
//! Left out on purpose: the end of a request, which nobody tells. So a hold of tokens stays what was charged, and slots are
//! not given out at all.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use crate::class::{FailureClass, status_of_grpc};
use crate::evaluation::known_denial;
use crate::gatehouse::Gatehouse;
use crate::limits::{Limit, Resource, Scope};
use crate::reply::Reply;
use crate::rules::Gate;
use crate::verdict::{Bypass, Unavailability, Verdict};
use crate::wire::DecideRequest;

/// What stands before the path of the request that is asked about.
pub const CHECK_PATH: &str = "/v1/ext_authz";
/// The answer's header in which Envoy reads what to remove from the request.
pub const REMOVED_HEADERS: &str = "x-envoy-auth-headers-to-remove";

/// What becomes of a stamped concurrency limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Slots {
    /// None is stamped, or the request is denied anyway.
    NotTaken,
    /// The rules let pass what can't be checked: it was taken out of the request, and this has to be said. One of the
    /// allowance is used, until it shows that nobody passes by it.
    Unchecked(Bypass),
    /// The rules do not.
    Refused(Verdict),
}

/// Takes the stamped concurrency limits out of a request, by the choice of the gate that would check them: nobody would
/// give their slots back.
pub fn without_slots(gatehouse: &mut Gatehouse, request: &mut DecideRequest, now_ms: u64) -> Slots {
    let counts = |limit: Limit| matches!(limit, Limit::AtMost(_));
    let stamped = |scope: &Scope| counts(request.limits.of(*scope).concurrency);
    if !Scope::CONTRACT.iter().any(stamped) || known_denial(request).is_some() {
        return Slots::NotTaken;
    }
    let rule = request.gates.iter().find(|rule| rule.gate() == Gate::Contract);
    // Without the gate nobody checks them, which the stream has told of already.
    let Some(choice) = rule.and_then(|rule| rule.when_unavailable()) else {
        return Slots::NotTaken;
    };
    let class = FailureClass::LimiterUnavailable;
    if !gatehouse.allow(class, choice, now_ms) {
        return Slots::Refused(Verdict::Unavailable(Unavailability {
            dependency: crate::class::Dependency::Limiter,
            gate: Some(Gate::Contract),
        }));
    }
    for scope in Scope::CONTRACT {
        request.limits.set(scope, Resource::Concurrency, Limit::Unlimited);
    }
    Slots::Unchecked(Bypass {
        class,
        gate: Gate::Contract,
    })
}

/// A verdict that passed what `bypass` names. One that admits nobody gives back what was used of the allowance: else those who
/// are over another limit would use it up for all.
#[must_use]
pub fn with_bypass(gatehouse: &mut Gatehouse, mut verdict: Verdict, bypass: Bypass) -> Verdict {
    match &mut verdict {
        Verdict::Admit(admission) => admission.bypassed.push(bypass),
        Verdict::Deny(_) | Verdict::Unavailable(_) => gatehouse.give_back_allowance(bypass.class),
    }
    verdict
}

/// Whether this `content-type` is one that Envoy answers in gRPC's ways by itself; of any other it keeps ours.
pub fn is_grpc(content_type: &[u8]) -> bool {
    content_type
        .strip_prefix(b"application/grpc")
        .is_some_and(|rest| rest.is_empty() || matches!(rest, [b'+' | b';', ..]))
}

/// A refusal as Envoy has to be told it. To a gRPC call Envoy writes a 200 itself and keeps our `grpc-status`; told a 200,
/// it would let the call go on.
#[must_use]
pub fn told(reply: Reply) -> Reply {
    let Some((status, message)) = reply.grpc else {
        return reply;
    };
    let mut headers: Vec<(&'static str, String)> = reply.headers;
    headers.push(("grpc-status", status.to_string()));
    Reply {
        status: status_of_grpc(status),
        grpc: None,
        headers,
        body: message.into(),
    }
}

#[cfg(test)]
mod tests;
