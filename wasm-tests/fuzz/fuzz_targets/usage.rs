//! Any bytes as a response, of which the usage is read: whole, cut in two and byte by byte. What is asserted stands beside
//! the parser.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| portcullis_decision::fuzz::fuzz_usage(data));
