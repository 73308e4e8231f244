//! What a correct filter never does, whatever the host does to it.

use std::fmt;

use crate::ContextId;

/// One thing that must not happen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Violation {
    /// The module trapped, or ran without end.
    Trap {
        /// The callback.
        callback: &'static str,
        /// The runtime's words.
        message: String,
    },
    /// A second reply to one request.
    SecondReply(ContextId),
    /// A reply to a request that has gone up already.
    ReplyAfterPass(ContextId),
    /// A reply to a stream that is over.
    ReplyToFinished(ContextId),
    /// A reply on a context that is no stream.
    ReplyWithoutStream(ContextId),
    /// A reply with a status that HTTP does not know.
    ReplyWithStatus(ContextId, u32),
    /// A request that was replied to was resumed or let through.
    PassAfterReply(ContextId),
    /// A second resume of one request.
    SecondResume(ContextId),
    /// A resume of a request that was not paused.
    ResumeOfUnpaused(ContextId),
    /// A resume of a stream that is over, or of none.
    ResumeOfFinished(ContextId),
    /// The request was let through by a return value although it was paused, or a decision about it had only just left.
    PassWhileUndecided(ContextId),
    /// The request was paused without a decision that is out and without a reply: nothing would ever end it.
    PauseWithoutReason(ContextId),
    /// A response, or a piece of one, was held back.
    HeldResponse(ContextId),
    /// A second decision about one request while the first is out.
    SecondDecision(ContextId),
    /// A callout out of a callback in which a host may refuse or crash.
    CalloutFrom(&'static str),
    /// A callout that no host would send.
    MalformedCallout(String),
    /// A pointer outside the memory, or a map that is none.
    BadPointer(&'static str),
    /// An increment that Envoy refuses, or a metric that nobody has defined.
    BadMetric(&'static str),
    /// `proxy_done` of a context that is not finishing.
    UnaskedDone(ContextId),
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}
