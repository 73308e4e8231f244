//! The answer of a callout, and whether it makes sense.

use crate::class::Dependency;
use crate::json;
use crate::rules::Choice;
use crate::verdict::{Grant, Verdict};
use crate::wire::{DecideAnswer, DecideRequest, LARGEST_ANSWER};

/// What a callout came to.
#[derive(Debug, Clone, Copy)]
pub struct CalloutAnswer<'a> {
    /// `:status`, or `None` if there were no headers.
    pub status: Option<u16>,
    /// The body, or `None` if it could not be read.
    pub body: Option<&'a [u8]>,
}

/// The verdict of an answer that makes sense: `:status` exactly 200, bounded, known words, our operation id, no bypass
/// that our rules do not allow. Anything else is no answer.
pub(crate) fn sensible_verdict(answer: CalloutAnswer<'_>, request: &DecideRequest) -> Option<Verdict> {
    let body = answer
        .body
        .filter(|body| answer.status == Some(200) && body.len() <= LARGEST_ANSWER)?;
    let answer: DecideAnswer = json::read(body).ok()?;
    if answer.op != request.op {
        return None;
    }
    // A block that was not asked for, or that is larger, would be handed out by nobody's leave.
    let is_asked_for = |grant: &Grant| request.lease.is_some_and(|ask| grant.requests <= ask.max_requests);
    let sensible = match &answer.verdict {
        Verdict::Admit(admission) if !admission.lease.as_ref().is_none_or(is_asked_for) => false,
        Verdict::Admit(admission) => admission.bypassed.iter().all(|bypass| {
            let rule = request.gates.iter().find(|rule| rule.gate() == bypass.gate);
            bypass.class.can_be_opened()
                && rule
                    .and_then(|rule| rule.when_unavailable())
                    .is_some_and(|choice| choice != Choice::Reject)
        }),
        // A denial without a class would be an outage dressed up as one.
        Verdict::Deny(denial) => denial.code.class().is_some(),
        Verdict::Unavailable(unavailable) => unavailable.dependency != Dependency::Decision,
    };
    sensible.then_some(answer.verdict)
}
