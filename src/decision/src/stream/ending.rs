//! How a request ends its wait: what is refused, what goes on, and what is told about either.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::account::Account;
use super::{Deciding, NO_ID, State, Stream};
use crate::class::{Dependency, FailureClass};
use crate::config::Mode;
use crate::evaluation::known_denial;
use crate::gatehouse::{Effect, Gatehouse};
use crate::hold::Hold;
use crate::lease::{Host, Share};
use crate::log_line::{Level, LogLine};
use crate::metric::Counter;
use crate::outbox::Note;
use crate::reply::Refusal;
use crate::verdict::{Admission, Bypass, Unavailability, Verdict};
use crate::wire::{DecideRequest, Unmetered};

impl Stream {
    pub(super) fn undecided(
        &mut self,
        gatehouse: &mut Gatehouse,
        deciding: &Deciding,
        now_ms: u64,
        effects: &mut Vec<Effect>,
    ) {
        if deciding.has_left {
            gatehouse.tell(Note::Cancel(deciding.request.op), now_ms);
        }
        if gatehouse.breaker.failed(now_ms) {
            effects.push(Effect::BreakerOpen(true));
            let line = LogLine::new(
                Level::Error,
                "breaker_open",
                "the decision service does not answer: probing it once a second",
            );
            gatehouse.log(line, now_ms, effects);
        }
        self.unavailable(gatehouse, Some((&deciding.request, deciding.hold)), now_ms, effects);
    }

    /// No decision: what the rules say about `decision`, after what is known without it.
    pub(super) fn unavailable(
        &mut self,
        gatehouse: &mut Gatehouse,
        request: Option<(&DecideRequest, Hold)>,
        now_ms: u64,
        effects: &mut Vec<Effect>,
    ) {
        let hold = request.map_or(Hold::without_body(0), |(_, hold)| hold);
        let request = request.map(|(request, _)| request);
        if let Some(denial) = request.and_then(known_denial) {
            return self.refuse_plainly(gatehouse, &Refusal::Denied(denial), now_ms, effects);
        }
        let class = FailureClass::DecisionUnavailable;
        let choice = gatehouse.config().rules.decision;
        if !gatehouse.allow(class, choice, now_ms) {
            let unavailable = Unavailability {
                dependency: Dependency::Decision,
                gate: None,
            };
            return self.refuse_plainly(gatehouse, &Refusal::Unavailable(unavailable), now_ms, effects);
        }
        effects.push(Effect::Count(Counter::Bypassed(class), 1));
        let mut line = self.line(Level::Warn, "bypassed", "fail-open, launch unmetered");
        line.class = Some(class);
        line.action = Some("admit");
        gatehouse.log(line, now_ms, effects);
        gatehouse.unenforced(now_ms, effects);
        gatehouse.unmetered(request.and_then(unmetered), now_ms);
        let records_cost = gatehouse.config().rules.meters();
        // It holds nothing, but what it costs can still be told.
        let account = request
            .filter(|request| request.op != NO_ID)
            .map(|request| Account::new(request, hold, false, None, records_cost));
        self.pass(account, effects);
    }

    pub(super) fn carry_out(
        &mut self,
        gatehouse: &mut Gatehouse,
        host: &mut dyn Host,
        deciding: &Deciding,
        verdict: Verdict,
        now_ms: u64,
        effects: &mut Vec<Effect>,
    ) {
        let request = &deciding.request;
        if let Some(bundle) = &deciding.bundle {
            gatehouse.learn(host, bundle, request, &verdict, deciding.asked_ms, now_ms);
        }
        match verdict {
            Verdict::Deny(denial) => self.refuse_plainly(gatehouse, &Refusal::Denied(denial), now_ms, effects),
            Verdict::Unavailable(unavailable) => {
                self.refuse_plainly(gatehouse, &Refusal::Unavailable(unavailable), now_ms, effects);
            }
            Verdict::Admit(admission) => {
                self.tell_bypasses(gatehouse, &admission, now_ms, effects);
                self.tightest = admission.tightest;
                if let Some(ttl_ms) = admission.slot_ttl_ms {
                    gatehouse.hold_slot(request.op, ttl_ms, now_ms);
                }
                let has_slot = admission.slot_ttl_ms.is_some();
                let records_cost = gatehouse.config().rules.meters();
                // A block that came with it is another part of the operation's charge, and settled apart.
                let account = Account::new(request, deciding.hold, has_slot, admission.held_tokens, records_cost);
                self.pass(Some(account), effects);
            }
        }
    }

    pub(super) fn tell_bypasses(
        &self,
        gatehouse: &mut Gatehouse,
        admission: &Admission,
        now_ms: u64,
        effects: &mut Vec<Effect>,
    ) {
        for bypass in admission.first_of_each_class() {
            let mut line = self.line(Level::Warn, "bypassed", bypass_message(bypass));
            line.class = Some(bypass.class);
            line.gate = Some(bypass.gate.name().to_string());
            line.action = Some("admit");
            gatehouse.log(line, now_ms, effects);
            effects.push(Effect::Count(Counter::Bypassed(bypass.class), 1));
        }
        if admission.unenforced {
            let message = "contract limits are not enforced: the decision service has no limiter";
            let mut line = self.line(Level::Error, "unenforced", message);
            line.action = Some("admit");
            gatehouse.log(line, now_ms, effects);
        }
        if admission.unenforced || !admission.bypassed.is_empty() {
            gatehouse.unenforced(now_ms, effects);
        }
    }

    /// Lets a request go on by a part of a block.
    pub(super) fn pass_leased(
        &mut self,
        gatehouse: &mut Gatehouse,
        hold: Hold,
        share: Share,
        effects: &mut Vec<Effect>,
    ) {
        gatehouse.count_leased();
        self.tightest = share.tightest;
        let account = share.held_tokens.map(|held| Account::leased(share.lease, hold, held));
        self.go_on(account, effects);
    }

    pub(super) fn pass(&mut self, account: Option<Account>, effects: &mut Vec<Effect>) {
        effects.push(Effect::Count(Counter::Admitted, 1));
        self.go_on(account, effects);
    }

    pub(super) fn go_on(&mut self, account: Option<Account>, effects: &mut Vec<Effect>) {
        self.put_back(effects);
        if self.takes_compressed && account.as_ref().is_some_and(Account::counts_usage) {
            // A report that is compressed can't be read: every call would be charged its hold.
            effects.push(Effect::SetRequestHeader("accept-encoding", "identity"));
        }
        let account = account.map(alloc::boxed::Box::new);
        self.state = State::Passed { account };
        if core::mem::take(&mut self.is_paused) {
            effects.push(Effect::Resume);
        }
    }

    /// Refuses for the reason that the code itself says.
    pub(super) fn refuse_plainly(
        &mut self,
        gatehouse: &mut Gatehouse,
        refusal: &Refusal,
        now_ms: u64,
        effects: &mut Vec<Effect>,
    ) {
        let level = if refusal.class().can_be_opened() {
            Level::Warn
        } else {
            Level::Info
        };
        self.refuse(gatehouse, refusal, level, None, now_ms, effects);
    }

    pub(super) fn refuse(
        &mut self,
        gatehouse: &mut Gatehouse,
        refusal: &Refusal,
        level: Level,
        why: Option<String>,
        now_ms: u64,
        effects: &mut Vec<Effect>,
    ) {
        let (class, code) = (refusal.class(), refusal.code());
        let enforced = gatehouse.config().mode == Mode::Enforce;
        let message = why.unwrap_or_else(|| code.message().to_string());
        let mut line = self.line(level, if enforced { "rejected" } else { "shadow_rejected" }, message);
        line.class = Some(class);
        line.code = Some(code.name());
        line.gate = refusal.gate().map(|gate| gate.name().to_string());
        line.action = Some(if enforced { "reject" } else { "shadow" });
        gatehouse.log(line, now_ms, effects);
        if enforced {
            effects.push(Effect::Count(Counter::Rejected(class), 1));
            effects.push(Effect::Reply(refusal.reply(
                self.caller.grpc_content_type.as_deref(),
                self.caller.request_id.as_deref(),
            )));
            self.state = State::Refused;
        } else {
            effects.push(Effect::Count(Counter::ShadowRejected(class), 1));
            self.go_on(None, effects);
        }
    }

    pub(super) fn line(
        &self,
        level: Level,
        event: &'static str,
        message: impl Into<alloc::borrow::Cow<'static, str>>,
    ) -> LogLine {
        let mut line = LogLine::new(level, event, message);
        line.org.clone_from(&self.caller.org);
        line.request_id.clone_from(&self.caller.request_id);
        #[cfg(feature = "trace-lines")]
        {
            line.trace_id = self.caller.trace.as_ref().map(|trace| trace.trace_id().to_string());
        }
        line
    }
}

/// What has to be billed of a request that went on undecided; `None` if the host gave it no id, under which alone it would
/// be billed once.
fn unmetered(request: &DecideRequest) -> Option<Unmetered> {
    (request.op != NO_ID).then(|| Unmetered {
        op: request.op,
        org: request.subject.org.clone(),
        owner: Some(request.subject.owner.clone()),
        rules: request.rules.clone(),
        request_id: request.request_id.clone(),
        age_ms: 0,
    })
}

/// The sentence of a gate that was opened. A quota whose plan could not be read is unchecked; the run beside it may well
/// have been metered.
pub fn bypass_message(bypass: &Bypass) -> String {
    if bypass.class == FailureClass::MeteringUnavailable {
        "fail-open, launch unmetered".to_string()
    } else {
        alloc::format!("fail-open, {} unchecked", bypass.gate.name())
    }
}
