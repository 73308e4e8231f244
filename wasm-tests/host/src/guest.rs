//! The running module: its callbacks, what they cost, and what the host does after each.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use wasmtime::{Func, Instance, Linker, Store, Val};

use crate::ContextId;
use crate::fault::status::OK;
use crate::headers::headers;
use crate::imports;
use crate::module::compiled;
use crate::personality::{AfterTrap, Personality};
use crate::shared_data::SharedData;
use crate::stream::Phase;
use crate::violation::Violation;
use crate::world::{AfterCall, World};

/// Fuel of one callback: far more than any needs, so that only one that runs without end meets it.
const FUEL: u64 = 20_000_000_000;

/// An instance of the module.
pub(crate) struct Guest {
    pub(crate) store: Store<World>,
    instance: Instance,
    /// With how many results each has.
    exports: HashMap<&'static str, Option<(Func, usize)>>,
}

impl Guest {
    pub(crate) fn new(personality: Personality, seed: u64, shared: Rc<RefCell<SharedData>>) -> Self {
        let (engine, module) = compiled();
        let mut store = Store::new(engine, World::new(personality, seed, shared));
        store.set_fuel(FUEL).expect("fuel is counted");
        let mut linker = Linker::new(engine);
        imports::define(&mut linker).expect("each host call is defined once");
        for import in module.imports() {
            let is_linked = import.module() != imports::ENV || personality.links.contains(import.name());
            let known = is_linked && linker.get_by_import(&mut store, &import).is_some();
            assert!(
                known,
                "the module imports {}.{}, which {} lacks",
                import.module(),
                import.name(),
                personality.name
            );
        }
        let instance = linker.instantiate(&mut store, module).expect("an instance");
        let memory = instance.get_memory(&mut store, "memory");
        let allocate = instance.get_typed_func(&mut store, "proxy_on_memory_allocate").ok();
        store.data_mut().memory = memory;
        store.data_mut().allocate = allocate;
        let mut guest = Self {
            store,
            instance,
            exports: HashMap::new(),
        };
        guest.callback("_initialize", 0, &[]);
        guest
    }

    pub(crate) fn world(&self) -> &World {
        self.store.data()
    }

    pub(crate) fn world_mut(&mut self) -> &mut World {
        self.store.data_mut()
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.world().memory.map_or(0, |memory| memory.data_size(&self.store))
    }

    /// Calls an export with `context` as the effective context, then does what waits for its end. `None`: the module has
    /// no such export, it returns nothing, or it has trapped.
    pub(crate) fn callback(&mut self, name: &'static str, context: ContextId, arguments: &[u32]) -> Option<u32> {
        let returned = self.call(name, context, arguments);
        self.settle();
        returned
    }

    /// Calls an export, and leaves what waits for its end to [`Self::settle`].
    pub(crate) fn call(&mut self, name: &'static str, context: ContextId, arguments: &[u32]) -> Option<u32> {
        if self.world().is_dead {
            return None;
        }
        let (instance, store) = (&self.instance, &mut self.store);
        let export = *self.exports.entry(name).or_insert_with(|| {
            let export = instance.get_func(&mut *store, name)?;
            Some((export, export.ty(&*store).results().len()))
        });
        let (export, results) = export?;
        let limit = self.store.data_mut().fuel.take();
        let given = limit.unwrap_or(FUEL);
        self.store.set_fuel(given).expect("fuel is counted");
        let world = self.store.data_mut();
        (world.callback, world.effective) = (name, context);
        let arguments: Vec<Val> = arguments
            .iter()
            .map(|argument| Val::I32(argument.cast_signed()))
            .collect();
        let mut results = vec![Val::I32(0); results];
        let outcome = export.call(&mut self.store, &arguments, &mut results);
        let left = self.store.get_fuel().expect("fuel is counted");
        let world = self.store.data_mut();
        world.ledger.callback(name, given - left);
        (world.callback, world.effective) = ("", 0);
        if let Err(error) = outcome {
            if limit.is_none() {
                let message = format!("{error:#}");
                world.violate(Violation::Trap {
                    callback: name,
                    message,
                });
            }
            self.die();
            return None;
        }
        results.first().and_then(Val::i32).map(i32::cast_unsigned)
    }

    /// What becomes of the streams of a module that has trapped. What it has asked for before is done all the same, as real
    /// hosts do it while the module still runs.
    fn die(&mut self) {
        let world = self.world_mut();
        world.is_dead = true;
        let asked = std::mem::take(&mut world.after_call);
        let after_trap = world.personality.after_trap;
        for action in asked {
            if let AfterCall::Resume(id) = action {
                self.resume(id);
            }
        }
        for stream in self.world_mut().streams.values_mut().filter(|stream| !stream.is_ended) {
            match (after_trap, stream.phase) {
                (AfterTrap::Forwards, Phase::Paused) => {
                    stream.was_let_go = true;
                    stream.pass();
                }
                // It is not paused yet: the phase of the request fails.
                (AfterTrap::Forwards, Phase::InRequestHeaders) => stream.refuse(500),
                (AfterTrap::Refuses, Phase::Created | Phase::InRequestHeaders | Phase::Paused) => stream.refuse(503),
                _ => {}
            }
        }
    }

    /// What a host does with a paused stream whose call has ended.
    pub(crate) fn let_go_by_itself(&mut self, id: ContextId) {
        let world = self.world_mut();
        if !world.personality.resumes_by_itself || world.has_call_out(id) {
            return;
        }
        if let Some(stream) = world.streams.get_mut(&id)
            && stream.phase == Phase::Paused
            && !stream.is_ended
        {
            stream.was_let_go = true;
            stream.pass();
            self.give_withheld(id);
        }
    }

    /// What Envoy does after a call has returned.
    pub(crate) fn settle(&mut self) {
        loop {
            let actions = std::mem::take(&mut self.world_mut().after_call);
            if actions.is_empty() {
                return;
            }
            for action in actions {
                match action {
                    AfterCall::Reply(id) => self.reply(id),
                    AfterCall::Resume(id) => self.resume(id),
                    AfterCall::Done(id) => self.delete_root(id),
                }
            }
        }
    }

    /// A local reply passes the response callbacks of its own stream.
    fn reply(&mut self, id: ContextId) {
        let Some(stream) = self
            .world_mut()
            .streams
            .get_mut(&id)
            .filter(|stream| !stream.is_deleted)
        else {
            return;
        };
        let Some(reply) = stream.replies.last() else { return };
        let status = reply.status.to_string();
        let length = reply.body.len().to_string();
        stream.response = headers(&[(":status", &status), ("content-length", &length)]);
        stream.response.extend(reply.headers.clone());
        let body_size = u32::try_from(reply.body.len()).unwrap_or(u32::MAX);
        let count = u32::try_from(stream.response.len()).unwrap_or(u32::MAX);
        if !self.world().personality.replies_pass_callbacks {
            return;
        }
        self.call("proxy_on_response_headers", id, &[id, count, u32::from(body_size == 0)]);
        if body_size > 0 {
            let body = self.world().streams.get(&id).and_then(|stream| stream.replies.last());
            let body = body.map(|reply| reply.body.clone()).unwrap_or_default();
            self.give_response(id, &body, true);
        }
    }

    fn resume(&mut self, id: ContextId) {
        if let Some(stream) = self.world_mut().streams.get_mut(&id)
            && !stream.is_ended
            && stream.phase != Phase::Replied
        {
            stream.pass();
            self.give_withheld(id);
        }
    }

    /// What the module has not been shown of the body comes in one piece.
    pub(crate) fn give_withheld(&mut self, id: ContextId) {
        let stream = self.world_mut().streams.get_mut(&id);
        let Some(withheld) = stream.and_then(|stream| stream.withheld.take()) else {
            return;
        };
        if !withheld.body.is_empty() || withheld.ends || !withheld.has_trailers {
            self.give_body(id, &withheld.body, withheld.ends);
        }
        if withheld.has_trailers {
            self.give_trailers(id);
        }
    }

    /// A piece of the request's body, with what the host has kept of it.
    pub(crate) fn give_body(&mut self, id: ContextId, piece: &[u8], ends: bool) {
        let Some(stream) = self.world_mut().streams.get_mut(&id) else {
            return;
        };
        if !stream.is_buffering {
            stream.window.clear();
        }
        stream.window.extend_from_slice(piece);
        let size = u32::try_from(stream.window.len()).unwrap_or(u32::MAX);
        self.request_callback("proxy_on_request_body", id, &[id, size, u32::from(ends)]);
    }

    /// The request's trailers.
    pub(crate) fn give_trailers(&mut self, id: ContextId) {
        self.request_callback("proxy_on_request_trailers", id, &[id, 1]);
    }

    /// A callback that returns whether the request goes on.
    pub(crate) fn request_callback(&mut self, name: &'static str, id: ContextId, arguments: &[u32]) {
        self.world_mut().in_request = Some(id);
        let action = self.call(name, id, arguments);
        self.world_mut().in_request = None;
        self.apply(id, action);
        self.settle();
    }

    /// A piece of the response's body.
    pub(crate) fn give_response(&mut self, id: ContextId, piece: &[u8], ends: bool) {
        let is_shown = self.world().personality.response_bodies;
        let Some(stream) = self.world_mut().streams.get_mut(&id) else {
            return;
        };
        if !is_shown {
            stream.returned_bytes += piece.len() as u64;
            return;
        }
        stream.response_window.clear();
        stream.response_window.extend_from_slice(piece);
        let size = u32::try_from(piece.len()).unwrap_or(u32::MAX);
        self.response_callback("proxy_on_response_body", id, &[id, size, u32::from(ends)]);
        if let Some(stream) = self.world_mut().streams.get_mut(&id) {
            stream.response_window.clear();
            stream.returned_bytes += u64::from(size);
        }
    }

    /// A callback that may look at a response and must let it go on.
    pub(crate) fn response_callback(&mut self, name: &'static str, id: ContextId, arguments: &[u32]) {
        if self.call(name, id, arguments).is_some_and(|action| action != OK) {
            self.world_mut().violate(Violation::HeldResponse(id));
        }
        self.settle();
    }

    /// A root context is gone.
    pub(crate) fn delete_root(&mut self, id: ContextId) {
        self.call("proxy_on_delete", id, &[id]);
        if let Some(root) = self.world_mut().roots.get_mut(&id) {
            root.is_finishing = false;
            root.is_deleted = true;
            root.tick_period_ms = 0;
        }
    }

    /// Applies what a request callback has returned to its stream.
    fn apply(&mut self, id: ContextId, action: Option<u32>) {
        // A trap returns nothing, and lets nothing through.
        let held = action.is_none_or(|action| action != OK);
        let world = self.world_mut();
        let is_out = world.has_decision_out(id);
        let was_offered = world.offered.contains(&id);
        let is_dead = world.is_dead;
        let is_disowned = world.disowned.contains(&id);
        let dies_of_idle_pause = world.personality.dies_of_idle_pause && !world.has_call_out(id);
        let Some(stream) = world.streams.get_mut(&id) else {
            return;
        };
        // More of the body is to come, or an answer came that could not be carried out: the module has its deadline.
        let sent = &world.sent;
        let was_asked = || sent.iter().any(|callout| callout.context == id && callout.is_decide());
        let has_reason = is_out
            || was_offered
            || is_disowned
            || is_dead
            || !stream.has_sent_all
            || (stream.phase == Phase::Paused && was_asked());
        if stream.host_status.is_some() {
            return;
        }
        let violation = match (stream.phase, held) {
            (Phase::Created | Phase::InRequestHeaders | Phase::Paused, true) if dies_of_idle_pause && !is_dead => {
                Some(Violation::PauseWithoutReason(id))
            }
            (Phase::Replied, false) => Some(Violation::PassAfterReply(id)),
            (Phase::Paused, false) if stream.resumes > 0 => Some(Violation::SecondResume(id)),
            // A resume that was offered and not taken, or a stream that a fault has called gone: the wait is over.
            (Phase::Paused | Phase::InRequestHeaders, false) if is_out && !was_offered && !is_disowned => {
                Some(Violation::PassWhileUndecided(id))
            }
            (Phase::Created | Phase::InRequestHeaders | Phase::Paused, true) if !has_reason => {
                Some(Violation::PauseWithoutReason(id))
            }
            (Phase::Passed, true) => Some(Violation::PauseWithoutReason(id)),
            _ => None,
        };
        stream.is_buffering = held;
        match (stream.phase, held) {
            (Phase::Created | Phase::InRequestHeaders, true) => stream.phase = Phase::Paused,
            (Phase::Created | Phase::InRequestHeaders | Phase::Paused, false) => stream.pass(),
            (Phase::Passed, false) => stream.forward(),
            _ => {}
        }
        world.violations.extend(violation);
    }
}
