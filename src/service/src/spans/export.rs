//! Sends spans to a collector, by OTLP over HTTP, and never holds up a decision by it.
//!
//! OpenTelemetry's own batches do the work, in a thread of their own. Added here is what they do not tell: how many spans
//! wait, which is bounded, and how many were lost, which is counted; a collector that does not answer is said once, and once
//! more when it does. No line names its address or repeats its words.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::{Body, to_bytes};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry::{Context, KeyValue};
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{Protocol, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracerProvider, Span, SpanData, SpanExporter, SpanProcessor,
};
use portcullis_decision::config::{Faults, TracingConfig};
use portcullis_decision::log_line::{Level, LogLine};
use tokio::runtime::Handle;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::Spans;
use crate::logs::Journal;
use crate::metrics::Metrics;
use crate::roots;

/// The most spans that wait or are under way: some megabytes.
const MOST_WAITING: usize = 8_192;
/// The most spans of one request to the collector.
const BATCH: usize = 512;
/// How long a span waits for others at most.
const INTERVAL: Duration = Duration::from_secs(1);
/// How long one try may take.
const TRY_TIMEOUT: Duration = Duration::from_secs(3);
/// After this long a batch that was not taken is not tried again.
const BATCH_TIMEOUT: Duration = Duration::from_secs(10);
/// Largest answer of a collector that is read, in bytes.
const LARGEST_ANSWER: usize = 64 * 1024;

/// A collector that is not reached out for yet.
pub struct Collector {
    endpoint: String,
    sample_one_in: u64,
    client: Client<HttpsConnector<HttpConnector>, Body>,
}

impl Collector {
    /// The collector of a configuration, or `None` without one.
    ///
    /// # Errors
    /// An address by TLS on a system without any root certificate.
    pub fn open(config: Option<&TracingConfig>) -> Result<Option<Self>, Faults> {
        let Some(config) = config else { return Ok(None) };
        let tls = if config.endpoint.starts_with("https:") {
            roots::verifying(None)
        } else {
            roots::trusting_nobody()
        };
        let Some(tls) = tls else {
            let mut faults = Faults::default();
            faults.add(
                "tracing.endpoint",
                "is by TLS, and this system has no root certificates",
            );
            return Err(faults);
        };
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls)
            .https_or_http()
            .enable_http1();
        Ok(Some(Self {
            endpoint: config.endpoint.clone(),
            sample_one_in: config.sample_one_in,
            client: Client::builder(TokioExecutor::new()).build(connector.build()),
        }))
    }

    /// Spans that go there, and their end. To be called in the runtime that is to send them.
    ///
    /// # Errors
    /// What a standard variable of the environment asks for and cannot be done.
    pub fn start(self, metrics: Arc<Metrics>, journal: Arc<Journal>) -> Result<(Spans, Sending), String> {
        let courier = Courier {
            client: self.client,
            runtime: Handle::current(),
        };
        let exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_http()
            .with_http_client(courier)
            .with_endpoint(self.endpoint)
            .with_protocol(Protocol::HttpBinary)
            .with_timeout(BATCH_TIMEOUT)
            .build()
            .map_err(|error| format!("tracing: {error}"))?;
        let waiting = Arc::new(AtomicUsize::new(0));
        let exporter = Told {
            exporter,
            waiting: Arc::clone(&waiting),
            metrics: Arc::clone(&metrics),
            journal,
            is_down: AtomicBool::new(false),
            lost: AtomicU64::new(0),
        };
        let batches = BatchConfigBuilder::default()
            .with_max_queue_size(MOST_WAITING)
            .with_max_export_batch_size(BATCH)
            .with_scheduled_delay(INTERVAL)
            .build();
        let batches = BatchSpanProcessor::builder(exporter).with_batch_config(batches).build();
        let bounded = Bounded {
            batches,
            waiting,
            metrics,
        };
        #[expect(clippy::cast_precision_loss, reason = "at most a million")]
        let ratio = 1.0 / self.sample_one_in.max(1) as f64;
        let provider = SdkTracerProvider::builder()
            .with_resource(resource())
            .with_sampler(Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(ratio))))
            .with_span_processor(bounded)
            .build();
        Ok((Spans::of(provider.tracer("portcullis")), Sending(provider)))
    }
}

/// Who sends: the standard variables say more of it, and may give it another name.
fn resource() -> Resource {
    let named = Resource::builder()
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
        .build();
    let name = named.iter().find(|(key, _)| key.as_str() == "service.name");
    let is_given = name.is_some_and(|(_, name)| !name.as_str().starts_with("unknown_service"));
    let attributes = named
        .iter()
        .map(|(key, value)| KeyValue::new(key.clone(), value.clone()));
    let all = Resource::builder_empty().with_attributes(attributes.collect::<Vec<_>>());
    if is_given {
        all.build()
    } else {
        all.with_service_name("portcullis").build()
    }
}

/// The sending of spans, which has to be ended.
#[derive(Debug)]
pub struct Sending(SdkTracerProvider);

impl Sending {
    /// Sends what still waits, and gives up after `within`.
    pub async fn end(self, within: Duration) {
        // A second wait beside the library's own: it looks at its time only between two batches.
        let ended = spawn_blocking(move || self.0.shutdown_with_timeout(within));
        drop(timeout(within, ended).await);
    }
}

/// Carries requests in the service's own runtime, whoever awaits them.
#[derive(Clone)]
struct Courier {
    client: Client<HttpsConnector<HttpConnector>, Body>,
    runtime: Handle,
}

impl fmt::Debug for Courier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Courier")
    }
}

type Sent<'a> = Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'a>>;

impl HttpClient for Courier {
    fn send_bytes<'a, 'b>(&'a self, request: Request<Bytes>) -> Sent<'b>
    where
        'a: 'b,
        Self: 'b,
    {
        let client = self.client.clone();
        let work = async move {
            let response = client.request(request.map(Body::from)).await?;
            let (parts, body) = response.into_parts();
            let body = to_bytes(Body::new(body), LARGEST_ANSWER).await?;
            Ok::<_, HttpError>(Response::from_parts(parts, body))
        };
        // The clock, too, is the runtime's: whoever awaits this has none.
        let sent = self.runtime.spawn(async move { timeout(TRY_TIMEOUT, work).await });
        Box::pin(async move { sent.await?? })
    }
}

/// Lets a bounded number of spans wait, and counts those that find no room.
#[derive(Debug)]
struct Bounded {
    batches: BatchSpanProcessor,
    waiting: Arc<AtomicUsize>,
    metrics: Arc<Metrics>,
}

impl SpanProcessor for Bounded {
    fn on_start(&self, span: &mut Span, context: &Context) {
        self.batches.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        let room = |waiting: usize| (waiting < MOST_WAITING).then(|| waiting.saturating_add(1));
        match self.waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room) {
            Ok(_) => self.batches.on_end(span),
            Err(_) => self.metrics.spans("dropped", 1),
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.batches.force_flush()
    }

    fn shutdown_with_timeout(&self, within: Duration) -> OTelSdkResult {
        self.batches.shutdown_with_timeout(within)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.batches.set_resource(resource);
    }
}

/// Counts what was sent and what was lost, and says when that begins and ends.
#[derive(Debug)]
struct Told {
    exporter: opentelemetry_otlp::SpanExporter,
    waiting: Arc<AtomicUsize>,
    metrics: Arc<Metrics>,
    journal: Arc<Journal>,
    is_down: AtomicBool,
    /// Since it went down.
    lost: AtomicU64,
}

impl Told {
    fn tell(&self, is_sent: bool, spans: usize) {
        let spans = u64::try_from(spans).unwrap_or(u64::MAX);
        self.metrics.spans(if is_sent { "sent" } else { "lost" }, spans);
        let was_down = self.is_down.swap(!is_sent, Ordering::Relaxed);
        match (was_down, is_sent) {
            (false, false) => {
                self.lost.store(spans, Ordering::Relaxed);
                let message = "the collector of spans does not take them: they are lost and counted, decisions go on";
                self.journal
                    .write(None, LogLine::new(Level::Warn, "collector_unavailable", message));
            }
            (true, false) => {
                self.lost.fetch_add(spans, Ordering::Relaxed);
            }
            (true, true) => {
                let lost = self.lost.load(Ordering::Relaxed);
                let message = format!("the collector of spans takes them again; sending lost {lost} in between");
                self.journal
                    .write(None, LogLine::new(Level::Info, "collector_available", message));
            }
            (false, true) => {}
        }
    }
}

impl SpanExporter for Told {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        let sent = self.exporter.export(batch).await;
        self.waiting.fetch_sub(spans, Ordering::Relaxed);
        self.tell(sent.is_ok(), spans);
        sent
    }

    fn shutdown_with_timeout(&self, within: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(within)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

#[cfg(test)]
mod tests;
