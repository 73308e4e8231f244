//! What becomes of operations after their charge: cancels, settlements, returned parts, renewals. All of them know an id, find
//! its directory, and run a script in each group that stands there.
//!
//! A member that is lost must not hold up what concerns the others, which may be of another kind and asked for after these.
//! So what could not be done, though a home of these operations answered, is taken over and tried again here, for a while;
//! whoever asked is told that it is done. If no home answered at all, who asked is told that, and asks again.

use std::sync::Arc;
use std::time::Duration;

use portcullis_decision::ledger::Settled;
use portcullis_decision::operation::OperationId;
use portcullis_decision::wire::Return;
use tokio::time::{Instant, sleep};

use super::directory::{Directory, Found, HOMES, State, home};
use super::{Call, ClusterLimiter, Place, StoreFault, Verb};
use crate::after;
use crate::limiter::redis::script::{Answer as Words, after_grace};

/// Between two tries, and how often: by then what is not given back has mostly lapsed.
pub(super) const PAUSE: Duration = Duration::from_secs(1);
pub(super) const TRIES: u8 = 60;

/// What is to be done about one operation.
#[derive(Debug, Clone, Copy)]
pub(super) enum Errand {
    Cancel(OperationId),
    Settle(Settled),
    Part(Return),
    Renew(OperationId, Duration),
}

impl Errand {
    const fn op(&self) -> OperationId {
        match self {
            Self::Cancel(op) | Self::Renew(op, _) => *op,
            Self::Settle(settled) => settled.op,
            Self::Part(part) => part.lease,
        }
    }

    fn call(&self, at: &Place<'_>) -> Call {
        match self {
            Self::Cancel(_) => Call::cancel(at),
            Self::Settle(settled) => Call::settle(at, settled.tokens),
            Self::Part(part) => Call::part(at, *part),
            Self::Renew(_, slot_ttl) => Call::renew(at, *slot_ttl),
        }
    }

    /// How long its directory is kept, if it is to be kept longer.
    const fn kept_for(&self) -> Duration {
        match self {
            Self::Renew(_, slot_ttl) => after_grace(*slot_ttl),
            Self::Cancel(_) | Self::Settle(_) | Self::Part(_) => Duration::ZERO,
        }
    }
}

/// What became of errands.
pub(super) struct Said<T> {
    /// Of each, in their order.
    pub(super) each: Vec<Result<T, StoreFault>>,
    /// Whether any home of any of them answered. If so, what failed concerns a part of the cluster and not all of it.
    pub(super) is_reached: bool,
}

/// The calls that errands take, and whose they are.
#[derive(Default)]
struct Calls {
    calls: Vec<Call>,
    of: Vec<usize>,
}

impl ClusterLimiter {
    /// Carries out errands of one kind, or sees to it that they will be.
    pub(super) async fn carry_out(&self, errands: Vec<Errand>, deadline: Instant) -> Result<(), StoreFault> {
        let done = self.try_all(&errands, deadline).await;
        let failed = failed(&errands, &done.each);
        match done.each.into_iter().find_map(Result::err) {
            Some(fault) if !done.is_reached => Err(fault),
            Some(_) => {
                self.go_on_with(failed);
                Ok(())
            }
            None => Ok(()),
        }
    }

    async fn try_all(&self, errands: &[Errand], deadline: Instant) -> Said<()> {
        let done = |words: &Words| words.done().is_some();
        let all_done = |said: Vec<Words>| said.iter().all(done).then_some(()).ok_or(StoreFault::NotSensible);
        let said = self.ask_groups(errands, deadline).await;
        Said {
            each: said.each.into_iter().map(|said| said.and_then(all_done)).collect(),
            is_reached: said.is_reached,
        }
    }

    fn go_on_with(&self, mut errands: Vec<Errand>) {
        errands.truncate(self.undoing.available_permits());
        let count = u32::try_from(errands.len()).unwrap_or(u32::MAX);
        let Ok(permit) = Arc::clone(&self.undoing).try_acquire_many_owned(count) else {
            return;
        };
        let limiter = self.clone();
        tokio::spawn(async move {
            let _permit = permit;
            for _ in 0..TRIES {
                sleep(PAUSE).await;
                let done = limiter.try_all(&errands, after(Instant::now(), PAUSE)).await;
                errands = failed(&errands, &done.each);
                if errands.is_empty() {
                    return;
                }
            }
        });
    }

    /// Runs the script of each errand in the groups of its operation. What they say; nothing where nothing is charged.
    pub(super) async fn ask_groups(&self, errands: &[Errand], deadline: Instant) -> Said<Vec<Words>> {
        let mut said = Said {
            each: errands.iter().map(|_| Ok(Vec::new())).collect(),
            is_reached: false,
        };
        let calls = if matches!(errands.first(), Some(Errand::Cancel(_))) {
            self.cancels(errands, &mut said, deadline).await
        } else {
            self.in_groups(errands, &mut said, deadline).await
        };
        for (i, answer) in calls
            .of
            .into_iter()
            .zip(self.members.ask_all(&calls.calls, deadline).await)
        {
            match (answer, said.each.get_mut(i)) {
                (Ok(words), Some(Ok(said))) => said.push(words),
                (Err(lost), Some(said)) => *said = Err(lost),
                (Ok(_), _) | (Err(_), None) => {}
            }
        }
        said
    }

    async fn in_groups(&self, errands: &[Errand], said: &mut Said<Vec<Words>>, deadline: Instant) -> Calls {
        let mut calls = Calls::default();
        let found = self.find(errands, deadline).await;
        said.is_reached = found.is_reached;
        for (i, (errand, found)) in errands.iter().zip(found.each).enumerate() {
            let found = match found {
                Ok(Some(found)) if found.directory.is_live() => found,
                Ok(_) => continue,
                Err(lost) => {
                    if let Some(said) = said.each.get_mut(i) {
                        *said = Err(lost);
                    }
                    continue;
                }
            };
            let label = found.label(found.directory.attempt);
            for (tag, counters) in found.directory.groups(found.directory.attempt) {
                let place = Place {
                    prefix: &self.prefix,
                    op: errand.op(),
                    group: Some((&tag, &label)),
                    counters: &counters,
                };
                calls.calls.push(errand.call(&place));
                calls.of.push(i);
            }
        }
        calls
    }

    /// Marks all homes, so that what comes later finds the mark, and gives back all attempts that stand in any.
    async fn cancels(&self, errands: &[Errand], said: &mut Said<Vec<Words>>, deadline: Instant) -> Calls {
        let mut marks = Vec::new();
        for errand in errands {
            let op = errand.op();
            marks.extend((0..HOMES).map(|at| Call::directory(home(&self.prefix, op, at), op, Verb::Cancel)));
        }
        let mut answers = self.members.ask_all(&marks, deadline).await.into_iter();
        let mut calls = Calls::default();
        for (i, (errand, each)) in errands.iter().zip(&mut said.each).enumerate() {
            let (mut is_found, mut lost) = (false, None);
            for (at, answer) in (0..HOMES).zip(answers.by_ref()) {
                match answer.and_then(|words| Directory::read(&words).ok_or(StoreFault::NotSensible)) {
                    Ok(directory) => {
                        said.is_reached = true;
                        is_found |= !directory.keys.is_empty();
                        for call in (Found { home: at, directory }).cancels(&self.prefix, errand.op()) {
                            calls.calls.push(call);
                            calls.of.push(i);
                        }
                    }
                    Err(fault) => lost = Some(fault),
                }
            }
            // What was charged stands in one directory. If that is out of reach, it has to be asked for again.
            if let Some(lost) = lost.filter(|_| !is_found) {
                *each = Err(lost);
            }
        }
        calls
    }

    /// The directories of operations, wherever they are. `None` for one that has none.
    async fn find(&self, errands: &[Errand], deadline: Instant) -> Said<Option<Found>> {
        let mut found: Vec<Result<Option<Found>, StoreFault>> = errands.iter().map(|_| Ok(None)).collect();
        let mut is_reached = false;
        for at in 0..HOMES {
            let is_open = |found: &Result<Option<Found>, StoreFault>| !matches!(found, Ok(Some(_)));
            let (mut open, mut calls) = (Vec::new(), Vec::new());
            for (i, errand) in errands.iter().enumerate() {
                if found.get(i).is_some_and(is_open) {
                    let (op, kept_for) = (errand.op(), errand.kept_for());
                    calls.push(Call::directory(home(&self.prefix, op, at), op, Verb::Find { kept_for }));
                    open.push(i);
                }
            }
            let answers = self.members.ask_all(&calls, deadline).await;
            for (i, answer) in open.into_iter().zip(answers) {
                let directory = answer.and_then(|words| Directory::read(&words).ok_or(StoreFault::NotSensible));
                is_reached |= directory.is_ok();
                let Some(place) = found.get_mut(i) else { continue };
                match directory {
                    Ok(directory) if directory.state == State::Absent => {}
                    Ok(directory) => *place = Ok(Some(Found { home: at, directory })),
                    // It may be there, or at the next.
                    Err(fault) => *place = Err(fault),
                }
            }
        }
        Said {
            each: found,
            is_reached,
        }
    }
}

fn failed(errands: &[Errand], done: &[Result<(), StoreFault>]) -> Vec<Errand> {
    let failed = errands.iter().zip(done).filter(|(_, done)| done.is_err());
    failed.map(|(errand, _)| *errand).collect()
}
