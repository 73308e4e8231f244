//! The example of `docs/migration.md`, old and new, in real Envoy: the same requests are refused by the `ratelimit` filter with
//! the old configuration and by Portcullis with the new one.
//!
//! The ratelimit service itself is stood in for: something that speaks its protocol and counts by the page's own file. What is
//! tested is the migration, not that service.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};

use bytes::{BufMut as _, Bytes, BytesMut};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use portcullis_wasm_tests::{Answer, Call, Gateway, GatewayPlan, Service, Upstream};
use prost::Message;
use serde_json::{Value, json};
use tempfile::NamedTempFile;
use tokio::net::TcpListener;

use crate::backed::patient;
use crate::expect::{RATE_LIMITED, refused, served};
use crate::world::burst;

/// The text of the page's first here-document for this file: those of the example of the ratelimit service come first.
fn written(name: &str) -> &'static str {
    let page = include_str!("../../../docs/migration.md");
    let begin = format!("cat > target/tutorial/{name} <<'END'\n");
    let text = page
        .split_once(&begin)
        .unwrap_or_else(|| panic!("the page writes no {name}"))
        .1;
    text.split_once("END\n").expect("it ends").0
}

fn yaml(name: &str) -> Value {
    serde_yaml_ng::from_str(written(name)).expect("YAML")
}

#[derive(Clone, PartialEq, Message)]
struct Entry {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(string, tag = "2")]
    value: String,
}

#[derive(Clone, PartialEq, Message)]
struct Descriptor {
    #[prost(message, repeated, tag = "1")]
    entries: Vec<Entry>,
}

#[derive(Clone, PartialEq, Message)]
struct Asked {
    #[prost(string, tag = "1")]
    domain: String,
    #[prost(message, repeated, tag = "2")]
    descriptors: Vec<Descriptor>,
}

/// 1: within the limit, 2: over it.
#[derive(Clone, PartialEq, Message)]
struct Answered {
    #[prost(int32, tag = "1")]
    overall_code: i32,
}

/// Counts by a file of the ratelimit service, as far as the example goes: one level, one window that never ends.
struct Ratelimit {
    file: Value,
    counts: Mutex<HashMap<String, u64>>,
}

impl Ratelimit {
    fn limit(&self, entry: &Entry) -> Option<u64> {
        let all = self.file["descriptors"].as_array().expect("descriptors");
        let of = |value: Option<&str>| {
            let fits = |one: &&Value| one["key"] == entry.key.as_str() && one["value"].as_str() == value;
            all.iter().find(fits)
        };
        let found = of(Some(&entry.value)).or_else(|| of(None))?;
        found["rate_limit"]["requests_per_unit"].as_u64()
    }

    fn code(&self, asked: &Asked) -> i32 {
        assert_eq!(self.file["domain"], asked.domain.as_str());
        let entries = asked.descriptors.iter().flat_map(|descriptor| &descriptor.entries);
        let over = entries.filter(|entry| {
            let mut counts = self.counts.lock().unwrap();
            let count = counts.entry(format!("{}={}", entry.key, entry.value)).or_default();
            *count += 1;
            self.limit(entry).is_some_and(|limit| *count > limit)
        });
        if over.count() > 0 { 2 } else { 1 }
    }

    async fn start() -> SocketAddr {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
        let address = listener.local_addr().unwrap();
        let service = Arc::new(Self {
            file: yaml("ratelimit.yaml"),
            counts: Mutex::default(),
        });
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let service = Arc::clone(&service);
                tokio::spawn(async move {
                    let answer = service_fn(move |request| answer(request, Arc::clone(&service)));
                    let builder = auto::Builder::new(TokioExecutor::new());
                    drop(builder.serve_connection(TokioIo::new(stream), answer).await);
                });
            }
        });
        address
    }
}

type Body = UnsyncBoxBody<Bytes, Infallible>;

async fn answer(request: Request<Incoming>, service: Arc<Ratelimit>) -> Result<Response<Body>, Infallible> {
    let path = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
    assert_eq!(request.uri().path(), path);
    let body = request.into_body().collect().await.expect("a body").to_bytes();
    let asked = Asked::decode(&body[5..]).expect("a request of the protocol");
    let message = Answered {
        overall_code: service.code(&asked),
    };
    let mut frame = BytesMut::new();
    frame.put_u8(0);
    frame.put_u32(u32::try_from(message.encoded_len()).unwrap());
    message.encode(&mut frame).unwrap();
    let mut trailers = http::HeaderMap::new();
    trailers.insert("grpc-status", http::HeaderValue::from_static("0"));
    let body = Full::new(frame.freeze()).with_trailers(std::future::ready(Some(Ok(trailers))));
    let response = Response::builder().header("content-type", "application/grpc");
    Ok(response.body(body.boxed_unsync()).unwrap())
}

/// The page's filters of this name.
fn filter(name: &str) -> Value {
    let filters = yaml("filters.yaml");
    let found = filters
        .as_array()
        .expect("filters")
        .iter()
        .find(|filter| filter["name"] == name);
    found.unwrap_or_else(|| panic!("the page has no filter {name}")).clone()
}

async fn ratelimited(upstream: &Upstream) -> Gateway {
    let service = Ratelimit::start().await;
    let mut cluster = yaml("cluster.yaml")[0].take();
    cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]["socket_address"] =
        json!({"address": service.ip().to_string(), "port_value": service.port()});
    let actions = json!([{"actions": [{"request_headers": {"header_name": "x-org", "descriptor_key": "org"}}]}]);
    let plan = GatewayPlan::new("contract-limits", upstream.address).without_filter();
    let plan = plan.in_front(filter("envoy.filters.http.ratelimit"));
    let plan = plan
        .route(json!({"route": {"rate_limits": actions}}))
        .rewrite(move |tree| {
            let clusters = tree["static_resources"]["clusters"].as_array_mut().expect("clusters");
            clusters.push(cluster.clone());
        });
    plan.start().await
}

async fn guarded(upstream: &Upstream, service: &Service) -> Gateway {
    let rules: Value = serde_json::from_str(written("rules.json")).expect("JSON");
    let plan = GatewayPlan::new(rules, upstream.address).decision(service.address);
    let plan = plan.plugin(patient()).patient_connects();
    plan.in_front(filter("envoy.filters.http.header_mutation"))
        .start()
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_old_and_the_new_configuration_refuse_the_same_requests() {
    let (upstream, policy) = (Upstream::start().await, NamedTempFile::new().expect("a file"));
    std::fs::write(policy.path(), written("policy.json")).expect("the policy can be written");
    let service = Service::start(json!({
        "profile": "development",
        "limiter": {"url": "memory:", "op_timeout_ms": 1_500},
        "policy": {"url": format!("file:{}", policy.path().display())}
    }))
    .await;
    let (old, mut new) = (ratelimited(&upstream).await, guarded(&upstream, &service).await);
    let mut hits = 0;
    for (org, allowed) in [("small", 60), ("acme", 65)] {
        let call = Call::get("/v1/models").header("x-org", org);
        let before = burst(old.address(), &call, 65).await;
        let after = burst(new.address(), &call, 65).await;
        let statuses = |answers: &[Answer]| answers.iter().map(|answer| answer.status).collect::<Vec<_>>();
        assert_eq!(statuses(&before), statuses(&after), "{org}");
        after[..allowed].iter().for_each(served);
        after[allowed..].iter().for_each(|answer| {
            refused(answer, RATE_LIMITED);
        });
        before[allowed..].iter().for_each(|answer| {
            assert!(answer.header("x-envoy-ratelimited").is_some(), "{answer:?}");
        });
        hits += 2 * allowed;
        assert_eq!(upstream.hits(), hits, "{org}");
    }
    new.assert_sound();
}
