//! Operation ids: 128 random bits that make charge, settle and give-back idempotent.
//!
//! They are never taken from a header: a gateway passes a forged `x-request-id` through, and two requests with one id
//! would be charged once.

use core::fmt;

use serde::de::Visitor;
use serde::{Deserialize, Serialize};

/// The id of one decision.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OperationId(u128);

impl OperationId {
    /// The id made of these random bytes.
    pub const fn from_random(bytes: [u8; 16]) -> Self {
        Self(u128::from_be_bytes(bytes))
    }

    /// The bytes that it was made of.
    pub const fn to_bytes(self) -> [u8; 16] {
        self.0.to_be_bytes()
    }

    /// Reads exactly 32 lower-case hexadecimal digits.
    pub fn parse(text: &str) -> Option<Self> {
        let mut id = 0_u128;
        for byte in text.bytes() {
            let digit = match byte {
                b'0'..=b'9' => byte.wrapping_sub(b'0'),
                b'a'..=b'f' => byte.wrapping_sub(b'a' - 10),
                _ => return None,
            };
            id = (id << 4) | u128::from(digit);
        }
        (text.len() == 32).then_some(Self(id))
    }

    /// As text, without the formatter: each decision writes its id into the question and reads it in the answer.
    fn write<R>(self, to: impl FnOnce(&str) -> R) -> R {
        let mut digits = [0_u8; 32];
        let (pairs, _) = digits.as_chunks_mut();
        for ([high, low], byte) in pairs.iter_mut().zip(self.to_bytes()) {
            (*high, *low) = (digit(byte >> 4), digit(byte & 15));
        }
        to(core::str::from_utf8(&digits).unwrap_or_default())
    }
}

/// The digit of a number up to 15.
const fn digit(number: u8) -> u8 {
    number.wrapping_add(if number < 10 { b'0' } else { b'a' - 10 })
}

impl fmt::Display for OperationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(|text| f.write_str(text))
    }
}

impl fmt::Debug for OperationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OperationId({self})")
    }
}

impl Serialize for OperationId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.write(|text| serializer.serialize_str(text))
    }
}

impl<'de> Deserialize<'de> for OperationId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(Text)
    }
}

/// Reads an id where it stands, without a copy.
struct Text;

impl Visitor<'_> for Text {
    type Value = OperationId;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an operation id, which is 32 lower-case hexadecimal digits")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<OperationId, E> {
        OperationId::parse(text).ok_or_else(|| E::custom("an operation id is 32 lower-case hexadecimal digits"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;
    #[cfg(target_arch = "wasm32")]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    #[test]
    fn an_id_is_read_back_as_it_was_written() {
        let id = OperationId::from_random([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 255]);
        assert_eq!(id.to_string(), "000102030405060708090a0b0c0d0eff");
        assert_eq!(OperationId::parse(&id.to_string()), Some(id));
    }

    #[test]
    fn anything_but_32_lower_case_digits_is_refused() {
        for text in [
            "",
            "0",
            "+00102030405060708090a0b0c0d0eff",
            "000102030405060708090A0B0C0D0EFF",
            "000102030405060708090a0b0c0d0ef",
            "000102030405060708090a0b0c0d0eff0",
            "000102030405060708090a0b0c0d0efg",
        ] {
            assert_eq!(OperationId::parse(text), None, "{text}");
        }
    }
}
