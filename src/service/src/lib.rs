//! The decision service of Portcullis: HTTP in front of the pure decisions, stores behind them.
//!
//! What a request's fate is stands in `portcullis-decision`; here is what that crate leaves out on purpose: clocks,
//! sockets, stores, logs and metrics.
#![cfg_attr(
    test,
    allow(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        missing_docs
    )
)]

pub mod admin;
mod backlog;
pub mod bills;
pub mod canary;
pub mod check;
pub mod cli;
pub mod connections;
pub mod decide;
pub mod door;
pub mod drill;
pub mod envelope;
pub mod explain;
pub mod ext_authz;
pub mod fault_switch;
pub mod flights;
pub mod gates;
pub mod give_back;
pub mod http;
pub mod imagined;
pub mod launches;
pub mod leases;
pub mod limiter;
pub mod logs;
pub mod metering;
pub mod metrics;
pub mod outliving;
pub mod policy;
pub mod postgres;
pub mod readiness;
pub mod recent;
pub mod replay;
pub mod rereading;
mod roots;
pub mod schema;
pub mod serve;
pub mod settle;
pub mod spans;
pub mod tls;
pub mod tokens;
pub mod unmetered;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

/// The lock, also after a panic of another holder: every value behind one is sound between any two statements.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `duration` after `instant`; a duration beyond the clock's range counts as a day.
fn after(instant: Instant, duration: Duration) -> Instant {
    let day = Duration::from_secs(86_400);
    instant
        .checked_add(duration)
        .or_else(|| instant.checked_add(day))
        .unwrap_or(instant)
}

/// Seconds since 1970 by the wall clock; `None` if that is set to before.
fn unix_s() -> Option<u64> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.ok().map(|since| since.as_secs())
}

/// Random bytes of the operating system; `None` if it has none.
fn random<const N: usize>() -> Option<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).ok().map(|()| bytes)
}

/// Whole milliseconds since `epoch`, on the monotonic clock.
fn millis_since(epoch: Instant) -> u64 {
    u64::try_from(Instant::now().saturating_duration_since(epoch).as_millis()).unwrap_or(u64::MAX)
}
