//! Metering: the stores alone, then the service over a real PostgreSQL that fails in every way.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    missing_docs,
    reason = "a test may stop at the first surprise"
)]

#[path = "../stores/postgres.rs"]
mod postgres;
#[path = "../service/process.rs"]
#[allow(dead_code, reason = "every test binary uses a part of it")]
mod process;
#[path = "../stores/proxy.rs"]
#[allow(dead_code, reason = "every test binary uses a part of it")]
mod proxy;
#[path = "../stores/mod.rs"]
mod stores;
#[path = "../service/wire.rs"]
#[allow(dead_code, reason = "every test binary uses a part of it")]
mod wire;

mod adding;
mod billing;
mod costs;
mod outages;
mod races;
mod store;
