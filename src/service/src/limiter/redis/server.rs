//! One server: two connections, each with a keeper that replaces it (`lane`), and what a failure says about both.
//!
//! Left out on purpose: what is asked, and of which server.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use redis::ConnectionInfo;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::fault::Then;
use super::lane::{Dialer, Lane};
use super::link::{Link, Refusal, Reply};
use super::script::{Answer as Words, Call};
use crate::limiter::StoreFault;
use crate::locked;

/// Connections of one process: a second so that one that went bad alone takes nothing with it.
const LANES: usize = 2;
/// Timeouts in a row, whichever the connection, that end all of them: the store is frozen, or out of reach.
const TIMEOUTS_TO_BREAK_ALL: u32 = 3;

/// A server and the connections to it.
#[derive(Debug)]
pub(super) struct Server {
    /// A timeout says something about the store only if it was given at least this long.
    telling_wait: Duration,
    dialer: Arc<Dialer>,
    lanes: [Arc<Lane>; LANES],
    next_lane: AtomicUsize,
    timeouts: AtomicU32,
    keepers: OnceLock<Vec<AbortHandle>>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.keepers.get().into_iter().flatten().for_each(AbortHandle::abort);
    }
}

impl Server {
    /// A server on its own. Dials nothing before its first operation, so it needs no runtime.
    pub(super) fn new(info: ConnectionInfo, probe_prefix: String, op_timeout: Duration) -> Self {
        Self::over(Dialer {
            info,
            probe_prefix: Mutex::new(probe_prefix),
            op_timeout,
            is_member: false,
        })
    }

    /// A member of a cluster, where a call may turn out to belong to another one.
    pub(super) fn member(info: ConnectionInfo, probe_prefix: String, op_timeout: Duration) -> Self {
        Self::over(Dialer {
            info,
            probe_prefix: Mutex::new(probe_prefix),
            op_timeout,
            is_member: true,
        })
    }

    fn over(dialer: Dialer) -> Self {
        Self {
            telling_wait: dialer.op_timeout.checked_div(4).unwrap_or_default(),
            dialer: Arc::new(dialer),
            lanes: std::array::from_fn(|_| Arc::new(Lane::new())),
            next_lane: AtomicUsize::new(0),
            timeouts: AtomicU32::new(0),
            keepers: OnceLock::new(),
        }
    }

    /// What the keys of a probe begin with from now on.
    pub(super) fn probe_at(&self, prefix: String) {
        *locked(&self.dialer.probe_prefix) = prefix;
    }

    /// A probe, for whoever asks how the server is.
    pub(super) fn probe(&self) -> Call {
        Call::probe(&locked(&self.dialer.probe_prefix))
    }

    /// Why there is no connection, if there is none and none is to be expected.
    pub(super) fn fault(&self) -> Option<StoreFault> {
        let is_up = self.lanes.iter().any(|lane| lane.link().is_some());
        if is_up {
            None
        } else {
            self.lanes.iter().find_map(|lane| lane.fault())
        }
    }

    /// Starts the keepers, at the first operation or before it.
    pub(super) fn start(&self) {
        self.keepers.get_or_init(|| {
            let keep = |lane: &Arc<Lane>| {
                lane.is_started();
                tokio::spawn(Arc::clone(lane).keep(Arc::clone(&self.dialer))).abort_handle()
            };
            self.lanes.iter().map(keep).collect()
        });
    }

    /// A connection, and where it belongs: in turn, else any that is there, else one that is soon to be.
    async fn choose(&self, deadline: Instant) -> Option<(&Lane, Arc<Link>)> {
        let turn = self.next_lane.fetch_add(1, Ordering::Relaxed).checked_rem(LANES)?;
        let lanes = || self.lanes.iter().cycle().skip(turn).take(LANES);
        if let Some(found) = lanes().find_map(|lane| Some((lane.as_ref(), lane.link()?))) {
            return Some(found);
        }
        let lane = lanes().find(|lane| lane.awaited_until().is_some())?;
        Some((lane, lane.wait(deadline).await?))
    }

    /// Runs calls. If the connection breaks under them they are asked again over another one, with the same ids, so that
    /// nothing is counted twice. As often as there are connections: what cuts one mostly cuts them all, and each notices
    /// only when it is used; the next is a new one.
    ///
    /// # Errors
    /// No replies. The calls may have been carried out if the fault says so.
    pub(super) async fn replies(
        &self,
        calls: &[Call],
        asking: bool,
        deadline: Instant,
    ) -> Result<Vec<Reply>, StoreFault> {
        self.start();
        let mut lost = 0;
        loop {
            let fault = match self.choose(deadline).await {
                None => StoreFault::CircuitOpen,
                Some((lane, link)) => match Attempt::new(self, lane, link, deadline).run(calls, asking).await {
                    Ok(replies) => return Ok(replies),
                    Err(StoreFault::Connection) if lost < LANES => {
                        lost = lost.saturating_add(1);
                        continue;
                    }
                    Err(fault) => fault,
                },
            };
            return Err(if lost > 0 {
                fault.after(StoreFault::Connection)
            } else {
                fault
            });
        }
    }

    /// The answers to calls, where one that is refused leaves the others without one.
    ///
    /// # Errors
    /// The fault of the first call that has no answer. Others of them may have been carried out.
    pub(super) async fn ask(&self, calls: &[Call], deadline: Instant) -> Result<Vec<Words>, StoreFault> {
        let replies = self.replies(calls, false, deadline).await?;
        replies
            .into_iter()
            .map(|reply| reply.map_err(|refused| refused.fault))
            .collect()
    }

    /// Whether the server says that it may drop keys to make room.
    ///
    /// # Errors
    /// No answer.
    pub(super) async fn may_evict(&self, deadline: Instant) -> Result<bool, StoreFault> {
        let (_, link) = self.choose(deadline).await.ok_or(StoreFault::CircuitOpen)?;
        let settings = link.settings(&["maxmemory", "maxmemory-policy"], deadline).await?;
        let is_bounded = settings.get("maxmemory").is_some_and(|bytes| bytes != "0");
        // Every other policy may drop our keys, since all of them have a time to live.
        let drops = settings
            .get("maxmemory-policy")
            .is_some_and(|policy| policy != "noeviction");
        Ok(is_bounded && drops)
    }
}

/// One try over one connection. Its timeout counts even if the caller, who has the same deadline, stops waiting first.
struct Attempt<'a> {
    server: &'a Server,
    lane: &'a Lane,
    link: Arc<Link>,
    start: Instant,
    deadline: Instant,
    is_settled: bool,
}

impl<'a> Attempt<'a> {
    fn new(server: &'a Server, lane: &'a Lane, link: Arc<Link>, deadline: Instant) -> Self {
        Self {
            server,
            lane,
            link,
            start: Instant::now(),
            deadline,
            is_settled: false,
        }
    }

    async fn run(mut self, calls: &[Call], asking: bool) -> Result<Vec<Reply>, StoreFault> {
        let result: Result<_, Refusal> = self.link.ask(calls, asking, self.deadline).await;
        if matches!(result, Err((StoreFault::Timeout, Then::Keep))) {
            return Err(StoreFault::Timeout);
        }
        self.is_settled = true;
        self.lane.answered();
        self.server.timeouts.store(0, Ordering::Relaxed);
        let is_member = self.server.dialer.is_member;
        let unusable = match &result {
            Err((fault, Then::Redial)) => Some(*fault),
            Err((_, Then::Keep)) => None,
            Ok(replies) => replies.iter().find_map(|reply| match reply {
                Err(refused) if is_member && refused.elsewhere.is_some() => None,
                Err(refused) => (refused.then == Then::Redial).then_some(refused.fault),
                Ok(_) => None,
            }),
        };
        if let Some(fault) = unusable {
            self.lane.drop_link(&self.link, fault);
        }
        result.map_err(|(fault, _)| fault)
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        let told = self.deadline.saturating_duration_since(self.start) >= self.server.telling_wait;
        if self.is_settled || !told || Instant::now() < self.deadline {
            return;
        }
        let all = self.server.timeouts.fetch_add(1, Ordering::Relaxed).saturating_add(1) >= TIMEOUTS_TO_BREAK_ALL;
        if self.lane.timed_out() || all {
            self.lane.drop_link(&self.link, StoreFault::Timeout);
        }
        if all {
            for lane in &self.server.lanes {
                if let Some(link) = lane.link() {
                    lane.drop_link(&link, StoreFault::Timeout);
                }
            }
        }
    }
}
