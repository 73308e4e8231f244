//! Which headers make an envelope, which are refused, and what is forwarded. A scripted service that would admit stands
//! behind the gateway, so a refusal here is the filter's own and must cost no callout.

use portcullis_wasm_tests::{Answer, Call, Decision, Envelope};
use serde_json::json;

use crate::expect::{ENVELOPE_MALFORMED, ENVELOPE_MISSING, ENVELOPE_PARTIAL, Refusal, refused, served};
use crate::world::{Scripted, strict};

const LIMITS: [&str; 9] = [
    "x-admission-owner-rate-limit-requests",
    "x-admission-owner-rate-limit-tokens",
    "x-admission-owner-concurrency-limit",
    "x-admission-org-rate-limit-requests",
    "x-admission-org-rate-limit-tokens",
    "x-admission-org-concurrency-limit",
    "x-admission-auth-rate-limit-requests",
    "x-admission-auth-rate-limit-tokens",
    "x-admission-auth-concurrency-limit",
];

fn identified() -> Call {
    Call::get("/").envelope(&Envelope::owner("o").org("g").auth("a"))
}

async fn all_refused(calls: impl IntoIterator<Item = Call>, refusal: Refusal) {
    let mut world = Scripted::start("contract-limits", Decision::Admit).await;
    let mut count = 0;
    for call in calls {
        let answer: Answer = world.gateway.call(&call).await;
        assert_eq!(answer.code(), refusal.code, "{call:?}");
        refused(&answer, refusal);
        count += 1;
    }
    assert_eq!(world.upstream.hits(), 0);
    assert_eq!(world.decision.decides().len(), 0, "a refused envelope costs no callout");
    world
        .gateway
        .await_metric(&format!("portcullis_rejected_{}", refusal.class), count)
        .await;
    served(&world.gateway.call(&identified()).await);
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn every_bad_number_is_malformed() {
    let bad: [&[u8]; 24] = [
        b"+5",
        b"-5",
        b"05",
        b"00",
        b"1e3",
        b"5.0",
        b"5,5",
        b"5, 5",
        b"5 5",
        b"0x5",
        b"1_000",
        b"five",
        b"\"5\"",
        b"5;",
        "\u{665}".as_bytes(),
        "\u{FF15}".as_bytes(),
        "\u{0966}".as_bytes(),
        b"9007199254740992",
        b"18446744073709551616",
        b"99999999999999999999999999",
        b"-0",
        b"NaN",
        b"null",
        b"",
    ];
    all_refused(
        bad.map(|value| identified().header(LIMITS[0], value)),
        ENVELOPE_MALFORMED,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_of_the_nine_limits_is_checked() {
    all_refused(LIMITS.map(|name| identified().header(name, "5.0")), ENVELOPE_MALFORMED).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_limit_is_malformed_not_unlimited() {
    let empty = LIMITS
        .iter()
        .flat_map(|name| ["", "  "].map(|value| identified().header(name, value)));
    all_refused(empty, ENVELOPE_MALFORMED).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_duplicated_header_is_malformed_even_when_both_agree() {
    let names = LIMITS.map(|name| identified().header(name, "5").header(name, "5"));
    let differing = identified().header(LIMITS[0], "5").header(LIMITS[0], "6");
    let ids = ["owner-id", "org-id", "auth-id"].map(|id| identified().header(&format!("x-admission-{id}"), "o"));
    let others = ["graph-id", "lane", "model"].map(|name| {
        let name = format!("x-admission-{name}");
        identified().header(&name, "v").header(&name, "v")
    });
    let cased = identified()
        .header("X-Admission-Owner-Rate-Limit-Requests", "5")
        .header(LIMITS[0], "5");
    all_refused(
        names.into_iter().chain([differing, cased]).chain(ids).chain(others),
        ENVELOPE_MALFORMED,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_misspelt_limit_name_is_malformed() {
    let misspelt = [
        "owner-rate-limit-request",
        "owner-rate-limit-token",
        "onwer-rate-limit-requests",
        "org-rate-limit-requets",
        "org-limit",
        "auth-concurency-limit",
        "rate-limit-requests",
        "owner-rate-limit-requests-per-minute",
        "x-limit-y",
        "concurrency-limit",
        "user-rate-limit-requests",
    ];
    all_refused(
        misspelt.map(|name| identified().header(&format!("x-admission-{name}"), "5")),
        ENVELOPE_MALFORMED,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_id_is_malformed() {
    let long = "i".repeat(257);
    let values: [&[u8]; 4] = [b"", long.as_bytes(), b"a\tb", b"a\xC0\xA7b"];
    let owners = values.map(|value| Call::get("/").header("x-admission-owner-id", value));
    let names = ["org-id", "auth-id", "graph-id", "lane", "model"];
    let others = names.iter().flat_map(|name| {
        let name = format!("x-admission-{name}");
        values.map(|value| Call::get("/").header("x-admission-owner-id", "o").header(&name, value))
    });
    all_refused(owners.into_iter().chain(others), ENVELOPE_MALFORMED).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ill_formed_header_of_the_prefix_is_malformed_without_an_envelope_too() {
    let calls = [
        Call::get("/")
            .header("x-admission-lane", "a")
            .header("x-admission-lane", "b"),
        Call::get("/").header("x-admission-model", ""),
        Call::get("/").header("x-admission-org-limit", "5"),
    ];
    all_refused(calls, ENVELOPE_MALFORMED).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_without_the_owner_or_its_own_id_is_partial() {
    let mut calls: Vec<_> = LIMITS.map(|name| Call::get("/").header(name, "5")).into();
    calls.extend(
        LIMITS[3..]
            .iter()
            .map(|name| Call::get("/").header("x-admission-owner-id", "o").header(name, "5")),
    );
    calls.push(Call::get("/").envelope(&Envelope::default().org("g").requests("org", 5)));
    all_refused(calls, ENVELOPE_PARTIAL).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_is_named_before_partial() {
    all_refused(
        [Call::get("/").header(LIMITS[3], "5").header(LIMITS[4], "5.0")],
        ENVELOPE_MALFORMED,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_largest_exact_number_and_the_longest_id_are_well_formed() {
    let world = Scripted::start("contract-limits", Decision::Admit).await;
    let call = Call::get("/")
        .header("x-admission-owner-id", "i".repeat(256))
        .header(LIMITS[0], "9007199254740991");
    served(&world.gateway.call(&call).await);
    let asked = &world.decision.decides()[0];
    assert_eq!(
        asked["limits"],
        json!({"owner": {"requests": 9_007_199_254_740_991_u64}})
    );
    assert_eq!(asked["subject"]["owner"], "i".repeat(256));
    assert_eq!(world.upstream.hits(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_an_envelope_contract_limits_admits_without_a_callout() {
    let mut world = Scripted::start(
        "contract-limits",
        Decision::Deny(json!({"code": "RATE_LIMITED", "gate": "contract"})),
    )
    .await;
    let others = Envelope::default()
        .org("g")
        .auth("a")
        .with("graph-id", "x")
        .with("lane", "l")
        .with("model", "m");
    for call in [
        Call::get("/"),
        Call::get("/").envelope(&others),
        Call::post("/", "body"),
    ] {
        served(&world.gateway.call(&call).await);
    }
    assert_eq!(world.upstream.hits(), 3);
    assert_eq!(world.decision.decides().len(), 0);
    world
        .gateway
        .await_metric("portcullis_bypassed_envelope_missing", 3)
        .await;
    let (level, _) = world
        .gateway
        .await_log("of the missing envelope", |line| line["class"] == "envelope_missing")
        .await;
    assert_eq!(level, "info");
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn without_an_envelope_operator_admission_refuses() {
    let world = Scripted::start("operator-admission", Decision::Admit).await;
    for call in [Call::get("/"), Call::get("/").header("x-admission-org-id", "g")] {
        refused(&world.gateway.call(&call).await, ENVELOPE_MISSING);
    }
    assert_eq!((world.upstream.hits(), world.decision.decides().len()), (0, 0));
    world
        .gateway
        .await_metric("portcullis_rejected_envelope_missing", 2)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_are_not_utf8_elsewhere_are_ignored_and_in_the_envelope_malformed() {
    let mut world = Scripted::start("contract-limits", Decision::Admit).await;
    let elsewhere = || {
        identified()
            .header("x-other", [0xC0, 0xA7])
            .header("cookie", [b'a', 0xFF, 0xFE])
    };
    served(&world.gateway.call(&elsewhere()).await);
    assert_eq!(world.upstream.hits(), 1);
    for name in [LIMITS[0], "x-admission-owner-id", "x-admission-lane"] {
        refused(
            &world.gateway.call(&elsewhere().header(name, [0xC0, 0xA7])).await,
            ENVELOPE_MALFORMED,
        );
    }
    assert_eq!(world.upstream.hits(), 1);
    served(&world.gateway.call(&elsewhere()).await);
    served(
        &world
            .gateway
            .call(&Call::get("/").header("x-other", [0xC0, 0xA7]))
            .await,
    );
    assert_eq!(world.upstream.hits(), 3);
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_are_not_utf8_under_an_unknown_name_of_the_prefix_are_malformed() {
    all_refused(
        [identified().header("x-admission-unknown", [0xC0, 0xA7])],
        ENVELOPE_MALFORMED,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_envelope_is_not_forwarded_unless_told_to() {
    let whole = || {
        identified()
            .header(LIMITS[0], "5")
            .header("x-admission-lane", "l")
            .header("x-admission-other", "v")
    };
    let reached = async |strip: bool| {
        let world = Scripted::with(strict(), Decision::Admit, |plan| {
            plan.plugin(json!({"envelope": {"strip": strip}}))
        })
        .await;
        served(&world.gateway.call(&whole().header("x-kept", "v")).await);
        let headers = world.upstream.last().headers;
        assert_eq!(headers["x-kept"], "v");
        headers.keys().filter(|name| name.starts_with("x-admission-")).count()
    };
    assert_eq!(reached(true).await, 0);
    assert_eq!(reached(false).await, 6);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_prefix_reads_the_headers_of_an_existing_installation() {
    let change = |plan: portcullis_wasm_tests::GatewayPlan| plan.plugin(json!({"envelope": {"prefix": "x-saturn-"}}));
    let world = Scripted::with("contract-limits", Decision::Admit, change).await;
    let call = Call::get("/")
        .header("X-Saturn-Owner-Id", "o")
        .header("x-saturn-owner-rate-limit-requests", "7");
    served(
        &world
            .gateway
            .call(&call.header("x-admission-owner-rate-limit-requests", "x"))
            .await,
    );
    assert_eq!(world.decision.decides()[0]["limits"], json!({"owner": {"requests": 7}}));
    let seen = world.upstream.last().headers;
    assert!(!seen.contains_key("x-saturn-owner-id") && seen.contains_key("x-admission-owner-rate-limit-requests"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_name_under_the_prefix_is_ignored_and_logged_once() {
    let world = Scripted::with("contract-limits", Decision::Admit, |plan| plan.workers(1)).await;
    for _ in 0..3 {
        served(
            &world
                .gateway
                .call(&identified().header("x-admission-shoe-size", "44"))
                .await,
        );
    }
    world
        .gateway
        .await_log("of the unknown name", |line| {
            line.to_string().contains("x-admission-shoe-size")
        })
        .await;
    let lines = world.gateway.log_lines();
    assert_eq!(
        lines
            .iter()
            .filter(|line| line.to_string().contains("shoe-size"))
            .count(),
        1,
        "{lines:?}"
    );
    assert_eq!(world.upstream.hits(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_service_is_told_who_asks_and_by_which_rules() {
    let world = Scripted::with("operator-admission", Decision::Admit, |plan| {
        plan.plugin(json!({"model": {"from": "header"}}))
    })
    .await;
    let envelope = Envelope::owner("o")
        .org("g")
        .auth("a")
        .with("graph-id", "x")
        .with("lane", "batch")
        .with("model", "m");
    let envelope = envelope
        .requests("owner", 3)
        .requests("org", 30)
        .tokens("org", 100)
        .concurrency("auth", 2);
    let id = "22222222-2222-4333-8444-555555555555";
    served(
        &world
            .gateway
            .call(&Call::get("/").envelope(&envelope).header("x-request-id", id))
            .await,
    );
    let mut asked = world.decision.decides().pop().unwrap();
    let operation = asked["op"].take();
    let operation = operation.as_str().unwrap();
    assert!(
        operation.len() == 32 && operation.bytes().all(|byte| b"0123456789abcdef".contains(&byte)),
        "{operation}"
    );
    assert_eq!(asked["request_id"], id);
    assert_eq!(
        asked["subject"],
        json!({"owner": "o", "org": "g", "auth": "a", "graph": "x", "lane": "batch", "model": "m"})
    );
    let limits = json!({"owner": {"requests": 3}, "org": {"requests": 30, "tokens": 100}, "auth": {"concurrency": 2}});
    assert_eq!(asked["limits"], limits);
    let told = ["profile", "rules", "mode"].map(|key| asked[key].as_str().unwrap_or_default().to_owned());
    assert_eq!(told, ["development", "operator-admission", "enforce"]);
    assert_eq!((&asked["budget_ms"], &asked["window_s"]), (&json!(220), &json!(60)));
    assert_eq!(asked["gates"][0]["gate"], "capacity");
    assert_eq!(asked["gates"][1]["gate"], "contract");
    assert_eq!(asked["gates"][1]["when_unavailable"], "admit");
}
