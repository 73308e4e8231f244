//! A JSON reader that is fed: it validates a text of any length against RFC 8259, piece by piece, and reports the few
//! values that stand at places named beforehand. It never holds the text.
//!
//! What it holds is a bit per open container (at most [`MAX_DEPTH`]), a level per *matched* container (as deep as the
//! tree of fields) and one decoded key, string or number of at most [`MAX_TEXT`] bytes. Every byte moves one state
//! machine, so a text may be cut anywhere, also inside a character, an escape or a number.
//!
//! Stricter than the grammar in one point: half a surrogate pair in a *key* is a fault, because readers disagree about
//! which key that is. In strings it is grammatical, and reported where the string is wanted. Bytes that are not UTF-8
//! are a fault anywhere. Left out on purpose: numbers as values (a caller decides what `1e9` means) and positions of faults.

use alloc::vec::Vec;

use number::Part;
use text::TextReader;

mod number;
#[cfg(test)]
pub(crate) mod tests;
mod text;

/// Containers that may be open at once.
pub const MAX_DEPTH: u32 = 128;
/// Bytes, decoded, of the longest string that is reported with its text.
pub const MAX_TEXT: usize = 256;
/// Bytes of the longest number that is reported with its digits.
const MAX_NUMBER: usize = 64;

/// A place to look at: a key of an object, and what stands below it.
#[derive(Debug)]
pub struct Field<T: 'static> {
    /// The key, compared after its escapes are decoded.
    pub key: &'static str,
    /// What the caller calls it.
    pub name: T,
    /// Places in its value, if that is an object.
    pub fields: &'static [Field<T>],
    /// Whether an array here stands for each of its elements, which are then reported like the field itself.
    pub each: bool,
}

impl<T> Field<T> {
    /// A place for a value alone.
    pub const fn leaf(key: &'static str, name: T) -> Self {
        Self::object(key, name, &[])
    }

    /// A place for an object with places of its own.
    pub const fn object(key: &'static str, name: T, fields: &'static [Self]) -> Self {
        Self {
            key,
            name,
            fields,
            each: false,
        }
    }

    /// A place for an array of values or objects.
    pub const fn each(key: &'static str, name: T, fields: &'static [Self]) -> Self {
        Self {
            key,
            name,
            fields,
            each: true,
        }
    }
}

/// What stands at a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value<'a> {
    /// `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A number as written.
    Number(&'a str),
    /// A number of more than 64 characters.
    LongNumber,
    /// A string, decoded.
    Text(&'a str),
    /// A string of more than [`MAX_TEXT`] bytes.
    LongText,
    /// A string with half a surrogate pair: it has no form in UTF-8.
    UnpairedText,
    /// The start of an object.
    Object,
    /// The start of an array.
    Array,
}

/// What the reader has come across.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found<'a, T> {
    /// The key of a place.
    Key(T),
    /// A key that is not the place's, but would be for a reader that folds case as Go's `encoding/json` does.
    FoldedKey(T),
    /// The value of a place.
    Value(T, Value<'a>),
    /// The end of a document: of the root object, or of an object in a root array (if those are looked into).
    DocumentEnd,
}

/// The text is not JSON, not UTF-8, nested too deeply, or a key of it is undecided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotJson;

/// What an element of a matched container is.
#[derive(Debug)]
enum Level<T: 'static> {
    /// A document: keys are looked up here.
    Document(&'static [Field<T>]),
    /// An object below a document.
    Object(&'static [Field<T>]),
    /// An array whose elements stand for its field.
    Each(&'static Field<T>),
    /// The root array, whose elements are documents.
    Documents,
}

#[derive(Debug, Clone, Copy)]
enum State {
    /// A value must come; after `[` it may be missing.
    Value {
        may_close: bool,
    },
    /// A key must come; after `{` it may be missing.
    Key {
        may_close: bool,
    },
    Colon,
    /// A value has ended: a comma or the container's end; nothing more at the root.
    After,
    Text {
        is_key: bool,
    },
    Number(Part),
    /// Inside `true`, `false` or `null`: the letters to come.
    Literal(&'static [u8], Literal),
}

#[derive(Debug, Clone, Copy)]
enum Literal {
    Null,
    True,
    False,
}

/// The reader.
#[derive(Debug)]
pub struct Scanner<T: 'static> {
    root: &'static [Field<T>],
    root_may_be_array: bool,
    state: State,
    depth: u32,
    /// The lowest bit is the innermost open container: 1 for an object.
    objects: u128,
    /// The matched containers, from the root: the innermost one is matched if there are `depth` of them.
    levels: Vec<Level<T>>,
    /// The place of the value that comes next or is being read.
    wanted: Option<&'static Field<T>>,
    text: TextReader,
    failed: bool,
}

impl<T: Copy + 'static> Scanner<T> {
    /// Looks for these keys in the root object.
    pub fn of_object(root: &'static [Field<T>]) -> Self {
        Self {
            root,
            root_may_be_array: false,
            state: State::Value { may_close: false },
            depth: 0,
            objects: 0,
            levels: Vec::new(),
            wanted: None,
            text: TextReader::default(),
            failed: false,
        }
    }

    /// The same, and in each object of a root array.
    pub fn of_documents(root: &'static [Field<T>]) -> Self {
        Self {
            root_may_be_array: true,
            ..Self::of_object(root)
        }
    }

    /// Starts anew, with the memory that it has.
    pub fn reset(&mut self) {
        self.state = State::Value { may_close: false };
        self.depth = 0;
        self.objects = 0;
        self.levels.clear();
        self.wanted = None;
        self.failed = false;
    }

    /// Bytes of memory held beside the reader itself.
    pub fn carried_bytes(&self) -> usize {
        let levels = self.levels.capacity().saturating_mul(size_of::<Level<T>>());
        levels.saturating_add(self.text.capacity())
    }

    /// Reads a piece and reports what it completes.
    ///
    /// # Errors
    /// [`NotJson`] from the byte on at which no text could go on like this.
    pub fn feed(&mut self, bytes: &[u8], found: &mut impl FnMut(Found<'_, T>)) -> Result<(), NotJson> {
        if self.failed {
            return Err(NotJson);
        }
        let read = self.read(bytes, found);
        self.failed = read.is_err();
        read
    }

    /// Ends the text.
    ///
    /// # Errors
    /// [`NotJson`] if the text is not whole.
    pub fn finish(&mut self, found: &mut impl FnMut(Found<'_, T>)) -> Result<(), NotJson> {
        // Only a number at the root needs its end to be told.
        self.feed(b" ", found)?;
        match self.state {
            State::After if self.depth == 0 => Ok(()),
            _ => Err(NotJson),
        }
    }

    fn read(&mut self, bytes: &[u8], found: &mut impl FnMut(Found<'_, T>)) -> Result<(), NotJson> {
        let mut rest = bytes;
        while let Some((&byte, tail)) = rest.split_first() {
            match self.state {
                State::Text { is_key } => {
                    let (after, ended) = self.text.feed(rest)?;
                    rest = after;
                    if ended {
                        self.end_text(is_key, found)?;
                    }
                }
                State::Number(part) => match part.next(byte)? {
                    Some(part) => {
                        self.text.keep(&[byte]);
                        self.state = State::Number(part);
                        rest = tail;
                    }
                    // The byte after a number is not part of it, and is looked at again.
                    None => {
                        let value = self.text.kept().map_or(Value::LongNumber, Value::Number);
                        report(self.wanted.take(), value, found);
                        self.state = State::After;
                    }
                },
                State::Literal(letters, literal) => {
                    rest = tail;
                    let (expected, letters) = letters.split_first().ok_or(NotJson)?;
                    if byte != *expected {
                        return Err(NotJson);
                    }
                    self.state = State::Literal(letters, literal);
                    if letters.is_empty() {
                        let value = match literal {
                            Literal::Null => Value::Null,
                            Literal::True => Value::Bool(true),
                            Literal::False => Value::Bool(false),
                        };
                        report(self.wanted.take(), value, found);
                        self.state = State::After;
                    }
                }
                State::Value { .. } | State::Key { .. } | State::Colon | State::After => {
                    rest = tail;
                    if !matches!(byte, b' ' | b'\t' | b'\n' | b'\r') {
                        self.token(byte, found)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// A byte between values.
    fn token(&mut self, byte: u8, found: &mut impl FnMut(Found<'_, T>)) -> Result<(), NotJson> {
        match (self.state, byte) {
            (State::Value { may_close: true }, b']') | (State::Key { may_close: true }, b'}') => self.close(found),
            (State::Value { .. }, _) => {
                if self.depth > 0 && !self.in_object() {
                    self.wanted = match self.level() {
                        Some(Level::Each(field)) => Some(field),
                        _ => None,
                    };
                }
                self.begin_value(byte, found)?;
            }
            (State::Key { .. }, b'"') => {
                // Keys outside the places are validated, not kept.
                self.text.begin(if self.level().is_some() { MAX_NUMBER } else { 0 });
                self.state = State::Text { is_key: true };
            }
            (State::Colon, b':') => self.state = State::Value { may_close: false },
            (State::After, b',') if self.depth > 0 => {
                self.state = if self.in_object() {
                    State::Key { may_close: false }
                } else {
                    State::Value { may_close: false }
                };
            }
            (State::After, b'}') if self.depth > 0 && self.in_object() => self.close(found),
            (State::After, b']') if self.depth > 0 && !self.in_object() => self.close(found),
            _ => return Err(NotJson),
        }
        Ok(())
    }

    fn begin_value(&mut self, byte: u8, found: &mut impl FnMut(Found<'_, T>)) -> Result<(), NotJson> {
        self.state = match byte {
            b'{' => return self.open_object(found),
            b'[' => return self.open_array(found),
            b'"' => {
                self.text.begin(if self.wanted.is_some() { MAX_TEXT } else { 0 });
                State::Text { is_key: false }
            }
            b't' => State::Literal(b"rue", Literal::True),
            b'f' => State::Literal(b"alse", Literal::False),
            b'n' => State::Literal(b"ull", Literal::Null),
            _ => {
                let part = Part::first(byte)?;
                self.text.begin(if self.wanted.is_some() { MAX_NUMBER } else { 0 });
                self.text.keep(&[byte]);
                State::Number(part)
            }
        };
        Ok(())
    }

    fn open_object(&mut self, found: &mut impl FnMut(Found<'_, T>)) -> Result<(), NotJson> {
        let wanted = self.wanted.take();
        report(wanted, Value::Object, found);
        let is_document = self.depth == 0 || matches!(self.level(), Some(Level::Documents));
        let level = match wanted {
            _ if is_document => Some(Level::Document(self.root)),
            Some(field) => Some(Level::Object(field.fields)),
            None => None,
        };
        self.open(true, level)?;
        self.state = State::Key { may_close: true };
        Ok(())
    }

    fn open_array(&mut self, found: &mut impl FnMut(Found<'_, T>)) -> Result<(), NotJson> {
        let wanted = self.wanted.take();
        report(wanted, Value::Array, found);
        let level = match wanted {
            // An array in an array is an element, and its own elements are not.
            Some(field) if field.each && self.in_object() => Some(Level::Each(field)),
            None if self.depth == 0 && self.root_may_be_array => Some(Level::Documents),
            _ => None,
        };
        self.open(false, level)?;
        self.state = State::Value { may_close: true };
        Ok(())
    }

    fn open(&mut self, is_object: bool, level: Option<Level<T>>) -> Result<(), NotJson> {
        if self.depth >= MAX_DEPTH {
            return Err(NotJson);
        }
        self.levels.extend(level);
        self.depth = self.depth.saturating_add(1);
        self.objects = (self.objects << 1) | u128::from(is_object);
        Ok(())
    }

    fn close(&mut self, found: &mut impl FnMut(Found<'_, T>)) {
        if self.level().is_some() && matches!(self.levels.pop(), Some(Level::Document(_))) {
            found(Found::DocumentEnd);
        }
        self.depth = self.depth.saturating_sub(1);
        self.objects >>= 1;
        self.state = State::After;
    }

    const fn in_object(&self) -> bool {
        self.objects & 1 == 1
    }

    /// The innermost open container, if it is matched.
    fn level(&self) -> Option<&Level<T>> {
        let is_matched = usize::try_from(self.depth).is_ok_and(|depth| depth == self.levels.len());
        self.levels.last().filter(|_| is_matched)
    }

    fn end_text(&mut self, is_key: bool, found: &mut impl FnMut(Found<'_, T>)) -> Result<(), NotJson> {
        if !is_key {
            let value = match self.text.kept() {
                _ if self.text.is_unpaired() => Value::UnpairedText,
                Some(text) => Value::Text(text),
                None => Value::LongText,
            };
            report(self.wanted.take(), value, found);
            self.state = State::After;
            return Ok(());
        }
        if self.text.is_unpaired() {
            return Err(NotJson);
        }
        let fields = match self.level() {
            Some(Level::Document(fields) | Level::Object(fields)) => *fields,
            _ => &[],
        };
        // A key longer than what is kept is longer than every place's.
        if let Some(key) = self.text.kept().filter(|_| !fields.is_empty()) {
            self.wanted = fields.iter().find(|field| field.key == key);
            if let Some(field) = self.wanted {
                found(Found::Key(field.name));
            } else if let Some(field) = fields.iter().find(|field| text::is_folded(key, field.key)) {
                found(Found::FoldedKey(field.name));
            }
        }
        self.state = State::Colon;
        Ok(())
    }
}

fn report<T: Copy>(wanted: Option<&'static Field<T>>, value: Value<'_>, found: &mut impl FnMut(Found<'_, T>)) {
    if let Some(field) = wanted {
        found(Found::Value(field.name, value));
    }
}
