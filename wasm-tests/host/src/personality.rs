//! How one kind of host behaves where hosts differ. What each does was seen or read; `README.md` lists every difference that
//! is known, and which of them are imitated here.
//!
//! Left out on purpose: what no module can notice (which runtime it is, how workers are started), and what this module
//! does not ask for (properties, single headers).

use crate::links::{self, Links};
use crate::shared_data::SharedDataKind;

/// What a host calls at the end of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// `proxy_on_log`.
    Log,
    /// `proxy_on_done`.
    Done,
    /// `proxy_on_delete`.
    Delete,
}

/// When `proxy_on_configure` is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Configures {
    /// When the configuration is loaded: a refusal is the operator's to see.
    AtLoad,
    /// In the first request, and in each one after a refusal, which the host answers with 503.
    InRequests,
}

/// What `end_of_stream` says about a request's headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndOfHeaders {
    /// Whether something follows.
    AsItIs,
    /// That something follows, always.
    Never,
    /// That nothing follows, always.
    Always,
}

/// How a request's body comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestBody {
    /// In pieces, also while the headers are paused.
    Pieces,
    /// In pieces, once the headers have gone on.
    PiecesAfterHeaders,
    /// In one piece, once the headers have gone on and the body has ended.
    Whole,
    /// Not at all.
    Never,
}

/// What a name of an upstream has to look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Upstreams {
    /// Any name of a cluster.
    Clusters,
    /// `ip:port`; the host traps at anything else.
    Addresses,
    /// `host:port`; anything else is a bad argument.
    HostsAndPorts,
}

/// What becomes of requests when the module traps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterTrap {
    /// Those that are paused stay paused.
    Hangs,
    /// Those that are paused go up as they are by then.
    Forwards,
    /// They get a 503 from the host, and so does every later one.
    Refuses,
}

/// One kind of host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Personality {
    /// Its name.
    pub name: &'static str,
    /// The calls of `env` that it links: a module that imports another one does not load.
    pub links: Links,
    /// Names in header maps are lower case, however the client wrote them.
    pub lower_case_names: bool,
    /// `proxy_on_vm_start` is called.
    pub starts_vm: bool,
    /// When `proxy_on_configure` is called.
    pub configures: Configures,
    /// Ticks can be asked for.
    pub ticks: bool,
    /// Asking for ticks twice traps.
    pub traps_at_second_tick_period: bool,
    /// What `end_of_stream` says about a request's headers.
    pub end_of_headers: EndOfHeaders,
    /// How a request's body comes.
    pub request_body: RequestBody,
    /// A response's body comes.
    pub response_bodies: bool,
    /// A local reply passes the response callbacks of its own stream.
    pub replies_pass_callbacks: bool,
    /// A local reply after a call that has failed loses its body.
    pub empties_reply_after_failed_call: bool,
    /// The names of upstreams.
    pub upstreams: Upstreams,
    /// A call that fails is answered with a status and a text that the host makes up.
    pub makes_up_answers: bool,
    /// Calls are accepted out of a request that has not gone up, and one at a time for each.
    pub calls_out_of_requests_only: bool,
    /// A paused request whose call has ended goes up, whether or not the module has resumed it.
    pub resumes_by_itself: bool,
    /// A pause with neither a call that is out nor a reply ends the worker.
    pub dies_of_idle_pause: bool,
    /// What becomes of requests when the module traps.
    pub after_trap: AfterTrap,
    /// How it keeps what its workers share.
    pub shared_data: SharedDataKind,
    /// Metrics are kept; otherwise every call about them is accepted and does nothing.
    pub keeps_metrics: bool,
    /// `proxy_get_current_time_nanoseconds` is there.
    pub tells_time: bool,
    /// The least step of its clocks, in nanoseconds.
    pub clock_step_ns: u64,
    /// The callbacks at the end of a stream, in order.
    pub end: &'static [End],
}

impl Personality {
    /// Envoy 1.40 with `allow_on_headers_stop_iteration`.
    pub const ENVOY: Self = Self {
        name: "Envoy",
        links: links::ENVOY,
        lower_case_names: true,
        starts_vm: true,
        configures: Configures::AtLoad,
        ticks: true,
        traps_at_second_tick_period: false,
        end_of_headers: EndOfHeaders::AsItIs,
        request_body: RequestBody::Pieces,
        response_bodies: true,
        replies_pass_callbacks: true,
        empties_reply_after_failed_call: false,
        upstreams: Upstreams::Clusters,
        makes_up_answers: true,
        calls_out_of_requests_only: false,
        resumes_by_itself: false,
        dies_of_idle_pause: false,
        after_trap: AfterTrap::Hangs,
        shared_data: SharedDataKind::Envoy,
        keeps_metrics: true,
        tells_time: true,
        clock_step_ns: 1,
        end: &[End::Log, End::Done, End::Delete],
    };

    /// Envoy 1.40 as it is by default, and Istio: a module that pauses the headers gets the body after it has let them go.
    pub const ENVOY_THAT_STOPS_ALL: Self = Self {
        name: "Envoy without allow_on_headers_stop_iteration",
        request_body: RequestBody::PiecesAfterHeaders,
        ..Self::ENVOY
    };

    /// Kong with `WasmX`.
    pub const WASMX: Self = Self {
        name: "WasmX",
        links: links::WASMX,
        lower_case_names: false,
        traps_at_second_tick_period: true,
        end_of_headers: EndOfHeaders::Never,
        request_body: RequestBody::Whole,
        empties_reply_after_failed_call: true,
        upstreams: Upstreams::Addresses,
        makes_up_answers: false,
        resumes_by_itself: true,
        after_trap: AfterTrap::Forwards,
        shared_data: SharedDataKind::WasmX,
        clock_step_ns: 1_000_000,
        end: &[End::Done, End::Log, End::Delete],
        ..Self::ENVOY
    };

    /// APISIX with `wasm-nginx-module`.
    pub const APISIX: Self = Self {
        name: "APISIX",
        links: links::APISIX,
        starts_vm: false,
        configures: Configures::InRequests,
        ticks: false,
        end_of_headers: EndOfHeaders::Always,
        request_body: RequestBody::Never,
        response_bodies: false,
        replies_pass_callbacks: false,
        upstreams: Upstreams::HostsAndPorts,
        makes_up_answers: false,
        calls_out_of_requests_only: true,
        resumes_by_itself: true,
        dies_of_idle_pause: true,
        after_trap: AfterTrap::Refuses,
        shared_data: SharedDataKind::Missing,
        keeps_metrics: false,
        tells_time: false,
        end: &[End::Done, End::Delete],
        ..Self::ENVOY
    };

    /// A name of the decision service that this host can call.
    pub const fn decision_upstream(&self) -> &'static str {
        match self.upstreams {
            Upstreams::Clusters => "portcullis",
            Upstreams::Addresses => "127.0.0.1:8181",
            Upstreams::HostsAndPorts => "portcullis.internal:8181",
        }
    }

    /// Whether the host can call an upstream of this name.
    pub(crate) fn knows_upstream(&self, name: &str) -> bool {
        let host_and_port = name.rsplit_once(':').filter(|(_, port)| port.parse::<u16>().is_ok());
        match self.upstreams {
            Upstreams::Clusters => !name.is_empty(),
            Upstreams::Addresses => host_and_port.is_some_and(|(host, _)| host.parse::<std::net::IpAddr>().is_ok()),
            Upstreams::HostsAndPorts => host_and_port.is_some_and(|(host, _)| !host.is_empty()),
        }
    }
}
