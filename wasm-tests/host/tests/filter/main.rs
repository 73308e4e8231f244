//! The real filter module under the test host: what it does with answers, outages, and hosts that fail.
#![allow(
    clippy::arithmetic_side_effects,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test ends at the first surprise, with a message"
)]

mod bodies;
mod body_faults;
mod breaker;
mod cases;
mod configurations;
mod costs;
mod decisions;
mod disorder;
mod drains;
mod examples;
mod failing_calls;
mod headers;
mod interleavings;
mod lease_faults;
mod lease_interleavings;
mod lease_scene;
mod leases;
mod llm;
mod memory;
mod personalities;
mod poor_hosts;
mod scene;
mod signatures;
mod slots;
#[path = "../../../../src/decision/tests/table/mod.rs"]
mod table;
mod traces;
mod unavailable;
mod usage;
mod withholding;
mod withholding_interleavings;
