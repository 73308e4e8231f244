//! A filter that does nothing: it exports what Portcullis exports and answers "go on" to each callback. What it costs is the
//! floor for every filter of this kind, whatever it does.
//!
//! Built by scripts/bench with rustc alone, for wasm32-unknown-unknown: no library, no constructors, no host calls.

#[no_mangle]
extern "C" fn proxy_abi_version_0_2_1() {}

#[no_mangle]
extern "C" fn proxy_on_memory_allocate(size: usize) -> *mut u8 {
    Box::leak(vec![0; size].into_boxed_slice()).as_mut_ptr()
}

#[no_mangle]
extern "C" fn proxy_on_context_create(_context: u32, _parent: u32) {}

#[no_mangle]
extern "C" fn proxy_on_vm_start(_context: u32, _size: usize) -> u32 {
    1
}

#[no_mangle]
extern "C" fn proxy_on_configure(_context: u32, _size: usize) -> u32 {
    1
}

#[no_mangle]
extern "C" fn proxy_on_tick(_context: u32) {}

#[no_mangle]
extern "C" fn proxy_on_request_headers(_context: u32, _count: usize, _end_of_stream: u32) -> u32 {
    0
}

#[no_mangle]
extern "C" fn proxy_on_request_body(_context: u32, _size: usize, _end_of_stream: u32) -> u32 {
    0
}

#[no_mangle]
extern "C" fn proxy_on_request_trailers(_context: u32, _count: usize) -> u32 {
    0
}

#[no_mangle]
extern "C" fn proxy_on_response_headers(_context: u32, _count: usize, _end_of_stream: u32) -> u32 {
    0
}

#[no_mangle]
extern "C" fn proxy_on_response_body(_context: u32, _size: usize, _end_of_stream: u32) -> u32 {
    0
}

#[no_mangle]
extern "C" fn proxy_on_http_call_response(_context: u32, _token: u32, _headers: usize, _body: usize, _trailers: usize) {
}

#[no_mangle]
extern "C" fn proxy_on_done(_context: u32) -> u32 {
    1
}

#[no_mangle]
extern "C" fn proxy_on_log(_context: u32) {}

#[no_mangle]
extern "C" fn proxy_on_delete(_context: u32) {}
