//! A real Redis, and every way in which it can fail: what the limiter does, and what the service answers.
#![allow(
    clippy::arithmetic_side_effects,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    missing_docs,
    reason = "a test stops at the first surprise, with a message"
)]

mod addresses;
#[path = "../stores/certificates.rs"]
mod certificates;
#[path = "../stores/chromium.rs"]
mod chromium;
mod connections;
mod console;
mod counting;
mod enforcing;
mod eviction;
mod keys;
mod outages;
mod secrets;

#[allow(dead_code, reason = "shared with the tests of the service, which use more of it")]
#[path = "../service/process.rs"]
mod process;
#[path = "../stores/proxy.rs"]
mod proxy;
#[path = "../stores/mod.rs"]
mod stores;
#[allow(dead_code, reason = "shared with the tests of the service, which use more of it")]
#[path = "../service/wire.rs"]
mod wire;
