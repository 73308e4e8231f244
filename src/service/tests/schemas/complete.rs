//! Documents that hold every key of their kind, so that everything that a parser reads is read.

use portcullis_decision::config::{
    Environment, Faults, FileKind, FilterConfig, ServiceConfig, parse_policy_file, parse_rule_file,
};
use serde_json::{Value, json};

/// A kind of file with documents that hold all of its keys.
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    pub(crate) kind: FileKind,
    pub(crate) documents: Vec<Value>,
    /// The parsed text, printed, so that two can be compared.
    pub(crate) parse: fn(&Value) -> Result<String, Faults>,
}

/// Every kind.
pub(crate) fn kinds() -> [Kind; 4] {
    [
        Kind {
            name: "rules",
            kind: FileKind::Rules,
            documents: vec![rules()],
            parse: |document| parse_rule_file(&bytes(document)).map(|rules| format!("{rules:?}")),
        },
        Kind {
            name: "filter",
            kind: FileKind::Filter,
            documents: vec![filter(&rules()), filter(&json!("contract-limits"))],
            parse: |document| FilterConfig::parse(&bytes(document)).map(|config| format!("{config:?}")),
        },
        Kind {
            name: "service",
            kind: FileKind::Service,
            documents: vec![service()],
            parse: |document| {
                ServiceConfig::parse(&bytes(document), &Environment::default()).map(|config| format!("{config:?}"))
            },
        },
        Kind {
            name: "policy",
            kind: FileKind::Policy,
            documents: vec![policy()],
            parse: |document| parse_policy_file(&bytes(document)).map(|policy| format!("{policy:?}")),
        },
    ]
}

fn bytes(document: &Value) -> Vec<u8> {
    document.to_string().into_bytes()
}

fn rules() -> Value {
    json!({
        "name": "everything",
        "envelope": {"when_missing": "reject"},
        "gates": [
            {"gate": "org_status", "when_unavailable": "reject"},
            {"gate": "model_policy", "when_unavailable": "reject"},
            {"gate": "concurrency", "when_unavailable": {"admit": {"max_per_minute": 600}}},
            {"gate": "capacity", "when_unavailable": "admit"},
            {"gate": "contract", "when_unavailable": "admit", "limits": "envelope_or_plan"},
            {"gate": "launch_rate", "per_minute": 60, "burst": 10},
            {"gate": "monthly_quota", "when_unavailable": "admit"},
            {"gate": "cost_cap", "when_unavailable": "admit"},
            {"gate": "metering", "when_unavailable": "admit"}
        ],
        "decision": {"when_unavailable": {"admit": {"max_per_minute": 600}}},
        "allow_passthrough": false
    })
}

fn filter(rules: &Value) -> Value {
    json!({
        "profile": "development",
        "rules": rules,
        "mode": "shadow",
        "envelope": {"prefix": "x-saturn-", "strip": false, "signature": {
            "keys": {"edge-1": {"secret": "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="}}, "max_age_s": 30}},
        "pause": {"withhold": ["authorization", "x-api-key"]},
        "routes": [{"path_prefix": "/v1/", "methods": ["POST", "M-SEARCH"]}],
        "model": {"from": "header", "max_body_bytes": 4096, "body_timeout_ms": 500},
        "tokens": {"default_output_reservation": 512},
        "decision": {"upstream": "outbound|8181||portcullis.admission.svc.cluster.local", "authority": "p",
                     "token": "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=", "timeout_ms": 300},
        "window_s": 30,
        "leases": {"max_requests": 64, "max_age_ms": 500, "slots": 1024},
        "reply": {"limit_headers": "always"},
        "allow_passthrough": false
    })
}

fn service() -> Value {
    let tier = json!({"requests": 6000, "tokens": 2_000_000, "concurrency": 200});
    json!({
        "profile": "development",
        "listen": "127.0.0.1:8181",
        "tokens_file": "gateway.tokens",
        "tls": {"certificate": "service.pem", "key": "service.key", "client_ca": "gateways.pem"},
        "http": {"max_connections": 512, "max_header_bytes": 16_384, "header_timeout_ms": 500, "body_timeout_ms": 600,
                 "idle_timeout_ms": 700},
        "admin": {"listen": "127.0.0.1:8182", "token_file": "admin.tokens"},
        "store_url": "redis://other",
        "limiter": {"url": "memory:", "key_prefix": "p", "op_timeout_ms": 50, "window_s": 30, "slot_ttl_s": 20},
        "policy": {"url": "file:policy.json", "max_staleness_ms": 1000},
        "metering": {"url": "memory:"},
        "capacity": {"platform": tier, "graph": tier, "organization": tier, "organization_model": tier,
                     "lanes": {"batch": tier}},
        "tracing": {"endpoint": "http://collector:4318", "sample_one_in": 100},
        "canary": {"interval_ms": 5000},
        "ext_authz": {
            "rules": {
                "name": "own",
                "envelope": {"when_missing": "reject"},
                "gates": [
                    {"gate": "org_status", "when_unavailable": {"admit": {"max_per_minute": 600}}},
                    {"gate": "contract", "when_unavailable": "admit"},
                    {"gate": "launch_rate", "per_minute": 60, "burst": 10}
                ],
                "decision": {"when_unavailable": "reject"},
                "allow_passthrough": false
            },
            "mode": "shadow",
            "envelope": {"prefix": "x-saturn-", "strip": false, "signature": {
                "keys": {"edge-1": {"secret": "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="}}, "max_age_s": 30}},
            "routes": [{"path_prefix": "/v1/", "methods": ["POST"]}],
            "model": {"from": "header", "max_body_bytes": 4096, "body_timeout_ms": 500},
            "tokens": {"default_output_reservation": 512},
            "decision": {"timeout_ms": 300},
            "window_s": 30,
            "reply": {"limit_headers": "always"}
        },
        "allow_passthrough": false
    })
}

fn policy() -> Value {
    json!({
        "providers": {"gpt-4o": "openai", "claude-*": "anthropic"},
        "prices": {"gpt-4o": {"input": 2_500_000, "cached_input": 1_250_000, "output": 10_000_000}},
        "plans": {"team": {"concurrency": 10, "requests": 60, "tokens": 100_000, "monthly_runs": 1000, "monthly_cost": 250}},
        "orgs": {"org-1": {"status": "active", "plan": "team", "models": ["gpt-4o", "claude-*"]}}
    })
}
