//! The callbacks in which a filter of the benchmark does nothing, whatever it does in the others.

#[no_mangle]
extern "C" fn proxy_abi_version_0_2_1() {}

#[no_mangle]
extern "C" fn proxy_on_context_create(_context: u32, _parent: u32) {}

#[no_mangle]
extern "C" fn proxy_on_vm_start(_context: u32, _size: usize) -> u32 {
    1
}

#[no_mangle]
extern "C" fn proxy_on_tick(_context: u32) {}

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
