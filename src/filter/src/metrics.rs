//! The filter's metrics: defined once per configuration; a host without metrics makes them no-ops.

use hashbrown::HashMap;
use portcullis_decision::metric::{BREAKER_OPEN_GAUGE, CALLOUT_MS_HISTOGRAM, Counter, enforcing_gauge};

use crate::host::{self, Kind};

/// Ids of what the host has defined.
#[derive(Debug)]
pub(crate) struct Metrics {
    counters: HashMap<Counter, u32>,
    enforcing: Option<u32>,
    breaker_open: Option<u32>,
    callout_ms: Option<u32>,
}

impl Metrics {
    /// Defines everything.
    pub(crate) fn define(rules: &str) -> Self {
        let counter = |counter: Counter| Some((counter, host::define_metric(Kind::Counter, &counter.name()).ok()?));
        Self {
            counters: Counter::all().into_iter().filter_map(counter).collect(),
            enforcing: host::define_metric(Kind::Gauge, &enforcing_gauge(rules)).ok(),
            breaker_open: host::define_metric(Kind::Gauge, BREAKER_OPEN_GAUGE).ok(),
            callout_ms: host::define_metric(Kind::Histogram, CALLOUT_MS_HISTOGRAM).ok(),
        }
    }

    pub(crate) fn count(&self, counter: Counter, by: u64) {
        if let Some(id) = self.counters.get(&counter).filter(|_| by > 0) {
            let _ = host::increment_metric(*id, by);
        }
    }

    pub(crate) fn enforcing(&self, enforcing: bool) {
        record(self.enforcing, u64::from(enforcing));
    }

    pub(crate) fn breaker_open(&self, open: bool) {
        record(self.breaker_open, u64::from(open));
    }

    pub(crate) fn callout_ms(&self, ms: u64) {
        record(self.callout_ms, ms);
    }
}

fn record(id: Option<u32>, value: u64) {
    if let Some(id) = id {
        let _ = host::record_metric(id, value);
    }
}
