//! The scenarios whose cost is kept: each is done a few times before it is measured once, from the first callback of its
//! stream to the last.

use portcullis_test_host::{ContextId, Ledger, Personality, TestHost};
use serde_json::{Value, json};

use crate::lease_scene::{MAX_AGE_MS, leasing};
use crate::llm::{CALL, EVENTS, admit_with_hold, called, metered_rules, reading};
use crate::scene::{admit, assert_clean, configuration, decide_of, deny, host, rules, verdict};
use crate::signatures::{WALL_START_S, signature, signing};

/// How often a scenario is done before it is measured.
const WARM_UP: usize = 3;
/// Bytes of a piece of a body, as Envoy reads it.
const PIECE: usize = 16 * 1024;

type Scenario = (&'static str, fn() -> Ledger);

/// Every scenario, by name.
pub(super) const SCENARIOS: [Scenario; 17] = [
    ("unguarded route", unguarded),
    ("no envelope, admitted", no_envelope),
    ("malformed envelope", malformed),
    ("unsigned envelope", unsigned),
    ("exact, signed", exact_signed),
    ("exact, admitted", exact_admit),
    ("exact, denied", exact_deny),
    ("leased, stripped", || leased_admit(true, "denied")),
    ("leased", || leased_admit(false, "denied")),
    ("leased, stripped, limit headers always", || {
        leased_admit(true, "always")
    }),
    ("leased, limit headers always", || leased_admit(false, "always")),
    ("leased, tokens", leased_tokens),
    ("remembered denial", remembered),
    ("model from a body of 2 KB", || body(2 * 1024)),
    ("model from a body of 200 KB", || body(200 * 1024)),
    ("streamed response of 100 events", streamed),
    ("tick with nothing to do", idle_tick),
];

/// A request as an edge in front of a gateway makes it.
const REQUEST: [(&str, &str); 16] = [
    (":method", "POST"),
    (":path", "/v1/chat"),
    (":authority", "api.example.com"),
    (":scheme", "https"),
    ("user-agent", "example-client/1.2.3 (linux; x86_64)"),
    ("accept", "application/json"),
    ("accept-encoding", "gzip, deflate"),
    ("authorization", "Bearer 0123456789abcdef0123456789abcdef"),
    ("x-forwarded-for", "192.0.2.1"),
    ("x-forwarded-proto", "https"),
    ("x-request-id", "7f1c2a34-58d2-4d0e-9f0a-3b6c1e5d7a90"),
    ("x-envoy-expected-rq-timeout-ms", "15000"),
    ("x-admission-owner-id", "owner-1"),
    ("x-admission-owner-rate-limit-requests", "30000"),
    ("x-admission-org-id", "org-1"),
    ("x-admission-org-rate-limit-requests", "300000"),
];

/// What an upstream answers.
const RESPONSE: [(&str, &str); 4] = [
    (":status", "200"),
    ("content-type", "application/json"),
    ("content-length", "2"),
    ("server", "upstream"),
];

/// Does a scenario a few times, and once more to measure it.
fn measured(host: &mut TestHost, mut scenario: impl FnMut(&mut TestHost)) -> Ledger {
    (0..WARM_UP).for_each(|_| scenario(host));
    let before = host.ledger().clone();
    scenario(host);
    assert_clean(host);
    host.ledger().since(&before)
}

/// The upstream answers a request that has passed, and the stream ends.
fn answered(host: &mut TestHost, stream: ContextId) {
    assert!(host.stream(stream).has_passed(), "{host:#?}");
    host.respond_with(stream, &RESPONSE, [&b"{}"[..]]);
    host.finish(stream);
}

fn refused(host: &mut TestHost, stream: ContextId, status: u32) {
    assert_eq!(host.stream(stream).reply().status, status);
    host.finish(stream);
}

fn unguarded() -> Ledger {
    let mut guarding = configuration(&rules("costs", "reject"));
    guarding["routes"] = json!([{"path_prefix": "/v2/", "methods": ["POST"]}]);
    measured(&mut host(&guarding), |host| {
        let stream = host.request(&REQUEST);
        answered(host, stream);
    })
}

fn no_envelope() -> Ledger {
    measured(&mut host(&configuration(&rules("costs", "admit"))), |host| {
        let stream = host.request(&REQUEST[..12]);
        answered(host, stream);
    })
}

fn malformed() -> Ledger {
    let mut lines = REQUEST;
    lines[13].1 = "+5";
    measured(&mut host(&configuration(&rules("costs", "reject"))), |host| {
        let stream = host.request(&lines);
        refused(host, stream, 503);
    })
}

fn unsigned() -> Ledger {
    measured(&mut host(&signing("reject")), |host| {
        let stream = host.request(&REQUEST);
        refused(host, stream, 503);
    })
}

fn exact_signed() -> Ledger {
    let value = signature(&REQUEST, "k1", WALL_START_S);
    let mut lines = REQUEST.to_vec();
    lines.push(("x-admission-signature", &value));
    measured(&mut host(&signing("reject")), |host| {
        let stream = host.request(&lines);
        let callout = decide_of(host, stream);
        admit(host, &callout);
        answered(host, stream);
    })
}

fn exact_admit() -> Ledger {
    measured(&mut host(&configuration(&rules("costs", "reject"))), |host| {
        let stream = host.request(&REQUEST);
        let callout = decide_of(host, stream);
        admit(host, &callout);
        answered(host, stream);
    })
}

fn exact_deny() -> Ledger {
    measured(&mut host(&configuration(&rules("costs", "reject"))), |host| {
        let stream = host.request(&REQUEST);
        let callout = decide_of(host, stream);
        deny(host, &callout);
        refused(host, stream, 429);
    })
}

/// A host whose memory has a block for requests with these headers.
fn with_block(leasing: &Value, lines: &[(&str, &str)], tokens: Option<u64>) -> TestHost {
    let mut host = host(leasing);
    let stream = host.request(lines);
    let callout = decide_of(&host, stream);
    let tightest = json!({"scope": "owner", "resource": "requests", "limit": 30_000, "remaining": 20_000,
                          "reset_ms": 41_000, "window_s": 60});
    let mut lease = json!({"requests": 60, "ends_in_ms": MAX_AGE_MS});
    let mut admission = json!({"verdict": "admit", "tightest": tightest});
    if let Some(tokens) = tokens {
        lease["tokens"] = json!(60 * tokens);
        lease["largest_hold"] = json!(100_000);
        admission["held_tokens"] = json!(tokens);
    }
    admission["lease"] = lease;
    verdict(&mut host, &callout, admission);
    answered(&mut host, stream);
    host
}

fn leased_admit(strips: bool, limit_headers: &str) -> Ledger {
    let mut leasing = leasing(&rules("costs", "reject"));
    leasing["envelope"] = json!({"prefix": "x-admission-", "strip": strips});
    leasing["reply"] = json!({"limit_headers": limit_headers});
    let mut host = with_block(&leasing, &REQUEST, None);
    let cost = measured(&mut host, |host| {
        let stream = host.request(&REQUEST);
        answered(host, stream);
    });
    assert_eq!(host.sent().len(), 1, "it is not leased");
    cost
}

fn leased_tokens() -> Ledger {
    let mut lines = REQUEST;
    lines[13].0 = "x-admission-owner-rate-limit-tokens";
    let mut leasing = leasing(&rules("costs", "reject"));
    leasing["envelope"] = json!({"prefix": "x-admission-", "strip": false});
    let mut host = with_block(&leasing, &lines, Some(1_024));
    let cost = measured(&mut host, |host| {
        let stream = host.request(&lines);
        answered(host, stream);
    });
    assert_eq!(host.sent().len(), 1, "it is not leased");
    cost
}

fn remembered() -> Ledger {
    let mut host = host(&leasing(&rules("costs", "reject")));
    let stream = host.request(&REQUEST);
    let callout = decide_of(&host, stream);
    deny(&mut host, &callout);
    refused(&mut host, stream, 429);
    let cost = measured(&mut host, |host| {
        let stream = host.request(&REQUEST);
        refused(host, stream, 429);
    });
    assert_eq!(host.sent().len(), 1, "it is not remembered");
    cost
}

/// A request whose model stands behind its text, in a body of so many bytes.
fn body(bytes: usize) -> Ledger {
    let mut host = TestHost::new(Personality::ENVOY);
    host.configure(&reading(&rules("costs", "reject")).to_string())
        .expect("a configuration without faults");
    let (head, tail) = (
        r#"{"messages":[{"role":"user","content":""#,
        r#""}],"model":"gpt-4o","max_tokens":20}"#,
    );
    let text = "Some words, and then \\\"more\\\" of them. ";
    let filler = text.repeat(bytes.div_ceil(text.len()));
    let filler = &filler[..(bytes - head.len() - tail.len()) / text.len() * text.len()];
    let body = [head, filler, tail].concat();
    measured(&mut host, |host| {
        let stream = host.begin(&CALL);
        let pieces: Vec<&[u8]> = body.as_bytes().chunks(PIECE).collect();
        for (at, piece) in pieces.iter().enumerate() {
            host.body(stream, piece, at + 1 == pieces.len());
        }
        let callout = decide_of(host, stream);
        admit_with_hold(host, &callout);
        answered(host, stream);
    })
}

/// The response to a call, an event in each piece, and usage in the last one but one. Its request is not measured.
fn streamed() -> Ledger {
    let mut host = TestHost::new(Personality::ENVOY);
    host.configure(&reading(&metered_rules()).to_string())
        .expect("a configuration without faults");
    let event = concat!(
        r#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1764000000,"model":"gpt-4o","#,
        r#""choices":[{"index":0,"delta":{"content":" some words"},"finish_reason":null}],"usage":null}"#,
        "\n\n"
    );
    let usage = concat!(
        r#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1764000000,"model":"gpt-4o","choices":[],"#,
        r#""usage":{"prompt_tokens":19,"completion_tokens":198,"total_tokens":217}}"#,
        "\n\n"
    );
    let mut pieces = vec![event.as_bytes(); 98];
    pieces.extend([usage.as_bytes(), b"data: [DONE]\n\n"]);
    let mut costs = Vec::new();
    for _ in 0..=WARM_UP {
        let (stream, callout) = called(&mut host);
        admit_with_hold(&mut host, &callout);
        let before = host.ledger().clone();
        host.respond_with(stream, &EVENTS, pieces.iter().copied());
        host.finish(stream);
        costs.push(host.ledger().since(&before));
        host.tick(20);
        let batch = host.callout();
        assert_eq!(batch.settles()[0].1["tokens"], 217);
        host.answer(batch.token, 200, b"{}");
    }
    assert_clean(&host);
    costs.pop().expect("it was done")
}

fn idle_tick() -> Ledger {
    let mut host = host(&leasing(&rules("costs", "reject")));
    let cost = measured(&mut host, |host| host.tick(20));
    assert_eq!(cost.spent("proxy_on_tick").calls, 1);
    cost
}
