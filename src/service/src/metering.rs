//! The metering store: what records runs and cost. One trait for every store, and the choice of a store by its address.
//!
//! What fits into a month and what a denial means is decided in `portcullis_decision::metering`. Every store does the same
//! as `MeterLedger` there, in one atomic step, by its own clock.
//!
//! Left out on purpose: timing, error metrics and log lines, which [`watched::WatchedMeter`] adds for every store.

pub mod memory;
pub mod postgres;
pub mod watched;

use std::sync::Arc;

use portcullis_decision::config::MeteringConfig;
use portcullis_decision::metering::{Cost, MeterPlan, Metered};
use portcullis_decision::operation::OperationId;
use tokio::time::Instant;

use crate::limiter::Answer;
use crate::postgres::AddressFault;
use crate::unmetered::Admission;

/// Why an operation is cancelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cancel {
    /// The answer to its record got lost, or a later gate denied. What was journaled of it stays.
    GiveBack,
    /// Nobody waits for its decision any more: nothing ran, so what this service has journaled of it is taken back too.
    Void,
}

/// Whether looking after the tables is over for now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tended {
    /// It is.
    AllDone,
    /// There was more than one look takes.
    MoreToDo,
}

/// Records runs and cost. Every operation is idempotent by operation id.
pub trait Meter: Send + Sync + 'static {
    /// The scheme of its address: all that may be shown.
    fn scheme(&self) -> &'static str;

    /// Whether other service processes record in the same place.
    fn is_shared(&self) -> bool;

    /// Checks and records a run, or neither, in one atomic step.
    fn record<'a>(&'a self, plan: &'a MeterPlan, deadline: Instant) -> Answer<'a, Metered>;

    /// Gives back what these operations recorded, and keeps them from recording anything later, whichever comes first.
    fn cancel<'a>(&'a self, ops: &'a [OperationId], why: Cancel, deadline: Instant) -> Answer<'a, ()>;

    /// Adds what these operations have cost, each once, to their orgs' months: of its record, or else the present one.
    fn add_costs<'a>(&'a self, costs: &'a [Cost], deadline: Instant) -> Answer<'a, ()>;

    /// Keeps these admissions for billing and counts each in its month, exactly once. `None` if this store keeps none.
    fn journal<'a>(&'a self, admissions: &'a [Admission], deadline: Instant) -> Option<Answer<'a, ()>>;

    /// Whether the store answers, and would take a record.
    fn ping(&self, deadline: Instant) -> Answer<'_, ()>;

    /// Brings its tables up to this version, and forgets operations that nobody asks about any more, some at a time.
    fn tend(&self) -> Answer<'_, Tended>;
}

/// Why a meter could not be made of a configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OpenFault {
    /// No store for this scheme.
    #[error("this version has no metering store for {scheme}:; postgres:// is one, and memory: for development")]
    UnknownScheme {
        /// The scheme: all of the address that may be shown.
        scheme: String,
    },
    /// Not an address, though its scheme is known.
    #[error(transparent)]
    Address(#[from] AddressFault),
}

/// The metering store of a configuration, or `None` without an address. Doesn't wait for the store.
///
/// # Errors
/// A scheme that this version has no store for, or an address that can't be read.
pub fn open(config: &MeteringConfig) -> Result<Option<Arc<dyn Meter>>, OpenFault> {
    let Some(url) = &config.url else { return Ok(None) };
    match url.scheme() {
        "memory" => Ok(Some(Arc::new(memory::MemoryMeter::default()))),
        "postgres" | "postgresql" => Ok(Some(Arc::new(postgres::PostgresMeter::open(url)?))),
        scheme => Err(OpenFault::UnknownScheme {
            scheme: scheme.to_owned(),
        }),
    }
}
