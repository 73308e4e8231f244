//! One stream as the host sees it, and what the module has done to it.

use crate::headers::Headers;
use crate::{ContextId, first};

/// How far a request has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// No headers yet.
    Created,
    /// The module is looking at the headers.
    InRequestHeaders,
    /// Held.
    Paused,
    /// Gone up.
    Passed,
    /// Answered by the module, or by the host.
    Replied,
}

/// A reply that the module made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalReply {
    /// The HTTP status.
    pub status: u32,
    /// The headers that the module gave.
    pub headers: Headers,
    /// The body, or the gRPC message.
    pub body: Vec<u8>,
    /// The gRPC status, if it is one.
    pub grpc_status: Option<u32>,
}

impl LocalReply {
    /// A header's first value, as text.
    pub fn header(&self, name: &str) -> Option<&str> {
        first(&self.headers, name).and_then(|value| std::str::from_utf8(value).ok())
    }

    /// The body's JSON; null if it is none.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// `error.code` of the body.
    pub fn code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or_default().to_owned()
    }
}

/// One stream.
#[derive(Debug, Clone)]
pub struct Stream {
    /// Its context.
    pub id: ContextId,
    /// The root context that it belongs to.
    pub root: ContextId,
    /// The request's headers, as they are by now.
    pub request: Headers,
    /// The request's trailers, as they are by now.
    pub request_trailers: Headers,
    /// The response's headers, as they are by now: the upstream's, or those of the local reply.
    pub response: Headers,
    /// How far it has come.
    pub phase: Phase,
    /// Every reply that the host accepted, wanted or not.
    pub replies: Vec<LocalReply>,
    /// The status with which the host itself has answered.
    pub host_status: Option<u16>,
    /// The host has let the request go up by itself: the module has not resumed it.
    pub was_let_go: bool,
    /// Every resume that the host accepted, wanted or not.
    pub resumes: u32,
    /// What reached the upstream: the request's headers at that moment.
    pub upstream: Option<Headers>,
    /// The request's body as the client has sent it so far.
    pub sent: Vec<u8>,
    /// The client has sent everything, trailers included.
    pub has_sent_all: bool,
    /// What of the body has reached the upstream.
    pub forwarded: Vec<u8>,
    /// Bytes of a response's body that have reached the client.
    pub returned_bytes: u64,
    /// The stream is over; its context may still be there.
    pub is_ended: bool,
    /// The context is gone.
    pub is_deleted: bool,
    /// What a body callback can read: this piece, with the earlier ones that the host keeps since they were paused.
    pub(crate) window: Vec<u8>,
    /// The last callback of the body has paused it: the host keeps what came and adds to it.
    pub(crate) is_buffering: bool,
    /// What the client has sent and the module has not been shown: pieces, and whether trailers follow.
    pub(crate) withheld: Option<Withheld>,
    /// The piece of the response that a callback can read.
    pub(crate) response_window: Vec<u8>,
}

/// What a host that stops everything keeps back.
#[derive(Debug, Clone, Default)]
pub(crate) struct Withheld {
    pub(crate) body: Vec<u8>,
    /// The body is over.
    pub(crate) ends: bool,
    pub(crate) has_trailers: bool,
}

impl Stream {
    pub(crate) const fn new(id: ContextId, root: ContextId) -> Self {
        Self {
            id,
            root,
            request: Vec::new(),
            request_trailers: Vec::new(),
            response: Vec::new(),
            phase: Phase::Created,
            replies: Vec::new(),
            host_status: None,
            was_let_go: false,
            resumes: 0,
            upstream: None,
            sent: Vec::new(),
            has_sent_all: false,
            forwarded: Vec::new(),
            returned_bytes: 0,
            is_ended: false,
            is_deleted: false,
            window: Vec::new(),
            is_buffering: false,
            withheld: None,
            response_window: Vec::new(),
        }
    }

    /// The only reply.
    pub fn reply(&self) -> &LocalReply {
        match self.replies.as_slice() {
            [reply] => reply,
            replies => panic!(
                "stream {} has {} replies, not one; it is {:?}",
                self.id,
                replies.len(),
                self.phase
            ),
        }
    }

    /// Whether the request has reached the upstream.
    pub const fn has_passed(&self) -> bool {
        self.upstream.is_some()
    }

    /// The host answers by itself.
    pub(crate) const fn refuse(&mut self, status: u16) {
        self.phase = Phase::Replied;
        self.host_status = Some(status);
    }

    /// The request goes up, with what the host has kept of its body.
    pub(crate) fn pass(&mut self) {
        self.phase = Phase::Passed;
        self.upstream = Some(self.request.clone());
        self.forward();
    }

    /// What the host has kept of the body goes up.
    pub(crate) fn forward(&mut self) {
        self.is_buffering = false;
        self.forwarded.append(&mut self.window);
    }
}
