//! Bodies and responses: what the client and the upstream send, in the pieces in which a host hands them over.
//!
//! As in Envoy (since 1.32): a piece that the module lets go on is gone, one that it pauses stays with the host, and the
//! next callback covers both. A body never reaches the upstream before its headers do.

use crate::ContextId;
use crate::driver::TestHost;
use crate::headers::{Headers, headers};
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
        let keeps_back = !self.world().personality.gives_body_while_paused;
        let record = self.record(stream);
        record.sent.extend_from_slice(piece);
        record.has_sent_all |= end_of_stream;
        if record.phase == Phase::Replied || record.is_ended {
            return;
        }
        if keeps_back && record.phase == Phase::Paused {
            let withheld = record.withheld.get_or_insert_default();
            withheld.body.extend_from_slice(piece);
            withheld.ends |= end_of_stream;
        } else {
            self.guest.give_body(stream, piece, end_of_stream);
        }
    }

    /// The client sends trailers, which end its request.
    pub fn trailers(&mut self, stream: ContextId) {
        self.send_trailers(stream, &[("x-trailer", "t")]);
    }

    /// The client sends these trailers, which end its request.
    pub fn send_trailers(&mut self, stream: ContextId, lines: &[(&str, &str)]) {
        let keeps_back = !self.world().personality.gives_body_while_paused;
        let record = self.record(stream);
        record.request_trailers = headers(lines);
        record.has_sent_all = true;
        if record.phase == Phase::Replied || record.is_ended {
            return;
        }
        if keeps_back && record.phase == Phase::Paused {
            record.withheld.get_or_insert_default().has_trailers = true;
        } else {
            self.guest.give_trailers(stream);
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
