//! The service's configuration as it is written. What the environment adds, and which stores a profile demands, is said by
//! its parser.

use alloc::borrow::ToOwned;
use alloc::collections::BTreeMap;
use alloc::string::{String, ToString as _};

use schemars::JsonSchema;

use super::figure;
use super::filter::ExtAuthz;
use super::rules::Retired;
use crate::config::Profile;
use crate::limits::LARGEST_LIMIT;

/// Configuration of the Portcullis decision service (`portcullis serve --config FILE`). The environment beats it:
/// `PORTCULLIS_PROFILE`, `REDIS_URL`, `POSTGRES_DSN`, `OTEL_EXPORTER_OTLP_ENDPOINT`.
#[derive(JsonSchema)]
#[schemars(title = "Portcullis decision service", deny_unknown_fields)]
#[expect(dead_code, reason = "it is never made: its schema is what is wanted")]
pub(super) struct ServiceFile {
    /// Which kind of installation this is; the filters must have the same. Required here or as `PORTCULLIS_PROFILE`.
    #[schemars(default, with = "Profile")]
    profile: Option<Profile>,
    /// Where to listen, `host:port`.
    #[schemars(regex(pattern = "^.+:[0-9]+$"))]
    listen: String,
    /// The limiter's address, where `limiter.url` is left out.
    #[schemars(default)]
    store_url: Option<String>,
    /// Where counters live.
    #[schemars(default)]
    limiter: Option<Limiter>,
    /// Who may use what. `null`: gates that need it are unavailable, never passed over.
    #[schemars(default)]
    policy: Option<Policy>,
    /// Runs and cost by month. `null`: gates that need it are unavailable, never passed over.
    #[schemars(default)]
    metering: Option<Metering>,
    /// The sizes of the operator's tiers. They bind only if the rules list the gate `capacity`.
    #[schemars(default)]
    capacity: Option<Capacity>,
    /// A request that must be denied, tried again and again through the real limiter. Left out: none.
    #[schemars(default)]
    canary: Option<Canary>,
    /// By what Envoy's own `ext_authz` is answered. Left out: it is not.
    #[schemars(default)]
    ext_authz: Option<ExtAuthz>,
    /// Where spans go, by OpenTelemetry. Left out, and nothing in the environment: none are made.
    #[schemars(default)]
    tracing: Option<Tracing>,
    #[schemars(default)]
    allow_passthrough: Retired,
}

/// Where counters live.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
#[expect(dead_code, reason = "as above")]
struct Limiter {
    /// `redis://`, `rediss://`, `redis-cluster://` or `rediss-cluster://`; in development also `memory:`. `REDIS_URL` beats it.
    #[schemars(default, regex(pattern = "^((redis|rediss|redis-cluster|rediss-cluster|memory):|$)"))]
    url: Option<String>,
    /// The first part of every key.
    #[schemars(default = "key_prefix", regex(pattern = "^[A-Za-z0-9._:-]{1,64}$"))]
    key_prefix: String,
    /// The most that one store operation takes, in milliseconds.
    #[schemars(default = "figure::<100>", range(min = 1, max = 60_000))]
    op_timeout_ms: u64,
    /// A window of the operator's tiers, in seconds.
    #[schemars(default = "figure::<60>", range(min = 1, max = 86_400))]
    window_s: u64,
    /// How long a slot lives without renewal, in seconds.
    #[schemars(default = "figure::<30>", range(min = 1, max = 86_400))]
    slot_ttl_s: u64,
}

/// Who may use what.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
#[expect(dead_code, reason = "as above")]
struct Policy {
    /// `postgres://`; in development also `file:policy.json`. `POSTGRES_DSN` beats it.
    #[schemars(default, regex(pattern = "^((postgres|postgresql|file):|$)"))]
    url: Option<String>,
    /// How old an answer may be, in milliseconds.
    #[schemars(default = "figure::<2000>", range(min = 1, max = 3_600_000))]
    max_staleness_ms: u64,
}

/// Runs and cost by month.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
#[expect(dead_code, reason = "as above")]
struct Metering {
    /// `postgres://`; in development also `memory:`. `POSTGRES_DSN` beats it.
    #[schemars(default, regex(pattern = "^((postgres|postgresql|memory):|$)"))]
    url: Option<String>,
}

/// Where spans go, and which.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
#[expect(dead_code, reason = "as above")]
struct Tracing {
    /// A collector that takes OTLP over HTTP, such as `http://collector:4318`; spans go to `/v1/traces` below it. Required
    /// here, as `OTEL_EXPORTER_OTLP_ENDPOINT` or as `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, which beat it.
    #[schemars(default, regex(pattern = r"^(https?://[!$-.0-9;=A-\[\]-~][!$-;=A-\[\]-~]*)?$"))]
    endpoint: Option<String>,
    /// One in so many decisions is traced, of those whose request belongs to no trace. Of the others the caller decides.
    #[schemars(default = "figure::<1>", range(min = 1, max = 1_000_000))]
    sample_one_in: u64,
}

/// The sizes of the operator's tiers. An absent tier, `{}` and `null` are the same: no limit.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
#[expect(dead_code, reason = "as above")]
struct Capacity {
    /// One counter for everything.
    #[schemars(default)]
    platform: Option<Tier>,
    /// For each graph.
    #[schemars(default)]
    graph: Option<Tier>,
    /// For each organization.
    #[schemars(default)]
    organization: Option<Tier>,
    /// For each pair of organization and model.
    #[schemars(default)]
    organization_model: Option<Tier>,
    /// For each lane of this name.
    #[schemars(default)]
    lanes: Option<BTreeMap<String, Option<Tier>>>,
}

/// What a tier allows. Left out or `null`: unlimited; 0 blocks.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
#[expect(dead_code, reason = "as above")]
struct Tier {
    /// Requests per window.
    #[schemars(default, range(max = LARGEST_LIMIT))]
    requests: Option<u64>,
    /// Tokens per window.
    #[schemars(default, range(max = LARGEST_LIMIT))]
    tokens: Option<u64>,
    /// Slots held at once.
    #[schemars(default, range(max = LARGEST_LIMIT))]
    concurrency: Option<u64>,
}

/// A request that must be denied, tried again and again through the real limiter. `null`: none.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
#[expect(dead_code, reason = "as above")]
struct Canary {
    /// Between two tries, in milliseconds.
    #[schemars(default = "figure::<10_000>", range(min = 100, max = 3_600_000))]
    interval_ms: u64,
}

fn key_prefix() -> String {
    "portcullis".to_owned()
}
