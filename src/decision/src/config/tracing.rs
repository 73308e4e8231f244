//! The service's section `tracing`: where spans go, and how many of the decisions that nobody else traces are.
//!
//! The standard variables of OpenTelemetry beat the file, as every environment does. An address may hold a password, and
//! what is wrong with one is said without showing it. Left out on purpose: the standard's other variables, which whoever
//! sends the spans reads.

use alloc::string::String;

use super::faults::Faults;
use super::section::Section;
use super::service::{Environment, set};
use crate::json::Node;

/// Where spans go, and which.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TracingConfig {
    /// The whole address that spans are sent to, without user and password.
    pub endpoint: String,
    /// One in so many decisions is traced, of those whose request belongs to no trace.
    pub sample_one_in: u64,
}

/// Reads the section; `None` if neither it nor the environment says where spans go.
pub(super) fn read(node: Option<&Node>, environment: &Environment, faults: &mut Faults) -> Option<TracingConfig> {
    let whole = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
    let said = set(environment.otlp_traces_endpoint.as_ref());
    let base = set(environment.otlp_endpoint.as_ref());
    let mut endpoint = match (said, base) {
        (Some(address), _) => checked(whole, address, faults).map(String::from),
        (None, Some(address)) => checked("OTEL_EXPORTER_OTLP_ENDPOINT", address, faults).map(of_traces),
        (None, None) => None,
    };
    let is_set = said.or(base).is_some();
    let mut sample_one_in = None;
    if let Some(node) = node.filter(|node| **node != Node::Null) {
        let mut section = Section::of("tracing", node, faults)?;
        // The file's own value is still validated, so that it cannot rot.
        let own = match section.get("endpoint") {
            None | Some(Node::Null) => Some(""),
            Some(_) => section.text("endpoint", faults),
        };
        let own = match own {
            Some("") => {
                if !is_set {
                    faults.add(
                        "tracing.endpoint",
                        "say where spans go: set it or OTEL_EXPORTER_OTLP_ENDPOINT, or leave the whole section out",
                    );
                }
                None
            }
            own => own.and_then(|address| checked("tracing.endpoint", address, faults)),
        };
        if !is_set {
            endpoint = own.map(of_traces);
        }
        sample_one_in = section.integer("sample_one_in", 1..=1_000_000, faults);
        section.finish(faults);
    }
    Some(TracingConfig {
        endpoint: endpoint?,
        sample_one_in: sample_one_in.unwrap_or(1),
    })
}

/// A collector's address for traces, as the standard makes it of the one for everything.
fn of_traces(base: &str) -> String {
    alloc::format!("{}/v1/traces", base.trim_end_matches('/'))
}

fn checked<'a>(path: &str, address: &'a str, faults: &mut Faults) -> Option<&'a str> {
    let rest = address
        .strip_prefix("http://")
        .or_else(|| address.strip_prefix("https://"));
    let fits = |rest: &str| {
        let host = rest.split(['/', ':']).next().unwrap_or_default();
        let is_plain =
            |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'"' | b'#' | b'<' | b'>' | b'?' | b'@' | b'\\');
        !host.is_empty() && rest.bytes().all(is_plain)
    };
    if rest.is_some_and(fits) {
        return Some(address);
    }
    faults.add(
        path,
        "must be an address that starts with http:// or https://, without user, password and query (its value is not shown)",
    );
    None
}
