//! Spans of decisions, as a collector gets them; and what becomes of decisions when it does not.

use std::time::Instant;

use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::collector::{Behaviour, Collector};
use crate::process::{Service, in_memory, until};
use crate::wire::{Answer, request};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLER: &str = "00f067aa0ba902b7";

fn traceparent(trace: &str, flags: &str) -> String {
    format!("00-{trace}-{CALLER}-{flags}")
}

fn traced(mut config: Value, collector: &Collector) -> Value {
    config["tracing"] = json!({"endpoint": collector.endpoint()});
    config
}

/// A decision with more headers.
async fn decide(service: &Service, changes: Value, headers: &[(&str, &str)]) -> Answer {
    let body = request(changes).to_string();
    let more: String = headers
        .iter()
        .map(|(name, value)| format!("{name}: {value}\r\n"))
        .collect();
    let mut client = service.client().await;
    let length = body.len();
    let head = format!("POST /v1/decide HTTP/1.1\r\nhost: portcullis\r\n{more}content-length: {length}\r\n\r\n");
    client.write(&head).await;
    client.write(&body).await;
    let answer = client.answer().await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer
}

async fn spans_counted(service: &Service, outcome: &str) -> u64 {
    let metrics = service.get("/metrics").await.body;
    let name = format!("portcullis_spans_total{{outcome=\"{outcome}\"}} ");
    let value = metrics.lines().find_map(|line| line.strip_prefix(&name)?.parse().ok());
    value.unwrap_or(0)
}

#[tokio::test]
async fn a_decision_is_a_span_below_its_callers_and_its_stores_are_below_that() {
    let collector = Collector::start().await;
    let service = Service::start(traced(in_memory(), &collector)).await;
    let tenants = json!({"owner": "tenant-owner", "org": "tenant-org", "auth": "tenant-auth"});
    let parent = traceparent(TRACE, "01");
    let headers = [("traceparent", parent.as_str()), ("tracestate", "edge=1")];
    let answer = decide(
        &service,
        json!({"subject": tenants, "request_id": "tenant-request"}),
        &headers,
    )
    .await;
    assert_eq!(answer.json()["verdict"], "admit");
    let (decide, children) = collector.decision(TRACE).await;
    assert_eq!((decide.parent.as_str(), decide.kind, decide.failed), (CALLER, 2, false));
    assert_eq!(decide.state, "edge=1");
    let expected =
        json!({"portcullis.rules": "contract-limits", "portcullis.mode": "enforce", "portcullis.verdict": "admit"});
    assert_eq!(json!(decide.attributes), expected);
    let [charge] = children.as_slice() else {
        panic!("{children:#?}")
    };
    assert_eq!(
        (charge.name.as_str(), charge.kind, charge.failed),
        ("limiter.charge", 3, false)
    );
    assert_eq!(json!(charge.attributes), json!({"portcullis.dependency": "limiter"}));
    assert!(charge.took <= decide.took, "{charge:?} {decide:?}");
    assert_eq!(decide.resource["service.name"], "portcullis");
    assert_eq!(decide.resource["service.version"], env!("CARGO_PKG_VERSION"));
    let all = format!("{:?}", collector.spans());
    assert!(!all.contains("tenant"), "a tenant is named: {all}");
    assert_eq!(spans_counted(&service, "sent").await, 2);
}

#[tokio::test]
async fn a_denial_says_why_and_its_log_line_names_the_trace() {
    let collector = Collector::start().await;
    let service = Service::start(traced(in_memory(), &collector)).await;
    let parent = traceparent(TRACE, "01");
    let answer = decide(
        &service,
        json!({"limits": {"owner": {"requests": 0}}}),
        &[("traceparent", &parent)],
    )
    .await;
    assert_eq!(answer.json()["code"], "RATE_LIMITED");
    let (decide, _) = collector.decision(TRACE).await;
    assert!(!decide.failed, "a denial is an answer");
    let said = |key: &str| decide.attributes[&format!("portcullis.{key}")].clone();
    assert_eq!(said("verdict"), "deny");
    assert_eq!(
        (said("code"), said("class"), said("gate")),
        (json!("RATE_LIMITED"), json!("quota_exhausted"), json!("contract"))
    );
    let line = service.line("denied").await;
    assert_eq!((&line["trace_id"], &line["request_id"]), (&json!(TRACE), &json!("r-1")));
}

#[tokio::test]
async fn a_store_that_fails_is_named_in_its_span_and_so_is_what_was_passed_over() {
    let collector = Collector::start().await;
    let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let mut config = traced(in_memory(), &collector);
    config["limiter"] = json!({"url": format!("redis://{nobody}"), "op_timeout_ms": 200});
    let service = Service::start(config).await;
    for (trace, choice, failed) in [("1".repeat(32), "reject", true), ("2".repeat(32), "admit", false)] {
        let gates = json!([{"gate": "contract", "when_unavailable": choice, "limits": "envelope"}]);
        decide(
            &service,
            json!({"gates": gates}),
            &[("traceparent", &traceparent(&trace, "01"))],
        )
        .await;
        let (decide, children) = collector.decision(&trace).await;
        assert_eq!(decide.failed, failed, "{decide:?}");
        let [charge] = children.as_slice() else {
            panic!("{children:#?}")
        };
        assert!(charge.failed, "{charge:?}");
        let kind = charge.attributes["error.type"].as_str().unwrap();
        assert!(["connection", "circuit_open", "timeout"].contains(&kind), "{kind}");
        if failed {
            let said = |key: &str| decide.attributes[&format!("portcullis.{key}")].clone();
            assert_eq!(
                (said("verdict"), said("class")),
                (json!("unavailable"), json!("limiter_unavailable"))
            );
        } else {
            assert_eq!(decide.attributes["portcullis.bypassed"], json!(["limiter_unavailable"]));
        }
        let all = format!("{decide:?} {charge:?}");
        assert!(!all.contains(&nobody.to_string()), "an address is named: {all}");
        assert_eq!(
            (decide.status_message.as_str(), charge.status_message.as_str()),
            ("", "")
        );
    }
}

#[tokio::test]
async fn the_caller_decides_whether_its_trace_is_recorded() {
    let collector = Collector::start().await;
    let mut config = traced(in_memory(), &collector);
    config["tracing"]["sample_one_in"] = json!(1_000_000);
    let service = Service::start(config).await;
    decide(
        &service,
        json!({}),
        &[("traceparent", &traceparent(&"a".repeat(32), "00"))],
    )
    .await;
    for malformed in [
        traceparent(&"0".repeat(32), "01"),
        traceparent(&"A".repeat(32), "01"),
        "junk".to_owned(),
    ] {
        decide(&service, json!({}), &[("traceparent", &malformed)]).await;
    }
    decide(&service, json!({}), &[("traceparent", &traceparent(TRACE, "01"))]).await;
    collector.decision(TRACE).await;
    // What was asked before would have been sent before, or with it.
    let others: Vec<_> = collector
        .spans()
        .into_iter()
        .filter(|span| span.trace_id != TRACE)
        .collect();
    assert!(others.is_empty(), "{others:#?}");
}

#[tokio::test]
async fn without_a_caller_a_decision_begins_a_trace_and_its_log_line_names_that() {
    let collector = Collector::start().await;
    let service = Service::start(traced(in_memory(), &collector)).await;
    decide(&service, json!({"limits": {"owner": {"requests": 0}}}), &[]).await;
    let line = service.line("denied").await;
    let (decide, _) = collector.decision(line["trace_id"].as_str().unwrap()).await;
    assert_eq!(decide.parent, "");
}

#[tokio::test]
async fn the_standard_variable_turns_tracing_on_and_names_the_sender() {
    let collector = Collector::start().await;
    let endpoint = collector.endpoint();
    let settings = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()),
        ("OTEL_SERVICE_NAME", "admission"),
    ];
    let service = Service::start_with(in_memory(), &[], &settings).await;
    assert_eq!(service.line("started").await["tracing"], "otlp");
    decide(&service, json!({}), &[("traceparent", &traceparent(TRACE, "01"))]).await;
    let (decide, _) = collector.decision(TRACE).await;
    assert_eq!(decide.resource["service.name"], "admission");
}

#[tokio::test]
async fn without_a_collector_nothing_is_made_and_log_lines_still_name_the_trace() {
    let service = Service::start(in_memory()).await;
    assert_eq!(service.line("started").await["tracing"], "none");
    let parent = traceparent(TRACE, "00");
    decide(
        &service,
        json!({"limits": {"owner": {"requests": 0}}}),
        &[("traceparent", &parent)],
    )
    .await;
    assert_eq!(service.line("denied").await["trace_id"], TRACE);
    assert!(!service.get("/metrics").await.body.contains("spans_total{"));
}

#[tokio::test]
async fn a_collector_that_is_down_holds_up_nothing_is_told_once_and_is_used_when_it_comes() {
    let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let mut config = in_memory();
    config["tracing"] = json!({"endpoint": format!("http://{nobody}")});
    let service = Service::start(config).await;
    let limits = json!({"owner": {"requests": 1_000_000}});
    let mut slowest = std::time::Duration::ZERO;
    let mut counts = std::collections::BTreeSet::new();
    let lost = until("two batches to be lost", async || {
        let begun = Instant::now();
        let answer = decide(
            &service,
            json!({"limits": limits}),
            &[("traceparent", &traceparent(TRACE, "01"))],
        )
        .await;
        assert_eq!(answer.json()["verdict"], "admit");
        slowest = slowest.max(begun.elapsed());
        let lost = spans_counted(&service, "lost").await;
        counts.insert(lost);
        (counts.len() > 2).then_some(lost)
    })
    .await;
    assert!(slowest < std::time::Duration::from_secs(1), "{slowest:?}");
    let told = |event: &str| service.lines().iter().filter(|line| line["event"] == event).count();
    assert_eq!(told("collector_unavailable"), 1);
    assert!(
        !service.log().contains(&nobody.port().to_string()),
        "its address is in the log"
    );
    let collector = Collector::start_on(nobody.port()).await;
    decide(
        &service,
        json!({}),
        &[("traceparent", &traceparent(&"9".repeat(32), "01"))],
    )
    .await;
    collector.decision(&"9".repeat(32)).await;
    let line = service.line("collector_available").await;
    let said: u64 = line["message"]
        .as_str()
        .unwrap()
        .split(' ')
        .find_map(|word| word.parse().ok())
        .unwrap();
    assert!(said >= lost, "{line}");
    assert_eq!(told("collector_unavailable"), 1);
}

#[tokio::test]
async fn a_collector_that_refuses_spans_is_told_and_decisions_go_on() {
    let collector = Collector::start().await;
    collector.behave(Behaviour::Refuses(401));
    let service = Service::start(traced(in_memory(), &collector)).await;
    let answer = decide(&service, json!({}), &[("traceparent", &traceparent(TRACE, "01"))]).await;
    assert_eq!(answer.json()["verdict"], "admit");
    assert_eq!(service.line("collector_unavailable").await["level"], "WARN");
    assert_eq!(spans_counted(&service, "lost").await, 2);
}

#[tokio::test]
async fn what_waits_at_the_end_is_sent() {
    let collector = Collector::start().await;
    let mut service = Service::start(traced(in_memory(), &collector)).await;
    decide(&service, json!({}), &[("traceparent", &traceparent(TRACE, "01"))]).await;
    service.signal("TERM");
    assert_eq!(service.end().await, Some(0));
    let names: Vec<_> = collector.spans().into_iter().map(|span| span.name).collect();
    assert_eq!(names, ["limiter.charge", "decide"]);
}

#[tokio::test]
async fn a_collector_that_says_nothing_holds_up_neither_decisions_nor_the_end() {
    let collector = Collector::start().await;
    collector.behave(Behaviour::SaysNothing);
    let mut service = Service::start(traced(in_memory(), &collector)).await;
    for _ in 0..10 {
        let answer = decide(&service, json!({}), &[("traceparent", &traceparent(TRACE, "01"))]).await;
        assert_eq!(answer.json()["verdict"], "admit");
    }
    let begun = Instant::now();
    service.signal("TERM");
    assert_eq!(service.end().await, Some(0));
    assert!(begun.elapsed().as_secs() < 6, "{:?}", begun.elapsed());
    assert_eq!(service.line("stopped").await["level"], "INFO");
}
