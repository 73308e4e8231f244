//! One connection: scripts go in, answers come out, many at a time and in any number of callers.
//!
//! It knows how to run a script on a server that has forgotten it, or that forbids running one by its name. It doesn't
//! know when to give up on itself: see `lane`.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

use redis::aio::MultiplexedConnection;
use redis::{ServerError, ServerErrorKind, Value};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use super::fault::{self, Elsewhere, Then};
use super::script::{Answer, Call};
use crate::limiter::StoreFault;

/// Messages under way on one connection: what a frozen store can make pile up, some hundred bytes each. With answers in a
/// millisecond this is no limit that anybody meets; whoever does waits for room until its deadline.
const IN_FLIGHT: usize = 1024;

/// One connection to the store.
#[derive(Debug)]
pub(super) struct Link {
    connection: MultiplexedConnection,
    room: Semaphore,
    /// The server lets us run a script's text, but not its name.
    by_text_only: AtomicBool,
}

/// Why there is no answer, and what becomes of the connection.
pub(super) type Refusal = (StoreFault, Then);

/// Why one call has no answer.
#[derive(Debug, Clone)]
pub(super) struct Refused {
    pub(super) fault: StoreFault,
    pub(super) then: Then,
    /// What a member of a cluster says about where to ask.
    pub(super) elsewhere: Option<Elsewhere>,
}

/// What came back for one call.
pub(super) type Reply = Result<Answer, Refused>;

impl Link {
    pub(super) fn new(connection: MultiplexedConnection) -> Self {
        Self {
            connection,
            room: Semaphore::new(IN_FLIGHT),
            by_text_only: AtomicBool::new(false),
        }
    }

    /// Runs calls, in one round trip, or in two if the server did not know a script. Replies in the calls' order. A call that
    /// is `asking` goes to a member of a cluster that is about to get its keys.
    ///
    /// # Errors
    /// No replies. The calls may have been carried out.
    pub(super) async fn ask(&self, calls: &[Call], asking: bool, deadline: Instant) -> Result<Vec<Reply>, Refusal> {
        let late = |_| (StoreFault::Timeout, Then::Keep);
        let Ok(_room) = timeout_at(deadline, self.room.acquire()).await.map_err(late)? else {
            return Err((StoreFault::Connection, Then::Redial));
        };
        timeout_at(deadline, self.exchange(calls, asking)).await.map_err(late)?
    }

    /// The server's settings of these names. Empty where the command is forbidden or gone, as on many hosted servers.
    ///
    /// # Errors
    /// No answer.
    pub(super) async fn settings(
        &self,
        names: &[&str],
        deadline: Instant,
    ) -> Result<HashMap<String, String>, StoreFault> {
        let mut message = redis::pipe();
        message.cmd("CONFIG").arg("GET").arg(names);
        let mut connection = self.connection.clone();
        let answers = timeout_at(deadline, connection.send_packed_commands(&message, 0, 1)).await;
        let answers = answers.map_err(|_| StoreFault::Timeout)?;
        let answers = answers.map_err(|error| fault::of_transport(&error))?;
        let settings = answers.into_iter().next().map(redis::from_redis_value);
        Ok(settings.and_then(Result::ok).unwrap_or_default())
    }

    async fn exchange(&self, calls: &[Call], asking: bool) -> Result<Vec<Reply>, Refusal> {
        let by_text_only = asking || self.by_text_only.load(Ordering::Relaxed);
        let mut replies = self.send(calls, asking, |_| by_text_only).await?;
        let refused = |kind| move |reply: &Value| refused_as(reply, kind);
        let unknown: Vec<bool> = replies.iter().map(refused(ServerErrorKind::NoScript)).collect();
        let forbidden = !by_text_only && replies.iter().any(refused(ServerErrorKind::NoPerm));
        if !by_text_only && (forbidden || unknown.contains(&true)) {
            // The text once makes the name known to the calls behind it, in this same message. Asking all again is
            // harmless: every script is idempotent.
            let is_first = |at: usize| {
                let same_before = || calls.iter().zip(&unknown).take(at).filter(|(_, unknown)| **unknown);
                unknown.get(at) == Some(&true)
                    && !same_before()
                        .any(|(call, _)| calls.get(at).is_some_and(|own| own.script.sha == call.script.sha))
            };
            replies = self.send(calls, asking, |at| forbidden || is_first(at)).await?;
            // Only a text that ran shows that it was the name that was forbidden, and not a key or a command.
            if forbidden && !replies.iter().any(|reply| matches!(reply, Value::ServerError(_))) {
                self.by_text_only.store(true, Ordering::Relaxed);
            }
        }
        if replies.len() != calls.len() {
            return Err((StoreFault::NotSensible, Then::Redial));
        }
        Ok(calls
            .iter()
            .zip(replies)
            .map(|(call, reply)| answer(call, reply))
            .collect())
    }

    async fn send(
        &self,
        calls: &[Call],
        asking: bool,
        with_text: impl Fn(usize) -> bool,
    ) -> Result<Vec<Value>, Refusal> {
        let mut message = redis::pipe();
        for (at, call) in calls.iter().enumerate() {
            if asking {
                message.cmd("ASKING");
            }
            message.add_command(call.command(with_text(at)));
        }
        let replies_of_each = if asking { 2 } else { 1 };
        let answers = self
            .connection
            .clone()
            .send_packed_commands(&message, 0, calls.len().saturating_mul(replies_of_each))
            .await;
        let mut answers = answers.map_err(|error| (fault::of_transport(&error), Then::Redial))?;
        if asking {
            // What the server says to ASKING is in the way of what it says to the call.
            let mut at = 0_usize;
            answers.retain(|_| {
                at = at.wrapping_add(1);
                at.is_multiple_of(2)
            });
        }
        Ok(answers)
    }
}

fn answer(call: &Call, reply: Value) -> Reply {
    if let Value::ServerError(error) = &reply {
        let (fault, then) = fault::of_reply(error);
        let elsewhere = fault::elsewhere(error);
        return Err(Refused { fault, then, elsewhere });
    }
    // An answer to somebody else's question: the replies on this connection have shifted, and none can be believed.
    call.answer(reply).ok_or(Refused {
        fault: StoreFault::NotSensible,
        then: Then::Redial,
        elsewhere: None,
    })
}

fn refused_as(reply: &Value, kind: ServerErrorKind) -> bool {
    matches!(reply, Value::ServerError(error) if ServerError::kind(error) == Some(kind))
}
