//! The decision service's configuration, and what the environment adds to it.
//!
//! Precedence: the environment beats the file. Where a store's address may be embedded, absent or null depends on the
//! profile, and is decided here and nowhere else.

use alloc::borrow::ToOwned;
use alloc::string::String;
use alloc::vec::Vec;

use super::canary::CanaryConfig;
use super::door::{AdminConfig, HttpBounds, TlsConfig, optional_file, read_admin, read_http, read_tls};
use super::faults::{Faults, shown};
use super::section::{PASSTHROUGH_IS_GONE, Section, integer_of, is_off, retired_switch, root, word_of};
use super::tracing::TracingConfig;
use super::{FilterConfig, Profile};
use crate::json::Node;
use crate::limits::{LARGEST_LIMIT, Limit, Resource, ScopeLimits};

/// What the service reads of its environment. Empty texts count as unset.
#[derive(Debug, Clone, Default)]
pub struct Environment {
    /// `PORTCULLIS_PROFILE`.
    pub profile: Option<String>,
    /// `REDIS_URL`.
    pub redis_url: Option<String>,
    /// `POSTGRES_DSN`.
    pub postgres_dsn: Option<String>,
    /// `PORTCULLIS_ALLOW_PASSTHROUGH`, retired.
    pub allow_passthrough: Option<String>,
    /// `IBEX_MODEL_POLICY_ALLOW_PASSTHROUGH`, retired.
    pub ibex_allow_passthrough: Option<String>,
    /// `OTEL_EXPORTER_OTLP_ENDPOINT`: a collector, for everything that it takes.
    pub otlp_endpoint: Option<String>,
    /// `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`: the whole address for spans.
    pub otlp_traces_endpoint: Option<String>,
}

/// A store's address. It may hold a password, so it is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct StoreUrl(String);

impl StoreUrl {
    /// An address from elsewhere than a configuration, such as a command line; not checked.
    pub const fn new(url: String) -> Self {
        Self(url)
    }

    /// The address for the driver. Not for logs.
    pub fn secret(&self) -> &str {
        &self.0
    }

    /// The scheme: all that may be shown.
    pub fn scheme(&self) -> &str {
        self.0.split_once(':').map_or("", |(scheme, _)| scheme)
    }

    /// Whether it names a store inside this process or on its disk.
    pub fn is_embedded(&self) -> bool {
        matches!(self.scheme(), "memory" | "file")
    }
}

impl core::fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}:…", self.scheme())
    }
}

/// The limiter's section.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LimiterConfig {
    /// Where it is; `None` only in development: admits everything, and says so.
    pub url: Option<StoreUrl>,
    /// First part of every key.
    pub key_prefix: String,
    /// The most that one store operation may take, in milliseconds.
    pub op_timeout_ms: u64,
    /// A window of the operator's tiers, in seconds.
    pub window_s: u64,
    /// How long a slot lives without renewal, in seconds.
    pub slot_ttl_s: u64,
}

/// The policy store's section.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyConfig {
    /// Where it is; `None` when explicitly null, or absent in development.
    pub url: Option<StoreUrl>,
    /// How old an answer may be, in milliseconds.
    pub max_staleness_ms: u64,
}

/// The metering store's section.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeteringConfig {
    /// Where it is; `None` when explicitly null, or absent in development.
    pub url: Option<StoreUrl>,
}

/// The operator's capacity tiers. An absent tier, `{}` and null are the same.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Tiers {
    /// One counter for everything.
    pub platform: ScopeLimits,
    /// For each graph.
    pub graph: ScopeLimits,
    /// For each organization.
    pub organization: ScopeLimits,
    /// For each pair of organization and model.
    pub organization_model: ScopeLimits,
    /// For each configured lane, by name.
    pub lanes: Vec<(String, ScopeLimits)>,
}

impl Tiers {
    /// Whether a tier counts per organization, so that a request has to say which one it belongs to.
    pub fn need_org(&self) -> bool {
        !self.organization.is_empty() || !self.organization_model.is_empty()
    }

    /// Whether a tier counts what is under way.
    pub(super) fn take_slots(&self) -> bool {
        let fixed = [self.platform, self.graph, self.organization, self.organization_model];
        let lanes = self.lanes.iter().map(|(_, limits)| *limits);
        fixed
            .into_iter()
            .chain(lanes)
            .any(|limits| limits.concurrency != Limit::Unlimited)
    }
}

/// A whole configuration without faults.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceConfig {
    /// The installation's kind.
    pub profile: Profile,
    /// `host:port` to listen on.
    pub listen: String,
    /// The file of the tokens that callers have to bring; `None`: they need none.
    pub tokens_file: Option<String>,
    /// `None`: without TLS.
    pub tls: Option<TlsConfig>,
    /// What callers may take of the service.
    pub http: HttpBounds,
    /// Where operators look in; `None`: nowhere.
    pub admin: Option<AdminConfig>,
    /// The limiter.
    pub limiter: LimiterConfig,
    /// The policy store.
    pub policy: PolicyConfig,
    /// The metering store.
    pub metering: MeteringConfig,
    /// The operator's tiers.
    pub capacity: Tiers,
    /// The canary; `None`: there is none.
    pub canary: Option<CanaryConfig>,
    /// By what Envoy's `ext_authz` is answered; `None`: it is not.
    pub ext_authz: Option<FilterConfig>,
    /// Where spans go; `None`: none are made.
    pub tracing: Option<TracingConfig>,
}

impl ServiceConfig {
    /// Parses a configuration with what the environment adds.
    ///
    /// # Errors
    /// All faults of the text and of the environment.
    pub fn parse(text: &[u8], environment: &Environment) -> Result<Self, Faults> {
        let mut faults = Faults::default();
        let config = root(text, &mut faults).and_then(|node| read(&node, environment, &mut faults));
        faults.into_result(config)
    }

    /// A short fingerprint of the text that this was parsed from, without the secrets of signatures.
    pub fn fingerprint(&self, text: &[u8]) -> String {
        let signed = |checks: &FilterConfig| checks.signatures.is_some();
        if self.ext_authz.as_ref().is_some_and(signed) {
            super::signature::fingerprint_without_secrets(&["ext_authz"], text)
        } else {
            super::fingerprint(text)
        }
    }
}

pub(super) fn set(text: Option<&String>) -> Option<&str> {
    text.map(String::as_str).filter(|text| !text.is_empty())
}

fn read(node: &Node, environment: &Environment, faults: &mut Faults) -> Option<ServiceConfig> {
    let mut section = Section::of("", node, faults)?;
    retired_switch(&mut section, faults);
    for (name, value) in [
        ("PORTCULLIS_ALLOW_PASSTHROUGH", &environment.allow_passthrough),
        (
            "IBEX_MODEL_POLICY_ALLOW_PASSTHROUGH",
            &environment.ibex_allow_passthrough,
        ),
    ] {
        if value.as_deref().is_some_and(|text| !is_off(text)) {
            faults.add(name, PASSTHROUGH_IS_GONE);
        }
    }
    let profile = read_profile(&mut section, environment, faults);
    section.required("listen", faults);
    let listen = section.text("listen", faults).map(ToOwned::to_owned);
    if let Some(text) = &listen {
        let well_formed = text
            .rsplit_once(':')
            .is_some_and(|(host, port)| !host.is_empty() && !port.starts_with('+') && port.parse::<u16>().is_ok());
        if !well_formed {
            let is = shown(&Node::Text(text.clone()));
            faults.add(
                "listen",
                alloc::format!("must be host:port, such as \"127.0.0.1:8181\", is {is}"),
            );
        }
    }
    let tokens_file = optional_file(&mut section, "tokens_file", faults);
    let tls = read_tls(&mut section, faults);
    let http = read_http(&mut section, faults);
    let admin = read_admin(&mut section, profile, faults);
    let store_url = match section.get("store_url") {
        None | Some(Node::Null) => None,
        Some(_) => section.text("store_url", faults).filter(|text| !text.is_empty()),
    };
    let limiter = read_limiter(&mut section, environment, store_url, profile, faults);
    let policy = store_section(
        &mut section,
        "policy",
        environment,
        profile,
        faults,
        |policy, faults| policy.integer("max_staleness_ms", 1..=3_600_000, faults),
    );
    let metering = store_section(&mut section, "metering", environment, profile, faults, |_, _| None);
    let capacity = section
        .get("capacity")
        .map_or_else(Tiers::default, |node| read_tiers(node, faults));
    let canary = section.get("canary").and_then(|node| super::canary::read(node, faults));
    let ext_authz = match section.get("ext_authz") {
        None | Some(Node::Null) => None,
        Some(node) => super::ext_authz::read(node, profile, &capacity, faults),
    };
    let tracing = super::tracing::read(section.get("tracing"), environment, faults);
    section.finish(faults);
    Some(ServiceConfig {
        profile: profile?,
        listen: listen?,
        tokens_file,
        tls,
        http,
        admin,
        limiter,
        policy: PolicyConfig {
            url: policy.0,
            max_staleness_ms: policy.1.unwrap_or(2_000),
        },
        metering: MeteringConfig { url: metering.0 },
        capacity,
        canary,
        ext_authz,
        tracing,
    })
}

fn read_profile(section: &mut Section<'_>, environment: &Environment, faults: &mut Faults) -> Option<Profile> {
    let Some(name) = set(environment.profile.as_ref()) else {
        return super::filter::read_profile(section, faults);
    };
    // The file's own value is still validated, so that it cannot rot.
    if section.get("profile").is_some() {
        super::filter::read_profile(section, faults);
    }
    let profiles = Profile::NAMES.map(|name| (name, Profile::named(name)));
    word_of("PORTCULLIS_PROFILE", &Node::Text(name.to_owned()), &profiles, faults).flatten()
}

const LIMITER_SCHEMES: [&str; 5] = ["redis", "rediss", "redis-cluster", "rediss-cluster", "memory"];
const POLICY_SCHEMES: [&str; 3] = ["postgres", "postgresql", "file"];
const METERING_SCHEMES: [&str; 3] = ["postgres", "postgresql", "memory"];

/// Checks an address: its scheme, and that an embedded store is only used in development.
fn store(path: &str, url: &str, schemes: &[&str], profile: Option<Profile>, faults: &mut Faults) -> Option<StoreUrl> {
    let url = StoreUrl(url.to_owned());
    // Only the scheme is shown, and only if it is a known word: what stands before the colon of a broken address may
    // be a password.
    if !schemes.contains(&url.scheme()) {
        let list = schemes.join("://, ");
        faults.add(
            path,
            alloc::format!("must be an address that starts with one of {list}: (its value is not shown)"),
        );
        return None;
    }
    if url.is_embedded() && profile.is_some_and(|profile| profile != Profile::Development) {
        let (scheme, profile) = (url.scheme(), profile.map_or("", Profile::name));
        faults.add(
            path,
            alloc::format!("an embedded store ({scheme}:) is for development only, the profile is {profile}"),
        );
        return None;
    }
    Some(url)
}

fn read_limiter(
    section: &mut Section<'_>,
    environment: &Environment,
    store_url: Option<&str>,
    profile: Option<Profile>,
    faults: &mut Faults,
) -> LimiterConfig {
    let mut config = LimiterConfig {
        url: None,
        key_prefix: "portcullis".to_owned(),
        op_timeout_ms: 100,
        window_s: 60,
        slot_ttl_s: 30,
    };
    let mut own_url = None;
    if let Some(node) = section.get("limiter").filter(|node| **node != Node::Null)
        && let Some(mut limiter) = Section::of("limiter", node, faults)
    {
        own_url = match limiter.get("url") {
            None | Some(Node::Null) => None,
            Some(_) => limiter.text("url", faults).filter(|text| !text.is_empty()),
        };
        if let Some(prefix) = limiter.text("key_prefix", faults) {
            let well_formed = (1..=64).contains(&prefix.len())
                && prefix
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b':'));
            if well_formed {
                config.key_prefix = prefix.to_owned();
            } else {
                let is = shown(&Node::Text(prefix.into()));
                faults.add(
                    "limiter.key_prefix",
                    alloc::format!("must be 1 to 64 of A-Z, a-z, 0-9 and -_.: , is {is}"),
                );
            }
        }
        config.op_timeout_ms = limiter
            .integer("op_timeout_ms", 1..=60_000, faults)
            .unwrap_or(config.op_timeout_ms);
        config.window_s = limiter
            .integer("window_s", 1..=86_400, faults)
            .unwrap_or(config.window_s);
        config.slot_ttl_s = limiter
            .integer("slot_ttl_s", 1..=86_400, faults)
            .unwrap_or(config.slot_ttl_s);
        limiter.finish(faults);
    }
    let chosen = [
        ("REDIS_URL", set(environment.redis_url.as_ref())),
        ("limiter.url", own_url),
        ("store_url", store_url),
    ];
    match chosen.into_iter().find_map(|(path, url)| Some((path, url?))) {
        Some((path, url)) => config.url = store(path, url, &LIMITER_SCHEMES, profile, faults),
        None => {
            if let Some(profile) = profile.filter(|profile| *profile != Profile::Development) {
                faults.add(
                    "limiter.url",
                    alloc::format!("a limiter is required in {profile}: set REDIS_URL, limiter.url or store_url"),
                );
            }
        }
    }
    config
}

/// The section of a store that may be left out, in development, or be an explicit null.
fn store_section(
    section: &mut Section<'_>,
    key: &'static str,
    environment: &Environment,
    profile: Option<Profile>,
    faults: &mut Faults,
    more: impl FnOnce(&mut Section<'_>, &mut Faults) -> Option<u64>,
) -> (Option<StoreUrl>, Option<u64>) {
    let path = alloc::format!("{key}.url");
    let node = section.get(key);
    let mut is_null = node == Some(&Node::Null);
    let (mut own_url, mut figure) = (None, None);
    if let Some(node) = node.filter(|_| !is_null)
        && let Some(mut inner) = Section::of(key, node, faults)
    {
        match inner.get("url") {
            None => {}
            Some(Node::Null) => is_null = true,
            Some(_) => own_url = inner.text("url", faults).filter(|text| !text.is_empty()),
        }
        figure = more(&mut inner, faults);
        inner.finish(faults);
    }
    let schemes: &[&str] = if key == "policy" {
        &POLICY_SCHEMES
    } else {
        &METERING_SCHEMES
    };
    let url = match (set(environment.postgres_dsn.as_ref()), own_url) {
        (Some(url), _) => store("POSTGRES_DSN", url, schemes, profile, faults),
        (None, Some(url)) => store(&path, url, schemes, profile, faults),
        (None, None) => {
            if let Some(profile) = profile.filter(|profile| *profile != Profile::Development && !is_null) {
                faults.add(
                    path,
                    alloc::format!(
                        "required in {profile}: set POSTGRES_DSN or {key}.url, or say null to run without it"
                    ),
                );
            }
            None
        }
    };
    (url, figure)
}

fn read_tiers(node: &Node, faults: &mut Faults) -> Tiers {
    let mut tiers = Tiers::default();
    if *node == Node::Null {
        return tiers;
    }
    let Some(mut section) = Section::of("capacity", node, faults) else {
        return tiers;
    };
    let mut tier = |section: &mut Section<'_>, key: &'static str| {
        section
            .get(key)
            .map_or_else(ScopeLimits::default, |node| read_tier(&section.path(key), node, faults))
    };
    tiers.platform = tier(&mut section, "platform");
    tiers.graph = tier(&mut section, "graph");
    tiers.organization = tier(&mut section, "organization");
    tiers.organization_model = tier(&mut section, "organization_model");
    match section.get("lanes") {
        None | Some(Node::Null) => {}
        Some(Node::Object(lanes)) => {
            for (at, (lane, node)) in lanes.iter().enumerate() {
                let path = alloc::format!("capacity.lanes.{}", shown(lane));
                if lanes.iter().take(at).any(|(earlier, _)| earlier == lane) {
                    faults.add(path.as_str(), "stands twice");
                }
                tiers.lanes.push((lane.clone(), read_tier(&path, node, faults)));
            }
        }
        Some(other) => faults.add(
            "capacity.lanes",
            alloc::format!("must be an object, is {}", other.kind()),
        ),
    }
    section.finish(faults);
    tiers
}

fn read_tier(path: &str, node: &Node, faults: &mut Faults) -> ScopeLimits {
    let mut limits = ScopeLimits::default();
    if *node == Node::Null {
        return limits;
    }
    let Some(mut section) = Section::of(path, node, faults) else {
        return limits;
    };
    for (key, resource) in [
        ("requests", Resource::Requests),
        ("tokens", Resource::Tokens),
        ("concurrency", Resource::Concurrency),
    ] {
        if let Some(node) = section.get(key).filter(|node| **node != Node::Null)
            && let Some(figure) = integer_of(&section.path(key), node, 0..=LARGEST_LIMIT, faults)
        {
            limits.set(resource, Limit::of(figure));
        }
    }
    section.finish(faults);
    limits
}
