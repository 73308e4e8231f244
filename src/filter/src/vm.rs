//! One VM: its root contexts, streams and callouts, and what each callback of the host means.
//!
//! Calls are accepted in any order and for any id. A stream that nobody announced is undecided, and undecided is answered
//! by the rules; without any rules it is refused.

mod state;

pub(crate) use state::{Asker, expect_answer, now_ms};
use state::{Batch, Root, Vm, get, put, root, settled, take, with};

use std::rc::Rc;

use portcullis_decision::class::Code;
use portcullis_decision::config::FilterConfig;
use portcullis_decision::gatehouse::Gatehouse;
use portcullis_decision::log_line::{Level, LogLine};
use portcullis_decision::reply::Refusal;
use portcullis_decision::stream::{CalloutAnswer, RequestHead, Stream, Wait};
use portcullis_decision::verdict::Unavailability;
use portcullis_decision::wire::LARGEST_ANSWER;

use crate::carrier::{Live, StreamContext};
use crate::header_map;
use crate::host::{self, Buffer, Map};
use crate::memory::HostMemory;

/// How often the guest looks at its deadlines and its outbox, in milliseconds.
const TICK_MS: u32 = 20;
/// Largest configuration that is read, in bytes.
const LARGEST_CONFIGURATION: usize = 16 * 1024 * 1024;
/// Streams that one tick looks at: a bound on the tick, not on the streams.
const STREAMS_PER_TICK: usize = 4_096;
/// Most of a body that is copied into the VM at once, in bytes.
const PIECE: usize = 64 * 1024;

/// What a callback returns for a request: `0` lets it go on, `1` holds it.
type Held = bool;

/// A root context (without a parent), or a stream of one.
pub(crate) fn on_context_create(context: u32, parent: u32) {
    with((), |vm| {
        if parent == 0 {
            if get(&vm.roots, context).is_none() {
                put(&vm.roots, context, Rc::new(Root::default()));
            }
        } else if get(&vm.streams, context).is_none() {
            match get(&vm.roots, parent).and_then(|root| root.current()) {
                Some(live) => {
                    bind(vm, context, live);
                }
                None => put(&vm.unbound, context, parent),
            }
        }
    });
}

/// A stream lives under the configuration that is in force as it begins.
fn bind(vm: &Vm, context: u32, live: Rc<Live>) -> Rc<StreamContext> {
    let stream = Rc::new(StreamContext::new(live, Stream::default()));
    put(&vm.streams, context, Rc::clone(&stream));
    stream
}

/// Reads the configuration. False refuses it, after a line that lists every fault.
pub(crate) fn on_configure(context: u32) -> bool {
    on_context_create(context, 0);
    let Some(root) = root(context) else { return false };
    let text = host::buffer(Buffer::PluginConfiguration, 0, LARGEST_CONFIGURATION).unwrap_or_default();
    let config = match FilterConfig::parse(&text) {
        Ok(config) => config,
        Err(faults) => {
            for fault in faults.iter() {
                let line = LogLine::new(Level::Error, "configuration_rejected", fault.to_string());
                host::log(line.level, &line.to_json());
            }
            return false;
        }
    };
    // Asked once for each root context: it goes on ticking, and one host traps at a second time.
    let ticks = root.ticks.get() || host::set_tick_period_ms(TICK_MS).is_ok();
    if let Some(line) = config.unfit_for_host(ticks) {
        host::log(line.level, &line.to_json());
        if line.level == Level::Error {
            return false;
        }
    }
    let live = Rc::new(Live::new(Gatehouse::new(config, &text).with_ticks(ticks)));
    let effects = live.gatehouse.try_borrow().map(|house| house.started());
    live.carry_out_all(effects.unwrap_or_default());
    root.ticks.set(ticks);
    live.ticks.set(ticks);
    if let Ok(mut lives) = root.lives.try_borrow_mut() {
        lives.push(live);
    }
    true
}

/// The stream of a context; one that nobody announced is bound now, if there is a configuration to bind it to.
fn stream(context: u32) -> Option<Rc<StreamContext>> {
    with(None, |vm| {
        if let Some(stream) = get(&vm.streams, context) {
            return Some(stream);
        }
        let parent = take(&vm.unbound, context);
        let live = match parent.and_then(|parent| get(&vm.roots, parent)) {
            Some(root) => root.current(),
            None => only_live(vm),
        };
        let Some(live) = live else {
            if let Some(parent) = parent {
                put(&vm.unbound, context, parent);
            }
            return None;
        };
        Some(bind(vm, context, live))
    })
}

/// The configuration of the only root, if there is only one.
fn only_live(vm: &Vm) -> Option<Rc<Live>> {
    let roots = vm.roots.try_borrow().ok()?;
    let mut roots = roots.values();
    let only = roots.next()?;
    if roots.next().is_some() { None } else { only.current() }
}

/// Without a configuration there are no rules, and without rules nothing passes.
fn refuse_without_rules(context: u32) {
    if with(true, |vm| get(&vm.unconfigured, context).is_some()) {
        return;
    }
    with((), |vm| put(&vm.unconfigured, context, ()));
    let unavailable = Unavailability {
        dependency: portcullis_decision::class::Dependency::Decision,
        gate: None,
    };
    let reply = Refusal::Unavailable(unavailable).reply(None, None);
    let fields: Vec<(&str, &str)> = reply
        .headers
        .iter()
        .map(|(name, value)| (*name, value.as_str()))
        .collect();
    let _ = host::send_local_response(reply.status, &reply.body, &header_map::serialize(&fields), -1);
    let mut line = LogLine::new(
        Level::Error,
        "unconfigured",
        "a request came before any configuration: refused",
    );
    line.code = Some(Code::ServiceDegraded.name());
    host::log(line.level, &line.to_json());
}

/// The request's headers. `ends_here`: no body follows, as the host says.
pub(crate) fn on_request_headers(context: u32, ends_here: bool) -> Held {
    let Some(stream) = stream(context) else {
        refuse_without_rules(context);
        return true;
    };
    let map = host::header_map(Map::Request).ok();
    let headers = map.as_deref().and_then(header_map::parse);
    let now_ms = now_ms();
    let head = RequestHead {
        headers: headers.as_deref(),
        ends_here,
    };
    let effects = stream.event(|stream, house, host| stream.on_request_headers(house, head, host, now_ms));
    let Some(effects) = effects else { return true };
    stream.carry_out_in_request(context, effects);
    if stream.waits_for(Wait::Body).is_some() {
        stream.wait(context, Wait::Body);
    }
    tell_without_ticks(&stream.live);
    stream.is_held()
}

/// Where the host does not tick, requests are the clock of the outbox.
fn tell_without_ticks(live: &Rc<Live>) {
    if live.ticks.get() {
        return;
    }
    let roots: Vec<(u32, Rc<Root>)> = with(Vec::new(), |vm| {
        vm.roots
            .try_borrow()
            .map(|roots| roots.iter().map(|(id, root)| (*id, Rc::clone(root))).collect())
            .unwrap_or_default()
    });
    for (id, root) in roots {
        if !root.ticks.get() && root.all().iter().any(|other| Rc::ptr_eq(other, live)) {
            if let Ok(mut house) = live.gatehouse.try_borrow_mut() {
                house.tend_leases(&mut HostMemory, now_ms());
            }
            root.tell(id);
        }
    }
}

/// More of the request's body, or its trailers. While a request is held the host keeps what has come, and `size` covers
/// all of it.
pub(crate) fn on_request_body(context: u32, size: usize, ends_here: bool) -> Held {
    let Some(stream) = stream(context) else {
        refuse_without_rules(context);
        return true;
    };
    let now_ms = now_ms();
    while let Some(start) = stream.body_read().filter(|start| *start < size) {
        let piece = host::buffer(Buffer::RequestBody, start, size.saturating_sub(start).min(PIECE))
            .ok()
            .filter(|piece| !piece.is_empty());
        let effects = stream.event(|stream, house, _| stream.on_body_piece(house, piece.as_deref(), now_ms));
        let Some(effects) = effects else { return true };
        stream.carry_out_in_request(context, effects);
    }
    if ends_here || stream.body_read().is_none() {
        let effects = stream.event(|stream, house, host| stream.on_body_end(house, host, now_ms));
        stream.carry_out_in_request(context, effects.unwrap_or_default());
    }
    let held = stream.is_held();
    if !held {
        // It goes on now, also if the host has not taken an earlier resume.
        stream.offer_nothing();
    }
    held
}

/// The request's trailers, before they end its body.
pub(crate) fn on_request_trailers(context: u32) {
    let Some(stream) = stream(context) else { return };
    let map = host::header_map(Map::RequestTrailers).ok();
    let trailers = map.as_deref().and_then(header_map::parse).unwrap_or_default();
    let effects = stream.event(|_, house, _| Stream::on_request_trailers(house.config(), &trailers));
    stream.carry_out(context, effects.unwrap_or_default());
}

/// Response headers: the upstream's, or those of our own reply.
pub(crate) fn on_response_headers(context: u32) {
    let Some(stream) = with(None, |vm| get(&vm.streams, context)) else {
        return;
    };
    let wanted = stream.live.limit_headers;
    let reads = stream
        .stream
        .try_borrow()
        .is_ok_and(|stream| stream.reads_response_headers());
    let map = if reads {
        host::header_map(Map::Response).ok()
    } else {
        None
    };
    let headers = map.as_deref().and_then(header_map::parse);
    let effects = stream.event(|stream, _, _| stream.on_response_headers(wanted, headers.as_deref()));
    stream.carry_out(context, effects.unwrap_or_default());
}

/// A piece of the response's body. It is looked at and never held.
pub(crate) fn on_response_body(context: u32, size: usize) {
    let Some(stream) = with(None, |vm| get(&vm.streams, context)) else {
        return;
    };
    let mut start = 0_usize;
    while start < size && stream.stream.try_borrow().is_ok_and(|stream| stream.reads_response()) {
        let piece = host::buffer(Buffer::ResponseBody, start, size.saturating_sub(start).min(PIECE))
            .ok()
            .filter(|piece| !piece.is_empty());
        start = start.saturating_add(piece.as_ref().map_or(0, Vec::len));
        stream.event(|stream, _, _| {
            stream.on_response_body(piece.as_deref());
            Vec::new()
        });
    }
}

/// A callout has ended. Its answer is read before the effective context changes.
pub(crate) fn on_callout_answer(context: u32, token: u32, headers: usize, body_size: usize) {
    // A token that nobody waits for: its stream has ended, and has queued a cancel.
    let Some(asker) = with(None, |vm| take(&vm.callouts, token)) else {
        return;
    };
    let map = if headers > 0 {
        host::header_map(Map::CalloutAnswer).ok()
    } else {
        None
    };
    let status = map
        .as_deref()
        .and_then(header_map::parse)
        .and_then(|headers| status(&headers));
    let body = if body_size == 0 {
        Some(Vec::new())
    } else if body_size > LARGEST_ANSWER {
        None
    } else {
        host::buffer(Buffer::CalloutAnswer, 0, body_size).ok()
    };
    let now_ms = now_ms();
    match asker {
        Asker::Outbox(id) => {
            let Some(root) = root(id) else { return };
            let live = root
                .telling
                .try_borrow_mut()
                .ok()
                .and_then(|mut telling| telling.take());
            if let Some(Batch { live, .. }) = live {
                settled(&live, status, body.as_deref().unwrap_or_default(), now_ms);
            }
            if root.is_draining.get() {
                drain(id, &root);
            }
        }
        Asker::Fetch(live, op) => {
            let answer = CalloutAnswer {
                status,
                body: body.as_deref(),
            };
            let effects = live
                .gatehouse
                .try_borrow_mut()
                .map(|mut house| house.fetched(&mut HostMemory, op, answer, now_ms));
            live.carry_out_all(effects.unwrap_or_default());
        }
        Asker::Stream(id) => {
            let Some(stream) = with(None, |vm| get(&vm.streams, id)) else {
                return;
            };
            let answer = CalloutAnswer {
                status,
                body: body.as_deref(),
            };
            match host::set_effective_context(id) {
                Ok(true) => {}
                // The host has no such stream any more.
                Ok(false) => return on_end(id),
                // What it said cannot be carried out: the deadline ends the wait.
                Err(host::Refused) => return,
            }
            let effects = stream.event(|stream, house, host| stream.on_callout_answer(house, host, answer, now_ms));
            stream.carry_out(id, effects.unwrap_or_default());
            let _ = host::set_effective_context(context);
            // Some hosts have one call at a time for each request, and refused a batch while this one was out. A service
            // that has just answered takes it without delay.
            if status == Some(200) && !stream.live.ticks.get() {
                if let Ok(mut house) = stream.live.gatehouse.try_borrow_mut() {
                    house.hurry();
                }
                tell_without_ticks(&stream.live);
            }
        }
    }
}

/// `:status` as HTTP writes it: three digits, nothing else.
fn status(headers: &[portcullis_decision::stream::Header<'_>]) -> Option<u16> {
    let (_, value) = headers.iter().find(|(name, _)| *name == b":status")?;
    let digits = core::str::from_utf8(value)
        .ok()
        .filter(|text| text.len() == 3 && text.bytes().all(|b| b.is_ascii_digit()))?;
    digits.parse().ok()
}

/// The clock of a root context: deadlines, outbox, lines that were held back.
pub(crate) fn on_tick(context: u32) {
    let Some(root) = root(context) else { return };
    let now_ms = now_ms();
    for live in root.all() {
        let effects = live.gatehouse.try_borrow_mut().map(|mut house| {
            house.tend_leases(&mut HostMemory, now_ms);
            house.passed(now_ms)
        });
        live.carry_out_all(effects.unwrap_or_default());
        look_at_deadlines(context, &live, now_ms);
    }
    root.tell(context);
    root.retire(now_ms);
}

fn look_at_deadlines(root: u32, live: &Live, now_ms: u64) {
    let refused = live
        .refused
        .try_borrow_mut()
        .map(|mut refused| core::mem::take(&mut *refused));
    for id in refused.unwrap_or_default() {
        let Some(stream) = with(None, |vm| get(&vm.streams, id)) else {
            continue;
        };
        match host::set_effective_context(id) {
            Ok(true) => stream.offer_again(id),
            Ok(false) => on_end(id),
            Err(host::Refused) => {
                if let Ok(mut refused) = live.refused.try_borrow_mut() {
                    refused.push(id);
                }
            }
        }
        let _ = host::set_effective_context(root);
    }
    for wait in [Wait::Decision, Wait::Body] {
        look_at_waits(root, live, wait, now_ms);
    }
}

fn look_at_waits(root: u32, live: &Live, wait: Wait, now_ms: u64) {
    let mut looked_at = 0_usize;
    let mut still_waiting = Vec::new();
    while looked_at < STREAMS_PER_TICK {
        looked_at = looked_at.saturating_add(1);
        let next = live
            .queue(wait)
            .try_borrow_mut()
            .ok()
            .and_then(|mut queue| queue.pop_front());
        let Some(id) = next else { break };
        let Some(stream) = with(None, |vm| get(&vm.streams, id)) else {
            continue;
        };
        let Some(deadline_ms) = stream.waits_for(wait) else {
            continue;
        };
        if now_ms < deadline_ms {
            still_waiting.push(id);
            // Deadlines come in order, as all streams of a configuration wait equally long: the rest is later.
            break;
        }
        match host::set_effective_context(id) {
            Ok(true) => {
                let effects = stream.event(|stream, house, _| stream.on_clock(house, now_ms));
                stream.carry_out(id, effects.unwrap_or_default());
            }
            Ok(false) => on_end(id),
            Err(host::Refused) => still_waiting.push(id),
        }
        let _ = host::set_effective_context(root);
    }
    if let Ok(mut queue) = live.queue(wait).try_borrow_mut() {
        for id in still_waiting.into_iter().rev() {
            queue.push_front(id);
        }
    }
}

/// A stream has ended, whatever the reason.
pub(crate) fn on_end(context: u32) {
    let Some(stream) = with(None, |vm| get(&vm.streams, context)) else {
        return;
    };
    if stream.has_ended.replace(true) {
        return;
    }
    stream.offer_nothing();
    let leaves_something = stream
        .stream
        .try_borrow()
        .map_or(true, |stream| stream.leaves_something());
    let now_ms = if leaves_something { now_ms() } else { 0 };
    let effects = stream.event(|stream, house, _| stream.on_end(house, now_ms));
    stream.live.carry_out_all(effects.unwrap_or_default());
}

/// A stream may always go. A root context first tells what its streams have left behind.
pub(crate) fn on_done(context: u32) -> bool {
    let Some(root) = root(context) else {
        on_end(context);
        return true;
    };
    for live in root.all() {
        let effects = live.gatehouse.try_borrow_mut().map(|mut house| {
            house.end_leases(&mut HostMemory, now_ms());
            house.hurry();
            house.last_words()
        });
        live.carry_out_all(effects.unwrap_or_default());
    }
    root.is_draining.set(true);
    root.tell(context);
    let is_telling = root.telling.try_borrow().is_ok_and(|telling| telling.is_some());
    if !is_telling {
        leave(&root);
    }
    !is_telling
}

/// Nothing is told any more.
fn leave(root: &Root) {
    root.is_draining.set(false);
    let now_ms = now_ms();
    root.all().iter().for_each(|live| live.farewell(now_ms));
}

/// Goes on telling until everything is told or the service does not answer; then the context may go.
fn drain(id: u32, root: &Root) {
    if !root.is_settled() {
        root.tell(id);
    }
    if root.telling.try_borrow().is_ok_and(|telling| telling.is_none()) {
        leave(root);
        let _ = host::done();
    }
}

/// A context is gone.
pub(crate) fn on_delete(context: u32) {
    on_end(context);
    with((), |vm| {
        let stream = take(&vm.streams, context);
        take(&vm.unbound, context);
        take(&vm.unconfigured, context);
        if stream.is_none() {
            take(&vm.roots, context);
        }
    });
}
