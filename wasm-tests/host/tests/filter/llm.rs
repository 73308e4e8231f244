//! What the tests of bodies and usage share: requests to a provider, its responses in each dialect, and what is settled.

use portcullis_test_host::{Callout, ContextId, Personality, TestHost};
use serde_json::{Value, json};

use crate::scene::{TIMEOUT_MS, assert_clean, decide_of, rules, settles, verdict};

/// How long a body may take to arrive, in milliseconds.
pub(crate) const BODY_TIMEOUT_MS: u64 = 10_000;

/// By when a body that never comes has been given up, with two ticks.
pub(crate) const PATIENCE_FOR_BODY_MS: u64 = BODY_TIMEOUT_MS + 40;

/// A call of a provider, with a token limit.
pub(crate) const CALL: [(&str, &str); 8] = [
    (":method", "POST"),
    (":path", "/v1/chat/completions"),
    (":authority", "gateway"),
    ("content-type", "application/json"),
    ("x-request-id", "req-1"),
    ("x-admission-owner-id", "owner-1"),
    ("x-admission-org-id", "org-1"),
    ("x-admission-org-rate-limit-tokens", "10000"),
];

/// Its body: text and model have characters of several bytes. Its 91 bytes are 23 tokens.
pub(crate) const BODY: &str =
    r#"{"messages":[{"content":"a 😀 {\"model\":\"no\"}"}],"model":"gpt-é😀","max_tokens":20}"#;
/// The model that it names.
pub(crate) const MODEL: &str = "gpt-é😀";
/// The estimate of its input.
pub(crate) const ESTIMATE: u64 = (BODY.len() as u64).div_ceil(4);
/// What it holds.
pub(crate) const HOLD: u64 = ESTIMATE + 20;

/// A configuration that reads the model from the body.
pub(crate) fn reading(rules: &Value) -> Value {
    json!({
        "profile": "production",
        "rules": rules,
        "model": {"from": "body", "max_body_bytes": 1_048_576, "body_timeout_ms": BODY_TIMEOUT_MS},
        "decision": {"upstream": "portcullis", "authority": "portcullis", "timeout_ms": TIMEOUT_MS}
    })
}

/// Rules that also record what a call costs.
pub(crate) fn metered_rules() -> Value {
    json!({
        "name": "metered",
        "envelope": {"when_missing": "reject"},
        "gates": [
            {"gate": "contract", "when_unavailable": "reject"},
            {"gate": "metering", "when_unavailable": "reject"}
        ],
        "decision": {"when_unavailable": "reject"}
    })
}

/// A host with a configuration that reads bodies.
pub(crate) fn reader(when_unavailable: &str) -> TestHost {
    reader_on(Personality::ENVOY, &rules("reading", when_unavailable))
}

/// The same with metering.
pub(crate) fn metered() -> TestHost {
    reader_on(Personality::ENVOY, &metered_rules())
}

/// A host of this kind with these rules.
pub(crate) fn reader_on(personality: Personality, rules: &Value) -> TestHost {
    let mut host = TestHost::new(personality);
    host.configure(&reading(rules).to_string())
        .expect("a configuration without faults");
    host
}

/// A call whose body has come, and that waits for its decision.
pub(crate) fn called(host: &mut TestHost) -> (ContextId, Callout) {
    let stream = host.begin(&CALL);
    host.body(stream, BODY.as_bytes(), true);
    let callout = decide_of(host, stream);
    (stream, callout)
}

/// Admits, and has charged the hold.
pub(crate) fn admit_with_hold(host: &mut TestHost, callout: &Callout) {
    let held = callout.json()["tokens"].clone();
    verdict(host, callout, json!({"verdict": "admit", "held_tokens": held}));
}

/// A call that has gone up, with its operation.
pub(crate) fn under_way(host: &mut TestHost) -> (ContextId, String) {
    let (stream, callout) = called(host);
    admit_with_hold(host, &callout);
    assert!(host.stream(stream).has_passed(), "{host:#?}");
    (stream, callout.op())
}

/// Everything that was told of an operation when its stream had ended, in all batches, each of which is answered:
/// settlements and the names of other lists.
pub(crate) fn told_of(host: &mut TestHost, op: &str) -> (Vec<Value>, Vec<&'static str>) {
    host.tick(40);
    loop {
        let batch = host.pending_callouts().into_iter().find(Callout::is_settle);
        let Some(batch) = batch else { break };
        host.answer(batch.token, 200, b"{}");
        host.tick(40);
    }
    let (mut settlements, mut lists) = (Vec::new(), Vec::new());
    for batch in settles(host) {
        settlements.extend(
            batch
                .settles()
                .into_iter()
                .filter(|(of, _)| of == op)
                .map(|(_, told)| told),
        );
        for list in ["releases", "renewals", "cancels"] {
            lists.extend(batch.told(list).iter().filter(|of| *of == op).map(|_| list));
        }
    }
    (settlements, lists)
}

/// One dialect: a response as JSON and as a stream, and what both report.
pub(crate) struct Dialect {
    pub(crate) name: &'static str,
    pub(crate) json: &'static str,
    pub(crate) stream: &'static str,
    pub(crate) input: u64,
    pub(crate) cached: u64,
    pub(crate) output: u64,
}

pub(crate) const DIALECTS: [Dialect; 4] = [
    Dialect {
        name: "chat completions",
        json: r#"{"id":"c","object":"chat.completion","model":"gpt-4o","choices":[{"index":0,"message":{"role":"assistant",
"content":"😀 {\"usage\":{\"prompt_tokens\":999}}"},"finish_reason":"stop"}],"usage":{"prompt_tokens":19,"completion_tokens":10,
"total_tokens":29,"prompt_tokens_details":{"cached_tokens":8}}}"#,
        stream: "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a 😀 \\\"usage\\\"\"},\"finish_reason\":null}],\"usage\":null}\r\n\
\r\n\
data: {\"choices\":[],\"usage\":{\"prompt_tokens\":19,\"completion_tokens\":10,\"prompt_tokens_details\":{\"cached_tokens\":8}}}\r\n\
\r\n\
data: [DONE]",
        input: 19,
        cached: 8,
        output: 10,
    },
    Dialect {
        name: "responses",
        json: r#"{"id":"resp_1","object":"response","output":[{"content":[{"text":"é","usage":{"input_tokens":5}}]}],
"usage":{"input_tokens":36,"input_tokens_details":{"cached_tokens":4},"output_tokens":87,"total_tokens":123}}"#,
        stream: r#"event: response.output_text.delta
data: {"type":"response.output_text.delta","delta":"𝄞 usage"}

event: response.completed
data: {"type":"response.completed","response":{"id":"r","output":[{"usage":{"input_tokens":1}}],"usage":{"input_tokens":36,"input_tokens_details":{"cached_tokens":4},"output_tokens":87,"total_tokens":123}}}

"#,
        input: 36,
        cached: 4,
        output: 87,
    },
    Dialect {
        name: "messages",
        json: r#"{"type":"message","content":[{"type":"text","text":"😀"}],"usage":{"input_tokens":25,
"cache_creation_input_tokens":100,"cache_read_input_tokens":1000,"output_tokens":15}}"#,
        stream: r#"event: message_start
data: {"type":"message_start","message":{"usage":{"input_tokens":25,"cache_creation_input_tokens":100,"cache_read_input_tokens":1000,"output_tokens":1}}}

event: content_block_delta
data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"😀 usage"}}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":15}}

event: message_stop
data: {"type":"message_stop"}

"#,
        input: 1125,
        cached: 1000,
        output: 15,
    },
    Dialect {
        name: "generateContent",
        json: r#"{"candidates":[{"content":{"parts":[{"text":"x😀"}]},"finishReason":"STOP"}],"usageMetadata":{"promptTokenCount":10,
"candidatesTokenCount":5,"thoughtsTokenCount":3,"cachedContentTokenCount":6,"totalTokenCount":18}}"#,
        stream: "data: {\"candidates\":[{\"content\":{\"parts\":[{\"text\":\"😀\"}]}}],\"usageMetadata\":{\"promptTokenCount\":10,\"candidatesTokenCount\":1}}\r\n\
\r\n\
data: {\"candidates\":[{\"finishReason\":\"STOP\"}],\"usageMetadata\":{\"promptTokenCount\":10,\"candidatesTokenCount\":5,\"thoughtsTokenCount\":3,\"cachedContentTokenCount\":6}}\r\n\
\r\n",
        input: 10,
        cached: 6,
        output: 8,
    },
];

/// Headers of a response.
pub(crate) const JSON: [(&str, &str); 2] = [(":status", "200"), ("content-type", "application/json")];
/// Headers of a stream.
pub(crate) const EVENTS: [(&str, &str); 2] = [(":status", "200"), ("content-type", "text/event-stream; charset=utf-8")];

/// The upstream has exactly what the client has sent.
#[track_caller]
pub(crate) fn assert_forwarded(host: &TestHost, stream: u32) {
    let stream = host.stream(stream);
    assert!(stream.has_passed(), "{host:#?}");
    assert_eq!(
        String::from_utf8_lossy(&stream.forwarded),
        String::from_utf8_lossy(&stream.sent)
    );
    assert_clean(host);
}

/// The request was refused with this, before anything went up.
#[track_caller]
pub(crate) fn assert_refused(host: &TestHost, stream: u32, status: u32, code: &str) {
    let seen = host.stream(stream);
    let reply = seen.reply();
    assert_eq!((reply.status, reply.code().as_str()), (status, code));
    assert!(!seen.has_passed() && seen.forwarded.is_empty());
    assert_clean(host);
}
