//! Callouts: what the module has asked of the decision service, and the ways in which a call can fail.

use crate::headers::Headers;
use crate::{ContextId, first};

/// A call that is out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Callout {
    /// Its token.
    pub token: u32,
    /// The root context on which the answer comes.
    pub root: ContextId,
    /// The context that it was made for: a stream, or the root itself.
    pub context: ContextId,
    /// The stream in whose request phase it was made.
    pub request: Option<ContextId>,
    /// The callback out of which it was made.
    pub callback: &'static str,
    /// The host's name for where it goes.
    pub upstream: String,
    /// Its headers.
    pub headers: Headers,
    /// Its body.
    pub body: Vec<u8>,
    /// The time that the host may take.
    pub timeout_ms: u32,
    /// No request waits for its answer.
    pub is_ahead: bool,
    /// When it left, on the monotonic clock.
    pub left_ms: u64,
}

impl Callout {
    /// Its path.
    pub fn path(&self) -> &str {
        first(&self.headers, ":path")
            .and_then(|path| std::str::from_utf8(path).ok())
            .unwrap_or_default()
    }

    /// Its body as JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("the body of callout {} is not JSON: {error}", self.token))
    }

    /// Whether it asks for the decision that a request waits for.
    pub fn is_decide(&self) -> bool {
        self.path() == "/v1/decide" && !self.is_ahead
    }

    /// Whether it asks for a block of admissions that no request waits for.
    pub fn is_fetch(&self) -> bool {
        self.path() == "/v1/decide" && self.is_ahead
    }

    /// Whether it tells what streams have left behind.
    pub fn is_settle(&self) -> bool {
        self.path() == "/v1/settle"
    }

    /// The operation that it asks about; empty if it asks about none.
    pub fn op(&self) -> String {
        self.json()["op"].as_str().unwrap_or_default().to_owned()
    }

    /// The operations of one key of a settle batch (`releases`, `renewals`, `cancels`).
    pub fn told(&self, key: &str) -> Vec<String> {
        let json = self.json();
        let ops = json[key].as_array().cloned().unwrap_or_default();
        ops.iter()
            .map(|op| op.as_str().unwrap_or_default().to_owned())
            .collect()
    }

    /// What a settle batch returns of leases.
    pub fn returns(&self) -> Vec<serde_json::Value> {
        self.json()["returns"].as_array().cloned().unwrap_or_default()
    }

    /// The settlements of a settle batch, each with its operation.
    pub fn settles(&self) -> Vec<(String, serde_json::Value)> {
        let json = self.json();
        let settles = json["settles"].as_array().cloned().unwrap_or_default();
        let op = |settlement: &serde_json::Value| settlement["op"].as_str().unwrap_or_default().to_owned();
        settles
            .into_iter()
            .map(|settlement| (op(&settlement), settlement))
            .collect()
    }
}

/// How a call ends without an answer of the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// Too late: Envoy makes a 504 with a text body.
    TimedOut,
    /// Refused, or closed under the call: Envoy makes a 503.
    Refused,
    /// An answer that is not HTTP: Envoy makes a 502.
    Garbage,
    /// It died after its headers, or the host makes nothing up: no headers at all.
    Died,
}

impl Failure {
    /// Every way.
    pub const ALL: [Self; 4] = [Self::TimedOut, Self::Refused, Self::Garbage, Self::Died];

    /// The answer that the host makes up.
    pub(crate) const fn answer(self) -> (Option<u16>, &'static str) {
        match self {
            Self::TimedOut => (Some(504), "upstream request timeout"),
            Self::Refused => (
                Some(503),
                "upstream connect error or disconnect/reset before headers. reset reason: connection failure",
            ),
            Self::Garbage => (
                Some(502),
                "upstream connect error or disconnect/reset before headers. reset reason: protocol error",
            ),
            Self::Died => (None, ""),
        }
    }
}
