//! The VM's memory: it is as large after 100,000 requests, or a response of 100 MB, as after the first thousand, and small
//! with as many tenants as it may have leases for.

use portcullis_test_host::{Callout, Failure, TestHost};

use serde_json::json;

use crate::lease_scene::{grant, leasing};
use crate::llm::{CALL, DIALECTS, EVENTS, JSON, metered, told_of, under_way};
use crate::scene::{admit, assert_clean, decide_of, host, rules};

/// Requests at first, after which the memory must not grow.
const WARM_UP: u32 = 1_000;

/// One request of a mixed load, whose end and settlement come later.
fn request(host: &mut TestHost, n: u32, open: &mut Vec<u32>) {
    let stream = host.begin(&CALL);
    // Sizes differ, as they do in reality: an allocator that only sees equal ones never fragments.
    let filler = "x".repeat((n as usize * 37) % 4_000);
    let body = format!(
        r#"{{"filler":"{filler}","model":"model-{}","max_tokens":{}}}"#,
        n % 50,
        n % 900
    );
    let (head, tail) = body.as_bytes().split_at(body.len() / 2);
    match n % 10 {
        // A fault in the body.
        0 => host.body(stream, b"no", true),
        // The client goes away while it sends.
        1 => host.body(stream, head, false),
        _ => {
            host.body(stream, head, false);
            host.body(stream, tail, true);
            answer(host, n, stream);
        }
    }
    open.push(stream);
    if open.len() > 64 {
        let ended = open.remove((n as usize * 7) % open.len());
        host.finish(ended);
    }
    if n.is_multiple_of(32) {
        host.tick(200);
        for batch in host.pending_callouts().into_iter().filter(Callout::is_settle) {
            host.answer(batch.token, if n.is_multiple_of(640) { 503 } else { 200 }, b"{}");
        }
        host.forget();
    }
}

fn answer(host: &mut TestHost, n: u32, stream: u32) {
    let callout = host.sent().last().expect("a decision is asked for");
    assert_eq!(callout.context, stream);
    // The operation is the first key of a request. To parse each would take most of this test's time.
    let op = std::str::from_utf8(&callout.body[7..39]).expect("hexadecimal digits");
    let token = callout.token;
    let verdict = match n % 10 {
        2 => r#""deny","code":"TOKENS_LIMITED","gate":"contract""#,
        // The service does not answer in time.
        3 => return host.fail(token, Failure::TimedOut),
        4 => r#""admit","held_tokens":50,"slot_ttl_ms":30000"#,
        _ => r#""admit","held_tokens":50"#,
    };
    let answer = format!(r#"{{"op":"{op}","verdict":{verdict}}}"#);
    host.answer(token, 200, answer.as_bytes());
    if host.stream(stream).has_passed() {
        let dialect = &DIALECTS[n as usize % DIALECTS.len()];
        let (head, body) = if n.is_multiple_of(2) {
            (JSON, dialect.json)
        } else {
            (EVENTS, dialect.stream)
        };
        let (first, rest) = body.as_bytes().split_at(body.len() / 3);
        host.respond_with(stream, &head, [first, rest]);
    }
}

#[test]
fn memory_does_not_grow_over_a_hundred_thousand_requests() {
    let mut host = metered();
    let mut open = Vec::new();
    for n in 0..WARM_UP {
        request(&mut host, n, &mut open);
    }
    let warm = host.memory_bytes();
    let count = if std::env::var_os("PORTCULLIS_QUICK").is_some() {
        10_000
    } else {
        100_000
    };
    for n in WARM_UP..WARM_UP + count {
        request(&mut host, n, &mut open);
        if n % 5000 == 0 {
            eprintln!("{n} {}", host.memory_bytes() - warm);
        }
    }
    assert_eq!(host.memory_bytes(), warm, "bytes after {count} requests more");
    assert_clean(&host);
}

#[test]
fn memory_does_not_grow_over_a_response_of_a_hundred_megabytes() {
    const PIECE_BYTES: usize = 16 * 1_024;
    const BYTES: usize = 100_000_000;
    let mut host = metered();
    for _ in 0..100 {
        let (stream, op) = under_way(&mut host);
        host.respond_with(stream, &EVENTS, [&[b'x'; PIECE_BYTES][..]]);
        host.finish(stream);
        told_of(&mut host, &op);
    }
    let warm = host.memory_bytes();
    let (stream, op) = under_way(&mut host);
    host.response_headers(stream, &EVENTS, false);
    // Events of some size, over which the pieces are laid without regard to them.
    let event = format!(
        "data: {{\"choices\":[{{\"delta\":{{\"content\":\"{} 😀\"}}}}],\"usage\":null}}\n\n",
        "word ".repeat(40)
    );
    let mut block = Vec::with_capacity(PIECE_BYTES + event.len());
    let mut sent = 0;
    while sent < BYTES {
        while block.len() < PIECE_BYTES {
            block.extend_from_slice(event.as_bytes());
        }
        host.response_body(stream, &block[..PIECE_BYTES], false);
        block.drain(..PIECE_BYTES);
        sent += PIECE_BYTES;
    }
    block.extend_from_slice(DIALECTS[0].stream.as_bytes());
    host.response_body(stream, &block, false);
    host.response_body(stream, b"", true);
    assert_eq!(host.memory_bytes(), warm, "bytes after a response of {sent}");
    host.finish(stream);
    let (settlements, _) = told_of(&mut host, &op);
    assert_eq!(settlements[0]["tokens"], DIALECTS[0].input + DIALECTS[0].output);
    assert!(host.stream(stream).returned_bytes > BYTES as u64);
    assert_clean(&host);
}

#[test]
fn leased_requests_of_thousands_of_tenants_take_at_most_four_megabytes() {
    const MOST_BYTES: usize = 4 << 20;
    const TENANTS: usize = 2_000;
    const ROUNDS: usize = 10;
    let mut configuration = leasing(&rules("leased", "reject"));
    configuration["leases"]["slots"] = json!(2 * TENANTS);
    let mut host = host(&configuration);
    let (mut leased, mut exact) = (0, 0);
    for n in 0..ROUNDS * TENANTS {
        let owner = format!("tenant-{:07}", n % TENANTS);
        let stream = host.request(&[
            (":method", "POST"),
            (":path", "/v1/chat"),
            ("x-admission-owner-id", &owner),
            ("x-admission-owner-rate-limit-requests", "30000"),
        ]);
        if host.stream(stream).has_passed() {
            leased += 1;
        } else {
            let callout = decide_of(&host, stream);
            // A tenant whose two slots are others' asks for no block.
            if callout.json()["lease"].is_null() {
                admit(&mut host, &callout);
            } else {
                grant(&mut host, &callout, 8);
            }
            exact += 1;
        }
        host.respond_with(stream, &[(":status", "200")], [&b"{}"[..]]);
        host.finish(stream);
        if n.is_multiple_of(200) {
            host.tick(10);
            for callout in host.pending_callouts() {
                if callout.is_settle() {
                    host.answer(callout.token, 200, b"{}");
                } else {
                    grant(&mut host, &callout, 8);
                }
            }
            host.forget();
        }
    }
    assert_clean(&host);
    assert!(
        exact >= TENANTS && leased > 3 * exact,
        "{leased} of blocks, {exact} exact"
    );
    let bytes = host.memory_bytes();
    assert!(bytes <= MOST_BYTES, "the VM has {bytes} bytes");
}
