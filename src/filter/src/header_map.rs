//! Header maps as the ABI serializes them: a count, the lengths of all names and values, then each of them with a NUL.
//!
//! Bytes stay bytes: a header that is not UTF-8 is none of our business unless it belongs to the envelope.

use portcullis_decision::stream::Header;

/// Reads a serialized map, or `None` if it is cut or lies about its lengths.
pub(crate) fn parse(bytes: &[u8]) -> Option<Vec<Header<'_>>> {
    if bytes.is_empty() {
        return Some(Vec::new());
    }
    let (count, mut lengths) = split_u32(bytes)?;
    let table = usize::try_from(count).ok()?.checked_mul(8)?;
    let mut data = lengths.get(table..)?;
    let mut headers = Vec::with_capacity(usize::try_from(count).ok()?.min(bytes.len()));
    for _ in 0..count {
        let (name_length, rest) = split_u32(lengths)?;
        let (value_length, rest) = split_u32(rest)?;
        lengths = rest;
        let (name, rest) = split_field(data, name_length)?;
        let (value, rest) = split_field(rest, value_length)?;
        data = rest;
        headers.push((name, value));
    }
    Some(headers)
}

fn split_u32(bytes: &[u8]) -> Option<(u32, &[u8])> {
    let (head, rest) = bytes.split_first_chunk::<4>()?;
    Some((u32::from_le_bytes(*head), rest))
}

fn split_field(bytes: &[u8], length: u32) -> Option<(&[u8], &[u8])> {
    let (field, rest) = bytes.split_at_checked(usize::try_from(length).ok()?)?;
    let (_nul, rest) = rest.split_first()?;
    Some((field, rest))
}

/// Writes a map.
pub(crate) fn serialize(headers: &[(&str, &str)]) -> Vec<u8> {
    let length = |text: &str| u32::try_from(text.len()).unwrap_or(u32::MAX).to_le_bytes();
    let mut bytes = Vec::new();
    bytes.extend_from_slice(&u32::try_from(headers.len()).unwrap_or(u32::MAX).to_le_bytes());
    for (name, value) in headers {
        bytes.extend_from_slice(&length(name));
        bytes.extend_from_slice(&length(value));
    }
    for (name, value) in headers {
        bytes.extend_from_slice(name.as_bytes());
        bytes.push(0);
        bytes.extend_from_slice(value.as_bytes());
        bytes.push(0);
    }
    bytes
}
