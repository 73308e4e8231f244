//! What the tests of LLM traffic start: the stand-in provider behind a gateway that reads bodies, over a real Redis; calls
//! in each dialect; and what the token window is charged.

use std::time::Duration;

use portcullis_wasm_tests::{
    Answer, Call, Connection, DEADLINE, Envelope, Gateway, GatewayPlan, Provider, Service, until,
};
use redis::Value as Stored;
use serde_json::{Value, json};

use crate::backed::{over_redis, patient};
use crate::stores::Store;
use crate::world::strict;

/// How long after the end of a stream its settlement may take: a second, and what a busy machine adds.
pub(crate) const SETTLED: Duration = Duration::from_millis(1_000 + 500);
/// So many tokens that no hold meets the limit.
pub(crate) const PLENTY: u64 = 1_000_000_000_000;
/// Of a request that says nothing of its output.
pub(crate) const DEFAULT_OUTPUT: u64 = 1_024;

pub(crate) struct Llm {
    pub(crate) gateway: Gateway,
    pub(crate) service: Service,
    pub(crate) provider: Provider,
    pub(crate) redis: Store,
}

/// The plugin's part: bodies are read, and admitted answers show what is left.
pub(crate) fn by_body() -> Value {
    json!({"model": {"from": "body"}, "reply": {"limit_headers": "always"}})
}

impl Llm {
    /// Contract limits that hold or nothing passes.
    pub(crate) async fn start() -> Self {
        Self::with(json!({}), |plan| plan).await
    }

    /// The same with more in the service's limiter, and another plan.
    pub(crate) async fn with(limiter: Value, change: impl FnOnce(GatewayPlan) -> GatewayPlan) -> Self {
        let redis = Store::redis().await;
        let mut config = over_redis(&redis.url());
        for (key, value) in limiter.as_object().into_iter().flatten() {
            config["limiter"][key] = value.clone();
        }
        let (service, provider) = tokio::join!(Service::start(config), Provider::start());
        let plan = GatewayPlan::new(strict(), provider.address).decision(service.address);
        let plan = change(plan.patient_connects().plugin(patient()).plugin(by_body()));
        let gateway = plan.start().await;
        service.await_state("limiter", "up").await;
        Self {
            gateway,
            service,
            provider,
            redis,
        }
    }

    /// Another gateway of the same service, in front of the same provider.
    pub(crate) async fn another_gateway(&self) -> Gateway {
        let plan = GatewayPlan::new(strict(), self.provider.address).decision(self.service.address);
        let plan = plan.patient_connects().plugin(patient()).plugin(by_body());
        plan.start().await
    }

    /// What this owner's window of tokens is charged; none if it has no window.
    pub(crate) async fn charged(&self, owner: &str) -> Option<u64> {
        let key = format!("portcullis:{{owner:{owner}}}:tokens:60");
        match self.redis.run(&["GET", &key]).await {
            Stored::BulkString(text) => Some(String::from_utf8(text).unwrap().parse().unwrap()),
            Stored::Int(number) => Some(number.try_into().unwrap()),
            _ => None,
        }
    }

    /// Waits until it is charged exactly this, within the time that a settlement may take.
    pub(crate) async fn becomes(&self, owner: &str, tokens: u64) {
        let mut seen = None;
        let start = std::time::Instant::now();
        while start.elapsed() < SETTLED {
            seen = self.charged(owner).await;
            if seen == Some(tokens) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{owner} is charged {seen:?} after {SETTLED:?}, not {tokens}");
    }

    /// Waits until nothing of this owner is running any more, and asserts that it is charged exactly this: a settlement
    /// frees the slots of its operation, so a slot tells when it has been.
    pub(crate) async fn stays(&self, owner: &str, tokens: u64) {
        until("the slot to be free", DEADLINE, async || {
            (self.slots(owner).await == 0).then_some(())
        })
        .await;
        assert_eq!(self.charged(owner).await, Some(tokens), "{owner}");
    }

    /// The slots that this owner holds or has let lapse.
    pub(crate) async fn slots(&self, owner: &str) -> i64 {
        let key = format!("portcullis:{{owner:{owner}}}:concurrency");
        self.redis.number(&["ZCARD", &key]).await
    }

    /// Calls, and asserts that the provider was asked.
    pub(crate) async fn served(&self, call: &Call) -> Answer {
        let before = self.provider.hits();
        let answer = self.gateway.call(call).await;
        assert_eq!(answer.status, 200, "{answer:?} {}", answer.text());
        assert_eq!(self.provider.hits() - before, 1, "calls of the provider");
        answer
    }
}

/// An owner with this limit of tokens, and a slot for each call.
pub(crate) fn tokens(owner: &str, limit: u64) -> Envelope {
    Envelope::owner(owner)
        .tokens("owner", limit)
        .concurrency("owner", 1_000)
}

pub(crate) fn post(path: &str, body: impl Into<Vec<u8>>) -> Call {
    Call::post(path, body).header("content-type", "application/json")
}

/// A call in one of the dialects, and what it holds.
#[derive(Clone)]
pub(crate) struct Asked {
    pub(crate) path: &'static str,
    pub(crate) body: Value,
}

impl Asked {
    pub(crate) fn call(&self, envelope: &Envelope) -> Call {
        post(self.path, self.body.to_string()).envelope(envelope)
    }

    /// The same with these fields too.
    pub(crate) fn and(mut self, fields: Value) -> Self {
        for (key, value) in fields.as_object().into_iter().flatten() {
            self.body[key] = value.clone();
        }
        self
    }

    /// What its body is estimated to hold.
    pub(crate) fn estimate(&self) -> u64 {
        (self.body.to_string().len() as u64).div_ceil(4)
    }

    /// What it reserves, if it allows so much output.
    pub(crate) fn hold(&self, output: u64) -> u64 {
        self.estimate() + output
    }
}

pub(crate) fn chat() -> Asked {
    Asked {
        path: "/v1/chat/completions",
        body: json!({"model": "gpt-4o", "messages": [{"role": "user", "content": "Say it just once"}]}),
    }
}

pub(crate) fn chat_stream() -> Asked {
    chat().and(json!({"stream": true, "stream_options": {"include_usage": true}}))
}

pub(crate) fn response() -> Asked {
    Asked {
        path: "/v1/responses",
        body: json!({"model": "gpt-4o", "input": "Say it just once", "instructions": "Be brief"}),
    }
}

pub(crate) fn message() -> Asked {
    Asked {
        path: "/v1/messages",
        body: json!({"model": "claude-x", "max_tokens": 64, "messages": [{"role": "user", "content": "Say it once"}]}),
    }
}

const GEMINI: &str = "/v1beta/models/gemini-x:generateContent";
const GEMINI_STREAM: &str = "/v1beta/models/gemini-x:streamGenerateContent?alt=sse";
const GEMINI_LIST: &str = "/v1beta/models/gemini-x:streamGenerateContent";

fn gemini(path: &'static str) -> Asked {
    Asked {
        path,
        body: json!({"contents": [{"role": "user", "parts": [{"text": "Say it just once"}]}]}),
    }
}

/// Everything whose answer is one document.
pub(crate) fn documents() -> Vec<(&'static str, Asked)> {
    let embeddings = Asked {
        path: "/v1/embeddings",
        body: json!({"model": "text-embedding", "input": "Say it just once"}),
    };
    vec![
        ("chat", chat()),
        ("response", response()),
        ("embeddings", embeddings),
        ("message", message()),
        ("gemini", gemini(GEMINI)),
        ("gemini-list", gemini(GEMINI_LIST)),
    ]
}

/// Everything whose answer comes in events.
pub(crate) fn streams() -> Vec<(&'static str, Asked)> {
    let streaming = json!({"stream": true});
    vec![
        ("chat-stream", chat_stream()),
        ("response-stream", response().and(streaming.clone())),
        ("message-stream", message().and(streaming)),
        ("gemini-stream", gemini(GEMINI_STREAM)),
    ]
}

/// Sends a call, and gives the connection to read or to break.
pub(crate) async fn begun(gateway: &Gateway, call: &Call) -> Connection {
    let mut connection = Connection::open(gateway.address()).await;
    connection.send(&call.bytes()).await;
    connection
}

/// What an admitted answer shows to be left of the limit of tokens.
#[track_caller]
pub(crate) fn left(answer: &Answer) -> u64 {
    let shown = answer.header("x-ratelimit-remaining-tokens");
    shown
        .unwrap_or_else(|| panic!("no limit is shown: {answer:?} {}", answer.text()))
        .parse()
        .expect("a number")
}
