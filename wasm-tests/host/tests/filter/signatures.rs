//! Signed envelopes on hosts with good clocks and bad ones, and what of a secret a host ever gets to see: nothing.

use portcullis_decision::signature::{Request, Secret, sign};
use portcullis_test_host::{ContextId, Personality, TestHost, headers, status};
use serde_json::{Value, json};

use crate::scene::{ENVELOPE, admit, assert_clean, configuration, decide_of, host, rules};

/// The wall clock of every host at its start, in seconds since 1970.
pub(crate) const WALL_START_S: u64 = 1_764_000_000;
/// The keys of these tests: an id, and its secret.
const KEYS: [(&str, &str); 2] = [
    ("k1", "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="),
    ("k2", "ICEiIyQlJicoKSorLC0uLzAxMjM0NTY3ODk6Ozw9Pj8="),
];

/// A configuration that wants envelopes signed by either key.
pub(crate) fn signing(when_missing: &str) -> Value {
    signing_by(when_missing, &["k1", "k2"])
}

fn signing_by(when_missing: &str, ids: &[&str]) -> Value {
    let mut rules = rules("signing", "reject");
    rules["envelope"]["when_missing"] = json!(when_missing);
    let mut configuration = configuration(&rules);
    for (id, secret) in KEYS.iter().filter(|(id, _)| ids.contains(id)) {
        configuration["envelope"]["signature"]["keys"][id] = json!({"secret": secret});
    }
    configuration
}

/// What an edge with this key makes of a request at this second.
pub(crate) fn signature(lines: &[(&str, &str)], key: &str, at_s: u64) -> String {
    let of = |name: &str| lines.iter().find(|(n, _)| *n == name).unwrap().1.as_bytes();
    let map = headers(lines);
    let headers: Vec<(&[u8], &[u8])> = map.iter().map(|(n, v)| (n.as_slice(), v.as_slice())).collect();
    let request = Request {
        method: of(":method"),
        path: of(":path"),
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

/// A request that is signed by `key`, `age_s` seconds ago by the host's first wall clock.
fn request(host: &mut TestHost, key: &str, age_s: i64) -> ContextId {
    let value = signature(&ENVELOPE, key, WALL_START_S.saturating_add_signed(-age_s));
    let mut lines = ENVELOPE.to_vec();
    lines.push(("x-admission-signature", &value));
    host.request(&lines)
}

#[track_caller]
fn assert_trusted(host: &mut TestHost, stream: ContextId) {
    let callout = decide_of(host, stream);
    admit(host, &callout);
    let upstream = host.stream(stream).upstream.clone().expect("it goes up");
    assert!(
        !upstream.iter().any(|(name, _)| name.starts_with(b"x-admission-")),
        "{upstream:?}"
    );
    assert_clean(host);
}

#[track_caller]
fn assert_untrusted(host: &TestHost, stream: ContextId) {
    let stream = host.stream(stream);
    let reply = stream.reply();
    assert_eq!((reply.status, reply.code().as_str()), (503, "ENVELOPE_UNTRUSTED"));
    assert_eq!(reply.header("x-portcullis-class"), Some("envelope_malformed"));
    assert_eq!(
        (reply.header("retry-after"), reply.header("x-should-retry")),
        (None, Some("false"))
    );
    assert!(!stream.has_passed(), "the upstream was reached");
    assert_clean(host);
}

#[test]
fn a_signature_by_either_key_is_trusted_until_it_is_too_old() {
    let mut host = host(&signing("reject"));
    for key in ["k1", "k2"] {
        let stream = request(&mut host, key, 0);
        assert_trusted(&mut host, stream);
    }
    host.jump(60_999);
    let stream = request(&mut host, "k1", 0);
    assert_trusted(&mut host, stream);
    host.jump(1);
    let stream = request(&mut host, "k1", 0);
    assert_untrusted(&host, stream);
    let line = &host.lines("rejected")[0];
    assert_eq!(line["code"], "ENVELOPE_UNTRUSTED");
    assert!(
        line["message"]
            .as_str()
            .unwrap()
            .contains("signed 61 s ago, and 60 are allowed"),
        "{line}"
    );
}

#[test]
fn a_wall_clock_that_is_set_wrong_refuses_and_one_that_is_set_right_again_trusts() {
    let mut host = host(&signing("reject"));
    for step_ms in [61_000, -61_000] {
        host.step_wall_clock(step_ms);
        let stream = request(&mut host, "k1", 0);
        assert_untrusted(&host, stream);
        host.step_wall_clock(-step_ms);
        let stream = request(&mut host, "k1", 0);
        assert_trusted(&mut host, stream);
    }
}

#[test]
fn without_the_hosts_own_clock_that_of_wasi_counts_and_without_both_nothing_is_trusted() {
    const CLOCK: &str = "proxy_get_current_time_nanoseconds";
    for status in status::FAILURES {
        let mut host = host(&signing("admit"));
        host.faults().always(CLOCK, status);
        let stream = request(&mut host, "k1", 0);
        assert_trusted(&mut host, stream);
        host.faults().always("clock_time_get", 28);
        let stream = request(&mut host, "k1", 0);
        assert_untrusted(&host, stream);
    }
}

#[test]
fn names_as_the_client_wrote_them_are_the_same_envelope() {
    let value = signature(&ENVELOPE, "k1", WALL_START_S);
    let mut host = TestHost::new(Personality::WASMX);
    let mut configuration = signing("reject");
    // This host has no clusters.
    configuration["decision"]["upstream"] = json!("127.0.0.1:8181");
    host.configure(&configuration.to_string()).expect("no faults");
    let mut lines = ENVELOPE;
    lines[4].0 = "X-Admission-Owner-ID";
    let mut lines = lines.to_vec();
    lines.push(("X-ADMISSION-Signature", &value));
    let stream = host.request(&lines);
    let callout = decide_of(&host, stream);
    admit(&mut host, &callout);
    assert!(host.stream(stream).has_passed());
    lines.push(("x-admission-owner-id", "owner-1"));
    let stream = host.request(&lines);
    assert_untrusted(&host, stream);
}

#[test]
fn keys_are_replaced_while_streams_go_on() {
    let mut host = host(&signing_by("reject", &["k1"]));
    let root = host.root();
    let waiting = request(&mut host, "k1", 0);
    for (ids, trusted, untrusted) in [
        (vec!["k1", "k2"], vec!["k1", "k2"], None),
        (vec!["k2"], vec!["k2"], Some("k1")),
    ] {
        host.reconfigure(root, &signing_by("reject", &ids).to_string())
            .expect("no faults");
        for key in trusted {
            let stream = request(&mut host, key, 0);
            assert_trusted(&mut host, stream);
        }
        if let Some(key) = untrusted {
            let stream = request(&mut host, key, 0);
            assert_untrusted(&host, stream);
        }
    }
    assert_trusted(&mut host, waiting);
}

#[test]
fn trailers_are_no_envelope_and_those_of_the_prefix_do_not_go_up() {
    let mut host = host(&signing("reject"));
    let value = signature(&ENVELOPE, "k1", WALL_START_S);
    let mut lines = ENVELOPE.to_vec();
    lines.push(("x-admission-signature", &value));
    let stream = host.begin(&lines);
    let callout = decide_of(&host, stream);
    admit(&mut host, &callout);
    host.body(stream, b"body", false);
    host.send_trailers(
        stream,
        &[
            ("x-admission-owner-rate-limit-requests", "9000"),
            ("x-checksum", "c"),
            ("x_admission_owner_id", "other"),
        ],
    );
    assert_eq!(host.stream(stream).request_trailers, headers(&[("x-checksum", "c")]));
    assert_clean(&host);
    let stream = host.begin(&[(":method", "POST"), (":path", "/v1/chat")]);
    host.body(stream, b"body", false);
    host.send_trailers(stream, &lines[4..]);
    assert_eq!(host.stream(stream).reply().code(), "ENVELOPE_MISSING");
    assert_clean(&host);
}

#[test]
fn no_line_and_no_reply_holds_a_secret_or_a_signature() {
    let mut host = host(&signing("reject"));
    let stale = request(&mut host, "k1", 90);
    assert_untrusted(&host, stale);
    let mut bad = signing("reject");
    bad["envelope"]["signature"]["keys"]["k1"]["secret"] = json!(format!("{} ", KEYS[0].1));
    bad["envelope"]["signature"]["keys"][KEYS[1].1] = json!({"secret": "k2"});
    host.configure(&bad.to_string()).expect_err("two faults");
    assert_eq!(host.lines("configuration_rejected").len(), 2);
    let told: String = host.logs().iter().map(|line| line.text.as_str()).collect();
    let reply = String::from_utf8_lossy(&host.stream(stale).reply().body).into_owned();
    let signature = signature(&ENVELOPE, "k1", WALL_START_S - 90);
    let (_, signature) = signature.split_once("sig=").unwrap();
    for word in [&KEYS[0].1[..10], &KEYS[1].1[..10], signature] {
        assert!(!told.contains(word) && !reply.contains(word), "{word} in {told}{reply}");
    }
}
