//! Log lines: JSON objects on stderr, one a line, with all keys at the top; at most one of a kind each second, which says
//! how many it stands for.
//!
//! A line never holds an address, a credential, a store's own words or a header other than the ids of org, request and trace.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use portcullis_decision::class::FailureClass;
use portcullis_decision::log_line::{Level, LogLimiter, LogLine};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::{locked, millis_since};

/// How long a line that was held back waits at most beyond its second.
const FLUSH_INTERVAL: Duration = Duration::from_millis(200);

/// Sends log lines to stderr from here on. `RUST_LOG` sets the level; what can't be read there is left out.
pub fn start() {
    let filter = EnvFilter::builder()
        .with_default_directive(LevelFilter::INFO.into())
        .from_env_lossy();
    // The pool of connections tells of dead ones in words and keys of its own; the operation that met one is told of anyway.
    let filter = match "deadpool=off".parse() {
        Ok(directive) => filter.add_directive(directive),
        Err(_) => filter,
    };
    let lines = tracing_subscriber::fmt()
        .json()
        .flatten_event(true)
        .with_current_span(false)
        .with_span_list(false)
        .with_target(false)
        .with_writer(std::io::stderr)
        .with_env_filter(filter);
    // Fails only if another subscriber is there, as in a test with several services.
    drop(lines.try_init());
}

/// The lines of the service's own events, limited by kind.
#[derive(Debug)]
pub struct Journal {
    epoch: Instant,
    /// One limiter for each kind of fault, since a timeout must not hide a refusal.
    limiters: Mutex<Vec<(Option<&'static str>, LogLimiter)>>,
}

impl Default for Journal {
    fn default() -> Self {
        Self {
            epoch: Instant::now(),
            limiters: Mutex::new(Vec::new()),
        }
    }
}

impl Journal {
    /// Writes a line, or holds it back until its second has passed.
    pub fn write(&self, kind: Option<&'static str>, line: LogLine) {
        let now_ms = millis_since(self.epoch);
        let line = {
            let mut limiters = locked(&self.limiters);
            match limiters.iter_mut().find(|(of, _)| *of == kind) {
                Some((_, limiter)) => limiter.admit(line, now_ms),
                None => {
                    let mut limiter = LogLimiter::default();
                    let line = limiter.admit(line, now_ms);
                    limiters.push((kind, limiter));
                    line
                }
            }
        };
        if let Some(line) = line {
            emit(kind, &line);
        }
    }

    /// Writes the lines whose second has passed.
    pub fn flush_due(&self) {
        let now_ms = millis_since(self.epoch);
        self.flush(|limiter| limiter.due(now_ms));
    }

    /// Writes all lines that were held back: the process ends.
    pub fn flush_all(&self) {
        self.flush(LogLimiter::drain);
    }

    fn flush(&self, mut take: impl FnMut(&mut LogLimiter) -> Vec<LogLine>) {
        let lines: Vec<_> = locked(&self.limiters)
            .iter_mut()
            .flat_map(|(kind, limiter)| take(limiter).into_iter().map(|line| (*kind, line)).collect::<Vec<_>>())
            .collect();
        lines.iter().for_each(|(kind, line)| emit(*kind, line));
    }

    /// Flushes what is due, for ever.
    pub async fn run(self: Arc<Self>) {
        let mut ticks = interval(FLUSH_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.flush_due();
        }
    }
}

/// The dependency that a class is about.
const fn dependency(class: FailureClass) -> Option<&'static str> {
    match class {
        FailureClass::LimiterUnavailable => Some("limiter"),
        FailureClass::PolicyUnavailable => Some("policy"),
        FailureClass::MeteringUnavailable => Some("metering"),
        FailureClass::DecisionUnavailable => Some("decision"),
        _ => None,
    }
}

fn emit(kind: Option<&'static str>, line: &LogLine) {
    macro_rules! at {
        ($level:ident) => {
            tracing::$level!(
                event = line.event,
                class = line.class.map(FailureClass::name),
                gate = line.gate.as_deref(),
                action = line.action,
                code = line.code,
                org = line.org.as_deref(),
                request_id = line.request_id.as_deref(),
                trace_id = line.trace_id.as_deref(),
                rules = line.rules.as_deref(),
                dependency = line.class.and_then(dependency),
                kind = kind,
                count = (line.count > 1).then_some(line.count),
                "{}",
                line.message
            )
        };
    }
    match line.level {
        Level::Info => at!(info),
        Level::Warn => at!(warn),
        Level::Error => at!(error),
    }
}
