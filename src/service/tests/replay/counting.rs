//! What a replay counts, and what it says of lines that it can't read.

use std::io::Write as _;
use std::process::Stdio;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::process::{ended, file, portcullis};

/// 2026-03-01T12:00:00Z, in seconds since 1970.
const NOON: u64 = 1_772_366_400;

fn replay(log: &str, arguments: &[&str]) -> (Option<i32>, Value, String) {
    let folder = TempDir::new().unwrap();
    file(folder.path(), "log", log);
    let mut command = portcullis(&[]);
    command
        .current_dir(folder.path())
        .args(["replay", "log", "--json"])
        .args(arguments);
    let (code, out, err) = ended(&mut command);
    (code, serde_json::from_str(&out).unwrap_or_default(), err)
}

fn whole(log: &str, arguments: &[&str]) -> Value {
    let (code, report, err) = replay(log, arguments);
    assert_eq!(code, Some(0), "{err}");
    report
}

/// A request of an org with a limit, so many seconds after noon.
fn line(after_s: u64, org: &str, limit: u64, more: &Value) -> String {
    let mut line = json!({"ts": NOON + after_s, "status": 200,
        "envelope": {"owner-id": "o", "org-id": org, "org-rate-limit-requests": limit}});
    line.as_object_mut()
        .unwrap()
        .extend(more.as_object().cloned().unwrap_or_default());
    format!("{line}\n")
}

#[test]
fn windows_follow_the_clock_of_the_log_and_refusals_are_told_by_class_scope_hour_and_tenant() {
    let mut log = String::new();
    // Three of a limit of two in each of two windows, the second in the next hour; another org is hit later and more.
    for at in [3_500, 3_501, 3_502, 3_600, 3_601, 3_602] {
        log += &line(at, "early", 2, &Value::Null);
    }
    for at in 3_610..3_615 {
        log += &line(at, "late", 1, &Value::Null);
    }
    log += &line(3_620, "spared", 2, &Value::Null);
    let report = whole(&log, &["--rules", "contract-limits"]);
    assert_eq!(
        (&report["requests"], &report["admitted"], &report["refused"]),
        (&json!(12), &json!(6), &json!(6))
    );
    assert_eq!(report["by_class"], json!({"quota_exhausted": 6}));
    assert_eq!(
        (&report["by_code"], &report["by_scope"]),
        (&json!({"RATE_LIMITED": 6}), &json!({"org": 6}))
    );
    let hours = json!([{"hour": "2026-03-01T12:00:00Z", "requests": 3, "refused": 1},
        {"hour": "2026-03-01T13:00:00Z", "requests": 9, "refused": 5}]);
    assert_eq!(report["by_hour"], hours);
    let early =
        json!({"tenant": "org:early", "refused": 2, "first": "2026-03-01T12:58:22Z", "class": "quota_exhausted"});
    let late = json!({"tenant": "org:late", "refused": 4, "first": "2026-03-01T13:00:11Z", "class": "quota_exhausted"});
    assert_eq!(
        (&report["first_hit"], &report["most_refused"]),
        (&json!([early, late]), &json!([late, early]))
    );
    assert_eq!(
        (&report["newly_refused"], &report["tenants_refused"]),
        (&json!(6), &json!(2))
    );
    let report = whole(
        &log,
        &[
            "--rules",
            "contract-limits",
            "--limit",
            "org:late:requests=3",
            "--limit",
            "org:early:requests=none",
        ],
    );
    assert_eq!(report["refused"], 2);
    let report = whole(&log, &["--rules", "contract-limits", "--down", "limiter"]);
    assert_eq!(
        (&report["refused"], &report["unchecked"]),
        (&json!(0), &json!({"limiter_unavailable": 12}))
    );
}

#[test]
fn slots_are_held_for_as_long_as_requests_took_and_tokens_replace_their_hold() {
    let envelope = json!({"owner-id": "o", "owner-concurrency-limit": 1});
    let of = |after_s: u64, envelope: &Value, more: Value| {
        let mut line = json!({"ts": NOON + after_s, "envelope": envelope});
        line.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        format!("{line}\n")
    };
    // Far beyond the life of a slot that nobody renews (30 s).
    let log = of(0, &envelope, json!({"duration_ms": 100_000}))
        + &of(50, &envelope, json!({}))
        + &of(99, &envelope, json!({}))
        + &of(101, &envelope, json!({}));
    let report = whole(&log, &["--rules", "contract-limits"]);
    assert_eq!(
        (&report["refused"], &report["by_code"]),
        (&json!(2), &json!({"CONCURRENCY_LIMITED": 2}))
    );
    let envelope = json!({"owner-id": "o", "owner-rate-limit-tokens": 3_000});
    // A hold is 1024: two fit, unless what was used is known to be less.
    let held: String = (0..5).map(|at| of(at, &envelope, json!({}))).collect();
    let used: String = (0..5).map(|at| of(at, &envelope, json!({"tokens": 400}))).collect();
    let failed: String = (0..5).map(|at| of(at, &envelope, json!({"status": 500}))).collect();
    for (log, refused) in [(held, 3), (used, 0), (failed, 0)] {
        assert_eq!(
            whole(&log, &["--rules", "contract-limits"])["refused"],
            refused,
            "{log}"
        );
    }
}

#[test]
fn plans_months_and_models_are_played_from_the_policy_file() {
    let policy = r#"{"providers": {"gpt-4o": "openai"}, "prices": {"gpt-4o": {"input": 0, "cached_input": 0, "output": 1000000}},
        "plans": {"team": {"monthly_runs": 3, "monthly_cost": 1000}},
        "orgs": {"g": {"status": "active", "plan": "team", "models": ["gpt-4o"]}}}"#;
    let config = r#"{"profile": "development", "rules": "fail-closed-metered", "model": {"from": "body"}, "decision": {"upstream": "x"}}"#;
    let folder = TempDir::new().unwrap();
    file(folder.path(), "policy.json", policy);
    file(folder.path(), "filter.json", config);
    let of = |ts: &str, model: &str, tokens: u64| {
        format!(
            "{}\n",
            json!({"ts": ts, "model": model, "tokens": tokens, "envelope": {"owner-id": "o", "org-id": "g"}})
        )
    };
    let run = |log: &str| {
        file(folder.path(), "log", log);
        let mut command = portcullis(&[]);
        command.current_dir(folder.path());
        let arguments = [
            "replay",
            "log",
            "--json",
            "--config",
            "filter.json",
            "--policy",
            "policy.json",
        ];
        let (code, out, err) = ended(command.args(arguments));
        assert_eq!(code, Some(0), "{err}");
        serde_json::from_str::<Value>(&out).unwrap()
    };
    let runs: String = [20, 21, 22, 23]
        .map(|day| of(&format!("2026-03-{day}T00:00:00Z"), "gpt-4o", 1))
        .concat();
    let report = run(&(runs.clone() + &of("2026-04-01T00:00:00Z", "gpt-4o", 1)));
    assert_eq!(
        report["by_code"],
        json!({"RUN_QUOTA_EXCEEDED": 1}),
        "the next month begins anew"
    );
    let cost = of("2026-03-01T00:00:00Z", "gpt-4o", 1_000) + &of("2026-03-01T00:00:01Z", "gpt-4o", 1);
    assert_eq!(
        run(&cost)["by_code"],
        json!({"COST_CAP_EXCEEDED": 1}),
        "a token costs a micro-dollar"
    );
    assert_eq!(
        run(&of("2026-03-01T00:00:00Z", "gpt-5", 1))["by_code"],
        json!({"MODEL_NOT_ALLOWED": 1})
    );
}

#[test]
fn lines_that_cannot_be_read_are_counted_and_named_and_older_ones_are_told() {
    let log = line(10, "g", 1, &Value::Null)
        + "{\n\n"
        + &line(5, "g", 1, &Value::Null)
        + "{\"path\": \"/\"}\n"
        + &"{\"ts\": \"hunter2\"}\n".repeat(7)
        + &format!("{}\n", "x".repeat(3_000_000))
        + &line(80, "g", 1, &Value::Null);
    let (code, report, _) = replay(&log, &["--rules", "contract-limits"]);
    assert_eq!(code, Some(1), "the report is not of the whole log");
    assert_eq!(
        (&report["requests"], &report["unordered"], &report["malformed"]),
        (&json!(3), &json!(1), &json!(10))
    );
    assert_eq!(report["refused"], 1, "the older one comes at the other's time");
    let faults = report["first_malformed"].as_array().unwrap();
    let numbers: Vec<_> = faults.iter().map(|fault| fault["line"].as_u64().unwrap()).collect();
    assert_eq!(numbers, [2, 5, 6, 7, 8], "{faults:?}");
    assert_eq!(faults[1]["fault"], "it has no time (\"ts\")");
    let (code, report, _) = replay("", &["--rules", "contract-limits"]);
    assert_eq!((code, &report["requests"]), (Some(0), &json!(0)));
}

#[test]
fn bad_arguments_are_named_and_standard_input_is_a_log() {
    for (arguments, fault) in [
        (
            &["--rules", "contract-limits", "--limit", "platform:*:requests=1"][..],
            "invalid value 'platform:*:requests=1' for '--limit <LIMIT>'",
        ),
        (
            &["--rules", "contract-limits", "--from", "nginx"],
            "invalid value 'nginx' for '--from <FROM>'",
        ),
        (&["--rules", "nowhere"], "--rules \"nowhere\" is no shipped rule file"),
        (&[], "--config FILE or --rules NAME|FILE is needed"),
    ] {
        let (code, report, err) = replay("", arguments);
        assert_eq!((code, report), (Some(2), Value::Null));
        assert!(err.contains(fault), "{fault:?} is not in\n{err}");
    }
    let (code, _, err) = ended(portcullis(&[]).args(["replay", "nowhere.jsonl", "--rules", "contract-limits"]));
    assert_eq!(code, Some(2));
    assert!(err.contains("nowhere.jsonl: cannot be read: "), "{err}");
    let mut command = portcullis(&[]);
    command.args(["replay", "-", "--rules", "contract-limits"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let log = line(0, "g", 1, &Value::Null).repeat(2);
    child.stdin.take().unwrap().write_all(log.as_bytes()).unwrap();
    let text = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
    for expected in [
        "2 requests from 2026-03-01T12:00:00Z to 2026-03-01T12:00:00Z under contract-limits\n",
        "           1  refused (50.00 %)\n",
        "\nrefused by class\n           1  quota_exhausted\n",
        "           1  2026-03-01T12:00:00Z  of 2 (50.00 %)\n",
        "\ntenants that are hit first\n           1  org:g  first 2026-03-01T12:00:00Z by quota_exhausted\n",
    ] {
        assert!(text.contains(expected), "{expected:?} is not in\n{text}");
    }
}

#[test]
fn a_line_without_a_time_names_the_key_of_its_form_and_a_log_of_envoy_is_known_for_one() {
    let fault = |log: &str, arguments: &[&str]| {
        let (code, report, err) = replay(log, &[&["--rules", "contract-limits"], arguments].concat());
        assert_eq!(code, Some(1), "{err}");
        report["first_malformed"][0]["fault"].as_str().unwrap().to_owned()
    };
    let hint = "; it looks like a line of Envoy's log (\"start_time\"): give --from envoy";
    assert_eq!(fault("{\"path\": \"/\"}\n", &[]), "it has no time (\"ts\")");
    assert_eq!(
        fault("{\"path\": \"/\"}\n", &["--from", "envoy"]),
        "it has no time (\"start_time\")"
    );
    let envoys = "{\"start_time\": \"2026-03-01T12:00:00Z\", \"method\": \"POST\"}\n";
    assert_eq!(fault(envoys, &[]), format!("it has no time (\"ts\"){hint}"));
    let with_nothing = "{\"start_time\": \"2026-03-01T12:00:00Z\", \"tokens\": \"-\"}\n";
    assert!(
        fault(with_nothing, &[]).ends_with(hint),
        "its form differs otherwise too"
    );
}

#[test]
fn a_fault_of_a_line_has_the_place_in_that_line_alone() {
    let (_, report, _) = replay("{\"max_tokens\": -5}\n", &["--rules", "contract-limits"]);
    let fault = &report["first_malformed"][0];
    assert_eq!(fault["line"], 1);
    assert_eq!(
        fault["fault"], "invalid value: integer `-5`, expected u64 at column 17",
        "{fault}"
    );
}
