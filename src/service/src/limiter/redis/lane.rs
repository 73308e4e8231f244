//! A place for one connection, and the task that keeps it filled.
//!
//! The breaker is the connection: it goes away after failures that the server as a whole is to blame for, and comes back
//! only when a new one has carried out every command of a charge in time. Until then whoever asks is told at once. So a
//! dead store costs nobody a timeout, and nobody's request is the guinea pig.
//!
//! Left out on purpose: choosing among lanes, and what a failed operation does next (see the parent).

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::fault;
use super::link::{Link, Refusal};
use super::script::Call;
use crate::limiter::StoreFault;
use crate::{after, locked};

/// Name, connection, TLS and password: no more than this, all together. Also for the first, unhurried probe.
const DIAL_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a caller may wait for a connection that has just been lost, or is being made for the first time.
const PATIENCE: Duration = Duration::from_millis(250);
/// Timeouts in a row that end a connection.
const TIMEOUTS_TO_BREAK: u32 = 3;
/// A connection that lived as long was good: losing it is no reason to wait before the next.
const STEADY: Duration = Duration::from_millis(500);
const SHORTEST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug, Clone)]
enum State {
    /// Not there yet, but likely soon: worth waiting for until then.
    Awaited(Instant),
    Up(Arc<Link>),
    /// Not there, for this reason.
    Down(StoreFault),
}

/// What a new connection needs.
#[derive(Debug)]
pub(super) struct Dialer {
    pub(super) info: redis::ConnectionInfo,
    /// What the keys of a probe begin with.
    pub(super) probe_prefix: Mutex<String>,
    pub(super) op_timeout: Duration,
    /// The server may be a member of a cluster, to whom a probe's keys no longer belong.
    pub(super) is_member: bool,
}

impl Dialer {
    /// A connection over which a probe was answered within the time of one operation.
    async fn dial(&self) -> Result<Link, StoreFault> {
        let config = redis::AsyncConnectionConfig::new()
            .set_connection_timeout(Some(DIAL_TIMEOUT))
            .set_response_timeout(None);
        let client = redis::Client::open(self.info.clone()).map_err(|error| fault::of_transport(&error))?;
        let connection = client.get_multiplexed_async_connection_with_config(&config);
        let connection = timeout(DIAL_TIMEOUT, connection)
            .await
            .map_err(|_| StoreFault::Timeout)?;
        let link = Link::new(connection.map_err(|error| fault::of_transport(&error))?);
        // The first may need the script's text, and a server that has just thawed has much to do before it.
        for patience in [DIAL_TIMEOUT, self.op_timeout] {
            let deadline = after(Instant::now(), patience);
            let probe = [Call::probe(&locked(&self.probe_prefix))];
            let replies = link.ask(&probe, false, deadline).await;
            for reply in replies.map_err(|(fault, _): Refusal| fault)? {
                match reply {
                    Ok(answer) => answer.done().ok_or(StoreFault::NotSensible)?,
                    Err(refused) if self.is_member && refused.elsewhere.is_some() => {}
                    Err(refused) => return Err(refused.fault),
                }
            }
        }
        Ok(link)
    }
}

/// A place for one connection.
#[derive(Debug)]
pub(super) struct Lane {
    state: watch::Sender<State>,
    timeouts: AtomicU32,
}

impl Lane {
    /// An empty lane, whose first connection is worth waiting for.
    pub(super) fn new() -> Self {
        let state = State::Awaited(after(Instant::now(), PATIENCE));
        Self {
            state: watch::Sender::new(state),
            timeouts: AtomicU32::new(0),
        }
    }

    /// The connection, if there is one.
    pub(super) fn link(&self) -> Option<Arc<Link>> {
        match &*self.state.borrow() {
            State::Up(link) => Some(Arc::clone(link)),
            State::Awaited(_) | State::Down(_) => None,
        }
    }

    /// Until when a connection is worth waiting for, if it is.
    pub(super) fn awaited_until(&self) -> Option<Instant> {
        match *self.state.borrow() {
            State::Awaited(until) if until > Instant::now() => Some(until),
            _ => None,
        }
    }

    /// Why there is no connection, if there is none and none is to be expected.
    pub(super) fn fault(&self) -> Option<StoreFault> {
        match *self.state.borrow() {
            State::Down(fault) => Some(fault),
            State::Awaited(_) | State::Up(_) => None,
        }
    }

    /// Waits for a connection while it is worth it.
    pub(super) async fn wait(&self, deadline: Instant) -> Option<Arc<Link>> {
        let until = self.awaited_until()?.min(deadline);
        let mut changes = self.state.subscribe();
        let changed = changes.wait_for(|state| !matches!(state, State::Awaited(_)));
        drop(timeout_at(until, changed).await.ok()?);
        self.link()
    }

    /// Starts a first wait anew: the lane was made before there was anything to run it.
    pub(super) fn is_started(&self) {
        self.state.send_replace(State::Awaited(after(Instant::now(), PATIENCE)));
    }

    /// Notes an answer in time.
    pub(super) fn answered(&self) {
        self.timeouts.store(0, Ordering::Relaxed);
    }

    /// Notes a timeout; whether it is one too many in a row.
    pub(super) fn timed_out(&self) -> bool {
        self.timeouts.fetch_add(1, Ordering::Relaxed).saturating_add(1) >= TIMEOUTS_TO_BREAK
    }

    /// Drops this connection if it is still the one in place. A server that is silent or says why it can't be used is
    /// not waited for; one that hung up may be there again at once.
    pub(super) fn drop_link(&self, link: &Arc<Link>, fault: StoreFault) {
        let next = match fault {
            StoreFault::Connection => State::Awaited(after(Instant::now(), PATIENCE)),
            fault => State::Down(fault),
        };
        self.state.send_if_modified(|state| {
            let in_place = matches!(state, State::Up(current) if Arc::ptr_eq(current, link));
            if in_place {
                *state = next;
            }
            in_place
        });
    }

    /// Keeps the lane filled, for ever.
    pub(super) async fn keep(self: Arc<Self>, dialer: Arc<Dialer>) {
        let mut pause = Pause::default();
        let mut changes = self.state.subscribe();
        loop {
            match dialer.dial().await {
                Ok(link) => {
                    let since = Instant::now();
                    self.timeouts.store(0, Ordering::Relaxed);
                    self.state.send_replace(State::Up(Arc::new(link)));
                    let lost = changes.wait_for(|state| !matches!(state, State::Up(_))).await.is_ok();
                    if !lost {
                        return;
                    }
                    if since.elapsed() >= STEADY {
                        pause = Pause::default();
                        continue;
                    }
                }
                Err(fault) => drop(self.state.send_replace(State::Down(fault))),
            }
            sleep(pause.next()).await;
        }
    }
}

/// The pauses between attempts: twice as long each time, and never the same for two processes.
#[derive(Debug, Default)]
struct Pause(Duration);

impl Pause {
    fn next(&mut self) -> Duration {
        self.0 = self.0.saturating_mul(2).clamp(SHORTEST_PAUSE, LONGEST_PAUSE);
        // Between a half and the whole.
        let share = u32::from(random_byte()).saturating_add(256);
        self.0.saturating_mul(share).checked_div(512).unwrap_or(self.0)
    }
}

/// Good enough to keep processes apart that lost the same store at the same moment.
fn random_byte() -> u8 {
    use std::hash::{BuildHasher as _, RandomState};
    let [byte, ..] = RandomState::new().hash_one(0_u8).to_le_bytes();
    byte
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_second_and_vary() {
        let mut pause = Pause::default();
        let first = pause.next();
        assert!((SHORTEST_PAUSE / 2..=SHORTEST_PAUSE).contains(&first), "{first:?}");
        let later: Vec<_> = std::iter::repeat_with(|| pause.next()).skip(8).take(32).collect();
        assert!(
            later
                .iter()
                .all(|pause| (LONGEST_PAUSE / 2..=LONGEST_PAUSE).contains(pause)),
            "{later:?}"
        );
        assert!(later.iter().any(|pause| Some(pause) != later.first()), "{later:?}");
    }
}
