//! Any bytes as a signed request: one way to write a signature, what was signed is trusted, and nothing else is. What is
//! asserted stands in the pure crate.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| portcullis_decision::fuzz::fuzz_signature(data));
