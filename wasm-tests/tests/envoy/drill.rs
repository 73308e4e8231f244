//! `portcullis drill` against real Envoy, the real service, Redis and PostgreSQL: green under each shipped rule file, also with
//! signed envelopes, and refused in production. Where it has to be red stands in `drill_red`.

use portcullis_wasm_tests::{GatewayPlan, Service};
use serde_json::{Value, json};

use crate::drill_world::{BY_UPSTREAM, Drill, Outcome, Staging, TOKEN, UNSERVED, filter, upstream};
use crate::stores::Store;

/// The drill is green, and these classes were shown by a probe each.
async fn is_green(rules: &str, refused_orgs: &[&str], shown: &[&str]) -> Outcome {
    let filter = filter(rules, json!({}));
    let staging = Staging::start(&filter).await;
    let mut drill = staging.drill(&filter);
    refused_orgs.iter().for_each(|org| drill.say("--refused-org", org));
    drill.say("--unserved-model", UNSERVED);
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
        "provider_unconfigured",
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
            "provider_unconfigured",
            "denied",
        ],
    )
    .await;
    let row = outcome.row(&format!("the model {UNSERVED}, which nobody serves"));
    assert_eq!(
        (&row["got"]["status"], &row["got"]["code"]),
        (&json!(501), &json!("PROVIDER_NOT_CONFIGURED")),
        "{row}"
    );
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
