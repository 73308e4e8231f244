//! Server-sent events (HTML, "Interpreting an event stream"): the `data` of each event, without holding a line.
//!
//! Lines end with LF, CR or CRLF. Comments and the fields `event`, `id` and `retry` are passed over: what an event is
//! stands in its data. Differs from the standard in one point: an event that the end of the stream cuts off counts as far
//! as its data is whole, because providers forget the last newline.

/// A part of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Piece<'a> {
    /// Some of its data; lines of data are joined by a newline.
    Data(&'a [u8]),
    /// Its data is `[DONE]`, OpenAI's mark of the end.
    Done,
    /// The event has ended.
    End,
}

const FIELD: &[u8] = b"data";
const DONE: &[u8] = b"[DONE]";
const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

#[derive(Debug, Clone, Copy)]
enum Line {
    /// The rest of a mark that may open the stream.
    Mark(&'static [u8]),
    /// Nothing of it yet.
    Start,
    /// The rest of the field's name.
    Name(&'static [u8]),
    /// After the colon: one space belongs to it.
    Colon,
    Value,
    /// Of no interest.
    Other,
}

/// The reader of a stream.
#[derive(Debug)]
pub(super) struct EventStream {
    line: Line,
    /// The last line ended with CR: an LF that follows at once belongs to it.
    after_cr: bool,
    /// The event has had a line of data.
    has_data: bool,
    /// What is missing of [`DONE`]; `None` if the data is something else.
    done: Option<&'static [u8]>,
}

impl Default for EventStream {
    fn default() -> Self {
        Self {
            line: Line::Mark(BYTE_ORDER_MARK),
            after_cr: false,
            has_data: false,
            done: Some(DONE),
        }
    }
}

impl EventStream {
    pub(super) fn feed(&mut self, bytes: &[u8], out: &mut impl FnMut(Piece<'_>)) {
        let mut rest = bytes;
        while let Some((&byte, tail)) = rest.split_first() {
            if core::mem::take(&mut self.after_cr) && byte == b'\n' {
                rest = tail;
                continue;
            }
            if byte == b'\n' || byte == b'\r' {
                self.after_cr = byte == b'\r';
                self.end_line(out);
                rest = tail;
                continue;
            }
            rest = match self.line {
                Line::Mark(mark) => match mark.split_first() {
                    Some((expected, mark)) if *expected == byte => {
                        self.line = if mark.is_empty() { Line::Start } else { Line::Mark(mark) };
                        tail
                    }
                    // Not a mark. Had it begun as one, the line is no field.
                    _ => {
                        self.line = if mark.len() == BYTE_ORDER_MARK.len() {
                            Line::Start
                        } else {
                            Line::Other
                        };
                        rest
                    }
                },
                Line::Start => {
                    self.line = Line::Name(FIELD);
                    rest
                }
                Line::Name(name) => {
                    self.line = match name.split_first() {
                        None if byte == b':' => {
                            self.begin_data(out);
                            Line::Colon
                        }
                        Some((expected, name)) if *expected == byte => Line::Name(name),
                        _ => Line::Other,
                    };
                    tail
                }
                Line::Colon => {
                    self.line = Line::Value;
                    if byte == b' ' { tail } else { rest }
                }
                Line::Value | Line::Other => {
                    let end = rest.iter().position(|b| matches!(b, b'\n' | b'\r'));
                    let (run, after) = rest.split_at_checked(end.unwrap_or(rest.len())).unwrap_or((rest, &[]));
                    if matches!(self.line, Line::Value) {
                        self.take_data(run, out);
                    }
                    after
                }
            };
        }
    }

    /// The data of the event, as far as it has come, is the mark of the end.
    pub(super) fn is_done(&self) -> bool {
        self.done.is_some_and(<[u8]>::is_empty)
    }

    fn begin_data(&mut self, out: &mut impl FnMut(Piece<'_>)) {
        if core::mem::replace(&mut self.has_data, true) {
            self.take_data(b"\n", out);
        }
    }

    fn take_data(&mut self, run: &[u8], out: &mut impl FnMut(Piece<'_>)) {
        for byte in run {
            // The first byte that differs settles it, so long data is not looked through.
            self.done = match self.done {
                None => break,
                Some(done) => match done.split_first() {
                    Some((expected, done)) if expected == byte => Some(done),
                    Some(_) if byte.is_ascii_whitespace() && done.len() == DONE.len() => Some(done),
                    None if byte.is_ascii_whitespace() => Some(done),
                    _ => None,
                },
            };
        }
        out(Piece::Data(run));
    }

    fn end_line(&mut self, out: &mut impl FnMut(Piece<'_>)) {
        match self.line {
            // An empty line ends the event. (`Mark` in its first state is an empty first line.)
            Line::Start | Line::Mark(_) => {
                if self.is_done() {
                    out(Piece::Done);
                }
                self.has_data = false;
                self.done = Some(DONE);
                out(Piece::End);
            }
            // A field's name alone would be an empty line of data: white space, which no document misses.
            _ => {}
        }
        self.line = Line::Start;
    }
}
