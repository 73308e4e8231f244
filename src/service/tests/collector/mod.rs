//! A collector for tests: it takes spans by OTLP over HTTP as any collector does, keeps what it was sent, and can be made to
//! refuse or to say nothing.
//!
//! Left out on purpose: what is tested with it.
#![allow(dead_code, reason = "every test binary uses a part of it")]

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue, any_value};
use prost::Message as _;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

/// How long a test waits for spans: several times what they wait to be sent together.
const PATIENCE: Duration = Duration::from_secs(20);

/// One span, as it was sent.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) name: String,
    pub(crate) trace_id: String,
    pub(crate) span_id: String,
    /// Empty if it begins its trace.
    pub(crate) parent: String,
    pub(crate) state: String,
    /// OpenTelemetry's figure: 1 internal, 2 server, 3 client.
    pub(crate) kind: i32,
    pub(crate) failed: bool,
    pub(crate) status_message: String,
    pub(crate) attributes: BTreeMap<String, Value>,
    /// What it says of who sent it.
    pub(crate) resource: BTreeMap<String, Value>,
    pub(crate) took: Duration,
}

/// What it does with what it is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Behaviour {
    Takes,
    Refuses(u16),
    SaysNothing,
}

struct Shared {
    behaviour: Mutex<Behaviour>,
    seen: Mutex<Vec<Seen>>,
}

/// A running collector; it stops when dropped.
pub(crate) struct Collector {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
    serving: JoinHandle<()>,
}

impl Collector {
    pub(crate) async fn start() -> Self {
        Self::start_on(0).await
    }

    pub(crate) async fn start_on(port: u16) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))
            .await
            .expect("a free port");
        let address = listener.local_addr().expect("an address");
        let shared = Arc::new(Shared {
            behaviour: Mutex::new(Behaviour::Takes),
            seen: Mutex::default(),
        });
        let routes = Router::new()
            .route("/v1/traces", post(take))
            .with_state(Arc::clone(&shared));
        let serving = tokio::spawn(async move {
            axum::serve(listener, routes).await.expect("it serves");
        });
        Self {
            address,
            shared,
            serving,
        }
    }

    /// Its address, as a configuration names it.
    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn behave(&self, behaviour: Behaviour) {
        *self.shared.behaviour.lock().unwrap() = behaviour;
    }

    /// Every span so far.
    pub(crate) fn spans(&self) -> Vec<Seen> {
        self.shared.seen.lock().unwrap().clone()
    }

    /// Waits for a span.
    pub(crate) async fn span(&self, what: &str, fits: impl Fn(&Seen) -> bool) -> Seen {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(span) = self.spans().into_iter().find(&fits) {
                return span;
            }
            assert!(Instant::now() < end, "no span: {what}; there are {:#?}", self.spans());
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits for the span `decide` of a trace, and gives it with what is below it.
    pub(crate) async fn decision(&self, trace_id: &str) -> (Seen, Vec<Seen>) {
        let is_it = |span: &Seen| span.name == "decide" && span.trace_id == trace_id;
        let decide = self.span(&format!("decide in {trace_id}"), is_it).await;
        // A child ends before its parent, and is sent with it or before.
        let below = |span: &Seen| span.trace_id == trace_id && span.parent == decide.span_id;
        let children = self.spans().into_iter().filter(below).collect();
        (decide, children)
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn take(State(shared): State<Arc<Shared>>, headers: HeaderMap, body: Bytes) -> Response {
    assert_eq!(headers[header::CONTENT_TYPE], "application/x-protobuf");
    let behaviour = *shared.behaviour.lock().unwrap();
    match behaviour {
        Behaviour::Takes => {}
        Behaviour::Refuses(status) => return StatusCode::from_u16(status).expect("a status").into_response(),
        Behaviour::SaysNothing => std::future::pending().await,
    }
    let request = ExportTraceServiceRequest::decode(body).expect("OTLP");
    for of_resource in request.resource_spans {
        let resource = attributes(of_resource.resource.unwrap_or_default().attributes);
        let spans = of_resource.scope_spans.into_iter().flat_map(|of_scope| of_scope.spans);
        let spans = spans.map(|span| {
            let status = span.status.unwrap_or_default();
            Seen {
                name: span.name,
                trace_id: hex(&span.trace_id),
                span_id: hex(&span.span_id),
                parent: hex(&span.parent_span_id),
                state: span.trace_state,
                kind: span.kind,
                failed: status.code == 2,
                status_message: status.message,
                attributes: attributes(span.attributes),
                resource: resource.clone(),
                took: Duration::from_nanos(span.end_time_unix_nano.saturating_sub(span.start_time_unix_nano)),
            }
        });
        shared.seen.lock().unwrap().extend(spans);
    }
    let answer = ExportTraceServiceResponse::default().encode_to_vec();
    ([(header::CONTENT_TYPE, "application/x-protobuf")], answer).into_response()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn attributes(all: Vec<KeyValue>) -> BTreeMap<String, Value> {
    all.into_iter().map(|pair| (pair.key, value(pair.value))).collect()
}

fn value(of: Option<AnyValue>) -> Value {
    match of.and_then(|of| of.value) {
        Some(any_value::Value::StringValue(text)) => json!(text),
        Some(any_value::Value::BoolValue(is)) => json!(is),
        Some(any_value::Value::IntValue(number)) => json!(number),
        Some(any_value::Value::DoubleValue(number)) => json!(number),
        Some(any_value::Value::ArrayValue(list)) => list.values.into_iter().map(|of| value(Some(of))).collect(),
        _ => Value::Null,
    }
}
