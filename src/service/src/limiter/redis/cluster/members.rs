//! The members of a cluster: who is asked for which key, and how one learns that it has become somebody else.
//!
//! Every primary is a `Server`, with connections and a breaker of its own, so that one that is lost costs the others nothing.
//! Replicas are never asked for a key. Where a slot has moved, the member that is asked says so before it carries anything
//! out, and the call goes there; a task of its own keeps the view fresh.
//!
//! Left out on purpose: what is asked (see the parent), and how a member's view is read (`view`).

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use redis::ConnectionInfo;
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::slot::{slot_of, tag_in};
use super::view::View;
use crate::limiter::StoreFault;
use crate::limiter::redis::fault::{Address, Elsewhere};
use crate::limiter::redis::script::{Answer as Words, Call};
use crate::limiter::redis::server::Server;
use crate::limiter::redis::{BATCH, address};
use crate::{after, locked};

/// Between two looks at a cluster that works; and at one that does not, or that has just said that something moved.
const STEADY: Duration = Duration::from_secs(10);
const UNSTEADY: Duration = Duration::from_millis(500);
const SHORTEST: Duration = Duration::from_millis(50);
/// What a member may take to say what it sees, and how much longer the others may once one has.
const VIEW_TIMEOUT: Duration = Duration::from_secs(1);
const VIEW_PATIENCE: Duration = Duration::from_millis(100);
/// Members asked for their view at a time.
const ASKED_FOR_VIEW: usize = 16;
/// How long a member is kept that owns nothing: it may be about to.
const UNOWNING: Duration = Duration::from_secs(60);
/// How often a call is sent elsewhere before the cluster counts as confused.
const REDIRECTS: usize = 8;
/// Before keys on their way are asked for again.
const ON_THEIR_WAY: Duration = Duration::from_millis(3);

#[derive(Debug, Clone)]
enum Sight {
    /// Nobody has been asked yet.
    Unasked,
    /// Nobody ever answered.
    Blind,
    Seen(Arc<View>),
}

#[derive(Debug)]
struct Member {
    server: Arc<Server>,
    since: Instant,
}

/// All members.
#[derive(Debug)]
pub(super) struct Members {
    /// Any member, as the configuration names it: how all of them are reached.
    seed: ConnectionInfo,
    /// The others that the configuration names.
    more_seeds: Vec<ConnectionInfo>,
    prefix: String,
    op_timeout: Duration,
    sight: watch::Sender<Sight>,
    /// Slots that have moved since the last look.
    moved: Mutex<HashMap<u16, Address>>,
    members: Mutex<HashMap<Address, Member>>,
    news: Notify,
    turn: AtomicUsize,
    keeper: OnceLock<AbortHandle>,
}

impl Members {
    /// The cluster that these are members of. Dials nothing.
    pub(super) fn new(
        seed: ConnectionInfo,
        more_seeds: Vec<ConnectionInfo>,
        prefix: String,
        op_timeout: Duration,
    ) -> Self {
        Self {
            seed,
            more_seeds,
            prefix,
            op_timeout,
            sight: watch::Sender::new(Sight::Unasked),
            moved: Mutex::default(),
            members: Mutex::default(),
            news: Notify::new(),
            turn: AtomicUsize::new(0),
            keeper: OnceLock::new(),
        }
    }

    /// Starts to look at the cluster, at the first operation.
    fn start(self: &Arc<Self>) {
        self.keeper.get_or_init(|| {
            let members = Arc::downgrade(self);
            let watch = async move {
                while let Some(members) = members.upgrade() {
                    members.look().await;
                    let pause = if members.is_steady() { STEADY } else { UNSTEADY };
                    // Not so often that looking is all that is done.
                    sleep(SHORTEST).await;
                    drop(timeout(pause, members.news.notified()).await);
                }
            };
            tokio::spawn(watch).abort_handle()
        });
    }

    fn is_steady(&self) -> bool {
        let whole = matches!(&*self.sight.borrow(), Sight::Seen(view) if view.is_whole());
        whole
            && locked(&self.members)
                .values()
                .all(|member| member.server.fault().is_none())
    }

    /// What the members see; waits for the first look.
    async fn view(&self, deadline: Instant) -> Result<Arc<View>, StoreFault> {
        let mut sight = self.sight.subscribe();
        let looked = sight.wait_for(|sight| !matches!(sight, Sight::Unasked));
        let looked = timeout_at(deadline, looked).await.map_err(|_| StoreFault::Timeout)?;
        match looked.as_deref() {
            Ok(Sight::Seen(view)) => Ok(Arc::clone(view)),
            Ok(Sight::Blind | Sight::Unasked) | Err(_) => Err(StoreFault::CircuitOpen),
        }
    }

    /// Asks the members what they see, and takes the best of what is said.
    async fn look(&self) {
        let seen = match &*self.sight.borrow() {
            Sight::Seen(view) => Some(Arc::clone(view)),
            Sight::Unasked | Sight::Blind => None,
        };
        let known = seen.iter().flat_map(|view| view.primaries(0).map(|(at, _)| at.clone()));
        let known = known.map(|at| address::member(&self.seed, &at));
        let mut infos: BTreeMap<String, ConnectionInfo> = BTreeMap::new();
        for info in std::iter::once(self.seed.clone())
            .chain(self.more_seeds.iter().cloned())
            .chain(known)
        {
            if infos.len() < ASKED_FOR_VIEW {
                infos.insert(info.addr().to_string(), info);
            }
        }
        let mut asked: FuturesUnordered<_> = infos.into_values().map(ask_for_view).collect();
        let mut best: Option<View> = None;
        let mut until = after(Instant::now(), VIEW_TIMEOUT);
        while let Ok(Some(said)) = timeout_at(until, asked.next()).await {
            let Some(view) = said else { continue };
            if best.is_none() {
                until = until.min(after(Instant::now(), VIEW_PATIENCE));
            }
            if best.as_ref().is_none_or(|best| best.rank() < view.rank()) {
                best = Some(view);
            }
        }
        match best {
            Some(view) => self.see(view),
            // An old view is better than none: its servers know themselves how they are.
            None if seen.is_none() => drop(self.sight.send_replace(Sight::Blind)),
            None => {}
        }
    }

    fn see(&self, view: View) {
        let turn = self.turn.fetch_add(7_919, Ordering::Relaxed);
        for (at, slot) in view.primaries(turn) {
            let server = self.server(at);
            server.probe_at(self.probe_prefix(slot));
            server.start();
        }
        locked(&self.members).retain(|at, member| {
            view.primaries(0).any(|(primary, _)| primary == at) || member.since.elapsed() < UNOWNING
        });
        locked(&self.moved).clear();
        self.sight.send_replace(Sight::Seen(Arc::new(view)));
    }

    fn probe_prefix(&self, slot: u16) -> String {
        format!("{}:{{{}}}", self.prefix, tag_in(slot))
    }

    fn server(&self, at: &Address) -> Arc<Server> {
        let mut members = locked(&self.members);
        let member = members.entry(at.clone()).or_insert_with(|| {
            let info = address::member(&self.seed, at);
            Member {
                server: Arc::new(Server::member(info, self.probe_prefix(0), self.op_timeout)),
                since: Instant::now(),
            }
        });
        Arc::clone(&member.server)
    }

    fn owner(&self, view: &View, key: &str) -> Option<Address> {
        let slot = slot_of(key);
        let moved = locked(&self.moved).get(&slot).cloned();
        moved.or_else(|| view.owner(slot).cloned())
    }

    /// Runs calls, each where its first key lives, those of one member in their order and in one message. An answer or a
    /// fault for each, in the calls' order.
    pub(super) async fn ask_all(self: &Arc<Self>, calls: &[Call], deadline: Instant) -> Vec<Result<Words, StoreFault>> {
        if calls.is_empty() {
            return Vec::new();
        }
        self.start();
        let view = match self.view(deadline).await {
            Ok(view) => view,
            Err(fault) => return calls.iter().map(|_| Err(fault)).collect(),
        };
        let mut answers: Vec<Result<Words, StoreFault>> = calls.iter().map(|_| Err(StoreFault::ClusterDown)).collect();
        let mut open: BTreeMap<(Address, bool), Vec<usize>> = BTreeMap::new();
        for (at, call) in calls.iter().enumerate() {
            match call.keys.first().and_then(|key| self.owner(&view, key)) {
                Some(owner) => open.entry((owner, false)).or_default().push(at),
                None => self.news.notify_one(),
            }
        }
        let mut redirects = 0_usize;
        while !open.is_empty() && redirects <= REDIRECTS {
            let messages = open.into_iter().map(|((address, asking), ats)| async move {
                let replies = self.message(&address, calls, &ats, asking, deadline).await;
                (address, ats, replies)
            });
            open = BTreeMap::new();
            let (mut on_their_way, mut is_elsewhere) = (false, false);
            for (asked, ats, replies) in join_all(messages).await {
                for (at, reply) in ats.into_iter().zip(replies) {
                    let (fault, elsewhere) = match reply {
                        Ok(words) => {
                            set(&mut answers, at, Ok(words));
                            continue;
                        }
                        Err(fault_and_elsewhere) => fault_and_elsewhere,
                    };
                    let named = |(host, port): Address| {
                        if host.is_empty() {
                            (asked.0.clone(), port)
                        } else {
                            (host, port)
                        }
                    };
                    let next = match elsewhere {
                        None => {
                            set(&mut answers, at, Err(fault));
                            continue;
                        }
                        Some(Elsewhere::Moved(to)) => {
                            let to = named(to);
                            if let Some(key) = calls.get(at).and_then(|call| call.keys.first()) {
                                locked(&self.moved).insert(slot_of(key), to.clone());
                            }
                            (to, false)
                        }
                        Some(Elsewhere::Ask(to)) => (named(to), true),
                        Some(Elsewhere::Soon) => {
                            on_their_way = true;
                            let key = calls.get(at).and_then(|call| call.keys.first());
                            let owner = key.and_then(|key| self.owner(&view, key));
                            open.entry((owner.unwrap_or_else(|| asked.clone()), false))
                                .or_default()
                                .push(at);
                            continue;
                        }
                    };
                    is_elsewhere = true;
                    open.entry(next).or_default().push(at);
                }
            }
            if is_elsewhere {
                self.news.notify_one();
            }
            if on_their_way {
                // The bound is the deadline: keys take as long as their number does.
                if deadline.saturating_duration_since(Instant::now()) <= ON_THEIR_WAY.saturating_mul(2) {
                    break;
                }
                sleep(ON_THEIR_WAY).await;
            } else {
                redirects = redirects.saturating_add(1);
            }
        }
        answers
    }

    /// Some of the calls to one member, in as few messages as may be.
    async fn message(
        &self,
        address: &Address,
        calls: &[Call],
        ats: &[usize],
        asking: bool,
        deadline: Instant,
    ) -> Vec<Result<Words, (StoreFault, Option<Elsewhere>)>> {
        let server = self.server(address);
        let mut all = Vec::with_capacity(ats.len());
        for batch in ats.chunks(BATCH) {
            let batch: Vec<Call> = batch.iter().filter_map(|at| calls.get(*at)).cloned().collect();
            match server.replies(&batch, asking, deadline).await {
                Ok(replies) => all.extend(
                    replies
                        .into_iter()
                        .map(|reply| reply.map_err(|refused| (refused.fault, refused.elsewhere))),
                ),
                Err(fault) => {
                    self.news.notify_one();
                    all.extend(batch.iter().map(|_| Err((fault, None))));
                }
            }
        }
        all
    }

    /// How the members are that own something.
    ///
    /// # Errors
    /// That nobody could be asked who they are.
    pub(super) async fn probe(self: &Arc<Self>, deadline: Instant) -> Result<Vec<Result<(), StoreFault>>, StoreFault> {
        self.start();
        let view = self.view(deadline).await?;
        let probes = view.primaries(0).map(|(at, _)| {
            let server = self.server(at);
            async move {
                let replies = server.replies(&[server.probe()], false, deadline).await;
                match replies.map(|replies| replies.into_iter().next()) {
                    Ok(Some(Ok(words))) => words.done().ok_or(StoreFault::NotSensible),
                    Ok(Some(Err(refused))) if refused.elsewhere.is_some() => Ok(()),
                    Ok(Some(Err(refused))) => Err(refused.fault),
                    Ok(None) => Err(StoreFault::NotSensible),
                    // Who asks how the store is wants to know why it is not asked.
                    Err(StoreFault::CircuitOpen) => Err(server.fault().unwrap_or(StoreFault::CircuitOpen)),
                    Err(fault) => Err(fault),
                }
            }
        });
        let probes: Vec<_> = probes.collect();
        Ok(join_all(probes).await)
    }

    /// Whether one of them says that it may drop keys.
    ///
    /// # Errors
    /// Somebody did not answer.
    pub(super) async fn may_evict(self: &Arc<Self>, deadline: Instant) -> Result<bool, StoreFault> {
        self.start();
        let view = self.view(deadline).await?;
        let mut may = false;
        for (at, _) in view.primaries(0) {
            may |= self.server(at).may_evict(deadline).await?;
        }
        Ok(may)
    }
}

fn set<T>(answers: &mut [T], at: usize, answer: T) {
    if let Some(place) = answers.get_mut(at) {
        *place = answer;
    }
}

/// What a member sees, over a connection of its own: one that is in use may be stuck.
async fn ask_for_view(info: ConnectionInfo) -> Option<View> {
    let host = address::host(&info).to_owned();
    let client = redis::Client::open(info).ok()?;
    let config = redis::AsyncConnectionConfig::new()
        .set_connection_timeout(Some(VIEW_TIMEOUT))
        .set_response_timeout(Some(VIEW_TIMEOUT));
    let mut connection = client
        .get_multiplexed_async_connection_with_config(&config)
        .await
        .ok()?;
    let mut message = redis::pipe();
    message.cmd("CLUSTER").arg("INFO").cmd("CLUSTER").arg("SLOTS");
    let said = connection.send_packed_commands(&message, 0, 2).await.ok()?;
    let [info, slots] = said.as_slice() else { return None };
    let info: String = redis::from_redis_value_ref(info).ok()?;
    View::read(&info, slots, &host)
}

impl Drop for Members {
    fn drop(&mut self) {
        if let Some(keeper) = self.keeper.get() {
            keeper.abort();
        }
    }
}
