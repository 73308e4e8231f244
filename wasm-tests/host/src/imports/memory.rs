//! The module's memory: what it points at, and what is handed over to it.

use crate::fault::status::{INTERNAL_FAILURE, INVALID_MEMORY_ACCESS, OK};
use crate::imports::Host;
use crate::violation::Violation;

/// The bytes that the guest points at.
pub(super) fn read(host: &Host<'_>, at: u32, size: u32) -> Option<Vec<u8>> {
    if size == 0 {
        return Some(Vec::new());
    }
    let (at, size) = (at as usize, size as usize);
    let memory = host.data().memory?.data(host);
    memory.get(at..at.checked_add(size)?).map(<[u8]>::to_vec)
}

/// Writes to where the guest points.
pub(super) fn write(host: &mut Host<'_>, name: &'static str, at: u32, bytes: &[u8]) -> u32 {
    let memory = host.data().memory;
    match memory.map(|memory| memory.write(&mut *host, at as usize, bytes)) {
        Some(Ok(())) => {
            host.data_mut().ledger.carried(name, bytes.len());
            OK
        }
        _ => {
            host.data_mut().violate(Violation::BadPointer(name));
            INVALID_MEMORY_ACCESS
        }
    }
}

/// Hands bytes over in memory that the guest allocates for them. No bytes are a null pointer, as in Envoy.
pub(super) fn hand_over(host: &mut Host<'_>, name: &'static str, bytes: &[u8], data: u32, size: u32) -> u32 {
    let length = u32::try_from(bytes.len()).expect("a module's memory is smaller than 4 GiB");
    let mut at = 0;
    if length > 0 {
        let allocate = host.data().allocate.clone();
        at = match allocate.map(|allocate| allocate.call(&mut *host, length)) {
            Some(Ok(at)) if at > 0 => at,
            _ => return INTERNAL_FAILURE,
        };
        let status = write(host, name, at, bytes);
        if status != OK {
            return status;
        }
    }
    let status = write(host, name, data, &at.to_le_bytes());
    if status != OK {
        return status;
    }
    write(host, name, size, &length.to_le_bytes())
}
