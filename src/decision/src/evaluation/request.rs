//! What can be said about a request of the wire before any store is asked.

use crate::class::{Code, Dependency};
use crate::envelope::LONGEST_ID;
use crate::limits::StampedLimits;
use crate::rules::{Gate, GateRule, LimitSource};
use crate::verdict::Denial;
use crate::wire::DecideRequest;

/// Whether a request needs a decision at all: a contract without limits, alone, has nothing to check.
pub fn needs_decision(gates: &[GateRule], limits: &StampedLimits) -> bool {
    gates.iter().any(|rule| {
        !matches!(
            rule,
            GateRule::Contract {
                limits: LimitSource::Envelope,
                ..
            }
        )
    }) || !limits.is_empty()
}

/// Whether some gate stands twice, or limiter or metering gates are not adjacent: then what the first of them took would
/// answer for the others.
fn has_torn_gates(gates: &[GateRule]) -> bool {
    let torn = |dependency| {
        let mut at = gates
            .iter()
            .enumerate()
            .filter(|(_, rule)| rule.gate().dependency() == Some(dependency));
        let (first, last) = (at.next().map(|(at, _)| at), at.next_back().map(|(at, _)| at));
        let count = gates
            .iter()
            .filter(|rule| rule.gate().dependency() == Some(dependency))
            .count();
        matches!((first, last), (Some(first), Some(last)) if last.saturating_sub(first).saturating_add(1) != count)
    };
    let twice = |(at, rule): (usize, &GateRule)| gates.iter().take(at).any(|earlier| earlier.gate() == rule.gate());
    gates.iter().enumerate().any(twice) || torn(Dependency::Limiter) || torn(Dependency::Metering)
}

/// The denial that is known without asking anybody, in the order of the gates: a stamped limit of 0, a launch rate of 0, or
/// a model that is needed and not there.
pub fn known_denial(request: &DecideRequest) -> Option<Denial> {
    request.gates.iter().find_map(|rule| {
        #[cfg(feature = "mutation")]
        if crate::mutation::is_removed(rule.gate()) {
            return None;
        }
        match rule {
            GateRule::Contract { .. } => {
                let (scope, resource) = request.limits.blocked()?;
                Some(Denial::blocked(scope, resource, request.window_s))
            }
            GateRule::LaunchRate { per_minute: 0, .. } => Some(Denial::launch_rate(0, 60_000)),
            GateRule::ModelPolicy { .. } if request.subject.model.is_none() => {
                Some(Denial::plain(Code::ModelRequired, Some(Gate::ModelPolicy)))
            }
            _ => None,
        }
    })
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
    } else if ids.into_iter().chain(others).flatten().any(|id| too_long(&id)) {
        Some("an id of the subject is longer than 256 bytes")
    } else if !request.limits.org.is_empty() && subject.org.is_none() {
        Some("limits.org without subject.org")
    } else if !request.limits.auth.is_empty() && subject.auth.is_none() {
        Some("limits.auth without subject.auth")
    } else if request.window_s == 0 || request.window_s > 86_400 {
        Some("window_s is not from 1 to 86400")
    } else if request.gates.is_empty() {
        Some("no gate is listed")
    } else if has_torn_gates(&request.gates) {
        Some("a gate is listed twice, or gates of one store are apart")
    } else {
        None
    }
}
