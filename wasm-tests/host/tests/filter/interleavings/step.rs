//! What a host may do next, as data that proptest makes up and shrinks.

use portcullis_test_host::{End, Failure, Meddle};
use proptest::prelude::*;
use proptest::sample::{Index, select};

/// What a request's headers are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Request {
    /// A limit of 30.
    Limited,
    /// A call of a provider, with a token limit.
    Call,
    /// A limit of 30, as a gRPC call.
    Grpc,
    /// A limit of 0.
    Blocked,
    /// An owner without limits.
    Unlimited,
    /// No envelope.
    Missing,
    /// A limit that is no number.
    Malformed,
    /// A limit without its owner.
    Partial,
    /// Not guarded.
    Options,
    /// A map that is cut.
    Garbled,
}

/// How a callout ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Admitted, with a slot of this many milliseconds or without one, and with a charge of this many tokens or without.
    Admit(Option<u64>, Option<u64>),
    /// Admitted past a closed or an open gate.
    Bypassed,
    /// Denied.
    Deny,
    /// A dependency stayed closed.
    Unavailable,
    /// A 200 about another operation.
    Foreign,
    /// A 200 that is cut.
    Cut,
    /// Another status with the body of an admission.
    Status(u16),
    /// No answer of the service.
    Failure(Failure),
}

/// How a response begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Response {
    /// JSON with usage.
    Json,
    /// A stream with usage.
    Events,
    /// A stream that cannot be read.
    Compressed,
    /// An answer of this status.
    Status(&'static str),
}

/// One thing that a host does.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    /// A stream begins on one of the roots; its headers come later, or never.
    Open(Index),
    /// A stream begins and its headers come.
    Request(Index, Request),
    /// Headers of a stream that has begun.
    Headers(Index, Request),
    /// The next bytes of a request's body, this many, or one that no body has; possibly its end.
    Body(Index, usize, bool),
    /// Trailers of a request.
    Trailers(Index),
    /// The upstream answers.
    Respond(Index, Response),
    /// The next bytes of a response, this many; possibly its end.
    Piece(Index, usize, bool),
    /// A call that is out ends.
    Answer(Index, Answer),
    /// A call that may have ended long ago ends (again).
    Again(Index, Answer),
    /// A token that was never given out is answered.
    Unknown(u32, Answer),
    /// Time passes, with ticks.
    Tick(u64),
    /// Time jumps.
    Jump(u64),
    /// A stream ends.
    Finish(Index),
    /// One callback of a stream's end.
    End(Index, End),
    /// A root is configured anew.
    Reconfigure(Index, bool),
    /// The next call of this name fails, or every one.
    Break(&'static str, u32, bool),
    /// Somebody comes before the next write into shared data.
    Meddle(Meddle),
    /// Every call works again.
    Heal,
}

/// Calls that may fail in a run.
const CALLS: [&str; 18] = [
    "clock_time_get",
    "random_get",
    "proxy_log",
    "proxy_get_current_time_nanoseconds",
    "proxy_set_tick_period_milliseconds",
    "proxy_get_header_map_pairs",
    "proxy_get_buffer_bytes",
    "proxy_remove_header_map_value",
    "proxy_add_header_map_value",
    "proxy_send_local_response",
    "proxy_continue_stream",
    "proxy_http_call",
    "proxy_set_effective_context",
    "proxy_define_metric",
    "proxy_increment_metric",
    "proxy_record_metric",
    "proxy_get_shared_data",
    "proxy_set_shared_data",
];

fn request() -> impl Strategy<Value = Request> {
    use Request::{Blocked, Call, Garbled, Grpc, Limited, Malformed, Missing, Options, Partial, Unlimited};
    prop_oneof![
        3 => Just(Limited),
        6 => Just(Call),
        2 => select(vec![Grpc, Blocked, Unlimited, Missing, Malformed, Partial, Options, Garbled]),
    ]
}

fn answer() -> impl Strategy<Value = Answer> {
    prop_oneof![
        2 => Just(Answer::Admit(None, None)),
        2 => select(vec![0, 2, 300, 3_000, 30_000]).prop_map(|ttl_ms| Answer::Admit(Some(ttl_ms), None)),
        2 => (0_u64..100).prop_map(|tokens| Answer::Admit(None, Some(tokens))),
        1 => (0_u64..100).prop_map(|tokens| Answer::Admit(Some(30_000), Some(tokens))),
        2 => Just(Answer::Deny),
        1 => select(vec![Answer::Bypassed, Answer::Unavailable, Answer::Foreign, Answer::Cut]),
        1 => select(vec![0, 201, 403, 500, 504]).prop_map(Answer::Status),
        3 => select(Failure::ALL.to_vec()).prop_map(Answer::Failure),
    ]
}

fn response() -> impl Strategy<Value = Response> {
    prop_oneof![
        2 => Just(Response::Json),
        3 => Just(Response::Events),
        1 => Just(Response::Compressed),
        2 => select(vec!["200", "404", "408", "429", "503", "504"]).prop_map(Response::Status),
    ]
}

/// A step of a host whose calls work, or of one whose calls fail too.
pub(crate) fn step(fails: bool) -> BoxedStrategy<Step> {
    let index = any::<Index>;
    let works = prop_oneof![
        1 => index().prop_map(Step::Open),
        8 => (index(), request()).prop_map(|(root, request)| Step::Request(root, request)),
        2 => (index(), request()).prop_map(|(stream, request)| Step::Headers(stream, request)),
        6 => (index(), select(vec![0, 1, 40, 200, 200]), any::<bool>())
            .prop_map(|(stream, bytes, ends)| Step::Body(stream, bytes, ends)),
        1 => index().prop_map(Step::Trailers),
        3 => (index(), response()).prop_map(|(stream, response)| Step::Respond(stream, response)),
        4 => (index(), select(vec![0, 1, 100, 900, 900]), any::<bool>())
            .prop_map(|(stream, bytes, ends)| Step::Piece(stream, bytes, ends)),
        8 => (index(), answer()).prop_map(|(callout, answer)| Step::Answer(callout, answer)),
        1 => (index(), answer()).prop_map(|(callout, answer)| Step::Again(callout, answer)),
        1 => (any::<u32>(), answer()).prop_map(|(token, answer)| Step::Unknown(token, answer)),
        4 => (0_u64..400).prop_map(Step::Tick),
        1 => (0_u64..1_500).prop_map(Step::Jump),
        3 => index().prop_map(Step::Finish),
        1 => (index(), select(vec![End::Log, End::Done, End::Delete])).prop_map(|(stream, end)| Step::End(stream, end)),
        1 => (index(), any::<bool>()).prop_map(|(root, fine)| Step::Reconfigure(root, fine)),
    ];
    if !fails {
        return works.boxed();
    }
    let statuses = select(vec![1, 2, 6, 10, 12, 255]);
    prop_oneof![
        24 => works,
        5 => (select(CALLS.to_vec()), statuses, any::<bool>())
            .prop_map(|(call, status, always)| Step::Break(call, status, always)),
        1 => select(vec![Meddle::Touch, Meddle::Evict, Meddle::Write(vec![1; 9])]).prop_map(Step::Meddle),
        2 => Just(Step::Heal),
    ]
    .boxed()
}

/// One callback with arguments that may mean nothing.
#[derive(Debug, Clone)]
pub(crate) struct Raw {
    /// The export.
    pub(crate) name: &'static str,
    /// The context.
    pub(crate) context: u32,
    /// What follows the context.
    pub(crate) arguments: Vec<u32>,
}

/// Any callback, mostly for one of few contexts.
pub(crate) fn raw() -> impl Strategy<Value = Raw> {
    let callbacks = vec![
        ("proxy_on_context_create", 1),
        ("proxy_on_vm_start", 1),
        ("proxy_on_configure", 1),
        ("proxy_on_tick", 0),
        ("proxy_on_request_headers", 2),
        ("proxy_on_request_body", 2),
        ("proxy_on_request_trailers", 1),
        ("proxy_on_response_headers", 2),
        ("proxy_on_response_body", 2),
        ("proxy_on_http_call_response", 4),
        ("proxy_on_done", 0),
        ("proxy_on_log", 0),
        ("proxy_on_delete", 0),
    ];
    let number = || prop_oneof![8 => 0_u32..6, 1 => any::<u32>()];
    (select(callbacks), number(), proptest::collection::vec(number(), 4)).prop_map(
        |((name, count), context, mut arguments)| {
            arguments.truncate(count);
            Raw {
                name,
                context,
                arguments,
            }
        },
    )
}
