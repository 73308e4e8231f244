//! `POST /admin/v1/explain`: what `portcullis explain` says of a pasted request, over memory.
//!
//! Bounded: a few kilobytes, one at a time, and nothing of this machine's disk, neither by a curl line (`-d @FILE`) nor by the
//! name of the rules. Left out on purpose: counters, policies and configurations, which the command takes from files.

use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use portcullis_decision::config::SHIPPED_RULES;
use serde::Deserialize;
use serde_json::json;

use super::{AdminState, refused};
use crate::explain;
use crate::http::answered;
use crate::imagined::Outage;

/// The longest question, in bytes.
pub(super) const LARGEST: usize = 64 * 1024;

/// A request, and what is imagined.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Question {
    curl: String,
    rules: String,
    #[serde(default)]
    down: Vec<Outage>,
}

/// Answers with the explanation, as JSON and as the command's table.
pub(super) async fn explain(State(state): State<AdminState>, body: Bytes) -> Response {
    let question: Question = match serde_json::from_slice(&body) {
        Ok(question) => question,
        Err(error) => return refused(StatusCode::BAD_REQUEST, &error.to_string()),
    };
    if !SHIPPED_RULES.iter().any(|(name, _)| *name == question.rules) {
        let names = SHIPPED_RULES.map(|(name, _)| name).join(", ");
        let why = format!("rules must be one of {names}, is {:?}", question.rules);
        return refused(StatusCode::BAD_REQUEST, &why);
    }
    let Ok(_turn) = state.explaining.acquire().await else {
        return refused(StatusCode::SERVICE_UNAVAILABLE, "the service is ending");
    };
    let Question { curl, rules, down } = question;
    let explained = tokio::task::spawn_blocking(move || explain::pasted(&curl, rules, down)).await;
    match explained {
        Ok(Ok((report, text))) => answered(StatusCode::OK, json!({"report": report, "text": text}).to_string()),
        Ok(Err(faults)) => refused(StatusCode::BAD_REQUEST, &faults.join("; ")),
        Err(_) => refused(StatusCode::SERVICE_UNAVAILABLE, "it could not be explained"),
    }
}
