//! What `explain` has found out about one request, as data: printed as JSON, or as a table by `table`.

use portcullis_decision::class::FailureClass;
use portcullis_decision::config::{FilterConfig, LimitHeaders, Mode};
use portcullis_decision::gatehouse::Effect;
use portcullis_decision::log_line::LogLine;
use portcullis_decision::metric::Counter;
use portcullis_decision::reply::Reply;
use portcullis_decision::routes::is_guarded;
use portcullis_decision::rules::Gate;
use serde::Serialize;
use serde_json::Value;

use super::gates::{self, Row};
use super::request::Request;
use crate::imagined::Decided;
use crate::imagined::filter::Exchange;
use crate::imagined::scene::Scene;

/// What the request comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// No route guards it.
    NotGuarded,
    /// It goes on.
    Admitted,
    /// It is refused for a reason that is known.
    Denied,
    /// It is refused since something could not answer.
    Unavailable,
}

/// A place in a file that the reader has, or in a shipped one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Place {
    /// The key's path.
    pub path: String,
    /// The file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// The line in it, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<usize>,
}

/// What decided.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DecidedBy {
    /// The rule; absent where no rule has a say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<Place>,
    /// Where the figure or the word comes from that the rule was applied to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<Place>,
    /// Why, as a sentence.
    pub why: String,
}

/// A reply as it is on the wire, but for what the host adds (`date`, `server`, `content-length`, `connection`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct WireReply {
    /// The HTTP status.
    pub status: u16,
    /// Fields, in order.
    pub headers: Vec<(String, String)>,
    /// The body; bytes that are no text are replaced.
    pub body: String,
}

impl WireReply {
    fn of(reply: &Reply) -> Self {
        let mut headers: Vec<(String, String)> = reply
            .headers
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.clone()))
            .collect();
        if let Some((status, message)) = reply.grpc {
            // Hosts write these themselves, as the protocol says.
            headers.push(("content-type".to_owned(), "application/grpc".to_owned()));
            headers.push(("grpc-status".to_owned(), status.to_string()));
            headers.push(("grpc-message".to_owned(), message.to_owned()));
        }
        Self {
            status: reply.status,
            headers,
            body: String::from_utf8_lossy(&reply.body).into_owned(),
        }
    }
}

/// What the upstream sees.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Upstream {
    /// Whether it sees anything.
    pub reached: bool,
    /// Request headers that are kept from it.
    pub removed: Vec<String>,
    /// Request headers that are set for it.
    pub set: Vec<(String, String)>,
    /// Response headers that are added to its answer.
    pub response_headers: Vec<(String, String)>,
}

/// The request, as far as it may be shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Shown {
    /// The method.
    pub method: String,
    /// The path without its query.
    pub path: String,
    /// Fields; values that no decision depends on are not shown.
    pub headers: Vec<(String, String)>,
    /// The body's length.
    pub body_bytes: usize,
}

/// Everything.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The request.
    pub request: Shown,
    /// What it comes to.
    pub ending: Ending,
    /// False in shadow mode: then a refusal is counted and not carried out.
    pub enforced: bool,
    /// The failure class.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub class: Option<&'static str>,
    /// The code.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<&'static str>,
    /// The rules' name.
    pub rules: String,
    /// The gates, in order.
    pub gates: Vec<Row>,
    /// Gates that the rules do not list.
    pub not_listed: Vec<&'static str>,
    /// What decided.
    pub decided_by: DecidedBy,
    /// What the client gets in place of the upstream's answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reply: Option<WireReply>,
    /// In shadow mode: what it would get.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shadow_reply: Option<WireReply>,
    /// What the upstream sees.
    pub upstream: Upstream,
    /// Counters of the filter that grow, without its host's prefix.
    pub counted: Vec<String>,
    /// Lines that the filter writes.
    pub log: Vec<Value>,
    /// What a reader should know.
    pub hints: Vec<String>,
}

/// What has been seen of one request.
pub struct Seen<'a> {
    /// The scene.
    pub scene: &'a Scene,
    /// The request.
    pub request: &'a Request,
    /// What happened.
    pub exchange: Exchange,
    /// Lines that the filter held back.
    pub lines: Vec<Effect>,
    /// The decision, if the service made one.
    pub decided: Option<Decided>,
    /// The reply of the same filter if it enforced; only in shadow mode.
    pub enforced_reply: Option<Reply>,
}

impl Seen<'_> {
    pub(super) fn config(&self) -> &FilterConfig {
        &self.scene.config
    }

    fn lines(&self) -> impl DoubleEndedIterator<Item = &LogLine> {
        self.exchange
            .effects
            .iter()
            .chain(&self.lines)
            .filter_map(|effect| match effect {
                Effect::Log(line) => Some(line),
                _ => None,
            })
    }

    pub(super) fn counted(&self) -> impl Iterator<Item = Counter> {
        self.exchange.effects.iter().filter_map(|effect| match effect {
            Effect::Count(counter, _) => Some(*counter),
            _ => None,
        })
    }

    /// The report.
    pub fn report(mut self) -> Report {
        let config = self.config();
        let guarded = is_guarded(
            config.routes.as_deref(),
            self.request.method.as_bytes(),
            self.request.path.as_bytes(),
        );
        let refusal = self
            .lines()
            .rfind(|line| matches!(line.event, "rejected" | "shadow_rejected"))
            .cloned();
        let ending = match (&refusal, self.decided.as_ref().map(|decided| &decided.verdict)) {
            _ if !guarded => Ending::NotGuarded,
            (None, _) => Ending::Admitted,
            (Some(line), _) if line.class.is_some_and(is_outage) => Ending::Unavailable,
            (Some(_), _) => Ending::Denied,
        };
        let by = refusal.as_ref().and_then(|line| Gate::named(line.gate.as_deref()?));
        let mut rows = gates::rows(&config.rules.gates, self.decided.as_ref(), by);
        for (at, row) in rows.iter_mut().enumerate() {
            row.line = self.scene.rules.line(&self.scene.rules.path(&format!("gates[{at}]")));
        }
        let decided_by = self.decided_by(ending, refusal.as_ref(), by, &rows);
        let upstream = self.upstream();
        let hints = self.hints(ending);
        let config = self.config();
        let is_listed = |gate: &Gate| config.rules.gate(*gate).is_some();
        let fields = self.request.shown(&config.prefix).into_iter();
        Report {
            request: Shown {
                method: self.request.method.clone(),
                path: self.request.bare_path().to_owned(),
                headers: fields
                    .map(|(name, value)| (name.to_owned(), value.to_owned()))
                    .collect(),
                body_bytes: self.request.body.len(),
            },
            ending,
            enforced: config.mode == Mode::Enforce,
            class: refusal.as_ref().and_then(|line| line.class).map(FailureClass::name),
            code: refusal.as_ref().and_then(|line| line.code),
            rules: config.rules.name.clone(),
            gates: rows,
            not_listed: Gate::ALL
                .iter()
                .filter(|gate| !is_listed(gate))
                .map(|gate| gate.name())
                .collect(),
            decided_by,
            reply: self.exchange.reply().map(WireReply::of),
            shadow_reply: self.enforced_reply.as_ref().map(WireReply::of),
            counted: self.counted().map(Counter::name).collect(),
            log: self
                .lines()
                .filter_map(|line| serde_json::from_str(&line.to_json()).ok())
                .collect(),
            upstream,
            hints,
        }
    }

    fn upstream(&mut self) -> Upstream {
        let wanted = self.config().limit_headers;
        let mut upstream = Upstream {
            reached: !self.exchange.stream.is_held(),
            removed: Vec::new(),
            set: Vec::new(),
            response_headers: Vec::new(),
        };
        if !upstream.reached {
            return upstream;
        }
        for effect in &self.exchange.effects {
            match effect {
                Effect::RemoveRequestHeader(name) => upstream.removed.push(name.clone()),
                Effect::SetRequestHeader(name, value) => upstream.set.push(((*name).into(), (*value).into())),
                _ => {}
            }
        }
        if wanted == LimitHeaders::Always {
            for effect in self.exchange.stream.on_response_headers(wanted, None) {
                if let Effect::AddResponseHeader(name, value) = effect {
                    upstream.response_headers.push((name.to_owned(), value));
                }
            }
        }
        upstream
    }
}

/// Whether a class means that something could not answer.
pub(super) const fn is_outage(class: FailureClass) -> bool {
    matches!(
        class,
        FailureClass::LimiterUnavailable
            | FailureClass::PolicyUnavailable
            | FailureClass::MeteringUnavailable
            | FailureClass::DecisionUnavailable
    )
}
