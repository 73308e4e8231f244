//! The host as the pure crate asks for it in the middle of an event: memory that its workers share, and random bits. None
//! of these calls comes back into the module.

use portcullis_decision::lease::{GATEWAY_SLOT, Host, NoMemory, SharedMemory, Written};

use crate::host;

/// First part of the keys of slots: the same for every configuration. Nothing is ever deleted there, so keys of their own
/// would be kept for each one that was ever in force; a value names its configuration.
const SLOT_PREFIX: &[u8; 17] = b"portcullis.lease.";

/// The host.
#[derive(Debug)]
pub(crate) struct HostMemory;

/// Bytes of the prefix and of the longest number.
const LONGEST_KEY: usize = SLOT_PREFIX.len() + 20;

/// Has the key of a slot looked at. It stands on the stack, since each leased request needs it twice.
fn with_key<T>(slot: u64, look: impl FnOnce(&[u8]) -> T) -> T {
    if slot == GATEWAY_SLOT {
        return look(b"portcullis.gateway");
    }
    let mut bytes = [b'0'; LONGEST_KEY];
    let (mut rest, mut start) = (slot, LONGEST_KEY);
    for place in bytes.iter_mut().rev() {
        *place = b'0'.saturating_add(u8::try_from(rest % 10).unwrap_or(0));
        start = start.saturating_sub(1);
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    start = start.saturating_sub(SLOT_PREFIX.len());
    let key = bytes.get_mut(start..).unwrap_or_default();
    if let Some((head, _)) = key.split_first_chunk_mut() {
        *head = *SLOT_PREFIX;
    }
    look(key)
}

impl SharedMemory for HostMemory {
    fn get(&mut self, slot: u64) -> Result<Option<(Vec<u8>, u32)>, NoMemory> {
        with_key(slot, host::shared_data).map_err(|host::Refused| NoMemory)
    }

    fn set(&mut self, slot: u64, value: &[u8], version: u32) -> Written {
        match with_key(slot, |key| host::set_shared_data(key, value, version)) {
            Ok(true) => Written::Done,
            Ok(false) => Written::Raced,
            Err(host::Refused) => Written::Refused,
        }
    }
}

impl Host for HostMemory {
    fn random(&mut self) -> Option<[u8; 16]> {
        host::random().ok()
    }

    fn unix_s(&mut self) -> Option<u64> {
        // A clock that stands at 0 is one that the host does not have.
        let ns = host::wall_ns().or_else(|host::Refused| host::realtime_ns()).ok()?;
        ns.checked_div(1_000_000_000).filter(|seconds| *seconds > 0)
    }
}
