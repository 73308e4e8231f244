//! The filter's configuration: the text that the host hands to `on_configure`.

use alloc::borrow::ToOwned;
use alloc::string::String;
use alloc::vec::Vec;

use super::Profile;
use super::door::{Token, read_token};
use super::faults::{Faults, shown};
use super::pause::read_pause;
use super::rule_file::{check_with_profile, named_or_inline};
use super::section::{Section, integer_of, retired_switch, root, word_of};
use super::signature::{fingerprint_without_secrets, read_signatures};
use crate::json::Node;
use crate::limits::LARGEST_LIMIT;
use crate::log_line::{Level, LogLine};
use crate::routes::Route;
use crate::rules::{Gate, Rules};
use crate::signature::Signatures;

/// Whether rejections are carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Mode {
    /// Rejections are carried out.
    Enforce,
    /// They are decided, charged, counted and logged, and never carried out.
    Shadow,
}

impl Mode {
    /// The name in files, logs and on the wire.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Enforce => "enforce",
            Self::Shadow => "shadow",
        }
    }
}

/// Where the model is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "schema",
    derive(serde::Serialize, schemars::JsonSchema),
    serde(rename_all = "lowercase")
)]
pub enum ModelSource {
    /// Nowhere.
    None,
    /// The envelope's `model`.
    Header,
    /// The request's body, or its path where that names a model.
    Body,
}

/// How a request's body is read, where the model is read from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BodyConfig {
    /// A longer body is refused, in bytes.
    pub max_bytes: u64,
    /// How long a body may take to arrive, in milliseconds from the headers.
    pub timeout_ms: u64,
}

/// When an admitted reply carries rate-limit fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "schema",
    derive(serde::Serialize, schemars::JsonSchema),
    serde(rename_all = "lowercase")
)]
pub enum LimitHeaders {
    /// Never: only denials do.
    Denied,
    /// Always, of the tightest contract limit.
    Always,
}

/// How the filter reaches the decision service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecisionTarget {
    /// The host's name for it: a cluster in Envoy, `host:port` elsewhere. Opaque here.
    pub upstream: String,
    /// The `:authority` of the calls.
    pub authority: String,
    /// By what the service knows who calls; `None`: nothing is sent.
    pub token: Option<Token>,
    /// The whole time that a decision may take, in milliseconds, a retry included.
    pub timeout_ms: u64,
}

/// The bounds of leases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseConfig {
    /// Admissions in one block; 0 makes every decision exact.
    pub max_requests: u64,
    /// How long a block may be served, in milliseconds.
    pub max_age_ms: u64,
    /// How many leases the host keeps.
    pub slots: u64,
}

/// A whole configuration without faults.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilterConfig {
    /// The installation's kind; a service of another one is not asked.
    pub profile: Profile,
    /// The rules.
    pub rules: Rules,
    /// Whether rejections are carried out.
    pub mode: Mode,
    /// Lower-case prefix of the envelope's headers.
    pub prefix: String,
    /// Whether the envelope is kept from the upstream.
    pub strip: bool,
    /// Whose signatures an envelope needs; `None` trusts whatever comes.
    pub signatures: Option<Signatures>,
    /// Lower-case names of headers that are kept from the upstream while a request is held.
    pub withhold: Vec<String>,
    /// What is guarded; `None` guards everything but `OPTIONS`.
    pub routes: Option<Vec<Route>>,
    /// Where the model is read.
    pub model: ModelSource,
    /// How a body is read.
    pub body: BodyConfig,
    /// Tokens held until usage is known.
    pub default_output_reservation: u64,
    /// The decision service.
    pub decision: DecisionTarget,
    /// A window of contract limits, in seconds.
    pub window_s: u64,
    /// The bounds of leases.
    pub leases: LeaseConfig,
    /// When an admitted reply carries rate-limit fields.
    pub limit_headers: LimitHeaders,
}

impl FilterConfig {
    /// Parses a configuration. `profile` of the environment stands in for a missing key where a host has one; the
    /// filter itself passes `None`.
    ///
    /// # Errors
    /// All faults of the text.
    pub fn parse(text: &[u8]) -> Result<Self, Faults> {
        let mut faults = Faults::default();
        let config = root(text, &mut faults).and_then(|node| read(&node, &mut faults));
        faults.into_result(config)
    }

    /// A short fingerprint of the text that this was parsed from. Secrets don't go into it, so that nothing of them comes out
    /// of it: one that was replaced under the same id leaves it as it was.
    pub fn fingerprint(&self, text: &[u8]) -> String {
        if self.signatures.is_some() || self.decision.token.is_some() {
            fingerprint_without_secrets(&[], text)
        } else {
            super::fingerprint(text)
        }
    }

    /// What is wrong with these rules on a host that can or can't tick: an ERROR line refuses the configuration. Slots are
    /// kept alive by the tick, so a gate that is about slots is not kept up without it.
    pub fn unfit_for_host(&self, ticks: bool) -> Option<LogLine> {
        if ticks {
            return None;
        }
        let (level, event, message) = if self.model == ModelSource::Body {
            // Nothing would end the wait for a body that never comes, and one such host dies of a pause without a callout.
            let message = "model.from \"body\" needs a host that ticks: nothing else ends the wait for a body";
            (Level::Error, "configuration_rejected", message)
        } else if self.rules.gate(Gate::Concurrency).is_some() {
            let message = "the gate concurrency needs a host that ticks: slots would lapse under streams that go on";
            (Level::Error, "configuration_rejected", message)
        } else {
            let message = "this host does not tick: deadlines are the host's own, and a slot is renewed only as \
                           requests come";
            (Level::Warn, "no_ticks", message)
        };
        let mut line = LogLine::new(level, event, message);
        line.rules = Some(self.rules.name.clone());
        Some(line)
    }
}

fn read(node: &Node, faults: &mut Faults) -> Option<FilterConfig> {
    let mut section = Section::of("", node, faults)?;
    retired_switch(&mut section, faults);
    let profile = read_profile(&mut section, faults);
    read_keys(section, profile, read_decision, faults)
}

/// The keys that say what is decided, in the order of the documents; `decision` reads whom to ask.
pub(super) fn read_keys(
    mut section: Section<'_>,
    profile: Option<Profile>,
    decision: fn(&mut Section<'_>, &mut Faults) -> Option<DecisionTarget>,
    faults: &mut Faults,
) -> Option<FilterConfig> {
    let at = section.path("");
    let rules_path = section.path("rules");
    let rules = section
        .required("rules", faults)
        .and_then(|node| named_or_inline(&rules_path, node, faults));
    let modes = [("enforce", Mode::Enforce), ("shadow", Mode::Shadow)];
    let mode = section.word("mode", &modes, faults).unwrap_or(Mode::Enforce);
    let (prefix, strip, signatures) = read_envelope(&mut section, faults);
    let withhold = read_pause(&mut section, &prefix, faults);
    let routes_path = section.path("routes");
    let routes = section
        .get("routes")
        .and_then(|node| read_routes(&routes_path, node, faults));
    let (model, body) = read_model(&mut section, faults);
    let default_output_reservation = subsection(&mut section, "tokens", faults, |tokens, faults| {
        // 0 would hold nothing, and what holds nothing is never over a limit.
        tokens.integer("default_output_reservation", 1..=LARGEST_LIMIT, faults)
    });
    let decision = decision(&mut section, faults);
    let window_s = section.integer("window_s", 1..=86_400, faults).unwrap_or(60);
    let leases = read_leases(&mut section, faults);
    let limit_headers = subsection(&mut section, "reply", faults, |reply, faults| {
        reply.word(
            "limit_headers",
            &[("denied", LimitHeaders::Denied), ("always", LimitHeaders::Always)],
            faults,
        )
    });
    section.finish(faults);
    if let Some(rules) = &rules {
        check_with_profile(&at, rules, profile, mode, model, faults);
    }
    Some(FilterConfig {
        profile: profile?,
        rules: rules?,
        mode,
        prefix,
        strip,
        signatures,
        withhold,
        routes,
        model,
        body,
        default_output_reservation: default_output_reservation.unwrap_or(1024),
        decision: decision?,
        window_s,
        leases,
        limit_headers: limit_headers.unwrap_or(LimitHeaders::Denied),
    })
}

/// Reads an optional object by `read`, and notes what it did not ask for.
pub(super) fn subsection<T>(
    section: &mut Section<'_>,
    key: &'static str,
    faults: &mut Faults,
    read: impl FnOnce(&mut Section<'_>, &mut Faults) -> Option<T>,
) -> Option<T> {
    let node = section.get(key)?;
    let mut inner = Section::of(&section.path(key), node, faults)?;
    let value = read(&mut inner, faults);
    inner.finish(faults);
    value
}

pub(super) fn read_profile(section: &mut Section<'_>, faults: &mut Faults) -> Option<Profile> {
    let profiles = Profile::NAMES.map(|name| (name, Profile::named(name)));
    match section.get("profile") {
        None => {
            let names = super::faults::one_of(&Profile::NAMES);
            faults.add(
                "profile",
                alloc::format!("required, and missing: say {names}; nothing fills it in"),
            );
            None
        }
        Some(node) => word_of("profile", node, &profiles, faults).flatten(),
    }
}

/// What is wrong with a prefix of the envelope's headers, in a sentence that goes on after its key.
pub fn prefix_fault(text: &str) -> Option<String> {
    let well_formed = (2..=64).contains(&text.len())
        && text.ends_with('-')
        && text
            .bytes()
            .all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.'));
    (!well_formed).then(|| {
        let is = shown(&Node::Text(text.into()));
        alloc::format!("must be 2 to 64 lower-case header-name characters that end in \"-\", is {is}")
    })
}

fn read_envelope(section: &mut Section<'_>, faults: &mut Faults) -> (String, bool, Option<Signatures>) {
    let mut prefix = "x-admission-".to_owned();
    let mut strip = true;
    let mut signatures = None;
    subsection(section, "envelope", faults, |envelope, faults| {
        if let Some(text) = envelope.text("prefix", faults) {
            match prefix_fault(text) {
                None => prefix = text.to_owned(),
                Some(fault) => faults.add(envelope.path("prefix"), fault),
            }
        }
        strip = envelope.boolean("strip", faults).unwrap_or(strip);
        signatures = envelope
            .get("signature")
            .and_then(|node| read_signatures(&envelope.path("signature"), node, faults));
        Some(())
    });
    (prefix, strip, signatures)
}

fn read_routes(path: &str, node: &Node, faults: &mut Faults) -> Option<Vec<Route>> {
    let Node::List(items) = node else {
        faults.add(path, alloc::format!("must be an array, is {}", node.kind()));
        return None;
    };
    if items.is_empty() {
        faults.add(
            path,
            "an empty list guards nothing: leave the key out to guard everything but OPTIONS",
        );
    }
    Some(
        items
            .iter()
            .enumerate()
            .filter_map(|(at, item)| read_route(&alloc::format!("{path}[{at}]"), item, faults))
            .collect(),
    )
}

fn read_route(path: &str, node: &Node, faults: &mut Faults) -> Option<Route> {
    let mut section = Section::of(path, node, faults)?;
    section.required("path_prefix", faults);
    let path_prefix = section.text("path_prefix", faults).map(ToOwned::to_owned);
    if let Some(prefix) = path_prefix.as_deref()
        && (!prefix.starts_with('/') || crate::routes::normalize(prefix).as_deref() != Some(prefix))
    {
        faults.add(
            section.path("path_prefix"),
            alloc::format!(
                "must start with \"/\" and be written as it is matched (no query, no percent-escapes, no empty or \
                     dot segments), is {}",
                shown(&Node::Text(prefix.into()))
            ),
        );
    }
    let methods = section
        .get("methods")
        .and_then(|node| read_methods(&section.path("methods"), node, faults));
    section.finish(faults);
    Some(Route {
        path_prefix: path_prefix?,
        methods,
    })
}

fn read_methods(path: &str, node: &Node, faults: &mut Faults) -> Option<Vec<String>> {
    let Node::List(items) = node else {
        faults.add(path, alloc::format!("must be an array, is {}", node.kind()));
        return None;
    };
    if items.is_empty() {
        faults.add(
            path,
            "an empty list guards nothing: leave the key out to guard every method",
        );
    }
    let mut methods = Vec::new();
    for (at, item) in items.iter().enumerate() {
        match item {
            Node::Text(method) if !method.is_empty() && method.bytes().all(|b| b.is_ascii_uppercase() || b == b'-') => {
                methods.push(method.clone());
            }
            other => {
                let is = shown(other);
                faults.add(
                    alloc::format!("{path}[{at}]"),
                    alloc::format!("must be an upper-case method name, is {is}"),
                );
            }
        }
    }
    Some(methods)
}

fn read_model(section: &mut Section<'_>, faults: &mut Faults) -> (ModelSource, BodyConfig) {
    let mut source = ModelSource::None;
    let mut body = BodyConfig {
        max_bytes: 1_048_576,
        timeout_ms: 10_000,
    };
    subsection(section, "model", faults, |model, faults| {
        let words = [
            ("none", ModelSource::None),
            ("header", ModelSource::Header),
            ("body", ModelSource::Body),
        ];
        source = model.word("from", &words, faults).unwrap_or(source);
        let mut figure = |key, range, default| model.integer(key, range, faults).unwrap_or(default);
        body.max_bytes = figure("max_body_bytes", 1..=1_073_741_824, body.max_bytes);
        body.timeout_ms = figure("body_timeout_ms", 40..=600_000, body.timeout_ms);
        Some(())
    });
    (source, body)
}

fn read_decision(section: &mut Section<'_>, faults: &mut Faults) -> Option<DecisionTarget> {
    let node = section.required("decision", faults)?;
    let mut decision = Section::of(&section.path("decision"), node, faults)?;
    decision.required("upstream", faults);
    let upstream = decision.text("upstream", faults);
    let authority = decision.text("authority", faults).unwrap_or("portcullis");
    for (key, value) in [("upstream", upstream.unwrap_or("x")), ("authority", authority)] {
        if value.is_empty() || value.len() > 512 || value.bytes().any(|b| !(0x21..=0x7e).contains(&b)) {
            let is = shown(&Node::Text(value.into()));
            faults.add(
                decision.path(key),
                alloc::format!("must be 1 to 512 visible ASCII characters without spaces, is {is}"),
            );
        }
    }
    let token = read_token(&mut decision, "token", faults);
    let timeout_ms = read_timeout(&mut decision, faults);
    decision.finish(faults);
    Some(DecisionTarget {
        upstream: upstream?.to_owned(),
        authority: authority.to_owned(),
        token,
        timeout_ms,
    })
}

/// The whole time of a decision, in milliseconds.
pub(super) fn read_timeout(decision: &mut Section<'_>, faults: &mut Faults) -> u64 {
    decision.integer("timeout_ms", 40..=60_000, faults).unwrap_or(250)
}

fn read_leases(section: &mut Section<'_>, faults: &mut Faults) -> LeaseConfig {
    let Some(node) = section.get("leases") else {
        return LeaseConfig {
            max_requests: 0,
            max_age_ms: 1000,
            slots: 8192,
        };
    };
    let mut leases = LeaseConfig {
        max_requests: 256,
        max_age_ms: 1000,
        slots: 8192,
    };
    if let Some(mut inner) = Section::of(&section.path("leases"), node, faults) {
        let mut figure = |key, range, default| match inner.get(key) {
            Some(node) => integer_of(&inner.path(key), node, range, faults).unwrap_or(default),
            None => default,
        };
        leases.max_requests = figure("max_requests", 0..=1_000_000, leases.max_requests);
        leases.max_age_ms = figure("max_age_ms", 10..=60_000, leases.max_age_ms);
        leases.slots = figure("slots", 1..=1_048_576, leases.slots);
        inner.finish(faults);
    }
    leases
}
