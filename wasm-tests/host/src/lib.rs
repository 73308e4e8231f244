//! A small Proxy-Wasm host that runs the real filter module, and of which everything can be scripted: what each host call
//! answers, what time it is, in which order callbacks come, and what becomes of a callout.
//!
//! It exists because no real host can be made to fail on demand. It decides nothing about admission: it carries out what
//! the module asks, as the [`Personality`] does, records it, and notes as a [`Violation`] whatever a correct filter never
//! does. Bodies come in the pieces that a test chooses, and go on as the host would send them. Left out on purpose: sockets;
//! `README.md` lists what real hosts do besides, and which of it is imitated.
#![allow(
    clippy::arithmetic_side_effects,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test-only: the first surprise is to end the test, with a message"
)]

mod callout;
mod clock;
mod driver;
mod fault;
mod guest;
mod headers;
mod imports;
mod ledger;
mod links;
mod metrics;
mod module;
mod personality;
mod shared_data;
mod stream;
mod violation;
mod world;

pub use callout::{Callout, Failure};
pub use driver::{Rejected, TestHost};
pub use fault::{Call, Faults, status};
pub use headers::{Headers, first, headers, parse, serialize};
pub use ledger::{Ledger, Spent, Tally};
pub use links::Links;
pub use module::{filter_module, filter_module_sha256};
pub use personality::{AfterTrap, Configures, End, EndOfHeaders, Personality, RequestBody, Upstreams};
pub use shared_data::{Meddle, SharedData, SharedDataKind};
pub use stream::{LocalReply, Phase, Stream};
pub use violation::Violation;
pub use world::LogLine;

/// A context's id, of a root or of a stream.
pub type ContextId = u32;
