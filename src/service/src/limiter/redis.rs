//! `redis://` and `rediss://`: Redis 7.0 and later, or Valkey. Each operation is one script, and one round trip.
//!
//! What counts is decided in the scripts (`*.lua`, beside this file), by the server's clock; they do the same as
//! `portcullis_decision::ledger`. Here is what can go wrong on the way there: two connections, each with a keeper that
//! replaces it (`lane`); an operation whose reply was lost with its connection is asked again, under the same id.
//!
//! Left out on purpose: log lines and metrics ([`super::watched`]), and clusters, whose keys live apart.

mod address;
mod fault;
mod lane;
mod link;
mod script;

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use portcullis_decision::charge::{ChargePlan, Charged};
use portcullis_decision::config::{LimiterConfig, StoreUrl};
use portcullis_decision::ledger::Settled;
use portcullis_decision::operation::OperationId;
use portcullis_decision::wire::Return;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use self::fault::Then;
use self::lane::{Dialer, Lane};
use self::link::{Link, Refusal};
use self::script::{Answer as Words, Call};
use super::{Answer, Limiter, OpenFault, StoreFault};

/// Connections of one process: a second so that one that went bad alone takes nothing with it.
const LANES: usize = 2;
/// Timeouts in a row, whichever the connection, that end all of them: the store is frozen, or out of reach.
const TIMEOUTS_TO_BREAK_ALL: u32 = 3;
/// Operations of a batch that travel in one message.
const BATCH: usize = 256;

/// A limiter in a Redis.
#[derive(Debug)]
pub struct RedisLimiter {
    scheme: &'static str,
    prefix: String,
    /// A timeout says something about the store only if it was given at least this long.
    telling_wait: Duration,
    dialer: Arc<Dialer>,
    lanes: [Arc<Lane>; LANES],
    next_lane: AtomicUsize,
    timeouts: AtomicU32,
    keepers: OnceLock<Vec<AbortHandle>>,
}

impl Drop for RedisLimiter {
    fn drop(&mut self) {
        self.keepers.get().into_iter().flatten().for_each(AbortHandle::abort);
    }
}

impl RedisLimiter {
    /// The limiter at `url`. Dials nothing before its first operation, so it needs no runtime.
    ///
    /// # Errors
    /// An address that can't be read.
    pub fn open(url: &StoreUrl, config: &LimiterConfig) -> Result<Self, OpenFault> {
        let op_timeout = Duration::from_millis(config.op_timeout_ms);
        let client = address::client(url.secret())?;
        let prefix = config.key_prefix.clone();
        Ok(Self {
            scheme: if url.scheme() == "rediss" { "rediss" } else { "redis" },
            prefix: prefix.clone(),
            telling_wait: op_timeout.checked_div(4).unwrap_or_default(),
            dialer: Arc::new(Dialer {
                client,
                prefix,
                op_timeout,
            }),
            lanes: std::array::from_fn(|_| Arc::new(Lane::new())),
            next_lane: AtomicUsize::new(0),
            timeouts: AtomicU32::new(0),
            keepers: OnceLock::new(),
        })
    }

    /// Starts the keepers, at the first operation.
    fn start(&self) {
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

    /// Runs calls of one script. If the connection breaks under them they are asked again over another one, with the same
    /// ids, so that nothing is counted twice. As often as there are connections: what cuts one mostly cuts them all, and
    /// each notices only when it is used; the next is a new one.
    async fn ask(&self, calls: &[Call], deadline: Instant) -> Result<Vec<Words>, StoreFault> {
        self.start();
        let mut lost = 0;
        loop {
            let fault = match self.choose(deadline).await {
                None => StoreFault::CircuitOpen,
                Some((lane, link)) => match Attempt::new(self, lane, link, deadline).run(calls).await {
                    Ok(answers) => return Ok(answers),
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

    /// Runs one call for each item, in order; an item is an operation, or says what becomes of one.
    async fn ask_each<I: Copy + Send + Sync, T: Send>(
        &self,
        items: &[I],
        deadline: Instant,
        call: impl Fn(I) -> Call + Send + Sync,
        mut take: impl FnMut(I, &Words) -> Option<T> + Send,
    ) -> Result<Vec<T>, StoreFault> {
        let mut taken = Vec::with_capacity(items.len());
        for batch in items.chunks(BATCH) {
            let calls: Vec<Call> = batch.iter().map(|item| call(*item)).collect();
            for (item, words) in batch.iter().zip(self.ask(&calls, deadline).await?) {
                taken.push(take(*item, &words).ok_or(StoreFault::NotSensible)?);
            }
        }
        Ok(taken)
    }
}

/// One try over one connection. Its timeout counts even if the caller, who has the same deadline, stops waiting first.
struct Attempt<'a> {
    limiter: &'a RedisLimiter,
    lane: &'a Lane,
    link: Arc<Link>,
    start: Instant,
    deadline: Instant,
    is_settled: bool,
}

impl<'a> Attempt<'a> {
    fn new(limiter: &'a RedisLimiter, lane: &'a Lane, link: Arc<Link>, deadline: Instant) -> Self {
        Self {
            limiter,
            lane,
            link,
            start: Instant::now(),
            deadline,
            is_settled: false,
        }
    }

    async fn run(mut self, calls: &[Call]) -> Result<Vec<Words>, StoreFault> {
        let result: Result<_, Refusal> = self.link.ask(calls, self.deadline).await;
        match result {
            Err((StoreFault::Timeout, Then::Keep)) => Err(StoreFault::Timeout),
            result => {
                self.is_settled = true;
                self.lane.answered();
                self.limiter.timeouts.store(0, Ordering::Relaxed);
                result.map_err(|(fault, then)| {
                    if then == Then::Redial {
                        self.lane.drop_link(&self.link, fault);
                    }
                    fault
                })
            }
        }
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        let told = self.deadline.saturating_duration_since(self.start) >= self.limiter.telling_wait;
        if self.is_settled || !told || Instant::now() < self.deadline {
            return;
        }
        let all = self.limiter.timeouts.fetch_add(1, Ordering::Relaxed).saturating_add(1) >= TIMEOUTS_TO_BREAK_ALL;
        if self.lane.timed_out() || all {
            self.lane.drop_link(&self.link, StoreFault::Timeout);
        }
        if all {
            for lane in &self.limiter.lanes {
                if let Some(link) = lane.link() {
                    lane.drop_link(&link, StoreFault::Timeout);
                }
            }
        }
    }
}

impl Limiter for RedisLimiter {
    fn scheme(&self) -> &'static str {
        self.scheme
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn charge<'a>(&'a self, plan: &'a ChargePlan, slot_ttl: Duration, deadline: Instant) -> Answer<'a, Charged> {
        Box::pin(async move {
            let call = Call::charge(&self.prefix, plan, slot_ttl);
            let answers = self.ask(&[call], deadline).await?;
            answers
                .first()
                .and_then(|answer| answer.charged(plan))
                .ok_or(StoreFault::NotSensible)
        })
    }

    fn cancel<'a>(&'a self, ops: &'a [OperationId], deadline: Instant) -> Answer<'a, ()> {
        Box::pin(async move {
            let call = |op| Call::cancel(&self.prefix, op);
            self.ask_each(ops, deadline, call, |_, words| words.done())
                .await
                .map(drop)
        })
    }

    fn settle<'a>(&'a self, settled: &'a [Settled], deadline: Instant) -> Answer<'a, ()> {
        Box::pin(async move {
            let call = |settled| Call::settle(&self.prefix, settled);
            self.ask_each(settled, deadline, call, |_, words| words.done())
                .await
                .map(drop)
        })
    }

    fn give_back_parts<'a>(&'a self, parts: &'a [Return], deadline: Instant) -> Answer<'a, ()> {
        Box::pin(async move {
            let call = |part| Call::part(&self.prefix, part);
            self.ask_each(parts, deadline, call, |_, words| words.done())
                .await
                .map(drop)
        })
    }

    fn renew<'a>(
        &'a self,
        ops: &'a [OperationId],
        slot_ttl: Duration,
        deadline: Instant,
    ) -> Answer<'a, Vec<OperationId>> {
        Box::pin(async move {
            let call = |op| Call::renew(&self.prefix, op, slot_ttl);
            let lost = |op, words: &Words| words.kept().map(|kept| (!kept).then_some(op));
            Ok(self
                .ask_each(ops, deadline, call, lost)
                .await?
                .into_iter()
                .flatten()
                .collect())
        })
    }

    fn ping(&self, deadline: Instant) -> Answer<'_, ()> {
        Box::pin(async move {
            match self.ask(&[Call::probe(&self.prefix)], deadline).await {
                Ok(answers) => answers.first().and_then(Words::done).ok_or(StoreFault::NotSensible),
                // Who asks how the store is wants to know why it is not asked.
                Err(StoreFault::CircuitOpen) => Err(self
                    .lanes
                    .iter()
                    .find_map(|lane| lane.fault())
                    .unwrap_or(StoreFault::CircuitOpen)),
                Err(fault) => Err(fault),
            }
        })
    }

    fn may_evict(&self, deadline: Instant) -> Answer<'_, bool> {
        Box::pin(async move {
            let (_, link) = self.choose(deadline).await.ok_or(StoreFault::CircuitOpen)?;
            let settings = link.settings(&["maxmemory", "maxmemory-policy"], deadline).await?;
            let is_bounded = settings.get("maxmemory").is_some_and(|bytes| bytes != "0");
            // Every other policy may drop our keys, since all of them have a time to live.
            let drops = settings
                .get("maxmemory-policy")
                .is_some_and(|policy| policy != "noeviction");
            Ok(is_bounded && drops)
        })
    }
}
