//! Replies: how a refusal looks to an HTTP client and to a gRPC client.
//!
//! The body is readable by the OpenAI and Anthropic SDKs. Rate-limit fields: `RateLimit` and `RateLimit-Policy` of
//! draft-ietf-httpapi-ratelimit-headers-10, and the de-facto `x-ratelimit-*` ones, in seconds. `Retry-After` is RFC 9110,
//! section 10.2.3, in seconds. An operator's tier is never shown in figures.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use serde::Serialize;

use crate::class::{Code, FailureClass};
use crate::limits::Resource;
use crate::rules::Gate;
use crate::verdict::{Denial, LimitState, Unavailability};

/// The header that names the failure class; an upstream's own is removed.
pub const CLASS_HEADER: &str = "x-portcullis-class";
/// Seconds to wait when a dependency is unavailable.
const DEGRADED_RETRY_AFTER_S: u64 = 1;

/// A whole local reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// HTTP status; 200 for gRPC.
    pub status: u16,
    /// The status of a gRPC call, with its message.
    pub grpc: Option<(u8, &'static str)>,
    /// Header fields, lower-case.
    pub headers: Vec<(&'static str, String)>,
    /// The body; empty for gRPC.
    pub body: Vec<u8>,
}

/// A call in gRPC's ways.
enum GrpcKind<'a> {
    /// `application/grpc` or `application/grpc+…`: hosts turn body and status into the fields of gRPC themselves.
    Native,
    /// Any other `application/grpc…`, such as gRPC-Web: hosts take it for plain HTTP, so the fields are ours to write.
    Other(&'a str),
}

impl<'a> GrpcKind<'a> {
    fn of(content_type: Option<&'a str>) -> Option<Self> {
        let content_type = content_type?;
        let rest = content_type.strip_prefix("application/grpc")?;
        let native = rest.is_empty() || rest.starts_with(['+', ';']);
        Some(if native {
            Self::Native
        } else {
            Self::Other(content_type)
        })
    }
}

/// A request that does not go on: by a known denial, or because a dependency could not answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// Known.
    Denied(Denial),
    /// Not decided, and closed.
    Unavailable(Unavailability),
}

impl Refusal {
    /// The failure class.
    pub fn class(&self) -> FailureClass {
        match self {
            // A denial never has the code of an outage; if one did, it would not be reported as anybody's quota.
            Self::Denied(denial) => denial.code.class().unwrap_or(FailureClass::DecisionUnavailable),
            Self::Unavailable(unavailable) => unavailable.dependency.class(),
        }
    }

    /// The code.
    pub const fn code(&self) -> Code {
        match self {
            Self::Denied(denial) => denial.code,
            Self::Unavailable(_) => Code::ServiceDegraded,
        }
    }

    /// The gate.
    pub const fn gate(&self) -> Option<Gate> {
        match self {
            Self::Denied(denial) => denial.gate,
            Self::Unavailable(unavailable) => unavailable.gate,
        }
    }

    fn retry_after_s(&self) -> Option<u64> {
        match self {
            Self::Denied(denial) => denial.retry_after_s,
            Self::Unavailable(_) => Some(DEGRADED_RETRY_AFTER_S),
        }
    }

    fn limit(&self) -> Option<&LimitState> {
        match self {
            Self::Denied(denial) => denial.limit.as_ref(),
            Self::Unavailable(_) => None,
        }
    }

    fn waiting_helps(&self) -> bool {
        match self {
            Self::Denied(denial) => denial.waiting_helps(),
            Self::Unavailable(_) => true,
        }
    }

    /// The reply to a request with this `content-type`.
    pub fn reply(&self, content_type: Option<&str>, request_id: Option<&str>) -> Reply {
        let mut headers = alloc::vec![(CLASS_HEADER, self.class().name().to_string())];
        if let Some(seconds) = self.retry_after_s() {
            headers.push(("retry-after", seconds.to_string()));
        }
        if !self.waiting_helps() {
            headers.push(("x-should-retry", "false".into()));
        }
        if let Some(limit) = self.limit().filter(|_| self.gate() != Some(Gate::Capacity)) {
            headers.extend(limit_headers(limit));
        }
        let code = self.code();
        match GrpcKind::of(content_type) {
            Some(GrpcKind::Native) => {
                return Reply {
                    status: 200,
                    grpc: Some((code.grpc_status(), code.message())),
                    headers,
                    body: Vec::new(),
                };
            }
            Some(GrpcKind::Other(content_type)) => {
                headers.push(("content-type", content_type.to_string()));
                headers.push(("grpc-status", code.grpc_status().to_string()));
                headers.push(("grpc-message", code.message().to_string()));
                return Reply {
                    status: 200,
                    grpc: None,
                    headers,
                    // Also as a frame: without a body a host drops the content type, and clients read the frame first.
                    body: web_trailers(content_type, code),
                };
            }
            None => {}
        }
        headers.push(("content-type", "application/json".into()));
        let body = Body {
            error: ErrorObject {
                code: code.name(),
                r#type: self.class().name(),
                message: code.message(),
                request_id,
                scope: self.limit().map(|limit| limit.scope.name()),
                retry_after: self.retry_after_s(),
            },
        };
        Reply {
            status: code.status(),
            grpc: None,
            headers,
            body: serde_json::to_vec(&body).unwrap_or_default(),
        }
    }
}

/// The trailers of a gRPC-Web answer: a frame with the flag 0x80 and a length of four bytes, big-endian; in base64
/// (RFC 4648) for the `-text` form.
fn web_trailers(content_type: &str, code: Code) -> Vec<u8> {
    let text = alloc::format!(
        "grpc-status: {}\r\ngrpc-message: {}\r\n",
        code.grpc_status(),
        code.message()
    );
    let mut frame = alloc::vec![0x80];
    frame.extend_from_slice(&u32::try_from(text.len()).unwrap_or(u32::MAX).to_be_bytes());
    frame.extend_from_slice(text.as_bytes());
    if content_type.starts_with("application/grpc-web-text") {
        base64(&frame)
    } else {
        frame
    }
}

fn base64(bytes: &[u8]) -> Vec<u8> {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = Vec::with_capacity(bytes.len().saturating_mul(2));
    for chunk in bytes.chunks(3) {
        let at = |at: usize| u32::from(chunk.get(at).copied().unwrap_or(0));
        let group = (at(0) << 16) | (at(1) << 8) | at(2);
        for (digit, shift) in [18, 12, 6, 0].into_iter().enumerate() {
            let index = usize::try_from((group >> shift) & 63).unwrap_or(0);
            let filled = digit <= chunk.len();
            text.push(if filled {
                ALPHABET.get(index).copied().unwrap_or(b'=')
            } else {
                b'='
            });
        }
    }
    text
}

#[derive(Serialize)]
struct Body<'a> {
    error: ErrorObject<'a>,
}

#[derive(Serialize)]
struct ErrorObject<'a> {
    code: &'a str,
    r#type: &'a str,
    message: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    scope: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after: Option<u64>,
}

/// The rate-limit fields of one limit.
pub fn limit_headers(state: &LimitState) -> Vec<(&'static str, String)> {
    let LimitState {
        limit,
        remaining,
        window_s,
        ..
    } = *state;
    let reset_s = state.reset_ms.div_ceil(1000);
    let (scope, resource) = (state.scope.name(), state.resource.name());
    // The quota unit is requests unless said otherwise; a window means nothing for slots.
    let policy = match state.resource {
        Resource::Requests => alloc::format!("\"{scope}-{resource}\";q={limit};w={window_s}"),
        Resource::Tokens => alloc::format!("\"{scope}-{resource}\";q={limit};qu=\"tokens\";w={window_s}"),
        Resource::Concurrency => alloc::format!("\"{scope}-{resource}\";q={limit};qu=\"concurrent-requests\""),
    };
    let mut headers = alloc::vec![
        ("ratelimit-policy", policy),
        (
            "ratelimit",
            alloc::format!("\"{scope}-{resource}\";r={remaining};t={reset_s}")
        ),
    ];
    let names = match state.resource {
        Resource::Requests => [
            "x-ratelimit-limit-requests",
            "x-ratelimit-remaining-requests",
            "x-ratelimit-reset-requests",
        ],
        Resource::Tokens => [
            "x-ratelimit-limit-tokens",
            "x-ratelimit-remaining-tokens",
            "x-ratelimit-reset-tokens",
        ],
        Resource::Concurrency => return headers,
    };
    headers.extend(
        names
            .into_iter()
            .zip([limit, remaining, reset_s].map(|figure| figure.to_string())),
    );
    headers
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::class::Dependency;
    use crate::limits::Scope;
    #[cfg(target_arch = "wasm32")]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    fn spent(gate: Gate, code: Code) -> Refusal {
        let limit = LimitState {
            scope: Scope::Org,
            resource: Resource::Requests,
            limit: 30,
            remaining: 0,
            reset_ms: 40_001,
            window_s: 60,
        };
        Refusal::Denied(Denial {
            code,
            gate: Some(gate),
            limit: Some(limit),
            retry_after_s: Some(41),
        })
    }

    fn header<'a>(reply: &'a Reply, name: &str) -> Option<&'a str> {
        reply
            .headers
            .iter()
            .find(|(n, _)| *n == name)
            .map(|(_, value)| value.as_str())
    }

    #[test]
    fn a_spent_contract_is_a_429_with_everything_that_a_client_needs() {
        let reply = spent(Gate::Contract, Code::RateLimited).reply(None, Some("r-1"));
        assert_eq!(reply.status, 429);
        assert_eq!(
            core::str::from_utf8(&reply.body).unwrap(),
            r#"{"error":{"code":"RATE_LIMITED","type":"quota_exhausted","message":"shared inference rate limit exceeded","request_id":"r-1","scope":"org","retry_after":41}}"#
        );
        for (name, value) in [
            ("content-type", "application/json"),
            ("x-portcullis-class", "quota_exhausted"),
            ("retry-after", "41"),
            ("ratelimit-policy", "\"org-requests\";q=30;w=60"),
            ("ratelimit", "\"org-requests\";r=0;t=41"),
            ("x-ratelimit-limit-requests", "30"),
            ("x-ratelimit-remaining-requests", "0"),
            ("x-ratelimit-reset-requests", "41"),
        ] {
            assert_eq!(header(&reply, name), Some(value), "{name}");
        }
        assert_eq!(header(&reply, "x-should-retry"), None);
    }

    #[test]
    fn spent_capacity_is_a_503_that_shows_no_figure_of_the_operator() {
        let reply = spent(Gate::Capacity, Code::CapacityExhausted).reply(None, None);
        assert_eq!((reply.status, header(&reply, "retry-after")), (503, Some("41")));
        assert!(!reply.headers.iter().any(|(name, _)| name.contains("ratelimit")));
    }

    #[test]
    fn an_outage_is_a_503_and_names_no_store() {
        let unavailable = Unavailability {
            dependency: Dependency::Limiter,
            gate: Some(Gate::Contract),
        };
        let reply = Refusal::Unavailable(unavailable).reply(None, None);
        assert_eq!(
            core::str::from_utf8(&reply.body).unwrap(),
            r#"{"error":{"code":"SERVICE_DEGRADED","type":"limiter_unavailable","message":"a dependency of admission is unavailable","retry_after":1}}"#
        );
        assert_eq!((reply.status, header(&reply, "retry-after")), (503, Some("1")));
    }

    #[test]
    fn what_waiting_cannot_cure_says_so_and_has_no_retry_after() {
        for code in [
            Code::EnvelopeMissing,
            Code::EnvelopeMalformed,
            Code::EnvelopePartial,
            Code::ModelNotAllowed,
            Code::OrgSuspended,
            Code::ProviderNotConfigured,
            Code::ModelRequired,
            Code::BodyTooLarge,
        ] {
            let reply = Refusal::Denied(Denial::plain(code, None)).reply(None, None);
            assert_eq!(header(&reply, "retry-after"), None, "{}", code.name());
            assert_eq!(header(&reply, "x-should-retry"), Some("false"), "{}", code.name());
        }
    }

    #[test]
    fn a_grpc_call_gets_a_grpc_status() {
        let reply = spent(Gate::Contract, Code::RateLimited).reply(Some("application/grpc+proto"), None);
        assert_eq!(
            (reply.status, reply.grpc),
            (200, Some((8, "shared inference rate limit exceeded")))
        );
        assert!(reply.body.is_empty() && header(&reply, "content-type").is_none());
        assert_eq!(header(&reply, "retry-after"), Some("41"));
    }

    #[test]
    fn what_hosts_do_not_take_for_grpc_gets_its_fields_from_us() {
        let reply = spent(Gate::Contract, Code::RateLimited).reply(Some("application/grpc-web+proto"), None);
        assert_eq!((reply.status, reply.grpc), (200, None));
        assert_eq!(header(&reply, "grpc-status"), Some("8"));
        assert_eq!(
            header(&reply, "grpc-message"),
            Some("shared inference rate limit exceeded")
        );
        assert_eq!(header(&reply, "content-type"), Some("application/grpc-web+proto"));
        let trailers = b"grpc-status: 8\r\ngrpc-message: shared inference rate limit exceeded\r\n";
        assert_eq!(reply.body.split_at(5), (&[0x80, 0, 0, 0, 68][..], &trailers[..]));
        let reply = spent(Gate::Contract, Code::RateLimited).reply(Some("application/grpc-web-text"), None);
        assert!(
            reply.body.starts_with(b"gAAAAERncnBjLXN0YXR1czogOA0K"),
            "{:?}",
            reply.body
        );
        assert_eq!(
            (base64(b"a"), base64(b"ab"), base64(b"abc")),
            (b"YQ==".to_vec(), b"YWI=".to_vec(), b"YWJj".to_vec())
        );
    }
}
