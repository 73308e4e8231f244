//! Any bytes as a request's body: read whole, cut in two and byte by byte. What is asserted stands beside the parser.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| portcullis_decision::fuzz::fuzz_body(data));
