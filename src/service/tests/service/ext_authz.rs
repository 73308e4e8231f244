//! Envoy's `ext_authz`, HTTP flavour, as Envoy sends it: the original method, the original path after a prefix, and the
//! headers that it was told to forward.

use serde_json::{Value, json};

use crate::process::{Service, ended, file, in_memory, portcullis};
use crate::wire::{Answer, request};

/// Contract limits that hold or nothing passes.
fn strict() -> Value {
    json!({
        "name": "strict",
        "envelope": {"when_missing": "reject"},
        "gates": [{"gate": "contract", "when_unavailable": "reject"}],
        "decision": {"when_unavailable": "reject"}
    })
}

fn answering(changes: Value) -> Value {
    let mut config = in_memory();
    config["ext_authz"] = json!({"rules": strict()});
    let section = config["ext_authz"].as_object_mut().unwrap();
    section.extend(changes.as_object().unwrap().clone());
    config
}

async fn check(service: &Service, method: &str, path: &str, headers: &[(&str, &str)]) -> Answer {
    let mut client = service.client().await;
    let lines: String = headers
        .iter()
        .map(|(name, value)| format!("{name}: {value}\r\n"))
        .collect();
    client
        .write(&format!(
            "{method} /v1/ext_authz{path} HTTP/1.1\r\nhost: api.example\r\n{lines}content-length: 0\r\n\r\n"
        ))
        .await;
    client.answer().await
}

const LIMITED: [(&str, &str); 3] = [
    ("x-admission-owner-id", "o"),
    ("x-admission-owner-rate-limit-requests", "3"),
    ("x-request-id", "r-7"),
];

#[tokio::test]
async fn three_of_five_pass_and_the_others_get_the_filters_own_refusal() {
    let service = Service::start(answering(json!({}))).await;
    for n in 1..=5 {
        let answer = check(&service, "POST", "/v1/chat?x=1", &LIMITED).await;
        if n <= 3 {
            assert_eq!((answer.status, answer.body.as_str()), (200, ""), "{answer:?}");
            assert!(!answer.head.contains("ratelimit"), "{answer:?}");
            continue;
        }
        assert_eq!(answer.status, 429, "{answer:?}");
        let error = &answer.json()["error"];
        assert_eq!(
            (&error["code"], &error["type"], &error["request_id"], &error["scope"]),
            (
                &json!("RATE_LIMITED"),
                &json!("quota_exhausted"),
                &json!("r-7"),
                &json!("owner")
            )
        );
        let wait = error["retry_after"].as_u64().unwrap();
        for header in [
            "content-type: application/json",
            "x-portcullis-class: quota_exhausted",
            "ratelimit-policy: \"owner-requests\";q=3;w=60",
            "x-ratelimit-remaining-requests: 0",
            &format!("retry-after: {wait}\r\n"),
        ] {
            assert!(answer.head.contains(header), "{header}: {answer:?}");
        }
    }
    // The very counters of the filters: one limit, however it is asked about.
    let decided = service
        .post("/v1/decide", &request(json!({"limits": {"owner": {"requests": 3}}})))
        .await;
    assert_eq!(decided.json()["verdict"], "deny");
    let metrics = service.get("/metrics").await.body;
    for line in [
        r#"portcullis_ext_authz_total{outcome="admitted"} 3"#,
        r#"portcullis_ext_authz_total{outcome="rejected_quota_exhausted"} 2"#,
        r#"portcullis_enforcing{rules="strict"} 1"#,
    ] {
        assert!(metrics.contains(line), "{line} is not in\n{metrics}");
    }
}

#[tokio::test]
async fn the_envelope_is_named_for_removal_and_the_limits_are_shown_where_that_is_configured() {
    let service = Service::start(answering(json!({"reply": {"limit_headers": "always"}}))).await;
    let answer = check(&service, "GET", "/", &LIMITED).await;
    assert_eq!(answer.status, 200);
    let removed = "x-envoy-auth-headers-to-remove: x-admission-owner-id,x-admission-owner-rate-limit-requests\r\n";
    assert!(answer.head.contains(removed), "{answer:?}");
    assert!(
        answer.head.contains("x-ratelimit-remaining-requests: 2\r\n"),
        "{answer:?}"
    );
    let service = Service::start(answering(json!({"envelope": {"prefix": "x-saturn-", "strip": false}}))).await;
    let answer = check(&service, "GET", "/", &[("X-Saturn-Owner-Id", "o")]).await;
    assert_eq!(answer.status, 200);
    assert!(!answer.head.contains("headers-to-remove"), "{answer:?}");
}

#[tokio::test]
async fn a_bad_envelope_is_refused_on_guarded_routes_and_by_any_method() {
    let service = Service::start(answering(json!({"routes": [{"path_prefix": "/v1/"}]}))).await;
    let cases: [(&[(&str, &str)], &str); 4] = [
        (&[], "ENVELOPE_MISSING"),
        (
            &[("x-admission-owner-id", "o"), ("x-admission-owner-id", "p")],
            "ENVELOPE_MALFORMED",
        ),
        (
            &[
                ("x-admission-owner-id", "o"),
                ("x-admission-owner-rate-limit-requests", "+5"),
            ],
            "ENVELOPE_MALFORMED",
        ),
        (&[("x-admission-owner-rate-limit-requests", "5")], "ENVELOPE_PARTIAL"),
    ];
    for (headers, code) in cases {
        for method in ["GET", "DELETE", "OPTIONS", "PURGE"] {
            let answer = check(&service, method, "/v1/../v1//x", headers).await;
            assert_eq!(
                (answer.status, &answer.json()["error"]["code"]),
                (503, &json!(code)),
                "{method}"
            );
            assert!(answer.head.contains("x-should-retry: false"), "{answer:?}");
        }
        assert_eq!(
            check(&service, "GET", "/health", headers).await.status,
            200,
            "not guarded"
        );
    }
    let line = service.line("rejected").await;
    assert_eq!(
        (&line["level"], &line["action"]),
        (&json!("WARN"), &json!("reject")),
        "{line}"
    );
}

#[tokio::test]
async fn a_missing_envelope_passes_where_the_rules_say_so_and_is_counted() {
    let service = Service::start(answering(json!({"rules": "contract-limits"}))).await;
    assert_eq!(check(&service, "GET", "/", &[]).await.status, 200);
    let metrics = service.get("/metrics").await.body;
    assert!(
        metrics.contains(r#"{outcome="bypassed_envelope_missing"} 1"#),
        "{metrics}"
    );
}

#[tokio::test]
async fn a_grpc_call_is_told_its_status_in_a_header_since_a_200_would_admit_it() {
    let service = Service::start(answering(json!({}))).await;
    let headers = [
        ("x-admission-owner-id", "o"),
        ("x-admission-owner-rate-limit-requests", "0"),
        ("content-type", "application/grpc+proto"),
    ];
    let answer = check(&service, "POST", "/pkg.Service/Method", &headers).await;
    assert_eq!(
        (answer.status, answer.body.as_str()),
        (429, "shared inference rate limit exceeded")
    );
    assert!(answer.head.contains("grpc-status: 8\r\n"), "{answer:?}");
    let web = [headers[0], headers[1], ("content-type", "application/grpc-web+proto")];
    assert_eq!(check(&service, "POST", "/pkg.Service/Method", &web).await.status, 429);
}

#[tokio::test]
async fn a_stamped_slot_is_refused_or_said_to_be_unchecked_by_the_contracts_own_choice() {
    let headers = [
        ("x-admission-owner-id", "o"),
        ("x-admission-owner-concurrency-limit", "2"),
        ("x-admission-owner-rate-limit-requests", "2"),
    ];
    let service = Service::start(answering(json!({}))).await;
    let answer = check(&service, "GET", "/", &headers).await;
    assert_eq!(
        (answer.status, &answer.json()["error"]["code"]),
        (503, &json!("SERVICE_DEGRADED"))
    );
    let line = service.line("unchecked_limit").await;
    assert!(line["message"].as_str().unwrap().contains("concurrency"), "{line}");
    let blocked = [headers[0], ("x-admission-owner-concurrency-limit", "0")];
    let answer = check(&service, "GET", "/", &blocked).await;
    assert_eq!(
        (answer.status, &answer.json()["error"]["code"]),
        (429, &json!("CONCURRENCY_LIMITED"))
    );

    let service = Service::start(answering(json!({"rules": "contract-limits"}))).await;
    // More than two at once, and the other limit still holds.
    let statuses = [
        check(&service, "GET", "/", &headers).await.status,
        check(&service, "GET", "/", &headers).await.status,
        check(&service, "GET", "/", &headers).await.status,
    ];
    assert_eq!(statuses, [200, 200, 429]);
    service.line("unchecked_limit").await;
    let metrics = service.get("/metrics").await.body;
    assert!(
        metrics.contains(r#"portcullis_enforcing{rules="contract-limits"} 0"#),
        "{metrics}"
    );
}

#[tokio::test]
async fn whoever_is_over_another_limit_uses_up_nothing_of_the_allowance_for_unchecked_slots() {
    let mut rules = strict();
    rules["gates"][0]["when_unavailable"] = json!({"admit": {"max_per_minute": 3}});
    let service = Service::start(answering(json!({"rules": rules}))).await;
    let ask = async |owner: &str, requests: &str| {
        let headers = [
            ("x-admission-owner-id", owner),
            ("x-admission-owner-concurrency-limit", "2"),
            ("x-admission-owner-rate-limit-requests", requests),
        ];
        check(&service, "GET", "/", &headers).await.status
    };
    assert_eq!(ask("spent", "1").await, 200);
    for at in 0..5 {
        assert_eq!(ask("spent", "1").await, 429, "denial {at}");
    }
    let statuses = [ask("o", "9").await, ask("o", "9").await, ask("o", "9").await];
    assert_eq!(statuses, [200, 200, 503], "three of the minute have passed unchecked");
}

#[tokio::test]
async fn shadow_mode_refuses_nothing_and_counts_what_it_would_have_refused() {
    let service = Service::start(answering(json!({"mode": "shadow"}))).await;
    for _ in 0..5 {
        assert_eq!(check(&service, "GET", "/", &LIMITED).await.status, 200);
    }
    let metrics = service.get("/metrics").await.body;
    for line in [
        r#"{outcome="shadow_requests"} 5"#,
        r#"{outcome="shadow_rejected_quota_exhausted"} 2"#,
        r#"portcullis_enforcing{rules="strict"} 0"#,
    ] {
        assert!(metrics.contains(line), "{line} is not in\n{metrics}");
    }
}

#[tokio::test]
async fn without_the_section_there_is_no_such_path() {
    let service = Service::start(in_memory()).await;
    assert_eq!(check(&service, "GET", "/v1/chat", &LIMITED).await.status, 404);
    let service = Service::start(answering(json!({}))).await;
    for path in ["/v1/ext_authz", "/v1/ext_authzx/", "/v1/other"] {
        assert_eq!(service.get(path).await.status, 404, "{path}");
    }
}

#[test]
fn what_ext_authz_cannot_keep_is_refused_with_all_other_faults() {
    let folder = tempfile::TempDir::new().unwrap();
    let mut config = answering(json!({
        "profile": "production", "leases": {"max_requests": 8}, "model": {"from": "body"}, "mode": "shade",
        "decision": {"upstream": "portcullis", "timeout_ms": 250}, "envelope": {"prefix": "Bad"},
        "rules": {
            "name": "all", "envelope": {"when_missing": "reject"}, "decision": {"when_unavailable": "reject"},
            "gates": [
                {"gate": "org_status", "when_unavailable": "reject"},
                {"gate": "concurrency", "when_unavailable": "reject"},
                {"gate": "capacity", "when_unavailable": "reject"},
                {"gate": "contract", "limits": "envelope_or_plan", "when_unavailable": "reject"},
                {"gate": "monthly_quota", "when_unavailable": "reject"},
                {"gate": "cost_cap", "when_unavailable": "reject"},
                {"gate": "metering", "when_unavailable": "reject"}
            ]
        }
    }));
    config["capacity"] = json!({"lanes": {"batch": {"concurrency": 5}}});
    let file = file(folder.path(), "service.json", &config.to_string());
    let (code, _, told) = ended(portcullis(&[]).arg("check").arg(&file));
    assert_eq!(code, Some(2), "{told}");
    for fault in [
        "ext_authz.profile: unknown key",
        "ext_authz.leases: the service is asked about each request",
        "ext_authz.model.from: \"body\" is not possible here",
        "ext_authz.mode: must be \"enforce\" or \"shadow\", is \"shade\"",
        "ext_authz.decision.upstream: unknown key",
        "ext_authz.envelope.prefix: must be 2 to 64",
        "ext_authz.rules.gates[concurrency]: can't be kept here",
        "ext_authz.rules.gates[capacity]: can't be kept here",
        "ext_authz.rules.gates[contract].limits: can't be kept here",
        "ext_authz.rules.gates[monthly_quota]: can't be kept here",
        "ext_authz.rules.gates[cost_cap]: can't be kept here",
        "ext_authz.rules.gates[metering]: can't be kept here",
    ] {
        assert!(told.contains(fault), "{fault} is not in\n{told}");
    }
}

#[tokio::test]
async fn only_signed_envelopes_are_believed_where_keys_are_configured_and_no_secret_leaves() {
    let secret = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    let signature = |secret: &str| json!({"signature": {"keys": {"edge-1": {"secret": secret}}}});
    let service = Service::start(answering(json!({"envelope": signature(secret)}))).await;
    let (path, id) = ("/v1/chat?a=b", "x-admission-owner-id: o");
    let mut sign = portcullis(&[("PORTCULLIS_ENVELOPE_SECRET", secret)]);
    sign.args([
        "envelope", "sign", "--key-id", "edge-1", "--method", "POST", "--path", path, "-H", id,
    ]);
    let (code, header, told) = ended(&mut sign);
    assert_eq!(code, Some(0), "{told}");
    let header = header.trim_end().split_once(": ").unwrap();
    let owner = ("x-admission-owner-id", "o");
    assert_eq!(check(&service, "POST", path, &[owner, header]).await.status, 200);
    for (path, headers) in [(path, vec![owner]), ("/v1/other", vec![owner, header])] {
        let answer = check(&service, "POST", path, &headers).await;
        assert_eq!(
            (answer.status, &answer.json()["error"]["code"]),
            (503, &json!("ENVELOPE_UNTRUSTED"))
        );
    }
    let hash = |line: Value| line["config_hash"].as_str().unwrap().to_owned();
    let first = hash(service.line("started").await);
    let shown = service.log() + &service.get("/metrics").await.body;
    assert!(!shown.contains("AAECAwQF"), "{shown}");
    let replaced = secret.replace("AAEC", "BBEC");
    let other = Service::start(answering(json!({"envelope": signature(&replaced)}))).await;
    assert_eq!(
        hash(other.line("started").await),
        first,
        "nothing of a secret is in the hash"
    );
}
