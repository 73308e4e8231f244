//! Why a request ended as it did: the rule that decided, the figure or the word that it was applied to, and what a reader may
//! have overlooked.
//!
//! Paths and lines are those of the reader's own files, or of a shipped rule file. Where no rule has a say (a malformed
//! envelope), none is named.

use portcullis_decision::class::FailureClass;
use portcullis_decision::config::{Mode, ModelSource};
use portcullis_decision::log_line::LogLine;
use portcullis_decision::metric::Counter;
use portcullis_decision::routes::normalize;
use portcullis_decision::rules::Gate;
use portcullis_decision::verdict::{Denial, Verdict};

use super::gates::{Outcome, Row};
use super::report::{DecidedBy, Ending, Place, Seen, is_outage};
use crate::imagined::sources::Source;

impl Seen<'_> {
    fn place(&self, source: Option<&Source>, path: String) -> Place {
        Place {
            line: source.and_then(|source| source.line(&path)),
            file: source.map(|source| source.name.clone()),
            path,
        }
    }

    fn rule(&self, path: &str) -> Place {
        let rules = &self.scene.rules;
        self.place(Some(rules), rules.path(path))
    }

    /// What decided, by what became of the gates.
    pub(super) fn decided_by(
        &self,
        ending: Ending,
        refusal: Option<&LogLine>,
        by: Option<Gate>,
        rows: &[Row],
    ) -> DecidedBy {
        let plain = |rule: Option<Place>, why: String| DecidedBy {
            rule,
            source: None,
            why,
        };
        let gates = &self.config().rules.gates;
        if ending == Ending::NotGuarded {
            let routes = self.scene.filter.as_ref();
            let rule = self
                .config()
                .routes
                .as_ref()
                .map(|_| self.place(routes, "routes".to_owned()));
            return plain(
                rule,
                "no route guards this request: the filter leaves it alone".to_owned(),
            );
        }
        if let (Some(gate), Some(line)) = (by, refusal) {
            let at = gates.iter().position(|rule| rule.gate() == gate).unwrap_or_default();
            let is_outage = line.class.is_some_and(is_outage);
            let key = if is_outage { ".when_unavailable" } else { "" };
            let row = rows.get(at).map(|row| row.why.clone()).unwrap_or_default();
            return DecidedBy {
                rule: Some(self.rule(&format!("gates[{at}]{key}"))),
                source: if is_outage { None } else { self.source(gate) },
                why: format!("{}: {row}", gate.name()),
            };
        }
        if let Some(line) = refusal {
            let class = line.class.unwrap_or(FailureClass::DecisionUnavailable);
            let why = line.message.to_string();
            return match class {
                FailureClass::EnvelopeMissing => plain(Some(self.rule("envelope.when_missing")), why),
                FailureClass::RequestMalformed => {
                    let model = self.place(self.scene.filter.as_ref(), "model.from".to_owned());
                    plain(Some(model), why)
                }
                FailureClass::DecisionUnavailable => {
                    let rule = self.rule("decision.when_unavailable");
                    plain(Some(rule), "the decision service did not answer".to_owned())
                }
                _ => plain(None, format!("{why}: no rule can open that")),
            };
        }
        let was_bypassed = |class| self.counted().any(|counter| counter == Counter::Bypassed(class));
        if was_bypassed(FailureClass::EnvelopeMissing) {
            let why = "there is no envelope: no gate was run".to_owned();
            return plain(Some(self.rule("envelope.when_missing")), why);
        }
        if was_bypassed(FailureClass::DecisionUnavailable) {
            let why = "the decision service did not answer: no gate was run".to_owned();
            return plain(Some(self.rule("decision.when_unavailable")), why);
        }
        match rows.iter().position(|row| row.outcome == Outcome::Opened) {
            Some(at) => {
                let rule = self.rule(&format!("gates[{at}].when_unavailable"));
                let opened: Vec<&str> = rows
                    .iter()
                    .filter(|row| row.outcome == Outcome::Opened)
                    .map(|row| row.gate)
                    .collect();
                plain(
                    Some(rule),
                    format!("opened: {}; every other gate passed", opened.join(", ")),
                )
            }
            None if self.decided.is_some() => plain(None, "every listed gate passed".to_owned()),
            None => plain(
                None,
                "no listed gate has anything to check for this envelope".to_owned(),
            ),
        }
    }

    /// Where the figure or the word stands that a gate denied by.
    fn source(&self, gate: Gate) -> Option<Place> {
        let decided = self.decided.as_ref()?;
        let subject = &decided.request.subject;
        let org = subject.org.as_deref().unwrap_or_default();
        let plans = self.scene.plans.as_ref();
        let in_plans = |keys: &[&str]| {
            plans.map(|source| Place {
                path: keys.join("."),
                file: Some(source.name.clone()),
                line: source.line_of_keys(keys),
            })
        };
        let in_plan = |key: &str| {
            let policy = self.scene.policy()?;
            let (_, declared) = policy.orgs.iter().find(|(id, _)| id == org)?;
            in_plans(&["plans", declared.plan.as_deref()?, key])
        };
        let Verdict::Deny(Denial { limit, .. }) = &decided.verdict else {
            return None;
        };
        let limit = limit.as_ref();
        match gate {
            Gate::OrgStatus => in_plans(&["orgs", org, "status"]),
            Gate::ModelPolicy => in_plans(&["orgs", org, "models"]),
            Gate::MonthlyQuota => in_plan("monthly_runs"),
            Gate::CostCap => in_plan("monthly_cost"),
            Gate::Concurrency => in_plan("concurrency"),
            Gate::Capacity => {
                let limit = limit?;
                let (scope, resource) = (limit.scope.name(), limit.resource.name());
                let lane = subject.lane.as_deref().unwrap_or_default();
                let source = self.scene.tiers.as_ref()?;
                let keys = match scope {
                    "lane" => vec!["capacity", "lanes", lane, resource],
                    _ => vec!["capacity", scope, resource],
                };
                Some(Place {
                    path: keys.join("."),
                    file: Some(source.name.clone()),
                    line: source.line_of_keys(&keys),
                })
            }
            Gate::Contract => {
                let limit = limit?;
                let stamped = decided
                    .request
                    .limits
                    .of(limit.scope)
                    .get(limit.resource)
                    .figure()
                    .is_some();
                if !stamped {
                    return in_plan(limit.resource.name());
                }
                let (scope, resource) = (limit.scope.name(), limit.resource.name());
                let name = match resource {
                    "concurrency" => format!("{scope}-concurrency-limit"),
                    _ => format!("{scope}-rate-limit-{resource}"),
                };
                Some(Place {
                    path: format!("{}{name}: {}", self.config().prefix, limit.limit),
                    file: None,
                    line: None,
                })
            }
            Gate::LaunchRate | Gate::Metering => None,
        }
    }

    /// What a reader should know.
    pub(super) fn hints(&self, ending: Ending) -> Vec<String> {
        let config = self.config();
        let mut hints = self.scene.notes.clone();
        if ending == Ending::NotGuarded {
            let path = normalize(&self.request.path);
            let (method, path) = (
                &self.request.method,
                path.as_deref().unwrap_or("(a path that can't be decoded)"),
            );
            for (at, route) in config.routes.iter().flatten().enumerate() {
                let prefix = &route.path_prefix;
                let why = if path.starts_with(prefix) {
                    let methods = route.methods.as_deref().unwrap_or_default().join(", ");
                    format!("the path matches {prefix:?}, and {method} is not among {methods}")
                } else {
                    format!("{path:?} does not begin with {prefix:?}")
                };
                hints.push(format!("routes[{at}] missed: {why}"));
            }
            if config.routes.is_none() {
                hints.push("without routes everything is guarded but OPTIONS".to_owned());
            }
            return hints;
        }
        let has_envelope = self.counted().all(|counter| {
            !matches!(
                counter,
                Counter::Bypassed(FailureClass::EnvelopeMissing)
                    | Counter::Rejected(FailureClass::EnvelopeMissing)
                    | Counter::ShadowRejected(FailureClass::EnvelopeMissing)
            )
        });
        if !has_envelope {
            hints.push(format!(
                "an envelope is an owner id ({0}owner-id) or a limit (such as {0}org-rate-limit-requests)",
                config.prefix
            ));
        }
        if config.leases.max_requests > 0 {
            hints.push("leases are configured: this is the exact decision that they stand in for".to_owned());
        }
        let asks_model = config.model == ModelSource::Body && self.request.body.is_empty();
        if asks_model && ending == Ending::Denied && self.request.method == "POST" {
            hints.push("model.from is \"body\", and the request has no body: give it with --body @FILE".to_owned());
        }
        if config.mode == Mode::Shadow {
            hints.push("mode \"shadow\": a refusal is counted and logged, and the request goes on".to_owned());
        }
        hints
    }
}
