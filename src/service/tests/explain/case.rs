//! A case of the table as arguments of `portcullis explain`, and whether an answer is the one that it predicted. Also used by
//! the tests in real Envoy (`wasm-tests/`), which include this module by its path.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Map, Value, json};
use tempfile::TempDir;

/// What hosts add to replies. Envoy ends an HTTP/1.1 connection on which it has answered 400.
const OF_THE_HOST: [&str; 5] = ["connection", "content-length", "date", "server", "x-request-id"];
/// Names that end so carry figures that depend on the moment.
const MOMENTARY: [&str; 3] = ["retry-after", "x-ratelimit-reset-requests", "x-ratelimit-reset-tokens"];

/// The files of a case, and the requests that came before.
pub(crate) struct Explainer {
    folder: TempDir,
    arguments: Vec<OsString>,
    before: String,
}

impl Explainer {
    /// `filter` is the case's configuration of the filter.
    pub(crate) fn of(case: &Value, filter: &Value) -> Self {
        let mut explainer = Self {
            folder: TempDir::new().expect("a temporary folder"),
            arguments: vec!["explain".into(), "--json".into()],
            before: String::new(),
        };
        explainer.file("--config", "filter.json", &filter.to_string());
        let limiter = if case["limiter"] == "none" {
            Value::Null
        } else {
            json!({"url": "memory:"})
        };
        let service = json!({"profile": "development", "listen": "127.0.0.1:1", "limiter": limiter,
            "capacity": case["capacity"]});
        explainer.file("--service", "service.json", &service.to_string());
        if case["policy"].is_object() {
            explainer.file("--policy", "policy.json", &case["policy"].to_string());
        }
        for down in case["down"].as_array().into_iter().flatten() {
            explainer
                .arguments
                .push(format!("--down={}", down.as_str().unwrap()).into());
        }
        for (org, cost) in case["spent"].as_object().into_iter().flatten() {
            explainer
                .arguments
                .push(format!("--spent=org:{org}:cost={cost}").into());
        }
        explainer
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn file(&mut self, option: &str, name: &str, text: &str) {
        std::fs::write(self.path(name), text).expect("a file can be written");
        self.arguments.extend([option.into(), self.path(name).into_os_string()]);
    }

    /// What `command` says about a request with these headers; afterwards that is one of those that came before.
    pub(crate) fn explain(&mut self, mut command: Command, fields: &[(String, String)]) -> Value {
        std::fs::write(self.path("before"), &self.before).expect("a file can be written");
        command.args(&self.arguments).arg("--after").arg(self.path("before"));
        command.args(["-X", "GET", "--path", "/v1/models"]);
        for (name, value) in fields {
            command.arg("-H").arg(format!("{name}: {value}"));
        }
        let output = command.output().expect("portcullis explain runs");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && error.is_empty(), "{error}");
        let headers: Map<String, Value> = fields
            .iter()
            .map(|(name, value)| (name.clone(), json!(value)))
            .collect();
        let line = json!({"method": "GET", "path": "/v1/models", "headers": headers});
        self.before.push_str(&format!("{line}\n"));
        serde_json::from_slice(&output.stdout).expect("explain --json prints JSON")
    }
}

/// What the client got.
pub(crate) struct Got<'a> {
    pub(crate) status: u16,
    pub(crate) headers: &'a [(String, String)],
    pub(crate) body: &'a [u8],
    pub(crate) upstream: u64,
}

/// What of an answer was not as predicted. Figures that the case table has a range for depend on the moment, and are held
/// against the range by the table itself; the others have to be the same.
pub(crate) fn difference(report: &Value, got: &Got<'_>, expect: &Value) -> Option<String> {
    let is_momentary = expect["retry_after"]
        .as_array()
        .is_some_and(|range| range[0] != range[1]);
    let reached = u64::from(
        report["upstream"]["reached"]
            .as_bool()
            .expect("explain says who is reached"),
    );
    if reached != got.upstream {
        return Some(format!(
            "explain says that the upstream sees {reached} requests, it saw {}",
            got.upstream
        ));
    }
    let Some(reply) = report["reply"].as_object() else {
        let passed = got.status == 200 && got.headers.iter().all(|(name, _)| name != "x-portcullis-class");
        return (!passed).then(|| format!("explain says that it passes, the status is {}", got.status));
    };
    if reply["status"] != got.status {
        return Some(format!("explain says status {}, it is {}", reply["status"], got.status));
    }
    let told: Vec<(String, String)> = serde_json::from_value(reply["headers"].clone()).expect("pairs");
    let (told, seen) = (fields(&told, is_momentary), fields(got.headers, is_momentary));
    if told != seen {
        return Some(format!("explain says the headers {told:?}, they are {seen:?}"));
    }
    let told = body(reply["body"].as_str().expect("a body").as_bytes(), is_momentary);
    let seen = body(got.body, is_momentary);
    (told != seen).then(|| format!("explain says the body {told}, it is {seen}"))
}

fn fields(headers: &[(String, String)], is_momentary: bool) -> Vec<(String, String)> {
    let is_ours =
        |(name, _): &&(String, String)| !OF_THE_HOST.contains(&name.as_str()) && !name.starts_with("x-envoy-");
    let mut fields: Vec<_> = headers
        .iter()
        .filter(is_ours)
        .map(|(name, value)| {
            let value = match name.as_str() {
                momentary if is_momentary && MOMENTARY.contains(&momentary) => "(a moment)".to_owned(),
                // `"org-requests";r=0;t=41`
                "ratelimit" if is_momentary => value.split(";t=").next().unwrap().to_owned(),
                _ => value.clone(),
            };
            (name.clone(), value)
        })
        .collect();
    fields.sort();
    fields
}

fn body(bytes: &[u8], is_momentary: bool) -> Value {
    let Ok(mut body) = serde_json::from_slice::<Value>(bytes) else {
        return json!(String::from_utf8_lossy(bytes));
    };
    if let Some(error) = body["error"].as_object_mut() {
        error.remove("request_id");
        if is_momentary && error.contains_key("retry_after") {
            error.insert("retry_after".to_owned(), json!("(a moment)"));
        }
    }
    body
}
