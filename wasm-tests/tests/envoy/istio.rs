//! The example for Istio: its resources obey their schemas and fit each other, and what Istio makes of them enforces in real
//! Envoy, with the real service and a real Redis. Not here: Istio itself, that is, whether it still makes this of them.

mod lowering;

use portcullis_wasm_tests::{Call, Gateway, GatewayPlan, Service, Upstream};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::backed::Watch;
use crate::expect::{
    CAPACITY_EXHAUSTED, DECISION_UNAVAILABLE, ENVELOPE_MISSING, RATE_LIMITED, refused, served, shows_limit,
};
use crate::stores::Store;
use lowering::{Sent, cluster, document, documents};

/// Where an EnvoyFilter that holds the whole filter has its configuration.
const CONFIGURATION: &str = "/spec/configPatches/0/patch/value/typed_config/config/configuration/value";

/// Stands for Istio's authentication: it writes the envelope of whom a token would name.
fn authentication() -> Value {
    let stamp = |header: &str, from: &str| {
        json!({"append": {
            "header": {"key": format!("x-admission-{header}"), "value": format!("%REQ({from})%")},
            "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"
        }})
    };
    let stamps = [
        stamp("owner-id", "x-token-owner"),
        stamp("org-id", "x-token-org"),
        stamp("model", "x-token-model"),
        stamp("owner-rate-limit-requests", "x-token-requests"),
    ];
    json!({
        "name": "authentication",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation",
            "mutations": {"request_mutations": stamps}
        }
    })
}

/// The service's configuration in the example.
fn service_configuration() -> Value {
    let documents = documents("service.yaml");
    let map = documents
        .iter()
        .find(|document| document["kind"] == "ConfigMap")
        .unwrap();
    serde_json::from_str(map["data"]["service.json"].as_str().unwrap()).unwrap()
}

fn service_cluster() -> String {
    let documents = documents("service.yaml");
    cluster(documents.iter().find(|document| document["kind"] == "Service").unwrap())
}

/// A gateway as Istio configures it with these files, the example's service behind it, and its Redis.
struct Mesh {
    gateway: Gateway,
    service: Service,
    upstream: Upstream,
    _redis: Store,
    _folder: TempDir,
}

impl Mesh {
    async fn start(files: &'static [&'static str], capacity: u64) -> Self {
        let redis = Store::redis().await;
        let mut configuration = service_configuration();
        configuration["capacity"]["organization_model"]["requests"] = json!(capacity);
        // A busy machine must not bring about any timeout.
        configuration["limiter"] = json!({"op_timeout_ms": 1_500});
        let service = Service::start_with_environment(configuration, &[("REDIS_URL", &redis.url())]).await;
        service.await_state("limiter", "up").await;
        let upstream = Upstream::start().await;
        let folder = TempDir::new().unwrap();
        let path = folder.path().to_owned();
        let plan = GatewayPlan::new("contract-limits", upstream.address)
            .decision(service.address)
            .patient_connects()
            .rewrite(move |tree| {
                let parts = &mut tree["static_resources"];
                let mut sent = Sent::gateway(parts["listeners"][0].take(), authentication());
                for file in files {
                    let resource = patient(document(file));
                    sent = match resource["kind"].as_str().unwrap() {
                        "WasmPlugin" => sent.plugin(&resource),
                        _ => sent.patched(&resource),
                    };
                }
                parts["listeners"][0] = sent.served_from(&path);
                for cluster in parts["clusters"].as_array_mut().unwrap() {
                    if cluster["name"] == "portcullis" {
                        cluster["name"] = json!(service_cluster());
                        cluster["load_assignment"]["cluster_name"] = json!(service_cluster());
                    }
                }
            });
        Self {
            gateway: plan.start().await,
            service,
            upstream,
            _redis: redis,
            _folder: folder,
        }
    }

    fn watch(&self) -> Watch<'_> {
        Watch {
            gateway: &self.gateway,
            upstream: &self.upstream,
        }
    }
}

/// The resource with time enough for decisions on a busy machine, and nothing else changed.
fn patient(mut resource: Value) -> Value {
    let timeout = json!(2_000);
    if resource["kind"] == "WasmPlugin" {
        resource["spec"]["pluginConfig"]["decision"]["timeout_ms"] = timeout;
    } else if let Some(text) = resource.pointer_mut(CONFIGURATION) {
        let mut configuration: Value = serde_json::from_str(text.as_str().unwrap()).unwrap();
        configuration["decision"]["timeout_ms"] = timeout;
        *text = json!(configuration.to_string());
    }
    resource
}

/// A call of somebody whose token allows so many requests.
fn call(owner: &str, requests: u64) -> Call {
    Call::post("/v1/chat/completions", "{}")
        .header("x-token-owner", owner)
        .header("x-token-org", "org-1")
        .header("x-token-requests", requests.to_string())
}

const WITH_PLUGIN: &[&str] = &["envoyfilter-gateway.yaml", "wasmplugin.yaml"];
const WITH_BODY: &[&str] = &["envoyfilter-gateway.yaml", "envoyfilter-body.yaml"];

#[tokio::test(flavor = "multi_thread")]
async fn what_istio_makes_of_the_plugin_admits_denies_and_is_closed_in_an_outage() {
    let mut mesh = Mesh::start(WITH_PLUGIN, 600).await;
    for left in [1, 0] {
        let answer = mesh.gateway.call(&call("alice", 2)).await;
        served(&answer);
        shows_limit(&answer, "requests", 2, left);
    }
    refused(&mesh.gateway.call(&call("alice", 2)).await, RATE_LIMITED);
    assert_eq!(mesh.upstream.hits(), 2, "what is denied does not reach the upstream");
    assert!(
        mesh.upstream
            .last()
            .headers
            .keys()
            .all(|name| !name.as_str().starts_with("x-admission-")),
        "the envelope is not forwarded"
    );
    served(&mesh.gateway.call(&Call::get("/health")).await);

    mesh.service.kill();
    mesh.watch()
        .refused("ingress", &call("bob", 2), DECISION_UNAVAILABLE)
        .await;
    mesh.service.restart().await;
    mesh.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_envelope_that_a_client_sends_is_removed_before_the_plugin_reads_it() {
    let mesh = Mesh::start(WITH_PLUGIN, 600).await;
    let forged = Call::get("/v1/models")
        .header("x-admission-owner-id", "mallory")
        .header("X-Admission-Owner-Rate-Limit-Requests", "1000000");
    mesh.watch().refused("ingress", &forged, ENVELOPE_MISSING).await;
    let raised = call("alice", 1).header("x-admission-owner-rate-limit-requests", "1000000");
    served(&mesh.gateway.call(&raised).await);
    refused(&mesh.gateway.call(&raised).await, RATE_LIMITED);
    assert_eq!(mesh.upstream.hits(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn with_the_envoyfilter_the_model_is_read_from_the_body_however_long_it_is() {
    let mut mesh = Mesh::start(WITH_BODY, 2).await;
    let about = |model: &str, length: usize| {
        let body = json!({"model": model, "messages": [{"role": "user", "content": "x".repeat(length)}]});
        Call::post("/v1/chat/completions", body.to_string())
            .header("content-type", "application/json")
            .header("x-token-owner", "alice")
            .header("x-token-org", "org-1")
    };
    // Each model has a tier of its own, of two requests; a body may be longer than Istio's listeners keep.
    for length in [10, 200_000] {
        served(&mesh.gateway.call(&about("gpt-4o", length)).await);
        assert!(mesh.upstream.last().body.len() > length, "the whole body arrives");
    }
    refused(&mesh.gateway.call(&about("gpt-4o", 10)).await, CAPACITY_EXHAUSTED);
    served(&mesh.gateway.call(&about("o3", 10)).await);
    assert_eq!(mesh.upstream.hits(), 3);
    mesh.gateway.assert_sound();
}

#[test]
fn the_resources_obey_their_schemas_and_a_faulty_one_does_not() {
    let schema = |name: &str| {
        let file = portcullis_wasm_tests::repository()
            .join("wasm-tests/example-schemas")
            .join(name);
        let text = std::fs::read_to_string(file).unwrap();
        jsonschema::validator_for(&serde_json::from_str(&text).unwrap()).unwrap()
    };
    let (plugin, filter) = (schema("istio-wasmplugin.json"), schema("istio-envoyfilter.json"));
    let example = document("wasmplugin.yaml");
    plugin.validate(&example).unwrap();
    for (key, wrong) in [
        ("failStrategy", json!("FAIL_CLOSED")),
        ("phase", json!("authz")),
        ("pluginConfiguration", json!({})),
        ("url", json!(null)),
    ] {
        let mut faulty = example.clone();
        faulty["spec"][key] = wrong;
        assert!(!plugin.is_valid(&faulty), "{key}");
    }
    for file in ["envoyfilter-gateway.yaml", "envoyfilter-body.yaml"] {
        let example = document(file);
        filter
            .validate(&example)
            .unwrap_or_else(|error| panic!("{file}: {error}"));
        let mut faulty = example.clone();
        faulty["spec"]["configPatches"][0]["applyTo"] = json!("HTTP_FILTERS");
        assert!(!filter.is_valid(&faulty));
    }
}

#[test]
fn the_resources_fit_each_other() {
    let plugin = document("wasmplugin.yaml");
    let body = document("envoyfilter-body.yaml");
    let configuration = &plugin["spec"]["pluginConfig"];
    assert_eq!(configuration["decision"]["upstream"], service_cluster());
    assert_eq!(plugin["spec"]["phase"], "AUTHZ");
    assert_eq!(plugin["spec"]["failStrategy"], "FAIL_RELOAD");

    // Both ways to configure the filter say the same, but for where the model is read.
    let extension = &body["spec"]["configPatches"][0]["patch"]["value"]["typed_config"]["config"];
    let by_body: Value = serde_json::from_str(extension["configuration"]["value"].as_str().unwrap()).unwrap();
    let mut expected = configuration.clone();
    expected["model"] = json!({"from": "body"});
    assert_eq!(by_body, expected);
    assert_eq!(extension["failure_policy"], plugin["spec"]["failStrategy"]);
    assert_eq!(
        extension["vm_config"]["code"]["remote"]["http_uri"]["uri"],
        plugin["spec"]["url"]
    );

    for file in ["envoyfilter-gateway.yaml", "envoyfilter-body.yaml"] {
        let filter = document(file);
        assert_eq!(
            filter["spec"]["workloadSelector"]["labels"], plugin["spec"]["selector"]["matchLabels"],
            "{file}"
        );
        assert_eq!(
            filter["metadata"]["namespace"], plugin["metadata"]["namespace"],
            "{file}"
        );
    }
    assert_eq!(service_configuration()["profile"], configuration["profile"]);
    let service = documents("service.yaml");
    let of = |kind: &str| {
        service
            .iter()
            .find(|document| document["kind"] == kind)
            .unwrap()
            .clone()
    };
    let container = of("Deployment")["spec"]["template"]["spec"]["containers"][0].clone();
    assert_eq!(
        container["ports"][0]["containerPort"],
        of("Service")["spec"]["ports"][0]["targetPort"]
    );
    let source = &of("AuthorizationPolicy")["spec"]["rules"][0]["from"][0]["source"];
    assert_eq!(source["namespaces"], json!([plugin["metadata"]["namespace"]]));
}
