//! Strings: UTF-8 is checked (the table of RFC 3629, section 4), escapes are decoded, halves of surrogate pairs are put
//! together, and as much is kept as the caller asked for.

use alloc::vec::Vec;

use super::NotJson;

#[derive(Debug, Clone, Copy, Default)]
enum Step {
    #[default]
    Plain,
    /// Inside a character: bytes to come, and the range of the next one.
    Character { left: u8, low: u8, high: u8 },
    /// After a backslash.
    Escape,
    /// After `\u`: digits to come, and what they mean so far.
    Hex { left: u8, unit: u16 },
}

/// The reader of one string at a time, from after its opening quote.
#[derive(Debug, Default)]
pub(super) struct TextReader {
    step: Step,
    /// The first half of a pair whose second must follow at once.
    half: Option<u16>,
    is_unpaired: bool,
    kept: Vec<u8>,
    keep_bytes: usize,
    is_long: bool,
}

impl TextReader {
    /// Starts a string (or a number) of which `keep_bytes` are kept.
    pub(super) fn begin(&mut self, keep_bytes: usize) {
        self.step = Step::Plain;
        self.half = None;
        self.is_unpaired = false;
        self.kept.clear();
        self.keep_bytes = keep_bytes;
        self.is_long = false;
    }

    /// The text, unless it is longer than what was to be kept.
    pub(super) fn kept(&self) -> Option<&str> {
        if self.is_long {
            return None;
        }
        core::str::from_utf8(&self.kept).ok()
    }

    pub(super) const fn is_unpaired(&self) -> bool {
        self.is_unpaired
    }

    pub(super) const fn capacity(&self) -> usize {
        self.kept.capacity()
    }

    pub(super) fn keep(&mut self, bytes: &[u8]) {
        if self.is_long || bytes.len() > self.keep_bytes.saturating_sub(self.kept.len()) {
            self.is_long = true;
        } else {
            self.kept.extend_from_slice(bytes);
        }
    }

    /// Reads up to the closing quote: what is left after it, and whether it came.
    pub(super) fn feed<'a>(&mut self, bytes: &'a [u8]) -> Result<(&'a [u8], bool), NotJson> {
        let mut rest = bytes;
        while let Some((&byte, tail)) = rest.split_first() {
            match self.step {
                Step::Plain if is_plain(byte) => {
                    self.leave_half();
                    let run = rest.iter().position(|b| !is_plain(*b)).unwrap_or(rest.len());
                    let (plain, after) = rest.split_at_checked(run).ok_or(NotJson)?;
                    self.keep(plain);
                    rest = after;
                    continue;
                }
                Step::Plain => {
                    if byte != b'\\' {
                        self.leave_half();
                    }
                    match byte {
                        b'"' => return Ok((tail, true)),
                        b'\\' => self.step = Step::Escape,
                        _ => {
                            self.step = lead(byte)?;
                            self.keep(&[byte]);
                        }
                    }
                }
                Step::Character { left, low, high } => {
                    if byte < low || byte > high {
                        return Err(NotJson);
                    }
                    self.keep(&[byte]);
                    self.step = match left.saturating_sub(1) {
                        0 => Step::Plain,
                        left => Step::Character {
                            left,
                            low: 0x80,
                            high: 0xBF,
                        },
                    };
                }
                Step::Escape if byte == b'u' => self.step = Step::Hex { left: 4, unit: 0 },
                Step::Escape => {
                    self.leave_half();
                    self.keep(&[match byte {
                        b'"' | b'\\' | b'/' => byte,
                        b'b' => 0x08,
                        b'f' => 0x0C,
                        b'n' => b'\n',
                        b'r' => b'\r',
                        b't' => b'\t',
                        _ => return Err(NotJson),
                    }]);
                    self.step = Step::Plain;
                }
                Step::Hex { left, unit } => {
                    let digit = char::from(byte).to_digit(16).ok_or(NotJson)?;
                    let unit = (unit << 4) | u16::try_from(digit).map_err(|_| NotJson)?;
                    self.step = match left.saturating_sub(1) {
                        0 => {
                            self.end_unit(unit);
                            Step::Plain
                        }
                        left => Step::Hex { left, unit },
                    };
                }
            }
            rest = tail;
        }
        Ok((rest, false))
    }

    /// Something other than the second half follows a first one.
    fn leave_half(&mut self) {
        self.is_unpaired |= self.half.take().is_some();
    }

    fn end_unit(&mut self, unit: u16) {
        let mut decoded = char::decode_utf16(self.half.into_iter().chain([unit]));
        match (self.half, decoded.next()) {
            (Some(_), Some(Ok(character))) => {
                self.half = None;
                self.keep_character(character);
            }
            // The half before stays alone; this unit may start a pair of its own.
            (Some(_), _) => {
                self.leave_half();
                self.end_unit(unit);
            }
            (None, Some(Ok(character))) => self.keep_character(character),
            (None, _) if unit < 0xDC00 => self.half = Some(unit),
            (None, _) => self.is_unpaired = true,
        }
    }

    fn keep_character(&mut self, character: char) {
        self.keep(character.encode_utf8(&mut [0; 4]).as_bytes());
    }
}

const fn is_plain(byte: u8) -> bool {
    matches!(byte, 0x20..=0x7F) && byte != b'"' && byte != b'\\'
}

/// What must follow the first byte of a character of several.
const fn lead(byte: u8) -> Result<Step, NotJson> {
    let (left, low, high) = match byte {
        0xC2..=0xDF => (1, 0x80, 0xBF),
        0xE0 => (2, 0xA0, 0xBF),
        0xED => (2, 0x80, 0x9F),
        0xE1..=0xEF => (2, 0x80, 0xBF),
        0xF0 => (3, 0x90, 0xBF),
        0xF1..=0xF3 => (3, 0x80, 0xBF),
        0xF4 => (3, 0x80, 0x8F),
        _ => return Err(NotJson),
    };
    Ok(Step::Character { left, low, high })
}

/// Whether two keys are one for a reader that folds case: ASCII, and the two characters beyond it that fold into it
/// (the long s and the Kelvin sign), which is all that matters against an ASCII key.
pub(super) fn is_folded(key: &str, place: &str) -> bool {
    let fold = |character: char| match character {
        '\u{17F}' => 's',
        '\u{212A}' => 'k',
        other => other.to_ascii_lowercase(),
    };
    key.chars().map(fold).eq(place.chars().map(fold))
}
