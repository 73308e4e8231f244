//! `GET /`: the console page, one file without anything from elsewhere. What it shows it asks for itself (`state`, `explain`),
//! with the token that it was given, so the page is served to whoever reaches the address.
//!
//! A script or a style that is not the page's own is not run: each answer has a nonce of its own.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};

use super::refused;
use crate::random;

const PAGE: &str = include_str!("console.html");

/// Answers with the page.
pub(super) async fn page() -> Response {
    let Some(bytes) = random() else {
        return refused(StatusCode::SERVICE_UNAVAILABLE, "the system gives no random bits");
    };
    let nonce = format!("{:032x}", u128::from_le_bytes(bytes));
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}' ; style-src-attr 'none'; img-src data:; \
         connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    );
    let mut answer = PAGE.replace("NONCE", &nonce).into_response();
    let headers = answer.headers_mut();
    if let Ok(policy) = HeaderValue::try_from(policy) {
        headers.insert(header::CONTENT_SECURITY_POLICY, policy);
    }
    for (name, value) in [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    answer
}
