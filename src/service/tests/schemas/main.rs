//! JSON Schemas: they are what the repository holds, they say what the parsers say, and every file of the project obeys them.
#![allow(
    clippy::arithmetic_side_effects,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "tests: a panic is a failure, with its message"
)]

mod agreement;
mod complete;
mod files;
mod kept;
mod tree;
