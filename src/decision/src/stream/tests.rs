//! A request's life, event by event, with a manual clock.

use std::string::{String, ToString};
use std::vec::Vec;

#[cfg(target_arch = "wasm32")]
use wasm_bindgen_test::wasm_bindgen_test as test;

use super::*;
use crate::config::FilterConfig;
use crate::lease::tests::Memory;
use crate::limits::{Resource, Scope};
use crate::verdict::{Admission, Verdict};
use crate::wire::{DecideAnswer, LARGEST_ANSWER};

mod bodies;
mod leasing;
mod settling;
#[cfg(feature = "signature")]
mod signed;
mod withholding;

const TIMEOUT_MS: u64 = 250;

fn whole<'a>(headers: Option<&'a [Header<'a>]>) -> RequestHead<'a> {
    RequestHead {
        headers,
        ends_here: true,
    }
}

struct Run {
    gatehouse: Gatehouse,
    stream: Stream,
    host: Memory,
    effects: Vec<Effect>,
}

fn rules(missing: &str, gate: &str, decision: &str) -> String {
    std::format!(
        r#"{{"name": "r", "envelope": {{"when_missing": {missing}}}, "decision": {{"when_unavailable": {decision}}},
            "gates": [{{"gate": "contract", "when_unavailable": {gate}}}]}}"#
    )
}

impl Run {
    fn with(rules: &str, more: &str) -> Self {
        let text =
            std::format!(r#"{{"profile": "development", "rules": {rules}, "decision": {{"upstream": "p"}} {more}}}"#);
        let config = FilterConfig::parse(text.as_bytes()).unwrap();
        Self {
            gatehouse: Gatehouse::new(config, text.as_bytes()),
            stream: Stream::default(),
            host: Memory::default(),
            effects: Vec::new(),
        }
    }

    fn closed() -> Self {
        Self::with(&rules("\"reject\"", "\"reject\"", "\"reject\""), "")
    }

    fn open() -> Self {
        Self::with(&rules("\"admit\"", "\"admit\"", "\"admit\""), "")
    }

    fn next_stream(&mut self) {
        self.stream = Stream::default();
    }

    fn headers(&mut self, now_ms: u64, headers: &[(&str, &str)]) -> &mut Self {
        self.head(now_ms, headers, true)
    }

    fn head(&mut self, now_ms: u64, headers: &[(&str, &str)], ends_here: bool) -> &mut Self {
        let base = [(":method", "POST"), (":path", "/v1/chat"), ("x-request-id", "rid")];
        let is_own = |name: &str| headers.iter().any(|(own, _)| *own == name);
        let all: Vec<Header<'_>> = base
            .iter()
            .filter(|(name, _)| !is_own(name))
            .chain(headers)
            .map(|(name, value)| (name.as_bytes(), value.as_bytes()))
            .collect();
        let head = RequestHead {
            headers: Some(&all),
            ends_here,
        };
        self.effects = self
            .stream
            .on_request_headers(&mut self.gatehouse, head, &mut self.host, now_ms);
        self.dispatch_if_asked()
    }

    fn dispatch_if_asked(&mut self) -> &mut Self {
        if self.dispatched() {
            let more = self.stream.on_dispatched();
            self.effects.extend(more);
        }
        self
    }

    fn limited(&mut self, now_ms: u64) -> &mut Self {
        self.headers(
            now_ms,
            &[
                ("x-admission-owner-id", "o"),
                ("x-admission-owner-rate-limit-requests", "30"),
            ],
        )
    }

    fn answer(&mut self, now_ms: u64, status: Option<u16>, body: &str) -> &mut Self {
        let answer = CalloutAnswer {
            status,
            body: Some(body.as_bytes()),
        };
        self.effects = self
            .stream
            .on_callout_answer(&mut self.gatehouse, &mut self.host, answer, now_ms);
        self.dispatch_if_asked()
    }

    fn clock(&mut self, now_ms: u64) -> &mut Self {
        self.effects = self.stream.on_clock(&mut self.gatehouse, now_ms);
        self
    }

    fn end(&mut self, now_ms: u64) -> &mut Self {
        self.effects = self.stream.on_end(&mut self.gatehouse, now_ms);
        self
    }

    fn dispatched(&self) -> bool {
        self.effects.iter().any(|effect| matches!(effect, Effect::Dispatch(_)))
    }

    fn resumed(&self) -> bool {
        self.effects.contains(&Effect::Resume)
    }

    fn reply(&self) -> Option<(u16, String)> {
        self.effects.iter().find_map(|effect| match effect {
            Effect::Reply(reply) => {
                let body: serde_json::Value = serde_json::from_slice(&reply.body).unwrap();
                Some((reply.status, body["error"]["code"].as_str().unwrap().to_string()))
            }
            _ => None,
        })
    }

    fn counted(&self, counter: Counter) -> bool {
        self.effects.contains(&Effect::Count(counter, 1))
    }

    fn told(&mut self, now_ms: u64) -> String {
        let callout = self.gatehouse.settle_callout(now_ms);
        callout.map_or_else(String::new, |callout| String::from_utf8(callout.body).unwrap())
    }
}

fn op() -> String {
    OperationId::from_random([7; 16]).to_string()
}

fn admit() -> String {
    std::format!(r#"{{"op": "{}", "verdict": "admit"}}"#, op())
}

fn degraded() -> Option<(u16, String)> {
    Some((503, "SERVICE_DEGRADED".into()))
}

#[test]
fn an_admitted_request_is_held_asked_about_and_resumed_once() {
    let mut run = Run::closed();
    run.limited(0);
    assert!(run.dispatched() && run.stream.is_held() && !run.resumed());
    run.answer(10, Some(200), &admit());
    assert!(run.resumed() && run.counted(Counter::Admitted) && !run.stream.is_held());
    run.answer(11, Some(200), &admit());
    assert_eq!(run.effects, []);
    run.clock(10_000);
    assert_eq!(run.effects, []);
    assert_eq!(run.end(20_000).told(20_000), "");
}

#[test]
fn a_denial_is_replied_with_the_limit_that_denied() {
    let mut run = Run::open();
    let body = std::format!(
        r#"{{"op": "{}", "verdict": "deny", "code": "RATE_LIMITED", "gate": "contract", "retry_after_s": 41,
            "limit": {{"scope": "org", "resource": "requests", "limit": 30, "remaining": 0, "reset_ms": 40001, "window_s": 60}}}}"#,
        op()
    );
    run.limited(0).answer(5, Some(200), &body);
    assert_eq!(run.reply(), Some((429, "RATE_LIMITED".into())));
    assert!(run.counted(Counter::Rejected(FailureClass::QuotaExhausted)) && run.stream.is_held() && !run.resumed());
}

#[test]
fn every_answer_that_makes_no_sense_is_decision_unavailable() {
    let other = OperationId::from_random([8; 16]);
    for (status, body) in [
        (Some(200), String::new()),
        (Some(200), "{".into()),
        (Some(200), std::format!(r#"{{"op": "{}", "verdict": "maybe"}}"#, op())),
        (Some(200), std::format!(r#"{{"op": "{other}", "verdict": "admit"}}"#)),
        (
            Some(200),
            std::format!(r#"{{"op": "{}", "verdict": "deny", "code": "SERVICE_DEGRADED"}}"#, op()),
        ),
        (
            Some(200),
            std::format!(r#"{{"op": "{}", "verdict": "deny", "code": "NO_SUCH_CODE"}}"#, op()),
        ),
        // Our rules do not let this gate be opened.
        (
            Some(200),
            std::format!(
                r#"{{"op": "{}", "verdict": "admit", "bypassed": [{{"class": "limiter_unavailable", "gate": "contract"}}]}}"#,
                op()
            ),
        ),
        (Some(204), admit()),
        (Some(403), admit()),
        (Some(429), admit()),
        (Some(500), admit()),
        (Some(502), admit()),
        (Some(504), admit()),
        (None, admit()),
        (Some(200), std::format!("{}{}", admit(), " ".repeat(LARGEST_ANSWER))),
    ] {
        let mut run = Run::closed();
        // With 39 ms left no second try is made.
        run.limited(0).answer(211, status, &body);
        assert_eq!(run.reply(), degraded(), "{status:?} {body:.80}");
        assert!(run.told(211).contains("cancels"), "{status:?} {body:.80}");
        let mut run = Run::with(&rules("\"reject\"", "\"reject\"", "\"admit\""), "");
        run.limited(0).answer(211, status, &body);
        assert!(run.resumed() && run.reply().is_none(), "{status:?} {body:.80}");
        assert!(run.counted(Counter::Bypassed(FailureClass::DecisionUnavailable)));
    }
}

#[test]
fn a_connection_that_failed_is_tried_once_more_as_the_same_operation() {
    let mut run = Run::closed();
    let dispatch = |run: &Run| {
        run.effects.iter().find_map(|effect| match effect {
            Effect::Dispatch(callout) => Some((
                callout.timeout_ms,
                serde_json::from_slice::<DecideRequest>(&callout.body).unwrap(),
            )),
            _ => None,
        })
    };
    run.limited(0);
    let (timeout_ms, first) = dispatch(&run).unwrap();
    assert_eq!((timeout_ms, first.budget_ms), (TIMEOUT_MS, 220));
    run.answer(50, Some(503), "no healthy upstream");
    let (timeout_ms, second) = dispatch(&run).unwrap();
    assert_eq!((timeout_ms, second.budget_ms, second.op), (200, 170, first.op));
    run.answer(60, Some(503), "");
    assert_eq!((run.dispatched(), run.reply()), (false, degraded()));
}

#[test]
fn a_dispatch_that_the_host_refuses_is_an_answer() {
    let mut run = Run::closed();
    let headers = [
        ("x-admission-owner-id", "o"),
        ("x-admission-owner-rate-limit-requests", "30"),
    ];
    let all: Vec<Header<'_>> = headers.iter().map(|(n, v)| (n.as_bytes(), v.as_bytes())).collect();
    run.stream
        .on_request_headers(&mut run.gatehouse, whole(Some(&all[..])), &mut run.host, 0);
    run.effects = run.stream.on_dispatch_refused(&mut run.gatehouse, 0);
    assert_eq!(run.reply(), degraded());
    assert_eq!(run.told(0), "", "nothing left, so nothing is to be cancelled");
}

#[test]
fn the_guests_own_deadline_ends_the_wait() {
    let mut run = Run::closed();
    run.limited(1_000);
    assert_eq!(run.clock(1_000 + TIMEOUT_MS + DEADLINE_SLACK_MS - 1).effects, []);
    run.clock(1_000 + TIMEOUT_MS + DEADLINE_SLACK_MS);
    assert_eq!(run.reply(), degraded());
    run.answer(1_300, Some(200), &admit());
    assert_eq!(run.effects, []);
    assert_eq!(
        run.told(1_300),
        std::format!(r#"{{"profile":"development","cancels":["{}"]}}"#, op())
    );
}

#[test]
fn a_stream_that_ends_undecided_is_cancelled_and_one_with_a_slot_is_released() {
    let mut run = Run::closed();
    assert!(run.limited(0).end(1).told(1).contains("cancels"));
    let mut run = Run::closed();
    let body = std::format!(r#"{{"op": "{}", "verdict": "admit", "slot_ttl_ms": 3000}}"#, op());
    run.limited(0).answer(1, Some(200), &body);
    run.gatehouse.passed(1_001);
    assert_eq!(
        run.told(1_001),
        std::format!(r#"{{"profile":"development","renewals":["{}"]}}"#, op())
    );
    run.gatehouse.settled(Some(200), b"{}", 1_002);
    assert_eq!(
        run.end(1_500).told(1_500),
        std::format!(r#"{{"profile":"development","releases":["{}"]}}"#, op())
    );
}

#[test]
fn one_renewal_of_a_slot_waits_however_long_nobody_answers() {
    let mut run = Run::closed();
    let body = std::format!(r#"{{"op": "{}", "verdict": "admit", "slot_ttl_ms": 3000}}"#, op());
    run.limited(0).answer(1, Some(200), &body);
    let renewal = std::format!(r#"{{"profile":"development","renewals":["{}"]}}"#, op());
    for round in 1..=400 {
        let now_ms = round * 1_000 + 1;
        run.gatehouse.passed(now_ms);
        assert_eq!(run.told(now_ms), renewal, "{round}: one, and not given up for its age");
        run.gatehouse.settled(Some(503), b"", now_ms);
    }
    let now_ms = 401_001;
    run.gatehouse.passed(now_ms);
    assert_eq!(run.told(now_ms), renewal);
    run.gatehouse.settled(Some(200), b"{}", now_ms);
    assert_eq!(run.told(now_ms + 900), "");
    run.gatehouse.passed(now_ms + 1_000);
    assert_eq!(run.told(now_ms + 1_000), renewal, "the next one is due in its time");
}

#[test]
fn a_bill_that_was_put_down_is_not_told_again_with_what_the_limiter_did_not_take() {
    let mut run = Run::closed();
    let body = std::format!(r#"{{"op": "{}", "verdict": "admit", "slot_ttl_ms": 3000}}"#, op());
    run.limited(0).answer(1, Some(200), &body).end(2);
    assert!(run.told(2).contains("releases"));
    // What a host writes itself, or a service of before, has not put anything down.
    for body in [
        &b"no healthy upstream"[..],
        b"{}",
        br#"{"error": "the limiter failed"}"#,
        b"",
    ] {
        run.gatehouse.settled(Some(503), body, 3);
        assert!(!run.gatehouse.is_settled());
        run.gatehouse.hurry();
        assert!(run.told(4).contains("releases"), "{body:?}");
    }
    run.gatehouse
        .settled(Some(503), br#"{"error": "the limiter failed", "put_down": true}"#, 5);
    run.gatehouse.hurry();
    assert!(run.told(6).contains("releases"));
}

#[test]
fn what_can_not_be_told_at_the_end_is_counted_and_the_gauges_are_left_as_nobody_needs_them() {
    let mut run = Run::closed();
    run.limited(0).end(1);
    assert!(run.told(1).contains("cancels"));
    run.gatehouse.settled(None, b"", 2);
    let farewell = run.gatehouse.farewell(3);
    assert!(
        farewell.contains(&Effect::Count(Counter::OutboxDropped, 1)),
        "{farewell:?}"
    );
    assert!(
        farewell
            .iter()
            .any(|effect| matches!(effect, Effect::Log(line) if line.event == "outbox_dropped" && line.count == 1))
    );
    assert!(run.gatehouse.is_settled());
    assert!(
        !farewell
            .iter()
            .any(|effect| matches!(effect, Effect::Enforcing(_) | Effect::BreakerOpen(_)))
    );
    let mut run = Run::with(&rules("\"reject\"", "\"reject\"", "\"admit\""), "");
    run.limited(0).clock(10_000);
    assert!(run.resumed());
    assert_eq!(run.gatehouse.farewell(10_001).last(), Some(&Effect::Enforcing(true)));
}

#[test]
fn a_lost_slot_is_counted_once_and_the_stream_goes_on() {
    let mut run = Run::closed();
    let body = std::format!(r#"{{"op": "{}", "verdict": "admit", "slot_ttl_ms": 3000}}"#, op());
    run.limited(0).answer(1, Some(200), &body);
    run.gatehouse.passed(1_001);
    run.told(1_001);
    let effects = run
        .gatehouse
        .settled(Some(200), std::format!(r#"{{"lost": ["{}"]}}"#, op()).as_bytes(), 1_002);
    assert!(effects.contains(&Effect::Count(Counter::SlotLost, 1)));
    assert!(!run.stream.is_held());
}

#[test]
fn a_limit_of_zero_denies_also_when_nobody_answers() {
    let mut run = Run::open();
    run.headers(
        0,
        &[
            ("x-admission-owner-id", "o"),
            ("x-admission-owner-rate-limit-tokens", "0"),
        ],
    );
    run.answer(250, Some(504), "upstream request timeout");
    assert_eq!(run.reply(), Some((429, "TOKENS_LIMITED".into())));
}

#[test]
fn the_breaker_answers_by_the_rules_without_a_call() {
    let mut run = Run::closed();
    for _ in 0..5 {
        run.next_stream();
        run.limited(0).answer(211, Some(504), "");
    }
    assert!(run.effects.contains(&Effect::BreakerOpen(true)));
    run.next_stream();
    run.limited(300);
    assert_eq!((run.dispatched(), run.reply()), (false, degraded()));
    run.next_stream();
    assert!(run.limited(1_211).dispatched(), "no probe after a second");
    run.answer(1_220, Some(200), &admit());
    assert!(run.effects.contains(&Effect::BreakerOpen(false)) && run.resumed());
}

#[test]
fn without_an_envelope_the_rules_choose_and_without_limits_nothing_is_asked() {
    let mut run = Run::open();
    run.headers(0, &[]);
    assert!(!run.stream.is_held() && run.counted(Counter::Bypassed(FailureClass::EnvelopeMissing)));
    let mut run = Run::closed();
    assert_eq!(run.headers(0, &[]).reply(), Some((503, "ENVELOPE_MISSING".into())));
    let mut run = Run::closed();
    run.headers(0, &[("x-admission-owner-id", "o")]);
    assert!(!run.dispatched() && !run.stream.is_held());
}

#[test]
fn a_malformed_envelope_is_refused_under_rules_that_admit_everything() {
    let mut run = Run::open();
    run.headers(
        0,
        &[
            ("x-admission-owner-id", "o"),
            ("x-admission-owner-rate-limit-requests", "+5"),
        ],
    );
    assert_eq!(run.reply(), Some((503, "ENVELOPE_MALFORMED".into())));
    let mut run = Run::open();
    run.headers(0, &[("x-admission-owner-rate-limit-requests", "5")]);
    assert_eq!(run.reply(), Some((503, "ENVELOPE_PARTIAL".into())));
}

#[test]
fn a_bounded_choice_closes_when_its_allowance_is_spent() {
    let mut run = Run::with(
        &rules("\"reject\"", "\"reject\"", r#"{"admit": {"max_per_minute": 2}}"#),
        "",
    );
    let mut passed = 0;
    for _ in 0..4 {
        run.next_stream();
        run.limited(0).answer(211, Some(504), "");
        passed += u32::from(run.resumed());
    }
    assert_eq!((passed, run.reply()), (2, degraded()));
}

#[test]
fn shadow_refuses_nothing_and_counts_what_it_would_have_refused() {
    let closed = rules("\"reject\"", "\"reject\"", "\"reject\"");
    let mut run = Run::with(&closed, r#", "mode": "shadow""#);
    run.headers(0, &[]);
    assert!(!run.stream.is_held() && run.reply().is_none() && run.counted(Counter::ShadowRequests));
    assert!(run.counted(Counter::ShadowRejected(FailureClass::EnvelopeMissing)));
    run.next_stream();
    run.limited(0).answer(211, Some(504), "");
    assert!(run.resumed() && run.counted(Counter::ShadowRejected(FailureClass::DecisionUnavailable)));
    assert!(run.gatehouse.started().contains(&Effect::Enforcing(false)));
}

#[test]
fn the_envelope_is_stripped_on_every_path_and_each_name_once() {
    let mut run = Run::with(
        &rules("\"admit\"", "\"admit\"", "\"admit\""),
        r#", "routes": [{"path_prefix": "/elsewhere/"}]"#,
    );
    run.headers(
        0,
        &[
            ("X-Admission-Owner-Id", "o"),
            ("X-Admission-Owner-Id", "p"),
            ("x-admission-lane", "l"),
            ("x-b", ""),
        ],
    );
    let removed: Vec<_> = run
        .effects
        .iter()
        .filter(|effect| matches!(effect, Effect::RemoveRequestHeader(_)))
        .cloned()
        .collect();
    assert_eq!(
        removed,
        ["X-Admission-Owner-Id", "x-admission-lane"].map(|name| Effect::RemoveRequestHeader(name.into()))
    );
    assert!(!run.stream.is_held());
}

#[test]
fn a_bypass_by_the_service_is_counted_logged_and_shown_for_ten_seconds() {
    let mut run = Run::open();
    let body = std::format!(
        r#"{{"op": "{}", "verdict": "admit", "bypassed": [{{"class": "limiter_unavailable", "gate": "contract"}}]}}"#,
        op()
    );
    run.limited(0).answer(1, Some(200), &body);
    assert!(run.resumed() && run.counted(Counter::Bypassed(FailureClass::LimiterUnavailable)));
    assert!(run.effects.contains(&Effect::Enforcing(false)));
    let line = run.effects.iter().find_map(|effect| match effect {
        Effect::Log(line) => Some(line.to_json()),
        _ => None,
    });
    assert_eq!(
        line.unwrap(),
        r#"{"event":"bypassed","message":"fail-open, contract unchecked","level":"warn","class":"limiter_unavailable","gate":"contract","action":"admit","request_id":"rid"}"#
    );
    assert!(!run.gatehouse.passed(10_000).contains(&Effect::Enforcing(true)));
    assert!(run.gatehouse.passed(10_001).contains(&Effect::Enforcing(true)));
}

#[test]
fn a_limit_that_no_gate_checks_is_logged_and_shown() {
    let status = r#"{"name": "r", "envelope": {"when_missing": "reject"}, "decision": {"when_unavailable": "reject"},
                     "gates": [{"gate": "capacity", "when_unavailable": "reject"}]}"#;
    let mut run = Run::with(status, "");
    run.limited(0);
    assert!(run.effects.contains(&Effect::Enforcing(false)));
    assert!(
        run.effects
            .iter()
            .any(|effect| matches!(effect, Effect::Log(line) if line.event == "unchecked_limit"))
    );
}

#[test]
fn limit_fields_are_added_to_an_admitted_reply_only_when_asked_for() {
    let mut run = Run::closed();
    let limit = LimitState {
        scope: Scope::Owner,
        resource: Resource::Requests,
        limit: 30,
        remaining: 29,
        reset_ms: 60_000,
        window_s: 60,
    };
    let answer = DecideAnswer {
        op: OperationId::from_random([7; 16]),
        verdict: Verdict::Admit(Admission {
            tightest: Some(limit),
            ..Admission::default()
        }),
    };
    run.limited(0)
        .answer(1, Some(200), &serde_json::to_string(&answer).unwrap());
    assert_eq!(
        run.stream.on_response_headers(LimitHeaders::Denied, None),
        [Effect::RemoveResponseHeader(CLASS_HEADER)]
    );
    let effects = run.stream.on_response_headers(LimitHeaders::Always, None);
    assert!(effects.contains(&Effect::AddResponseHeader(
        "x-ratelimit-remaining-requests",
        "29".into()
    )));
}

#[test]
fn our_own_reply_keeps_its_class_header() {
    let mut run = Run::closed();
    run.headers(0, &[]);
    assert_eq!(run.stream.on_response_headers(LimitHeaders::Always, None), []);
}

#[test]
fn headers_that_the_host_cannot_give_and_a_host_without_randomness_are_undecided() {
    let mut run = Run::closed();
    run.effects = run
        .stream
        .on_request_headers(&mut run.gatehouse, whole(None), &mut run.host, 0);
    assert_eq!(run.reply(), degraded());
    let mut run = Run::closed();
    let headers: Vec<Header<'_>> = [
        ("x-admission-owner-id", "o"),
        ("x-admission-owner-rate-limit-requests", "1"),
    ]
    .map(|(n, v)| (n.as_bytes(), v.as_bytes()))
    .to_vec();
    run.host.has_no_random = true;
    run.effects = run
        .stream
        .on_request_headers(&mut run.gatehouse, whole(Some(&headers[..])), &mut run.host, 0);
    assert_eq!(run.reply(), degraded());
    let mut run = Run::closed();
    run.effects = run.stream.on_body_end(&mut run.gatehouse, &mut run.host, 0);
    assert_eq!(run.reply(), degraded());
}

fn metered_rules(decision: &str) -> String {
    std::format!(
        r#"{{"name": "r", "envelope": {{"when_missing": "reject"}}, "decision": {{"when_unavailable": {decision}}},
            "gates": [{{"gate": "metering", "when_unavailable": "admit"}}]}}"#
    )
}

const OWNER_AND_ORG: [(&str, &str); 2] = [("x-admission-owner-id", "o"), ("x-admission-org-id", "g")];

#[test]
fn an_undecided_request_that_passes_rules_with_metering_is_told_to_the_service_until_it_answers() {
    let mut run = Run::with(&metered_rules("\"admit\""), "");
    run.headers(0, &OWNER_AND_ORG).answer(10, Some(504), "");
    assert!(run.resumed() && run.counted(Counter::Bypassed(FailureClass::DecisionUnavailable)));
    let batch: serde_json::Value = serde_json::from_str(&run.told(25)).unwrap();
    assert_eq!(batch["cancels"], serde_json::json!([op()]));
    let admission =
        serde_json::json!({"op": op(), "org": "g", "owner": "o", "rules": "r", "request_id": "rid", "age_ms": 15});
    assert_eq!(batch["unmetered"], serde_json::json!([admission]));
    run.gatehouse.settled(Some(503), b"", 30);
    let again: serde_json::Value = serde_json::from_str(&run.told(1_000)).unwrap();
    assert_eq!(again["unmetered"][0]["age_ms"], 990);
    run.gatehouse.settled(Some(200), b"{}", 1_001);
    assert!(run.gatehouse.is_settled());
}

#[test]
fn only_what_passed_undecided_and_would_have_been_metered_is_unmetered() {
    let mut run = Run::with(&metered_rules("\"reject\""), "");
    run.headers(0, &OWNER_AND_ORG).answer(10, Some(504), "");
    assert_eq!(run.reply(), degraded());
    assert!(!run.told(10).contains("unmetered"));
    let mut run = Run::open();
    run.limited(0).answer(10, Some(504), "");
    assert!(run.resumed() && !run.told(10).contains("unmetered"));
    let mut run = Run::with(&metered_rules("\"admit\""), "");
    run.headers(0, &OWNER_AND_ORG).answer(10, Some(200), &admit());
    assert_eq!(run.told(10), "");
}

#[test]
fn an_unmetered_request_without_an_id_is_counted_as_lost() {
    let mut run = Run::with(&metered_rules("\"admit\""), "");
    run.effects = run
        .stream
        .on_request_headers(&mut run.gatehouse, whole(None), &mut run.host, 0);
    assert!(run.counted(Counter::Bypassed(FailureClass::DecisionUnavailable)));
    run.effects = run.gatehouse.passed(1);
    assert!(run.counted(Counter::UnmeteredDropped));
    assert_eq!(run.told(1), "");
}

#[test]
fn a_class_that_opened_several_gates_is_counted_and_logged_once_for_the_request() {
    let mut run = Run::with(
        r#"{"name": "r", "envelope": {"when_missing": "reject"}, "decision": {"when_unavailable": "admit"},
            "gates": [{"gate": "monthly_quota", "when_unavailable": "admit"}, {"gate": "cost_cap", "when_unavailable": "admit"},
                      {"gate": "metering", "when_unavailable": "admit"}]}"#,
        "",
    );
    let body = std::format!(
        r#"{{"op": "{}", "verdict": "admit", "bypassed": [{{"class": "policy_unavailable", "gate": "monthly_quota"}},
            {{"class": "policy_unavailable", "gate": "cost_cap"}}, {{"class": "metering_unavailable", "gate": "metering"}}]}}"#,
        op()
    );
    run.headers(0, &OWNER_AND_ORG).answer(5, Some(200), &body);
    let messages: Vec<_> = run
        .effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::Log(line) => Some((line.message.to_string(), line.count)),
            _ => None,
        })
        .collect();
    let expected = ["fail-open, monthly_quota unchecked", "fail-open, launch unmetered"];
    assert_eq!(messages, expected.map(|message| (message.to_string(), 1)));
    assert!(run.counted(Counter::Bypassed(FailureClass::PolicyUnavailable)));
    assert!(!run.told(6).contains("unmetered"), "the service has journaled it");
}

#[test]
fn shadow_keeps_its_gauge_at_zero_against_another_configuration_of_the_same_name() {
    let closed = rules("\"reject\"", "\"reject\"", "\"reject\"");
    let mut run = Run::with(&closed, r#", "mode": "shadow""#);
    for now_ms in [0, 1_000, 2_000] {
        assert!(
            run.gatehouse.passed(now_ms).contains(&Effect::Enforcing(false)),
            "at {now_ms}"
        );
    }
    let mut run = Run::with(&closed, "");
    assert_eq!(run.gatehouse.passed(0), []);
}

#[test]
fn an_open_breaker_keeps_its_gauge_at_one_against_another_vm() {
    let mut run = Run::closed();
    for _ in 0..5 {
        run.next_stream();
        run.limited(0).answer(211, Some(504), "");
    }
    assert!(run.gatehouse.passed(1_300).contains(&Effect::BreakerOpen(true)));
}

#[test]
fn what_is_known_without_the_service_is_said_in_the_order_of_the_gates() {
    let text = |gates: &str| {
        std::format!(
            r#"{{"name": "r", "envelope": {{"when_missing": "reject"}}, "decision": {{"when_unavailable": "admit"}}, "gates": [{gates}]}}"#
        )
    };
    let launch = r#"{"gate": "launch_rate", "per_minute": 0, "burst": 1}"#;
    let model = r#"{"gate": "model_policy", "when_unavailable": "admit"}"#;
    let contract = r#"{"gate": "contract", "when_unavailable": "admit"}"#;
    let ids = [("x-admission-owner-id", "o"), ("x-admission-org-id", "g")];
    let mut blocked = ids.to_vec();
    blocked.push(("x-admission-org-rate-limit-requests", "0"));
    for (gates, headers, expected) in [
        (launch.to_string(), &ids[..], (429, "LAUNCH_RATE_LIMITED")),
        (model.to_string(), &ids, (400, "MODEL_REQUIRED")),
        (std::format!("{model}, {contract}"), &blocked, (400, "MODEL_REQUIRED")),
        (std::format!("{contract}, {launch}"), &blocked, (429, "RATE_LIMITED")),
    ] {
        let mut run = Run::with(&text(&gates), r#", "model": {"from": "header"}"#);
        run.headers(0, headers).answer(211, Some(504), "");
        assert_eq!(run.reply(), Some((expected.0, expected.1.to_string())), "{gates}");
    }
}
