//! The pure decisions of Portcullis: what an envelope says, which limits bind, what a rule file means, what a request's
//! fate is and how the reply looks.
//!
//! Left out on purpose: clocks, I/O, host names and store drivers. Time comes in as milliseconds, answers of stores and
//! services come in as values, and what is to be done goes out as values. The filter, the service and the command line
//! run this same code, so there is one decision path.
#![no_std]
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

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod allowance;
pub mod body;
pub mod breaker;
pub mod charge;
pub mod class;
pub mod config;
pub mod cost;
pub mod envelope;
pub mod evaluation;
pub mod ext_authz;
pub mod fuzz;
pub mod gatehouse;
pub mod hold;
pub mod json;
pub mod json_scan;
pub mod launch_rate;
pub mod lease;
pub mod ledger;
pub mod limits;
pub mod log_line;
pub mod metering;
pub mod metric;
#[cfg(feature = "mutation")]
pub mod mutation;
pub mod operation;
pub mod outbox;
pub mod policy;
pub mod reply;
pub mod routes;
pub mod rules;
pub mod signature;
pub mod stream;
pub mod trace;
pub mod usage;
pub mod verdict;
pub mod wire;
