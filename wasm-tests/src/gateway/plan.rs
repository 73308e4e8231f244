//! What a gateway is to be: the example's own configuration, loaded as a tree, with only what a test needs changed (ports,
//! the module's path, the plugin configuration, endpoints, one more route or listener).

use std::net::SocketAddr;

use serde_json::{Value, json};

use crate::{locate, repository};

/// Route header that selects the route matched by a header.
const ROUTE_HEADER: &str = "x-route";

/// The key of a cluster's protocol.
const HTTP_OPTIONS: &str = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";

/// What to start.
pub struct GatewayPlan {
    /// Listener name and plugin configuration; the first one is the example's own listener.
    listeners: Vec<(String, Plugin)>,
    decision: Vec<SocketAddr>,
    upstream: SocketAddr,
    pub(super) workers: u32,
    upstream_http2: bool,
    without_filter: bool,
    ext_authz: Option<Value>,
    patient_connects: bool,
    body_while_paused: Option<bool>,
    manager: Value,
    in_front: Vec<Value>,
    route: Value,
    as_received: bool,
    pub(super) updatable: bool,
    rewrite: Option<Box<Rewrite>>,
}

/// A last change of the whole configuration.
type Rewrite = dyn Fn(&mut Value) + Send + Sync;

/// A plugin configuration: one that tests change, or a text that has to reach Envoy as it is.
enum Plugin {
    Tree(Value),
    Text(String),
}

/// The smallest plugin configuration with these rules (a shipped name or an object).
fn plugin(rules: Value) -> Plugin {
    Plugin::Tree(
        json!({"profile": "development", "rules": rules, "decision": {"upstream": "portcullis", "timeout_ms": 250}}),
    )
}

impl GatewayPlan {
    /// One listener with `rules`, in front of `upstream`.
    pub fn new(rules: impl Into<Value>, upstream: SocketAddr) -> Self {
        Self {
            listeners: vec![("ingress".to_owned(), plugin(rules.into()))],
            decision: vec![crate::closed_port()],
            upstream,
            workers: 2,
            upstream_http2: false,
            without_filter: false,
            ext_authz: None,
            patient_connects: false,
            body_while_paused: None,
            manager: json!({}),
            in_front: Vec::new(),
            route: json!({}),
            as_received: false,
            updatable: false,
            rewrite: None,
        }
    }

    /// Where the decision service is. Without this it refuses connections.
    #[must_use]
    pub fn decision(mut self, address: SocketAddr) -> Self {
        self.decision = vec![address];
        self
    }

    /// Merges `changes` into the plugin configuration of the newest listener.
    #[must_use]
    pub fn plugin(mut self, changes: Value) -> Self {
        match self.listeners.last_mut() {
            Some((_, Plugin::Tree(tree))) => merge(tree, changes),
            _ => panic!("a configuration given as text can't be changed"),
        }
        self
    }

    /// Takes exactly this text as the plugin configuration of the newest listener.
    #[must_use]
    pub fn exact_plugin(mut self, text: &str) -> Self {
        self.listeners.last_mut().expect("there is a listener").1 = Plugin::Text(text.to_owned());
        self
    }

    /// One more listener of the same Envoy, with other rules.
    #[must_use]
    pub fn listener(mut self, name: &str, rules: impl Into<Value>) -> Self {
        self.listeners.push((name.to_owned(), plugin(rules.into())));
        self
    }

    /// Worker threads, each with a VM of its own; 2 unless set.
    #[must_use]
    pub fn workers(mut self, count: u32) -> Self {
        self.workers = count;
        self
    }

    /// Speaks HTTP/2 to the upstream, which trailers and gRPC need.
    #[must_use]
    pub fn upstream_http2(mut self) -> Self {
        self.upstream_http2 = true;
        self
    }

    /// Waits long for connections to the decision service, which many cold ones at once need on a busy machine.
    #[must_use]
    pub fn patient_connects(mut self) -> Self {
        self.patient_connects = true;
        self
    }

    /// Turns Envoy's own path normalisation off, so that only the filter's is left.
    #[must_use]
    pub fn paths_as_received(mut self) -> Self {
        self.as_received = true;
        self
    }

    /// Lets the body through to the filter while the headers are paused (`allow_on_headers_stop_iteration`). Unless this or
    /// the next one is called, that is so where the plugin reads the model from the body, as operators are told to set it.
    #[must_use]
    pub fn body_while_paused(mut self) -> Self {
        self.body_while_paused = Some(true);
        self
    }

    /// Keeps the body from the filter while the headers are paused, whatever the plugin needs.
    #[must_use]
    pub fn no_body_while_paused(mut self) -> Self {
        self.body_while_paused = Some(false);
        self
    }

    /// Merges `changes` into the connection manager of every listener.
    #[must_use]
    pub fn manager(mut self, changes: Value) -> Self {
        merge(&mut self.manager, changes);
        self
    }

    /// Puts an HTTP filter in front of all others.
    #[must_use]
    pub fn in_front(mut self, filter: Value) -> Self {
        self.in_front.push(filter);
        self
    }

    /// Merges `changes` into every route: a timeout, a narrower match.
    #[must_use]
    pub fn route(mut self, changes: Value) -> Self {
        merge(&mut self.route, changes);
        self
    }

    /// Takes the listener from a file of its own, so that `Gateway::update` can replace it while Envoy runs.
    #[must_use]
    pub fn updatable(mut self) -> Self {
        self.updatable = true;
        self
    }

    /// Changes the whole configuration at last, as another system would have written it.
    #[must_use]
    pub fn rewrite(mut self, change: impl Fn(&mut Value) + Send + Sync + 'static) -> Self {
        self.rewrite = Some(Box::new(change));
        self
    }

    /// Envoy alone, to test the harness itself.
    #[must_use]
    pub fn without_filter(mut self) -> Self {
        self.without_filter = true;
        self
    }

    /// Envoy's own `ext_authz` in the filter's place, from the example's configuration with `changes` merged into it.
    #[must_use]
    pub fn ext_authz(mut self, changes: Value) -> Self {
        self.ext_authz = Some(changes);
        self
    }

    /// The example's configuration with all of this in it, on ports that the kernel picks.
    pub(super) fn tree(&self) -> Value {
        let mut tree = example("envoy.yaml");
        on_free_port(&mut tree["admin"]["address"]["socket_address"]);
        let parts = &mut tree["static_resources"];
        let example = parts["listeners"][0].take();
        let listeners = self
            .listeners
            .iter()
            .map(|(name, plugin)| self.listener_tree(example.clone(), name, plugin));
        parts["listeners"] = listeners.collect();
        for cluster in parts["clusters"].as_array_mut().expect("the example has clusters") {
            match cluster["name"].as_str() {
                Some("portcullis") => {
                    endpoints(cluster, &self.decision);
                    if self.patient_connects {
                        cluster["connect_timeout"] = json!("5s");
                    }
                }
                Some("upstream") => {
                    endpoints(cluster, &[self.upstream]);
                    if self.upstream_http2 {
                        cluster["typed_extension_protocol_options"] = http2_options();
                    }
                }
                _ => {}
            }
        }
        if let Some(rewrite) = &self.rewrite {
            rewrite(&mut tree);
        }
        tree
    }

    fn listener_tree(&self, mut listener: Value, name: &str, plugin: &Plugin) -> Value {
        listener["name"] = json!(name);
        on_free_port(&mut listener["address"]["socket_address"]);
        let manager = &mut listener["filter_chains"][0]["filters"][0]["typed_config"];
        let filters = manager["http_filters"]
            .as_array_mut()
            .expect("the example has HTTP filters");
        if self.without_filter {
            filters.retain(|filter| filter["name"] != "portcullis");
        }
        if let Some(changes) = &self.ext_authz {
            let mut native = example("ext_authz.yaml");
            merge(&mut native["http_filter"]["typed_config"], changes.clone());
            filters[0] = native["http_filter"].take();
            manager["local_reply_config"] = native["local_reply_config"].take();
        }
        let filters = manager["http_filters"].as_array_mut().expect("as above");
        for filter in filters.iter_mut().filter(|filter| filter["name"] == "portcullis") {
            let config = &mut filter["typed_config"]["config"];
            config["vm_config"]["code"]["local"]["filename"] = json!(locate::filter_module());
            config["configuration"]["value"] = match plugin {
                Plugin::Tree(tree) => json!(tree.to_string()),
                Plugin::Text(text) => json!(text),
            };
            let reads_body = matches!(plugin, Plugin::Tree(tree) if tree["model"]["from"] == "body");
            config["allow_on_headers_stop_iteration"] = json!(self.body_while_paused.unwrap_or(reads_body));
        }
        filters.splice(0..0, self.in_front.iter().cloned());
        if self.as_received {
            manager["normalize_path"] = json!(false);
            manager["merge_slashes"] = json!(false);
        }
        let routes = manager["route_config"]["virtual_hosts"][0]["routes"]
            .as_array_mut()
            .expect("routes");
        let mut by_header = routes[0].clone();
        by_header["match"]["headers"] = json!([{"name": ROUTE_HEADER, "string_match": {"exact": "special"}}]);
        by_header["response_headers_to_add"] = json!([{"header": {"key": "x-by-header", "value": "yes"}}]);
        routes.insert(0, by_header);
        for route in routes.iter_mut() {
            merge(route, self.route.clone());
        }
        merge(manager, self.manager.clone());
        listener
    }
}

/// A file of the example.
fn example(name: &str) -> Value {
    let file = repository().join("examples/envoy").join(name);
    let text = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    serde_yaml_ng::from_str(&text).expect("the example is YAML")
}

fn on_free_port(socket_address: &mut Value) {
    *socket_address = json!({"address": "127.0.0.1", "port_value": 0});
}

fn endpoints(cluster: &mut Value, addresses: &[SocketAddr]) {
    let endpoint = |address: &SocketAddr| {
        json!({"endpoint": {"address": {"socket_address":
            {"address": address.ip().to_string(), "port_value": address.port()}}}})
    };
    cluster["load_assignment"]["endpoints"] =
        json!([{"lb_endpoints": addresses.iter().map(endpoint).collect::<Value>()}]);
}

fn http2_options() -> Value {
    json!({HTTP_OPTIONS: {
        "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}}
    }})
}

/// Writes `changes` over a configuration: objects key by key, anything else whole.
pub fn merge(into: &mut Value, changes: Value) {
    match (into, changes) {
        (Value::Object(into), Value::Object(changes)) => {
            for (key, value) in changes {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, value) => *into = value,
    }
}
