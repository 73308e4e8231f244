//! The gzip format (RFC 1952) around blocks that are stored as they are: what counts is that it is no JSON any more, and
//! that any client can undo it.

const HEADER: [u8; 10] = [0x1F, 0x8B, 8, 0, 0, 0, 0, 0, 0, 0xFF];
/// Of one stored block (RFC 1951).
const LARGEST_BLOCK: usize = 65_535;

pub(super) fn of(bytes: &[u8]) -> Vec<u8> {
    let mut packed = HEADER.to_vec();
    let mut blocks = bytes.chunks(LARGEST_BLOCK).peekable();
    while let Some(block) = blocks.next() {
        let length = u16::try_from(block.len()).expect("at most the largest block");
        packed.push(u8::from(blocks.peek().is_none()));
        packed.extend_from_slice(&length.to_le_bytes());
        packed.extend_from_slice(&(!length).to_le_bytes());
        packed.extend_from_slice(block);
    }
    packed.extend_from_slice(&crc32(bytes).to_le_bytes());
    packed.extend_from_slice(&u32::try_from(bytes.len()).expect("a short answer").to_le_bytes());
    packed
}

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| {
            (sum >> 1) ^ (0xEDB8_8320 & (0_u32.wrapping_sub(sum & 1)))
        })
    })
}
