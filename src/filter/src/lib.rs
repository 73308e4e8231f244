//! The Proxy-Wasm filter: host glue around `portcullis-decision`, and no decision of its own.
//!
//! `host` speaks the Proxy-Wasm ABI 0.2.1, `vm` maps its callbacks to events of the pure state machines, `carrier`
//! carries out their effects. The crate's own ABI layer replaces the SDK's because the SDK panics where a host returns a
//! status that it does not expect or calls back out of order, and a panic is a trap: a trap hangs streams on one host and
//! forwards them on another.
#![cfg(target_arch = "wasm32")]

mod carrier;
mod header_map;
mod host;
mod memory;
mod metrics;
mod vm;
