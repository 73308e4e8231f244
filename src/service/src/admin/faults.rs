//! `POST /admin/v1/faults`: lets dependencies fail for some seconds, for a drill.
//!
//! In production there is no such path, whatever the method. Left out on purpose: what a fault does, which is the switch's.

use axum::body::Bytes;
use axum::extract::State;
use axum::http::{Method, StatusCode};
use axum::response::Response;
use portcullis_decision::class::Dependency;
use serde_json::json;

use super::{AdminState, refused};
use crate::fault_switch::FaultOrder;
use crate::http::answered;

/// Carries out an order, and says what fails now and in how long it shows.
pub(super) async fn faults(State(state): State<AdminState>, method: Method, body: Bytes) -> Response {
    let Some(faults) = &state.faults else {
        return refused(StatusCode::NOT_FOUND, "no such path");
    };
    if method != Method::POST {
        return refused(StatusCode::METHOD_NOT_ALLOWED, "faults are ordered by POST");
    }
    let order: FaultOrder = match serde_json::from_slice(&body) {
        Ok(order) => order,
        Err(error) => return refused(StatusCode::BAD_REQUEST, &error.to_string()),
    };
    if let Err(fault) = order.check() {
        return refused(StatusCode::BAD_REQUEST, &fault);
    }
    faults.switch(&order);
    // Answers that are cached count until then, as they do in a real outage.
    let fails_late = order.dependencies.contains(&Dependency::Policy);
    let settles_in_ms = if fails_late { state.max_staleness_ms } else { 0 };
    let body = json!({"faults": faults.report(), "settles_in_ms": settles_in_ms});
    answered(StatusCode::OK, body.to_string())
}
