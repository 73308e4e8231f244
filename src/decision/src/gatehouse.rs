//! What one configuration shares among its streams in one VM: breaker, outbox, allowances, slots held, and what is logged
//! and shown. Streams borrow it for the length of one event.

mod leases;

use alloc::string::String;
use alloc::vec::Vec;

use hashbrown::HashMap;

use leases::Leases;

use crate::allowance::Allowances;
use crate::breaker::Breaker;
use crate::class::FailureClass;
use crate::config::{FilterConfig, Mode};
use crate::json;
use crate::log_line::{Level, LogLimiter, LogLine};
use crate::metric::Counter;
use crate::operation::OperationId;
use crate::outbox::{Dropped, Note, Outbox};
use crate::reply::Reply;
use crate::rules::{Choice, Gate};
use crate::stream::HeaderLine;
use crate::trace::TraceContext;
use crate::wire::{SETTLE_PATH, SettleAnswer, Settlement, Unmetered};

/// How long the enforcing gauge stays 0 after something was not enforced, in milliseconds: longer than a scrape interval
/// of 5 s, so that a scrape cannot miss it.
const UNENFORCED_SHOWN_MS: u64 = 10_000;
/// How often a gauge of 0 is written again, in milliseconds: other VMs of the process write to the same gauge.
const REASSERT_MS: u64 = 1_000;
/// A settle batch may take this long, in milliseconds. Nobody waits for it.
const SETTLE_TIMEOUT_MS: u64 = 2_000;

/// A call to the decision service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Callout {
    /// The path.
    pub path: &'static str,
    /// The JSON body.
    pub body: Vec<u8>,
    /// The trace of the request that it is made for. What is told later, or fetched for nobody, belongs to none.
    pub trace: Option<TraceContext>,
    /// The time that the host may take, in milliseconds.
    pub timeout_ms: u64,
}

/// What a host has to do. At most one `Dispatch`, `Reply` or `Resume` comes out of one event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Add to a counter; never by 0.
    Count(Counter, u64),
    /// Show whether the rules are enforced.
    Enforcing(bool),
    /// Show whether the breaker is open.
    BreakerOpen(bool),
    /// Record how long a callout took, in milliseconds.
    CalloutMs(u64),
    /// Write a line.
    Log(LogLine),
    /// Remove a request header, by the name that the host gave.
    RemoveRequestHeader(String),
    /// Remove a trailer of the request, by the name that the host gave.
    RemoveRequestTrailer(String),
    /// Give a request header this value, in place of all that it has.
    SetRequestHeader(&'static str, &'static str),
    /// Take a request header out, by the name that the host gave, and report a refusal at once.
    WithholdRequestHeader(String),
    /// Add a line that was taken out, and report a refusal.
    PutBackRequestHeader(HeaderLine),
    /// Remove a response header.
    RemoveResponseHeader(&'static str),
    /// Add a response header.
    AddResponseHeader(&'static str, String),
    /// Call the decision service for this stream, and report a refusal to call at once.
    Dispatch(Callout),
    /// Call the decision service for a block that no request waits for; its answer goes to [`Gatehouse::fetched`].
    Fetch(OperationId, Callout),
    /// End the request with this reply.
    Reply(Reply),
    /// Let the paused request go on.
    Resume,
}

#[derive(Debug, Clone, Copy)]
struct HeldSlot {
    renew_at_ms: u64,
    ttl_ms: u64,
    /// It waits to be told: a second renewal would tell nothing, and take the room of a bill.
    renewal_waits: bool,
}

/// The shared state of one configuration in one VM.
#[derive(Debug)]
pub struct Gatehouse {
    config: FilterConfig,
    fingerprint: String,
    pub(crate) breaker: Breaker,
    outbox: Outbox,
    allowances: Allowances,
    logs: LogLimiter,
    slots: HashMap<OperationId, HeldSlot>,
    leases: Leases,
    unenforced_until_ms: Option<u64>,
    reassert_at_ms: u64,
    has_told_of_unknown_header: bool,
    /// The host ticks, so requests need not look at what time brings about.
    ticks: bool,
}

impl Gatehouse {
    /// The state of a fresh VM. `text` is what the configuration was parsed from.
    pub fn new(config: FilterConfig, text: &[u8]) -> Self {
        let fingerprint = config.fingerprint(text);
        let leases = Leases::of(&config, &fingerprint);
        let outbox = Outbox::of(config.window_s.saturating_mul(1000), config.rules.meters());
        Self {
            config,
            fingerprint,
            breaker: Breaker::default(),
            outbox,
            allowances: Allowances::default(),
            logs: LogLimiter::default(),
            slots: HashMap::new(),
            leases,
            unenforced_until_ms: None,
            reassert_at_ms: 0,
            has_told_of_unknown_header: false,
            ticks: false,
        }
    }

    /// The configuration.
    pub const fn config(&self) -> &FilterConfig {
        &self.config
    }

    /// Says that the host ticks.
    #[must_use]
    pub const fn with_ticks(mut self, ticks: bool) -> Self {
        self.ticks = ticks;
        self
    }

    /// What time alone brings about, where a request has to look: on a host that does not tick.
    pub(crate) fn passed_in_request(&mut self, now_ms: u64) -> Vec<Effect> {
        if self.ticks { Vec::new() } else { self.passed(now_ms) }
    }

    /// What to do at the start: one line, and the first value of the gauges.
    pub fn started(&self) -> Vec<Effect> {
        let (rules, mode, profile) = (
            &self.config.rules.name,
            self.config.mode.name(),
            self.config.profile.name(),
        );
        let hash = &self.fingerprint;
        let message = alloc::format!("rules {rules}, mode {mode}, profile {profile}, configuration {hash}");
        let mut line = LogLine::new(Level::Info, "configured", message);
        line.rules = Some(rules.clone());
        let mut effects = alloc::vec![
            Effect::Log(line),
            Effect::Enforcing(self.config.mode == Mode::Enforce),
            Effect::BreakerOpen(false),
        ];
        effects.extend(self.way_around_signatures().map(Effect::Log));
        effects
    }

    /// Envelopes have to be signed, and whoever sends none at all passes: that is what the rules say, and is said.
    fn way_around_signatures(&self) -> Option<LogLine> {
        if self.config.signatures.is_none() || self.config.rules.when_missing == Choice::Reject {
            return None;
        }
        let message = "envelope.signature is set, and by when_missing a request without any envelope passes: whoever can \
                       remove a whole envelope on its way is held to no limit";
        let mut line = LogLine::new(Level::Warn, "signatures_can_be_left_out", message);
        line.rules = Some(self.config.rules.name.clone());
        Some(line)
    }

    /// Writes a line, or holds it back.
    pub(crate) fn log(&mut self, line: LogLine, now_ms: u64, effects: &mut Vec<Effect>) {
        effects.extend(self.logs.admit(line, now_ms).map(Effect::Log));
    }

    /// Tells once of a header under the prefix that means nothing.
    pub(crate) fn unknown_header(&mut self, name: &str, now_ms: u64, effects: &mut Vec<Effect>) {
        if !core::mem::replace(&mut self.has_told_of_unknown_header, true) {
            let message = alloc::format!("{}{name} is not a header of the envelope: ignored", self.config.prefix);
            self.log(
                LogLine::new(Level::Warn, "unknown_envelope_header", message),
                now_ms,
                effects,
            );
        }
    }

    /// Whether a class may be opened once more; counts it.
    pub(crate) fn allow(&mut self, class: FailureClass, choice: Choice, now_ms: u64) -> bool {
        self.allowances.admit(class, choice, now_ms)
    }

    /// Takes back that a class was opened: nobody passed by it.
    pub fn give_back_allowance(&mut self, class: FailureClass) {
        self.allowances.give_back(class);
    }

    /// Notes that something was not enforced just now.
    pub(crate) fn unenforced(&mut self, now_ms: u64, effects: &mut Vec<Effect>) {
        let is_news = self.unenforced_until_ms.is_none();
        self.unenforced_until_ms = Some(now_ms.saturating_add(UNENFORCED_SHOWN_MS));
        if is_news {
            effects.push(Effect::Enforcing(false));
        }
    }

    /// What has to be told about an operation.
    pub(crate) fn tell(&mut self, note: Note, now_ms: u64) {
        self.outbox.add(note, now_ms);
    }

    /// A request went on without a decision. `admission` says whose run it is, if that is known; only rules that record
    /// runs have anything to bill.
    pub(crate) fn unmetered(&mut self, admission: Option<Unmetered>, now_ms: u64) {
        if self.config.rules.gate(Gate::Metering).is_none() {
            return;
        }
        match admission {
            Some(admission) => self.outbox.add_unmetered(admission, now_ms),
            None => self.outbox.lose_unmetered(),
        }
    }

    /// A stream holds a slot that lapses after `ttl_ms` without renewal.
    pub(crate) fn hold_slot(&mut self, op: OperationId, ttl_ms: u64, now_ms: u64) {
        let renew_at_ms = now_ms.saturating_add(ttl_ms.checked_div(3).unwrap_or(ttl_ms));
        let slot = HeldSlot {
            renew_at_ms,
            ttl_ms,
            renewal_waits: false,
        };
        self.slots.insert(op, slot);
    }

    /// A stream that held something, or that has to be billed, has ended.
    pub(crate) fn settle(&mut self, settlement: Settlement, now_ms: u64) {
        // A slot is freed even if it is not held any more: a renewal may have found it lapsed by mistake of a slow clock.
        self.slots.remove(&settlement.op);
        self.outbox.add(Note::Ended(settlement), now_ms);
    }

    /// What time alone brings about. Called from every tick, and from every request where the host does not tick.
    pub fn passed(&mut self, now_ms: u64) -> Vec<Effect> {
        let mut effects: Vec<Effect> = self.logs.due(now_ms).into_iter().map(Effect::Log).collect();
        if self.unenforced_until_ms.is_some_and(|until_ms| now_ms >= until_ms) {
            self.unenforced_until_ms = None;
            if self.config.mode == Mode::Enforce {
                effects.push(Effect::Enforcing(true));
            }
        }
        if now_ms >= self.reassert_at_ms {
            // Other VMs of the process, and other configurations whose rules have the same name, write to these gauges.
            self.reassert_at_ms = now_ms.saturating_add(REASSERT_MS);
            if self.config.mode == Mode::Shadow || self.unenforced_until_ms.is_some() {
                effects.push(Effect::Enforcing(false));
            }
            if self.breaker.is_open() {
                effects.push(Effect::BreakerOpen(true));
            }
        }
        let is_due = |slot: &HeldSlot| !slot.renewal_waits && now_ms >= slot.renew_at_ms;
        for (op, slot) in self.slots.iter_mut().filter(|(_, slot)| is_due(slot)) {
            slot.renew_at_ms = now_ms.saturating_add(slot.ttl_ms.checked_div(3).unwrap_or(slot.ttl_ms));
            slot.renewal_waits = self.outbox.add(Note::Renew(*op), now_ms);
        }
        effects.extend(self.lease_counts());
        self.tell_of_what_was_dropped(now_ms, &mut effects);
        effects
    }

    fn tell_of_what_was_dropped(&mut self, now_ms: u64, effects: &mut Vec<Effect>) {
        let dropped = self.outbox.take_dropped();
        if dropped == Dropped::default() {
            return;
        }
        let kinds = [
            (
                Some(Counter::OutboxDropped),
                Level::Warn,
                "outbox_dropped",
                dropped.notes,
                "what streams have left behind could not be told to the decision service: what they held lapses by itself",
            ),
            (
                None,
                Level::Error,
                "bill_dropped",
                dropped.bills,
                "what calls have cost could not be told to the decision service: it is added to no month",
            ),
            (
                Some(Counter::UnmeteredDropped),
                Level::Error,
                "unmetered_dropped",
                dropped.unmetered,
                "unmetered admissions could not be told to the decision service: they can't be billed",
            ),
        ];
        for (counter, level, event, count, message) in kinds.into_iter().filter(|(_, _, _, count, _)| *count > 0) {
            effects.extend(counter.map(|counter| Effect::Count(counter, count)));
            let mut line = LogLine::new(level, event, message);
            line.rules = Some(self.config.rules.name.clone());
            line.count = count;
            self.log(line, now_ms, effects);
        }
    }

    /// Its configuration goes, and nobody tells anything any more: what could not be told is, as well as what the gauges
    /// would go on showing. Whoever else has a reason to show it does so again, within a second.
    pub fn farewell(&mut self, now_ms: u64) -> Vec<Effect> {
        let mut effects = Vec::new();
        self.outbox.give_up();
        self.tell_of_what_was_dropped(now_ms, &mut effects);
        effects.extend(self.last_words());
        if self.config.mode == Mode::Shadow || self.unenforced_until_ms.is_some() {
            effects.push(Effect::Enforcing(true));
        }
        if self.breaker.is_open() {
            effects.push(Effect::BreakerOpen(false));
        }
        effects
    }

    /// The next batch for the service, if one may be sent now; its answer goes to [`Self::settled`].
    pub fn settle_callout(&mut self, now_ms: u64) -> Option<Callout> {
        let batch = self.outbox.next_batch(self.config.profile, now_ms)?;
        match serde_json::to_vec(&batch) {
            Ok(body) => Some(Callout {
                path: SETTLE_PATH,
                body,
                trace: None,
                timeout_ms: SETTLE_TIMEOUT_MS,
            }),
            Err(_) => {
                self.outbox.failed(now_ms);
                None
            }
        }
    }

    /// The answer to a batch: its status, if there was an answer at all, and its body.
    pub fn settled(&mut self, status: Option<u16>, body: &[u8], now_ms: u64) -> Vec<Effect> {
        let mut effects = Vec::new();
        let answer = json::read::<SettleAnswer>(body).unwrap_or_default();
        if status != Some(200) {
            if answer.put_down {
                self.outbox.put_down(now_ms);
            } else {
                self.outbox.failed(now_ms);
            }
            return effects;
        }
        for op in self.outbox.delivered() {
            if let Some(slot) = self.slots.get_mut(&op) {
                slot.renewal_waits = false;
            }
        }
        let lost = answer.lost;
        let mut count = 0_u64;
        for op in &lost {
            // Only a stream that still runs has lost anything.
            count = count.saturating_add(u64::from(self.slots.remove(op).is_some()));
        }
        if count > 0 {
            effects.push(Effect::Count(Counter::SlotLost, count));
            let mut line = LogLine::new(
                Level::Warn,
                "slot_lost",
                "a stream goes on without the slot that lapsed under it",
            );
            line.count = count;
            self.log(line, now_ms, &mut effects);
        }
        effects
    }

    /// The next batch is sent without a pause after one that failed: there is no later.
    pub const fn hurry(&mut self) {
        self.outbox.hurry();
    }

    /// Whether everything has been told.
    pub fn is_settled(&self) -> bool {
        self.outbox.is_empty() && self.leases.are_settled()
    }

    /// Lines and counts that were held back, for the end of the VM.
    pub fn last_words(&mut self) -> Vec<Effect> {
        let mut effects: Vec<Effect> = self.logs.drain().into_iter().map(Effect::Log).collect();
        effects.extend(self.lease_counts());
        effects
    }
}
