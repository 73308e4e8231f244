//! The routes: JSON in, JSON out. What an answer means is decided elsewhere; a status other than 200 on `/v1/decide` is no
//! verdict, and the filter treats it as `decision_unavailable`.
//!
//! With `tokens_file` whoever asks for a decision, settles or lets Envoy check has to bring a token; who looks how the service
//! is (`/live`, `/ready`, `/metrics`) does not. A body has to be there within its time and its size.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, FromRequest, FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{Extensions, HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use portcullis_decision::class::Dependency;
use portcullis_decision::config::Profile;
use portcullis_decision::evaluation::request_fault;
use portcullis_decision::ext_authz::CHECK_PATH;
use portcullis_decision::log_line::{Level, LogLine};
use portcullis_decision::trace::TraceContext;
use portcullis_decision::wire::{DECIDE_PATH, DecideRequest, SETTLE_PATH, SettleRequest};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

use crate::canary::Canary;
use crate::connections::Peer;
use crate::decide::Decider;
use crate::ext_authz::Checks;
use crate::fault_switch::FaultSwitch;
use crate::gates::Gates;
use crate::metrics::{CONTENT_TYPE, Metrics};
use crate::outliving::Outliving;
use crate::readiness::Readiness;
use crate::spans::Arrival;
use crate::tokens::Tokens;

/// Largest body of a decision, in bytes: an envelope's ids and limits take a few kilobytes.
const LARGEST_DECIDE: usize = 64 * 1024;
/// Largest settle batch, in bytes.
const LARGEST_SETTLE: usize = 1024 * 1024;

/// What the routes share.
pub struct App {
    /// Decides.
    pub decider: Arc<Decider>,
    /// Knows the dependencies.
    pub readiness: Arc<Readiness>,
    /// Knows what becomes of each gate.
    pub gates: Arc<Gates>,
    /// Tries whether a limit holds; `None` where that is not configured.
    pub canary: Option<Arc<Canary>>,
    /// What an operator lets fail; `None` in production.
    pub faults: Option<Arc<FaultSwitch>>,
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// Answers Envoy's `ext_authz`; `None` where that is not configured.
    pub checks: Option<Arc<Checks>>,
    /// Who may ask; `None`: everybody.
    pub tokens: Option<Arc<Tokens>>,
    /// How long a body may take.
    pub body_timeout: Duration,
    /// Held by every decision under way, so that a shutdown can wait for those whose connection has gone.
    pub under_way: mpsc::Sender<()>,
}

/// The routes of the service.
pub fn router(app: App) -> Router {
    // Shared as one: each request takes it several times.
    let app = Arc::new(app);
    Router::new()
        .route(DECIDE_PATH, post(decide).layer(DefaultBodyLimit::max(LARGEST_DECIDE)))
        .route(SETTLE_PATH, post(settle).layer(DefaultBodyLimit::max(LARGEST_SETTLE)))
        .route("/live", get(live))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics))
        .fallback(check_or_nothing)
        .with_state(app)
}

/// When the request's head arrived: the start of its budget; and the trace that it names. The first argument of a handler,
/// so that reading the body counts.
struct Arrived(Arrival);

impl<S: Sync> FromRequestParts<S> for Arrived {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        let at = Instant::now();
        let headers = parts.headers.iter();
        let trace = TraceContext::of(headers.map(|(name, value)| (name.as_str().as_bytes(), value.as_bytes())));
        Ok(Self(Arrival { at, trace }))
    }
}

/// Proof that a request may ask: it brought a token, or none is needed. Looked for before its body is read.
struct LetIn;

impl FromRequestParts<Arc<App>> for LetIn {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, Refusal> {
        app.let_in(&parts.headers, &parts.extensions)
    }
}

/// A whole body, if it came within its time and its size, `MOST` bytes; and whose it is.
struct Whole<const MOST: usize>(Result<Bytes, Refusal>, Option<Peer>);

impl<const MOST: usize> FromRequest<Arc<App>> for Whole<MOST> {
    type Rejection = Infallible;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, Infallible> {
        let peer = request.extensions().get::<Peer>().copied();
        let read = timeout(app.body_timeout, Bytes::from_request(request, app)).await;
        let body = match read {
            Ok(body) => body.map_err(|rejection| {
                let status = rejection.status();
                let reason = if status == StatusCode::PAYLOAD_TOO_LARGE {
                    app.metrics.turned_away("body_too_large");
                    format!("the body is longer than {MOST} bytes")
                } else {
                    "the body broke off".to_owned()
                };
                Refusal(status, reason)
            }),
            Err(_) => {
                app.metrics.turned_away("body_timeout");
                let within_ms = app.body_timeout.as_millis();
                let reason = format!("the body took longer than http.body_timeout_ms, {within_ms} ms");
                Err(Refusal(StatusCode::REQUEST_TIMEOUT, reason))
            }
        };
        Ok(Self(body, peer))
    }
}

/// Whose request it is, for a line.
fn from(peer: Option<&Peer>) -> String {
    peer.map_or_else(String::new, |Peer(peer)| format!(" from {peer}"))
}

/// An answer in JSON.
pub(crate) fn answered(status: StatusCode, body: String) -> Response {
    let json = HeaderValue::from_static("application/json");
    (status, [(header::CONTENT_TYPE, json)], body).into_response()
}

/// No answer, and why; `{"error": reason}`.
struct Refusal(StatusCode, String);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut answer = answered(self.0, json!({"error": self.1}).to_string());
        if self.0 == StatusCode::UNAUTHORIZED {
            let headers = answer.headers_mut();
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        answer
    }
}

/// The request in a body, or what is wrong with it.
fn parsed<T: for<'de> serde::Deserialize<'de>>(body: Result<Bytes, Refusal>) -> Result<T, Refusal> {
    portcullis_decision::json::read(&body?).map_err(|error| Refusal(StatusCode::BAD_REQUEST, error.to_string()))
}

fn json_answer(answer: &impl serde::Serialize) -> Result<Response, Refusal> {
    let text = serde_json::to_string(answer).map_err(|_| {
        Refusal(
            StatusCode::SERVICE_UNAVAILABLE,
            "the answer cannot be written".to_owned(),
        )
    })?;
    Ok(answered(StatusCode::OK, text))
}

impl App {
    /// The request in a body. What can't be read is logged too: to the filter it is an outage, and only the log says why.
    fn read<T: for<'de> serde::Deserialize<'de>, const MOST: usize>(
        &self,
        what: &str,
        Whole(body, peer): Whole<MOST>,
    ) -> Result<T, Refusal> {
        parsed(body).inspect_err(|Refusal(_, reason)| {
            let what = format!("{what}{}", from(peer.as_ref()));
            self.decider.tell_of_a_refusal(&what, reason);
        })
    }

    /// Refuses everything while an operator lets the service itself fail.
    fn is_let_be(&self) -> Result<(), Refusal> {
        let fails = |faults: &Arc<FaultSwitch>| faults.fails(Dependency::Decision);
        if self.faults.as_ref().is_some_and(fails) {
            let reason = "an operator lets this service fail, for a drill";
            return Err(Refusal(StatusCode::SERVICE_UNAVAILABLE, reason.to_owned()));
        }
        Ok(())
    }

    /// Turns away whoever needs a token and has none. To the filter that is an outage, and only the log says why.
    fn let_in(&self, headers: &HeaderMap, extensions: &Extensions) -> Result<LetIn, Refusal> {
        if self.tokens.as_ref().is_none_or(|tokens| tokens.admit(headers)) {
            return Ok(LetIn);
        }
        self.metrics.turned_away("unauthorized");
        let peer = from(extensions.get::<Peer>());
        let message = format!("a request{peer} was refused: it brought no token of tokens_file");
        self.decider
            .journal
            .write(None, LogLine::new(Level::Warn, "unauthorized", message));
        Err(Refusal(
            StatusCode::UNAUTHORIZED,
            "a token of tokens_file is needed".to_owned(),
        ))
    }

    /// Refuses a filter of another profile: neither side can know which one is configured wrongly.
    fn same_profile(&self, theirs: Profile, what: &str) -> Result<(), Refusal> {
        let ours = self.decider.profile;
        if theirs == ours {
            return Ok(());
        }
        self.decider.tell_of_another_profile(theirs.name(), what);
        let reason = format!("the filter's profile is {theirs}, the service's is {ours}");
        Err(Refusal(StatusCode::SERVICE_UNAVAILABLE, reason))
    }
}

async fn decide(
    State(app): State<Arc<App>>,
    Arrived(arrival): Arrived,
    _: LetIn,
    body: Whole<LARGEST_DECIDE>,
) -> Result<Response, Refusal> {
    app.is_let_be()?;
    let request: DecideRequest = app.read("a decision", body)?;
    app.same_profile(request.profile, "a decision")?;
    if let Some(fault) = request_fault(&request) {
        app.decider.tell_of_a_refusal("a decision", fault);
        return Err(Refusal(StatusCode::BAD_REQUEST, fault.to_owned()));
    }
    // When the connection goes away this handler is dropped, and the decision goes on to its end, so that what it charges is
    // either answered for or given back.
    let decision = Outliving::new(async move {
        // With it the decision holds what a shutdown waits for.
        app.decider.decide(&request, arrival).await
    });
    json_answer(&decision.await)
}

async fn settle(State(app): State<Arc<App>>, _: LetIn, body: Whole<LARGEST_SETTLE>) -> Result<Response, Refusal> {
    app.is_let_be()?;
    let request: SettleRequest = app.read("a settle batch", body)?;
    app.same_profile(request.profile, "a settle batch")?;
    match app.decider.settle(request).await {
        Ok(answer) => json_answer(&answer),
        Err(fault) => {
            let error = format!("the limiter failed: {fault}");
            let body = json!({"error": error, "put_down": true});
            Ok(answered(StatusCode::SERVICE_UNAVAILABLE, body.to_string()))
        }
    }
}

/// Any method on any path below [`CHECK_PATH`], which the asked-about request's own path follows: nothing that a router
/// could match.
async fn check_or_nothing(
    State(app): State<Arc<App>>,
    Arrived(arrival): Arrived,
    request: Request,
) -> Result<Response, Refusal> {
    let is_check = |path: &str| path.strip_prefix(CHECK_PATH).is_some_and(|rest| rest.starts_with('/'));
    match app.checks.clone().filter(|_| is_check(request.uri().path())) {
        // The body is not looked at: Envoy sends none unless it is told to.
        Some(checks) => {
            app.let_in(request.headers(), request.extensions())?;
            app.is_let_be()?;
            let under_way = app.under_way.clone();
            Ok(checks.answer(&request.into_parts().0, arrival, under_way).await)
        }
        None => Err(Refusal(StatusCode::NOT_FOUND, "no such path".to_owned())),
    }
}

async fn live() -> Response {
    answered(StatusCode::OK, json!({"live": true}).to_string())
}

async fn ready(State(app): State<Arc<App>>) -> Response {
    let (ready, mut body): (bool, Value) = app.readiness.report();
    if let Some(body) = body.as_object_mut() {
        body.insert("gates".to_owned(), app.gates.report());
        if let Some(canary) = &app.canary {
            body.insert("canary".to_owned(), canary.report());
        }
        let faults = app.faults.as_ref().map(|faults| faults.report());
        if let Some(faults) = faults.filter(|faults| *faults != json!({})) {
            body.insert("faults".to_owned(), faults);
        }
    }
    let status = if ready {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    answered(status, body.to_string())
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    // Time alone changes what these say.
    app.gates.report();
    if let Some(canary) = &app.canary {
        canary.report();
    }
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], app.metrics.encode()).into_response()
}

#[cfg(test)]
mod tests;
