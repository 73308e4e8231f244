//! Which of a cluster's 16 384 slots a key lives in, and keys for a slot.

use std::sync::LazyLock;

/// How many there are, in every cluster.
pub(super) const SLOTS: u16 = 16_384;

/// The slot of a key: that of its hash tag, if it has one. Keys of one slot live together, whatever the cluster.
pub(super) fn slot_of(key: &str) -> u16 {
    crc16(tag_of(key).unwrap_or(key).as_bytes()) % SLOTS
}

/// What stands between the first brace and the next closing one, if there is anything.
pub(super) fn tag_of(key: &str) -> Option<&str> {
    let (_, rest) = key.split_once('{')?;
    let (tag, _) = rest.split_once('}')?;
    (!tag.is_empty()).then_some(tag)
}

/// A tag that lives in this slot: the smallest number that does, so that every process finds the same.
pub(super) fn tag_in(slot: u16) -> u32 {
    static TAGS: LazyLock<Vec<u32>> = LazyLock::new(|| {
        let mut tags = vec![None; usize::from(SLOTS)];
        let mut missing = tags.len();
        for number in 0_u32.. {
            let slot = usize::from(slot_of(&number.to_string()));
            if let Some(tag @ None) = tags.get_mut(slot) {
                *tag = Some(number);
                missing = missing.saturating_sub(1);
            }
            if missing == 0 {
                break;
            }
        }
        tags.into_iter().flatten().collect()
    });
    TAGS.get(usize::from(slot % SLOTS)).copied().unwrap_or_default()
}

/// CRC-16/XMODEM: the polynomial 0x1021, from 0, highest bit first.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(crc ^ (u16::from(*byte) << 8), |crc: u16, _| {
            let shifted = crc << 1;
            if crc & 0x8000 == 0 { shifted } else { shifted ^ 0x1021 }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_live_in_the_slots_that_the_servers_say() {
        // The check value of the CRC, and what `CLUSTER KEYSLOT` answers.
        assert_eq!(crc16(b"123456789"), 0x31C3);
        for (key, slot) in [
            ("foo", 12_182),
            ("portcullis:{foo}:requests:60", 12_182),
            ("{}foo", crc16(b"{}foo") % SLOTS),
            ("{a", crc16(b"{a") % SLOTS),
            ("{{foo}}", crc16(b"{foo") % SLOTS),
        ] {
            assert_eq!(slot_of(key), slot, "{key}");
        }
    }

    #[test]
    fn every_slot_has_a_tag_that_lives_there() {
        for slot in 0..SLOTS {
            assert_eq!(slot_of(&format!("p:{{{}}}:op", tag_in(slot))), slot);
        }
    }
}
