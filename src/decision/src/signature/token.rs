//! The value of the signature's header. There is one way to write each: what differs by a byte is another or none.

use core::fmt;

/// Longest id of a key, in bytes. Shorter than the shortest secret, so that one that was written in the place of the other
/// is not an id.
pub const LONGEST_KEY_ID: usize = 32;
/// Longest time stamp, in digits: enough for 30,000 years.
const LONGEST_SECONDS: usize = 12;

/// A signature, as a header carries it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Token<'a> {
    /// The id of its key.
    pub key: &'a str,
    /// When it was made, in seconds since 1970 (UTC).
    pub at_s: u64,
    /// The HMAC-SHA256.
    pub signature: [u8; 32],
}

/// Whether this may be the id of a key: 1 to 32 of letters, digits, `.`, `_` and `-`.
pub fn is_key_id(text: &str) -> bool {
    (1..=LONGEST_KEY_ID).contains(&text.len())
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-'))
}

impl<'a> Token<'a> {
    /// Reads a value; `None` if it is not exactly of the form.
    pub fn parse(value: &'a [u8]) -> Option<Self> {
        let rest = core::str::from_utf8(value).ok()?.strip_prefix("v1;key=")?;
        let (key, rest) = rest.split_once(";ts=")?;
        let (seconds, signature) = rest.split_once(";sig=")?;
        let is_plain = (1..=LONGEST_SECONDS).contains(&seconds.len())
            && seconds.bytes().all(|byte| byte.is_ascii_digit())
            && (seconds == "0" || !seconds.starts_with('0'));
        if !is_key_id(key) || !is_plain {
            return None;
        }
        Some(Self {
            key,
            at_s: seconds.parse().ok()?,
            signature: hex(signature.as_bytes())?,
        })
    }
}

/// 64 lower-case hexadecimal digits.
fn hex(digits: &[u8]) -> Option<[u8; 32]> {
    if digits.len() != 64 {
        return None;
    }
    let mut bytes = [0_u8; 32];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        for digit in pair {
            let figure = match digit {
                b'0'..=b'9' => digit.checked_sub(b'0')?,
                b'a'..=b'f' => digit.checked_sub(b'a')?.checked_add(10)?,
                _ => return None,
            };
            *byte = (*byte << 4) | figure;
        }
    }
    Some(bytes)
}

impl fmt::Display for Token<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v1;key={};ts={};sig=", self.key, self.at_s)?;
        self.signature.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}
