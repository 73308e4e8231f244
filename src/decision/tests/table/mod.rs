//! The case table and what compares an answer with it. Who answers is a [`Gateway`]: the pure stream ([`pure`]), the
//! real `.wasm` under the test host, or real Envoy (both in `wasm-tests/`, which include this module by its path).
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    dead_code,
    missing_docs,
    unreachable_pub,
    reason = "a test may fail by panicking"
)]

pub mod pure;

use portcullis_decision::allowance::Allowances;
use portcullis_decision::class::FailureClass;
use portcullis_decision::config::{Environment, ServiceConfig, parse_policy_file};
use portcullis_decision::evaluation::{Evaluation, LimiterAnswer, Operator, Step, request_fault};
use portcullis_decision::launch_rate::LaunchRate;
use portcullis_decision::ledger::Ledger;
use portcullis_decision::metering::{MeterLedger, Month};
use portcullis_decision::policy::{Lookup, PolicyFile, PolicyView};
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

/// The filter's configuration of a case.
pub fn filter(case: &Value) -> Value {
    let mut filter = json!({"profile": "development", "rules": case["rules"], "decision": {"upstream": "portcullis"}});
    if let Some(more) = case["filter"].as_object() {
        filter.as_object_mut().unwrap().extend(more.clone());
    }
    filter
}

/// Whether a case wants something not to answer.
pub fn is_down(case: &Value, what: &str) -> bool {
    case["down"]
        .as_array()
        .is_some_and(|down| down.iter().any(|d| d == what))
}

/// What the client got for one request, and what it caused.
#[derive(Debug, Default)]
pub struct Outcome {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// Requests that reached the upstream.
    pub upstream: u64,
    /// Counters that grew by one, where whoever answers can tell for each request.
    pub counted: Option<Vec<String>>,
}

impl Outcome {
    fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, value)| value.as_str())
    }
}

/// Who answers requests.
pub trait Gateway {
    /// One request with these envelope headers.
    fn request(&mut self, fields: &[(String, String)], service: &mut Service) -> Outcome;
    /// The log lines so far.
    fn lines(&mut self) -> Vec<Value>;
}

/// The service of a case, in memory: evaluation, ledgers, policy.
pub struct Service {
    ledger: Ledger,
    operator: Operator,
    allowances: Allowances,
    limiter_is_down: bool,
    is_down: bool,
    has_limiter: bool,
    policy: Option<PolicyFile>,
    meter: Option<MeterLedger>,
    launches: LaunchRate,
}

const MONTH: Month = Month {
    index: 24_318,
    ends_in_ms: 86_400_000,
    length_s: 2_592_000,
};

impl Service {
    pub fn of(case: &Value) -> Self {
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
        Self {
            ledger: Ledger::default(),
            operator: Operator {
                tiers: service.capacity,
                window_s: service.limiter.window_s,
                slot_ttl_ms: 30_000,
            },
            allowances: Allowances::default(),
            limiter_is_down: is_down(case, "limiter"),
            is_down: is_down(case, "decision"),
            has_limiter: case["limiter"] != "none",
            policy: policy.filter(|_| !is_down(case, "policy")),
            meter: Some(meter).filter(|_| !is_down(case, "metering")),
            launches: LaunchRate::default(),
        }
    }

    /// The answer to a decide body, in JSON on both sides; `None` if the service is down.
    pub fn answer(&mut self, body: &[u8]) -> Option<String> {
        if self.is_down {
            return None;
        }
        let request: DecideRequest = serde_json::from_slice(body).unwrap();
        assert_eq!(request_fault(&request), None);
        let mut allowances = std::mem::take(&mut self.allowances);
        let (answer, given_back) = self.evaluate(&request, &mut allowances);
        given_back.into_iter().for_each(|class| allowances.give_back(class));
        self.allowances = allowances;
        Some(answer)
    }

    fn look_up(&self, org: &str, provider_of: Option<&str>, price_of: Option<&str>) -> PolicyView {
        let Some(policy) = &self.policy else {
            return PolicyView::UNAVAILABLE;
        };
        let provider = provider_of.and_then(|model| policy.provider(model)).map(str::to_owned);
        PolicyView {
            org: Lookup::Known(policy.org(org)),
            provider: Lookup::Known(provider),
            price: Lookup::Known(price_of.and_then(|model| policy.price(model)).copied()),
            fresh_for_ms: None,
        }
    }

    fn evaluate(&mut self, request: &DecideRequest, allowances: &mut Allowances) -> (String, Vec<FailureClass>) {
        let mut given_back = Vec::new();
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
                Step::Policy {
                    org,
                    provider_of,
                    price_of,
                } => evaluation.policy(self.look_up(&org, provider_of.as_deref(), price_of.as_deref())),
                Step::Launch { org, per_minute, burst } => {
                    evaluation.launched(self.launches.take(&org, per_minute, burst, 0));
                }
                Step::Meter(plan) => {
                    let answer = self.meter.as_mut().map(|meter| meter.record(&MONTH, &plan));
                    evaluation.metered(answer, &MONTH, &mut allow);
                }
                Step::GiveBack(taken) => {
                    taken.limiter.into_iter().for_each(|op| self.ledger.cancel(0, op));
                    given_back.extend(taken.allowances.iter().copied());
                    if let (Some(op), Some(meter)) = (taken.metering, &mut self.meter) {
                        meter.cancel(&MONTH, op);
                    }
                    if let Some((org, per_minute)) = taken.launch {
                        self.launches.give_back(&org, per_minute);
                    }
                }
                Step::Done(verdict) => {
                    let answer = DecideAnswer {
                        op: request.op,
                        verdict,
                    };
                    return (serde_json::to_string(&answer).unwrap(), given_back);
                }
            }
        }
    }
}

/// One thing in which an answer is not what was expected: what it is about, and what came instead.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Difference {
    pub aspect: &'static str,
    pub came: String,
}

/// Everything in which an answer is not what was expected.
pub fn differences(outcome: &Outcome, expect: &Value) -> Vec<Difference> {
    let mut all = Vec::new();
    let mut differs = |aspect, came: String| all.push(Difference { aspect, came });
    if expect["status"] != outcome.status {
        differs("status", outcome.status.to_string());
    }
    if expect["upstream"] != outcome.upstream {
        differs("upstream", outcome.upstream.to_string());
    }
    if let Some(code) = expect["code"].as_str() {
        let named = |came: Option<String>| came.unwrap_or_else(|| "none".into());
        let body: Value = serde_json::from_slice(&outcome.body).unwrap_or_default();
        let error = &body["error"];
        let class = outcome.header("x-portcullis-class");
        let retry_after = outcome.header("retry-after").map(|text| text.parse::<u64>().unwrap());
        if outcome.body.is_empty() {
            differs("body", "empty".into());
        } else if error["code"] != code
            || expect["scope"] != error["scope"]
            || error["type"].as_str() != class
            || error["retry_after"].as_u64() != retry_after
        {
            differs("body", String::from_utf8_lossy(&outcome.body).into_owned());
        }
        if expect["class"].as_str() != class {
            differs("class", named(class.map(str::to_owned)));
        }
        let range = expect["retry_after"]
            .as_array()
            .map(|r| r[0].as_u64().unwrap()..=r[1].as_u64().unwrap());
        let fits = match (retry_after, range) {
            (None, None) => true,
            (Some(seconds), Some(range)) => range.contains(&seconds),
            _ => false,
        };
        if !fits {
            differs("retry-after", named(retry_after.map(|seconds| seconds.to_string())));
        }
        let should_retry = outcome.header("x-should-retry");
        if expect["should_retry"].as_bool().map(|yes| yes.to_string()).as_deref() != should_retry {
            differs("x-should-retry", named(should_retry.map(str::to_owned)));
        }
    }
    if let (Some(counter), Some(counted)) = (expect["count"].as_str(), &outcome.counted)
        && counted.iter().filter(|name| *name == counter).count() != 1
    {
        let came = if counted.is_empty() {
            "none".into()
        } else {
            counted.join(", ")
        };
        differs("count", came);
    }
    all
}

/// What differs first from an expectation, in words.
pub fn difference(outcome: &Outcome, expect: &Value) -> Option<String> {
    let first = differences(outcome, expect).into_iter().next()?;
    let text = String::from_utf8_lossy(&outcome.body);
    Some(format!("{} {}: {text}", first.aspect, first.came))
}

/// Whether some line has all keys of an expectation.
pub fn has_line(lines: &[Value], expected: &Value) -> bool {
    let Some(expected) = expected.as_object() else {
        return true;
    };
    lines
        .iter()
        .any(|line| expected.iter().all(|(key, value)| line[key] == *value))
}

/// The envelope headers of a request, with the default prefix.
pub fn fields(request: &Value) -> Vec<(String, String)> {
    let headers = request["headers"].as_object().unwrap();
    headers
        .iter()
        .map(|(name, value)| (format!("x-admission-{name}"), value.as_str().unwrap().to_owned()))
        .collect()
}

/// Runs one case; what went wrong first, if anything.
pub fn run(case: &Value, gateway: &mut dyn Gateway) -> Result<(), String> {
    let name = case["name"].as_str().unwrap();
    let first = observe(case, gateway).into_iter().next();
    first.map_or(Ok(()), |(at, Difference { aspect, came })| {
        Err(format!(
            "{name}: request {at}: {aspect} {came}, expected {}",
            case["requests"][at]["expect"]
        ))
    })
}

/// Runs one case; everything in which it differs, each with the request, counted from 0.
pub fn observe(case: &Value, gateway: &mut dyn Gateway) -> Vec<(usize, Difference)> {
    let mut service = Service::of(case);
    let mut all = Vec::new();
    let requests = case["requests"].as_array().unwrap();
    for (at, request) in requests.iter().enumerate() {
        let expect = &request["expect"];
        for _ in 0..request["times"].as_u64().unwrap_or(1) {
            let outcome = gateway.request(&fields(request), &mut service);
            all.extend(
                differences(&outcome, expect)
                    .into_iter()
                    .map(|difference| (at, difference)),
            );
        }
        let lines = gateway.lines();
        if !has_line(&lines, &expect["log"]) {
            let came = format!("{lines:?}");
            all.push((at, Difference { aspect: "log", came }));
        }
    }
    for (org, runs) in case["runs_after"].as_object().into_iter().flatten() {
        let recorded = service.meter.as_ref().map_or(0, |meter| meter.runs(&MONTH, org));
        if *runs != recorded {
            let came = format!("{recorded} for {org}");
            all.push((requests.len(), Difference { aspect: "runs", came }));
        }
    }
    all
}
