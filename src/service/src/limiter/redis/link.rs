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

use super::fault::{self, Then};
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

impl Link {
    pub(super) fn new(connection: MultiplexedConnection) -> Self {
        Self {
            connection,
            room: Semaphore::new(IN_FLIGHT),
            by_text_only: AtomicBool::new(false),
        }
    }

    /// Runs calls of one script, in one round trip, or in two if the server did not know it. Answers in the calls' order.
    ///
    /// # Errors
    /// The fault of the first call that has no answer. Others of them may have been carried out.
    pub(super) async fn ask(&self, calls: &[Call], deadline: Instant) -> Result<Vec<Answer>, Refusal> {
        let late = |_| (StoreFault::Timeout, Then::Keep);
        let Ok(_room) = timeout_at(deadline, self.room.acquire()).await.map_err(late)? else {
            return Err((StoreFault::Connection, Then::Redial));
        };
        timeout_at(deadline, self.exchange(calls)).await.map_err(late)?
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

    async fn exchange(&self, calls: &[Call]) -> Result<Vec<Answer>, Refusal> {
        let by_text_only = self.by_text_only.load(Ordering::Relaxed);
        let mut replies = self.send(calls, |_| by_text_only).await?;
        let unknown = !by_text_only && replies.iter().any(|reply| refused_as(reply, ServerErrorKind::NoScript));
        let forbidden = !by_text_only && replies.iter().any(|reply| refused_as(reply, ServerErrorKind::NoPerm));
        if unknown || forbidden {
            // The text once makes the name known to the calls behind it, in this same message. Asking all again is
            // harmless: every script is idempotent.
            replies = self.send(calls, |at| forbidden || at == 0).await?;
            // Only a text that ran shows that it was the name that was forbidden, and not a key or a command.
            if forbidden && !replies.iter().any(|reply| matches!(reply, Value::ServerError(_))) {
                self.by_text_only.store(true, Ordering::Relaxed);
            }
        }
        if replies.len() != calls.len() {
            return Err((StoreFault::NotSensible, Then::Redial));
        }
        calls
            .iter()
            .zip(replies)
            .map(|(call, reply)| answer(call, reply))
            .collect()
    }

    async fn send(&self, calls: &[Call], with_text: impl Fn(usize) -> bool) -> Result<Vec<Value>, Refusal> {
        let mut message = redis::pipe();
        for (at, call) in calls.iter().enumerate() {
            message.add_command(call.command(with_text(at)));
        }
        let answers = self
            .connection
            .clone()
            .send_packed_commands(&message, 0, calls.len())
            .await;
        answers.map_err(|error| (fault::of_transport(&error), Then::Redial))
    }
}

fn answer(call: &Call, reply: Value) -> Result<Answer, Refusal> {
    if let Value::ServerError(error) = &reply {
        return Err(fault::of_reply(error));
    }
    // An answer to somebody else's question: the replies on this connection have shifted, and none can be believed.
    call.answer(reply).ok_or((StoreFault::NotSensible, Then::Redial))
}

fn refused_as(reply: &Value, kind: ServerErrorKind) -> bool {
    matches!(reply, Value::ServerError(error) if ServerError::kind(error) == Some(kind))
}
