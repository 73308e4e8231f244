//! The operators' listener: what is shown and done apart from the gateways, on an address that only this machine reaches.
//!
//! Who may ask: whoever brings one of the tokens of `admin.token_file`, for everything under `/admin/`; in development
//! without such a file, whoever reaches the address. A browser on this machine reaches it too, on behalf of any page: so the
//! request's own host must be a loopback name (a foreign name that was made to point here is refused), and a request that a
//! page made must come from this very address.
//!
//! The console page itself (`/`) is for whoever reaches the address: it holds nothing, and asks for the token.
//!
//! Left out on purpose: what the gateways ask, and TLS, which loopback does not need.

mod console;
mod explain;
mod faults;
mod state;

use std::sync::Arc;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::{any, get, post};
use serde_json::json;
use tokio::sync::Semaphore;

use crate::decide::Decider;
use crate::fault_switch::FaultSwitch;
use crate::gates::Gates;
use crate::http::answered;
use crate::readiness::Readiness;
use crate::tokens::Tokens;

/// Under this everything needs a token.
const PROTECTED: &str = "/admin/";

/// What the operators' routes share.
#[derive(Clone)]
pub struct AdminState {
    /// Decides, and holds what waits.
    pub decider: Arc<Decider>,
    /// Knows the dependencies.
    pub readiness: Arc<Readiness>,
    /// Knows what becomes of each gate.
    pub gates: Arc<Gates>,
    /// The fingerprint of the configuration.
    pub config_hash: Arc<str>,
    /// When the service started, in seconds since 1970.
    pub started_s: u64,
    /// Who is let in; `None`: whoever reaches the address.
    pub tokens: Option<Arc<Tokens>>,
    /// Explanations that may be made at a time.
    pub explaining: Arc<Semaphore>,
    /// What may be let fail; `None` in production.
    pub faults: Option<Arc<FaultSwitch>>,
    /// How long a cached answer of the policy store counts, in milliseconds.
    pub max_staleness_ms: u64,
}

/// The operators' routes.
pub fn router(state: AdminState) -> Router {
    Router::new()
        .route("/", get(console::page))
        .route("/admin/v1/state", get(state::state))
        .route(
            "/admin/v1/explain",
            post(explain::explain).layer(DefaultBodyLimit::max(explain::LARGEST)),
        )
        .route("/admin/v1/faults", any(faults::faults))
        .fallback(async || refused(StatusCode::NOT_FOUND, "no such path"))
        .layer(from_fn_with_state(state.clone(), guard))
        .with_state(state)
}

/// A refusal as the service's other routes write it.
fn refused(status: StatusCode, reason: &str) -> Response {
    answered(status, json!({"error": reason}).to_string())
}

/// Turns away whoever has no business here, whatever the path.
async fn guard(State(state): State<AdminState>, request: Request, next: Next) -> Response {
    let headers = request.headers();
    let Some(host) = loopback_host(request.uri(), headers) else {
        return refused(
            StatusCode::MISDIRECTED_REQUEST,
            "the host of the request must be a loopback name, such as localhost or 127.0.0.1",
        );
    };
    if !is_own_page(&host, headers) {
        return refused(StatusCode::FORBIDDEN, "a page of another origin may not ask here");
    }
    let is_open = !request.uri().path().starts_with(PROTECTED);
    if is_open || state.tokens.is_none_or(|tokens| tokens.admit(headers)) {
        let mut answer = next.run(request).await;
        // What is shown here is nobody's to keep.
        answer
            .headers_mut()
            .insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        return answer;
    }
    let mut answer = refused(StatusCode::UNAUTHORIZED, "a token of admin.token_file is needed");
    answer
        .headers_mut()
        .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    answer
}

/// The host that a request names, if it is a loopback one.
fn loopback_host(uri: &Uri, headers: &HeaderMap) -> Option<String> {
    let mut lines = headers.get_all(header::HOST).iter();
    let named = match (uri.authority(), lines.next(), lines.next()) {
        (Some(authority), None, _) => authority.clone(),
        (None, Some(line), None) => Authority::try_from(line.as_bytes()).ok()?,
        (Some(authority), Some(line), None) if line.as_bytes() == authority.as_str().as_bytes() => authority.clone(),
        _ => return None,
    };
    if named.as_str().contains('@') {
        return None;
    }
    let host = named.host();
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let address = bare.parse::<std::net::IpAddr>().ok();
    let is_loopback = address.map_or_else(
        || host.eq_ignore_ascii_case("localhost"),
        |address| address.is_loopback(),
    );
    is_loopback.then(|| named.as_str().to_owned())
}

/// Whether no page made this request, or one that was served from here.
fn is_own_page(host: &str, headers: &HeaderMap) -> bool {
    let own = |line: &HeaderValue| line.as_bytes() == format!("http://{host}").as_bytes();
    headers.get_all(header::ORIGIN).iter().all(own)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(line: &str) -> Option<String> {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, HeaderValue::from_str(line).unwrap());
        loopback_host(&Uri::from_static("/"), &headers)
    }

    #[test]
    fn only_loopback_names_are_hosts_of_this_listener() {
        for good in [
            "localhost",
            "LOCALHOST:8182",
            "127.0.0.1:8182",
            "127.8.9.1",
            "[::1]:8182",
            "[::1]",
        ] {
            assert_eq!(host(good).as_deref(), Some(good));
        }
        for bad in [
            "",
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example:8182",
            "10.0.0.1:8182",
            "[2001:db8::1]:8182",
            "evil.example@127.0.0.1",
            "user@localhost",
        ] {
            assert_eq!(host(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_page_of_another_origin_is_told_from_ones_own() {
        let with = |origin: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::ORIGIN, HeaderValue::from_str(origin).unwrap());
            is_own_page("127.0.0.1:8182", &headers)
        };
        assert!(is_own_page("127.0.0.1:8182", &HeaderMap::new()));
        assert!(with("http://127.0.0.1:8182"));
        for other in [
            "null",
            "http://127.0.0.1",
            "https://127.0.0.1:8182",
            "http://evil.example",
        ] {
            assert!(!with(other), "{other}");
        }
    }
}
