//! What Istio makes of the example's resources: the extension that a WasmPlugin becomes, its place among the filters, and
//! what EnvoyFilters change. As much of Istio's pilot as the example needs, and nothing that it does not name: an unknown
//! way to patch is a failed test.
//!
//! Two things are the test's own: an extension comes from a file, where Istio's agent serves it (`ads`), and the module is
//! a local file, which is what the agent makes of an address.

use std::path::{Path, PathBuf};

use portcullis_wasm_tests::{filter_module, merge, repository};
use serde_json::{Value, json};

pub(super) const WASM: &str = "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm";
const RBAC: &str = "type.googleapis.com/envoy.extensions.filters.http.rbac.v3.RBAC";

/// The documents of a file of the example.
pub(super) fn documents(file: &str) -> Vec<Value> {
    let path = repository().join("examples/istio").join(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let documents = serde_yaml_ng::Deserializer::from_str(&text);
    documents
        .map(|document| serde::Deserialize::deserialize(document).unwrap_or_else(|error| panic!("{file}: {error}")))
        .collect()
}

/// The only document of a file.
pub(super) fn document(file: &str) -> Value {
    let mut documents = documents(file);
    assert_eq!(documents.len(), 1, "{file}");
    documents.remove(0)
}

/// The name of the cluster that Istio makes for the port of a Service.
pub(super) fn cluster(service: &Value) -> String {
    let (name, namespace) = (&service["metadata"]["name"], &service["metadata"]["namespace"]);
    let (name, namespace) = (name.as_str().unwrap(), namespace.as_str().unwrap());
    format!(
        "outbound|{}||{name}.{namespace}.svc.cluster.local",
        service["spec"]["ports"][0]["port"]
    )
}

/// What a gateway's Envoy is sent.
pub(super) struct Sent {
    listener: Value,
    extensions: Vec<Value>,
}

impl Sent {
    /// The listener as Istio makes it of a Gateway: its own limits and timeouts, and an authentication that stamps.
    pub(super) fn gateway(mut listener: Value, authentication: Value) -> Self {
        listener["per_connection_buffer_limit_bytes"] = json!(32_768);
        let manager = &mut listener["filter_chains"][0]["filters"][0]["typed_config"];
        manager["stream_idle_timeout"] = json!("0s");
        let filters = manager["http_filters"].as_array_mut().unwrap();
        filters.retain(|filter| filter["name"] != "portcullis");
        filters.insert(0, authentication);
        Self {
            listener,
            extensions: Vec::new(),
        }
    }

    /// With a WasmPlugin.
    pub(super) fn plugin(mut self, plugin: &Value) -> Self {
        let (metadata, spec) = (&plugin["metadata"], &plugin["spec"]);
        let (name, namespace) = (
            metadata["name"].as_str().unwrap(),
            metadata["namespace"].as_str().unwrap(),
        );
        let name = format!("extensions.istio.io/wasmplugin/{namespace}.{name}");
        let mut config = json!({
            "name": name,
            "failure_policy": failure_policy(spec),
            "vm_config": {"runtime": "envoy.wasm.runtime.v8", "code": {"remote": {"http_uri": {"uri": spec["url"]}}}},
            "configuration": {
                "@type": "type.googleapis.com/google.protobuf.StringValue",
                "value": spec["pluginConfig"].to_string()
            }
        });
        if let Some(root) = spec["pluginName"].as_str() {
            config["root_id"] = json!(root);
        }
        self.extensions
            .push(json!({"name": name, "typed_config": {"@type": WASM, "config": config}}));
        let at = match spec["phase"].as_str() {
            Some("AUTHN") => 0,
            Some("AUTHZ") => 1,
            other => panic!("where does a filter of phase {other:?} go?"),
        };
        let discovery = json!({"config_source": {"ads": {}, "initial_fetch_timeout": "0s", "resource_api_version": "V3"},
                               "type_urls": [WASM, RBAC]});
        self.filters()
            .insert(at, json!({"name": name, "config_discovery": discovery}));
        self
    }

    /// With an EnvoyFilter.
    pub(super) fn patched(mut self, filter: &Value) -> Self {
        for patch in filter["spec"]["configPatches"].as_array().unwrap() {
            assert_eq!(patch["match"]["context"], "GATEWAY", "{patch:#}");
            let (at, operation) = (&patch["applyTo"], &patch["patch"]["operation"]);
            let value = patch["patch"]["value"].clone();
            match (at.as_str().unwrap(), operation.as_str().unwrap()) {
                ("LISTENER", "MERGE") => merge(&mut self.listener, value),
                ("NETWORK_FILTER", "MERGE") => {
                    let network_filter = &mut self.listener["filter_chains"][0]["filters"][0];
                    assert_eq!(
                        patch["match"]["listener"]["filterChain"]["filter"]["name"],
                        network_filter["name"]
                    );
                    merge(network_filter, value);
                }
                ("HTTP_FILTER", "INSERT_BEFORE") => {
                    let before = &patch["match"]["listener"]["filterChain"]["filter"]["subFilter"]["name"];
                    let at = self.filters().iter().position(|filter| filter["name"] == *before);
                    let at = at.unwrap_or_else(|| panic!("there is no filter {before}"));
                    self.filters().insert(at, value);
                }
                ("EXTENSION_CONFIG", "ADD") => self.extensions.push(value),
                (at, operation) => panic!("this is not how the example patches: {operation} {at}"),
            }
        }
        self
    }

    fn filters(&mut self) -> &mut Vec<Value> {
        let manager = &mut self.listener["filter_chains"][0]["filters"][0]["typed_config"];
        manager["http_filters"].as_array_mut().unwrap()
    }

    /// The listener, with the extensions in files of this folder.
    pub(super) fn served_from(mut self, folder: &Path) -> Value {
        for (at, extension) in std::mem::take(&mut self.extensions).into_iter().enumerate() {
            let file = folder.join(format!("extension-{at}.json"));
            let name = extension["name"].clone();
            write(&file, extension);
            let filter = self.filters().iter_mut().find(|filter| filter["name"] == name);
            let filter = filter.unwrap_or_else(|| panic!("no filter takes the extension {name}"));
            assert_eq!(
                filter["config_discovery"]["config_source"]["ads"],
                json!({}),
                "{filter:#}"
            );
            filter["config_discovery"]["config_source"] =
                json!({"path_config_source": {"path": file}, "resource_api_version": "V3"});
        }
        self.listener
    }
}

/// What the agent makes of an extension: the module is a file.
fn write(file: &PathBuf, mut extension: Value) {
    let code = &mut extension["typed_config"]["config"]["vm_config"]["code"];
    let address = &code["remote"]["http_uri"]["uri"];
    assert!(address.as_str().unwrap_or_default().starts_with("oci://"), "{address}");
    *code = json!({"local": {"filename": filter_module()}});
    extension["@type"] = json!("type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig");
    std::fs::write(file, json!({"resources": [extension]}).to_string()).unwrap();
}

fn failure_policy(spec: &Value) -> &'static str {
    match spec["failStrategy"].as_str() {
        None | Some("FAIL_CLOSE") => "FAIL_CLOSED",
        Some("FAIL_RELOAD") => "FAIL_RELOAD",
        Some("FAIL_OPEN") => "FAIL_OPEN",
        Some(other) => panic!("Istio does not know the strategy {other}"),
    }
}
