//! The steps of a charge over several groups.
//!
//! 1. All groups are looked at, together with the operation's directory. A denial that shows here costs nobody anything.
//! 2. The directory is written: from here on the operation can be given back by its id, whatever becomes of this process.
//! 3. Each group is charged in one atomic step, in the order of precedence. A block is of the size that every group allows, by
//!    the look; a group in which there is less by now denies it, and only one admission is asked for.
//! 4. Of several groups, the directory notes that all are charged. If one denied, it notes that, and the others go back.
//!
//! A second process that charges the same operation joins the same attempt. Steps 2 and 4 are where the two meet.

use std::sync::Arc;
use std::time::Duration;

use portcullis_decision::charge::{BlockAsk, ChargeEntry, ChargePlan, Charged, EntryState};
use portcullis_decision::operation::OperationId;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout_at};

use super::directory::{Directory, Found, HOMES, State, home};
use super::errand::{PAUSE, TRIES};
use super::slot::tag_of;
use super::{Call, ClusterLimiter, Place, StoreFault, Verb};
use crate::after;
use crate::limiter::redis::script::{Answer as Words, counter};

/// Attempts at one charge: a block that did not fit, and others of the same operation, may each take one.
const ROUNDS: u8 = 5;
/// One hash tag of a plan, and the places of its entries.
struct Group {
    tag: String,
    entries: Vec<usize>,
}

impl Group {
    fn of(plan: &ChargePlan) -> Vec<Self> {
        let mut groups: Vec<Self> = Vec::new();
        for (at, entry) in plan.entries.iter().enumerate() {
            let tag = format!("{{{}}}", tag_of(&entry.key).unwrap_or_default());
            match groups.iter_mut().find(|group| group.tag == tag) {
                Some(group) => group.entries.push(at),
                None => groups.push(Self { tag, entries: vec![at] }),
            }
        }
        groups
    }

    fn plan(&self, whole: &ChargePlan, block: Option<BlockAsk>) -> ChargePlan {
        ChargePlan {
            op: whole.op,
            entries: self
                .entries
                .iter()
                .filter_map(|at| whole.entries.get(*at))
                .cloned()
                .collect(),
            block,
        }
    }

    fn put(&self, into: &mut [EntryState], states: &[EntryState]) {
        for (at, state) in self.entries.iter().zip(states) {
            if let Some(place) = into.get_mut(*at) {
                *place = *state;
            }
        }
    }
}

/// What a look at all groups showed.
struct Sight {
    states: Vec<EntryState>,
    /// The entries that could not be looked at, and why.
    lost: Vec<(usize, StoreFault)>,
}

impl Sight {
    /// Whether the plan is denied for certain: by a gate that comes before every one of which something is not known, or by
    /// the same. A denial that is known is never an outage.
    fn is_denial(&self, plan: &ChargePlan) -> bool {
        let Some(first) = self.states.iter().position(|state| state.exhausted) else {
            return false;
        };
        let gate = |at: usize| plan.entries.get(at).map(|entry| entry.gate);
        self.lost.iter().all(|(at, _)| *at > first || gate(*at) == gate(first))
    }
}

/// How an attempt ended in the groups.
enum Outcome {
    Charged {
        admissions: Option<u64>,
        states: Vec<EntryState>,
    },
    Denied,
    /// A group takes nothing more under this attempt.
    Over,
}

fn untouched(entry: &ChargeEntry) -> EntryState {
    EntryState {
        used: 0,
        reset_ms: entry.window_s.saturating_mul(1000),
        exhausted: false,
    }
}

impl ClusterLimiter {
    pub(super) async fn charge_groups(
        &self,
        plan: &ChargePlan,
        slot_ttl: Duration,
        deadline: Instant,
    ) -> Result<Charged, StoreFault> {
        let groups = Group::of(plan);
        let own = plan.asked_block().map_or(1, |ask| u64::from(!ask.ahead));
        let (mut only_own, mut over) = (false, None);
        for _ in 0..ROUNDS {
            let (found, mut sight) = tokio::join!(
                self.find_home(plan.op, deadline),
                self.look(plan, &groups, slot_ttl, deadline)
            );
            let found = found?;
            if found.directory.state == State::Cancelled {
                return Ok(Charged::Cancelled);
            }
            let is_known = found.directory.is_live();
            if !is_known && sight.is_denial(plan) {
                return Ok(Charged::Denied(sight.states));
            }
            if let Some((_, fault)) = sight.lost.first() {
                return Err(if is_known {
                    fault.after(StoreFault::Connection)
                } else {
                    *fault
                });
            }
            let size = match plan.asked_block() {
                Some(ask) if !only_own => ask.size(plan.entries.iter().zip(&sight.states)),
                _ => own,
            };
            if size == 0 && !is_known {
                return Ok(Charged::Block {
                    admissions: 0,
                    states: sight.states,
                });
            }
            let claim = self.claim(plan, slot_ttl, size, found.home, deadline).await?;
            match claim.directory.state {
                State::Cancelled => return Ok(Charged::Cancelled),
                State::Open | State::Charged => {}
                State::Absent | State::Denied => return Err(StoreFault::NotSensible),
            }
            let attempt = claim.directory.attempt;
            match self.attempt(plan, &claim, &mut sight, slot_ttl, deadline).await? {
                Outcome::Charged { admissions, states } => {
                    match self.conclude(plan.op, &claim, deadline).await? {
                        State::Charged => {}
                        State::Cancelled => return Ok(Charged::Cancelled),
                        // Another process was denied in the same attempt, and has said so first.
                        State::Open | State::Denied => {
                            self.undo(plan.op, claim, deadline).await;
                            continue;
                        }
                        // Nobody could give it back by its id.
                        State::Absent => {
                            self.undo(plan.op, claim, deadline).await;
                            return Err(StoreFault::NotSensible);
                        }
                    }
                    return Ok(match plan.asked_block() {
                        Some(_) => Charged::Block {
                            admissions: admissions.unwrap_or(claim.directory.size),
                            states,
                        },
                        None => Charged::Granted(states),
                    });
                }
                Outcome::Denied if claim.directory.groups(attempt).len() <= 1 => {
                    return Ok(Charged::Denied(sight.states));
                }
                // It had been charged, and the cluster has lost it.
                Outcome::Denied if claim.directory.state == State::Charged => return Err(StoreFault::NotSensible),
                Outcome::Denied => {
                    match self.note(plan.op, &claim, Verb::Retire { attempt }, deadline).await? {
                        // Another process has charged it meanwhile.
                        State::Charged => continue,
                        State::Cancelled => return Ok(Charged::Cancelled),
                        State::Absent | State::Open | State::Denied => {}
                    }
                    let was_block = claim.directory.size > own;
                    self.undo(plan.op, claim, deadline).await;
                    if !was_block {
                        return Ok(Charged::Denied(sight.states));
                    }
                    only_own = true;
                }
                // Once may be another process that was denied; an attempt that is still open was cancelled.
                Outcome::Over if over == Some(attempt) => return Ok(Charged::Cancelled),
                Outcome::Over => over = Some(attempt),
            }
        }
        Err(StoreFault::NotSensible)
    }

    /// The first home of an operation that can be reached, and what it says.
    async fn find_home(&self, op: OperationId, deadline: Instant) -> Result<Found, StoreFault> {
        let mut fault = StoreFault::ClusterDown;
        for at in 0..HOMES {
            let kept_for = Duration::ZERO;
            match self.directory(op, at, Verb::Find { kept_for }, deadline).await {
                Ok(directory) => return Ok(Found { home: at, directory }),
                Err(lost) => fault = lost,
            }
        }
        Err(fault)
    }

    async fn directory(
        &self,
        op: OperationId,
        at: u16,
        verb: Verb<'_>,
        deadline: Instant,
    ) -> Result<Directory, StoreFault> {
        let words = self
            .ask_one(Call::directory(home(&self.prefix, op, at), op, verb), deadline)
            .await?;
        Directory::read(&words).ok_or(StoreFault::NotSensible)
    }

    async fn ask_one(&self, call: Call, deadline: Instant) -> Result<Words, StoreFault> {
        let answer = self.members.ask_all(&[call], deadline).await.into_iter().next();
        answer.unwrap_or(Err(StoreFault::NotSensible))
    }

    async fn look(&self, plan: &ChargePlan, groups: &[Group], slot_ttl: Duration, deadline: Instant) -> Sight {
        let call = |group: &Group| {
            let at = Place {
                prefix: &self.prefix,
                op: plan.op,
                group: Some((&group.tag, "")),
                counters: &[],
            };
            Call::look(&at, &group.plan(plan, None), slot_ttl)
        };
        let calls: Vec<Call> = groups.iter().map(call).collect();
        let mut sight = Sight {
            states: plan.entries.iter().map(untouched).collect(),
            lost: Vec::new(),
        };
        for (group, answer) in groups.iter().zip(self.members.ask_all(&calls, deadline).await) {
            let looked = answer.and_then(|words| words.looked(group.entries.len()).ok_or(StoreFault::NotSensible));
            match looked {
                Ok(Some(states)) => group.put(&mut sight.states, &states),
                // A former attempt is over there. What the directory says counts.
                Ok(None) => {}
                Err(fault) => sight.lost.extend(group.entries.iter().map(|at| (*at, fault))),
            }
        }
        sight.lost.sort_by_key(|(at, _)| *at);
        sight
    }

    async fn claim(
        &self,
        plan: &ChargePlan,
        slot_ttl: Duration,
        size: u64,
        at: u16,
        deadline: Instant,
    ) -> Result<Found, StoreFault> {
        let keys: Vec<String> = plan.entries.iter().map(|entry| counter(&self.prefix, entry)).collect();
        let windows = plan.entries.iter().map(|entry| Duration::from_secs(entry.window_s));
        let kept_for = windows.fold(slot_ttl, Duration::max);
        let verb = Verb::Claim {
            kept_for,
            size,
            keys: &keys,
        };
        let directory = self.directory(plan.op, at, verb, deadline).await?;
        Ok(Found { home: at, directory })
    }

    /// Charges the groups of an attempt, in order, up to one that denies: then its states are in sight.
    ///
    /// # Errors
    /// A group that gives no answer. Something may be charged by then.
    async fn attempt(
        &self,
        plan: &ChargePlan,
        claim: &Found,
        sight: &mut Sight,
        slot_ttl: Duration,
        deadline: Instant,
    ) -> Result<Outcome, StoreFault> {
        let attempt = claim.directory.attempt;
        let label = claim.label(attempt);
        let groups = claim.directory.groups(attempt);
        let is_alone = groups.len() <= 1;
        let block = plan.asked_block().map(|ask| {
            // A group on its own says by itself how large the block is.
            let settled = BlockAsk {
                most: claim.directory.size,
                parts: 1,
                ahead: ask.ahead,
            };
            if is_alone { ask } else { settled }
        });
        let mut states: Vec<EntryState> = sight.states.clone();
        // This operation has been let in, so nothing of it is exhausted, whatever others have used since.
        states.iter_mut().for_each(|state| state.exhausted = false);
        let mut admissions: Option<u64> = None;
        for (tag, _) in groups {
            let of_tag = |(at, entry): (usize, &ChargeEntry)| {
                let is_its = tag_of(&entry.key).is_some_and(|own| tag.get(1..tag.len().saturating_sub(1)) == Some(own));
                is_its.then_some(at)
            };
            let entries = plan.entries.iter().enumerate().filter_map(of_tag).collect();
            let group = Group { tag, entries };
            let part = group.plan(plan, block);
            let at = Place {
                prefix: &self.prefix,
                op: plan.op,
                group: Some((&group.tag, &label)),
                counters: &[],
            };
            let call = if is_alone {
                Call::charge(&at, &part, slot_ttl)
            } else {
                Call::charge_exactly(&at, &part, slot_ttl)
            };
            let words = self.ask_one(call, deadline).await;
            let words = words.map_err(|fault| fault.after(StoreFault::Connection))?;
            match words.charged(&part).ok_or(StoreFault::NotSensible)? {
                Charged::Granted(now) => group.put(&mut states, &now),
                Charged::Block {
                    admissions: size,
                    states: now,
                } => {
                    group.put(&mut states, &now);
                    admissions = Some(admissions.map_or(size, |least| least.min(size)));
                }
                Charged::Denied(now) => {
                    group.put(&mut sight.states, &now);
                    return Ok(Outcome::Denied);
                }
                Charged::Cancelled => return Ok(Outcome::Over),
            }
        }
        Ok(Outcome::Charged { admissions, states })
    }

    /// Notes that every group is charged. One group on its own needs no note: its record is one.
    async fn conclude(&self, op: OperationId, claim: &Found, deadline: Instant) -> Result<State, StoreFault> {
        let attempt = claim.directory.attempt;
        if claim.directory.state == State::Charged || claim.directory.groups(attempt).len() <= 1 {
            return Ok(State::Charged);
        }
        self.note(op, claim, Verb::Commit { attempt }, deadline).await
    }

    /// Notes how an attempt has ended; how it is then. Another one that has begun since says that this one is over.
    ///
    /// # Errors
    /// No answer, while something is charged.
    async fn note(
        &self,
        op: OperationId,
        claim: &Found,
        verb: Verb<'_>,
        deadline: Instant,
    ) -> Result<State, StoreFault> {
        let noted = self.directory(op, claim.home, verb, deadline).await;
        let noted = noted.map_err(|fault| fault.after(StoreFault::Connection))?;
        let is_same = noted.attempt == claim.directory.attempt;
        Ok(match noted.state {
            State::Charged if !is_same => State::Denied,
            state => state,
        })
    }

    /// Gives back what an attempt took that is over, and goes on trying for a while by itself. Waits for the first try only,
    /// and not to the very end: what there is to say has been decided.
    async fn undo(&self, op: OperationId, claim: Found, deadline: Instant) {
        let (first, is_tried) = oneshot::channel();
        let Ok(permit) = Arc::clone(&self.undoing).try_acquire_owned() else {
            return;
        };
        let (members, prefix) = (Arc::clone(&self.members), self.prefix.clone());
        tokio::spawn(async move {
            let _permit = permit;
            let mut first = Some(first);
            let calls = claim.cancels_of(&prefix, op, claim.directory.attempt);
            for _ in 0..TRIES {
                let until = after(Instant::now(), PAUSE);
                let answers = members.ask_all(&calls, until).await;
                if let Some(first) = first.take() {
                    // Whoever waited may have gone.
                    let _ = first.send(());
                }
                if answers
                    .iter()
                    .all(|answer| answer.as_ref().is_ok_and(|words| words.done().is_some()))
                {
                    return;
                }
                sleep(PAUSE).await;
            }
        });
        let left = deadline.saturating_duration_since(Instant::now());
        let until = after(Instant::now(), left.checked_div(2).unwrap_or_default());
        drop(timeout_at(until, is_tried).await);
    }
}
