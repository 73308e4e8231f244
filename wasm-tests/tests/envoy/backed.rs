//! What tests over real stores share: service configurations with time enough for a loaded machine, the policy that they
//! apply, the refusals of an outage, and what the books say afterwards.

use std::process::Command;
use std::time::Duration;

use portcullis_wasm_tests::{Answer, DEADLINE, Gateway, Service, Upstream, portcullis, until};
use serde_json::{Value, json};
use tempfile::NamedTempFile;

use crate::expect::{DECISION_UNAVAILABLE, Refusal};
use crate::postgres::Postgres;

/// What one operation of a store may take. Far more than it does, as a machine under test is slow.
pub(crate) const OP_TIMEOUT_MS: u64 = 400;
/// What the filter waits for the service: several operations that all time out still leave it time to say so.
pub(crate) const TIMEOUT: Duration = Duration::from_millis(2_000);
/// What a busy machine may add to an answer.
const SLACK: Duration = Duration::from_millis(2_500);

pub(crate) const LIMITER_UNAVAILABLE: Refusal = degraded("limiter_unavailable");
pub(crate) const POLICY_UNAVAILABLE: Refusal = degraded("policy_unavailable");
pub(crate) const METERING_UNAVAILABLE: Refusal = degraded("metering_unavailable");
pub(crate) const ORG_SUSPENDED: Refusal = denied("ORG_SUSPENDED");
pub(crate) const MODEL_NOT_ALLOWED: Refusal = denied("MODEL_NOT_ALLOWED");
pub(crate) const RUN_QUOTA_EXCEEDED: Refusal = monthly("RUN_QUOTA_EXCEEDED");
pub(crate) const COST_CAP_EXCEEDED: Refusal = monthly("COST_CAP_EXCEEDED");

const fn degraded(class: &'static str) -> Refusal {
    Refusal {
        class,
        ..DECISION_UNAVAILABLE
    }
}

const fn denied(code: &'static str) -> Refusal {
    Refusal {
        status: 403,
        code,
        class: "policy_denied",
        retry_after: None,
        message: None,
    }
}

const fn monthly(code: &'static str) -> Refusal {
    Refusal {
        status: 429,
        code,
        class: "quota_exhausted",
        retry_after: Some((1, 31 * 86_400)),
        message: None,
    }
}

/// A service over a limiter at this address.
pub(crate) fn over_redis(url: &str) -> Value {
    json!({"profile": "development", "limiter": {"url": url, "op_timeout_ms": OP_TIMEOUT_MS}})
}

/// The filter's side of these timeouts.
pub(crate) fn patient() -> Value {
    json!({"decision": {"timeout_ms": u64::try_from(TIMEOUT.as_millis()).unwrap()}})
}

/// However the stores fail, the answer comes within the filter's timeout.
#[track_caller]
pub(crate) fn in_time(answer: &Answer) {
    assert!(answer.took < TIMEOUT + SLACK, "took {:?}", answer.took);
}

/// A rule file with one choice for the limiter and another for the service itself.
pub(crate) fn contract_rules(name: &str, limiter: Value, decision: &str) -> Value {
    json!({
        "name": name,
        "envelope": {"when_missing": "reject"},
        "gates": [{"gate": "contract", "when_unavailable": limiter}],
        "decision": {"when_unavailable": decision}
    })
}

/// Runs `portcullis policy apply` with this policy.
pub(crate) fn apply(url: &str, policy: &Value) {
    let file = NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), policy.to_string()).expect("the policy can be written");
    let mut apply = Command::new(portcullis());
    let apply = apply.args(["policy", "apply"]).arg(file.path());
    let output = apply
        .env("POSTGRES_DSN", url)
        .output()
        .expect("portcullis policy apply runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// What `portcullis unmetered list` shows.
pub(crate) fn unmetered(url: &str) -> Vec<Value> {
    let mut list = Command::new(portcullis());
    let list = list.args(["unmetered", "list", "--json"]).env("POSTGRES_DSN", url);
    let output = list.output().expect("portcullis unmetered list runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines()
        .map(|line| serde_json::from_str(line).expect("a row is JSON"))
        .collect()
}

/// The runs of all organizations and months.
pub(crate) async fn runs(postgres: &Postgres) -> usize {
    let rows = postgres
        .run("SELECT coalesce(sum(runs), 0) FROM portcullis_months")
        .await;
    rows[0][0].parse().expect("a number")
}

/// Waits until the services have delivered everything and exactly `expected` runs are billed.
pub(crate) async fn billed(postgres: &Postgres, services: &[&Service], expected: usize) {
    let mut seen = String::new();
    let probe = async || {
        let mut waiting = 0.0;
        for service in services {
            waiting += service.metric("portcullis_unmetered_waiting").await;
        }
        let runs = runs(postgres).await;
        let news = format!("{runs} runs billed, {expected} expected, {waiting} waiting");
        if news != seen {
            seen = news;
            eprintln!("{seen}");
        }
        (waiting == 0.0 && runs == expected).then_some(())
    };
    until("even books", DEADLINE * 2, probe).await;
}

/// How many events the log lines of this kind stand for.
pub(crate) fn told(lines: &[Value], event: &str, class: &str) -> u64 {
    lines
        .iter()
        .filter(|line| line["event"] == event && line["class"] == class)
        .map(|line| line["count"].as_u64().unwrap_or(1))
        .sum()
}

/// Waits until the log lines of gateway and service about this class account for every one of `count` events, the held-back
/// ones included, and gives the numbers of lines that it took.
pub(crate) async fn all_told(gateway: &Gateway, service: Option<&Service>, class: &str, count: u64) -> (usize, usize) {
    until(
        &format!("{count} bypasses of {class} in the log"),
        DEADLINE,
        async || {
            let by_service = service.is_none_or(|service| told(&service.log_lines(), "bypassed", class) == count);
            (by_service && told(&gateway.log_lines(), "bypassed", class) == count).then_some(())
        },
    )
    .await;
    let lines = |lines: Vec<Value>| {
        lines
            .iter()
            .filter(|line| line["event"] == "bypassed" && line["class"] == class)
            .count()
    };
    (
        lines(gateway.log_lines()),
        service.map_or(0, |service| lines(service.log_lines())),
    )
}

/// A call that nothing of may reach the upstream, and one that must.
pub(crate) struct Watch<'a> {
    pub(crate) gateway: &'a Gateway,
    pub(crate) upstream: &'a Upstream,
}

impl Watch<'_> {
    /// One call, and how many requests it made the upstream see.
    pub(crate) async fn call(&self, listener: &str, call: &portcullis_wasm_tests::Call) -> (Answer, usize) {
        let before = self.upstream.hits();
        let answer = self.gateway.call_on(listener, call).await;
        assert!(
            [200, 503].contains(&answer.status),
            "an outage is neither a denial nor an error: {answer:?} {}",
            answer.text()
        );
        in_time(&answer);
        (answer, self.upstream.hits() - before)
    }

    pub(crate) async fn served(&self, listener: &str, call: &portcullis_wasm_tests::Call) {
        let (answer, hits) = self.call(listener, call).await;
        crate::expect::served(&answer);
        assert_eq!(hits, 1, "upstream hits");
    }

    pub(crate) async fn refused(&self, listener: &str, call: &portcullis_wasm_tests::Call, refusal: Refusal) {
        let (answer, hits) = self.call(listener, call).await;
        crate::expect::refused(&answer, refusal);
        assert_eq!(hits, 0, "a closed gateway lets nothing up");
    }
}
