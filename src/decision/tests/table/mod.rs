//! Runs the case table against the pure crate: the filter's stream, the service's evaluation and the ledger, joined by the
//! same JSON that they exchange over the wire.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    unreachable_pub,
    reason = "a test may fail by panicking"
)]

use portcullis_decision::allowance::Allowances;
use portcullis_decision::config::{Environment, FilterConfig, ServiceConfig, parse_policy_file};
use portcullis_decision::evaluation::{Evaluation, LimiterAnswer, Operator, Step, request_fault};
use portcullis_decision::gatehouse::{Callout, Effect, Gatehouse};
use portcullis_decision::launch_rate::LaunchRate;
use portcullis_decision::ledger::Ledger;
use portcullis_decision::log_line::LogLine;
use portcullis_decision::metering::{MeterLedger, Month};
use portcullis_decision::policy::{Lookup, PolicyFile, PolicyView};
use portcullis_decision::reply::Reply;
use portcullis_decision::stream::{CalloutAnswer, Header, Stream};
use portcullis_decision::wire::{DecideAnswer, DecideRequest};
use serde_json::{Value, json};

/// Every file of the table: compiled in, since Node has no file system for us. A native test checks the list.
pub const FILES: [(&str, &str); 4] = [
    (
        "envelope.json",
        include_str!("../../../../wasm-tests/cases/envelope.json"),
    ),
    ("gates.json", include_str!("../../../../wasm-tests/cases/gates.json")),
    ("limits.json", include_str!("../../../../wasm-tests/cases/limits.json")),
    (
        "outages.json",
        include_str!("../../../../wasm-tests/cases/outages.json"),
    ),
];

/// All cases.
pub fn cases() -> Vec<Value> {
    FILES
        .iter()
        .flat_map(|(name, text)| match serde_json::from_str(text) {
            Ok(Value::Array(cases)) => cases,
            other => panic!("{name}: {other:?}"),
        })
        .collect()
}

struct World {
    gatehouse: Gatehouse,
    ledger: Ledger,
    operator: Operator,
    allowances: Allowances,
    limiter_is_down: bool,
    decision_is_down: bool,
    has_limiter: bool,
    policy: Option<PolicyFile>,
    meter: Option<MeterLedger>,
    launches: LaunchRate,
    operations: u128,
}

const MONTH: Month = Month {
    index: 24_318,
    ends_in_ms: 86_400_000,
    length_s: 2_592_000,
};

#[derive(Default)]
struct Outcome {
    reply: Option<Reply>,
    upstream: u64,
    counted: Vec<String>,
    lines: Vec<LogLine>,
}

impl World {
    fn of(case: &Value) -> Self {
        let mut filter =
            json!({"profile": "development", "rules": case["rules"], "decision": {"upstream": "portcullis"}});
        if let Some(more) = case["filter"].as_object() {
            filter.as_object_mut().unwrap().extend(more.clone());
        }
        let text = filter.to_string();
        let config = FilterConfig::parse(text.as_bytes()).unwrap_or_else(|faults| panic!("{faults}"));
        let service = json!({"profile": "development", "listen": "127.0.0.1:1", "capacity": case["capacity"]});
        let service = ServiceConfig::parse(service.to_string().as_bytes(), &Environment::default())
            .unwrap_or_else(|faults| panic!("{faults}"));
        let policy = case["policy"].is_object().then(|| {
            parse_policy_file(case["policy"].to_string().as_bytes()).unwrap_or_else(|faults| panic!("{faults}"))
        });
        let mut meter = MeterLedger::default();
        for (org, cost) in case["spent"].as_object().into_iter().flatten() {
            meter.add_cost(&MONTH, org, cost.as_u64().unwrap());
        }
        let is_down = |what: &str| {
            case["down"]
                .as_array()
                .is_some_and(|down| down.iter().any(|d| d == what))
        };
        Self {
            gatehouse: Gatehouse::new(config, text.as_bytes()),
            ledger: Ledger::default(),
            operator: Operator {
                tiers: service.capacity,
                window_s: service.limiter.window_s,
                slot_ttl_ms: 30_000,
            },
            allowances: Allowances::default(),
            limiter_is_down: is_down("limiter"),
            decision_is_down: is_down("decision"),
            has_limiter: case["limiter"] != "none",
            policy: policy.filter(|_| !is_down("policy")),
            meter: Some(meter).filter(|_| !is_down("metering")),
            launches: LaunchRate::default(),
            operations: 0,
        }
    }

    fn look_up(&self, org: &str, model: Option<&str>) -> PolicyView {
        let Some(policy) = &self.policy else {
            return PolicyView::UNAVAILABLE;
        };
        let provider = model.and_then(|model| policy.provider(model)).map(str::to_owned);
        PolicyView {
            org: Lookup::Known(policy.org(org)),
            provider: Lookup::Known(provider),
        }
    }

    /// What the service answers, with its JSON on both sides.
    fn service(&mut self, callout: &Callout) -> String {
        let request: DecideRequest = serde_json::from_slice(&callout.body).unwrap();
        assert_eq!(request_fault(&request), None);
        let mut allowances = std::mem::take(&mut self.allowances);
        let answer = self.evaluate(&request, &mut allowances);
        self.allowances = allowances;
        answer
    }

    fn evaluate(&mut self, request: &DecideRequest, allowances: &mut Allowances) -> String {
        let mut allow = |class, choice| allowances.admit(class, choice, 0);
        let operator = self.operator.clone();
        let mut evaluation = Evaluation::new(request, &operator);
        loop {
            match evaluation.step(&mut allow) {
                Step::Charge(plan) => {
                    let answer = if self.limiter_is_down {
                        LimiterAnswer::Unavailable
                    } else if self.has_limiter {
                        LimiterAnswer::Charged(self.ledger.charge(0, &plan, self.operator.slot_ttl_ms))
                    } else {
                        LimiterAnswer::NoLimiter
                    };
                    evaluation.charged(answer, &mut allow);
                }
                Step::Policy { org, model } => evaluation.policy(self.look_up(&org, model.as_deref())),
                Step::Launch { org, per_minute, burst } => {
                    evaluation.launched(self.launches.take(&org, per_minute, burst, 0));
                }
                Step::Meter(plan) => {
                    let answer = self.meter.as_mut().map(|meter| meter.record(&MONTH, &plan));
                    evaluation.metered(answer, &mut allow);
                }
                Step::GiveBack(taken) => {
                    taken.limiter.into_iter().for_each(|op| self.ledger.cancel(0, op));
                    if let (Some(op), Some(meter)) = (taken.metering, &mut self.meter) {
                        meter.cancel(&MONTH, op);
                    }
                    if let Some((org, per_minute)) = taken.launch {
                        self.launches.give_back(&org, per_minute);
                    }
                }
                Step::Done(verdict) => {
                    return serde_json::to_string(&DecideAnswer {
                        op: request.op,
                        verdict,
                    })
                    .unwrap();
                }
            }
        }
    }

    fn request(&mut self, headers: &Value, now_ms: u64) -> Outcome {
        let mut fields: Vec<Header> = vec![
            (b":method".to_vec(), b"POST".to_vec()),
            (b":path".to_vec(), b"/v1/chat".to_vec()),
        ];
        for (name, value) in headers.as_object().unwrap() {
            fields.push((
                format!("x-admission-{name}").into_bytes(),
                value.as_str().unwrap().into(),
            ));
        }
        let mut stream = Stream::default();
        self.operations += 1;
        let op = self.operations.to_be_bytes();
        let mut outcome = Outcome::default();
        let mut effects = stream.on_request_headers(&mut self.gatehouse, Some(&fields), now_ms, &mut || Some(op));
        loop {
            let mut dispatched = None;
            for effect in effects {
                match effect {
                    Effect::Dispatch(callout) => dispatched = Some(callout),
                    Effect::Reply(reply) => assert!(outcome.reply.replace(reply).is_none(), "two replies"),
                    Effect::Count(counter, 1) => outcome.counted.push(counter.name()),
                    Effect::Log(line) => outcome.lines.push(line),
                    _ => {}
                }
            }
            let Some(callout) = dispatched else { break };
            effects = stream.on_dispatched();
            let answer = if self.decision_is_down {
                None
            } else {
                Some(self.service(&callout))
            };
            let answer = CalloutAnswer {
                status: Some(if answer.is_some() { 200 } else { 504 }),
                body: answer.as_deref().map(str::as_bytes),
            };
            effects.extend(stream.on_callout_answer(&mut self.gatehouse, answer, now_ms));
        }
        outcome.upstream = u64::from(!stream.is_held());
        stream.on_end(&mut self.gatehouse, now_ms);
        outcome
    }
}

fn header<'a>(reply: &'a Reply, name: &str) -> Option<&'a str> {
    reply
        .headers
        .iter()
        .find(|(n, _)| *n == name)
        .map(|(_, value)| value.as_str())
}

/// What differs from an expectation, in words.
fn difference(outcome: &Outcome, expect: &Value) -> Option<String> {
    let status = outcome.reply.as_ref().map_or(200, |reply| reply.status);
    if expect["status"] != status || expect["upstream"] != outcome.upstream {
        return Some(format!("status {status}, upstream {}", outcome.upstream));
    }
    if let Some(reply) = &outcome.reply {
        let body: Value = serde_json::from_slice(&reply.body).unwrap();
        let (code, scope) = (&body["error"]["code"], &body["error"]["scope"]);
        if expect["code"] != *code || expect["scope"] != *scope {
            return Some(format!("code {code}, scope {scope}"));
        }
        let class = header(reply, "x-portcullis-class");
        if expect["class"].as_str() != class || body["error"]["type"].as_str() != class {
            return Some(format!("class {class:?}"));
        }
        let retry_after = header(reply, "retry-after").map(|text| text.parse::<u64>().unwrap());
        let range = expect["retry_after"]
            .as_array()
            .map(|r| (r[0].as_u64().unwrap(), r[1].as_u64().unwrap()));
        let fits = match (retry_after, range) {
            (None, None) => true,
            (Some(seconds), Some((least, most))) => (least..=most).contains(&seconds),
            _ => false,
        };
        if !fits || body["error"]["retry_after"].as_u64() != retry_after {
            return Some(format!("retry-after {retry_after:?}"));
        }
        let should_retry = header(reply, "x-should-retry");
        if expect["should_retry"].as_bool().map(|b| b.to_string()).as_deref() != should_retry {
            return Some(format!("x-should-retry {should_retry:?}"));
        }
    }
    let counter = expect["count"].as_str();
    if counter.is_some_and(|counter| outcome.counted.iter().filter(|name| *name == counter).count() != 1) {
        return Some(format!("counted {:?}", outcome.counted));
    }
    None
}

/// Whether some line has all keys of an expectation.
fn has_line(lines: &[LogLine], expected: &Value) -> bool {
    let Some(expected) = expected.as_object() else {
        return true;
    };
    lines.iter().any(|line| {
        let line: Value = serde_json::from_str(&line.to_json()).unwrap();
        expected.iter().all(|(key, value)| line[key] == *value)
    })
}

/// Runs one case; what went wrong, if anything.
pub fn run(case: &Value) -> Result<(), String> {
    let mut world = World::of(case);
    let name = case["name"].as_str().unwrap();
    for (at, request) in case["requests"].as_array().unwrap().iter().enumerate() {
        let expect = &request["expect"];
        let mut lines = Vec::new();
        for time in 0..request["times"].as_u64().unwrap_or(1) {
            let outcome = world.request(&request["headers"], 0);
            if let Some(difference) = difference(&outcome, expect) {
                return Err(format!(
                    "{name}: request {at}, time {time}: {difference}, expected {expect}"
                ));
            }
            lines.extend(outcome.lines);
        }
        lines.extend(
            world
                .gatehouse
                .last_lines()
                .into_iter()
                .filter_map(|effect| match effect {
                    Effect::Log(line) => Some(line),
                    _ => None,
                }),
        );
        if !has_line(&lines, &expect["log"]) {
            return Err(format!(
                "{name}: request {at}: no line {}, but {lines:?}",
                expect["log"]
            ));
        }
    }
    for (org, runs) in case["runs_after"].as_object().into_iter().flatten() {
        let recorded = world.meter.as_ref().map_or(0, |meter| meter.runs(&MONTH, org));
        if *runs != recorded {
            return Err(format!("{name}: {recorded} runs recorded for {org}, expected {runs}"));
        }
    }
    Ok(())
}
