//! The binary as users run it: over real HTTP, with real files, signals and exit codes.
#![allow(
    clippy::arithmetic_side_effects,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    missing_docs,
    reason = "a test stops at the first surprise, with a message"
)]

mod admin;
mod bounds;
#[path = "../stores/certificates.rs"]
mod certificates;
#[path = "../collector/mod.rs"]
mod collector;
mod command_line;
mod deciding;
mod drilling;
mod ending;
mod enforcing;
mod envelopes;
mod ext_authz;
mod faults;
mod leasing;
mod process;
mod settling;
mod surfaces;
mod tls;
mod tokens;
mod tracing;
mod wire;
