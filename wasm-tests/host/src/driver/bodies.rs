//! Bodies and responses: what the client and the upstream send, in the pieces in which a host hands them over.
//!
//! As in Envoy (since 1.32): a piece that the module lets go on is gone, one that it pauses stays with the host, and the
//! next callback covers both. A body never reaches the upstream before its headers do.

use crate::ContextId;
use crate::driver::TestHost;
use crate::headers::{Headers, headers};
use crate::personality::RequestBody;
use crate::stream::Phase;

impl TestHost {
    /// A request whose body is to come, on the first root context.
    pub fn begin(&mut self, lines: &[(&str, &str)]) -> ContextId {
        let stream = self.open(self.root());
        self.send_headers(stream, headers(lines), false);
        stream
    }

    /// The client sends a piece of the body, possibly an empty one. One that comes before any headers is how a fresh
    /// context in the middle of a stream looks.
    pub fn body(&mut self, stream: ContextId, piece: &[u8], end_of_stream: bool) {
        let comes = self.world().personality.request_body;
        let record = self.record(stream);
        record.sent.extend_from_slice(piece);
        record.has_sent_all |= end_of_stream;
        if record.phase == Phase::Replied || record.is_ended {
            return;
        }
        let is_kept_back = match comes {
            RequestBody::Pieces => false,
            RequestBody::PiecesAfterHeaders => record.phase == Phase::Paused,
            RequestBody::Whole => record.phase == Phase::Paused || !end_of_stream,
            RequestBody::Never => {
                if record.phase == Phase::Passed {
                    record.forwarded.extend_from_slice(piece);
                } else {
                    record.window.extend_from_slice(piece);
                }
                return;
            }
        };
        let withheld = record.withheld.get_or_insert_default();
        withheld.body.extend_from_slice(piece);
        withheld.ends |= end_of_stream;
        if !is_kept_back {
            self.guest.give_withheld(stream);
        }
    }

    /// The client sends trailers, which end its request.
    pub fn trailers(&mut self, stream: ContextId) {
        self.send_trailers(stream, &[("x-trailer", "t")]);
    }

    /// The client sends these trailers, which end its request.
    pub fn send_trailers(&mut self, stream: ContextId, lines: &[(&str, &str)]) {
        let comes = self.world().personality.request_body;
        let record = self.record(stream);
        record.request_trailers = headers(lines);
        record.has_sent_all = true;
        if record.phase == Phase::Replied || record.is_ended || comes == RequestBody::Never {
            return;
        }
        record.withheld.get_or_insert_default().has_trailers = true;
        if comes == RequestBody::Pieces || record.phase != Phase::Paused {
            self.guest.give_withheld(stream);
        }
    }

    /// The upstream answers without a body; returns the response's headers as they go down.
    pub fn respond(&mut self, stream: ContextId, lines: &[(&str, &str)]) -> Headers {
        self.response_headers(stream, lines, true);
        self.stream(stream).response.clone()
    }

    /// The upstream answers with a body in these pieces, and the host ends it with an empty one, as Envoy does. So does
    /// the host's own reply look, when there is no upstream to ask.
    pub fn respond_with<'a>(
        &mut self,
        stream: ContextId,
        lines: &[(&str, &str)],
        pieces: impl IntoIterator<Item = &'a [u8]>,
    ) {
        self.response_headers(stream, lines, false);
        for piece in pieces {
            self.response_body(stream, piece, false);
        }
        self.response_body(stream, b"", true);
    }

    /// The headers of a response.
    pub fn response_headers(&mut self, stream: ContextId, lines: &[(&str, &str)], end_of_stream: bool) {
        self.record(stream).response = headers(lines);
        let count = u32::try_from(lines.len()).unwrap_or(u32::MAX);
        let arguments = [stream, count, u32::from(end_of_stream)];
        self.guest
            .response_callback("proxy_on_response_headers", stream, &arguments);
    }

    /// A piece of a response's body.
    pub fn response_body(&mut self, stream: ContextId, piece: &[u8], end_of_stream: bool) {
        self.guest.give_response(stream, piece, end_of_stream);
    }

    /// The trailers of a response.
    pub fn response_trailers(&mut self, stream: ContextId) {
        self.guest
            .response_callback("proxy_on_response_trailers", stream, &[stream, 1]);
    }
}
