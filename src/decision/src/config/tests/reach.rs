//! Who reaches the service and where it reaches out to: tokens, the operators' listener, the collector of spans.

#[cfg(target_arch = "wasm32")]
use wasm_bindgen_test::wasm_bindgen_test as test;

use super::*;

#[test]
fn a_token_is_sent_as_it_is_shown_nowhere_and_changes_no_fingerprint() {
    let config = |decision: &str| {
        std::format!(
            r#"{{"profile": "production", "rules": "contract-limits", "decision": {{"upstream": "p"{decision}}}}}"#
        )
    };
    let fingerprint = |text: &str| {
        FilterConfig::parse(text.as_bytes())
            .unwrap()
            .fingerprint(text.as_bytes())
    };
    let one = config(r#", "token": "abcdefghijklmnopqrstuvwxyz012345""#);
    let other = config(r#", "token": "543210zyxwvutsrqponmlkjihgfedcba""#);
    let parsed = FilterConfig::parse(one.as_bytes()).unwrap();
    let token = parsed.decision.token.as_ref().unwrap();
    assert_eq!(token.authorization(), "Bearer abcdefghijklmnopqrstuvwxyz012345");
    assert!(!std::format!("{parsed:?}").contains("abcdefgh"));
    assert_eq!(fingerprint(&one), fingerprint(&other));
    assert_ne!(fingerprint(&one), fingerprint(&config("")));
    assert_ne!(fingerprint(&one), fingerprint(&one.replace("\"p\"", "\"q\"")));
    let message = std::format!("decision.token: {NO_TOKEN}");
    for bad in [
        "",
        "hunter2",
        "hunter2 hunter2 hunter2 hunter2 hunter2",
        "hunter2hunter2hunter2hunter2hunter\u{fc}",
    ] {
        assert_eq!(
            filter_faults(&config(&std::format!(r#", "token": "{bad}""#))),
            [message.as_str()]
        );
    }
    assert_eq!(
        filter_faults(&config(r#", "token": ["hunter2"]"#)),
        ["decision.token: must be a string, is an array"]
    );
}

#[test]
fn operators_look_in_on_loopback_and_outside_development_with_a_token() {
    let faults = |profile: &str, admin: &str| {
        let text = std::format!(
            r#"{{"profile": "{profile}", "listen": "127.0.0.1:0", "limiter": {{"url": "redis://r"}}, "policy": null,
                "metering": null, "admin": {admin}}}"#
        );
        service(&text, &Environment::default()).err().unwrap_or_default()
    };
    for good in [
        r#"{"listen": "127.0.0.1:8182", "token_file": "t"}"#,
        r#"{"listen": "[::1]:0", "token_file": "t"}"#,
        "null",
    ] {
        assert!(faults("production", good).is_empty(), "{good}");
    }
    assert!(faults("development", r#"{"listen": "127.8.9.1:0"}"#).is_empty());
    let far = "must be a loopback address with a port, such as \"127.0.0.1:8182\", is";
    for (profile, admin, expected) in [
        (
            "development",
            r#"{"listen": "0.0.0.0:1"}"#,
            std::format!("admin.listen: {far} \"0.0.0.0:1\""),
        ),
        (
            "development",
            r#"{"listen": "[::]:1"}"#,
            std::format!("admin.listen: {far} \"[::]:1\""),
        ),
        (
            "development",
            r#"{"listen": "localhost:1"}"#,
            std::format!("admin.listen: {far} \"localhost:1\""),
        ),
        (
            "staging",
            r#"{"listen": "127.0.0.1:1"}"#,
            "admin.token_file: required in staging: a file with one token a line".into(),
        ),
    ] {
        assert_eq!(faults(profile, admin), [expected]);
    }
}

#[test]
fn spans_go_where_the_environment_says_or_else_the_file() {
    let text = r#"{"profile": "development", "listen": "h:1", "tracing": {"endpoint": "http://c:4318/", "sample_one_in": 100}}"#;
    let tracing = |text: &str, base: &str, whole: &str| {
        let environment = Environment {
            otlp_endpoint: Some(base.into()),
            otlp_traces_endpoint: Some(whole.into()),
            ..Environment::default()
        };
        let tracing = service(text, &environment).unwrap().tracing;
        tracing.map(|tracing| (tracing.endpoint, tracing.sample_one_in))
    };
    let at = |endpoint: &str, sample_one_in| Some((endpoint.to_string(), sample_one_in));
    assert_eq!(tracing(text, "", ""), at("http://c:4318/v1/traces", 100));
    assert_eq!(tracing(text, "https://env", ""), at("https://env/v1/traces", 100));
    assert_eq!(
        tracing(text, "https://env", "http://[::1]:1/own"),
        at("http://[::1]:1/own", 100)
    );
    let without = r#"{"profile": "development", "listen": "h:1"}"#;
    assert_eq!(tracing(without, "", ""), None);
    assert_eq!(
        tracing(without, "http://env:4318", ""),
        at("http://env:4318/v1/traces", 1)
    );
    let only_how_many = r#"{"profile": "development", "listen": "h:1", "tracing": {"sample_one_in": 7}}"#;
    assert_eq!(
        tracing(only_how_many, "http://env:4318", ""),
        at("http://env:4318/v1/traces", 7)
    );
    let faults = service(only_how_many, &Environment::default()).unwrap_err();
    assert!(
        faults[0].starts_with("tracing.endpoint: say where spans go"),
        "{faults:?}"
    );
}

#[test]
fn an_address_for_spans_that_cannot_be_used_is_named_and_not_shown() {
    for address in [
        "collector:4318",
        "grpc://c",
        "http://",
        "http://:4318",
        "http://u:hunter2@c",
        "http://c?key=hunter2",
        "http://c c",
    ] {
        let text =
            std::format!(r#"{{"profile": "development", "listen": "h:1", "tracing": {{"endpoint": "{address}"}}}}"#);
        let faults = service(&text, &Environment::default()).unwrap_err();
        assert_eq!(faults.len(), 1, "{address}");
        assert!(
            faults[0].starts_with("tracing.endpoint: must be an address"),
            "{faults:?}"
        );
        assert!(!faults[0].contains("hunter2"), "{faults:?}");
        let environment = Environment {
            otlp_endpoint: Some(address.into()),
            ..Environment::default()
        };
        let faults = service(r#"{"profile": "development", "listen": "h:1"}"#, &environment).unwrap_err();
        assert!(
            faults[0].starts_with("OTEL_EXPORTER_OTLP_ENDPOINT: must be"),
            "{faults:?}"
        );
    }
}
