//! Leases: requests that go on without a callout, what is fetched ahead, and what goes back.

use portcullis_test_host::{Failure, Personality, TestHost};
use serde_json::json;

use crate::lease_scene::{
    MAX_AGE_MS, asks, fetch, grant, hear, hit, hits, is_fetching, leased, leased_on, leasing, returned, with_block,
    worker_beside,
};
use crate::llm::{BODY, CALL, DIALECTS, HOLD, JSON, assert_forwarded, called, reading};
use crate::scene::{ENVELOPE, admit, assert_clean, decide_of, deny, envelope_and, host, rules, settles, verdict};

#[test]
fn the_first_request_asks_for_a_block_and_the_next_ones_need_no_callout() {
    for personality in [Personality::ENVOY, Personality::WASMX] {
        let mut host = leased_on(personality);
        let (stream, callout) = asks(&mut host);
        let lease = callout.json()["lease"].clone();
        assert_eq!(
            (&lease["max_requests"], &lease["max_age_ms"]),
            (&json!(64), &json!(MAX_AGE_MS))
        );
        assert_eq!(lease["gateway"].as_str().map(str::len), Some(32));
        assert!(!callout.is_ahead);
        grant(&mut host, &callout, 20);
        assert!(host.stream(stream).has_passed());
        assert_eq!(hits(&mut host, 8), 8, "{}", personality.name);
        assert_eq!(host.sent().len(), 1, "{}", personality.name);
        host.tick(20);
        assert_eq!(
            (
                host.counter("lease_hits"),
                host.counter("admitted"),
                host.counter("callouts")
            ),
            (8, 9, 1)
        );
        assert_clean(&host);
    }
}

#[test]
fn a_block_is_handed_out_to_the_last_admission_and_not_one_more() {
    let mut host = leased();
    with_block(&mut host, 12);
    let before = hits(&mut host, 100);
    assert_eq!(before, 12);
    // The next block is on its way, so the request after the last one only asks for itself.
    let (_, callout) = asks(&mut host);
    assert!(callout.json()["lease"].is_null());
    assert!(is_fetching(&host));
    assert_clean(&host);
}

#[test]
fn the_next_block_is_fetched_at_half_without_pausing_anyone() {
    let mut host = leased();
    with_block(&mut host, 20);
    assert_eq!(hits(&mut host, 9), 9);
    assert!(!is_fetching(&host));
    let stream = host.request(&ENVELOPE);
    let callout = fetch(&host);
    assert_eq!(callout.callback, "proxy_on_request_headers");
    assert!(
        host.stream(stream).has_passed(),
        "the request waits for a block that others need"
    );
    assert!(callout.json()["request_id"].is_null());
    assert_eq!(hits(&mut host, 3), 3, "one block is fetched, not one for each request");
    assert_eq!(host.pending_callouts().len(), 1);
    // The stream that sent it is gone, and so is everybody else.
    host.finish(stream);
    grant(&mut host, &callout, 30);
    assert_eq!(hits(&mut host, 7 + 15), 7 + 15, "what was left, and the new block");
    assert!(is_fetching(&host));
    assert_eq!(host.samples("callout_ms").len(), 2);
    host.tick(20);
    assert_eq!(host.counter("callouts"), 3);
    assert_clean(&host);
}

#[test]
fn a_fetch_that_brings_nothing_leaves_the_block_and_is_cancelled() {
    type End = fn(&mut TestHost, u32);
    let ends: [(&str, End); 8] = [
        ("timed out", |host, token| host.fail(token, Failure::TimedOut)),
        ("refused", |host, token| host.fail(token, Failure::Refused)),
        ("garbage", |host, token| host.fail(token, Failure::Garbage)),
        ("no headers", |host, token| host.fail(token, Failure::Died)),
        ("cut", |host, token| host.answer(token, 200, b"{\"op\":")),
        ("empty", |host, token| host.answer(token, 200, b"")),
        ("foreign", |host, token| {
            let body = json!({"op": "f".repeat(32), "verdict": "admit", "lease": {"requests": 9, "ends_in_ms": 1_000}});
            host.answer(token, 200, body.to_string().as_bytes());
        }),
        ("error", |host, token| host.answer(token, 500, b"{}")),
    ];
    for (name, end) in ends {
        for is_gone in [false, true] {
            let mut host = leased();
            with_block(&mut host, 20);
            assert_eq!(hits(&mut host, 9), 9);
            let stream = host.request(&ENVELOPE);
            let callout = fetch(&host);
            if is_gone {
                host.finish(stream);
            }
            end(&mut host, callout.token);
            assert!(host.stream(stream).has_passed() && host.stream(stream).replies.is_empty());
            assert_eq!(hits(&mut host, 100), 10, "{name}");
            host.tick(20);
            let told: Vec<_> = settles(&host).iter().flat_map(|batch| batch.told("cancels")).collect();
            // Whoever came after the last one is over too, and was not decided.
            assert!(told.contains(&callout.op()), "{name}: {told:?}");
            assert_clean(&host);
        }
    }
}

#[test]
fn a_block_that_is_larger_than_was_asked_for_is_no_answer() {
    let mut host = leased();
    let (stream, callout) = asks(&mut host);
    grant(&mut host, &callout, 65);
    assert_eq!(host.stream(stream).reply().status, 503);
    assert!(!hit(&mut host));
    assert_clean(&host);
}

#[test]
fn a_fetch_that_the_host_refuses_costs_nobody_anything() {
    let mut host = leased();
    with_block(&mut host, 20);
    host.faults().always("proxy_http_call", 2);
    assert_eq!(hits(&mut host, 20), 20);
    host.faults().heal_all();
    host.tick(1_100);
    hear(&mut host);
    assert_eq!(returned(&host), []);
    let cancelled: Vec<_> = settles(&host).iter().flat_map(|batch| batch.told("cancels")).collect();
    assert_eq!(cancelled, Vec::<String>::new(), "nothing was asked");
    assert_clean(&host);
}

#[test]
fn a_fetch_of_which_the_host_never_tells_is_cancelled_and_its_late_answer_is_nothing() {
    let mut host = leased();
    with_block(&mut host, 20);
    assert_eq!(hits(&mut host, 10), 10);
    let callout = fetch(&host);
    host.tick(800);
    let told: Vec<_> = settles(&host).iter().flat_map(|batch| batch.told("cancels")).collect();
    assert_eq!(told, [callout.op()]);
    grant(&mut host, &callout, 30);
    assert_eq!(hits(&mut host, 100), 10, "the cancelled block is handed out");
    assert_clean(&host);
}

#[test]
fn what_a_block_has_left_goes_back_once_at_its_end() {
    for personality in [Personality::ENVOY, Personality::WASMX] {
        let mut host = leased_on(personality);
        let lease = with_block(&mut host, 20);
        assert_eq!(hits(&mut host, 5), 5);
        host.tick(MAX_AGE_MS - 20);
        assert_eq!(settles(&host), [], "{}", personality.name);
        hear(&mut host);
        assert_eq!(returned(&host), [(lease, 15, 0)], "{}", personality.name);
        assert!(!hit(&mut host), "a block outlives its time");
        host.tick(5_000);
        hear(&mut host);
        assert_eq!(returned(&host).len(), 1);
        assert_clean(&host);
    }
}

#[test]
fn what_blocks_have_left_goes_back_at_a_drain() {
    let mut host = leased();
    let lease = with_block(&mut host, 20);
    assert_eq!(hits(&mut host, 10), 10);
    let callout = fetch(&host);
    assert!(!host.drain(), "it goes with ten admissions");
    while let Some(batch) = host.pending_callouts().into_iter().find(|callout| callout.is_settle()) {
        host.answer(batch.token, 200, b"{}");
    }
    assert!(host.is_drained());
    assert_eq!(returned(&host), [(lease, 10, 0)]);
    let cancelled: Vec<_> = settles(&host).iter().flat_map(|batch| batch.told("cancels")).collect();
    assert_eq!(cancelled, [callout.op()], "a fetch that is out at the end");
    assert_eq!(host.counter("lease_hits"), 10);
    assert_clean(&host);
}

#[test]
fn a_drain_leaves_the_blocks_of_other_workers() {
    let mut first = leased();
    with_block(&mut first, 20);
    let mut second = worker_beside(&first, 2);
    assert_eq!(hits(&mut second, 3), 3);
    assert!(second.drain(), "it has nothing to tell");
    assert_eq!(hits(&mut first, 3), 3);
    assert_clean(&first);
    assert_clean(&second);
}

#[test]
fn workers_share_a_block_and_hand_out_exactly_what_it_holds() {
    for personality in [Personality::ENVOY, Personality::WASMX] {
        let mut first = leased_on(personality);
        let lease = with_block(&mut first, 11);
        let mut second = worker_beside(&first, 2);
        let mut sum = 0;
        for _ in 0..11 {
            sum += hits(&mut first, 1) + hits(&mut second, 1);
        }
        assert_eq!(sum, 11, "{}", personality.name);
        assert_eq!(
            u32::from(is_fetching(&first)) + u32::from(is_fetching(&second)),
            1,
            "one of them fetches"
        );
        first.tick(MAX_AGE_MS + 100);
        hear(&mut first);
        assert!(
            returned(&first).iter().all(|(of, ..)| *of != lease),
            "all of it was used"
        );
        assert_clean(&first);
        assert_clean(&second);
    }
}

#[test]
fn a_block_whose_worker_is_gone_is_returned_by_another_one() {
    let mut first = leased();
    let lease = with_block(&mut first, 20);
    let mut second = worker_beside(&first, 2);
    drop(first);
    assert_eq!(hits(&mut second, 4), 4);
    second.tick(MAX_AGE_MS + 1_020);
    assert!(!hit(&mut second));
    hear(&mut second);
    assert_eq!(returned(&second), [(lease, 16, 0)]);
    assert_clean(&second);
}

#[test]
fn a_denial_is_remembered_until_its_age_or_its_reset() {
    for (reset_ms, remembered_ms) in [(41_000, MAX_AGE_MS), (300, 300)] {
        let mut host = leased();
        let (stream, callout) = asks(&mut host);
        let limit = json!({"scope": "owner", "resource": "requests", "limit": 30, "remaining": 0,
                           "reset_ms": reset_ms, "window_s": 60});
        let denial = json!({"verdict": "deny", "code": "RATE_LIMITED", "gate": "contract", "limit": limit,
                            "retry_after_s": reset_ms.max(1_000) / 1_000});
        verdict(&mut host, &callout, denial);
        let first = host.stream(stream).reply().clone();
        for _ in 0..3 {
            let stream = host.request(&ENVELOPE);
            let reply = host.stream(stream).reply();
            assert_eq!((reply.status, reply.code()), (first.status, first.code()));
            assert_eq!(reply.header("x-portcullis-class"), first.header("x-portcullis-class"));
            host.finish(stream);
        }
        assert_eq!(host.sent().len(), 1, "one callout for all of them");
        host.jump(remembered_ms - 1);
        let stream = host.request(&ENVELOPE);
        assert_eq!(host.stream(stream).reply().status, 429);
        host.jump(1);
        asks(&mut host);
        assert_clean(&host);
    }
}

#[test]
fn a_remembered_denial_counts_down_and_is_every_workers() {
    let mut first = leased();
    let (_, callout) = asks(&mut first);
    deny(&mut first, &callout);
    let mut second = worker_beside(&first, 2);
    second.jump(900);
    let stream = second.request(&ENVELOPE);
    let reply = second.stream(stream).reply();
    assert_eq!((reply.status, reply.header("retry-after")), (429, Some("41")));
    assert_eq!(second.sent(), []);
    assert_eq!(second.counter("rejected_quota_exhausted"), 1);
    assert_clean(&second);
}

#[test]
fn in_shadow_mode_a_remembered_denial_lets_the_request_go_on_and_is_counted() {
    let mut shadow = leasing(&rules("watched", "reject"));
    shadow["mode"] = json!("shadow");
    let mut host = host(&shadow);
    let (stream, callout) = asks(&mut host);
    deny(&mut host, &callout);
    assert!(host.stream(stream).has_passed());
    assert!(hit(&mut host));
    assert_eq!(host.counter("shadow_rejected_quota_exhausted"), 2);
    assert_eq!(host.sent().len(), 1);
    assert_clean(&host);
}

#[test]
fn another_limit_or_another_subject_is_another_bundle() {
    let mut host = leased();
    with_block(&mut host, 20);
    for more in [
        ("x-admission-org-id", "org-1"),
        ("x-admission-graph-id", "g"),
        ("x-admission-lane", "l"),
        ("x-admission-owner-rate-limit-tokens", "100000"),
    ] {
        let stream = host.request(&envelope_and(&[more]));
        let callout = decide_of(&host, stream);
        assert!(!callout.json()["lease"].is_null(), "{more:?}");
        admit(&mut host, &callout);
    }
    let mut changed = ENVELOPE;
    changed[5].1 = "29";
    let stream = host.request(&changed);
    decide_of(&host, stream);
    assert!(hit(&mut host), "the others' requests have taken the block");
    assert_clean(&host);
}

#[test]
fn limits_that_hold_something_for_the_length_of_a_stream_are_exact() {
    let mut host = leased();
    for _ in 0..3 {
        let stream = host.request(&envelope_and(&[("x-admission-owner-concurrency-limit", "5")]));
        let callout = decide_of(&host, stream);
        assert!(callout.json()["lease"].is_null());
        admit(&mut host, &callout);
    }
    assert_eq!(host.ledger().tally("proxy_get_shared_data").calls, 0);
    assert_clean(&host);
}

#[test]
fn a_new_configuration_does_not_hand_out_what_the_old_one_was_granted() {
    let mut host = leased();
    let lease = with_block(&mut host, 20);
    let root = host.root();
    let mut changed = leasing(&rules("leased", "reject"));
    changed["leases"]["max_requests"] = json!(63);
    host.reconfigure(root, &changed.to_string()).expect("no faults");
    asks(&mut host);
    host.tick(MAX_AGE_MS);
    hear(&mut host);
    assert_eq!(returned(&host), [(lease, 20, 0)]);
    assert_clean(&host);
}

#[test]
fn leased_requests_hold_tokens_and_give_back_what_they_did_not_use() {
    let mut host = leased();
    let tokens = [("x-admission-owner-rate-limit-tokens", "100000")];
    let stream = host.request(&envelope_and(&tokens));
    let callout = decide_of(&host, stream);
    assert_eq!(callout.json()["tokens"], 1024);
    let lease = json!({"requests": 10, "tokens": 10_240, "largest_hold": 100_000, "ends_in_ms": MAX_AGE_MS});
    let admission = json!({"verdict": "admit", "held_tokens": 1_024, "lease": lease});
    verdict(&mut host, &callout, admission);
    let leased = host.request(&envelope_and(&tokens));
    assert!(host.stream(leased).has_passed());
    let body = br#"{"usage":{"prompt_tokens":19,"completion_tokens":10}}"#;
    let head = [(":status", "200"), ("content-type", "application/json")];
    host.respond_with(leased, &head, [&body[..]]);
    host.finish(leased);
    hear(&mut host);
    assert_eq!(returned(&host), [(callout.op(), 0, 1_024 - 29)]);
    host.tick(MAX_AGE_MS);
    hear(&mut host);
    let mut back = returned(&host);
    back.sort();
    assert_eq!(back, [(callout.op(), 0, 995), (callout.op(), 9, 9 * 1_024)]);
    assert_clean(&host);
}

#[test]
fn without_ticks_the_next_request_returns_what_is_left() {
    let personality = Personality {
        ticks: false,
        ..Personality::ENVOY
    };
    let mut host = leased_on(personality);
    let lease = with_block(&mut host, 20);
    assert_eq!(hits(&mut host, 5), 5);
    host.jump(MAX_AGE_MS);
    asks(&mut host);
    assert_eq!(returned(&host), [(lease, 15, 0)]);
    assert_clean(&host);
}

#[test]
fn while_the_service_is_known_not_to_answer_the_block_is_used_up_and_nothing_is_fetched() {
    let mut host = leased();
    with_block(&mut host, 20);
    for n in 0..5 {
        let stream = host.request(&envelope_and(&[("x-admission-lane", "other")]));
        let callout = decide_of(&host, stream);
        host.fail(callout.token, Failure::TimedOut);
        assert_eq!(host.stream(stream).reply().status, 503, "{n}");
    }
    assert_eq!(host.gauge("breaker_open"), Some(1));
    assert_eq!(hits(&mut host, 20), 20);
    assert!(!is_fetching(&host));
    let stream = host.request(&ENVELOPE);
    assert_eq!(host.stream(stream).reply().status, 503);
    assert_clean(&host);
}

#[test]
fn a_request_whose_model_is_in_its_body_is_leased_by_model_and_goes_up_as_it_came() {
    let mut reading = reading(&rules("leased", "reject"));
    reading["leases"] = json!({"max_requests": 64, "max_age_ms": MAX_AGE_MS});
    let mut host = host(&reading);
    let (stream, callout) = called(&mut host);
    let lease = json!({"requests": 20, "tokens": 20 * HOLD, "largest_hold": 10_000, "ends_in_ms": MAX_AGE_MS});
    let admission = json!({"verdict": "admit", "held_tokens": HOLD, "lease": lease});
    verdict(&mut host, &callout, admission);
    assert_forwarded(&host, stream);
    let stream = host.begin(&CALL);
    let (head, tail) = BODY.as_bytes().split_at(30);
    host.body(stream, head, false);
    assert!(
        !host.stream(stream).has_passed(),
        "it goes up before its model is known"
    );
    host.body(stream, tail, true);
    assert_forwarded(&host, stream);
    assert_eq!(host.sent().len(), 1);
    let other = host.begin(&CALL);
    host.body(other, br#"{"model":"another","max_tokens":20}"#, true);
    assert_eq!(decide_of(&host, other).json()["subject"]["model"], "another");
    // It reports what it has used, and the rest of its hold goes back to its block.
    host.respond_with(stream, &JSON, [DIALECTS[0].json.as_bytes()]);
    host.finish(stream);
    hear(&mut host);
    let used = DIALECTS[0].input + DIALECTS[0].output;
    assert_eq!(
        returned(&host),
        [(callout.op(), 0, HOLD.cast_signed() - used.cast_signed())]
    );
    assert_clean(&host);
}
