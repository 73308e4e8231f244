//! The Proxy-Wasm ABI 0.2.1: the only file that calls the host, and the only one with `unsafe`.
//!
//! Every import returns a raw `u32`: 0 is OK, and any other number, known to the specification or not, is an `Err` that
//! the caller handles. Every export forwards to `vm`, which accepts calls in any order. Nothing here panics.
//!
//! Imports that a supported host lacks (`proxy_get_metric`, `proxy_get_log_level`) are not declared: one host refuses to
//! load a module that does.
#![allow(unsafe_code, reason = "the ABI is made of raw pointers; no other file has any")]

use core::ptr::{null, null_mut};

use portcullis_decision::log_line::Level;

use crate::vm;

/// What a host answered instead of OK. Its number is not interpreted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Refused;

type HostResult<T> = Result<T, Refused>;

/// Which header map.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Map {
    Request = 0,
    RequestTrailers = 1,
    Response = 2,
    CalloutAnswer = 6,
}

/// Which buffer.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Buffer {
    RequestBody = 0,
    ResponseBody = 1,
    CalloutAnswer = 4,
    PluginConfiguration = 7,
}

/// Which kind of metric.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kind {
    Counter = 0,
    Gauge = 1,
    Histogram = 2,
}

mod import {
    #[link(wasm_import_module = "env")]
    unsafe extern "C" {
        pub(super) fn proxy_log(level: u32, message: *const u8, size: usize) -> u32;
        pub(super) fn proxy_get_current_time_nanoseconds(time: *mut u64) -> u32;
        pub(super) fn proxy_set_tick_period_milliseconds(period: u32) -> u32;
        pub(super) fn proxy_get_buffer_bytes(
            buffer: u32,
            start: usize,
            max_size: usize,
            data: *mut *mut u8,
            size: *mut usize,
        ) -> u32;
        pub(super) fn proxy_get_header_map_pairs(map: u32, data: *mut *mut u8, size: *mut usize) -> u32;
        pub(super) fn proxy_remove_header_map_value(map: u32, name: *const u8, name_size: usize) -> u32;
        pub(super) fn proxy_add_header_map_value(
            map: u32,
            name: *const u8,
            name_size: usize,
            value: *const u8,
            value_size: usize,
        ) -> u32;
        pub(super) fn proxy_send_local_response(
            status: u32,
            details: *const u8,
            details_size: usize,
            body: *const u8,
            body_size: usize,
            headers: *const u8,
            headers_size: usize,
            grpc_status: i32,
        ) -> u32;
        pub(super) fn proxy_continue_stream(stream: u32) -> u32;
        pub(super) fn proxy_http_call(
            upstream: *const u8,
            upstream_size: usize,
            headers: *const u8,
            headers_size: usize,
            body: *const u8,
            body_size: usize,
            trailers: *const u8,
            trailers_size: usize,
            timeout_ms: u32,
            token: *mut u32,
        ) -> u32;
        pub(super) fn proxy_set_effective_context(context: u32) -> u32;
        pub(super) fn proxy_define_metric(kind: u32, name: *const u8, name_size: usize, id: *mut u32) -> u32;
        pub(super) fn proxy_increment_metric(id: u32, offset: i64) -> u32;
        pub(super) fn proxy_record_metric(id: u32, value: u64) -> u32;
        pub(super) fn proxy_done() -> u32;
        pub(super) fn proxy_get_shared_data(
            key: *const u8,
            key_size: usize,
            value: *mut *mut u8,
            value_size: *mut usize,
            version: *mut u32,
        ) -> u32;
        pub(super) fn proxy_set_shared_data(
            key: *const u8,
            key_size: usize,
            value: *const u8,
            value_size: usize,
            version: u32,
        ) -> u32;
    }

    #[link(wasm_import_module = "wasi_snapshot_preview1")]
    unsafe extern "C" {
        pub(super) fn clock_time_get(clock: u32, precision: u64, time: *mut u64) -> u32;
        pub(super) fn random_get(buffer: *mut u8, size: usize) -> u32;
    }
}

const fn checked(status: u32) -> HostResult<()> {
    if status == 0 { Ok(()) } else { Err(Refused) }
}

/// Takes over memory that the host has asked `proxy_on_memory_allocate` for and filled.
fn adopt(data: *mut u8, size: usize) -> Vec<u8> {
    if data.is_null() || size == 0 {
        return Vec::new();
    }
    // SAFETY: the ABI says that a host fills memory from `proxy_on_memory_allocate(size)`, which is a leaked `Vec<u8>` of
    // exactly this capacity, and hands it over with the call.
    unsafe { Vec::from_raw_parts(data, size, size) }
}

/// Writes a line to the host's log. A host that refuses has nowhere to be told.
pub(crate) fn log(level: Level, message: &str) {
    let level = match level {
        Level::Info => 2,
        Level::Warn => 3,
        Level::Error => 4,
    };
    // SAFETY: pointer and size are those of a live string.
    let _ = unsafe { import::proxy_log(level, message.as_ptr(), message.len()) };
}

/// Monotonic nanoseconds of WASI.
pub(crate) fn monotonic_ns() -> HostResult<u64> {
    const MONOTONIC: u32 = 1;
    wasi_ns(MONOTONIC)
}

/// Nanoseconds since 1970 of WASI.
pub(crate) fn realtime_ns() -> HostResult<u64> {
    const REALTIME: u32 = 0;
    wasi_ns(REALTIME)
}

fn wasi_ns(clock: u32) -> HostResult<u64> {
    let mut time = 0;
    // SAFETY: the pointer is to a live u64.
    checked(unsafe { import::clock_time_get(clock, 1_000_000, &raw mut time) })?;
    Ok(time)
}

/// Nanoseconds of the host's own clock.
pub(crate) fn wall_ns() -> HostResult<u64> {
    let mut time = 0;
    // SAFETY: the pointer is to a live u64.
    checked(unsafe { import::proxy_get_current_time_nanoseconds(&raw mut time) })?;
    Ok(time)
}

/// 128 random bits.
pub(crate) fn random() -> HostResult<[u8; 16]> {
    let mut bytes = [0; 16];
    // SAFETY: pointer and size are those of a live array.
    checked(unsafe { import::random_get(bytes.as_mut_ptr(), bytes.len()) })?;
    Ok(bytes)
}

/// Asks for ticks.
pub(crate) fn set_tick_period_ms(period_ms: u32) -> HostResult<()> {
    // SAFETY: no pointers.
    checked(unsafe { import::proxy_set_tick_period_milliseconds(period_ms) })
}

/// A buffer from its byte `start` on, at most `max_size` bytes of it.
pub(crate) fn buffer(buffer: Buffer, start: usize, max_size: usize) -> HostResult<Vec<u8>> {
    let (mut data, mut size) = (null_mut(), 0);
    // SAFETY: the pointers are to live locals.
    checked(unsafe { import::proxy_get_buffer_bytes(buffer as u32, start, max_size, &raw mut data, &raw mut size) })?;
    Ok(adopt(data, size))
}

/// A header map, serialized.
pub(crate) fn header_map(map: Map) -> HostResult<Vec<u8>> {
    let (mut data, mut size) = (null_mut(), 0);
    // SAFETY: the pointers are to live locals.
    checked(unsafe { import::proxy_get_header_map_pairs(map as u32, &raw mut data, &raw mut size) })?;
    Ok(adopt(data, size))
}

/// Removes every line of a header.
pub(crate) fn remove_header(map: Map, name: &str) -> HostResult<()> {
    // SAFETY: pointer and size are those of a live string.
    checked(unsafe { import::proxy_remove_header_map_value(map as u32, name.as_ptr(), name.len()) })
}

/// Adds a header.
pub(crate) fn add_header(map: Map, name: &str, value: &[u8]) -> HostResult<()> {
    // SAFETY: pointers and sizes are those of a live string and a live slice.
    checked(unsafe {
        import::proxy_add_header_map_value(map as u32, name.as_ptr(), name.len(), value.as_ptr(), value.len())
    })
}

/// Ends the request with a reply; `grpc_status` is -1 where it is none.
pub(crate) fn send_local_response(status: u16, body: &[u8], headers: &[u8], grpc_status: i32) -> HostResult<()> {
    // Shown by Envoy as RESPONSE_CODE_DETAILS, where it tells our replies from the upstream's.
    const DETAILS: &str = "portcullis";
    // SAFETY: pointers and sizes are those of live slices.
    checked(unsafe {
        import::proxy_send_local_response(
            u32::from(status),
            DETAILS.as_ptr(),
            DETAILS.len(),
            body.as_ptr(),
            body.len(),
            headers.as_ptr(),
            headers.len(),
            grpc_status,
        )
    })
}

/// Lets the paused request of the effective context go on.
pub(crate) fn resume_request() -> HostResult<()> {
    const REQUEST: u32 = 0;
    // SAFETY: no pointers.
    checked(unsafe { import::proxy_continue_stream(REQUEST) })
}

/// Calls an upstream; returns the token of the answer.
pub(crate) fn http_call(upstream: &str, headers: &[u8], body: &[u8], timeout_ms: u32) -> HostResult<u32> {
    let mut token = 0;
    // SAFETY: pointers and sizes are those of live slices; no trailers are an empty map.
    checked(unsafe {
        import::proxy_http_call(
            upstream.as_ptr(),
            upstream.len(),
            headers.as_ptr(),
            headers.len(),
            body.as_ptr(),
            body.len(),
            null(),
            0,
            timeout_ms,
            &raw mut token,
        )
    })?;
    Ok(token)
}

/// Makes later calls act on this context. `Ok(false)`: the host has no such context any more.
pub(crate) fn set_effective_context(context: u32) -> HostResult<bool> {
    const NOT_FOUND: u32 = 1;
    const BAD_ARGUMENT: u32 = 2;
    // SAFETY: no pointers.
    match unsafe { import::proxy_set_effective_context(context) } {
        NOT_FOUND | BAD_ARGUMENT => Ok(false),
        status => checked(status).map(|()| true),
    }
}

/// Defines a metric; returns its id.
pub(crate) fn define_metric(kind: Kind, name: &str) -> HostResult<u32> {
    let mut id = 0;
    // SAFETY: pointers are to live memory, the size is the string's.
    checked(unsafe { import::proxy_define_metric(kind as u32, name.as_ptr(), name.len(), &raw mut id) })?;
    Ok(id)
}

/// Adds to a counter. Hosts refuse an offset of 0 or less.
pub(crate) fn increment_metric(id: u32, offset: u64) -> HostResult<()> {
    let offset = i64::try_from(offset).unwrap_or(i64::MAX);
    // SAFETY: no pointers.
    checked(unsafe { import::proxy_increment_metric(id, offset) })
}

/// Sets a gauge, or adds a sample to a histogram.
pub(crate) fn record_metric(id: u32, value: u64) -> HostResult<()> {
    // SAFETY: no pointers.
    checked(unsafe { import::proxy_record_metric(id, value) })
}

/// A value of the memory that all workers share, and its version; `Ok(None)` if there is none under this key.
pub(crate) fn shared_data(key: &[u8]) -> HostResult<Option<(Vec<u8>, u32)>> {
    const NOT_FOUND: u32 = 1;
    let (mut data, mut size, mut version) = (null_mut(), 0, 0);
    // SAFETY: the pointers are to live memory, the size is the key's.
    let status = unsafe {
        import::proxy_get_shared_data(key.as_ptr(), key.len(), &raw mut data, &raw mut size, &raw mut version)
    };
    if status == NOT_FOUND {
        return Ok(None);
    }
    checked(status)?;
    Ok(Some((adopt(data, size), version)))
}

/// Replaces such a value if its version is still this one. `Ok(false)`: it is not.
pub(crate) fn set_shared_data(key: &[u8], value: &[u8], version: u32) -> HostResult<bool> {
    const CAS_MISMATCH: u32 = 8;
    // SAFETY: pointers and sizes are those of live slices.
    let status =
        unsafe { import::proxy_set_shared_data(key.as_ptr(), key.len(), value.as_ptr(), value.len(), version) };
    if status == CAS_MISMATCH {
        return Ok(false);
    }
    checked(status).map(|()| true)
}

/// Says that a context that wanted to finish something has finished.
pub(crate) fn done() -> HostResult<()> {
    // SAFETY: no pointers.
    checked(unsafe { import::proxy_done() })
}

unsafe extern "C" {
    fn __wasm_call_ctors();
}

/// Run once by the host before anything else. Without this export the linker would wrap every other one to run the C
/// library's constructors before and its destructors after each call.
#[unsafe(no_mangle)]
extern "C" fn _initialize() {
    // SAFETY: the linker defines it, and a host calls `_initialize` once.
    unsafe { __wasm_call_ctors() }
}

#[unsafe(no_mangle)]
extern "C" fn proxy_abi_version_0_2_1() {}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_memory_allocate(size: usize) -> *mut u8 {
    let mut memory = Vec::<u8>::new();
    if memory.try_reserve_exact(size).is_err() {
        return null_mut();
    }
    core::mem::ManuallyDrop::new(memory).as_mut_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_context_create(context: u32, parent: u32) {
    vm::on_context_create(context, parent);
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_vm_start(_context: u32, _size: usize) -> u32 {
    1
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_configure(context: u32, _size: usize) -> u32 {
    u32::from(vm::on_configure(context))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_tick(context: u32) {
    vm::on_tick(context);
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_request_headers(context: u32, _count: usize, end_of_stream: u32) -> u32 {
    u32::from(vm::on_request_headers(context, end_of_stream != 0))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_request_body(context: u32, size: usize, end_of_stream: u32) -> u32 {
    u32::from(vm::on_request_body(context, size, end_of_stream != 0))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_request_trailers(context: u32, _count: usize) -> u32 {
    vm::on_request_trailers(context);
    u32::from(vm::on_request_body(context, 0, true))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_response_headers(context: u32, _count: usize, _end_of_stream: u32) -> u32 {
    vm::on_response_headers(context);
    0
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_response_body(context: u32, size: usize, _end_of_stream: u32) -> u32 {
    vm::on_response_body(context, size);
    0
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_http_call_response(
    context: u32,
    token: u32,
    headers: usize,
    body_size: usize,
    _trailers: usize,
) {
    vm::on_callout_answer(context, token, headers, body_size);
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_done(context: u32) -> u32 {
    u32::from(vm::on_done(context))
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_log(context: u32) {
    vm::on_end(context);
}

#[unsafe(no_mangle)]
extern "C" fn proxy_on_delete(context: u32) {
    vm::on_delete(context);
}
