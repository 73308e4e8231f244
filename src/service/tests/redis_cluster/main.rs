//! A real cluster of Redis servers: charges over several of them, slots that move, members that fail, processes that die.
#![allow(
    clippy::arithmetic_side_effects,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    missing_docs,
    reason = "a test stops at the first surprise, with a message"
)]

mod charging;
mod dying;
mod failing;
mod moving;
mod scene;

#[allow(dead_code, reason = "shared with the tests of the service, which use more of it")]
#[path = "../service/process.rs"]
mod process;
#[allow(
    dead_code,
    reason = "shared with the tests of Redis's failures, which use more of it"
)]
#[path = "../stores/proxy.rs"]
mod proxy;
#[path = "../stores/mod.rs"]
mod stores;
#[allow(dead_code, reason = "shared with the tests of the service, which use more of it")]
#[path = "../service/wire.rs"]
mod wire;
