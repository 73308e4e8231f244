//! What is traced of a decision: a span `decide`, and one for each store that it asks.
//!
//! The parent is what the request's `traceparent` says, and so is whether the trace is recorded at all: who began it has
//! decided that. Of requests without one, one in so many begins a trace here. Without a collector nothing is made, at the
//! cost of a branch.
//!
//! **No attribute names a tenant.** Spans leave the installation's own logs for a store that others read, keep and index, so
//! what they say is which gate, which class, which rules; the log line of the same `trace_id` says who. For the same reason
//! no attribute holds a store's words or an address. Left out on purpose: sending, which is in [`export`].

pub mod export;

use std::future::Future;
use std::time::SystemTime;

use opentelemetry::trace::{
    Span as _, SpanContext, SpanId, SpanKind, Status, TraceContextExt as _, TraceFlags, TraceId, TraceState,
    Tracer as _,
};
use opentelemetry::{Array, Context, KeyValue, StringValue, Value};
use opentelemetry_sdk::trace::SdkTracer;
use portcullis_decision::class::{Dependency, FailureClass};
use portcullis_decision::config::Mode;
use portcullis_decision::policy::{Lookup, PolicyView};
use portcullis_decision::rules::Gate;
use portcullis_decision::trace::TraceContext;
use portcullis_decision::verdict::Verdict;
use portcullis_decision::wire::DecideRequest;
use tokio::time::Instant;

use crate::limiter::StoreFault;

/// When a question arrived, and the trace that it belongs to.
#[derive(Debug, Clone)]
pub struct Arrival {
    /// The start of its budget.
    pub at: Instant,
    /// Where it stands in its trace; `None` if it belongs to none.
    pub trace: Option<TraceContext>,
}

impl From<Instant> for Arrival {
    fn from(at: Instant) -> Self {
        Self { at, trace: None }
    }
}

/// Makes spans, if they go anywhere.
#[derive(Debug, Clone, Default)]
pub struct Spans(Option<SdkTracer>);

impl Spans {
    /// Spans of this tracer.
    pub const fn of(tracer: SdkTracer) -> Self {
        Self(Some(tracer))
    }

    /// Begins to trace what arrived.
    pub fn begin(&self, arrival: &Arrival, request: &DecideRequest) -> Traced {
        let theirs = arrival.trace.as_ref().map(|trace| trace.trace_id().to_owned());
        let Some(tracer) = &self.0 else {
            return Traced {
                trace_id: theirs,
                made: None,
            };
        };
        let parent = arrival
            .trace
            .as_ref()
            .and_then(remote)
            .map_or_else(Context::new, |parent| Context::new().with_remote_span_context(parent));
        let began = SystemTime::now().checked_sub(arrival.at.elapsed());
        let mut builder = tracer.span_builder("decide").with_kind(SpanKind::Server);
        builder.start_time = began;
        let mut span = tracer.build_with_context(builder, &parent);
        if !span.is_recording() {
            return Traced {
                trace_id: theirs,
                made: None,
            };
        }
        span.set_attribute(KeyValue::new("portcullis.rules", request.rules.clone()));
        span.set_attribute(KeyValue::new("portcullis.mode", mode(request.mode)));
        if request.retry {
            span.set_attribute(KeyValue::new("portcullis.retry", true));
        }
        if request.lease.is_some_and(|ask| ask.ahead) {
            span.set_attribute(KeyValue::new("portcullis.ahead", true));
        }
        Traced {
            trace_id: Some(span.span_context().trace_id().to_string()),
            made: Some((tracer.clone(), Context::new().with_span(span))),
        }
    }
}

const fn mode(mode: Mode) -> &'static str {
    match mode {
        Mode::Enforce => "enforce",
        Mode::Shadow => "shadow",
    }
}

/// The caller's span. A `tracestate` that cannot be read is none.
fn remote(trace: &TraceContext) -> Option<SpanContext> {
    let state = trace.state().and_then(|state| state.parse::<TraceState>().ok());
    Some(SpanContext::new(
        TraceId::from_hex(trace.trace_id()).ok()?,
        SpanId::from_hex(trace.span_id()).ok()?,
        TraceFlags::NOT_SAMPLED.with_sampled(trace.is_sampled()),
        true,
        state.unwrap_or_default(),
    ))
}

/// What is traced of one decision.
#[derive(Debug, Default)]
pub struct Traced {
    trace_id: Option<String>,
    made: Option<(SdkTracer, Context)>,
}

/// What an answer of a store says about its span: the kind of its failure, if it is one.
pub(crate) trait Asked {
    /// The word for the failure.
    fn failure(&self) -> Option<&'static str>;
}

impl<T> Asked for Result<T, StoreFault> {
    fn failure(&self) -> Option<&'static str> {
        self.as_ref().err().map(|fault| fault.kind())
    }
}

impl Asked for PolicyView {
    fn failure(&self) -> Option<&'static str> {
        let failed = matches!(self.org, Lookup::Unavailable)
            || matches!(self.provider, Lookup::Unavailable)
            || matches!(self.price, Lookup::Unavailable);
        failed.then_some("unavailable")
    }
}

impl Traced {
    /// The trace's id, for the lines of the decision.
    pub(crate) fn trace_id(&self) -> Option<&str> {
        self.trace_id.as_deref()
    }

    /// Awaits a store's answer, under a span of this name.
    pub(crate) async fn asked<T: Asked>(
        &self,
        name: &'static str,
        of: Dependency,
        answer: impl Future<Output = T>,
    ) -> T {
        let Some((tracer, decide)) = &self.made else {
            return answer.await;
        };
        let mut span = tracer.build_with_context(tracer.span_builder(name).with_kind(SpanKind::Client), decide);
        span.set_attribute(KeyValue::new("portcullis.dependency", of.name()));
        let answer = answer.await;
        if let Some(failure) = answer.failure() {
            span.set_attribute(KeyValue::new("error.type", failure));
            span.set_status(Status::error(""));
        }
        answer
    }

    /// Ends the decision's span with what came out.
    pub(crate) fn end(&self, verdict: &Verdict) {
        let Some((_, decide)) = &self.made else { return };
        let span = decide.span();
        let word = match verdict {
            Verdict::Admit(admission) => {
                let classes = admission.first_of_each_class();
                let bypassed: Vec<StringValue> = classes.map(|bypass| bypass.class.name().into()).collect();
                if !bypassed.is_empty() {
                    let bypassed = Value::Array(Array::String(bypassed));
                    span.set_attribute(KeyValue::new("portcullis.bypassed", bypassed));
                }
                if admission.unenforced {
                    span.set_attribute(KeyValue::new("portcullis.unenforced", true));
                }
                "admit"
            }
            Verdict::Deny(denial) => {
                span.set_attribute(KeyValue::new("portcullis.code", denial.code.name()));
                "deny"
            }
            Verdict::Unavailable(_) => {
                // A denial is an answer; this is none.
                span.set_status(Status::error(""));
                "unavailable"
            }
        };
        span.set_attribute(KeyValue::new("portcullis.verdict", word));
        if let Some(class) = verdict.class() {
            span.set_attribute(KeyValue::new("portcullis.class", FailureClass::name(class)));
        }
        let gate = match verdict {
            Verdict::Admit(_) => None,
            Verdict::Deny(denial) => denial.gate,
            Verdict::Unavailable(unavailable) => unavailable.gate,
        };
        if let Some(gate) = gate {
            span.set_attribute(KeyValue::new("portcullis.gate", Gate::name(gate)));
        }
        span.end();
    }
}
