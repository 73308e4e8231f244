//! The filter's metrics: a closed list, so that each is defined once and none is misspelt.

use alloc::string::String;
use alloc::vec::Vec;

use crate::class::FailureClass;

/// A counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Counter {
    /// Guarded requests that went on by their right or by a bypass.
    Admitted,
    /// Requests that were refused, by class.
    Rejected(FailureClass),
    /// Requests that went on although something was not checked, by class.
    Bypassed(FailureClass),
    /// Requests that shadow mode let through and enforcement would have refused, by class.
    ShadowRejected(FailureClass),
    /// Guarded requests in shadow mode.
    ShadowRequests,
    /// Decisions taken from a lease.
    LeaseHits,
    /// Calls to the decision service for a decision, retries included.
    Callouts,
    /// Cancels, releases and renewals that found no room in the outbox, or grew too old.
    OutboxDropped,
    /// Unmetered admissions that found no room in the outbox: runs that can't be billed.
    UnmeteredDropped,
    /// Admitted requests whose tokens stay charged as they were held, since no whole report of their usage came.
    UsageUnknown,
    /// Streams whose slot had lapsed while the limiter was cut off.
    SlotLost,
}

impl Counter {
    /// Every counter.
    pub fn all() -> Vec<Self> {
        let mut all = alloc::vec![
            Self::Admitted,
            Self::ShadowRequests,
            Self::LeaseHits,
            Self::Callouts,
            Self::OutboxDropped,
            Self::UnmeteredDropped,
            Self::UsageUnknown,
            Self::SlotLost
        ];
        for class in FailureClass::ALL {
            all.push(Self::Rejected(class));
            all.push(Self::ShadowRejected(class));
            if class.can_be_opened() {
                all.push(Self::Bypassed(class));
            }
        }
        all
    }

    /// Its name; hosts put their own prefix before it.
    pub fn name(self) -> String {
        match self {
            Self::Admitted => "portcullis_admitted".into(),
            Self::Rejected(class) => alloc::format!("portcullis_rejected_{}", class.name()),
            Self::Bypassed(class) => alloc::format!("portcullis_bypassed_{}", class.name()),
            Self::ShadowRejected(class) => alloc::format!("portcullis_shadow_rejected_{}", class.name()),
            Self::ShadowRequests => "portcullis_shadow_requests".into(),
            Self::LeaseHits => "portcullis_lease_hits".into(),
            Self::Callouts => "portcullis_callouts".into(),
            Self::OutboxDropped => "portcullis_outbox_dropped".into(),
            Self::UnmeteredDropped => "portcullis_unmetered_dropped".into(),
            Self::UsageUnknown => "portcullis_usage_unknown".into(),
            Self::SlotLost => "portcullis_slot_lost".into(),
        }
    }
}

/// Name of the gauge that says whether the rules of this name are enforced.
pub fn enforcing_gauge(rules: &str) -> String {
    alloc::format!("portcullis_enforcing_{rules}")
}

/// Name of the gauge that says whether the breaker is open.
pub const BREAKER_OPEN_GAUGE: &str = "portcullis_breaker_open";
/// Name of the histogram of callouts, in milliseconds.
pub const CALLOUT_MS_HISTOGRAM: &str = "portcullis_callout_ms";
