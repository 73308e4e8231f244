//! Usage: how many tokens a provider says that a call has used, read from its response as it passes by.
//!
//! It only reads: the bytes are never changed, delayed or held. One pass; what it holds is under [`CARRY_LIMIT_BYTES`]
//! however long a line or a document is, and a response may be cut anywhere.
//!
//! Dialects are told apart by the names at their places, and nowhere else does a key count (a `usage` inside a message,
//! a tool's output or a choice is somebody's text):
//!
//! | dialect | place | input | cached input | output |
//! | --- | --- | --- | --- | --- |
//! | OpenAI chat, completions, embeddings | `usage` | `prompt_tokens` | `prompt_tokens_details.cached_tokens` | `completion_tokens` |
//! | OpenAI responses | `usage`; in a stream `response.usage` | `input_tokens` | `input_tokens_details.cached_tokens` | `output_tokens` |
//! | Anthropic messages | `usage`; in a stream `message.usage` of `message_start`, then `usage` | `input_tokens` + `cache_read_input_tokens` + `cache_creation_input_tokens` | `cache_read_input_tokens` | `output_tokens` |
//! | Gemini | `usageMetadata` | `promptTokenCount` + `toolUsePromptTokenCount` | `cachedContentTokenCount` | `candidatesTokenCount` + `thoughtsTokenCount` |
//!
//! - Anthropic counts cached input apart from input, the others as part of it: [`Usage::cached_input`] is always a part.
//! - Figures that come again are running totals: each figure's last statement wins, and nothing is summed up over events.
//! - A figure is an integer from 0 to 2^53 - 1. Anything else (negative, fractional, larger, a string) makes it unknown,
//!   until it is stated well; `null` or nothing states nothing.
//! - Output that isn't stated is the total less the input, where a total is (embeddings; Gemini leaves out zeros).
//! - A document that isn't whole, or isn't JSON, says nothing.
//!
//! Left out on purpose: decompression (an encoded response has no [`Format`], so its hold stands), and what an unknown
//! usage costs.

use event_stream::{EventStream, Piece};
use report::{Document, Place, Tally};

use crate::json_scan::Scanner;

mod event_stream;
mod report;
#[cfg(test)]
mod tests;

/// No reader holds more memory than this beside its own fixed size.
pub const CARRY_LIMIT_BYTES: usize = 1024;

/// How a response is laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// One JSON document, or Gemini's list of them.
    Json,
    /// Server-sent events.
    EventStream,
}

impl Format {
    /// The format by the headers `content-type` and `content-encoding`; `None` if it can't be read.
    pub fn of_headers(content_type: Option<&str>, content_encoding: Option<&str>) -> Option<Self> {
        let is_plain = content_encoding.is_none_or(|coding| {
            let coding = coding.trim();
            coding.is_empty() || coding.eq_ignore_ascii_case("identity")
        });
        let media_type = content_type?.split(';').next()?.trim();
        let structured = media_type
            .len()
            .checked_sub("+json".len())
            .and_then(|at| media_type.get(at..));
        if !is_plain {
            None
        } else if media_type.eq_ignore_ascii_case("text/event-stream") {
            Some(Self::EventStream)
        } else if media_type.eq_ignore_ascii_case("application/json")
            || structured.is_some_and(|suffix| suffix.eq_ignore_ascii_case("+json"))
        {
            Some(Self::Json)
        } else {
            None
        }
    }
}

/// What a provider has reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Input tokens, cached ones included.
    pub input: Option<u64>,
    /// The part of the input that came from a cache; known only if the input is, and never more than it.
    pub cached_input: Option<u64>,
    /// Output tokens, reasoning included.
    pub output: Option<u64>,
    /// Input and output are known, and the provider has said that nothing follows: the document is whole, or the stream's
    /// last event was seen. Otherwise the figures are totals of the part that has passed.
    pub is_complete: bool,
}

/// Reads one response.
#[derive(Debug)]
pub struct UsageReader {
    scanner: Scanner<Place>,
    document: Document,
    tally: Tally,
    events: Option<EventStream>,
}

impl UsageReader {
    /// A reader for a response of this format.
    pub fn new(format: Format) -> Self {
        Self {
            scanner: Scanner::of_documents(report::PLACES),
            document: Document::default(),
            tally: Tally::default(),
            events: (format == Format::EventStream).then(EventStream::default),
        }
    }

    /// Reads the next piece of the body.
    pub fn feed(&mut self, bytes: &[u8]) {
        let Self {
            scanner,
            document,
            tally,
            events,
        } = self;
        match events {
            None => scan(scanner, document, tally, bytes),
            Some(events) => events.feed(bytes, &mut |piece| take_piece(scanner, document, tally, piece)),
        }
    }

    /// Ends the body, whether or not it came to its own end. `None` if it reported nothing that can be used.
    pub fn finish(mut self) -> Option<Usage> {
        let has_ended = match &self.events {
            Some(events) => events.is_done(),
            None => self.scanner.finish(&mut |_| {}).is_ok(),
        };
        if has_ended {
            self.tally.end();
        }
        self.usage()
    }

    /// What has been reported so far.
    pub fn usage(&self) -> Option<Usage> {
        self.tally.usage()
    }

    /// Bytes of memory held beside the reader itself.
    pub fn carried_bytes(&self) -> usize {
        self.scanner.carried_bytes()
    }
}

fn scan(scanner: &mut Scanner<Place>, document: &mut Document, tally: &mut Tally, bytes: &[u8]) {
    // A fault ends what this document can say; what documents before it said stands.
    let _ = scanner.feed(bytes, &mut |found| document.take(found, tally));
}

fn take_piece(scanner: &mut Scanner<Place>, document: &mut Document, tally: &mut Tally, piece: Piece<'_>) {
    match piece {
        Piece::Data(bytes) => scan(scanner, document, tally, bytes),
        Piece::Done => tally.end(),
        Piece::End => {
            scanner.reset();
            *document = Document::default();
        }
    }
}
