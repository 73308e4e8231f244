//! `file:`, for development.

use std::fs;
use std::path::Path;

use serde_json::json;
use tempfile::TempDir;

use crate::policies::{UNKNOWABLE, becomes, config, decide, policy, state_becomes};
use crate::process::{Service, ended, portcullis};

fn url(file: &Path) -> String {
    format!("file:{}", file.display())
}

#[tokio::test]
async fn a_file_is_followed_and_a_version_with_faults_is_an_outage() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("policy.json");
    fs::write(&file, policy().to_string()).unwrap();
    let service = Service::start(config(&url(&file), 200)).await;
    assert_eq!(decide(&service, "good", "gpt-4o").await, "admit");
    assert_eq!(decide(&service, "good", "mistral").await, "PROVIDER_NOT_CONFIGURED");
    assert_eq!(decide(&service, "nobody", "gpt-4o").await, "ORG_UNKNOWN");
    state_becomes(&service, "up").await;

    let mut changed = policy();
    changed["orgs"]["good"]["status"] = json!("suspended");
    fs::write(&file, changed.to_string()).unwrap();
    becomes(&service, "good", "gpt-4o", "ORG_SUSPENDED").await;

    fs::write(&file, r#"{"orgs": {"good": {"status": "activ"}}}"#).unwrap();
    becomes(&service, "good", "gpt-4o", UNKNOWABLE).await;
    state_becomes(&service, "down").await;
    let line = service.line("policy_faulty").await;
    assert_eq!(
        (&line["level"], &line["dependency"]),
        (&json!("ERROR"), &json!("policy"))
    );
    assert!(line["message"].as_str().unwrap().contains("did you mean"), "{line}");
    assert_eq!(
        service
            .lines()
            .iter()
            .filter(|line| line["event"] == "policy_faulty")
            .count(),
        1
    );

    fs::remove_file(&file).unwrap();
    becomes(&service, "suspended", "gpt-4o", UNKNOWABLE).await;
    fs::write(&file, policy().to_string()).unwrap();
    becomes(&service, "good", "gpt-4o", "admit").await;
    state_becomes(&service, "up").await;
}

#[test]
fn a_file_with_faults_or_none_at_all_ends_the_start_and_lists_them_all() {
    let folder = TempDir::new().unwrap();
    let (service, file) = (folder.path().join("service.json"), folder.path().join("policy.json"));
    fs::write(&service, config(&url(&file), 200).to_string()).unwrap();
    let run = |command: &str| {
        let mut run = portcullis(&[]);
        if command == "serve" {
            run.args(["serve", "--config"]).arg(&service)
        } else {
            run.arg("check").arg(&service)
        };
        ended(&mut run)
    };
    for command in ["serve", "check"] {
        drop(fs::remove_file(&file));
        let (code, _, err) = run(command);
        assert_eq!(code, Some(2), "{err}");
        assert!(err.contains("policy.json: cannot be read"), "{err}");
        fs::write(&file, r#"{"orgs": {"a": {"status": "activ"}, "b": {"status": 1}}}"#).unwrap();
        let (code, _, err) = run(command);
        assert_eq!((code, err.lines().count()), (Some(2), 2), "{err}");
    }
}
