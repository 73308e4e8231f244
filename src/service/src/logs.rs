//! Log lines: JSON objects on stderr, one a line, with all keys at the top; at most one of a kind each second, which says
//! how many it stands for.
//!
//! A line never holds a store's address or its words, a credential or a header other than the ids of org, request and trace.

use std::env;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use portcullis_decision::class::FailureClass;
use portcullis_decision::config::Faults;
use portcullis_decision::log_line::{Level, LogLimiter, LogLine};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::{locked, millis_since};

/// How long a line that was held back waits at most beyond its second.
const FLUSH_INTERVAL: Duration = Duration::from_millis(200);

/// The environment variable that says which lines are written.
const VARIABLE: &str = "RUST_LOG";
/// The words for levels, from no line to every one.
const LEVELS: [(&str, LevelFilter); 6] = [
    ("off", LevelFilter::OFF),
    ("error", LevelFilter::ERROR),
    ("warn", LevelFilter::WARN),
    ("info", LevelFilter::INFO),
    ("debug", LevelFilter::DEBUG),
    ("trace", LevelFilter::TRACE),
];

/// Which lines are written. The usual reading of `RUST_LOG` takes a word that it does not know for the name of a module, and
/// lets all others be silent: here that is a fault, and what is not named stays at info.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Levels {
    rest: LevelFilter,
    named: Vec<(String, LevelFilter)>,
}

impl Levels {
    /// What the environment says.
    ///
    /// # Errors
    /// The entry of `RUST_LOG` that can't be meant.
    pub fn of_environment() -> Result<Self, Faults> {
        // Bytes that aren't UTF-8 are replaced rather than dropped, so that they are a fault as well.
        let text = env::var_os(VARIABLE).unwrap_or_default();
        Self::of(&text.to_string_lossy()).map_err(|message| {
            let mut faults = Faults::default();
            faults.add(VARIABLE, message);
            faults
        })
    }

    /// Reads a list of levels and of `TARGET=LEVEL`. Of two that say something of the same the last counts.
    fn of(text: &str) -> Result<Self, String> {
        let mut levels = Self {
            rest: LevelFilter::INFO,
            named: Vec::new(),
        };
        for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
            let wrong = || {
                let words = LEVELS.map(|(word, _)| word).join(", ");
                format!("must be a level ({words}) or TARGET=LEVEL, several with commas between, is {entry:?}")
            };
            match entry.split_once('=') {
                None => levels.rest = level(entry).ok_or_else(wrong)?,
                Some((target, word)) => {
                    let level = level(word).filter(|_| is_target(target)).ok_or_else(wrong)?;
                    levels.named.push((target.to_owned(), level));
                }
            }
        }
        Ok(levels)
    }
}

fn level(word: &str) -> Option<LevelFilter> {
    let known = LEVELS.into_iter().find(|(known, _)| word.eq_ignore_ascii_case(known));
    known.map(|(_, level)| level)
}

/// Whether this may be the path of a module: what is a level's name is none, since `trace=info` can't be meant.
fn is_target(text: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"_:-".contains(&byte);
    !text.is_empty() && text.bytes().all(fits) && level(text).is_none()
}

/// Sends log lines to stderr from here on.
pub fn start(levels: Levels) {
    let targets = Targets::new()
        .with_default(levels.rest)
        .with_targets(levels.named)
        // The pool of connections tells of dead ones in words and keys of its own; the operation that met one is told of anyway.
        .with_target("deadpool", LevelFilter::OFF);
    let lines = tracing_subscriber::fmt()
        .json()
        .flatten_event(true)
        .with_current_span(false)
        .with_span_list(false)
        .with_target(false)
        .with_writer(std::io::stderr)
        .with_max_level(LevelFilter::TRACE)
        .finish()
        .with(targets);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_read_and_what_is_not_named_stays_at_info() {
        let named = |rest, named: &[(&str, LevelFilter)]| Levels {
            rest,
            named: named
                .iter()
                .map(|(target, level)| ((*target).to_owned(), *level))
                .collect(),
        };
        for (text, expected) in [
            ("", named(LevelFilter::INFO, &[])),
            ("WARN", named(LevelFilter::WARN, &[])),
            (
                " debug , hyper=off,",
                named(LevelFilter::DEBUG, &[("hyper", LevelFilter::OFF)]),
            ),
            (
                "portcullis_service::logs=trace",
                named(LevelFilter::INFO, &[("portcullis_service::logs", LevelFilter::TRACE)]),
            ),
        ] {
            assert_eq!(Levels::of(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_cannot_be_meant_is_a_fault_that_names_it() {
        for (text, entry) in [
            ("warning", "warning"),
            ("info,verbose", "verbose"),
            ("trace=1", "trace=1"),
            ("trace=info", "trace=info"),
            ("hyper=loud", "hyper=loud"),
            ("bogus=x=y", "bogus=x=y"),
            ("=info", "=info"),
            ("hyper[span]=info", "hyper[span]=info"),
            ("\u{fffd}", "\u{fffd}"),
        ] {
            let fault = Levels::of(text).unwrap_err();
            assert!(fault.ends_with(&format!("is {entry:?}")), "{text}: {fault}");
            assert!(fault.contains("off, error, warn, info, debug, trace"), "{fault}");
        }
    }
}
