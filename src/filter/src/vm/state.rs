//! What a VM keeps: roots, streams, callouts, and the batch of each root that is under way.

use core::cell::{Cell, RefCell};
use std::rc::Rc;

use hashbrown::HashMap;
use portcullis_decision::operation::OperationId;

use crate::carrier::{Live, StreamContext};
use crate::host;

/// How long after its time a batch is given up, in milliseconds.
const BATCH_SLACK_MS: u64 = 500;

/// Who waits for a callout.
#[derive(Debug, Clone)]
pub(crate) enum Asker {
    /// A stream, for a decision.
    Stream(u32),
    /// A root context, for its outbox.
    Outbox(u32),
    /// A configuration, for a block of admissions.
    Fetch(Rc<Live>, OperationId),
}

/// A batch of one live configuration.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) live: Rc<Live>,
    pub(super) token: u32,
    /// When the guest stops waiting for the host to tell how it ended.
    pub(super) deadline_ms: u64,
}

#[derive(Debug, Default)]
pub(super) struct Root {
    /// Configurations, the last one in force; earlier ones stay while streams of theirs live.
    pub(super) lives: RefCell<Vec<Rc<Live>>>,
    /// The batch that is under way.
    pub(super) telling: RefCell<Option<Batch>>,
    /// Whose turn it is to tell something, counted up.
    pub(super) turn: Cell<usize>,
    pub(super) is_draining: Cell<bool>,
    pub(super) ticks: Cell<bool>,
}

#[derive(Default)]
pub(super) struct Vm {
    pub(super) roots: RefCell<HashMap<u32, Rc<Root>>>,
    pub(super) streams: RefCell<HashMap<u32, Rc<StreamContext>>>,
    /// Streams whose root had no configuration yet, with their root.
    pub(super) unbound: RefCell<HashMap<u32, u32>>,
    pub(super) callouts: RefCell<HashMap<u32, Asker>>,
    /// Streams that were refused for want of any configuration: one reply each.
    pub(super) unconfigured: RefCell<HashMap<u32, ()>>,
    pub(super) uses_wall_clock: Cell<bool>,
}

thread_local! {
    static VM: Vm = Vm::default();
}

pub(super) fn with<T>(absent: T, f: impl FnOnce(&Vm) -> T) -> T {
    // The VM is only gone after the last callback; then there is nothing left to answer.
    let mut f = Some(f);
    match VM.try_with(|vm| f.take().map(|f| f(vm))) {
        Ok(Some(value)) => value,
        _ => absent,
    }
}

pub(super) fn get<T: Clone>(map: &RefCell<HashMap<u32, T>>, id: u32) -> Option<T> {
    map.try_borrow().ok()?.get(&id).cloned()
}

pub(super) fn put<T>(map: &RefCell<HashMap<u32, T>>, id: u32, value: T) {
    if let Ok(mut map) = map.try_borrow_mut() {
        map.insert(id, value);
    }
}

pub(super) fn take<T>(map: &RefCell<HashMap<u32, T>>, id: u32) -> Option<T> {
    let mut map = map.try_borrow_mut().ok()?;
    // Most of these maps are empty most of the time: then nothing is hashed.
    if map.is_empty() { None } else { map.remove(&id) }
}

/// Milliseconds on one scale for the life of the VM: WASI's monotonic clock or, once that has failed, the host's own.
pub(crate) fn now_ms() -> u64 {
    with(0, |vm| {
        if !vm.uses_wall_clock.get() {
            if let Ok(ns) = host::monotonic_ns() {
                return ns / 1_000_000;
            }
            vm.uses_wall_clock.set(true);
        }
        host::wall_ns().map_or(0, |ns| ns / 1_000_000)
    })
}

/// Notes who waits for a callout.
pub(crate) fn expect_answer(token: u32, asker: Asker) {
    with((), |vm| put(&vm.callouts, token, asker));
}

pub(super) fn root(id: u32) -> Option<Rc<Root>> {
    with(None, |vm| get(&vm.roots, id))
}

impl Root {
    pub(super) fn current(&self) -> Option<Rc<Live>> {
        self.lives.try_borrow().ok()?.last().cloned()
    }

    pub(super) fn all(&self) -> Vec<Rc<Live>> {
        self.lives.try_borrow().map(|lives| lives.clone()).unwrap_or_default()
    }

    /// Sends the next batch, if there is one and none is under way.
    pub(super) fn tell(&self, id: u32) {
        let now_ms = now_ms();
        self.stop_waiting(now_ms);
        if self.telling.try_borrow().map_or(true, |telling| telling.is_some()) {
            return;
        }
        // Each in its turn: one that always has something to tell must not keep the others from it.
        let mut lives = self.all();
        let turn = self.turn.get();
        let first = turn.checked_rem(lives.len()).unwrap_or(0);
        lives.rotate_left(first);
        self.turn.set(turn.wrapping_add(1));
        for live in lives {
            let callout = live
                .gatehouse
                .try_borrow_mut()
                .ok()
                .and_then(|mut house| house.settle_callout(now_ms));
            let Some(callout) = callout else { continue };
            match live.call(&callout) {
                Ok(token) => {
                    expect_answer(token, Asker::Outbox(id));
                    let deadline_ms = now_ms.saturating_add(callout.timeout_ms).saturating_add(BATCH_SLACK_MS);
                    if let Ok(mut telling) = self.telling.try_borrow_mut() {
                        *telling = Some(Batch {
                            live,
                            token,
                            deadline_ms,
                        });
                    }
                    return;
                }
                Err(host::Refused) => settled(&live, None, &[], now_ms),
            }
        }
    }

    /// A host that never tells how a batch ended must not keep the next ones back.
    pub(super) fn stop_waiting(&self, now_ms: u64) {
        let is_over = self
            .telling
            .try_borrow()
            .is_ok_and(|telling| telling.as_ref().is_some_and(|batch| now_ms >= batch.deadline_ms));
        if is_over
            && let Some(batch) = self
                .telling
                .try_borrow_mut()
                .ok()
                .and_then(|mut telling| telling.take())
        {
            with((), |vm| {
                take(&vm.callouts, batch.token);
            });
            settled(&batch.live, None, &[], now_ms);
        }
    }

    /// Forgets configurations that no stream uses any more and that have told everything.
    pub(super) fn retire(&self, now_ms: u64) {
        if let Ok(mut lives) = self.lives.try_borrow_mut() {
            let last = lives.len().saturating_sub(1);
            let is_over = |live: &mut Rc<Live>| {
                Rc::strong_count(live) == 1 && live.gatehouse.try_borrow().is_ok_and(|house| house.is_settled())
            };
            let gone: Vec<_> = lives.extract_if(..last, is_over).collect();
            drop(lives);
            gone.iter().for_each(|live| live.farewell(now_ms));
        }
    }

    pub(super) fn is_settled(&self) -> bool {
        self.all()
            .iter()
            .all(|live| live.gatehouse.try_borrow().is_ok_and(|house| house.is_settled()))
    }
}

pub(super) fn settled(live: &Live, status: Option<u16>, body: &[u8], now_ms: u64) {
    let effects = live
        .gatehouse
        .try_borrow_mut()
        .map(|mut house| house.settled(status, body, now_ms));
    live.carry_out_all(effects.unwrap_or_default());
}
