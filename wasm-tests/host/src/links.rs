//! The host calls of `env` that each kind of host links, for a module of ABI 0.2.1. A module that imports anything else is
//! not loaded, so these lists are what the module's imports are held against. WASI's own calls are linked by all of them.
//!
//! Read in the hosts' sources. Left out on purpose: calls of other versions of the ABI, which this module can't import.

/// Linked by every one of them.
const COMMON: [&str; 35] = [
    "proxy_add_header_map_value",
    "proxy_call_foreign_function",
    "proxy_close_stream",
    "proxy_continue_stream",
    "proxy_define_metric",
    "proxy_dequeue_shared_queue",
    "proxy_done",
    "proxy_enqueue_shared_queue",
    "proxy_get_buffer_bytes",
    "proxy_get_current_time_nanoseconds",
    "proxy_get_header_map_pairs",
    "proxy_get_header_map_value",
    "proxy_get_property",
    "proxy_get_shared_data",
    "proxy_get_status",
    "proxy_grpc_call",
    "proxy_grpc_cancel",
    "proxy_grpc_close",
    "proxy_grpc_send",
    "proxy_grpc_stream",
    "proxy_http_call",
    "proxy_increment_metric",
    "proxy_log",
    "proxy_record_metric",
    "proxy_register_shared_queue",
    "proxy_remove_header_map_value",
    "proxy_replace_header_map_value",
    "proxy_resolve_shared_queue",
    "proxy_send_local_response",
    "proxy_set_buffer_bytes",
    "proxy_set_effective_context",
    "proxy_set_header_map_pairs",
    "proxy_set_property",
    "proxy_set_shared_data",
    "proxy_set_tick_period_milliseconds",
];

/// What a host links of `env`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Links {
    besides: &'static [&'static str],
}

impl Links {
    /// Whether a module may import this call.
    pub fn contains(&self, call: &str) -> bool {
        COMMON.contains(&call) || self.besides.contains(&call)
    }
}

/// Envoy 1.40.
pub(crate) const ENVOY: Links = Links {
    besides: &[
        "proxy_get_buffer_status",
        "proxy_get_header_map_size",
        "proxy_get_log_level",
        "proxy_get_metric",
    ],
};

/// `WasmX`.
pub(crate) const WASMX: Links = Links {
    besides: &[
        "proxy_clear_route_cache",
        "proxy_continue_request",
        "proxy_continue_response",
        "proxy_get_configuration",
        "proxy_get_log_level",
        "proxy_get_metric",
    ],
};

/// APISIX: `proxy_get_log_level` is missing, and `proxy_get_metric` has other arguments than the ABI says.
pub(crate) const APISIX: Links = Links {
    besides: &[
        "proxy_clear_route_cache",
        "proxy_continue_request",
        "proxy_continue_response",
        "proxy_get_configuration",
        "proxy_send_http_response",
    ],
};
