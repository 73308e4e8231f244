//! The grammar of numbers (RFC 8259, section 6), a byte at a time: `-? (0 | [1-9][0-9]*) (.[0-9]+)? ([eE][+-]?[0-9]+)?`.

use super::NotJson;

/// What has been read of a number.
#[derive(Debug, Clone, Copy)]
pub(super) enum Part {
    Minus,
    /// A zero that no digit may follow.
    Zero,
    Integer,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
}

impl Part {
    pub(super) const fn first(byte: u8) -> Result<Self, NotJson> {
        match byte {
            b'-' => Ok(Self::Minus),
            b'0' => Ok(Self::Zero),
            b'1'..=b'9' => Ok(Self::Integer),
            _ => Err(NotJson),
        }
    }

    /// The part after one more byte; `None` if the number ended before it.
    pub(super) const fn next(self, byte: u8) -> Result<Option<Self>, NotJson> {
        let part = match (self, byte) {
            (Self::Minus, b'0') => Self::Zero,
            (Self::Minus, b'1'..=b'9') | (Self::Integer, b'0'..=b'9') => Self::Integer,
            (Self::Zero | Self::Integer, b'.') => Self::Point,
            (Self::Point | Self::Fraction, b'0'..=b'9') => Self::Fraction,
            (Self::Zero | Self::Integer | Self::Fraction, b'e' | b'E') => Self::Exponent,
            (Self::Exponent, b'+' | b'-') => Self::ExponentSign,
            (Self::Exponent | Self::ExponentSign | Self::ExponentDigits, b'0'..=b'9') => Self::ExponentDigits,
            // What may follow is the business of the surroundings; `01` ends here and fails there.
            (Self::Zero | Self::Integer | Self::Fraction | Self::ExponentDigits, _) => return Ok(None),
            _ => return Err(NotJson),
        };
        Ok(Some(part))
    }
}
