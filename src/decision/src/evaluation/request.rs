//! What can be said about a request of the wire before any store is asked.

use crate::envelope::LONGEST_ID;
use crate::rules::{Gate, GateRule, LimitSource};
use crate::verdict::Denial;
use crate::wire::DecideRequest;

/// Whether a request needs a decision at all: a contract without limits, alone, has nothing to check.
pub fn needs_decision(request: &DecideRequest) -> bool {
    request.gates.iter().any(|rule| {
        !matches!(
            rule,
            GateRule::Contract {
                limits: LimitSource::Envelope,
                ..
            }
        )
    }) || !request.limits.is_empty()
}

/// The denial that is known without asking anybody: a stamped limit of 0, if the contract is checked.
pub fn known_denial(request: &DecideRequest) -> Option<Denial> {
    request
        .gates
        .iter()
        .find(|rule| rule.gate() == Gate::Contract)?;
    #[cfg(feature = "mutation")]
    if crate::mutation::is_removed(Gate::Contract) {
        return None;
    }
    let (scope, resource) = request.limits.blocked()?;
    Some(Denial::blocked(scope, resource, request.window_s))
}

/// What is wrong with a request of the wire, or `None`: a limit whose id is missing would bind nobody.
pub fn request_fault(request: &DecideRequest) -> Option<&'static str> {
    let subject = &request.subject;
    let ids = [
        Some(&subject.owner),
        subject.org.as_ref(),
        subject.auth.as_ref(),
        subject.graph.as_ref(),
    ];
    let others = [subject.lane.as_ref(), subject.model.as_ref()];
    let too_long = |id: &&alloc::string::String| id.len() > LONGEST_ID;
    if subject.owner.is_empty() {
        Some("subject.owner is empty")
    } else if ids
        .into_iter()
        .chain(others)
        .flatten()
        .any(|id| too_long(&id))
    {
        Some("an id of the subject is longer than 256 bytes")
    } else if !request.limits.org.is_empty() && subject.org.is_none() {
        Some("limits.org without subject.org")
    } else if !request.limits.auth.is_empty() && subject.auth.is_none() {
        Some("limits.auth without subject.auth")
    } else if request.window_s == 0 || request.window_s > 86_400 {
        Some("window_s is not from 1 to 86400")
    } else if request.gates.is_empty() {
        Some("no gate is listed")
    } else {
        None
    }
}

/// Whether a listed gate needs a model, and the request has none.
pub fn model_is_missing(request: &DecideRequest) -> bool {
    request.subject.model.is_none()
        && request
            .gates
            .iter()
            .any(|rule| rule.gate() == Gate::ModelPolicy)
}
