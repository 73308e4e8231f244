//! Policies from a real PostgreSQL, by way of PgBouncer, and from a file: what the service answers, and how it fails.
#![allow(
    clippy::arithmetic_side_effects,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    missing_docs,
    reason = "a test stops at the first surprise, with a message"
)]

mod answering;
mod applying;
mod enforcing;
mod from_file;
mod leasing;
mod outages;
mod policies;
#[path = "../stores/postgres.rs"]
mod postgres;
#[allow(dead_code, reason = "shared with the tests of the service, which use more of it")]
#[path = "../service/process.rs"]
mod process;
#[path = "../stores/mod.rs"]
mod stores;
mod tls;
#[allow(dead_code, reason = "shared with the tests of the service, which use more of it")]
#[path = "../service/wire.rs"]
mod wire;
