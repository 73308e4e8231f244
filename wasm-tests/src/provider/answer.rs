//! The bytes of an answer, in the pieces in which they are sent: one for each event, two for a document.

use serde_json::{Value, json};

use super::asked::{Asked, Interface};
use super::{gzip, openai, others};

pub(super) type Event = String;

/// One of them has four bytes, one two.
const TOKENS: [&str; 5] = ["Every ", "w\u{F6}rd ", "\u{1F642} ", "counts ", "\"once\" "];

pub(super) fn token(at: u64) -> &'static str {
    TOKENS[usize::try_from(at).unwrap_or(0) % TOKENS.len()]
}

/// The text of one whole answer.
pub(super) fn whole(asked: &Asked) -> String {
    (0..asked.length).map(token).collect()
}

pub(super) fn data(value: &Value) -> Event {
    format!("data: {value}\n\n")
}

pub(super) fn named(kind: &str, value: &Value) -> Event {
    format!("event: {kind}\ndata: {value}\n\n")
}

pub(super) struct Written {
    pub(super) content_type: &'static str,
    pub(super) pieces: Vec<Vec<u8>>,
}

const JSON: &str = "application/json";

pub(super) fn answer(asked: &Asked, query: &str) -> Written {
    let events = match asked.interface {
        Interface::Chat if asked.streams => Some(openai::chat_events(asked)),
        Interface::Responses if asked.streams => Some(openai::response_events(asked)),
        Interface::Messages if asked.streams => Some(others::message_events(asked)),
        Interface::Gemini if asked.streams && query.contains("alt=sse") => Some(others::generated_events(asked)),
        Interface::Gemini if asked.streams => {
            return Written {
                content_type: JSON,
                pieces: bytes(others::generated_list(asked)),
            };
        }
        _ => None,
    };
    if let Some(events) = events {
        return Written {
            content_type: "text/event-stream; charset=utf-8",
            pieces: bytes(events),
        };
    }
    document(&match asked.interface {
        Interface::Chat => openai::chat(asked),
        Interface::Responses => openai::response(asked),
        Interface::Embeddings => openai::embeddings(asked),
        Interface::Messages => others::message(asked),
        Interface::Gemini => others::generated(asked),
    })
}

/// The error that the interface's own clients understand.
pub(super) fn failure(interface: Option<Interface>, status: u16) -> Written {
    let message = "the stand-in was told to fail";
    document(&if interface == Some(Interface::Messages) {
        json!({"type": "error", "error": {"type": "api_error", "message": message}})
    } else {
        json!({"error": {"message": message, "type": "server_error", "param": null, "code": status.to_string()}})
    })
}

fn document(value: &Value) -> Written {
    let text = value.to_string().into_bytes();
    let (first, second) = text.split_at(text.len() / 2);
    Written {
        content_type: JSON,
        pieces: vec![first.to_vec(), second.to_vec()],
    }
}

fn bytes(events: Vec<Event>) -> Vec<Vec<u8>> {
    events.into_iter().map(String::into_bytes).collect()
}

impl Written {
    /// The same bytes in pieces of these sizes, over and over.
    pub(super) fn cut(&mut self, sizes: &[usize]) {
        let all = self.pieces.concat();
        let mut rest = all.as_slice();
        self.pieces.clear();
        for size in sizes.iter().cycle() {
            let (piece, left) = rest.split_at((*size).clamp(1, rest.len().max(1)).min(rest.len()));
            if piece.is_empty() {
                break;
            }
            self.pieces.push(piece.to_vec());
            rest = left;
        }
    }

    pub(super) fn compress(&mut self) {
        let packed = gzip::of(&self.pieces.concat());
        let (first, second) = packed.split_at(packed.len() / 2);
        self.pieces = vec![first.to_vec(), second.to_vec()];
    }
}
