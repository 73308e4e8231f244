//! The running module: its callbacks, what they cost, and what the host does after each.

use std::collections::HashMap;

use wasmtime::{Func, Instance, Linker, Store, Val};

use crate::ContextId;
use crate::fault::status::OK;
use crate::headers::headers;
use crate::imports;
use crate::module::compiled;
use crate::personality::Personality;
use crate::stream::Phase;
use crate::violation::Violation;
use crate::world::{AfterCall, World};

/// Fuel of one callback: far more than any needs, so that only one that runs without end meets it.
const FUEL: u64 = 20_000_000_000;

/// An instance of the module.
pub(crate) struct Guest {
    pub(crate) store: Store<World>,
    instance: Instance,
    exports: HashMap<&'static str, Option<Func>>,
}

impl Guest {
    pub(crate) fn new(personality: Personality, seed: u64) -> Self {
        let (engine, module) = compiled();
        let mut store = Store::new(engine, World::new(personality, seed));
        store.set_fuel(FUEL).expect("fuel is counted");
        let mut linker = Linker::new(engine);
        imports::define(&mut linker).expect("each host call is defined once");
        for import in module.imports() {
            let known = linker.get_by_import(&mut store, &import).is_some();
            assert!(
                known,
                "the module imports {}.{}, which this host lacks",
                import.module(),
                import.name()
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
        let export = *self
            .exports
            .entry(name)
            .or_insert_with(|| instance.get_func(store, name));
        let export = export?;
        self.store.set_fuel(FUEL).expect("fuel is counted");
        let world = self.store.data_mut();
        (world.callback, world.effective) = (name, context);
        let arguments: Vec<Val> = arguments
            .iter()
            .map(|argument| Val::I32(argument.cast_signed()))
            .collect();
        let mut results = vec![Val::I32(0); export.ty(&self.store).results().len()];
        let outcome = export.call(&mut self.store, &arguments, &mut results);
        let left = self.store.get_fuel().expect("fuel is counted");
        let world = self.store.data_mut();
        world.ledger.callback(name, FUEL - left);
        (world.callback, world.effective) = ("", 0);
        if let Err(error) = outcome {
            world.is_dead = true;
            world.after_call.clear();
            let message = format!("{error:#}");
            world.violate(Violation::Trap {
                callback: name,
                message,
            });
            return None;
        }
        results.first().and_then(Val::i32).map(i32::cast_unsigned)
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
        self.call("proxy_on_response_headers", id, &[id, count, u32::from(body_size == 0)]);
        if body_size > 0 {
            self.call("proxy_on_response_body", id, &[id, body_size, 1]);
        }
    }

    fn resume(&mut self, id: ContextId) {
        if let Some(stream) = self.world_mut().streams.get_mut(&id)
            && !stream.is_ended
            && stream.phase != Phase::Replied
        {
            stream.pass();
        }
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
    pub(crate) fn apply(&mut self, id: ContextId, action: Option<u32>) {
        // A trap returns nothing, and lets nothing through.
        let held = action.is_none_or(|action| action != OK);
        let world = self.world_mut();
        let is_out = world.has_decision_out(id);
        let has_reason = is_out || world.offered.contains(&id) || world.is_dead;
        let Some(stream) = world.streams.get_mut(&id) else {
            return;
        };
        let violation = match (stream.phase, held) {
            (Phase::Replied, false) => Some(Violation::PassAfterReply(id)),
            (Phase::Paused, false) => Some(Violation::PassWhileUndecided(id)),
            (Phase::InRequestHeaders, false) if is_out => Some(Violation::PassWhileUndecided(id)),
            (Phase::Created | Phase::InRequestHeaders, true) if !has_reason => Some(Violation::PauseWithoutReason(id)),
            (Phase::Passed, true) => Some(Violation::PauseWithoutReason(id)),
            _ => None,
        };
        match (stream.phase, held) {
            (Phase::Created | Phase::InRequestHeaders, true) => stream.phase = Phase::Paused,
            (Phase::Created | Phase::InRequestHeaders | Phase::Paused, false) => stream.pass(),
            _ => {}
        }
        world.violations.extend(violation);
    }
}
