//! The real `.wasm` in a real Envoy with the real decision service. One binary, so that the harness is linked once.
#![allow(
    missing_docs,
    clippy::arithmetic_side_effects,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "tests: a panic is a failure, with its message"
)]

mod cancels;
mod capacity;
mod cases;
mod config_faults;
mod contract_limits;
mod envelope_headers;
mod expect;
mod grpc;
mod harness;
mod lifecycle;
mod outages;
#[path = "../../../src/service/tests/stores/postgres.rs"]
mod postgres;
mod routes;
mod shadow;
#[path = "../../../src/service/tests/stores/mod.rs"]
mod stores;
#[path = "../../../src/decision/tests/table/mod.rs"]
mod table;
mod unenforced;
mod world;
