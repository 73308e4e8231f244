//! Configurations as users write them, right and wrong.

use std::string::{String, ToString};
use std::vec::Vec;

#[cfg(target_arch = "wasm32")]
use wasm_bindgen_test::wasm_bindgen_test as test;

use super::*;
use crate::rules::{Choice, Gate};

mod reach;

fn filter_faults(text: &str) -> Vec<String> {
    FilterConfig::parse(text.as_bytes())
        .unwrap_err()
        .iter()
        .map(ToString::to_string)
        .collect()
}

fn service(text: &str, environment: &Environment) -> Result<ServiceConfig, Vec<String>> {
    ServiceConfig::parse(text.as_bytes(), environment)
        .map_err(|faults| faults.iter().map(ToString::to_string).collect())
}

#[test]
fn the_least_configuration_takes_the_documented_defaults() {
    let config = FilterConfig::parse(
        br#"{"profile": "production", "rules": "contract-limits", "decision": {"upstream": "portcullis"}}"#,
    )
    .unwrap();
    assert_eq!(config.mode, Mode::Enforce);
    assert_eq!((config.prefix.as_str(), config.strip), ("x-admission-", true));
    assert_eq!(config.routes, None);
    assert_eq!(config.model, ModelSource::None);
    assert_eq!(
        (config.decision.authority.as_str(), config.decision.timeout_ms),
        ("portcullis", 250)
    );
    assert_eq!((config.window_s, config.default_output_reservation), (60, 1024));
    assert_eq!(config.leases.max_requests, 0);
    assert_eq!(config.limit_headers, LimitHeaders::Denied);
    assert_eq!(config.rules.decision, Choice::Admit);
}

#[test]
fn every_fault_is_listed_at_once_with_its_path_and_a_hint() {
    let faults = filter_faults(
        r#"{"profile": "prod", "rules": "contract-limit", "mode": "on", "windows_s": 60, "window_s": 0,
            "envelope": {"strip": "yes"}, "routes": [], "decision": {"upstream": "", "timeout_ms": 5}}"#,
    );
    for expected in [
        "profile: must be \"development\", \"staging\" or \"production\", is \"prod\"; did you mean \"production\"?",
        "rules: no shipped rule file is named \"contract-limit\"; there are: contract-limits, operator-admission, fail-closed, fail-closed-metered, launch-gate; did you mean \"contract-limits\"?",
        "mode: must be \"enforce\" or \"shadow\", is \"on\"",
        "envelope.strip: must be true or false, is \"yes\"",
        "routes: an empty list guards nothing: leave the key out to guard everything but OPTIONS",
        "decision.upstream: must be 1 to 512 visible ASCII characters without spaces, is \"\"",
        "decision.timeout_ms: must be an integer from 40 to 60000, is 5",
        "window_s: must be an integer from 1 to 86400, is 0",
        "windows_s: unknown key; did you mean \"window_s\"?",
    ] {
        assert!(faults.contains(&expected.to_string()), "{expected}\nnot in {faults:#?}");
    }
    assert_eq!(faults.len(), 9, "{faults:#?}");
}

#[test]
fn a_name_of_a_file_where_rules_belong_is_told_what_belongs_there() {
    for (name, hint) in [
        ("fail-closed.json", "; did you mean \"fail-closed\"?"),
        ("../rules/fail-closd.json", "; did you mean \"fail-closed\"?"),
        ("../rules/x.json", ""),
    ] {
        let faults = filter_faults(&alloc::format!(
            r#"{{"profile": "production", "rules": "{name}", "decision": {{"upstream": "p"}}}}"#
        ));
        let expected = alloc::format!(
            "rules: no shipped rule file is named \"{name}\"; there are: contract-limits, operator-admission, fail-closed, \
             fail-closed-metered, launch-gate; rules of one's own stand here as the object itself, not as the name of a \
             file{hint}"
        );
        assert_eq!(faults, [expected]);
    }
}

#[test]
fn a_missing_profile_is_a_fault_and_nothing_fills_it_in() {
    let faults = filter_faults(r#"{"rules": "contract-limits", "decision": {"upstream": "portcullis"}}"#);
    assert_eq!(
        faults,
        ["profile: required, and missing: say \"development\", \"staging\" or \"production\"; nothing fills it in"]
    );
    assert!(service(r#"{"listen": "127.0.0.1:1"}"#, &Environment::default()).unwrap_err()[0].starts_with("profile: "));
}

#[test]
fn a_retired_switch_that_is_off_enables_nothing_and_one_that_is_on_stops_the_start() {
    for off in ["null", "false", "0", "\"\"", "\"false\"", "\"0\""] {
        let text = std::format!(
            r#"{{"profile": "development", "rules": "contract-limits", "decision": {{"upstream": "p"}}, "allow_passthrough": {off}}}"#
        );
        assert!(FilterConfig::parse(text.as_bytes()).is_ok(), "{off}");
    }
    for on in ["true", "1", "\"true\"", "\"yes\"", "{}"] {
        let text = std::format!(
            r#"{{"profile": "development", "rules": "contract-limits", "decision": {{"upstream": "p"}}, "allow_passthrough": {on}}}"#
        );
        assert!(
            filter_faults(&text)[0].starts_with("allow_passthrough: this switch was retired"),
            "{on}"
        );
    }
    let environment = Environment {
        ibex_allow_passthrough: Some("1".into()),
        ..Environment::default()
    };
    let faults = service(r#"{"profile": "development", "listen": "127.0.0.1:1"}"#, &environment).unwrap_err();
    assert!(
        faults[0].starts_with("IBEX_MODEL_POLICY_ALLOW_PASSTHROUGH: "),
        "{faults:?}"
    );
}

#[test]
fn a_policy_is_not_opened_outside_development() {
    let text = |profile: &str, model: &str| {
        std::format!(
            r#"{{"profile": "{profile}", "mode": "shadow", "model": {{"from": "{model}"}}, "decision": {{"upstream": "p"}},
                "rules": {{"name": "r", "envelope": {{"when_missing": "admit"}}, "decision": {{"when_unavailable": "admit"}},
                           "gates": [{{"gate": "model_policy", "when_unavailable": {{"admit": {{"max_per_minute": 1}}}}}}]}}}}"#
        )
    };
    assert!(FilterConfig::parse(text("development", "header").as_bytes()).is_ok());
    assert_eq!(filter_faults(&text("development", "none")).len(), 1);
    let faults = filter_faults(&text("staging", "header"));
    assert_eq!(faults.len(), 4, "{faults:#?}");
    for path in [
        "rules.gates[model_policy].when_unavailable",
        "rules.decision",
        "rules.envelope",
        "mode",
    ] {
        assert!(
            faults.iter().any(|fault| fault.starts_with(path)),
            "{path} not in {faults:#?}"
        );
    }
}

#[test]
fn the_shipped_rule_files_have_the_name_that_they_are_shipped_under() {
    for (name, text) in SHIPPED_RULES {
        let rules = parse_rule_file(text.as_bytes()).unwrap();
        assert_eq!(rules.name, name);
    }
    let admission = parse_rule_file(SHIPPED_RULES[1].1.as_bytes()).unwrap();
    assert_eq!(
        admission.gates.iter().map(|rule| rule.gate()).collect::<Vec<_>>(),
        [Gate::Capacity, Gate::Contract]
    );
    assert_eq!(
        (admission.when_missing, admission.decision),
        (Choice::Reject, Choice::Admit)
    );
}

#[test]
fn outside_development_every_store_has_to_be_named() {
    let faults = service(
        r#"{"profile": "production", "listen": "127.0.0.1:1"}"#,
        &Environment::default(),
    )
    .unwrap_err();
    assert_eq!(faults.len(), 3, "{faults:#?}");
    assert!(faults[0].starts_with("limiter.url: a limiter is required in production"));
    assert!(faults[1].starts_with("policy.url: required in production"));
    assert!(faults[2].starts_with("metering.url: required in production"));
    let config = r#"{"profile": "staging", "listen": "127.0.0.1:1", "policy": null, "metering": {"url": null},
                     "store_url": "redis://h"}"#;
    assert_eq!(
        service(config, &Environment::default())
            .unwrap()
            .limiter
            .url
            .unwrap()
            .secret(),
        "redis://h"
    );
    let embedded = r#"{"profile": "staging", "listen": "127.0.0.1:1", "policy": {"url": "file:p.json"},
                       "metering": {"url": "memory:"}, "limiter": {"url": "memory:"}}"#;
    let faults = service(embedded, &Environment::default()).unwrap_err();
    assert!(
        faults.iter().all(|fault| fault.contains("for development only")) && faults.len() == 3,
        "{faults:#?}"
    );
}

#[test]
fn the_environment_beats_the_file_and_the_limiter_falls_back_in_order() {
    let text = r#"{"profile": "development", "listen": "127.0.0.1:1", "limiter": {"url": "redis://own"},
                   "store_url": "redis://store", "policy": null, "metering": null}"#;
    let url = |config: ServiceConfig| config.limiter.url.unwrap().secret().to_string();
    assert_eq!(url(service(text, &Environment::default()).unwrap()), "redis://own");
    let environment = Environment {
        redis_url: Some("redis://env".into()),
        profile: Some("staging".into()),
        ..Environment::default()
    };
    let config = service(text, &environment).unwrap();
    assert_eq!(config.profile, Profile::Staging);
    assert_eq!(url(config), "redis://env");
    let faults = service(
        text,
        &Environment {
            profile: Some("prod".into()),
            ..Environment::default()
        },
    )
    .unwrap_err();
    assert!(faults[0].starts_with("PORTCULLIS_PROFILE: "), "{faults:?}");
}

#[test]
fn an_address_is_never_shown() {
    let text = r#"{"profile": "staging", "listen": "x", "limiter": {"url": "hunter2:secret@h"},
                   "policy": {"url": "postgres//u:hunter2@h"}, "metering": {"url": "memory:hunter2"}}"#;
    let faults = service(text, &Environment::default()).unwrap_err().join("\n");
    assert!(
        faults.contains("limiter.url: ") && !faults.contains("hunter2"),
        "{faults}"
    );
    let config = service(
        r#"{"profile": "development", "listen": "h:1", "limiter": {"url": "redis://u:hunter2@h"}}"#,
        &Environment::default(),
    );
    assert!(!std::format!("{config:?}").contains("hunter2"));
}

#[test]
fn absent_empty_and_null_tiers_are_the_same() {
    let parse = |capacity: &str| {
        let text = std::format!(r#"{{"profile": "development", "listen": "h:1", "capacity": {capacity}}}"#);
        service(&text, &Environment::default()).unwrap().capacity
    };
    for capacity in ["null", "{}", r#"{"organization": {}, "platform": null, "lanes": null}"#] {
        assert_eq!(parse(capacity), Tiers::default(), "{capacity}");
    }
    assert_eq!(
        parse(r#"{"lanes": {"batch": {"requests": 0}}}"#).lanes[0].1.requests,
        crate::limits::Limit::Blocked
    );
}

#[cfg(feature = "signature")]
mod signatures {
    #[cfg(target_arch = "wasm32")]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    use super::*;

    const SECRET: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

    fn text(signature: &str) -> String {
        std::format!(
            r#"{{"profile": "production", "rules": "fail-closed", "model": {{"from": "header"}},
                "decision": {{"upstream": "p"}}, "envelope": {{"signature": {signature}}}}}"#
        )
    }

    fn fingerprint_of(text: &str) -> String {
        FilterConfig::parse(text.as_bytes())
            .unwrap()
            .fingerprint(text.as_bytes())
    }

    #[test]
    fn signatures_have_keys_by_id_and_an_allowed_age_and_show_no_secret() {
        let config = FilterConfig::parse(
            text(&std::format!(
                r#"{{"keys": {{"new": {{"secret": "{SECRET}"}}, "old-1": {{"secret": "{}"}}}}, "max_age_s": 30}}"#,
                SECRET.replace("AAEC", "ZZZZ")
            ))
            .as_bytes(),
        )
        .unwrap();
        let shown = std::format!("{config:?}");
        assert!(
            !shown.contains(SECRET) && shown.contains("Secret(not shown)"),
            "{shown}"
        );
        let signatures = config.signatures.unwrap();
        assert_eq!(signatures.key_ids().collect::<Vec<_>>(), ["new", "old-1"]);
        assert_eq!(signatures.max_age_s(), 30);
    }

    #[test]
    fn every_fault_of_a_key_is_told_and_none_tells_a_secret() {
        let secret = SECRET.replace("AAEC", "hunter2/");
        let cases = [
            (
                std::format!(r#""{secret}""#),
                "envelope.signature: must be an object, is a string",
            ),
            ("{}".into(), "envelope.signature.keys: required, and missing"),
            (
                r#"{"keys": {}}"#.into(),
                "envelope.signature.keys: must have 1 to 64 keys, has 0",
            ),
            (
                std::format!(r#"{{"keys": "{secret}"}}"#),
                "envelope.signature.keys: must be an object, is a string",
            ),
            (
                std::format!(r#"{{"keys": {{"k": "{secret}"}}}}"#),
                "envelope.signature.keys.k: must be an object, is a string",
            ),
            (
                std::format!(r#"{{"keys": {{"{secret}": {{"secret": "k"}}}}}}"#),
                "envelope.signature.keys[0]: an id must be 1 to 32 letters, digits, \".\", \"_\" or \"-\"; it is not shown",
            ),
            (
                r#"{"keys": {"k": {"secret": ["hunter2"]}}}"#.into(),
                "envelope.signature.keys.k.secret: must be a string, is an array",
            ),
            (
                r#"{"keys": {"k": {"secret": "hunter2"}}}"#.into(),
                "envelope.signature.keys.k.secret: must be base64 (with + and /, padded or not); its value is not shown",
            ),
            (
                r#"{"keys": {"k": {"secret": "aHVudGVyMg=="}}}"#.into(),
                "envelope.signature.keys.k.secret: must be 32 to 1024 bytes once decoded, is 7: `openssl rand -base64 32` makes one",
            ),
            (
                std::format!(r#"{{"keys": {{"k": {{"secret": "{SECRET}"}}, "k": {{"secret": "{SECRET}"}}}}}}"#),
                "envelope.signature.keys.k: stands twice",
            ),
            (
                std::format!(r#"{{"keys": {{"k": {{"secret": "{SECRET}", "secrte": "hunter2"}}}}}}"#),
                "envelope.signature.keys.k.secrte: unknown key; did you mean \"secret\"?",
            ),
            (
                std::format!(r#"{{"keys": {{"k": {{"secret": "{SECRET}"}}}}, "max_age_s": 0}}"#),
                "envelope.signature.max_age_s: must be an integer from 1 to 3600, is 0",
            ),
        ];
        for (signature, expected) in cases {
            let faults = filter_faults(&text(&signature));
            assert_eq!(faults, [expected]);
            for fault in faults {
                assert!(!fault.contains("hunter2") && !fault.contains("BgcICQ"), "{fault}");
            }
        }
    }

    #[test]
    fn the_fingerprint_tells_ids_and_ages_apart_and_no_secrets() {
        let of = |id: &str, secret: &str, age: u64| {
            fingerprint_of(&text(&std::format!(
                r#"{{"keys": {{"{id}": {{"secret": "{secret}"}}}}, "max_age_s": {age}}}"#
            )))
        };
        let other = SECRET.replace("AAEC", "ZZZZ");
        let one = of("k1", SECRET, 60);
        // The same on every machine: pinned here, and run in Node too.
        assert_eq!(one, "1d8662419a98eed2");
        assert_eq!(one, of("k1", &other, 60));
        assert_eq!(one, of("k1", &other.replace('/', "\\/"), 60));
        assert_ne!(one, of("k2", SECRET, 60));
        assert_ne!(one, of("k1", SECRET, 61));
    }
}

#[test]
fn headers_that_are_withheld_are_named_in_lower_case_once_and_frame_nothing() {
    let config = |withhold: &str| {
        std::format!(
            r#"{{"profile": "production", "rules": "contract-limits", "decision": {{"upstream": "p"}},
                "pause": {{"withhold": {withhold}}}}}"#
        )
    };
    let parsed = FilterConfig::parse(config(r#"["authorization", "x-api-key"]"#).as_bytes()).unwrap();
    assert_eq!(parsed.withhold, ["authorization", "x-api-key"]);
    let least = br#"{"profile": "production", "rules": "contract-limits", "decision": {"upstream": "p"}}"#;
    assert!(FilterConfig::parse(least).unwrap().withhold.is_empty());
    let list = r#"["Authorization", ":path", "", "host", "x-admission-lane", "cookie", "cookie", 5]"#;
    let name = "must be a header name of 1 to 64 lower-case characters, is";
    assert_eq!(
        filter_faults(&config(list)),
        [
            std::format!("pause.withhold[0]: {name} \"Authorization\""),
            std::format!("pause.withhold[1]: {name} \":path\""),
            std::format!("pause.withhold[2]: {name} \"\""),
            "pause.withhold[3]: \"host\" says where a request goes or how it is framed, and can't be withheld".into(),
            "pause.withhold[4]: \"x-admission-lane\" belongs to the envelope: envelope.strip keeps that from the upstream"
                .into(),
            "pause.withhold[6]: \"cookie\" stands twice".into(),
            "pause.withhold[7]: must be a string, is a number".into(),
        ]
    );
    assert_eq!(
        filter_faults(&config("[]")),
        ["pause.withhold: an empty list withholds nothing: leave the key out where that is meant"]
    );
    assert_eq!(
        filter_faults(&config("\"cookie\"")),
        ["pause.withhold: must be an array, is a string"]
    );
}
