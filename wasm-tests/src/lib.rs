//! The harness behind the tests that run the real `.wasm` in a real Envoy: the gateway, a counting upstream, the real
//! decision service, a scripted one that fails in every way a network service can, and clients that send what a
//! well-behaved library would refuse to send.
//!
//! It decides nothing about admission and knows no status code: what an answer has to be is written in the tests.
#![allow(
    missing_docs,
    clippy::arithmetic_side_effects,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test-only crate: a panic here is a failed test, with its message"
)]

mod client;
mod clients;
mod decision;
mod envelope;
mod gateway;
mod http2;
mod locate;
mod process;
mod provider;
mod service;
mod upstream;
mod wait;

pub use client::{Answer, Call, Connection};
pub use clients::PythonClient;
pub use decision::{Decision, FakeDecision};
pub use envelope::Envelope;
pub use gateway::{Gateway, GatewayPlan, merge};
pub use http2::{Http2, OpenStream};
pub use locate::{filter_module, filter_module_sha256, portcullis, repository};
pub use process::{closed_port, free_port};
pub use provider::{Behaviour, Provider, Used};
pub use service::{Service, check, development_service};
pub use upstream::{Reply, Seen, Upstream};
pub use wait::{DEADLINE, until};
