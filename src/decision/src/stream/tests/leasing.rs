//! What is handed out without a callout, and what goes back.

use std::string::String;

#[cfg(target_arch = "wasm32")]
use wasm_bindgen_test::wasm_bindgen_test as test;

use super::*;

fn leased(more: &str) -> Run {
    let all = std::format!(r#", "leases": {{"max_requests": 100, "max_age_ms": 1000}} {more}"#);
    Run::with(&rules("\"reject\"", "\"reject\"", "\"reject\""), &all)
}

fn granting(requests: u64, more: &str) -> String {
    std::format!(
        r#"{{"op": "{}", "verdict": "admit", "lease": {{"requests": {requests}, "ends_in_ms": 1000 {more}}}}}"#,
        op()
    )
}

impl Run {
    fn fetched_ahead(&self) -> Option<serde_json::Value> {
        self.effects.iter().find_map(|effect| match effect {
            Effect::Fetch(_, callout) => Some(serde_json::from_slice(&callout.body).unwrap()),
            _ => None,
        })
    }

    fn asked_for(&self) -> serde_json::Value {
        let mut callouts = self.effects.iter().filter_map(|effect| match effect {
            Effect::Dispatch(callout) => Some(serde_json::from_slice(&callout.body).unwrap()),
            _ => None,
        });
        callouts.next().expect("a callout")
    }

    fn hit(&mut self, now_ms: u64) -> bool {
        self.next_stream();
        self.limited(now_ms);
        let told = self.gatehouse.passed(now_ms);
        told.contains(&Effect::Count(Counter::LeaseHits, 1))
            && told.contains(&Effect::Count(Counter::Admitted, 1))
            && !self.stream.is_held()
            && !self.resumed()
    }
}

#[test]
fn the_first_request_brings_a_block_and_the_next_ones_need_no_callout() {
    let mut run = leased("");
    run.limited(0);
    let asked = run.asked_for();
    assert_eq!(
        (&asked["lease"]["max_requests"], &asked["lease"]["max_age_ms"]),
        (&100.into(), &1000.into())
    );
    run.answer(5, Some(200), &granting(4, ""));
    assert!(run.resumed() && run.counted(Counter::Admitted));
    assert!(run.hit(10) && run.fetched_ahead().is_none());
    assert!(run.hit(11));
    let ahead = run.fetched_ahead().expect("half is gone");
    assert_eq!(
        (&ahead["lease"]["ahead"], ahead["request_id"].is_null()),
        (&true.into(), true)
    );
    assert!(run.hit(12) && run.fetched_ahead().is_none(), "one fetch at a time");
    assert!(run.hit(13));
    run.next_stream();
    run.limited(14);
    assert!(
        run.dispatched() && run.asked_for()["lease"].is_null(),
        "the block is on its way"
    );
}

#[test]
fn a_block_that_was_fetched_ahead_is_handed_out_next() {
    let mut run = leased("");
    run.limited(0).answer(5, Some(200), &granting(2, ""));
    assert!(run.hit(10) && run.fetched_ahead().is_some());
    let answer = granting(50, "");
    let answer = CalloutAnswer {
        status: Some(200),
        body: Some(answer.as_bytes()),
    };
    let op = OperationId::from_random([7; 16]);
    run.gatehouse.fetched(&mut run.host, op, answer, 12);
    for n in 0..51 {
        assert!(run.hit(13 + n), "{n}");
    }
}

#[test]
fn an_answer_without_a_block_lets_one_be_asked_for_again_soon() {
    let mut run = leased("");
    let admitted = std::format!(r#"{{"op": "{}", "verdict": "admit"}}"#, op());
    for (now_ms, asks) in [(0, true), (20, false), (54, false), (56, true)] {
        run.next_stream();
        run.limited(now_ms);
        assert_eq!(!run.asked_for()["lease"].is_null(), asks, "at {now_ms} ms");
        run.answer(now_ms + 5, Some(200), &admitted);
    }
}

#[test]
fn a_fetch_that_failed_is_cancelled() {
    let mut run = leased("");
    run.limited(0).answer(5, Some(200), &granting(2, ""));
    run.hit(10);
    let answer = CalloutAnswer {
        status: Some(504),
        body: None,
    };
    let op = OperationId::from_random([7; 16]);
    run.gatehouse.fetched(&mut run.host, op, answer, 12);
    assert!(run.told(12).contains("cancels"));
    let mut run = leased("");
    run.limited(0).answer(5, Some(200), &granting(2, ""));
    run.hit(10);
    run.gatehouse.tend_leases(&mut run.host, 10 + TIMEOUT_MS + 499);
    assert_eq!(run.told(600), "");
    run.gatehouse.tend_leases(&mut run.host, 10 + TIMEOUT_MS + 500);
    assert!(run.told(800).contains("cancels"), "a host that never tells");
}

#[test]
fn what_nobody_was_admitted_by_goes_back_at_the_end_of_the_block() {
    let mut run = leased("");
    run.limited(0).answer(5, Some(200), &granting(4, ""));
    assert!(run.hit(10));
    run.gatehouse.tend_leases(&mut run.host, 999);
    assert_eq!(run.told(999), "");
    assert!(!run.gatehouse.is_settled());
    run.gatehouse.tend_leases(&mut run.host, 1_000);
    let told: serde_json::Value = serde_json::from_str(&run.told(1_000)).unwrap();
    assert_eq!(told["returns"][0]["lease"], op());
    assert_eq!(
        (&told["returns"][0]["requests"], &told["returns"][0]["tokens"]),
        (&3.into(), &0.into())
    );
    run.gatehouse.settled(Some(200), b"{}", 1_001);
    run.gatehouse.tend_leases(&mut run.host, 1_100);
    assert_eq!(run.told(1_100), "", "once");
    assert!(run.gatehouse.is_settled());
}

#[test]
fn at_the_end_of_the_vm_blocks_go_back_at_once() {
    let mut run = leased("");
    run.limited(0).answer(5, Some(200), &granting(4, ""));
    run.gatehouse.end_leases(&mut run.host, 20);
    assert!(run.told(20).contains(r#""requests":4"#));
}

#[test]
fn a_denial_is_remembered_for_requests_like_it() {
    let mut run = leased("");
    let body = std::format!(
        r#"{{"op": "{}", "verdict": "deny", "code": "RATE_LIMITED", "gate": "contract", "retry_after_s": 41,
            "limit": {{"scope": "org", "resource": "requests", "limit": 30, "remaining": 0, "reset_ms": 40001, "window_s": 60}}}}"#,
        op()
    );
    run.limited(0).answer(5, Some(200), &body);
    assert_eq!(run.reply(), Some((429, "RATE_LIMITED".into())));
    run.next_stream();
    run.limited(900);
    assert_eq!(run.reply(), Some((429, "RATE_LIMITED".into())));
    assert!(!run.dispatched() && run.counted(Counter::Rejected(FailureClass::QuotaExhausted)));
    run.next_stream();
    run.limited(1_005);
    assert!(run.dispatched());
}

#[test]
fn a_block_nobody_asked_for_or_a_larger_one_is_no_answer() {
    let mut run = leased("");
    run.limited(0).answer(5, Some(200), &granting(101, ""));
    assert_eq!(run.reply(), degraded());
    let mut run = Run::closed();
    run.limited(0).answer(5, Some(200), &granting(1, ""));
    assert_eq!(run.reply(), degraded());
}

#[test]
fn leases_are_served_while_the_service_is_down() {
    let mut run = leased("");
    run.limited(0).answer(5, Some(200), &granting(40, ""));
    for n in 0..5 {
        run.gatehouse.breaker.failed(6 + n);
    }
    assert!(run.gatehouse.breaker.is_open());
    for n in 0..40 {
        assert!(run.hit(20 + n));
        assert!(run.fetched_ahead().is_none());
    }
    run.next_stream();
    run.limited(70);
    assert_eq!(run.reply(), degraded());
}

#[test]
fn without_shared_memory_random_bits_or_leasable_rules_every_decision_is_exact() {
    let mut run = leased("");
    run.host.is_absent = true;
    run.limited(0);
    assert!(run.asked_for()["lease"].is_null());
    let mut run = leased("");
    run.host.has_no_random = true;
    run.limited(0);
    assert_eq!(run.reply(), degraded());
    let metered = r#"{"name": "r", "envelope": {"when_missing": "reject"}, "decision": {"when_unavailable": "reject"},
        "gates": [{"gate": "metering", "when_unavailable": "reject"}]}"#;
    let mut run = Run::with(metered, r#", "leases": {}"#);
    run.headers(0, &[("x-admission-owner-id", "o"), ("x-admission-org-id", "g")]);
    assert!(run.asked_for()["lease"].is_null());
}

#[test]
fn a_leased_request_gives_back_the_tokens_that_it_has_not_used() {
    let tokens = [
        ("x-admission-owner-id", "o"),
        ("x-admission-owner-rate-limit-tokens", "90000"),
    ];
    let mut run = leased("");
    let grant = granting(4, r#", "tokens": 4096, "largest_hold": 90000"#);
    run.headers(0, &tokens).answer(5, Some(200), &grant);
    run.next_stream();
    run.headers(10, &tokens);
    assert!(!run.dispatched() && !run.stream.is_held());
    let headers: [Header<'_>; 2] = [(b":status", b"200"), (b"content-type", b"application/json")];
    run.stream.on_response_headers(LimitHeaders::Denied, Some(&headers));
    run.stream
        .on_response_body(Some(br#"{"usage":{"prompt_tokens":20,"completion_tokens":4}}"#));
    let told: serde_json::Value = serde_json::from_str(&run.end(20).told(20)).unwrap();
    let part = &told["returns"][0];
    assert_eq!(
        (&part["lease"], &part["tokens"], &part["requests"]),
        (&op().into(), &1000.into(), &0.into())
    );
    assert!(told["settles"].is_null());
}
