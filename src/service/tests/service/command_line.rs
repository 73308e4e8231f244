//! `check`, the faults of `serve`, and exit codes.

use std::path::Path;

use serde_json::json;
use tempfile::TempDir;

use crate::process::{ended, file, portcullis};

const RULES: &str = r#"{"name": "mine", "envelope": {"when_missing": "admit"},
    "gates": [{"gate": "contract", "when_unavailable": "admit"}], "decision": {"when_unavailable": "admit"}}"#;
const FILTER: &str = r#"{"profile": "production", "rules": "contract-limits", "decision": {"upstream": "portcullis"}}"#;
const SERVICE: &str = r#"{"profile": "development", "listen": "127.0.0.1:0", "limiter": {"url": "memory:"}}"#;

fn check(folder: &Path, settings: &[(&str, &str)], files: &[&str]) -> (Option<i32>, String, String) {
    ended(portcullis(settings).current_dir(folder).arg("check").args(files))
}

#[test]
fn check_says_what_each_file_is() {
    let folder = TempDir::new().unwrap();
    for (name, text) in [
        ("rules.json", RULES),
        ("filter.json", FILTER),
        ("service.json", SERVICE),
    ] {
        file(folder.path(), name, text);
    }
    let (code, out, err) = check(folder.path(), &[], &["rules.json", "filter.json", "service.json"]);
    assert_eq!(
        out,
        "rules.json: ok (rules mine)\nfilter.json: ok (filter configuration)\nservice.json: ok (service configuration)\n"
    );
    assert_eq!((code, err.as_str()), (Some(0), ""));
}

#[test]
fn check_lists_every_fault_of_every_file_and_ends_with_2() {
    let folder = TempDir::new().unwrap();
    file(folder.path(), "good.json", RULES);
    file(
        folder.path(),
        "rules.json",
        &RULES.replace("contract", "contarct").replace("\"mine\"", "\"\""),
    );
    file(
        folder.path(),
        "service.json",
        r#"{"listen": "nowhere", "limiter": {"window_s": 0}, "capacity": {"platfrom": {}}}"#,
    );
    file(folder.path(), "broken.json", "{");
    file(folder.path(), "other.json", "{\"a\": 1}");
    let files = [
        "rules.json",
        "good.json",
        "service.json",
        "broken.json",
        "other.json",
        "absent.json",
    ];
    let (code, out, err) = check(folder.path(), &[], &files);
    assert_eq!(code, Some(2));
    assert_eq!(out, "good.json: ok (rules mine)\n");
    for line in [
        "service.json: profile: required, and missing: say \"development\", \"staging\" or \"production\"; nothing fills it in",
        "service.json: listen: must be host:port, such as \"127.0.0.1:8181\", is \"nowhere\"",
        "service.json: limiter.window_s: must be an integer from 1 to 86400, is 0",
        "service.json: capacity.platfrom: unknown key; did you mean \"platform\"?",
        "broken.json: not valid JSON: EOF while parsing an object at line 1 column 1",
        "absent.json: cannot be read: No such file or directory (os error 2)",
    ] {
        assert!(err.lines().any(|told| told == line), "{line} is not in\n{err}");
    }
    assert!(
        err.contains("rules.json: gates[0].gate: ") && err.contains("did you mean \"contract\"?"),
        "{err}"
    );
    assert!(err.contains("rules.json: name: "), "{err}");
    assert!(err.contains("other.json: cannot tell what it configures: "), "{err}");
    assert!(
        err.lines()
            .all(|line| files.iter().any(|file| line.starts_with(&format!("{file}: ")))),
        "{err}"
    );
}

#[test]
fn check_and_serve_read_the_environment_and_find_the_same_faults() {
    let folder = TempDir::new().unwrap();
    file(folder.path(), "service.json", SERVICE);
    for (settings, expected) in [
        (
            [("PORTCULLIS_PROFILE", "production")],
            "limiter.url: an embedded store (memory:) is for development only, the profile is production",
        ),
        ([("PORTCULLIS_PROFILE", "prod")], "PORTCULLIS_PROFILE: must be"),
        (
            [("RUST_LOG", "warning")],
            "RUST_LOG: must be a level (off, error, warn, info, debug, trace) or TARGET=LEVEL, several with commas \
             between, is \"warning\"",
        ),
        ([("RUST_LOG", "bogus=x=y")], "RUST_LOG: must be a level"),
        (
            [("PORTCULLIS_ALLOW_PASSTHROUGH", "1")],
            "PORTCULLIS_ALLOW_PASSTHROUGH: ",
        ),
        (
            [("IBEX_MODEL_POLICY_ALLOW_PASSTHROUGH", "yes")],
            "IBEX_MODEL_POLICY_ALLOW_PASSTHROUGH: ",
        ),
        ([("REDIS_URL", "hunter2:secret")], "REDIS_URL: must be an address"),
        (
            [("POSTGRES_DSN", "mysql://hunter2")],
            "POSTGRES_DSN: must be an address",
        ),
    ] {
        let (code, _, checked) = check(folder.path(), &settings, &["service.json"]);
        let serve = ["serve", "--config", "service.json"];
        let (served_code, out, served) = ended(portcullis(&settings).current_dir(folder.path()).args(serve));
        assert_eq!((code, served_code, out.as_str()), (Some(2), Some(2), ""), "{checked}");
        assert_eq!(checked, served);
        assert!(checked.contains(&format!("service.json: {expected}")), "{checked}");
        assert!(!checked.contains("hunter2"), "{checked}");
    }
    for off in ["", "0", "false"] {
        let settings = [("PORTCULLIS_ALLOW_PASSTHROUGH", off), ("REDIS_URL", "")];
        assert_eq!(check(folder.path(), &settings, &["service.json"]).0, Some(0), "{off:?}");
    }
}

#[test]
fn outside_development_a_missing_limiter_is_exit_code_2() {
    let folder = TempDir::new().unwrap();
    for profile in ["staging", "production"] {
        let text =
            json!({"profile": profile, "listen": "127.0.0.1:0", "policy": {"url": null}, "metering": {"url": null}});
        let config = file(folder.path(), "service.json", &text.to_string());
        let (code, _, err) = ended(portcullis(&[]).arg("serve").arg("--config").arg(config));
        assert_eq!(code, Some(2));
        assert!(
            err.contains(&format!("limiter.url: a limiter is required in {profile}")),
            "{err}"
        );
    }
}

#[test]
fn everything_wrong_that_a_configuration_names_is_told_at_once() {
    let folder = TempDir::new().unwrap();
    let text = json!({
        "profile": "development", "listen": "127.0.0.1:0", "limiter": {"url": "redis://store.internal:banana"},
        "policy": {"url": "file:no-policy.json"}, "metering": {"url": "postgres://u@h:port/d"}, "tokens_file": "no.tokens",
    });
    file(folder.path(), "service.json", &text.to_string());
    let (code, out, err) = check(folder.path(), &[("RUST_LOG", "loud")], &["service.json"]);
    assert_eq!((code, out.as_str()), (Some(2), ""));
    for key in ["limiter.url", "policy.url", "metering.url", "tokens_file", "RUST_LOG"] {
        assert!(
            err.contains(&format!("service.json: {key}: ")),
            "{key} is not in\n{err}"
        );
    }
}

#[test]
fn a_file_that_cannot_be_read_is_exit_code_2_and_named() {
    let (code, _, err) = ended(portcullis(&[]).args(["serve", "--config", "no/such/file.json"]));
    assert_eq!(
        (code, err.as_str()),
        (
            Some(2),
            "no/such/file.json: cannot be read: No such file or directory (os error 2)\n"
        )
    );
}

#[test]
fn an_address_that_no_limiter_can_be_made_of_is_exit_code_2_and_is_not_shown() {
    let folder = TempDir::new().unwrap();
    file(folder.path(), "service.json", SERVICE);
    for address in [
        "redis-cluster://:hunter2@store.internal:6379/2",
        "redis://:hunter2@store.internal:banana",
    ] {
        let settings = [("REDIS_URL", address)];
        for arguments in [&["serve", "--config", "service.json"][..], &["check", "service.json"]] {
            let (code, out, err) = ended(portcullis(&settings).current_dir(folder.path()).args(arguments));
            assert_eq!((code, out.as_str()), (Some(2), ""), "{err}");
            assert!(err.starts_with("service.json: limiter.url: "), "{err}");
            assert!(!err.contains("hunter2") && !err.contains("store.internal"), "{err}");
        }
    }
}

#[test]
fn the_help_teaches_and_wrong_arguments_are_exit_code_2() {
    let (code, out, _) = ended(portcullis(&[]).arg("--help"));
    assert_eq!(code, Some(0));
    assert!(
        out.contains("Example") && out.contains("portcullis check service.json"),
        "{out}"
    );
    let (code, out, _) = ended(portcullis(&[]).args(["serve", "--help"]));
    assert_eq!(code, Some(0));
    assert!(out.contains("REDIS_URL") && out.contains("--reuse-port"), "{out}");
    assert!(out.contains("RUST_LOG") && out.contains("TARGET=LEVEL"), "{out}");
    for arguments in [&[][..], &["serve"], &["check"], &["banana"]] {
        assert_eq!(ended(portcullis(&[]).args(arguments)).0, Some(2), "{arguments:?}");
    }
}
