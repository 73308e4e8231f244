//! `portcullis replay` as users run it. A log that real Envoy wrote is replayed where Envoy is
//! (`wasm-tests/tests/envoy/replayed.rs`).
#![allow(
    clippy::arithmetic_side_effects,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    missing_docs,
    reason = "a test stops at the first surprise, with a message"
)]

mod counting;
mod memory;
#[path = "../service/process.rs"]
#[allow(dead_code, reason = "every test binary uses a part of it")]
mod process;
#[path = "../service/wire.rs"]
#[allow(dead_code, reason = "every test binary uses a part of it")]
mod wire;
