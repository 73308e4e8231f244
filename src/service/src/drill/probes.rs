//! What a drill sends: one request for each failure class that the rules can bring about, and what each has to show.
//!
//! Each probe of a limit has an owner of its own, so that no counter of anybody is touched. Left out on purpose: what an
//! answer has to be, which `explain`'s code says; and what can't be brought about without disturbing callers, which is listed.

use portcullis_decision::class::FailureClass;
use portcullis_decision::config::{FilterConfig, ModelSource, Tiers};
use portcullis_decision::envelope::has_prefix;
use portcullis_decision::limits::{Limit, ScopeLimits};
use portcullis_decision::rules::{Gate, GateRule};

use crate::explain::request::Request;
use crate::imagined::Outage;
use crate::imagined::counters::{Counted, Spent};

/// The beginning of every id that a drill makes up.
const MADE_UP: &str = "portcullis-drill";
/// A tier above this is not worth spending.
const LARGEST_TIER: u64 = 200;
/// A limit that no probe reaches.
const AMPLE: u64 = 1_000_000;
/// What lies between a spent launch rate and one that still lets some pass: the time that the requests themselves take.
const MORE_LAUNCHES: u64 = 20;

/// What a probe has to show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shows {
    /// That a request with all it needs passes.
    Admission,
    /// A failure class: by a refusal or, where the rules open it, by a counted pass.
    Class(FailureClass),
    /// That the request is refused for a reason that is known, whichever the policy has.
    Denial,
}

impl Shows {
    /// The name in reports.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Admission => "admitted",
            Self::Class(class) => class.name(),
            Self::Denial => "denied",
        }
    }
}

/// How often a request is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Times {
    /// So many times; the last answer counts.
    Exactly(u32),
    /// Until it is refused, at most so many times; the last answer counts.
    UntilRefused(u32),
    /// Until it passes, or for some seconds; the last answer counts.
    UntilAdmitted,
}

/// One request with its purpose.
#[derive(Debug, Clone)]
pub(super) struct Probe {
    /// What it is, for a reader.
    pub(super) name: String,
    /// What it has to show.
    pub(super) shows: Shows,
    /// What is let fail meanwhile.
    pub(super) down: Option<Outage>,
    /// What it supposes to be spent.
    pub(super) spent: Vec<Spent>,
    /// The request.
    pub(super) request: Request,
    /// How often.
    pub(super) times: Times,
    /// Whether the envelope is signed, where that is wanted.
    pub(super) is_signed: bool,
}

impl Probe {
    fn new(name: impl Into<String>, shows: Shows, request: Request) -> Self {
        Self {
            name: name.into(),
            shows,
            down: None,
            spent: Vec::new(),
            request,
            times: Times::Exactly(1),
            is_signed: true,
        }
    }

    fn times(mut self, times: Times) -> Self {
        self.times = times;
        self
    }

    fn down(mut self, what: Outage) -> Self {
        self.down = Some(what);
        self
    }

    /// How often it is sent before the answer that counts, in a prediction.
    pub(super) const fn predicted_times(&self) -> u32 {
        match self.times {
            Times::Exactly(times) => times,
            Times::UntilRefused(_) | Times::UntilAdmitted => 1,
        }
    }
}

/// What a drill does and what it leaves.
#[derive(Debug, Clone, Default)]
pub(super) struct Plan {
    /// In the order in which they are sent.
    pub(super) probes: Vec<Probe>,
    /// Failure classes that are not shown, each with the reason.
    pub(super) not_driven: Vec<(&'static str, String)>,
}

/// What the policy has that must be refused, as far as somebody said so: nothing of it can be made up.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Refused<'a> {
    /// Suspended, or of a plan that is used up.
    pub(super) orgs: &'a [String],
    /// Allowed, and served by nobody.
    pub(super) unserved_model: Option<&'a str>,
}

/// Makes up requests from the test tenant's.
pub(super) struct Planner<'a> {
    config: &'a FilterConfig,
    tenant: &'a Request,
    /// Makes the ids of this drill its own.
    run: &'a str,
    made: u32,
    plan: Plan,
}

impl<'a> Planner<'a> {
    /// Plans for a filter's configuration and a request of the test tenant. `run` is new each time.
    pub(super) fn new(config: &'a FilterConfig, tenant: &'a Request, run: &'a str) -> Self {
        Self {
            config,
            tenant,
            run,
            made: 0,
            plan: Plan::default(),
        }
    }

    fn lists(&self, gate: Gate) -> bool {
        self.config.rules.gate(gate).is_some()
    }

    fn made_up(&mut self) -> String {
        self.made = self.made.saturating_add(1);
        format!("{MADE_UP}-{}-{}", self.run, self.made)
    }

    fn name(&self, suffix: &str) -> String {
        format!("{}{suffix}", self.config.prefix)
    }

    fn set(&self, request: &mut Request, suffix: &str, value: &str) {
        let name = self.name(suffix);
        request.headers.retain(|(known, _)| *known != name);
        request.headers.push((name, value.to_owned()));
    }

    fn without(&self, request: &mut Request, suffixes: &[&str]) {
        let names: Vec<String> = suffixes.iter().map(|suffix| self.name(suffix)).collect();
        request.headers.retain(|(known, _)| !names.contains(known));
    }

    /// A request of an owner who has not been seen before, with these limits.
    fn fresh(&mut self, limits: &[(&str, u64)]) -> Request {
        let mut request = self.tenant.clone();
        let owner = self.made_up();
        self.set(&mut request, "owner-id", &owner);
        for (limit, figure) in limits {
            self.set(&mut request, limit, &figure.to_string());
        }
        request
    }

    /// A request for this model.
    fn asking_for(&mut self, model: &str) -> Request {
        let mut request = self.fresh(&[]);
        if self.config.model == ModelSource::Body {
            request.body = serde_json::json!({"model": model, "messages": []})
                .to_string()
                .into_bytes();
        } else {
            self.set(&mut request, "model", model);
        }
        request
    }

    /// The tenant's request with a limit that makes the limiter count, where one may be stamped.
    fn ample(&mut self) -> Request {
        if self.lists(Gate::Contract) {
            self.fresh(&[("owner-rate-limit-requests", AMPLE)])
        } else {
            self.fresh(&[])
        }
    }

    fn add(&mut self, probe: Probe) {
        self.plan.probes.push(probe);
    }

    fn leave(&mut self, class: FailureClass, why: impl Into<String>) {
        self.plan.not_driven.push((class.name(), why.into()));
    }

    /// Everything, in order. `tiers` are the operator's, and `outages` can be brought about.
    pub(super) fn plan(
        mut self,
        tiers: Option<&Tiers>,
        refused: Refused<'_>,
        outages: Result<&[Outage], &str>,
    ) -> Plan {
        let admitted = self.ample();
        self.add(Probe::new("an envelope with all it needs", Shows::Admission, admitted));
        self.envelopes();
        self.request_forms();
        self.policies(refused);
        self.quotas();
        self.tiers(tiers);
        self.outages(outages);
        self.launches();
        self.plan
    }

    fn envelopes(&mut self) {
        let class = FailureClass::EnvelopeMissing;
        let mut bare = self.tenant.clone();
        let prefix = &self.config.prefix;
        bare.headers.retain(|(name, _)| !has_prefix(name.as_bytes(), prefix));
        self.add(Probe::new("no envelope", Shows::Class(class), bare));

        let malformed = Shows::Class(FailureClass::EnvelopeMalformed);
        let mut request = self.fresh(&[]);
        self.set(&mut request, "owner-rate-limit-requests", "12x");
        self.add(Probe::new("a limit that is no number", malformed, request));
        let mut request = self.fresh(&[("owner-rate-limit-requests", 5)]);
        self.without(&mut request, &["owner-id"]);
        self.add(Probe::new("a limit without its owner", malformed, request));
        if self.config.signatures.is_some() {
            let request = self.fresh(&[]);
            let mut probe = Probe::new("an envelope without its signature", malformed, request);
            probe.is_signed = false;
            self.add(probe);
        }
    }

    fn request_forms(&mut self) {
        let class = FailureClass::RequestMalformed;
        if self.config.model == ModelSource::Body {
            let mut request = self.fresh(&[]);
            request.body = b"{\"model\": ".to_vec();
            self.add(Probe::new("a body that breaks off", Shows::Class(class), request));
        } else {
            self.leave(class, "the filter does not read bodies (model.from is not \"body\")");
        }
    }

    fn policies(&mut self, refused: Refused<'_>) {
        let class = FailureClass::PolicyDenied;
        if self.lists(Gate::OrgStatus) {
            let mut request = self.fresh(&[]);
            let unknown = self.made_up();
            self.set(&mut request, "org-id", &unknown);
            self.add(Probe::new("an org that nobody knows", Shows::Class(class), request));
        }
        if self.lists(Gate::ModelPolicy) {
            let unknown = self.made_up();
            let request = self.asking_for(&unknown);
            self.add(Probe::new("a model that is not allowed", Shows::Class(class), request));
        }
        if !self.lists(Gate::OrgStatus) && !self.lists(Gate::ModelPolicy) {
            self.leave(class, "the rules list neither org_status nor model_policy");
        }
        let class = FailureClass::ProviderUnconfigured;
        match refused.unserved_model {
            _ if !self.lists(Gate::ModelPolicy) => self.leave(class, "the rules do not list model_policy"),
            Some(model) => {
                let request = self.asking_for(model);
                let name = format!("the model {model}, which nobody serves");
                self.add(Probe::new(name, Shows::Class(class), request));
            }
            None => self.leave(
                class,
                "no --unserved-model was given: it takes one that the policy allows and nobody serves",
            ),
        }
        for org in refused.orgs {
            let mut request = self.fresh(&[]);
            self.set(&mut request, "org-id", org);
            self.add(Probe::new(format!("the org {org}"), Shows::Denial, request));
        }
    }

    fn quotas(&mut self) {
        let shows = Shows::Class(FailureClass::QuotaExhausted);
        if self.lists(Gate::Contract) {
            for (limit, what) in [
                ("owner-rate-limit-requests", "a limit of 0 requests"),
                ("owner-rate-limit-tokens", "a limit of 0 tokens"),
                ("owner-concurrency-limit", "a limit of 0 at once"),
            ] {
                let request = self.fresh(&[(limit, 0)]);
                self.add(Probe::new(what, shows, request));
            }
            let request = self.fresh(&[("owner-rate-limit-requests", 1)]);
            let probe = Probe::new("the second request under a limit of 1", shows, request);
            self.add(probe.times(Times::Exactly(2)));
        } else if !self.lists(Gate::LaunchRate) {
            self.leave(
                FailureClass::QuotaExhausted,
                "the rules list neither contract nor launch_rate",
            );
        }
    }

    /// A tier that may be spent: a lane of 0, or one that counts an id of this drill's own.
    fn tiers(&mut self, tiers: Option<&Tiers>) {
        let class = FailureClass::CapacityExhausted;
        if !self.lists(Gate::Capacity) {
            return self.leave(class, "the rules do not list capacity");
        }
        let Some(tiers) = tiers else {
            return self.leave(class, "no --service was given: its tiers are not known");
        };
        let figure = |limits: &ScopeLimits| match limits.requests {
            Limit::Unlimited => None,
            Limit::Blocked => Some(0),
            Limit::AtMost(figure) => Some(figure.get()),
        };
        let small = |limits: &ScopeLimits| figure(limits).filter(|figure| *figure <= LARGEST_TIER);
        let blocked = tiers.lanes.iter().find(|(_, limits)| figure(limits) == Some(0));
        let reads_org = self.config.rules.gates.iter().any(GateRule::needs_org);
        let own = self.made_up();
        let (what, header, id, figure) = if let Some((lane, _)) = blocked {
            (format!("the lane {lane}, which is closed"), "lane", lane.clone(), 0)
        } else if let Some(figure) = small(&tiers.graph) {
            (format!("a graph after {figure} requests"), "graph-id", own, figure)
        } else if let Some(figure) = small(&tiers.organization).filter(|_| !reads_org) {
            (format!("an org after {figure} requests"), "org-id", own, figure)
        } else {
            return self.leave(
                class,
                "no tier can be spent without disturbing callers: a lane of 0 requests, or a graph tier of at most 200, can",
            );
        };
        let mut request = self.ample();
        self.set(&mut request, header, &id);
        let times = u32::try_from(figure.saturating_add(1)).unwrap_or(u32::MAX);
        self.add(Probe::new(what, Shows::Class(class), request).times(Times::Exactly(times)));
    }

    fn outages(&mut self, outages: Result<&[Outage], &str>) {
        let known = match outages {
            Ok(known) => known,
            Err(why) => {
                for outage in [Outage::Limiter, Outage::Policy, Outage::Metering, Outage::Decision] {
                    self.leave(class_of(outage), why);
                }
                return;
            }
        };
        for outage in known {
            let request = self.ample();
            let name = format!("{} does not answer", name_of(*outage));
            self.add(Probe::new(name, Shows::Class(class_of(*outage)), request).down(*outage));
        }
        if self.lists(Gate::Contract) {
            let request = self.fresh(&[("owner-rate-limit-requests", 0)]);
            let shows = Shows::Class(FailureClass::QuotaExhausted);
            let name = "a limit of 0 requests while the service does not answer";
            self.add(Probe::new(name, shows, request).down(Outage::Decision));
        }
        let request = self.ample();
        let after = Probe::new("an envelope with all it needs, afterwards", Shows::Admission, request);
        self.add(after.times(Times::UntilAdmitted));
    }

    /// The last, since it spends the launches of the tenant's org.
    fn launches(&mut self) {
        let Some(GateRule::LaunchRate { burst, .. }) = self.config.rules.gate(Gate::LaunchRate) else {
            return;
        };
        let (class, burst) = (FailureClass::QuotaExhausted, *burst);
        if burst > LARGEST_TIER {
            return self.leave(class, format!("a burst of {burst} launches is not worth spending"));
        }
        let request = self.fresh(&[]);
        let name = self.name("org-id");
        let org = request.headers.iter().find(|(known, _)| *known == name);
        let Some((_, org)) = org.cloned() else { return };
        let most = u32::try_from(burst.saturating_add(MORE_LAUNCHES)).unwrap_or(u32::MAX);
        let mut probe = Probe::new("more launches than the rate allows", Shows::Class(class), request);
        probe.spent = vec![Spent {
            scope: portcullis_decision::limits::Scope::Org,
            ids: vec![org],
            resource: Counted::Launches,
            used: burst,
            ends_in_s: None,
        }];
        self.add(probe.times(Times::UntilRefused(most)));
    }
}

/// The name in reports, and of the switch.
pub(super) const fn name_of(outage: Outage) -> &'static str {
    match outage {
        Outage::Limiter => "limiter",
        Outage::Policy => "policy",
        Outage::Metering => "metering",
        Outage::Decision => "decision",
    }
}

/// The class of an outage.
pub(super) const fn class_of(outage: Outage) -> FailureClass {
    match outage {
        Outage::Limiter => FailureClass::LimiterUnavailable,
        Outage::Policy => FailureClass::PolicyUnavailable,
        Outage::Metering => FailureClass::MeteringUnavailable,
        Outage::Decision => FailureClass::DecisionUnavailable,
    }
}

#[cfg(test)]
mod tests;
