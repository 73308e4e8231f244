//! The limiter: what counts. One trait for every store, and the choice of a store by its address.
//!
//! A limiter only counts: which entries a request touches, their order and what their states mean is decided in
//! `portcullis_decision::charge`. Every store does the same as `portcullis_decision::ledger::Ledger`, in one atomic step.
//!
//! Left out on purpose: timing, error metrics and log lines, which [`watched::WatchedLimiter`] adds for every store.

pub mod memory;
pub mod redis;
pub mod watched;

use std::future::ready;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use portcullis_decision::charge::{ChargePlan, Charged};
use portcullis_decision::config::LimiterConfig;
use portcullis_decision::ledger::Settled;
use portcullis_decision::operation::OperationId;
use portcullis_decision::wire::Return;
use tokio::time::{Instant, timeout_at};

/// The answer of a store to come.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreFault>> + Send + 'a>>;

/// Counts windows and slots. Every operation is idempotent by operation id.
///
/// An operation gives up at its deadline by itself; who calls it also stops waiting then, so a future that is dropped
/// must not leave the store's connection unusable.
pub trait Limiter: Send + Sync + 'static {
    /// The scheme of its address: all that may be shown.
    fn scheme(&self) -> &'static str;

    /// Whether other service processes count in the same place.
    fn is_shared(&self) -> bool;

    /// Charges every entry of a plan or none, in one atomic step; as often as a block has admissions, if one is asked for. Slots live for `slot_ttl` without renewal.
    fn charge<'a>(&'a self, plan: &'a ChargePlan, slot_ttl: Duration, deadline: Instant) -> Answer<'a, Charged>;

    /// Gives back all that these operations took, and keeps them from taking anything later, whichever comes first.
    fn cancel<'a>(&'a self, ops: &'a [OperationId], deadline: Instant) -> Answer<'a, ()>;

    /// Frees the slots of operations whose streams have ended, and replaces their token holds where the tokens are
    /// given: once, and in the windows that were charged. Of an operation that was cancelled, or is not known, nothing is
    /// left to settle.
    fn settle<'a>(&'a self, settled: &'a [Settled], deadline: Instant) -> Answer<'a, ()>;

    /// Gives back parts of blocks, each once by its own id, and only in the windows that were charged. Of an operation that
    /// was cancelled, or is not known, there is no part.
    fn give_back_parts<'a>(&'a self, parts: &'a [Return], deadline: Instant) -> Answer<'a, ()>;

    /// Prolongs the slots of these operations. Returns those of which a slot had lapsed; they are not revived.
    fn renew<'a>(
        &'a self,
        ops: &'a [OperationId],
        slot_ttl: Duration,
        deadline: Instant,
    ) -> Answer<'a, Vec<OperationId>>;

    /// Whether the store answers, and would take a charge.
    fn ping(&self, deadline: Instant) -> Answer<'_, ()>;

    /// Whether the store says that it may drop counters to make room. One that does not tell does not say so.
    fn may_evict(&self, _deadline: Instant) -> Answer<'_, bool> {
        Box::pin(ready(Ok(false)))
    }
}

/// A store's answer, [`StoreFault::Timeout`] if it comes after `until`, and how many seconds it took.
pub(crate) async fn within<T>(until: Instant, answer: Answer<'_, T>) -> (Result<T, StoreFault>, f64) {
    let start = Instant::now();
    let mut answer = timeout_at(until, answer).await.unwrap_or(Err(StoreFault::Timeout));
    let end = Instant::now();
    // A future that is ready is polled to its end also when its time is over.
    if end > until && answer.is_ok() {
        answer = Err(StoreFault::Timeout);
    }
    (answer, end.saturating_duration_since(start).as_secs_f64())
}

/// Why a store gave no answer. Never carries the store's own words, which may hold an address or a password.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum StoreFault {
    /// No answer before the deadline.
    #[error("no answer in time")]
    Timeout,
    /// No connection, or it broke.
    #[error("the connection failed")]
    Connection,
    /// The store takes no writes (a replica, after a failover).
    #[error("the store is read-only")]
    ReadOnly,
    /// The store has no memory left.
    #[error("the store is out of memory")]
    OutOfMemory,
    /// The store is still reading its data.
    #[error("the store is loading")]
    Loading,
    /// The store does not know us, or forbids the command.
    #[error("the store refused access")]
    AccessDenied,
    /// An answer of another shape than asked for.
    #[error("the answer made no sense")]
    NotSensible,
    /// Every connection that there may be is in use, here or at the store.
    #[error("no connection was free")]
    PoolExhausted,
    /// The store lacks our tables, or they are too old.
    #[error("the tables are missing or too old")]
    Schema,
    /// The cluster as a whole, or the part of it that is asked for, is served by nobody.
    #[error("the cluster is down, or a part of it")]
    ClusterDown,
    /// Not asked: the last attempts failed, and the next one is not due.
    #[error("not asked, after failures")]
    CircuitOpen,
}

impl StoreFault {
    /// The label `kind` of logs and metrics.
    pub const fn kind(self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::Connection => "connection",
            Self::ReadOnly => "read_only",
            Self::OutOfMemory => "out_of_memory",
            Self::Loading => "loading",
            Self::AccessDenied => "access_denied",
            Self::NotSensible => "not_sensible",
            Self::PoolExhausted => "pool_exhausted",
            Self::Schema => "schema",
            Self::ClusterDown => "cluster_down",
            Self::CircuitOpen => "circuit_open",
        }
    }

    /// Whether the operation may have been carried out all the same: then it has to be given back.
    pub const fn may_have_happened(self) -> bool {
        matches!(self, Self::Timeout | Self::Connection | Self::NotSensible)
    }

    /// What an attempt that failed with this says together with an `earlier` one of the same operation: the earlier one may
    /// have been carried out, whatever became of this one.
    #[must_use]
    pub const fn after(self, earlier: Self) -> Self {
        if earlier.may_have_happened() && !self.may_have_happened() {
            earlier
        } else {
            self
        }
    }
}

/// Why a limiter could not be made of a configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OpenFault {
    /// No store for this scheme.
    #[error(
        "this version has no limiter for {scheme}://; redis://, rediss://, redis-cluster:// and rediss-cluster:// are, and \
         memory: for development"
    )]
    UnknownScheme {
        /// The scheme: all of the address that may be shown.
        scheme: String,
    },
    /// Not an address, though its scheme is known. Which of the keys it came from, the configuration no longer says.
    #[error(
        "must be redis[s]://[[user]:password@]host[:port][/database] or \
         redis[s]-cluster://[[user]:password@]host[:port][,host[:port]...], from the first that is set of REDIS_URL, \
         limiter.url and store_url (its value is not shown)"
    )]
    MalformedAddress,
}

/// The limiter of a configuration, or `None` without an address (development only: the parser sees to that). Doesn't
/// wait for the store: whether it can be reached shows in `/ready`.
///
/// # Errors
/// A scheme that this version has no store for, or an address that can't be read.
pub fn open(config: &LimiterConfig) -> Result<Option<Arc<dyn Limiter>>, OpenFault> {
    let Some(url) = &config.url else { return Ok(None) };
    match url.scheme() {
        "memory" => Ok(Some(Arc::new(memory::MemoryLimiter::default()))),
        "redis" | "rediss" => Ok(Some(Arc::new(redis::RedisLimiter::open(url, config)?))),
        "redis-cluster" | "rediss-cluster" => Ok(Some(Arc::new(redis::cluster::ClusterLimiter::open(url, config)?))),
        scheme => Err(OpenFault::UnknownScheme {
            scheme: scheme.to_owned(),
        }),
    }
}
