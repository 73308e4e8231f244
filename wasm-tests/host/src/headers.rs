//! Header maps as a host keeps them, and as the ABI serializes them.

/// Header lines in their order. Names and values are bytes: what is not UTF-8 is passed on as it is.
pub type Headers = Vec<(Vec<u8>, Vec<u8>)>;

/// Header lines out of text.
pub fn headers(lines: &[(&str, &str)]) -> Headers {
    lines
        .iter()
        .map(|(name, value)| (name.as_bytes().to_vec(), value.as_bytes().to_vec()))
        .collect()
}

/// The first value of a name, compared without case.
pub fn first<'a>(headers: &'a [(Vec<u8>, Vec<u8>)], name: &str) -> Option<&'a [u8]> {
    headers
        .iter()
        .find(|(n, _)| n.eq_ignore_ascii_case(name.as_bytes()))
        .map(|(_, value)| value.as_slice())
}

/// The serialized form: a count, all lengths, then all names and values, each with a NUL. An empty map is no bytes.
pub fn serialize(headers: &[(Vec<u8>, Vec<u8>)]) -> Vec<u8> {
    if headers.is_empty() {
        return Vec::new();
    }
    let length = |bytes: &[u8]| {
        u32::try_from(bytes.len())
            .expect("a header shorter than 4 GiB")
            .to_le_bytes()
    };
    let mut bytes = u32::try_from(headers.len())
        .expect("fewer headers")
        .to_le_bytes()
        .to_vec();
    for (name, value) in headers {
        bytes.extend(length(name));
        bytes.extend(length(value));
    }
    for field in headers.iter().flat_map(|(name, value)| [name, value]) {
        bytes.extend_from_slice(field);
        bytes.push(0);
    }
    bytes
}

/// Reads what a guest has serialized; `None` if it is not a map.
pub fn parse(bytes: &[u8]) -> Option<Headers> {
    if bytes.is_empty() {
        return Some(Vec::new());
    }
    let number = |at: usize| {
        let bytes: [u8; 4] = bytes.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(bytes)).ok()
    };
    let count = number(0)?;
    let mut at = count.checked_mul(8)?.checked_add(4)?;
    let mut field = |length: usize| {
        let field = bytes.get(at..at.checked_add(length)?)?.to_vec();
        at += length + 1;
        (bytes.get(at - 1) == Some(&0)).then_some(field)
    };
    let mut headers = Vec::new();
    for entry in 0..count {
        let (name, value) = (number(4 + entry * 8)?, number(8 + entry * 8)?);
        headers.push((field(name)?, field(value)?));
    }
    Some(headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_is_read_back_as_it_was_written() {
        let map = headers(&[(":path", "/"), ("empty", ""), ("twice", "1"), ("twice", "2")]);
        assert_eq!(parse(&serialize(&map)), Some(map));
        assert_eq!(parse(&serialize(&[])), Some(Vec::new()));
    }

    #[test]
    fn a_map_that_is_cut_is_none() {
        let bytes = serialize(&headers(&[("name", "value")]));
        for length in 1..bytes.len() {
            assert_eq!(parse(&bytes[..length]), None, "{length} bytes");
        }
    }
}
