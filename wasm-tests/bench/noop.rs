//! A filter that does nothing: it exports what Portcullis exports and answers "go on" to each callback. What it costs is the
//! floor for every filter of this kind, whatever it does.
//!
//! Built by scripts/bench with rustc alone, for wasm32-unknown-unknown: no library, no constructors, no host calls.

mod idle;

#[no_mangle]
extern "C" fn proxy_on_memory_allocate(size: usize) -> *mut u8 {
    Box::leak(vec![0; size].into_boxed_slice()).as_mut_ptr()
}

#[no_mangle]
extern "C" fn proxy_on_configure(_context: u32, _size: usize) -> u32 {
    1
}

#[no_mangle]
extern "C" fn proxy_on_request_headers(_context: u32, _count: usize, _end_of_stream: u32) -> u32 {
    0
}
