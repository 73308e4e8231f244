//! What the module does to requests: replies, resumes and callouts, each held against what a correct filter may do.

use wasmtime::{Linker, Result};

use crate::ContextId;
use crate::callout::Callout;
use crate::fault::status::{BAD_ARGUMENT, INTERNAL_FAILURE, OK};
use crate::headers::{first, parse};
use crate::imports::memory::write;
use crate::imports::{ENV, Host, begin, begin_with};
use crate::personality::Upstreams;
use crate::stream::{LocalReply, Phase};
use crate::violation::Violation;
use crate::world::{AfterCall, World};

/// Callbacks out of which every host accepts a callout; a root may also tell its last before it goes.
const MAY_CALL_OUT: [&str; 6] = [
    "proxy_on_request_headers",
    "proxy_on_request_body",
    "proxy_on_request_trailers",
    "proxy_on_http_call_response",
    "proxy_on_tick",
    "proxy_on_done",
];

pub(super) fn define(linker: &mut Linker<World>) -> Result<()> {
    linker.func_wrap(
        ENV,
        "proxy_send_local_response",
        |mut host: Host<'_>,
         status: u32,
         details: u32,
         details_size: u32,
         body: u32,
         body_size: u32,
         headers: u32,
         headers_size: u32,
         grpc_status: i32| {
            const NAME: &str = "proxy_send_local_response";
            let pieces = [(details, details_size), (body, body_size), (headers, headers_size)];
            let world = host.data_mut();
            world.offered.insert(world.effective);
            match begin_with(&mut host, NAME, pieces) {
                Ok([_details, body, headers]) => {
                    let world = host.data_mut();
                    let Some(headers) = parse(&headers) else {
                        world.violate(Violation::BadPointer(NAME));
                        return BAD_ARGUMENT;
                    };
                    let reply = LocalReply {
                        status,
                        headers,
                        body,
                        grpc_status: u32::try_from(grpc_status).ok(),
                    };
                    send_reply(world, reply)
                }
                Err(status) => status,
            }
        },
    )?;
    linker.func_wrap(ENV, "proxy_continue_stream", |mut host: Host<'_>, kind: u32| {
        let world = host.data_mut();
        world.offered.insert(world.effective);
        if let Some(status) = begin(&mut host, "proxy_continue_stream") {
            return status;
        }
        match kind {
            0 => resume(host.data_mut()),
            // No response is ever paused.
            1 => OK,
            _ => BAD_ARGUMENT,
        }
    })?;
    linker.func_wrap(
        ENV,
        "proxy_http_call",
        |mut host: Host<'_>,
         upstream: u32,
         upstream_size: u32,
         headers: u32,
         headers_size: u32,
         body: u32,
         body_size: u32,
         trailers: u32,
         trailers_size: u32,
         timeout_ms: u32,
         token: u32|
         -> Result<u32> {
            const NAME: &str = "proxy_http_call";
            let pieces = [
                (upstream, upstream_size),
                (headers, headers_size),
                (body, body_size),
                (trailers, trailers_size),
            ];
            match begin_with(&mut host, NAME, pieces) {
                Ok([upstream, headers, body, _trailers]) => {
                    let upstream = String::from_utf8_lossy(&upstream).into_owned();
                    if !host.data().personality.knows_upstream(&upstream) {
                        return bad_upstream(host.data().personality.upstreams, &upstream);
                    }
                    match call_out(host.data_mut(), upstream, &headers, body, timeout_ms) {
                        Ok(new) => Ok(write(&mut host, NAME, token, &new.to_le_bytes())),
                        Err(status) => Ok(status),
                    }
                }
                Err(status) => Ok(status),
            }
        },
    )?;
    Ok(())
}

fn bad_upstream(upstreams: Upstreams, name: &str) -> Result<u32> {
    match upstreams {
        Upstreams::Addresses => Err(wasmtime::format_err!("{name} is no address")),
        Upstreams::Clusters | Upstreams::HostsAndPorts => Ok(BAD_ARGUMENT),
    }
}

fn send_reply(world: &mut World, mut reply: LocalReply) -> u32 {
    let id = world.effective;
    // A failed call has no headers where the host makes nothing up.
    let after_failed_call = world.answer.as_ref().is_some_and(|(headers, _)| headers.is_empty());
    if world.personality.empties_reply_after_failed_call && after_failed_call {
        reply.body.clear();
    }
    let Some(stream) = world.streams.get_mut(&id) else {
        world.violate(Violation::ReplyWithoutStream(id));
        return BAD_ARGUMENT;
    };
    if stream.was_let_go || stream.host_status.is_some() {
        // No fault of the module: it has not been told.
        return BAD_ARGUMENT;
    }
    let mut violations = Vec::new();
    if !(200..600).contains(&reply.status) {
        violations.push(Violation::ReplyWithStatus(id, reply.status));
    }
    if stream.is_ended {
        violations.push(Violation::ReplyToFinished(id));
    }
    if stream.resumes > 0 || stream.phase == Phase::Passed {
        violations.push(Violation::ReplyAfterPass(id));
    }
    let status = if stream.replies.is_empty() && !stream.is_deleted {
        // Even where it breaks a rule: a host would send it.
        stream.replies.push(reply);
        stream.phase = Phase::Replied;
        world.after_call.push(AfterCall::Reply(id));
        OK
    } else {
        violations.push(Violation::SecondReply(id));
        BAD_ARGUMENT
    };
    world.violations.extend(violations);
    status
}

fn resume(world: &mut World) -> u32 {
    let id = world.effective;
    let Some(stream) = world.streams.get_mut(&id).filter(|stream| !stream.is_ended) else {
        world.violate(Violation::ResumeOfFinished(id));
        return BAD_ARGUMENT;
    };
    if stream.was_let_go || stream.host_status.is_some() {
        return BAD_ARGUMENT;
    }
    let violation = if stream.phase == Phase::Replied {
        Some(Violation::PassAfterReply(id))
    } else if stream.resumes > 0 {
        Some(Violation::SecondResume(id))
    } else if stream.phase == Phase::Paused {
        None
    } else {
        Some(Violation::ResumeOfUnpaused(id))
    };
    stream.resumes += 1;
    world.violations.extend(violation);
    world.after_call.push(AfterCall::Resume(id));
    OK
}

fn call_out(
    world: &mut World,
    upstream: String,
    headers: &[u8],
    body: Vec<u8>,
    timeout_ms: u32,
) -> core::result::Result<u32, u32> {
    let context: ContextId = world.effective;
    let callback = world.callback;
    let Some(headers) = parse(headers) else {
        world.violate(Violation::MalformedCallout("its headers are no map".to_owned()));
        return Err(BAD_ARGUMENT);
    };
    for name in [":method", ":path", ":authority", ":scheme"] {
        if first(&headers, name).is_none_or(<[u8]>::is_empty) {
            world.violate(Violation::MalformedCallout(format!("no {name}")));
        }
    }
    if timeout_ms == 0 {
        world.violate(Violation::MalformedCallout("no time".to_owned()));
    }
    let Some(root) = world.root_of(context) else {
        world.violate(Violation::MalformedCallout(format!(
            "made for {context}, which is no context"
        )));
        return Err(BAD_ARGUMENT);
    };
    if !MAY_CALL_OUT.contains(&callback) {
        world.violate(Violation::CalloutFrom(callback));
    }
    let request = world.in_request;
    if world.personality.calls_out_of_requests_only {
        let Some(request) = request else {
            return Err(BAD_ARGUMENT);
        };
        if world.has_call_out(request) {
            return Err(INTERNAL_FAILURE);
        }
    }
    let token = world.next_token;
    world.next_token += 1;
    // No string of JSON can look like this, as its quotes would be escaped.
    let is_ahead = std::str::from_utf8(&body).is_ok_and(|body| body.contains(r#""ahead":true"#));
    let callout = Callout {
        token,
        root,
        context,
        request,
        callback,
        upstream,
        headers,
        body,
        timeout_ms,
        is_ahead,
        left_ms: world.clock.now_ms(),
    };
    if callout.is_decide() && world.has_decision_out(context) {
        world.violate(Violation::SecondDecision(context));
    }
    world.sent.push(callout.clone());
    world.callouts.insert(token, callout);
    Ok(token)
}
