//! Signed envelopes in real Envoy: what an edge with a key sends passes, every way to forge or break it is refused before
//! anything is asked or reaches the upstream, and keys are replaced while Envoy runs.
//!
//! Requests are signed with the pure crate, which test vectors and other languages hold to docs/envelope-signature.md.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use portcullis_decision::signature::{Request, Secret, sign};
use portcullis_wasm_tests::{Call, Connection, DEADLINE, Decision, Envelope, GatewayPlan, Http2, until};
use serde_json::{Value, json};

use crate::expect::{ENVELOPE_MALFORMED, ENVELOPE_MISSING, ENVELOPE_UNTRUSTED, Refusal, refused, served};
use crate::world::{Scripted, strict};

const PATH: &str = "/v1/chat?stream=1";
const LIMIT: &str = "x-admission-owner-rate-limit-requests";
const SIGNATURE: &str = "x-admission-signature";
const KEYS: [(&str, &str); 2] = [
    ("k1", "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="),
    ("k2", "ICEiIyQlJicoKSorLC0uLzAxMjM0NTY3ODk6Ozw9Pj8="),
];

/// The plugin's part that wants signatures by these keys.
fn by(ids: &[&str]) -> Value {
    let keys = KEYS.iter().filter(|(id, _)| ids.contains(id));
    let keys: Value = keys
        .map(|(id, secret)| ((*id).to_owned(), json!({"secret": secret})))
        .collect();
    json!({"envelope": {"signature": {"keys": keys}}, "decision": {"timeout_ms": 2_000}})
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

type Lines = Vec<(String, String)>;

fn envelope() -> Lines {
    Envelope::owner("owner-1")
        .org("org-1")
        .requests("owner", 30)
        .requests("org", 300)
        .headers()
        .to_vec()
}

/// The signature that an edge would make for a POST to `PATH`.
fn signature(lines: &Lines, key: &str, at_s: u64) -> String {
    let headers: Vec<(&[u8], &[u8])> = lines.iter().map(|(n, v)| (n.as_bytes(), v.as_bytes())).collect();
    let request = Request {
        method: b"POST",
        path: PATH.as_bytes(),
        headers: &headers,
    };
    let secret = KEYS.iter().find(|(id, _)| *id == key).unwrap().1;
    sign(
        "x-admission-",
        request,
        key,
        &Secret::from_base64(secret).unwrap(),
        at_s,
    )
    .unwrap()
}

/// The envelope with its signature, as an edge with `key` sends it now.
fn signed_by(key: &str) -> Lines {
    let mut lines = envelope();
    lines.push((SIGNATURE.to_owned(), signature(&lines, key, now_s())));
    lines
}

fn signed() -> Lines {
    signed_by("k1")
}

fn call_to(path: &str, lines: &Lines) -> Call {
    lines
        .iter()
        .fold(Call::post(path, "body"), |call, (name, value)| call.header(name, value))
}

fn call(lines: &Lines) -> Call {
    call_to(PATH, lines)
}

fn with(lines: &Lines, name: &str, value: &str) -> Lines {
    let mut lines: Lines = lines.clone();
    lines.push((name.to_owned(), value.to_owned()));
    lines
}

fn without(lines: &Lines, name: &str) -> Lines {
    lines.iter().filter(|(of, _)| of != name).cloned().collect()
}

/// The same line with another value, in its place.
fn changed(lines: &Lines, name: &str, change: impl Fn(&str) -> String) -> Lines {
    let change = |(of, value): &(String, String)| {
        let value = if of == name { change(value) } else { value.clone() };
        (of.clone(), value)
    };
    lines.iter().map(change).collect()
}

async fn world(rules: Value) -> Scripted {
    Scripted::with(rules, Decision::Admit, |plan| plan.plugin(by(&["k1", "k2"]))).await
}

/// Each of these is refused with nothing asked and nothing passed on; what an edge really signed is served before and
/// after, so that it is not for want of a service that they are.
async fn all_refused(rules: Value, forgeries: Vec<(&str, Call)>, refusal: Refusal) {
    let mut world = world(rules).await;
    let count = i64::try_from(forgeries.len()).unwrap();
    served(&world.gateway.call(&call(&signed())).await);
    for (name, call) in forgeries {
        let answer = world.gateway.call(&call).await;
        assert_eq!(
            (answer.status, answer.code().as_str()),
            (refusal.status, refusal.code),
            "{name}: {answer:?}"
        );
        refused(&answer, refusal);
        assert_eq!(answer.header("x-should-retry"), Some("false"), "{name}");
        assert_eq!(world.upstream.hits(), 1, "{name} reached the upstream");
    }
    let rejected = format!("portcullis_rejected_{}", refusal.class);
    world.gateway.await_metric(&rejected, count).await;
    served(&world.gateway.call(&call(&signed())).await);
    assert_eq!((world.upstream.hits(), world.decision.decides().len()), (2, 2));
    world.gateway.assert_sound();
}

/// Rules that open everything that a rule can open: none of this can be.
fn open() -> Value {
    let mut rules = strict();
    rules["envelope"]["when_missing"] = json!("admit");
    rules["gates"][0]["when_unavailable"] = json!("admit");
    rules["decision"]["when_unavailable"] = json!("admit");
    rules
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_edge_signed_passes_and_neither_envelope_nor_signature_goes_up() {
    let mut world = world(strict()).await;
    for key in ["k1", "k2"] {
        served(&world.gateway.call(&call(&signed_by(key))).await);
        let seen = world.upstream.last();
        assert!(
            !seen.headers.keys().any(|name| name.starts_with("x-admission-")),
            "{seen:?}"
        );
        assert_eq!(seen.body, b"body");
    }
    // Names in another case are the same envelope.
    let shouted: Lines = signed()
        .into_iter()
        .map(|(name, value)| (name.to_uppercase(), value))
        .collect();
    served(&world.gateway.call(&call(&shouted)).await);
    let asked = world.decision.decides();
    assert_eq!((world.upstream.hits(), asked.len()), (3, 3));
    assert_eq!(
        (&asked[2]["subject"]["owner"], &asked[2]["limits"]["owner"]["requests"]),
        (&json!("owner-1"), &json!(30))
    );
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn every_way_to_forge_or_break_an_envelope_is_refused() {
    let good = signed();
    let at = |at_s: u64| with(&envelope(), SIGNATURE, &signature(&envelope(), "k1", at_s));
    let other_key = |value: &str| value.replace("key=k1", "key=k3");
    let forgeries = vec![
        ("client-sent limit headers, unsigned", call(&envelope())),
        (
            "a client-sent limit beside a signed envelope",
            call(&with(&good, "x-admission-auth-rate-limit-requests", "5")),
        ),
        ("a limit that is removed", call(&without(&good, LIMIT))),
        ("a limit that is raised", call(&changed(&good, LIMIT, |_| "31".into()))),
        (
            "an org that is swapped",
            call(&changed(&good, "x-admission-org-id", |_| "org-2".into())),
        ),
        ("a replay on another path", call_to("/v1/images", &good)),
        ("a replay with another query", call_to("/v1/chat?stream=0", &good)),
        (
            "a replay with another method",
            good.iter().fold(Call::get(PATH), |call, (n, v)| call.header(n, v)),
        ),
        ("a replay after the allowed age", call(&at(now_s() - 65))),
        ("a clock that is ahead", call(&at(now_s() + 120))),
        (
            "a signature that is cut off",
            call(&changed(&good, SIGNATURE, |value| value[..value.len() - 1].into())),
        ),
        (
            "two signatures",
            call(&with(&good, SIGNATURE, &signature(&envelope(), "k2", now_s()))),
        ),
        (
            "the same signature twice",
            call(&with(&good, SIGNATURE, &good[good.len() - 1].1)),
        ),
        (
            "two signatures in one line",
            call(&changed(&good, SIGNATURE, |value| format!("{value}, {value}"))),
        ),
        (
            "a second copy of a header in another case",
            call(&with(&good, "X-Admission-Owner-ID", "owner-1")),
        ),
        (
            "underscores for dashes",
            call(&changed_name(&good, "x-admission-owner-id", "x_admission_owner_id")),
        ),
        (
            "underscores for dashes, beside a signed envelope",
            call(&with(&good, "x_admission_owner_id", "owner-2")),
        ),
        (
            "underscores for dashes, and nothing else",
            call(&vec![("X_Admission_Owner_Id".into(), "owner-2".into())]),
        ),
        (
            "Connection: x-admission-owner-id",
            call(&with(&good, "connection", "keep-alive, x-admission-owner-id")),
        ),
        (
            "Trailer: with a limit's name",
            call(&with(&good, "trailer", "X-Admission-Owner-Rate-Limit-Requests")),
        ),
        ("a key that nobody knows", call(&changed(&good, SIGNATURE, other_key))),
        (
            "an empty signature",
            call(&changed(&good, SIGNATURE, |_| String::new())),
        ),
        (
            "an added header that means nothing",
            call(&with(&good, "x-admission-region", "eu")),
        ),
    ];
    all_refused(open(), forgeries, ENVELOPE_UNTRUSTED).await;
}

fn changed_name(lines: &Lines, from: &str, to: &str) -> Lines {
    let rename = |(name, value): &(String, String)| {
        let name = if name == from { to } else { name };
        (name.to_owned(), value.clone())
    };
    lines.iter().map(rename).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_envelope_in_trailers_is_none() {
    let mut world = Scripted::with(strict(), Decision::Admit, |plan| {
        plan.plugin(by(&["k1"])).upstream_http2()
    })
    .await;
    let client = Http2::open(world.gateway.address()).await;
    let in_trailers = signed().iter().fold(Call::post(PATH, "body"), |call, (name, value)| {
        call.trailer(name, value)
    });
    refused(&client.call(&in_trailers).await, ENVELOPE_MISSING);
    assert_eq!((world.upstream.hits(), world.decision.decides().len()), (0, 0));
    // Beside an envelope in headers they change nothing, and don't reach an upstream that might read them.
    let beside = call(&signed())
        .trailer(LIMIT, "9000")
        .trailer("x_admission_owner_id", "owner-2")
        .trailer("x-checksum", "c");
    served(&client.call(&beside).await);
    assert_eq!(world.decision.decides()[0]["limits"]["owner"]["requests"], 30);
    let seen = until("the trailers", DEADLINE, async || {
        let seen = world.upstream.last();
        (!seen.trailers.is_empty()).then_some(seen)
    })
    .await;
    assert_eq!(seen.trailers.keys().collect::<Vec<_>>(), ["x-checksum"], "{seen:?}");
    assert_eq!(world.upstream.hits(), 1);
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signed_envelope_that_is_malformed_stays_malformed() {
    let mut bad = changed(&envelope(), LIMIT, |_| "05".into());
    bad.push((SIGNATURE.to_owned(), signature(&bad, "k1", now_s())));
    all_refused(open(), vec![("a malformed limit", call(&bad))], ENVELOPE_MALFORMED).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_any_header_of_the_envelope_the_rules_choose_and_an_open_choice_is_told() {
    let bare = Call::post(PATH, "body");
    all_refused(strict(), vec![("nothing at all", bare.clone())], ENVELOPE_MISSING).await;
    let world = world(open()).await;
    served(&world.gateway.call(&bare).await);
    assert_eq!((world.upstream.hits(), world.decision.decides().len()), (1, 0));
    let (level, _) = world
        .gateway
        .await_log("the way around", |line| line["event"] == "signatures_can_be_left_out")
        .await;
    assert_eq!(level, "warning");
    world
        .gateway
        .await_metric("portcullis_bypassed_envelope_missing", 1)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_connection_lists_is_never_an_envelope_without_it() {
    // Whatever the host does with such a header: the whole envelope, signature included, is not dropped on its word.
    let mut world = world(strict()).await;
    let names: Vec<String> = signed().into_iter().map(|(name, _)| name).collect();
    let answer = world
        .gateway
        .call(&call(&with(&signed(), "connection", &names.join(", "))))
        .await;
    assert_eq!(answer.status, 503, "{answer:?}");
    assert_eq!((world.upstream.hits(), world.decision.decides().len()), (0, 0));
    world.gateway.assert_sound();
}

/// Calls one after the other on connections of its own until it is told to end; gives how many were served.
async fn traffic(
    address: std::net::SocketAddr,
    lines: Arc<dyn Fn() -> Lines + Send + Sync>,
    ended: Arc<AtomicBool>,
    count: Arc<AtomicUsize>,
) {
    while !ended.load(Ordering::SeqCst) {
        let answer = Connection::open(address).await.call(&call(&lines())).await;
        served(&answer);
        count.fetch_add(1, Ordering::SeqCst);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_are_replaced_while_envoy_runs_and_no_request_is_refused() {
    let mut world = Scripted::with(strict(), Decision::Admit, |plan| plan.updatable().plugin(by(&["k1"]))).await;
    let plan = |ids: &[&str]| {
        GatewayPlan::new(strict(), world.upstream.address)
            .decision(world.decision.address)
            .plugin(by(ids))
    };
    // The edge: signs with the old key until both are accepted, then with the new one.
    let uses_new = Arc::new(AtomicBool::new(false));
    let edge = {
        let uses_new = Arc::clone(&uses_new);
        Arc::new(move || signed_by(if uses_new.load(Ordering::SeqCst) { "k2" } else { "k1" }))
    };
    let (ended, count) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let running = tokio::spawn(traffic(
        world.gateway.address(),
        edge,
        Arc::clone(&ended),
        Arc::clone(&count),
    ));
    let more = async || {
        let before = count.load(Ordering::SeqCst);
        until("more requests", DEADLINE, async || {
            (count.load(Ordering::SeqCst) >= before + 20).then_some(())
        })
        .await;
    };
    more().await;
    assert!(
        world.gateway.update(&plan(&["k1", "k2"])).await,
        "{}",
        world.gateway.log()
    );
    // New connections go to the new listener, and the old one is still asked on what is open: both by now know k1.
    until("the new key", DEADLINE, async || {
        let answer = world.gateway.call(&call(&signed_by("k2"))).await;
        (answer.status == 200).then_some(())
    })
    .await;
    uses_new.store(true, Ordering::SeqCst);
    more().await;
    assert!(world.gateway.update(&plan(&["k2"])).await, "{}", world.gateway.log());
    more().await;
    ended.store(true, Ordering::SeqCst);
    running.await.expect("every request was served");
    until("the end of the old key", DEADLINE, async || {
        let answer = world.gateway.call(&call(&signed_by("k1"))).await;
        (answer.status == 503).then(|| refused(&answer, ENVELOPE_UNTRUSTED))
    })
    .await;
    let log = world.gateway.log();
    for (_, secret) in KEYS {
        assert!(!log.contains(&secret[..12]), "a secret in the log");
    }
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_configuration_with_a_bad_secret_is_refused_without_showing_it() {
    let mut plugin = by(&["k1"]);
    plugin["envelope"]["signature"]["keys"]["k2"] = json!({"secret": "aHVudGVyMg=="});
    let upstream = portcullis_wasm_tests::closed_port();
    let refusal = GatewayPlan::new(strict(), upstream).plugin(plugin).try_start().await;
    let Err(log) = refusal else {
        panic!("Envoy took a secret of 7 bytes")
    };
    assert!(
        log.contains("envelope.signature.keys.k2.secret: must be 32 to 1024 bytes once decoded, is 7"),
        "{log}"
    );
    assert!(!log.contains("aHVudGVyMg") && !log.contains(&KEYS[0].1[..12]), "{log}");
}
