//! The host's metrics: by name, as Envoy keeps them, without the host's own prefix.

/// One metric.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Metric {
    Counter(u64),
    /// `None` until it is set.
    Gauge(Option<u64>),
    Histogram(Vec<u64>),
}

/// All of them; an id is an index, from 1.
#[derive(Debug, Clone, Default)]
pub(crate) struct Metrics(Vec<(String, Metric)>);

impl Metrics {
    /// The id of a metric of this kind and name, new or not; `None` if there is no such kind.
    pub(crate) fn define(&mut self, kind: u32, name: String) -> Option<u32> {
        let metric = match kind {
            0 => Metric::Counter(0),
            1 => Metric::Gauge(None),
            2 => Metric::Histogram(Vec::new()),
            _ => return None,
        };
        let at = match self.0.iter().position(|(of, _)| *of == name) {
            Some(at) => at,
            None => {
                self.0.push((name, metric));
                self.0.len() - 1
            }
        };
        u32::try_from(at + 1).ok()
    }

    fn get(&mut self, id: u32) -> Option<&mut Metric> {
        let at = usize::try_from(id).ok()?.checked_sub(1)?;
        self.0.get_mut(at).map(|(_, metric)| metric)
    }

    /// Adds; false if the metric cannot be added to.
    pub(crate) fn increment(&mut self, id: u32, by: i64) -> bool {
        match self.get(id) {
            Some(Metric::Counter(value)) if by > 0 => {
                *value = value.saturating_add_signed(by);
                true
            }
            Some(Metric::Gauge(value)) => {
                *value = Some(value.unwrap_or_default().saturating_add_signed(by));
                true
            }
            _ => false,
        }
    }

    /// Sets a gauge or adds a sample; false if the metric is neither.
    pub(crate) fn record(&mut self, id: u32, value: u64) -> bool {
        match self.get(id) {
            Some(Metric::Gauge(gauge)) => *gauge = Some(value),
            Some(Metric::Histogram(samples)) => samples.push(value),
            _ => return false,
        }
        true
    }

    fn find(&self, name: &str) -> Option<&Metric> {
        self.0.iter().find(|(of, _)| of == name).map(|(_, metric)| metric)
    }

    pub(crate) fn counter(&self, name: &str) -> u64 {
        match self.find(name) {
            Some(Metric::Counter(value)) => *value,
            _ => 0,
        }
    }

    pub(crate) fn gauge(&self, name: &str) -> Option<u64> {
        match self.find(name) {
            Some(Metric::Gauge(value)) => *value,
            _ => None,
        }
    }

    pub(crate) fn samples(&self, name: &str) -> &[u64] {
        match self.find(name) {
            Some(Metric::Histogram(samples)) => samples,
            _ => &[],
        }
    }

    pub(crate) fn forget_samples(&mut self) {
        for (_, metric) in &mut self.0 {
            if let Metric::Histogram(samples) = metric {
                samples.clear();
            }
        }
    }

    pub(crate) fn counters(&self) -> impl Iterator<Item = (&str, u64)> {
        self.0.iter().filter_map(|(name, metric)| match metric {
            Metric::Counter(value) => Some((name.as_str(), *value)),
            _ => None,
        })
    }
}
