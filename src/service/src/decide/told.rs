//! What a verdict leaves in the log: bypasses and outages at WARN, denials at INFO, missing enforcement at ERROR.

use portcullis_decision::class::{Code, FailureClass};
use portcullis_decision::config::Mode;
use portcullis_decision::log_line::{Level, LogLine};
use portcullis_decision::rules::Gate;
use portcullis_decision::stream::bypass_message;
use portcullis_decision::verdict::{Bypass, Denial, Unavailability, Verdict};
use portcullis_decision::wire::DecideRequest;

use super::Decider;
use crate::bills::no_price_for;

/// Characters of a parser's message that a line repeats.
const LONGEST_REASON: usize = 200;
/// The sentence of a service that counts nothing.
pub(crate) const UNENFORCED: &str = "contract limits are not enforced: no limiter is configured";

impl Decider {
    /// Says at the start that there is no limiter.
    pub fn tell_of_a_missing_limiter(&self) {
        if self.limiter.is_none() {
            self.journal
                .write(None, LogLine::new(Level::Error, "unenforced", UNENFORCED));
        }
    }

    /// Says that a request could not be read. `what` it was meant to be, and `why` not.
    pub fn tell_of_a_refusal(&self, what: &str, why: &str) {
        let cut: String = why.chars().take(LONGEST_REASON).collect();
        let mut line = LogLine::new(
            Level::Warn,
            "request_refused",
            format!("{what} could not be read: {cut}"),
        );
        line.class = Some(FailureClass::DecisionUnavailable);
        self.journal.write(None, line);
    }

    /// Says that a filter of another profile was not answered. `what` is what it asked for.
    pub fn tell_of_another_profile(&self, theirs: &str, what: &str) {
        let ours = self.profile;
        let message = format!("{what} of a filter of profile {theirs} was refused: this service's profile is {ours}");
        let mut line = LogLine::new(Level::Error, "profile_mismatch", message);
        line.class = Some(FailureClass::DecisionUnavailable);
        self.journal.write(None, line);
    }

    pub(super) fn tell(&self, of: About<'_>, verdict: &Verdict) {
        match verdict {
            Verdict::Admit(admission) => {
                admission
                    .first_of_each_class()
                    .for_each(|bypass| self.tell_bypass(of, bypass));
                if admission.unenforced {
                    let mut line = of.line(Level::Error, "unenforced", UNENFORCED.to_owned());
                    line.action = Some("admit");
                    self.journal.write(None, line);
                }
            }
            Verdict::Deny(denial) => self.tell_denial(of, denial),
            Verdict::Unavailable(unavailable) => self.tell_unavailability(of, unavailable),
        }
    }

    /// Says which entry the price list lacks: of a bypass or a refusal alone nobody could tell.
    pub(super) fn tell_of_no_price(&self, request: &DecideRequest, model: &str, trace_id: Option<&str>) {
        let of = About { request, trace_id };
        let message = format!("{}: {} can't be kept for it", no_price_for(model), Gate::CostCap.name());
        let mut line = of.line(Level::Warn, "unpriced", message);
        line.class = Some(FailureClass::PolicyUnavailable);
        line.gate = Some(Gate::CostCap.name().to_owned());
        self.journal.write(None, line);
    }

    fn tell_bypass(&self, of: About<'_>, bypass: &Bypass) {
        let mut line = of.line(Level::Warn, "bypassed", bypass_message(bypass));
        line.class = Some(bypass.class);
        line.gate = Some(bypass.gate.name().to_owned());
        line.action = Some("admit");
        self.journal.write(None, line);
    }

    fn tell_denial(&self, of: About<'_>, denial: &Denial) {
        let mut line = of.line(Level::Info, "denied", denial.code.message().to_owned());
        line.class = denial.code.class();
        line.gate = denial.gate.map(Gate::name).map(str::to_owned);
        line.action = Some(refusal(of.request));
        line.code = Some(denial.code.name());
        self.journal.write(None, line);
    }

    fn tell_unavailability(&self, of: About<'_>, unavailable: &Unavailability) {
        let message = match unavailable.gate {
            Some(gate) => format!(
                "fail-closed, {} is unavailable to the gate {}",
                unavailable.dependency.name(),
                gate.name()
            ),
            None => format!(
                "fail-closed, {} gave no answer that counts",
                unavailable.dependency.name()
            ),
        };
        let mut line = of.line(Level::Warn, "unavailable", message);
        line.class = Some(unavailable.dependency.class());
        line.gate = unavailable.gate.map(Gate::name).map(str::to_owned);
        line.action = Some(refusal(of.request));
        line.code = Some(Code::ServiceDegraded.name());
        self.journal.write(None, line);
    }
}

/// What the filter makes of a refusal.
const fn refusal(request: &DecideRequest) -> &'static str {
    match request.mode {
        Mode::Enforce => "reject",
        Mode::Shadow => "shadow",
    }
}

/// What a line is about.
#[derive(Debug, Clone, Copy)]
pub(super) struct About<'a> {
    pub(super) request: &'a DecideRequest,
    /// The trace that it belongs to.
    pub(super) trace_id: Option<&'a str>,
}

impl About<'_> {
    fn line(self, level: Level, event: &'static str, message: String) -> LogLine {
        let mut line = LogLine::new(level, event, message);
        line.org = self.request.subject.org.clone();
        line.request_id = self.request.request_id.clone();
        line.trace_id = self.trace_id.map(str::to_owned);
        line.rules = Some(self.request.rules.clone());
        line
    }
}
