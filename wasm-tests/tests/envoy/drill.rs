//! `portcullis drill` against real Envoy, the real service, Redis and PostgreSQL: green under each shipped rule file, and red
//! for every way in which a gateway can look well and not enforce.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, Output};

use portcullis_wasm_tests::{
    Gateway, GatewayPlan, Reply, Service, Upstream, closed_port, free_port, merge, portcullis,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::backed::apply;
use crate::postgres::Postgres;
use crate::stores::Store;

const TOKEN: &str = "drill-token-0123456789abcdef0123456789";
/// Set by the upstream alone.
const BY_UPSTREAM: &str = "x-served-by";

fn policy() -> Value {
    json!({
        "providers": {"gpt-4o": "openai"},
        "prices": {"*": {"input": 0, "output": 0}},
        "plans": {
            "team": {"concurrency": 100, "requests": 1_000_000, "monthly_runs": 1_000_000, "monthly_cost": 1_000_000},
            "spent": {"monthly_runs": 0}
        },
        "orgs": {
            "drill": {"status": "active", "plan": "team", "models": ["gpt-4o"]},
            "drill-suspended": {"status": "suspended", "plan": "team", "models": ["gpt-4o"]},
            "drill-spent": {"status": "active", "plan": "spent", "models": ["gpt-4o"]}
        }
    })
}

/// The whole configuration of a filter, as its gateway has it and as the drill is told.
fn filter(rules: &str, changes: Value) -> Value {
    let model = if rules.starts_with("fail-closed") {
        "header"
    } else {
        "none"
    };
    let mut filter = json!({
        "profile": "staging", "rules": rules, "model": {"from": model},
        "decision": {"upstream": "portcullis", "timeout_ms": 2000}
    });
    merge(&mut filter, changes);
    filter
}

/// Files for a drill, and what it wrote.
struct Drill {
    folder: TempDir,
    arguments: Vec<String>,
}

/// What came of a drill.
struct Outcome {
    code: Option<i32>,
    out: String,
    err: String,
    report: Value,
    markdown: String,
}

impl Outcome {
    fn row(&self, probe: &str) -> &Value {
        let rows = self.report["rows"].as_array().unwrap();
        let found = rows.iter().find(|row| row["probe"] == probe);
        found.unwrap_or_else(|| panic!("no probe {probe:?} in {:#}", self.report))
    }

    fn reasons(&self, probe: &str) -> String {
        let row = self.row(probe);
        assert_eq!(row["green"], false, "{row}");
        row["reasons"].to_string()
    }

    fn is_red(&self) {
        assert_eq!(
            (self.code, &self.report["green"]),
            (Some(1), &json!(false)),
            "{}",
            self.told()
        );
        assert!(
            self.out.contains("RED:") && self.markdown.contains("**RED:"),
            "{}",
            self.told()
        );
    }

    fn told(&self) -> String {
        format!("{}\n{}", self.out, self.err)
    }
}

impl Drill {
    fn of(gateway: SocketAddr, filter: &Value) -> Self {
        let mut drill = Self {
            folder: TempDir::new().unwrap(),
            arguments: Vec::new(),
        };
        drill.say("--gateway", &format!("http://{gateway}"));
        drill.file("--config", "filter.json", filter);
        for (option, name) in [("--report", "report.md"), ("--json", "report.json")] {
            let path = drill.path(name).display().to_string();
            drill.say(option, &path);
        }
        drill
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn say(&mut self, option: &str, value: &str) {
        self.arguments.extend([option.to_owned(), value.to_owned()]);
    }

    fn file(&mut self, option: &str, name: &str, document: &Value) {
        let path = self.path(name);
        std::fs::write(&path, document.to_string()).unwrap();
        self.say(option, &path.display().to_string());
    }

    fn tenant(&mut self) {
        self.say("-H", "x-admission-org-id: drill");
        self.say("-H", "x-admission-model: gpt-4o");
    }

    async fn run(self) -> Outcome {
        let mut command = Command::new(portcullis());
        command.arg("drill").args(&self.arguments);
        for name in [
            "REDIS_URL",
            "POSTGRES_DSN",
            "PORTCULLIS_PROFILE",
            "PORTCULLIS_ENVELOPE_SECRET",
        ] {
            command.env_remove(name);
        }
        let ended = tokio::task::spawn_blocking(move || command.output()).await;
        let Output { status, stdout, stderr } = ended.unwrap().expect("portcullis drill runs");
        let text = |name: &str| std::fs::read_to_string(self.path(name)).unwrap_or_default();
        Outcome {
            code: status.code(),
            out: String::from_utf8(stdout).unwrap(),
            err: String::from_utf8(stderr).unwrap(),
            report: serde_json::from_str(&text("report.json")).unwrap_or_default(),
            markdown: text("report.md"),
        }
    }
}

/// An installation as it stands in staging.
struct Staging {
    gateway: Gateway,
    service: Service,
    upstream: Upstream,
    admin: u16,
    config: Value,
    _stores: (Store, Postgres),
    folder: TempDir,
}

impl Staging {
    async fn start(filter: &Value) -> Self {
        Self::with(filter, |plan| plan).await
    }

    async fn with(filter: &Value, change: impl FnOnce(GatewayPlan) -> GatewayPlan) -> Self {
        let (redis, postgres) = tokio::join!(Store::redis(), Postgres::start());
        apply(&postgres.url(), &policy());
        let folder = TempDir::new().unwrap();
        let tokens = folder.path().join("tokens");
        std::fs::write(&tokens, format!("# of the drill\n{TOKEN}\n")).unwrap();
        let admin = free_port();
        let config = json!({
            "profile": "staging", "listen": "127.0.0.1:1",
            "limiter": {"url": redis.url(), "op_timeout_ms": 1_500},
            "policy": {"url": postgres.url(), "max_staleness_ms": 1_000}, "metering": {"url": postgres.url()},
            "capacity": {"lanes": {"closed": {"requests": 0}}},
            "admin": {"listen": format!("127.0.0.1:{admin}"), "token_file": tokens}
        });
        let service = Service::start(config.clone()).await;
        for store in ["limiter", "policy", "metering"] {
            service.await_state(store, "up").await;
        }
        let upstream = upstream().await;
        let plan = GatewayPlan::new("contract-limits", upstream.address)
            .decision(service.address)
            .patient_connects()
            .plugin(filter.clone());
        Self {
            gateway: change(plan).start().await,
            service,
            upstream,
            admin,
            config,
            _stores: (redis, postgres),
            folder,
        }
    }

    /// A drill with everything that there is to say.
    fn drill(&self, filter: &Value) -> Drill {
        let mut drill = Drill::of(self.gateway.address(), filter);
        drill.file("--policy", "policy.json", &policy());
        drill.file("--service", "service.json", &self.config);
        drill.tenant();
        drill.say("--admin", &format!("http://127.0.0.1:{}", self.admin));
        drill.say("--token-file", &self.folder.path().join("tokens").display().to_string());
        drill.say("--upstream-count", &format!("http://{}/-/hits", self.upstream.address));
        drill
    }
}

async fn upstream() -> Upstream {
    let upstream = Upstream::start().await;
    upstream.reply(Reply {
        headers: vec![(BY_UPSTREAM.to_owned(), "provider".to_owned())],
        ..Reply::default()
    });
    upstream
}

/// The drill is green, and these classes were shown by a probe each.
async fn is_green(rules: &str, refused_orgs: &[&str], shown: &[&str]) -> Outcome {
    let filter = filter(rules, json!({}));
    let staging = Staging::start(&filter).await;
    let mut drill = staging.drill(&filter);
    refused_orgs.iter().for_each(|org| drill.say("--refused-org", org));
    let outcome = drill.run().await;
    assert_eq!(
        (outcome.code, &outcome.report["green"]),
        (Some(0), &json!(true)),
        "{}\n{}",
        outcome.told(),
        staging.service.log()
    );
    let rows = outcome.report["rows"].as_array().unwrap();
    for class in shown {
        assert!(
            rows.iter().any(|row| row["shows"] == *class),
            "{class}: {}",
            outcome.told()
        );
    }
    for row in rows {
        let (expected, got) = (&row["expected"]["upstream"], &row["got"]["upstream"]);
        assert!(got.is_u64() && got == expected, "{row}");
        let is_refusal = row["got"]["class"].is_string();
        assert_eq!(*got, json!(u64::from(!is_refusal)), "{row}");
    }
    assert!(outcome.out.contains("GREEN: all"), "{}", outcome.out);
    assert!(outcome.markdown.contains("**GREEN: all"), "{}", outcome.markdown);
    let written = format!("{}{}{}{}", outcome.out, outcome.err, outcome.markdown, outcome.report);
    assert!(
        !written.contains(TOKEN) && !written.contains(crate::postgres::PASSWORD),
        "{written}"
    );
    // The faults were real, went through the stores' watches, and are over.
    let log = staging.service.log_lines();
    for class in shown.iter().filter(|class| **class == "limiter_unavailable") {
        let told = |line: &Value| line["event"] == "dependency_error" && line["class"] == *class;
        assert!(log.iter().any(told), "{}", staging.service.log());
    }
    let ready: Value = serde_json::from_slice(&staging.service.get("/ready").await.body).unwrap();
    assert!(ready.get("faults").is_none(), "{ready}");
    outcome
}

const ENVELOPES: [&str; 2] = ["envelope_missing", "envelope_malformed"];

#[tokio::test(flavor = "multi_thread")]
async fn the_drill_is_green_under_contract_limits() {
    let outcome = is_green(
        "contract-limits",
        &[],
        &[
            "admitted",
            ENVELOPES[0],
            ENVELOPES[1],
            "quota_exhausted",
            "limiter_unavailable",
            "decision_unavailable",
        ],
    )
    .await;
    let left: Vec<&str> = outcome.report["not_driven"]
        .as_array()
        .unwrap()
        .iter()
        .map(|left| left["class"].as_str().unwrap())
        .collect();
    for class in [
        "policy_denied",
        "capacity_exhausted",
        "policy_unavailable",
        "metering_unavailable",
    ] {
        assert!(left.contains(&class), "{class} of {left:?}");
    }
    assert_eq!(
        outcome.row("no envelope")["got"]["status"],
        200,
        "contract-limits lets it pass"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_drill_is_green_under_operator_admission() {
    let outcome = is_green(
        "operator-admission",
        &[],
        &[
            "admitted",
            ENVELOPES[0],
            ENVELOPES[1],
            "quota_exhausted",
            "capacity_exhausted",
            "limiter_unavailable",
            "decision_unavailable",
        ],
    )
    .await;
    let closed = outcome.row("the lane closed, which is closed");
    assert_eq!(closed["got"]["code"], "CAPACITY_EXHAUSTED", "{closed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_drill_is_green_under_fail_closed() {
    let outcome = is_green(
        "fail-closed",
        &["drill-suspended"],
        &[
            "admitted",
            ENVELOPES[0],
            ENVELOPES[1],
            "policy_denied",
            "quota_exhausted",
            "limiter_unavailable",
            "policy_unavailable",
            "decision_unavailable",
            "denied",
        ],
    )
    .await;
    let row = outcome.row("policy does not answer");
    assert_eq!(
        (&row["got"]["status"], &row["got"]["class"], &row["got"]["code"]),
        (&json!(503), &json!("policy_unavailable"), &json!("SERVICE_DEGRADED")),
        "{row}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_drill_is_green_under_fail_closed_metered() {
    let outcome = is_green(
        "fail-closed-metered",
        &["drill-suspended", "drill-spent"],
        &[
            "admitted",
            ENVELOPES[0],
            ENVELOPES[1],
            "policy_denied",
            "quota_exhausted",
            "limiter_unavailable",
            "policy_unavailable",
            "metering_unavailable",
            "decision_unavailable",
            "denied",
        ],
    )
    .await;
    assert_eq!(outcome.row("the org drill-spent")["got"]["code"], "RUN_QUOTA_EXCEEDED");
    assert_eq!(outcome.row("the org drill-suspended")["got"]["code"], "ORG_SUSPENDED");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_drill_is_green_under_launch_gate() {
    let outcome = is_green(
        "launch-gate",
        &["drill-suspended", "drill-spent"],
        &[
            "admitted",
            ENVELOPES[0],
            ENVELOPES[1],
            "policy_denied",
            "quota_exhausted",
            "limiter_unavailable",
            "policy_unavailable",
            "metering_unavailable",
            "decision_unavailable",
            "denied",
        ],
    )
    .await;
    let row = outcome.row("metering does not answer");
    assert_eq!(row["got"]["status"], 200, "launch-gate opens metering: {row}");
    let launches = outcome.row("more launches than the rate allows");
    assert_eq!(launches["got"]["code"], "LAUNCH_RATE_LIMITED", "{launches}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_drill_is_red_where_the_gateway_is_in_shadow_mode() {
    let told = filter("contract-limits", json!({}));
    let shadow = filter("contract-limits", json!({"mode": "shadow"}));
    let staging = Staging::start(&shadow).await;
    let outcome = staging.drill(&told).run().await;
    outcome.is_red();
    let reasons = outcome.reasons("a limit of 0 requests");
    assert!(reasons.contains("status 200, not 429"), "{reasons}");
    assert!(reasons.contains("the upstream saw 1 requests, not 0"), "{reasons}");
    assert_eq!(outcome.row("an envelope with all it needs")["green"], true);
    // Also if the drill is told of the mode: nothing is refused, and that is not what a gateway is for.
    let outcome = staging.drill(&shadow).run().await;
    outcome.is_red();
    let reasons = outcome.reasons("a limit of 0 requests");
    assert!(reasons.contains("shadow mode: nothing is refused"), "{reasons}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_drill_is_red_where_the_store_is_missing() {
    let service = Service::start(json!({"profile": "development", "limiter": null})).await;
    let upstream = upstream().await;
    let filter = filter("contract-limits", json!({"profile": "development"}));
    let plan = GatewayPlan::new("contract-limits", upstream.address)
        .decision(service.address)
        .plugin(filter.clone());
    let gateway = plan.start().await;
    let mut drill = Drill::of(gateway.address(), &filter);
    drill.say("--upstream-header", BY_UPSTREAM);
    let outcome = drill.run().await;
    outcome.is_red();
    let reasons = outcome.reasons("the second request under a limit of 1");
    assert!(reasons.contains("status 200, not 429"), "{reasons}");
    assert_eq!(
        outcome.row("a limit of 0 requests")["green"],
        true,
        "known without a store"
    );

    // And where it is configured and gone, under rules that open that.
    let service = Service::start(json!({
        "profile": "development", "limiter": {"url": format!("redis://{}", closed_port())}
    }))
    .await;
    let plan = GatewayPlan::new("contract-limits", upstream.address)
        .decision(service.address)
        .plugin(filter.clone());
    let gateway = plan.start().await;
    let outcome = Drill::of(gateway.address(), &filter).run().await;
    outcome.is_red();
    outcome.reasons("the second request under a limit of 1");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_drill_is_red_where_the_filter_is_not_in_the_chain() {
    let filter = filter("fail-closed", json!({}));
    let staging = Staging::with(&filter, GatewayPlan::without_filter).await;
    let outcome = staging.drill(&filter).run().await;
    outcome.is_red();
    for probe in [
        "no envelope",
        "a model that is not allowed",
        "a limit of 0 requests",
        "decision does not answer",
    ] {
        let reasons = outcome.reasons(probe);
        assert!(reasons.contains("no header x-portcullis-class"), "{probe}: {reasons}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_drill_is_red_where_the_route_is_not_guarded() {
    let told = filter(
        "contract-limits",
        json!({"routes": [{"path_prefix": "/v1/", "methods": ["GET"]}]}),
    );
    let narrow = filter(
        "contract-limits",
        json!({"routes": [{"path_prefix": "/v2/", "methods": ["GET"]}]}),
    );
    let staging = Staging::start(&narrow).await;
    let outcome = staging.drill(&told).run().await;
    outcome.is_red();
    assert!(outcome.reasons("a limit of 0 requests").contains("status 200, not 429"));
    // Also if the drill is told so.
    let mut drill = staging.drill(&narrow);
    drill.say("--path", "/v1/models");
    let outcome = drill.run().await;
    outcome.is_red();
    let reasons = outcome.reasons("a limit of 0 requests");
    assert!(reasons.contains("no route guards GET /v1/models"), "{reasons}");
}

#[tokio::test(flavor = "multi_thread")]
async fn production_is_refused_unless_told_twice_and_is_not_let_fail() {
    let production = filter("contract-limits", json!({"profile": "production"}));
    let redis = Store::redis().await;
    let service = Service::start(json!({
        "profile": "production", "limiter": {"url": redis.url()}, "policy": null, "metering": null
    }))
    .await;
    service.await_state("limiter", "up").await;
    let upstream = upstream().await;
    let plan = GatewayPlan::new("contract-limits", upstream.address)
        .decision(service.address)
        .plugin(production.clone());
    let gateway = plan.start().await;
    for arguments in [&[][..], &["--production"], &["--yes-in-production"]] {
        let mut drill = Drill::of(gateway.address(), &production);
        drill.arguments.extend(arguments.iter().map(ToString::to_string));
        let outcome = drill.run().await;
        assert_eq!(outcome.code, Some(2), "{arguments:?}: {}", outcome.told());
        assert!(outcome.err.contains("production"), "{}", outcome.err);
    }
    assert_eq!(upstream.hits(), 0, "nothing was sent");
    let mut drill = Drill::of(gateway.address(), &production);
    drill
        .arguments
        .extend(["--production", "--yes-in-production"].map(str::to_owned));
    let outcome = drill.run().await;
    assert_eq!(outcome.code, Some(0), "{}", outcome.told());
    let rows = outcome.report["rows"].as_array().unwrap();
    assert!(
        rows.iter().all(|row| row.get("let_fail").is_none()),
        "{}",
        outcome.report
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_drill_signs_envelopes_where_the_configuration_wants_that() {
    let secret = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    let signed = filter(
        "contract-limits",
        json!({"profile": "development", "envelope": {"signature": {"keys": {"edge-1": {"secret": secret}}}}}),
    );
    let service = Service::start(portcullis_wasm_tests::development_service(json!({}))).await;
    let upstream = upstream().await;
    let plan = GatewayPlan::new("contract-limits", upstream.address)
        .decision(service.address)
        .patient_connects()
        .plugin(signed.clone());
    let gateway = plan.start().await;
    let mut drill = Drill::of(gateway.address(), &signed);
    std::fs::write(drill.path("secret"), secret).unwrap();
    let file = drill.path("secret").display().to_string();
    drill.say("--key-id", "edge-1");
    drill.say("--secret-file", &file);
    drill.say("--upstream-header", BY_UPSTREAM);
    let outcome = drill.run().await;
    assert_eq!(outcome.code, Some(0), "{}", outcome.told());
    let row = outcome.row("an envelope without its signature");
    assert_eq!(
        (&row["got"]["code"], &row["got"]["upstream"]),
        (&json!("ENVELOPE_UNTRUSTED"), &json!(0)),
        "{row}"
    );
    let written = format!("{}{}{}{}", outcome.out, outcome.err, outcome.markdown, outcome.report);
    assert!(!written.contains(secret) && !written.contains("v1;key="), "{written}");
}
