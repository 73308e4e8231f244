//! The case table (`wasm-tests/cases/`) against the real `.wasm` under each kind of host: the same data that drives the pure
//! crate and real Envoy, with the service's own code behind the callouts.
//!
//! In what a host differs from the table is itself a table (`wasm-tests/hosts.json`): it names every difference and nothing
//! else. A request that the table refuses reaches the upstream on no host.

mod stated;

use std::collections::BTreeSet;

use portcullis_decision::config::{FilterConfig, Mode};
use portcullis_decision::rules::Choice;
use portcullis_test_host::{Callout, Failure, Personality, TestHost, filter_module_sha256};
use serde_json::{Value, json};

use crate::table::{self, Difference, Gateway, Outcome, Service};

/// Every kind of host that the table is run under.
pub(crate) const HOSTS: [Personality; 3] = [Personality::ENVOY, Personality::WASMX, Personality::APISIX];

struct Hosted {
    host: TestHost,
    /// The module has refused its configuration, and the host answers by itself.
    is_refused: bool,
}

impl Hosted {
    fn of(personality: Personality, case: &Value) -> Self {
        let mut host = TestHost::new(personality);
        let mut filter = table::filter(case);
        filter["decision"]["upstream"] = json!(personality.decision_upstream());
        host.configure(&filter.to_string())
            .expect("a configuration without faults");
        Self {
            host,
            is_refused: false,
        }
    }

    /// As clients write names: a host may hand them over like that.
    fn spelt(&self, name: &str) -> String {
        if self.host.personality().lower_case_names || name.starts_with(':') {
            return name.to_owned();
        }
        let words = name.split('-').map(|word| {
            let (first, rest) = word.split_at(1.min(word.len()));
            first.to_uppercase() + rest
        });
        words.collect::<Vec<_>>().join("-")
    }
}

impl Gateway for Hosted {
    fn request(&mut self, fields: &[(String, String)], service: &mut Service) -> Outcome {
        let fields: Vec<_> = fields.iter().map(|(name, value)| (self.spelt(name), value)).collect();
        let host = &mut self.host;
        let before: Vec<(String, u64)> = host
            .counters()
            .iter()
            .map(|(name, n)| ((*name).to_owned(), *n))
            .collect();
        let mut lines = vec![(":method", "POST"), (":path", "/v1/chat"), (":authority", "gateway")];
        lines.extend(fields.iter().map(|(name, value)| (name.as_str(), value.as_str())));
        let stream = host.request(&lines);
        // One decision and at most one retry of it.
        for _ in 0..2 {
            let Some(callout) = host
                .pending_callouts()
                .into_iter()
                .find(|c| c.context == stream && c.is_decide())
            else {
                break;
            };
            match service.answer(callout.json().to_string().as_bytes()) {
                Some(answer) => host.answer(callout.token, 200, answer.as_bytes()),
                None => host.fail(callout.token, Failure::TimedOut),
            }
        }
        let grown = host.counters().into_iter().filter(|(name, n)| {
            let was = before
                .iter()
                .find(|(known, _)| known == name)
                .map_or(0, |(_, was)| *was);
            *n == was + 1
        });
        let counted = Some(grown.map(|(name, _)| name.to_owned()).collect());
        let seen = host.stream(stream);
        assert!(!seen.was_let_go, "the host has let a request go by itself: {host:#?}");
        let upstream = u64::from(seen.upstream.is_some());
        let mut outcome = Outcome {
            status: 200,
            upstream,
            counted,
            ..Outcome::default()
        };
        if let [reply] = seen.replies.as_slice() {
            outcome.status = u16::try_from(reply.status).expect("a status");
            outcome.headers = ["x-portcullis-class", "retry-after", "x-should-retry"]
                .iter()
                .filter_map(|name| Some(((*name).to_owned(), reply.header(name)?.to_owned())))
                .collect();
            outcome.body.clone_from(&reply.body);
        }
        if let Some(status) = seen.host_status {
            assert_eq!((status, upstream), (503, 0), "a refused configuration");
            self.is_refused = true;
            outcome.status = status;
        }
        host.finish(stream);
        // What a host without ticks tells in a request is heard, so that the next request is like the first.
        while let Some(batch) = host.pending_callouts().into_iter().find(|callout| callout.is_settle()) {
            host.answer(batch.token, 200, b"{}");
        }
        outcome
    }

    fn lines(&mut self) -> Vec<Value> {
        // A second later whatever was held back is written.
        self.host.tick(1_000);
        self.host.logs().iter().map(|line| line.json()).collect()
    }
}

/// In what a host differs from a case.
fn differences(personality: Personality, case: &Value) -> BTreeSet<Difference> {
    let mut hosted = Hosted::of(personality, case);
    let seen = table::observe(case, &mut hosted);
    let violations = hosted.host.violations();
    assert!(
        violations.is_empty(),
        "{}: {}: {violations:?}",
        personality.name,
        case["name"]
    );
    for (at, difference) in &seen {
        let is_admission = difference.aspect == "upstream" && difference.came != "0";
        assert!(
            !is_admission,
            "{} lets request {at} of {} through, which the table refuses",
            personality.name, case["name"]
        );
    }
    if hosted.is_refused {
        let refused = Difference {
            aspect: "configuration",
            came: "refused".to_owned(),
        };
        return BTreeSet::from([refused]);
    }
    seen.into_iter().map(|(_, difference)| difference).collect()
}

#[test]
fn every_host_differs_from_the_case_table_in_what_is_stated_and_in_nothing_else() {
    let module = filter_module_sha256();
    let cases = table::cases();
    let mut found = BTreeSet::new();
    for personality in HOSTS {
        for case in &cases {
            for difference in differences(personality, case) {
                let name = case["name"].as_str().expect("a name");
                found.insert((personality.name.to_owned(), difference, name.to_owned()));
            }
        }
        println!("{} cases under {}; module {module}", cases.len(), personality.name);
    }
    let stated = stated::all(&cases);
    let unstated: Vec<_> = found.difference(&stated).collect();
    let unfounded: Vec<_> = stated.difference(&found).collect();
    assert!(
        unstated.is_empty() && unfounded.is_empty(),
        "not in wasm-tests/hosts.json:\n{unstated:#?}\nin it, and not so:\n{unfounded:#?}"
    );
}

/// Without an answer a request reaches the upstream only where it needs none, or where the rules admit what the decision
/// service does not answer.
#[test]
fn on_no_host_does_a_decision_service_that_is_down_let_through_what_the_rules_keep() {
    for personality in HOSTS {
        for case in &table::cases() {
            let mut down = case.clone();
            down["down"] = json!(["decision"]);
            let filter = table::filter(case).to_string();
            let config = FilterConfig::parse(filter.as_bytes()).expect("no faults");
            let opens = config.rules.decision != Choice::Reject || config.mode == Mode::Shadow;
            for request in case["requests"].as_array().expect("requests") {
                // A host of its own: a breaker that has opened would hide whether an answer is needed.
                let mut hosted = Hosted::of(personality, &down);
                let outcome = hosted.request(&table::fields(request), &mut Service::of(&down));
                let is_asked = hosted.host.sent().iter().any(Callout::is_decide);
                let may_pass = if is_asked {
                    opens
                } else {
                    request["expect"]["upstream"] == 1
                };
                assert!(
                    outcome.upstream == 0 || may_pass,
                    "{}: {}: {request} reaches the upstream",
                    personality.name,
                    case["name"]
                );
            }
        }
    }
}
