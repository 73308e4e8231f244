//! Policies: one trait for every store that knows organizations, providers and prices, and the choice of a store by its address.
//!
//! A store only answers: unknown is an answer, not being able to answer is a fault. Which models an organization may use
//! and which pattern means a model most closely is decided in `portcullis_decision::policy`. How long an answer counts is
//! decided in [`cache`].

pub mod apply;
pub mod cache;
mod document;
mod file;
mod tables;

use std::sync::Arc;

use portcullis_decision::config::{Faults, PolicyConfig};
use portcullis_decision::policy::{ModelPattern, Org, Price};
use tokio::time::Instant;

use crate::limiter::Answer;
use crate::postgres::Postgres;

/// Which provider serves which model: all patterns.
pub type Registry = Vec<(ModelPattern, String)>;

/// What models cost: all patterns.
pub type Prices = Vec<(ModelPattern, Price)>;

/// Knows organizations, providers and prices.
///
/// An operation gives up at its deadline by itself.
pub trait PolicyStore: Send + Sync + 'static {
    /// The scheme of its address: all that may be shown.
    fn scheme(&self) -> &'static str;

    /// An organization with its plan's figures; `None` if there is none of this id.
    fn org<'a>(&'a self, id: &'a str, deadline: Instant) -> Answer<'a, Option<Arc<Org>>>;

    /// The whole registry: which pattern is the closest needs all of them.
    fn registry(&self, deadline: Instant) -> Answer<'_, Arc<Registry>>;

    /// The whole price list, for the same reason.
    fn prices(&self, deadline: Instant) -> Answer<'_, Arc<Prices>>;

    /// Whether lookups would be answered. A database whose tables are missing or too old gets them, however long it takes.
    fn ping(&self, deadline: Instant) -> Answer<'_, ()>;
}

/// The policy store of a configuration, or `None` without an address. Doesn't wait for a database: whether it can be
/// reached shows in `/ready`. A policy file is read.
///
/// # Errors
/// An address that can't be read, or all faults of the policy file.
pub fn open(config: &PolicyConfig) -> Result<Option<Arc<dyn PolicyStore>>, Faults> {
    let Some(url) = &config.url else { return Ok(None) };
    if url.scheme() == "file" {
        return Ok(Some(Arc::new(file::FilePolicy::open(url.secret())?)));
    }
    match Postgres::open(url) {
        Ok(database) => Ok(Some(Arc::new(tables::PolicyTables::new(database)))),
        Err(fault) => {
            let mut faults = Faults::default();
            faults.add(
                "policy.url",
                format!("{fault}; it comes from POSTGRES_DSN or else policy.url"),
            );
            Err(faults)
        }
    }
}
