//! The service's own door: what a token is, who may call (`tokens_file`, `tls`), what a caller may take of it (`http`), and
//! the operators' listener (`admin`).
//!
//! Left out on purpose: what stands in the files that are named here, which the service reads.

use alloc::borrow::ToOwned;
use alloc::string::String;
use core::net::SocketAddr;

use super::Profile;
use super::faults::{Faults, shown};
use super::section::Section;
use crate::json::Node;

/// What is wrong with a text that is no token. Nothing of the text is in it.
pub const NO_TOKEN: &str =
    "must be 32 to 512 of A-Z, a-z, 0-9 and -._~+/= ; its value is not shown: `openssl rand -base64 32` makes one";

/// Whether a text can be sent as `Bearer TEXT` (RFC 6750) and is long enough not to be guessed.
pub fn is_token(text: &str) -> bool {
    let is_sane =
        |b| matches!(b, b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'+' | b'/' | b'=');
    (32..=512).contains(&text.len()) && text.bytes().all(is_sane)
}

/// The token that a filter sends. Never shown, and in no fingerprint.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// The value of the header `authorization`. Not for logs.
    pub fn authorization(&self) -> &str {
        &self.0
    }
}

impl core::fmt::Debug for Token {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Token(not shown)")
    }
}

/// Reads a token that stands in the configuration itself.
pub(super) fn read_token(section: &mut Section<'_>, key: &'static str, faults: &mut Faults) -> Option<Token> {
    let text = section.text(key, faults)?;
    if !is_token(text) {
        faults.add(section.path(key), NO_TOKEN);
        return None;
    }
    Some(Token(alloc::format!("Bearer {text}")))
}

/// With what the service shows who it is, and whom it knows. Paths of PEM files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsConfig {
    /// The service's certificate, and those between it and its root.
    pub certificate: String,
    /// The certificate's key.
    pub key: String,
    /// Whose certificates a client must have; `None`: it needs none.
    pub client_ca: Option<String>,
}

/// Reads `tls`.
pub(super) fn read_tls(section: &mut Section<'_>, faults: &mut Faults) -> Option<TlsConfig> {
    let node = section.get("tls").filter(|node| **node != Node::Null)?;
    let mut tls = Section::of("tls", node, faults)?;
    let [certificate, key] = ["certificate", "key"].map(|key| {
        tls.required(key, faults)?;
        file(&mut tls, key, faults)
    });
    let client_ca = optional_file(&mut tls, "client_ca", faults);
    tls.finish(faults);
    Some(TlsConfig {
        certificate: certificate?,
        key: key?,
        client_ca,
    })
}

/// What callers may take of the service, all of it finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HttpBounds {
    /// Connections at a time; one more is closed at once.
    pub max_connections: u64,
    /// A request's head, in bytes.
    pub max_header_bytes: u64,
    /// From a request's first byte to the end of its head, and from a connection's begin to the end of its first head, in
    /// milliseconds.
    pub header_timeout_ms: u64,
    /// From the end of a request's head to the end of its body, in milliseconds.
    pub body_timeout_ms: u64,
    /// How long a connection may wait for its next request, in milliseconds.
    pub idle_timeout_ms: u64,
}

impl Default for HttpBounds {
    fn default() -> Self {
        Self {
            max_connections: 4_096,
            max_header_bytes: 65_536,
            header_timeout_ms: 10_000,
            body_timeout_ms: 10_000,
            // Twice what Envoy keeps an idle connection for, so that the gateway is the one who closes.
            idle_timeout_ms: 7_200_000,
        }
    }
}

/// Reads `http`.
pub(super) fn read_http(section: &mut Section<'_>, faults: &mut Faults) -> HttpBounds {
    let mut bounds = HttpBounds::default();
    let Some(node) = section.get("http") else {
        return bounds;
    };
    if let Some(mut http) = Section::of("http", node, faults) {
        let mut figure = |key, range, default| http.integer(key, range, faults).unwrap_or(default);
        bounds.max_connections = figure("max_connections", 1..=1_000_000, bounds.max_connections);
        bounds.max_header_bytes = figure("max_header_bytes", 8_192..=1_048_576, bounds.max_header_bytes);
        bounds.header_timeout_ms = figure("header_timeout_ms", 100..=600_000, bounds.header_timeout_ms);
        bounds.body_timeout_ms = figure("body_timeout_ms", 100..=600_000, bounds.body_timeout_ms);
        bounds.idle_timeout_ms = figure("idle_timeout_ms", 100..=86_400_000, bounds.idle_timeout_ms);
        http.finish(faults);
    }
    bounds
}

/// Where operators look in, apart from the gateways.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdminConfig {
    /// A loopback address to listen on.
    pub listen: SocketAddr,
    /// The file of the tokens that are let in; `None`, in development only: whoever reaches the address.
    pub token_file: Option<String>,
}

/// Reads `admin`. It shows whose limits are how far used, so it is never reachable from elsewhere, and only development may
/// do without a token.
pub(super) fn read_admin(
    section: &mut Section<'_>,
    profile: Option<Profile>,
    faults: &mut Faults,
) -> Option<AdminConfig> {
    let node = section.get("admin").filter(|node| **node != Node::Null)?;
    let mut admin = Section::of("admin", node, faults)?;
    admin.required("listen", faults);
    let listen = admin.text("listen", faults).and_then(|text| {
        let address = text.parse::<SocketAddr>().ok();
        let loopback = address.filter(|address| address.ip().is_loopback());
        if loopback.is_none() {
            let is = shown(&Node::Text(text.to_owned()));
            faults.add(
                "admin.listen",
                alloc::format!("must be a loopback address with a port, such as \"127.0.0.1:8182\", is {is}"),
            );
        }
        loopback
    });
    let token_file = optional_file(&mut admin, "token_file", faults);
    admin.finish(faults);
    if let (None, Some(profile)) = (&token_file, profile.filter(|profile| *profile != Profile::Development)) {
        faults.add(
            "admin.token_file",
            alloc::format!("required in {profile}: a file with one token a line"),
        );
    }
    Some(AdminConfig {
        listen: listen?,
        token_file,
    })
}

/// The path of a file; absent and null are the same.
pub(super) fn optional_file(section: &mut Section<'_>, key: &'static str, faults: &mut Faults) -> Option<String> {
    section.get(key).filter(|node| **node != Node::Null)?;
    file(section, key, faults)
}

fn file(section: &mut Section<'_>, key: &'static str, faults: &mut Faults) -> Option<String> {
    let path = section.text(key, faults)?;
    if path.is_empty() {
        faults.add(section.path(key), "must be the path of a file, is empty");
        return None;
    }
    Some(path.to_owned())
}
