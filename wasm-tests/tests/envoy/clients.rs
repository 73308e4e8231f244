//! The official OpenAI and Anthropic clients at the gateway: they work as without it, each denial is an exception of their
//! own with our message, and they try again exactly where waiting helps.

use portcullis_wasm_tests::{
    Behaviour, Envelope, Gateway, GatewayPlan, Provider, PythonClient, Service, closed_port, development_service,
};
use serde_json::{Value, json};
use tempfile::NamedTempFile;

use crate::backed::patient;
use crate::llm_world::{begun, chat_stream};

const OPENAI: &str = "openai_calls.py";
const ANTHROPIC: &str = "anthropic_calls.py";
/// Of every window here.
const WINDOW_S: u64 = 2;
/// More than any request of these tests that is to pass.
const MAX_BODY_BYTES: u64 = 20_000;

struct World {
    gateway: Gateway,
    provider: Provider,
    _service: Service,
    _policy: NamedTempFile,
}

/// Every gate that a client may meet, all of them closed in an outage.
fn rules() -> Value {
    let gate = |name: &str| json!({"gate": name, "when_unavailable": "reject"});
    json!({
        "name": "clients",
        "envelope": {"when_missing": "reject"},
        "gates": [gate("org_status"), gate("model_policy"), gate("capacity"), gate("contract")],
        "decision": {"when_unavailable": "reject"}
    })
}

fn plugin() -> Value {
    json!({"model": {"from": "body", "max_body_bytes": MAX_BODY_BYTES}, "window_s": WINDOW_S})
}

impl World {
    async fn start() -> Self {
        let policy = NamedTempFile::with_suffix(".json").expect("a temporary file");
        let org =
            |status: &str| json!({"status": status, "plan": "team", "models": ["gpt-4o", "claude-x", "unserved"]});
        let text = json!({
            "providers": {"gpt-4o": "openai", "claude-*": "anthropic"},
            "plans": {"team": {}},
            "orgs": {"g": org("active"), "asleep": org("suspended")}
        });
        std::fs::write(policy.path(), text.to_string()).expect("the policy can be written");
        let mut config = development_service(json!({"lanes": {"narrow": {"requests": 1}}}));
        config["policy"] = json!({"url": format!("file:{}", policy.path().display())});
        config["limiter"]["window_s"] = json!(WINDOW_S);
        let (service, provider) = tokio::join!(Service::start(config), Provider::start());
        let plan = GatewayPlan::new(rules(), provider.address).decision(service.address);
        let plan = plan.patient_connects().plugin(patient()).plugin(plugin());
        Self {
            gateway: plan.start().await,
            provider,
            _service: service,
            _policy: policy,
        }
    }

    /// A call, and how many requests it made at the gateway.
    async fn call(&self, client: &mut Official, envelope: &Envelope, asked: Value) -> (Value, i64) {
        client.call(&self.gateway, envelope, asked).await
    }
}

/// One of the clients, with what differs between them.
struct Official {
    python: PythonClient,
    kind: &'static str,
    model: &'static str,
    too_large: &'static str,
}

impl Official {
    fn both() -> [Self; 2] {
        let openai = Self {
            python: PythonClient::start(OPENAI),
            kind: "chat",
            model: "gpt-4o",
            // It has no class of its own for 413.
            too_large: "APIStatusError",
        };
        let anthropic = Self {
            python: PythonClient::start(ANTHROPIC),
            kind: "message",
            model: "claude-x",
            too_large: "ContentTooLargeError",
        };
        [openai, anthropic]
    }

    async fn call(&mut self, gateway: &Gateway, envelope: &Envelope, mut asked: Value) -> (Value, i64) {
        for (key, usual) in [("kind", self.kind), ("model", self.model)] {
            if asked[key].is_null() {
                asked[key] = json!(usual);
            }
        }
        let before = requests(gateway).await;
        let answer = self.python.call(gateway.address(), envelope, asked).await;
        (answer, requests(gateway).await - before)
    }
}

/// Requests that have reached the gateway, by Envoy's own count.
async fn requests(gateway: &Gateway) -> i64 {
    gateway.envoy_stat("http.ingress.downstream_rq_total").await
}

fn envelope() -> Envelope {
    Envelope::owner("o").org("g")
}

/// The client raised this exception of its own, and it tells our code, class and message.
#[track_caller]
fn raised(answer: &Value, exception: &str, status: u16, code: &str) {
    let kinds = answer["exceptions"].as_array();
    let is_kind = kinds.is_some_and(|kinds| kinds.iter().any(|kind| kind == exception));
    assert!(is_kind, "not a {exception}: {answer}");
    assert!(
        kinds.is_some_and(|kinds| kinds.iter().any(|kind| kind == "APIStatusError")),
        "{answer}"
    );
    assert_eq!(answer["status"], status, "{answer}");
    // One client keeps the whole body, the other its error.
    let body = &answer["body"];
    let error = if body["error"].is_object() {
        &body["error"]
    } else {
        body
    };
    assert_eq!(error["code"], code, "{answer}");
    assert_eq!(answer["type"], error["type"], "{answer}");
    let message = error["message"].as_str().unwrap_or_default();
    assert!(!message.is_empty(), "{answer}");
    assert!(
        answer["message"].as_str().is_some_and(|told| told.contains(message)),
        "{answer}"
    );
}

fn seconds(answer: &Value) -> Vec<f64> {
    let waits = answer["waits"].as_array().expect("waits");
    waits.iter().filter_map(Value::as_f64).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_and_streams_work_as_without_a_gateway() {
    let mut world = World::start().await;
    let [mut openai, mut anthropic] = Official::both();
    for kind in ["chat", "chat_stream", "response", "response_stream", "embedding"] {
        let usage = json!({"stream_options": {"include_usage": true}});
        let more = if kind == "chat_stream" { usage } else { json!({}) };
        let asked = json!({"kind": kind, "more": more});
        works(&world, &mut openai, asked).await;
    }
    for kind in ["message", "message_stream"] {
        works(&world, &mut anthropic, json!({"kind": kind})).await;
    }
    world.gateway.assert_sound();
}

async fn works(world: &World, client: &mut Official, asked: Value) {
    let (answer, requests) = world.call(client, &envelope(), asked.clone()).await;
    assert_eq!(requests, 1, "{asked}: {answer}");
    let text = answer["text"].as_str().unwrap_or_default();
    if asked["kind"] == "embedding" {
        assert_eq!(text, "[0.5, -0.5]", "{answer}");
    } else {
        assert!(
            text.starts_with("Every w\u{F6}rd \u{1F642} counts \"once\" Every"),
            "{answer}"
        );
    }
    let used = world.provider.last_used();
    assert_eq!(answer["usage"], json!([used.input, used.output]), "{asked}: {answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_cut_is_an_error_of_the_client_and_not_a_short_answer() {
    let world = World::start().await;
    let [mut openai, mut anthropic] = Official::both();
    world.provider.behave(Behaviour {
        cut_after: Some(4),
        ..Behaviour::default()
    });
    for (client, kind) in [(&mut openai, "chat_stream"), (&mut anthropic, "message_stream")] {
        let (answer, requests) = world.call(client, &envelope(), json!({"kind": kind})).await;
        assert!(answer["exceptions"].is_array(), "{answer}");
        assert_eq!(answer["status"], Value::Null, "{answer}");
        assert_eq!(requests, 1, "a stream that has begun is not asked for again");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waiting_can_not_cure_is_raised_at_once_and_asked_for_once() {
    let mut world = World::start().await;
    let blocked = || envelope().requests("owner", 0);
    let nobody = Envelope::default();
    for mut client in Official::both() {
        let too_large = client.too_large;
        let long = json!({"text": "long ".repeat(5_000)});
        let rows = [
            (
                envelope(),
                json!({"model": "secret"}),
                "PermissionDeniedError",
                403,
                "MODEL_NOT_ALLOWED",
            ),
            (
                Envelope::owner("o").org("asleep"),
                json!({}),
                "PermissionDeniedError",
                403,
                "ORG_SUSPENDED",
            ),
            (
                Envelope::owner("o").org("stranger"),
                json!({}),
                "PermissionDeniedError",
                403,
                "ORG_UNKNOWN",
            ),
            (
                envelope(),
                json!({"model": "unserved"}),
                "InternalServerError",
                501,
                "PROVIDER_NOT_CONFIGURED",
            ),
            (
                envelope(),
                json!({"model": ""}),
                "BadRequestError",
                400,
                "MODEL_REQUIRED",
            ),
            (
                envelope(),
                json!({"more": {"extra_body": {"Model": "x"}}}),
                "BadRequestError",
                400,
                "MODEL_AMBIGUOUS",
            ),
            (envelope(), long, too_large, 413, "BODY_TOO_LARGE"),
            (blocked(), json!({}), "RateLimitError", 429, "RATE_LIMITED"),
            (
                nobody.clone(),
                json!({}),
                "InternalServerError",
                503,
                "ENVELOPE_MISSING",
            ),
        ];
        for (envelope, asked, exception, status, code) in rows {
            let (answer, requests) = world.call(&mut client, &envelope, asked).await;
            raised(&answer, exception, status, code);
            assert_eq!((requests, seconds(&answer)), (1, vec![]), "{answer}");
        }
        let stream = json!({"kind": format!("{}_stream", client.kind), "model": "secret"});
        let (answer, requests) = world.call(&mut client, &envelope(), stream).await;
        raised(&answer, "PermissionDeniedError", 403, "MODEL_NOT_ALLOWED");
        assert_eq!(requests, 1);
    }
    assert_eq!(world.provider.hits(), 0);
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn where_waiting_helps_they_wait_as_long_as_they_are_told_and_are_served() {
    let mut world = World::start().await;
    for (at, mut client) in Official::both().into_iter().enumerate() {
        let owner = || Envelope::owner(&format!("o{at}")).org("g");
        let rows = [
            ("requests", owner().requests("owner", 1)),
            ("tokens", owner().auth("a").tokens("auth", 50)),
            ("capacity", owner().with("lane", "narrow")),
        ];
        for (name, envelope) in rows {
            // Capacity is one lane's for everybody: its window is over before the next client comes to it.
            let more = json!({"max_tokens": 64});
            let hits = world.provider.hits();
            let (first, _) = world.call(&mut client, &envelope, json!({"more": more})).await;
            assert!(first["text"].is_string(), "{name}: {first}");
            let (second, requests) = world.call(&mut client, &envelope, json!({"more": more})).await;
            assert!(second["text"].is_string(), "{name}: {second}");
            waited(&second, requests, WINDOW_S);
            assert!(seconds(&second).len() == 1, "{name}: one wait is enough: {second}");
            assert_eq!(world.provider.hits() - hits, 2, "{name}");
        }
        // Without retries the denial itself comes up, with its Retry-After.
        let envelope = owner().auth("b").requests("auth", 1);
        world.call(&mut client, &envelope, json!({})).await;
        let (denied, requests) = world.call(&mut client, &envelope, json!({"max_retries": 0})).await;
        raised(&denied, "RateLimitError", 429, "RATE_LIMITED");
        assert!(
            denied["message"]
                .to_string()
                .contains("shared inference rate limit exceeded")
        );
        assert_eq!(requests, 1);
        let told: u64 = denied["retry_after"]
            .as_str()
            .and_then(|told| told.parse().ok())
            .expect("seconds");
        assert!((1..=WINDOW_S).contains(&told), "{denied}");
    }
    world.gateway.assert_sound();
}

/// Each retry is a request, after whole seconds as Retry-After gives them, and the time went into waiting.
#[track_caller]
#[allow(clippy::cast_precision_loss, reason = "small numbers")]
fn waited(answer: &Value, requests: i64, longest_s: u64) {
    let waits = seconds(answer);
    assert_eq!(usize::try_from(requests).unwrap(), 1 + waits.len(), "{answer}");
    for wait in &waits {
        // A backoff of the client's own would be a fraction.
        let is_told = wait.fract() == 0.0 && (1.0..=longest_s as f64).contains(wait);
        assert!(is_told, "{wait} is not what Retry-After says: {answer}");
    }
    let (took, sum) = (answer["took"].as_f64().expect("a time"), waits.iter().sum::<f64>());
    assert!((sum..sum + 3.0).contains(&took), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_is_freed_meanwhile_is_waited_for() {
    let world = World::start().await;
    for mut client in Official::both() {
        let envelope = Envelope::owner(client.kind).org("g").concurrency("owner", 1);
        world.provider.behave(Behaviour {
            pause_after: Some(2),
            ..Behaviour::default()
        });
        let mut holder = begun(&world.gateway, &chat_stream().call(&envelope)).await;
        assert_eq!(holder.answer_head().await, 200);
        world.provider.behave(Behaviour::default());
        let denied = "portcullis_rejected_quota_exhausted";
        let before = world.gateway.counter(denied).await;
        let frees = async {
            world.gateway.await_metric(denied, before + 1).await;
            holder.reset();
        };
        let ((answer, requests), ()) = tokio::join!(world.call(&mut client, &envelope, json!({})), frees);
        assert!(answer["text"].is_string(), "{answer}");
        waited(&answer, requests, 1);
        assert_eq!(seconds(&answer), [1.0]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_is_tried_again_and_raised_as_one() {
    let provider = Provider::start().await;
    let plan = GatewayPlan::new(rules(), provider.address).decision(closed_port());
    let gateway = plan.plugin(plugin()).start().await;
    for mut client in Official::both() {
        let (answer, requests) = client.call(&gateway, &envelope(), json!({})).await;
        raised(&answer, "InternalServerError", 503, "SERVICE_DEGRADED");
        assert!(
            answer["message"]
                .to_string()
                .contains("a dependency of admission is unavailable")
        );
        assert_eq!(requests, 3, "{answer}");
        waited(&answer, requests, 1);
    }
    assert_eq!(provider.hits(), 0);
}
