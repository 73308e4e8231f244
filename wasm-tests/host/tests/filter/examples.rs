//! The examples for Kong and APISIX: each obeys a schema of its gateway's files, and its plugin configuration is taken by the
//! real module under a host that behaves like the gateway's. Not here: the gateways themselves, which these machines cannot
//! run.

use std::path::{Path, PathBuf};

use jsonschema::Validator;
use portcullis_test_host::{ContextId, Failure, Personality, TestHost, first};
use serde_json::{Value, json};

use crate::scene::{ENVELOPE, PATIENCE_MS, admit, assert_clean, assert_degraded, decide_of, deny, envelope_and};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn text(place: &str) -> String {
    let file = repository().join(place);
    std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

fn yaml(place: &str) -> Value {
    serde_yaml_ng::from_str(&text(place)).unwrap_or_else(|error| panic!("{place}: {error}"))
}

fn schema(name: &str) -> Validator {
    let schema = serde_json::from_str(&text(&format!("wasm-tests/example-schemas/{name}"))).unwrap();
    jsonschema::validator_for(&schema).unwrap()
}

/// The filter's configuration obeys the schema that the project keeps for it.
fn assert_obeys_the_filters_schema(configuration: &Value) {
    let schema = serde_json::from_str(&text("schemas/filter.json")).unwrap();
    jsonschema::validator_for(&schema)
        .unwrap()
        .validate(configuration)
        .unwrap();
}

/// A request with an envelope and a credential.
fn with_credential() -> Vec<(&'static str, &'static str)> {
    envelope_and(&[("authorization", "Bearer provider-key")])
}

/// A request that is admitted, one that is denied, one without an envelope, and two outages, as this host brings them about.
fn enforces(personality: Personality, configuration: &Value) {
    let mut host = TestHost::new(personality);
    host.configure(&configuration.to_string()).expect("the module takes it");

    let admitted = host.request(&with_credential());
    let callout = decide_of(&host, admitted);
    assert_eq!(callout.upstream, configuration["decision"]["upstream"]);
    assert!(
        !host.stream(admitted).has_passed(),
        "nothing goes up before the verdict"
    );
    assert_eq!(
        first(&host.stream(admitted).request, "authorization"),
        None,
        "what is held lacks the credential"
    );
    admit(&mut host, &callout);
    let upstream = host.stream(admitted).upstream.clone().expect("it has gone up");
    assert_eq!(first(&upstream, "authorization"), Some(&b"Bearer provider-key"[..]));
    assert_eq!(first(&upstream, "x-admission-owner-id"), None);
    assert!(host.stream(admitted).replies.is_empty());

    let denied = host.request(&with_credential());
    let callout = decide_of(&host, denied);
    deny(&mut host, &callout);
    let reply = host.stream(denied).reply();
    assert_eq!((reply.status, reply.code().as_str()), (429, "RATE_LIMITED"));
    assert_eq!(reply.header("retry-after"), Some("41"));
    assert!(!host.stream(denied).has_passed(), "the upstream was reached");

    let missing = host.request(&[(":method", "POST"), (":path", "/v1/chat"), (":authority", "gateway")]);
    let reply = host.stream(missing).reply();
    assert_eq!((reply.status, reply.code().as_str()), (503, "ENVELOPE_MISSING"));
    assert!(!host.stream(missing).has_passed(), "the upstream was reached");

    let out = host.request(&with_credential());
    until_refused(&mut host, out);
    let reply = host.stream(out).reply();
    let told = (
        reply.status,
        reply.header("x-portcullis-class"),
        reply.header("retry-after"),
    );
    assert_eq!(told, (503, Some("decision_unavailable"), Some("1")));
    // Kong's host loses the body of a reply after a call that failed.
    if !personality.empties_reply_after_failed_call {
        assert_eq!(reply.code(), "SERVICE_DEGRADED");
    }
    assert!(!host.stream(out).has_passed(), "the upstream was reached");

    let garbled = host.request(&with_credential());
    let callout = decide_of(&host, garbled);
    host.answer(callout.token, 200, b"{}");
    assert_degraded(&host, garbled);
    assert_clean(&host);
}

/// Lets every call of a stream fail, the second try included, until it has been answered.
fn until_refused(host: &mut TestHost, stream: ContextId) {
    let end_ms = host.now_ms() + PATIENCE_MS;
    while host.stream(stream).replies.is_empty() {
        assert!(host.now_ms() < end_ms, "not answered in time: {host:#?}");
        let pending = host.pending_callouts();
        match pending.into_iter().find(|callout| callout.context == stream) {
            Some(callout) => host.fail(callout.token, Failure::Died),
            None => host.tick(20),
        }
    }
}

/// The filter of Kong's example.
fn kong() -> Value {
    let chains = &yaml("examples/kong/kong.yml")["services"][0]["filter_chains"];
    chains[0]["filters"][0].clone()
}

/// The plugin configuration of APISIX's example.
fn apisix() -> Value {
    yaml("examples/apisix/apisix.yaml")["routes"][0]["plugins"]["portcullis"]["conf"].clone()
}

#[test]
fn kongs_example_enforces_under_a_host_that_behaves_like_kongs() {
    enforces(Personality::WASMX, &kong()["config"]);
}

#[test]
fn apisixs_example_enforces_under_a_host_that_behaves_like_apisixs() {
    enforces(Personality::APISIX, &apisix());
}

#[test]
fn kongs_files_obey_their_schemas_and_fit_each_other() {
    let declarative = yaml("examples/kong/kong.yml");
    let of_kong = schema("kong-declarative.json");
    of_kong.validate(&declarative).unwrap();
    let mut faulty = declarative;
    faulty["services"][0]["filter_chains"][0]["filters"][0]["json_config"] = json!({});
    assert!(!of_kong.is_valid(&faulty));

    let filter = kong();
    assert_obeys_the_filters_schema(&filter["config"]);
    let upstream = filter["config"]["decision"]["upstream"].as_str().unwrap();
    assert!(
        upstream.parse::<std::net::SocketAddr>().is_ok(),
        "Kong dials addresses: {upstream}"
    );

    let conf = text("examples/kong/kong.conf");
    let setting = |key: &str| {
        let lines = conf.lines().filter_map(|line| line.split_once(" = "));
        lines
            .filter(|(name, _)| *name == key)
            .map(|(_, value)| value)
            .collect::<Vec<_>>()
    };
    assert_eq!(setting("wasm"), ["on"]);
    assert_eq!(setting("nginx_http_proxy_wasm_isolation"), ["none"]);
    assert_eq!(setting("wasm_filters_path").len(), 1);
    assert_eq!(setting("declarative_config").len(), 1);
    // Kong finds module and schema by the filter's name.
    assert_eq!(filter["name"], "portcullis");
    assert!(repository().join("examples/kong/portcullis.meta.json").is_file());
}

#[test]
fn what_kong_checks_a_configuration_against_finds_what_the_module_refuses() {
    let meta: Value = serde_json::from_str(&text("examples/kong/portcullis.meta.json")).unwrap();
    let draft_4 = jsonschema::draft4::new(&meta["config_schema"]).unwrap();
    let configuration = kong()["config"].clone();
    draft_4.validate(&configuration).unwrap();
    let faults: [fn(&mut Value); 5] = [
        |configuration| configuration["profile"] = json!("prod"),
        |configuration| configuration["rules"]["gates"][0]["gate"] = json!("contarct"),
        |configuration| configuration["rules"]["gates"][0]["when_unavailable"] = json!("perhaps"),
        |configuration| configuration["decision"]["timeout_ms"] = json!(39),
        |configuration| configuration["reply"]["limits"] = json!("always"),
    ];
    for fault in faults {
        let mut faulty = configuration.clone();
        fault(&mut faulty);
        assert!(!draft_4.is_valid(&faulty), "{faulty}");
        let mut host = TestHost::new(Personality::WASMX);
        assert!(host.configure(&faulty.to_string()).is_err(), "{faulty}");
    }
}

#[test]
fn apisixs_files_obey_their_schemas_and_fit_each_other() {
    let (config, routes) = (yaml("examples/apisix/config.yaml"), yaml("examples/apisix/apisix.yaml"));
    schema("apisix-config.json").validate(&config).unwrap();
    let of_routes = schema("apisix-route.json");
    of_routes.validate(&routes).unwrap();
    let mut faulty = routes.clone();
    faulty["routes"][0]["plugins"]["portcullis"]["config"] = json!({});
    assert!(!of_routes.is_valid(&faulty));

    let plugin = &config["wasm"]["plugins"][0];
    assert!(routes["routes"][0]["plugins"][plugin["name"].as_str().unwrap()].is_object());
    assert_eq!(plugin["http_request_phase"], "access");
    assert_obeys_the_filters_schema(&apisix());
    // Without it the standalone mode reads nothing.
    assert!(text("examples/apisix/apisix.yaml").ends_with("\n#END\n"));
}

#[test]
fn what_apisixs_example_says_its_host_cannot_do_is_refused_by_the_module() {
    let mut by_body = apisix();
    by_body["model"]["from"] = json!("body");
    let mut slots = apisix();
    slots["rules"]["gates"] = json!([{"gate": "concurrency", "when_unavailable": "reject"}]);
    for (configuration, says) in [
        (by_body, "model.from \"body\" needs"),
        (slots, "the gate concurrency needs"),
    ] {
        let mut host = TestHost::new(Personality::APISIX);
        host.configure(&configuration.to_string())
            .expect("this host configures in the first request");
        let stream = host.request(&ENVELOPE);
        assert_eq!(host.stream(stream).host_status, Some(503));
        assert!(!host.stream(stream).has_passed(), "the upstream was reached");
        let lines = host.lines("configuration_rejected");
        assert!(
            lines
                .iter()
                .any(|line| line["message"].as_str().unwrap_or_default().contains(says)),
            "{lines:#?}"
        );
    }
}
