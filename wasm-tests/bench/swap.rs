//! The least that leases could cost: a filter that reads the clock and the request's headers and changes a value in the
//! host's shared memory by compare-and-swap, and looks at none of it. It exports what Portcullis exports, since a host
//! calls whatever is there.
//!
//! Built by scripts/bench with rustc alone, for wasm32-unknown-unknown: no library, no constructors.

mod idle;

use std::ptr::null_mut;

const KEY: &[u8] = b"bench/slot/0001";
/// As much as a slot with one block and the tightest limit holds, in bytes.
const SLOT: usize = 232;
const REQUEST_HEADERS: u32 = 0;

#[link(wasm_import_module = "env")]
extern "C" {
    fn proxy_get_current_time_nanoseconds(time: *mut u64) -> u32;
    fn proxy_get_header_map_pairs(map: u32, data: *mut *mut u8, size: *mut usize) -> u32;
    fn proxy_get_shared_data(key: *const u8, key_size: usize, data: *mut *mut u8, size: *mut usize, cas: *mut u32) -> u32;
    fn proxy_set_shared_data(key: *const u8, key_size: usize, data: *const u8, size: usize, cas: u32) -> u32;
}

/// What the host has put into memory that `proxy_on_memory_allocate` gave it.
unsafe fn owned(data: *mut u8, size: usize) -> Vec<u8> {
    if data.is_null() {
        return Vec::new();
    }
    Vec::from_raw_parts(data, size, size)
}

#[no_mangle]
extern "C" fn proxy_on_memory_allocate(size: usize) -> *mut u8 {
    let mut memory = Vec::<u8>::with_capacity(size);
    let start = memory.as_mut_ptr();
    std::mem::forget(memory);
    start
}

#[no_mangle]
extern "C" fn proxy_on_configure(_context: u32, _size: usize) -> u32 {
    let slot = [0_u8; SLOT];
    let set = unsafe { proxy_set_shared_data(KEY.as_ptr(), KEY.len(), slot.as_ptr(), SLOT, 0) };
    u32::from(set == 0)
}

#[no_mangle]
extern "C" fn proxy_on_request_headers(_context: u32, _count: usize, _end_of_stream: u32) -> u32 {
    let (mut now, mut cas) = (0_u64, 0_u32);
    let (mut data, mut size) = (null_mut::<u8>(), 0_usize);
    let mut refused = 0;
    unsafe {
        refused |= proxy_get_current_time_nanoseconds(&mut now);
        refused |= proxy_get_header_map_pairs(REQUEST_HEADERS, &mut data, &mut size);
        drop(owned(data, size));
        (data, size) = (null_mut(), 0);
        refused |= proxy_get_shared_data(KEY.as_ptr(), KEY.len(), &mut data, &mut size, &mut cas);
        let mut slot = owned(data, size);
        if let Some(word) = slot.first_chunk_mut::<8>() {
            *word = now.to_le_bytes();
        }
        refused |= proxy_set_shared_data(KEY.as_ptr(), KEY.len(), slot.as_ptr(), slot.len(), cas);
        refused |= u32::from(slot.len() != SLOT);
    }
    u32::from(refused != 0)
}
