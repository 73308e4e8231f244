//! The filter's configuration as it is written, with the defaults that its parser takes.

use alloc::borrow::{Cow, ToOwned};
use alloc::collections::BTreeMap;
use alloc::string::{String, ToString as _};
use alloc::vec::Vec;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

use super::figure;
use super::rules::{Retired, RulesFile};
use crate::config::{LimitHeaders, Mode, ModelSource, Profile, SHIPPED_RULES};
use crate::limits::LARGEST_LIMIT;

/// Configuration of the Portcullis filter: the plugin configuration of the host, as JSON.
#[derive(JsonSchema)]
#[schemars(title = "Portcullis filter", deny_unknown_fields)]
#[expect(dead_code, reason = "it is never made: its schema is what is wanted")]
pub(super) struct FilterFile {
    /// Which kind of installation this is; the service must have the same. Nothing fills it in.
    profile: Profile,
    /// A shipped rule file's name, or the rules themselves.
    rules: RulesChoice,
    /// Whether rejections are carried out.
    #[schemars(default = "enforce")]
    mode: Mode,
    /// The trusted headers.
    #[schemars(default, with = "Envelope")]
    envelope: Option<Envelope>,
    /// What a request lacks while it is held.
    #[schemars(default, with = "Pause")]
    pause: Option<Pause>,
    /// What is guarded. Left out: everything but `OPTIONS`.
    #[schemars(default, with = "Vec<Route>", length(min = 1))]
    routes: Option<Vec<Route>>,
    /// Where the model is read.
    #[schemars(default, with = "Model")]
    model: Option<Model>,
    /// How tokens are held until usage is known.
    #[schemars(default, with = "Tokens")]
    tokens: Option<Tokens>,
    /// How the filter reaches the decision service.
    decision: Decision,
    /// A window of contract limits, in seconds.
    #[schemars(default = "figure::<60>", range(min = 1, max = 86_400))]
    window_s: u64,
    /// Blocks of admissions that are handed out without a call. Left out: every decision is a call, which is exact.
    #[schemars(default, with = "Leases")]
    leases: Option<Leases>,
    /// What replies carry.
    #[schemars(default, with = "Reply")]
    reply: Option<Reply>,
    #[schemars(default)]
    allow_passthrough: Retired,
}

/// What Envoy's own `ext_authz` is answered: the keys of a filter's configuration that say what is decided.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
#[expect(dead_code, reason = "as above")]
pub(super) struct ExtAuthz {
    /// A shipped rule file's name, or the rules themselves.
    rules: RulesChoice,
    /// Whether rejections are carried out.
    #[schemars(default = "enforce")]
    mode: Mode,
    /// The trusted headers.
    #[schemars(default, with = "Envelope")]
    envelope: Option<Envelope>,
    /// What is guarded. Left out: everything but `OPTIONS`.
    #[schemars(default, with = "Vec<Route>", length(min = 1))]
    routes: Option<Vec<Route>>,
    /// Where the model is read: nowhere, or in the envelope. No body is read.
    #[schemars(default, with = "Model")]
    model: Option<Model>,
    /// How tokens are held until usage is known.
    #[schemars(default, with = "Tokens")]
    tokens: Option<Tokens>,
    /// How long a decision may take.
    #[schemars(default, with = "Time")]
    decision: Option<Time>,
    /// A window of contract limits, in seconds.
    #[schemars(default = "figure::<60>", range(min = 1, max = 86_400))]
    window_s: u64,
    /// What replies carry.
    #[schemars(default, with = "Reply")]
    reply: Option<Reply>,
}

/// How long a decision may take.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
#[expect(dead_code, reason = "as above")]
struct Time {
    /// The whole time that a decision may take, in milliseconds; Envoy's own timeout should be longer.
    #[schemars(default = "figure::<250>", range(min = 40, max = 60_000))]
    timeout_ms: u64,
}

/// What a request lacks while it is held.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
#[expect(dead_code, reason = "as above")]
struct Pause {
    /// Names of headers, in lower case, that a request lacks while it is held, for hosts that let one go by themselves. They
    /// neither frame nor route it, and the envelope is not among them.
    #[schemars(default, with = "Vec<HeaderName>", length(min = 1))]
    withhold: Option<Vec<HeaderName>>,
}

struct HeaderName;

impl JsonSchema for HeaderName {
    fn schema_name() -> Cow<'static, str> {
        "HeaderName".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "minLength": 1, "maxLength": 64, "pattern": "^[a-z0-9!#$%&'*+.^_`|~-]+$"})
    }
}

/// The trusted headers.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
#[expect(dead_code, reason = "as above")]
struct Envelope {
    /// What the envelope's headers begin with: lower case, 2 to 64 characters, the last a dash.
    #[schemars(default = "prefix", regex(pattern = "^[a-z0-9._-]{1,63}-$"))]
    prefix: String,
    /// Whether the envelope is kept from the upstream.
    #[schemars(default = "yes")]
    strip: bool,
    /// Whose signatures an envelope needs. Left out: any envelope is trusted.
    #[schemars(default, with = "Signature")]
    signature: Option<Signature>,
}

/// Whose signatures an envelope needs.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
#[expect(dead_code, reason = "as above")]
struct Signature {
    /// The keys by id, 1 to 64: one for each edge, and twice that while they are replaced.
    #[schemars(extend("propertyNames" = key_id(), "minProperties" = 1, "maxProperties" = 64))]
    keys: BTreeMap<String, Key>,
    /// How far the time that was signed may be from the gateway's, in either direction, in seconds.
    #[schemars(default = "figure::<60>", range(min = 1, max = 3_600))]
    max_age_s: u64,
}

/// An edge's key.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
#[expect(dead_code, reason = "as above")]
struct Key {
    /// 32 to 1024 bytes in base64, padded or not: `openssl rand -base64 32` makes one.
    #[schemars(regex(pattern = "^[A-Za-z0-9+/]{43,1366}={0,2}$"))]
    secret: String,
}

/// Requests that are guarded.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
#[expect(dead_code, reason = "as above")]
struct Route {
    /// What their path begins with, written as it is matched: without query, percent-escapes, empty or dot segments.
    #[schemars(regex(pattern = "^/"))]
    path_prefix: String,
    /// Their methods, in upper case. Left out: every method.
    #[schemars(default, with = "Vec<Method>", length(min = 1))]
    methods: Option<Vec<Method>>,
}

struct Method;

impl JsonSchema for Method {
    fn schema_name() -> Cow<'static, str> {
        "Method".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "pattern": "^[A-Z-]+$"})
    }
}

/// Where the model is read.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
#[expect(dead_code, reason = "as above")]
struct Model {
    /// Where the model is read.
    #[schemars(default = "nowhere")]
    from: ModelSource,
    /// A longer body is refused with 413, in bytes. The host's own limit of a body has to be above it.
    #[schemars(default = "figure::<1_048_576>", range(min = 1, max = 1_073_741_824))]
    max_body_bytes: u64,
    /// How long a body may take to arrive, in milliseconds from the headers.
    #[schemars(default = "figure::<10_000>", range(min = 40, max = 600_000))]
    body_timeout_ms: u64,
}

/// How tokens are held until usage is known.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
#[expect(dead_code, reason = "as above")]
struct Tokens {
    /// Output tokens that a request holds which does not say how many it may use.
    #[schemars(default = "figure::<1024>", range(min = 1, max = LARGEST_LIMIT))]
    default_output_reservation: u64,
}

/// How the filter reaches the decision service.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
#[expect(dead_code, reason = "as above")]
struct Decision {
    /// The host's name for the service: a cluster in Envoy, `outbound|PORT||HOST` in Istio, `ip:port` in Kong, `host:port`
    /// in APISIX.
    #[schemars(regex(pattern = "^[!-~]{1,512}$"))]
    upstream: String,
    /// The `:authority` of the calls.
    #[schemars(default = "authority", regex(pattern = "^[!-~]{1,512}$"))]
    authority: String,
    /// A token of the service's `tokens_file`, sent as `authorization: Bearer TOKEN` with each call: `openssl rand -base64 32`
    /// makes one.
    #[schemars(default, with = "String", regex(pattern = "^[A-Za-z0-9._~+/=-]{32,512}$"))]
    token: Option<String>,
    /// The whole time that a decision may take, in milliseconds, one retry included.
    #[schemars(default = "figure::<250>", range(min = 40, max = 60_000))]
    timeout_ms: u64,
}

/// The bounds of leases.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
#[expect(dead_code, reason = "as above")]
struct Leases {
    /// Admissions in one block; 0 makes every decision exact.
    #[schemars(default = "figure::<256>", range(max = 1_000_000))]
    max_requests: u64,
    /// How long a block may be served, in milliseconds.
    #[schemars(default = "figure::<1000>", range(min = 10, max = 60_000))]
    max_age_ms: u64,
    /// How many leases the host keeps.
    #[schemars(default = "figure::<8192>", range(min = 1, max = 1_048_576))]
    slots: u64,
}

/// What replies carry.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields)]
#[expect(dead_code, reason = "as above")]
struct Reply {
    /// When an admitted reply carries rate-limit fields.
    #[schemars(default = "denied")]
    limit_headers: LimitHeaders,
}

/// A shipped file's name, or the object itself.
struct RulesChoice;

impl JsonSchema for RulesChoice {
    fn schema_name() -> Cow<'static, str> {
        "RulesChoice".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let names = SHIPPED_RULES.map(|(name, _)| name);
        json_schema!({
            "oneOf": [
                {"type": "string", "enum": names, "description": "A shipped rule file."},
                generator.subschema_for::<RulesFile>()
            ]
        })
    }
}

fn key_id() -> Value {
    json!({"pattern": "^[A-Za-z0-9._-]{1,32}$"})
}

const fn yes() -> bool {
    true
}

const fn enforce() -> Mode {
    Mode::Enforce
}

const fn nowhere() -> ModelSource {
    ModelSource::None
}

const fn denied() -> LimitHeaders {
    LimitHeaders::Denied
}

fn prefix() -> String {
    "x-admission-".to_owned()
}

fn authority() -> String {
    "portcullis".to_owned()
}
