//! The host calls that the module imports, each in three steps: it is counted, the script of faults may end it, and only
//! then it has an effect.

mod memory;
mod shared;
mod streams;

use wasmtime::{Caller, Linker, Result};

use crate::fault::Call;
use crate::fault::status::{BAD_ARGUMENT, INVALID_MEMORY_ACCESS, NOT_FOUND, OK, UNIMPLEMENTED};
use crate::headers::{Headers, serialize};
use crate::imports::memory::{hand_over, read, write};
use crate::violation::Violation;
use crate::world::{AfterCall, LogLine, World};

type Host<'a> = Caller<'a, World>;

pub(crate) const ENV: &str = "env";
const WASI: &str = "wasi_snapshot_preview1";
/// WASI's `EIO`.
const EIO: u32 = 29;

/// Counts a call; the status with which it has to fail, if the script says so.
fn begin(host: &mut Host<'_>, name: &'static str) -> Option<u32> {
    let world = host.data_mut();
    let call = Call {
        name,
        nth: world.ledger.call(name),
        context: world.effective,
        callback: world.callback,
    };
    world.faults.ask(call)
}

/// Counts a call and reads its arguments of this many bytes: a failure, or the arguments.
fn begin_with<const N: usize>(
    host: &mut Host<'_>,
    name: &'static str,
    pieces: [(u32, u32); N],
) -> core::result::Result<[Vec<u8>; N], u32> {
    let fault = begin(host, name);
    let mut arguments = [const { Vec::new() }; N];
    for (argument, (at, size)) in arguments.iter_mut().zip(pieces) {
        *argument = read(host, at, size).ok_or(INVALID_MEMORY_ACCESS).inspect_err(|_| {
            host.data_mut().violate(Violation::BadPointer(name));
        })?;
        host.data_mut().ledger.carried(name, argument.len());
    }
    fault.map_or(Ok(arguments), Err)
}

/// Defines every call that this host has.
pub(crate) fn define(linker: &mut Linker<World>) -> Result<()> {
    define_wasi(linker)?;
    define_maps(linker)?;
    define_metrics(linker)?;
    shared::define(linker)?;
    streams::define(linker)?;
    linker.func_wrap(
        ENV,
        "proxy_log",
        |mut host: Host<'_>, level: u32, text: u32, size: u32| match begin_with(&mut host, "proxy_log", [(text, size)])
        {
            Ok([text]) => {
                let text = String::from_utf8_lossy(&text).into_owned();
                host.data_mut().logs.push(LogLine { level, text });
                OK
            }
            Err(status) => status,
        },
    )?;
    linker.func_wrap(
        ENV,
        "proxy_get_current_time_nanoseconds",
        |mut host: Host<'_>, time: u32| {
            if let Some(status) = begin(&mut host, "proxy_get_current_time_nanoseconds") {
                return status;
            }
            if !host.data().personality.tells_time {
                return UNIMPLEMENTED;
            }
            let ns = coarse(&host, host.data().clock.wall_ns());
            write(&mut host, "proxy_get_current_time_nanoseconds", time, &ns.to_le_bytes())
        },
    )?;
    linker.func_wrap(
        ENV,
        "proxy_set_tick_period_milliseconds",
        |mut host: Host<'_>, period_ms: u32| -> Result<u32> {
            if let Some(status) = begin(&mut host, "proxy_set_tick_period_milliseconds") {
                return Ok(status);
            }
            let world = host.data_mut();
            if !world.personality.ticks {
                return Ok(UNIMPLEMENTED);
            }
            let now_ms = world.clock.now_ms();
            let Some(root) = world
                .root_of(world.effective)
                .and_then(|root| world.roots.get_mut(&root))
            else {
                return Ok(BAD_ARGUMENT);
            };
            if root.tick_period_ms > 0 && world.personality.traps_at_second_tick_period {
                return Err(wasmtime::format_err!("a second period of ticks"));
            }
            root.tick_period_ms = u64::from(period_ms);
            root.next_tick_ms = now_ms + root.tick_period_ms;
            Ok(OK)
        },
    )?;
    linker.func_wrap(
        ENV,
        "proxy_set_effective_context",
        |mut host: Host<'_>, context: u32| {
            if let Some(status) = begin(&mut host, "proxy_set_effective_context") {
                host.data_mut().disowned.insert(context);
                return status;
            }
            let world = host.data_mut();
            if world.root_of(context).is_none() {
                return BAD_ARGUMENT;
            }
            world.effective = context;
            OK
        },
    )?;
    linker.func_wrap(ENV, "proxy_done", |mut host: Host<'_>| {
        if let Some(status) = begin(&mut host, "proxy_done") {
            return status;
        }
        let world = host.data_mut();
        let context = world.effective;
        if world.roots.get(&context).is_none_or(|root| !root.is_finishing) {
            world.violate(Violation::UnaskedDone(context));
            return NOT_FOUND;
        }
        world.after_call.push(AfterCall::Done(context));
        OK
    })?;
    Ok(())
}

fn define_wasi(linker: &mut Linker<World>) -> Result<()> {
    linker.func_wrap(
        WASI,
        "clock_time_get",
        |mut host: Host<'_>, clock: u32, _precision: u64, time: u32| {
            if let Some(status) = begin(&mut host, "clock_time_get") {
                return status;
            }
            let ns = match clock {
                0 => host.data().clock.wall_ns(),
                _ => host.data().clock.monotonic_ns(),
            };
            let ns = coarse(&host, ns);
            write(&mut host, "clock_time_get", time, &ns.to_le_bytes())
        },
    )?;
    linker.func_wrap(WASI, "random_get", |mut host: Host<'_>, at: u32, size: u32| {
        if let Some(status) = begin(&mut host, "random_get") {
            return status;
        }
        let mut bytes = vec![0; size as usize];
        host.data_mut().random.fill(&mut bytes);
        write(&mut host, "random_get", at, &bytes)
    })?;
    // What Rust's standard library declares; a gateway gives it an empty environment and nowhere to write to.
    linker.func_wrap(
        WASI,
        "environ_sizes_get",
        |mut host: Host<'_>, count: u32, size: u32| {
            if let Some(status) = begin(&mut host, "environ_sizes_get") {
                return status;
            }
            write(&mut host, "environ_sizes_get", count, &[0; 4]);
            write(&mut host, "environ_sizes_get", size, &[0; 4])
        },
    )?;
    linker.func_wrap(WASI, "environ_get", |mut host: Host<'_>, _: u32, _: u32| {
        begin(&mut host, "environ_get").unwrap_or(OK)
    })?;
    linker.func_wrap(
        WASI,
        "fd_write",
        |mut host: Host<'_>, _: u32, _: u32, _: u32, _: u32| begin(&mut host, "fd_write").unwrap_or(EIO),
    )?;
    linker.func_wrap(WASI, "proc_exit", |mut host: Host<'_>, code: u32| -> Result<()> {
        begin(&mut host, "proc_exit");
        Err(wasmtime::format_err!("the module exits with {code}"))
    })?;
    Ok(())
}

/// A time as the host's clocks can tell it.
fn coarse(host: &Host<'_>, ns: u64) -> u64 {
    let step_ns = host.data().personality.clock_step_ns;
    ns - ns % step_ns
}

/// The map of this number in the effective context.
fn map(world: &mut World, kind: u32) -> Option<&mut Headers> {
    match kind {
        0..=2 => {
            let effective = world.effective;
            let stream = world.streams.get_mut(&effective).filter(|stream| !stream.is_deleted)?;
            Some(match kind {
                0 => &mut stream.request,
                1 => &mut stream.request_trailers,
                _ => &mut stream.response,
            })
        }
        6 => world.answer.as_mut().map(|(headers, _)| headers),
        _ => None,
    }
}

/// The piece of a body that the running callback is about.
fn body(world: &World, kind: u32) -> Option<&[u8]> {
    let stream = world.streams.get(&world.effective)?;
    match (kind, world.callback) {
        (0, "proxy_on_request_body" | "proxy_on_request_trailers") => Some(&stream.window),
        (1, "proxy_on_response_body") => Some(&stream.response_window),
        _ => None,
    }
}

fn define_maps(linker: &mut Linker<World>) -> Result<()> {
    linker.func_wrap(
        ENV,
        "proxy_get_header_map_pairs",
        |mut host: Host<'_>, kind: u32, data: u32, size: u32| {
            const NAME: &str = "proxy_get_header_map_pairs";
            if let Some(status) = begin(&mut host, NAME) {
                return status;
            }
            let world = host.data_mut();
            let raw = world.raw_request_map.clone().filter(|_| kind == 0);
            let Some(bytes) = raw.or_else(|| map(world, kind).map(|map| serialize(map))) else {
                return BAD_ARGUMENT;
            };
            hand_over(&mut host, NAME, &bytes, data, size)
        },
    )?;
    linker.func_wrap(
        ENV,
        "proxy_remove_header_map_value",
        |mut host: Host<'_>, kind: u32, name: u32, size: u32| match begin_with(
            &mut host,
            "proxy_remove_header_map_value",
            [(name, size)],
        ) {
            Ok([name]) => map(host.data_mut(), kind).map_or(BAD_ARGUMENT, |map| {
                map.retain(|(of, _)| !of.eq_ignore_ascii_case(&name));
                OK
            }),
            Err(status) => status,
        },
    )?;
    linker.func_wrap(
        ENV,
        "proxy_add_header_map_value",
        |mut host: Host<'_>, kind: u32, name: u32, name_size: u32, value: u32, value_size: u32| match begin_with(
            &mut host,
            "proxy_add_header_map_value",
            [(name, name_size), (value, value_size)],
        ) {
            Ok([name, value]) => map(host.data_mut(), kind).map_or(BAD_ARGUMENT, |map| {
                map.push((name, value));
                OK
            }),
            Err(status) => status,
        },
    )?;
    linker.func_wrap(
        ENV,
        "proxy_get_buffer_bytes",
        |mut host: Host<'_>, kind: u32, start: u32, max_size: u32, data: u32, size: u32| {
            const NAME: &str = "proxy_get_buffer_bytes";
            if let Some(status) = begin(&mut host, NAME) {
                return status;
            }
            let world = host.data();
            let buffer = match kind {
                0 | 1 => body(world, kind),
                4 => world.answer.as_ref().map(|(_, body)| body.as_slice()),
                7 => world
                    .root_of(world.effective)
                    .and_then(|root| world.roots.get(&root))
                    .map(|root| root.configuration.as_slice()),
                _ => None,
            };
            let Some(buffer) = buffer else { return NOT_FOUND };
            let (start, max_size) = (start as usize, max_size as usize);
            let from = start.min(buffer.len());
            let to = start.saturating_add(max_size).min(buffer.len());
            let bytes = buffer[from..to].to_vec();
            hand_over(&mut host, NAME, &bytes, data, size)
        },
    )?;
    Ok(())
}

fn define_metrics(linker: &mut Linker<World>) -> Result<()> {
    linker.func_wrap(
        ENV,
        "proxy_define_metric",
        |mut host: Host<'_>, kind: u32, name: u32, size: u32, id: u32| match begin_with(
            &mut host,
            "proxy_define_metric",
            [(name, size)],
        ) {
            Ok(_) if !host.data().personality.keeps_metrics => OK,
            Ok([name]) => {
                let name = String::from_utf8_lossy(&name).into_owned();
                match host.data_mut().metrics.define(kind, name) {
                    Some(new) => write(&mut host, "proxy_define_metric", id, &new.to_le_bytes()),
                    None => BAD_ARGUMENT,
                }
            }
            Err(status) => status,
        },
    )?;
    linker.func_wrap(ENV, "proxy_increment_metric", |mut host: Host<'_>, id: u32, by: i64| {
        if let Some(status) = begin(&mut host, "proxy_increment_metric") {
            return status;
        }
        if !host.data().personality.keeps_metrics {
            return OK;
        }
        let done = host.data_mut().metrics.increment(id, by);
        metric_status(&mut host, "proxy_increment_metric", done)
    })?;
    linker.func_wrap(ENV, "proxy_record_metric", |mut host: Host<'_>, id: u32, value: u64| {
        if let Some(status) = begin(&mut host, "proxy_record_metric") {
            return status;
        }
        if !host.data().personality.keeps_metrics {
            return OK;
        }
        let done = host.data_mut().metrics.record(id, value);
        metric_status(&mut host, "proxy_record_metric", done)
    })?;
    Ok(())
}

fn metric_status(host: &mut Host<'_>, name: &'static str, done: bool) -> u32 {
    if done {
        return OK;
    }
    host.data_mut().violate(Violation::BadMetric(name));
    BAD_ARGUMENT
}
