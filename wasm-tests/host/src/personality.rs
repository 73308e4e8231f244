//! How one kind of host behaves where hosts differ. Only what a test has needed is here.

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

/// One kind of host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Personality {
    /// Its name.
    pub name: &'static str,
    /// Names in header maps are lower case, however the client wrote them.
    pub lower_case_names: bool,
    /// `proxy_on_vm_start` is called.
    pub starts_vm: bool,
    /// Ticks can be asked for.
    pub ticks: bool,
    /// The body comes although the module has paused the headers.
    pub gives_body_while_paused: bool,
    /// How it keeps what its workers share.
    pub shared_data: SharedDataKind,
    /// The callbacks at the end of a stream, in order.
    pub end: &'static [End],
}

impl Personality {
    /// Envoy 1.40 with `allow_on_headers_stop_iteration`.
    pub const ENVOY: Self = Self {
        name: "Envoy",
        lower_case_names: true,
        starts_vm: true,
        ticks: true,
        gives_body_while_paused: true,
        shared_data: SharedDataKind::Envoy,
        end: &[End::Log, End::Done, End::Delete],
    };

    /// Envoy 1.40 as it is by default, and Istio: a module that pauses the headers gets the body after it has let them go.
    pub const ENVOY_THAT_STOPS_ALL: Self = Self {
        name: "Envoy without allow_on_headers_stop_iteration",
        gives_body_while_paused: false,
        ..Self::ENVOY
    };

    /// Kong with `WasmX`, in what leases meet: shared data with stricter versions, and a log after the end.
    pub const WASMX: Self = Self {
        name: "WasmX",
        lower_case_names: false,
        shared_data: SharedDataKind::WasmX,
        end: &[End::Done, End::Log, End::Delete],
        ..Self::ENVOY
    };

    /// APISIX, in what leases meet: neither shared data nor ticks, and no log.
    pub const APISIX: Self = Self {
        name: "APISIX",
        ticks: false,
        shared_data: SharedDataKind::Missing,
        end: &[End::Done, End::Delete],
        ..Self::ENVOY
    };
}
