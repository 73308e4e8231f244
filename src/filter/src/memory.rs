//! The host as the pure crate asks for it in the middle of an event: memory that its workers share, and random bits. None
//! of these calls comes back into the module.

use portcullis_decision::lease::{GATEWAY_SLOT, Host, NoMemory, SharedMemory, Written};

use crate::host;

/// First part of the keys of slots: the same for every configuration. Nothing is ever deleted there, so keys of their own
/// would be kept for each one that was ever in force; a value names its configuration.
const SLOT_PREFIX: &str = "portcullis.lease.";

/// The host.
#[derive(Debug)]
pub(crate) struct HostMemory;

fn key(slot: u64) -> String {
    if slot == GATEWAY_SLOT {
        return "portcullis.gateway".to_owned();
    }
    let mut key = String::with_capacity(SLOT_PREFIX.len().saturating_add(8));
    key.push_str(SLOT_PREFIX);
    key.push_str(&slot.to_string());
    key
}

impl SharedMemory for HostMemory {
    fn get(&mut self, slot: u64) -> Result<Option<(Vec<u8>, u32)>, NoMemory> {
        host::shared_data(&key(slot)).map_err(|host::Refused| NoMemory)
    }

    fn set(&mut self, slot: u64, value: &[u8], version: u32) -> Written {
        match host::set_shared_data(&key(slot), value, version) {
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
