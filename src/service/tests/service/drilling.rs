//! `portcullis drill` without a gateway: what is wrong with its arguments, and a gateway that is not there. What it says of real
//! ones is tested in Envoy (`wasm-tests/tests/envoy/drill.rs`).

use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::admin::{TOKEN, address};
use crate::process::{Service, ended, file, in_memory, portcullis};

fn drill(arguments: &[&str]) -> (Option<i32>, String, String) {
    ended(portcullis(&[]).arg("drill").args(arguments))
}

fn is_refused(arguments: &[&str], says: &[&str]) {
    let (code, out, err) = drill(arguments);
    assert_eq!(code, Some(2), "{arguments:?}: {err}");
    assert!(out.is_empty(), "{out}");
    for word in says {
        assert!(err.contains(word), "{arguments:?}: {word} is not in {err}");
    }
    assert!(!err.contains("hunter2"), "{err}");
}

/// A port that refuses connections.
const NOBODY: &str = "http://127.0.0.1:1";

#[test]
fn what_is_wrong_with_the_arguments_is_said_by_its_option_and_nothing_is_sent() {
    let contract = ["--rules", "contract-limits"];
    let with = |more: &[&'static str]| [&contract[..], more].concat();
    is_refused(
        &with(&["--gateway", "localhost:10000"]),
        &["--gateway: must be http://HOST"],
    );
    is_refused(
        &with(&["--gateway", "ftp://localhost"]),
        &["--gateway: must be http://HOST"],
    );
    is_refused(
        &with(&["--gateway", "http://user:hunter2@localhost"]),
        &["--gateway: must not hold a name or a password"],
    );
    is_refused(
        &["--gateway", NOBODY],
        &["--config FILE or --rules NAME|FILE is needed"],
    );
    is_refused(
        &with(&["--gateway", NOBODY, "-H", "Authorization hunter2"]),
        &["-H \"Authorization\" must be \"Name: value\""],
    );
    is_refused(
        &with(&["--gateway", NOBODY, "--path", "v1"]),
        &["--path \"v1\" must begin with \"/\""],
    );
    is_refused(
        &with(&["--gateway", NOBODY, "--body", "@missing.json"]),
        &["--body @missing.json"],
    );
    is_refused(
        &with(&["--gateway", NOBODY, "--key-id", "edge-1"]),
        &["--key-id", "no signed envelopes"],
    );
    is_refused(
        &with(&["--gateway", NOBODY, "--token-file", "missing"]),
        &["--token-file missing: cannot be read"],
    );
    is_refused(
        &with(&["--gateway", NOBODY, "--admin", NOBODY]),
        &["--admin: 127.0.0.1:1 can't be reached"],
    );
    is_refused(
        &with(&["--gateway", NOBODY, "--upstream-count", NOBODY]),
        &["--upstream-count: 127.0.0.1:1 can't be reached"],
    );
    is_refused(&with(&["--gateway", NOBODY, "--production"]), &["--yes-in-production"]);
    // Rules that need a model read it from the body, where no configuration says otherwise.
    is_refused(
        &["--rules", "fail-closed", "--gateway", NOBODY],
        &["the test tenant's request would be refused", "-H", "--body", "--policy"],
    );
    // A tenant who would be refused proves nothing.
    is_refused(
        &["--rules", "launch-gate", "--gateway", NOBODY],
        &[
            "the test tenant's request would be refused (ENVELOPE_PARTIAL",
            "-H",
            "--policy",
        ],
    );
}

#[test]
fn signed_envelopes_need_a_key() {
    let folder = TempDir::new().unwrap();
    let secret = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    let config = json!({
        "profile": "development", "rules": "contract-limits", "decision": {"upstream": "portcullis"},
        "envelope": {"signature": {"keys": {"edge-1": {"secret": secret}}}}
    });
    let path = file(folder.path(), "filter.json", &config.to_string());
    let path = path.to_str().unwrap();
    is_refused(
        &["--config", path, "--gateway", NOBODY],
        &["wants signed envelopes", "--key-id"],
    );
}

fn read(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn a_gateway_that_is_not_there_is_red_in_every_row_and_both_reports_say_so() {
    let folder = TempDir::new().unwrap();
    let (json, markdown) = (folder.path().join("r.json"), folder.path().join("r.md"));
    let (code, out, err) = drill(&[
        "--rules",
        "contract-limits",
        "--gateway",
        NOBODY,
        "-H",
        "authorization: Bearer hunter2",
        "--json",
        json.to_str().unwrap(),
        "--report",
        markdown.to_str().unwrap(),
    ]);
    assert_eq!(code, Some(1), "{err}");
    assert!(err.contains("[1/") && err.contains("RED"), "progress: {err}");
    let report = read(&json);
    let rows = report["rows"].as_array().unwrap();
    assert!(rows.len() >= 6, "{report}");
    for row in rows {
        assert_eq!(
            (&row["green"], &row["got"]),
            (&Value::Bool(false), &Value::Null),
            "{row}"
        );
        assert!(row["reasons"].to_string().contains("can't be reached"), "{row}");
    }
    let markdown = std::fs::read_to_string(markdown).unwrap();
    assert!(
        markdown.starts_with("# Drill of 127.0.0.1:1, rules contract-limits\n"),
        "{markdown}"
    );
    assert!(markdown.contains("## What was not as predicted"), "{markdown}");
    let left: Vec<&Value> = report["not_driven"].as_array().unwrap().iter().collect();
    let outage = left.iter().find(|left| left["class"] == "limiter_unavailable").unwrap();
    assert!(outage["why"].as_str().unwrap().contains("--admin"), "{outage}");
    assert!(![out, err, markdown, report.to_string()].concat().contains("hunter2"));
}

#[tokio::test]
async fn an_admin_listener_is_asked_with_its_token_and_a_wrong_one_is_named() {
    let folder = TempDir::new().unwrap();
    let tokens = file(folder.path(), "tokens", &format!("{TOKEN}\n"));
    let mut config = in_memory();
    config["admin"] = json!({"listen": "127.0.0.1:0", "token_file": tokens});
    let service = Service::start(config).await;
    let admin = format!("http://{}", address(&service).await);
    let wrong = file(
        folder.path(),
        "wrong",
        "# nothing of use\nsome-other-token-0123456789-abcdefgh\n",
    );
    let arguments = ["--rules", "contract-limits", "--gateway", NOBODY, "--admin", &admin];
    let (wrong, tokens) = (wrong.to_str().unwrap(), tokens.to_str().unwrap());
    is_refused(
        &[&arguments[..], &["--token-file", wrong]].concat(),
        &["asks for another token (--token-file)"],
    );
    let main = format!("http://{}", service.address);
    is_refused(
        &["--rules", "contract-limits", "--gateway", NOBODY, "--admin", &main],
        &["is no admin listener of a service: status 404"],
    );
    // The service answers at this address, and counts no upstream's requests.
    let live = format!("{main}/live");
    is_refused(
        &[
            "--rules",
            "contract-limits",
            "--gateway",
            NOBODY,
            "--upstream-count",
            &live,
        ],
        &[
            &format!(
                "--upstream-count: {}/live must answer {{\"hits\": N}} or N",
                service.address
            ),
            "answers 200 without a number of hits",
        ],
    );
    let (code, out, _) = drill(&[&arguments[..], &["--token-file", tokens]].concat());
    assert_eq!(code, Some(1), "the gateway is not there");
    assert!(out.contains("limiter does not answer"), "outages are driven: {out}");
    assert!(
        service.get("/ready").await.json().get("faults").is_none(),
        "and are over"
    );
}
