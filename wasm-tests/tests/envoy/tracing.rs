//! Traces through real Envoy: what reaches the decision service of a client's own trace, and where its spans hang when Envoy
//! traces too.

use portcullis_wasm_tests::{Call, Decision, Envelope, GatewayPlan, development_service};
use serde_json::{Value, json};

use crate::backed::{in_time, patient};
use crate::collector::{Behaviour, Collector, Seen};
use crate::expect::{RATE_LIMITED, refused, served};
use crate::world::{Scripted, World, burst, strict};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CLIENT: &str = "00f067aa0ba902b7";

fn parent(trace: &str) -> String {
    format!("00-{trace}-{CLIENT}-01")
}

fn limited(limit: u64) -> Call {
    Call::get("/v1/models").envelope(&Envelope::owner("o").requests("owner", limit))
}

async fn world(collector: &Collector, change: impl FnOnce(GatewayPlan) -> GatewayPlan) -> World {
    let mut service = development_service(Value::Null);
    service["limiter"]["op_timeout_ms"] = json!(1_500);
    service["tracing"] = json!({"endpoint": collector.endpoint()});
    World::with(strict(), service, |plan| {
        change(plan.plugin(patient()).patient_connects())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clients_trace_goes_on_in_the_spans_of_its_decision() {
    let collector = Collector::start().await;
    let mut world = world(&collector, |plan| plan).await;
    let call = limited(1)
        .header("traceparent", parent(TRACE))
        .header("tracestate", "edge=1");
    served(&world.gateway.call(&call).await);
    let seen = world.upstream.last();
    assert_eq!(
        (
            seen.headers["traceparent"].as_str(),
            seen.headers["tracestate"].as_str()
        ),
        (parent(TRACE).as_str(), "edge=1")
    );
    let (decide, children) = collector.decision(TRACE).await;
    assert_eq!((decide.parent.as_str(), decide.state.as_str()), (CLIENT, "edge=1"));
    assert_eq!(decide.attributes["portcullis.verdict"], "admit");
    let names: Vec<_> = children.iter().map(|span| span.name.as_str()).collect();
    assert_eq!(names, ["limiter.charge"]);

    // The next one is refused, in a trace of its own, which the log names.
    let other = "7".repeat(32);
    refused(
        &world
            .gateway
            .call(&limited(1).header("traceparent", parent(&other)))
            .await,
        RATE_LIMITED,
    );
    assert_eq!(world.upstream.hits(), 1);
    let (decide, _) = collector.decision(&other).await;
    assert_eq!(
        (
            &decide.attributes["portcullis.verdict"],
            &decide.attributes["portcullis.class"]
        ),
        (&json!("deny"), &json!("quota_exhausted"))
    );
    world
        .service
        .await_log("the trace", |line| line["trace_id"] == json!(other))
        .await;
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_well_formed_trace_reaches_the_service() {
    let world = Scripted::start(strict(), Decision::Admit).await;
    let plain = parent(TRACE);
    let malformed = [
        plain.to_uppercase(),
        plain[..54].to_owned(),
        format!("{plain}-more"),
        format!("ff{}", &plain[2..]),
        parent(&"0".repeat(32)),
        plain.replace(CLIENT, "0000000000000000"),
        "\u{e9}".repeat(30),
    ];
    for value in &malformed {
        served(&world.gateway.call(&limited(9).header("traceparent", value)).await);
    }
    served(&world.gateway.call(&limited(9)).await);
    served(
        &world
            .gateway
            .call(&limited(9).header("traceparent", &plain).header("traceparent", &plain))
            .await,
    );
    served(&world.gateway.call(&limited(9).header("traceparent", &plain)).await);
    let mut carried = world.decision.decide_headers("traceparent");
    assert_eq!(carried.pop(), Some(vec![plain]));
    assert_eq!(carried, vec![Vec::<String>::new(); malformed.len() + 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_says_nothing_or_is_gone_changes_no_answer() {
    let collector = Collector::start().await;
    collector.behave(Behaviour::SaysNothing);
    let world = world(&collector, |plan| plan).await;
    let call = limited(30).header("traceparent", parent(TRACE));
    let mut answers = burst(world.gateway.address(), &call, 20).await;
    drop(collector);
    answers.extend(burst(world.gateway.address(), &call, 15).await);
    answers.iter().for_each(in_time);
    answers[..30].iter().for_each(served);
    answers[30..].iter().for_each(|answer| {
        refused(answer, RATE_LIMITED);
    });
    assert_eq!(world.upstream.hits(), 30);
}

/// Envoy's own tracing, to the same collector.
fn envoy_traces(collector: &Collector) -> impl FnOnce(GatewayPlan) -> GatewayPlan {
    let (ip, port) = (collector.address.ip().to_string(), collector.address.port());
    let provider = json!({
        "name": "envoy.tracers.opentelemetry",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.config.trace.v3.OpenTelemetryConfig",
            "service_name": "gateway",
            "http_service": {
                "http_uri": {"uri": "http://collector/v1/traces", "cluster": "collector", "timeout": "1s"}
            }
        }
    });
    let cluster = json!({
        "name": "collector", "type": "STATIC", "connect_timeout": "1s",
        "load_assignment": {"cluster_name": "collector", "endpoints": [{"lb_endpoints": [
            {"endpoint": {"address": {"socket_address": {"address": ip, "port_value": port}}}}
        ]}]}
    });
    move |plan| {
        plan.manager(json!({"tracing": {"provider": provider}}))
            .rewrite(move |tree| {
                let clusters = tree["static_resources"]["clusters"].as_array_mut().expect("clusters");
                clusters.push(cluster.clone());
            })
    }
}

/// Envoy's span of a trace.
async fn envoys_span(collector: &Collector, trace: &str) -> Seen {
    let is_it = |span: &Seen| span.resource["service.name"] == "gateway" && span.trace_id == trace;
    collector.span(&format!("Envoy's in {trace}"), is_it).await
}

/// The trace and the span that the newest request named to the upstream.
fn named_upstream(world: &World) -> (String, String) {
    let seen = world.upstream.last().headers["traceparent"].clone();
    let mut fields = seen.split('-').skip(1).map(str::to_owned);
    (fields.next().expect("a trace"), fields.next().expect("a span"))
}

#[tokio::test(flavor = "multi_thread")]
async fn envoy_writes_its_own_span_too_late_so_the_decision_hangs_beside_it() {
    let collector = Collector::start().await;
    let world = world(&collector, envoy_traces(&collector)).await;
    served(
        &world
            .gateway
            .call(&limited(9).header("traceparent", parent(TRACE)))
            .await,
    );
    let (decide, _) = collector.decision(TRACE).await;
    assert_eq!(decide.parent, CLIENT);
    let envoys = envoys_span(&collector, TRACE).await;
    assert_eq!(envoys.parent, CLIENT);
    assert_eq!(named_upstream(&world), (TRACE.to_owned(), envoys.span_id));
}

#[tokio::test(flavor = "multi_thread")]
async fn envoys_span_is_the_parent_where_the_documented_filter_writes_it_before() {
    let page = include_str!("../../../docs/tracing.md");
    let block = page.split("```yaml\n").nth(1).and_then(|rest| rest.split("```").next());
    let writer: Value = serde_yaml_ng::from_str(block.expect("a block")).expect("YAML");
    let collector = Collector::start().await;
    let world = world(&collector, |plan| envoy_traces(&collector)(plan.in_front(writer))).await;
    served(
        &world
            .gateway
            .call(&limited(9).header("traceparent", parent(TRACE)))
            .await,
    );
    let (trace, span) = named_upstream(&world);
    assert_eq!(trace, TRACE);
    let (decide, _) = collector.decision(TRACE).await;
    assert_eq!(decide.parent, span);
    let envoys = envoys_span(&collector, TRACE).await;
    assert_eq!((envoys.span_id, envoys.parent.as_str()), (span, CLIENT));

    // A trace that Envoy begins.
    served(&world.gateway.call(&limited(9)).await);
    let (trace, span) = named_upstream(&world);
    let (decide, _) = collector.decision(&trace).await;
    assert_eq!(decide.parent, span);
}
