//! The service's metrics: a closed list, each defined once, in the text format of OpenMetrics and Prometheus.

use std::sync::atomic::AtomicU64;

use portcullis_decision::class::{Dependency, FailureClass};
use portcullis_decision::rules::Gate;
use portcullis_decision::verdict::{Admission, Bypass, Verdict};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::gates::GateState;

/// Media type of [`Metrics::encode`].
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Upper bounds of the histograms' buckets, in seconds: from memory's microseconds to the longest sensible budget.
const SECONDS: [f64; 13] = [
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0,
];

type Labels<const N: usize> = [(&'static str, &'static str); N];

/// All metrics of one service.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    verdicts: Family<Labels<2>, Counter>,
    dependency_errors: Family<Labels<2>, Counter>,
    dependency_up: Family<Labels<1>, Gauge>,
    bypassed: Family<Labels<2>, Counter>,
    /// Whether a policy store is configured, and answers.
    pub policy_enforced: Gauge,
    /// Whether there is a limiter, and it answers.
    pub limits_enforced: Gauge,
    /// From a request's arrival to its verdict.
    pub decide_seconds: Histogram,
    /// Operations of the limiter.
    pub limiter_seconds: Histogram,
    /// Questions to the policy store; answers from the cache are none.
    pub policy_seconds: Histogram,
    policy_lookups: Family<Labels<1>, Counter>,
    /// Renewals whose slot had lapsed.
    pub slot_lost: Counter,
    /// Admissions without any limiter.
    pub unenforced: Counter,
    /// Give-backs that found no room or grew too old; what they stood for lapses in the store.
    pub give_back_dropped: Counter,
    leases: Family<Labels<1>, Counter>,
    lease_admissions: Counter,
    /// Admissions of leases that came back.
    pub lease_returned: Counter,
    /// Operations of the metering store.
    pub metering_seconds: Histogram,
    /// Admissions whose run was not recorded, by a service or told by a filter.
    pub unmetered: Counter,
    /// Those of them that found no room in the journal.
    pub unmetered_dropped: Counter,
    /// Those of them that no store has taken yet.
    pub unmetered_waiting: Gauge,
    /// Holds that were replaced by what was used.
    pub settled: Counter,
    /// Bills whose cost stands in no month yet.
    pub bills_waiting: Gauge,
    /// Bills that found no room.
    pub bills_dropped: Counter,
    /// Bills of reserved tokens, since the provider did not say what was used.
    pub bills_of_holds: Counter,
    /// Bills of models that have no price.
    pub unpriced: Counter,
    turned_away: Family<Labels<1>, Counter>,
    spans: Family<Labels<1>, Counter>,
    checks: Family<Vec<(&'static str, String)>, Counter>,
    enforcing: Family<Vec<(&'static str, String)>, Gauge>,
    gate_state: Family<Labels<2>, Gauge>,
    fault: Family<Labels<1>, Gauge>,
    canary: Family<[(&'static str, &'static str); 0], Gauge>,
    canary_age: Family<[(&'static str, &'static str); 0], Gauge>,
    build_info: Family<Vec<(&'static str, String)>, Gauge<i64, std::sync::atomic::AtomicI64>>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("portcullis"),
            verdicts: Family::default(),
            dependency_errors: Family::default(),
            dependency_up: Family::default(),
            bypassed: Family::default(),
            policy_enforced: Gauge::default(),
            limits_enforced: Gauge::default(),
            decide_seconds: Histogram::new(SECONDS),
            limiter_seconds: Histogram::new(SECONDS),
            policy_seconds: Histogram::new(SECONDS),
            policy_lookups: Family::default(),
            slot_lost: Counter::<u64, AtomicU64>::default(),
            unenforced: Counter::default(),
            give_back_dropped: Counter::default(),
            leases: Family::default(),
            lease_admissions: Counter::default(),
            lease_returned: Counter::default(),
            metering_seconds: Histogram::new(SECONDS),
            unmetered: Counter::default(),
            unmetered_dropped: Counter::default(),
            unmetered_waiting: Gauge::default(),
            settled: Counter::default(),
            bills_waiting: Gauge::default(),
            bills_dropped: Counter::default(),
            bills_of_holds: Counter::default(),
            unpriced: Counter::default(),
            turned_away: Family::default(),
            spans: Family::default(),
            checks: Family::default(),
            enforcing: Family::default(),
            gate_state: Family::default(),
            fault: Family::default(),
            canary: Family::default(),
            canary_age: Family::default(),
            build_info: Family::default(),
        };
        metrics.register();
        metrics
    }
}

impl Metrics {
    fn register(&mut self) {
        let registry = &mut self.registry;
        registry.register(
            "verdicts",
            "Decisions, by verdict and failure class",
            self.verdicts.clone(),
        );
        registry.register(
            "dependency_errors",
            "Operations that a dependency did not answer sensibly or in time",
            self.dependency_errors.clone(),
        );
        registry.register(
            "dependency_up",
            "Whether a configured dependency answers",
            self.dependency_up.clone(),
        );
        registry.register(
            "bypassed",
            "Gates that were opened unchecked, by class and gate",
            self.bypassed.clone(),
        );
        registry.register(
            "policy_enforced",
            "1 while a policy store is configured and answers; else gates that need a policy are unavailable",
            self.policy_enforced.clone(),
        );
        registry.register(
            "limits_enforced",
            "1 while there is a limiter that answers; else limits are not enforced, or by the rules' choice",
            self.limits_enforced.clone(),
        );
        registry.register(
            "decide_seconds",
            "From a request's arrival to its verdict",
            self.decide_seconds.clone(),
        );
        registry.register(
            "limiter_seconds",
            "Operations of the limiter",
            self.limiter_seconds.clone(),
        );
        registry.register(
            "policy_seconds",
            "Questions to the policy store; answers from the cache are none",
            self.policy_seconds.clone(),
        );
        registry.register(
            "policy_lookups",
            "Lookups in the cached policy: a hit was answered at once, a miss had to wait for the store",
            self.policy_lookups.clone(),
        );
        registry.register(
            "slot_lost",
            "Renewals whose slot had lapsed: the stream goes on",
            self.slot_lost.clone(),
        );
        registry.register("unenforced", "Admissions without any limiter", self.unenforced.clone());
        registry.register(
            "give_back_dropped",
            "Give-backs that found no room or grew too old; what they stood for lapses in the store",
            self.give_back_dropped.clone(),
        );
        registry.register(
            "leases",
            "Leases asked for: granted, exact where only the request itself could be admitted, refused with its verdict",
            self.leases.clone(),
        );
        registry.register(
            "lease_admissions",
            "Admissions that filters were given to hand out by themselves",
            self.lease_admissions.clone(),
        );
        registry.register(
            "lease_returned",
            "Admissions of leases that came back, since nobody was admitted by them",
            self.lease_returned.clone(),
        );
        registry.register(
            "metering_seconds",
            "Operations of the metering store",
            self.metering_seconds.clone(),
        );
        registry.register(
            "unmetered",
            "Admissions whose run was not recorded, and has to be billed later",
            self.unmetered.clone(),
        );
        registry.register(
            "unmetered_dropped",
            "Unmetered admissions that found no room in the journal, and can't be billed",
            self.unmetered_dropped.clone(),
        );
        registry.register(
            "unmetered_waiting",
            "Unmetered admissions that no store has taken yet",
            self.unmetered_waiting.clone(),
        );
        registry.register(
            "settled",
            "Ended calls whose token hold was replaced by what they used",
            self.settled.clone(),
        );
        registry.register(
            "bills_waiting",
            "Bills of ended calls whose cost stands in no month yet",
            self.bills_waiting.clone(),
        );
        registry.register(
            "bills_dropped",
            "Bills that found no room: what those calls have cost is added to no month",
            self.bills_dropped.clone(),
        );
        registry.register(
            "bills_of_holds",
            "Bills of the tokens that a call had reserved, since its provider did not say what it used",
            self.bills_of_holds.clone(),
        );
        registry.register(
            "unpriced",
            "Bills of models without a price: what those calls have cost is added to no month",
            self.unpriced.clone(),
        );
        registry.register(
            "turned_away",
            "Connections and requests that the service's own door did not let in, by reason",
            self.turned_away.clone(),
        );
        registry.register(
            "spans",
            "Spans of decisions: sent, lost by a collector that did not take them, dropped for want of room",
            self.spans.clone(),
        );
        registry.register(
            "ext_authz",
            "What became of guarded requests that Envoy's ext_authz asked about, by the names of the filter's counters",
            self.checks.clone(),
        );
        registry.register(
            "enforcing",
            "1 while the rules of ext_authz are enforced; 0 in shadow mode, and for 10 s after something was not checked",
            self.enforcing.clone(),
        );
        registry.register(
            "gate_state",
            "1 for the state that a gate is in, 0 for its other states",
            self.gate_state.clone(),
        );
        registry.register(
            "fault_active",
            "1 while an operator lets a dependency fail for a drill",
            self.fault.clone(),
        );
        registry.register(
            "canary_denied",
            "1 if the last request over a limit that the canary sent was denied, 0 if it was admitted; absent without a canary",
            self.canary.clone(),
        );
        registry.register(
            "canary_age_seconds",
            "Whole seconds since the canary was last answered, or since the start; absent without a canary",
            self.canary_age.clone(),
        );
        registry.register("build_info", "What runs: always 1", self.build_info.clone());
    }

    /// Counts a verdict, and the gates that it passed unchecked.
    pub fn verdict(&self, verdict: &Verdict) {
        let class = verdict.class().map_or("none", FailureClass::name);
        let word = match verdict {
            Verdict::Admit(admission) => {
                admission.bypassed.iter().for_each(|bypass| self.bypass(bypass));
                if admission.unenforced {
                    self.unenforced.inc();
                }
                "admit"
            }
            Verdict::Deny(_) => "deny",
            Verdict::Unavailable(_) => "unavailable",
        };
        self.verdicts
            .get_or_create(&[("verdict", word), ("class", class)])
            .inc();
    }

    /// Counts a connection or a request that was not let in.
    pub fn turned_away(&self, reason: &'static str) {
        self.turned_away.get_or_create(&[("reason", reason)]).inc();
    }

    /// Counts what became of a request that Envoy's `ext_authz` asked about, under the name of the filter's counter.
    pub fn check(&self, counter: &str, by: u64) {
        let outcome = counter.strip_prefix("portcullis_").unwrap_or(counter).to_owned();
        self.checks.get_or_create(&vec![("outcome", outcome)]).inc_by(by);
    }

    /// Says whether the rules of this name are enforced for `ext_authz`.
    pub fn enforcing(&self, rules: &str, is: bool) {
        self.enforcing
            .get_or_create(&vec![("rules", rules.to_owned())])
            .set(i64::from(is));
    }

    /// Counts what became of spans: `sent`, `lost` by a collector that did not take them, `dropped` for want of room.
    pub fn spans(&self, outcome: &'static str, by: u64) {
        self.spans.get_or_create(&[("outcome", outcome)]).inc_by(by);
    }

    /// Counts what became of a lease that was asked for.
    pub fn lease(&self, verdict: &Verdict) {
        let outcome = match verdict {
            Verdict::Admit(Admission { lease: Some(grant), .. }) => {
                self.lease_admissions.inc_by(grant.requests);
                "granted"
            }
            Verdict::Admit(_) => "exact",
            Verdict::Deny(_) | Verdict::Unavailable(_) => "refused",
        };
        self.leases.get_or_create(&[("outcome", outcome)]).inc();
    }

    fn bypass(&self, bypass: &Bypass) {
        self.bypassed
            .get_or_create(&[("class", bypass.class.name()), ("gate", bypass.gate.name())])
            .inc();
    }

    /// Counts an operation that a dependency did not answer.
    pub fn dependency_error(&self, dependency: Dependency, kind: &'static str) {
        self.dependency_errors
            .get_or_create(&[("dependency", dependency.name()), ("kind", kind)])
            .inc();
    }

    /// Counts a lookup in the cached policy: `hit` or `miss`.
    pub fn policy_lookup(&self, outcome: &'static str) {
        self.policy_lookups.get_or_create(&[("outcome", outcome)]).inc();
    }

    /// Says whether a dependency answers.
    pub fn dependency_is_up(&self, dependency: Dependency, up: bool) {
        self.dependency_up
            .get_or_create(&[("dependency", dependency.name())])
            .set(i64::from(up));
        match dependency {
            Dependency::Limiter => drop(self.limits_enforced.set(i64::from(up))),
            Dependency::Policy => drop(self.policy_enforced.set(i64::from(up))),
            Dependency::Metering | Dependency::Decision => {}
        }
    }

    /// Says how a gate is.
    pub fn gate_state(&self, gate: Gate, state: GateState) {
        for other in GateState::ALL {
            let labels = [("gate", gate.name()), ("state", other.name())];
            self.gate_state.get_or_create(&labels).set(i64::from(other == state));
        }
    }

    /// Says whether a dependency is let fail.
    pub fn fault(&self, dependency: Dependency, is: bool) {
        self.fault
            .get_or_create(&[("dependency", dependency.name())])
            .set(i64::from(is));
    }

    /// Says whether what the canary last sent over its limit was denied, and how many seconds ago it was answered.
    pub fn canary(&self, denied: Option<bool>, age_s: u64) {
        if let Some(denied) = denied {
            self.canary.get_or_create(&[]).set(i64::from(denied));
        }
        let age_s = i64::try_from(age_s).unwrap_or(i64::MAX);
        self.canary_age.get_or_create(&[]).set(age_s);
    }

    /// Says what runs.
    pub fn build_info(&self, profile: &str, config_hash: &str, limiter: &str) {
        let labels = vec![
            ("profile", profile.to_owned()),
            ("config_hash", config_hash.to_owned()),
            ("limiter", limiter.to_owned()),
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ];
        self.build_info.get_or_create(&labels).set(1);
    }

    /// The text of all metrics.
    pub fn encode(&self) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}
