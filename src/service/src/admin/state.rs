//! `GET /admin/v1/state`: what the service is and how it is, as JSON, at one glance.
//!
//! Left out on purpose: rates and histograms, which `/metrics` has.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use portcullis_decision::config::SHIPPED_RULES;
use serde_json::{Value, json};

use super::AdminState;
use crate::http::answered;
use crate::unix_s;

/// Answers with the state of this moment.
pub(super) async fn state(State(state): State<AdminState>) -> Response {
    answered(StatusCode::OK, whole(&state).to_string())
}

fn whole(state: &AdminState) -> Value {
    let decider = &state.decider;
    let (ready, dependencies) = state.readiness.for_operators();
    let recent = decider.recent.json();
    let give_backs = decider.give_backs();
    let now_s = unix_s().unwrap_or_default();
    json!({
        "service": {
            "version": env!("CARGO_PKG_VERSION"),
            "profile": decider.profile.name(),
            "config_hash": state.config_hash.as_ref(),
            "started_s": state.started_s,
            "now_s": now_s,
            "uptime_s": now_s.saturating_sub(state.started_s),
            "ready": ready
        },
        "dependencies": dependencies,
        "hour": recent.get("hour"),
        "scopes": recent.get("scopes"),
        "bypasses": recent.get("bypasses"),
        "rules": SHIPPED_RULES.map(|(name, _)| name),
        "gates": state.gates.report(),
        "backlogs": {
            "give_backs": {
                "limiter": give_backs.limiter.len(),
                "metering": give_backs.metering.len(),
                "voids": give_backs.voids.len()
            },
            "bills": decider.bills().len(),
            "unmetered": decider.unmetered().len()
        },
        "leases": decider.leases.json()
    })
}
