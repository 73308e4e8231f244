//! `portcullis` as a child process with a clean environment and its output in files; killed when it goes out of scope.

use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

use crate::wire::{Answer, Client};

/// Far longer than anything here takes.
const DEADLINE: Duration = Duration::from_secs(20);

/// Settings that a test must not inherit.
const SETTINGS: [&str; 10] = [
    "REDIS_URL",
    "POSTGRES_DSN",
    "PORTCULLIS_PROFILE",
    "PORTCULLIS_ENVELOPE_SECRET",
    "PORTCULLIS_ALLOW_PASSTHROUGH",
    "IBEX_MODEL_POLICY_ALLOW_PASSTHROUGH",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_SERVICE_NAME",
    "RUST_LOG",
];

/// The command, with only the given settings of its own.
pub(crate) fn portcullis(settings: &[(&str, &str)]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_portcullis"));
    for name in SETTINGS {
        command.env_remove(name);
    }
    command.envs(settings.iter().copied()).stdin(Stdio::null());
    command
}

/// Runs a command that ends by itself.
pub(crate) fn ended(command: &mut Command) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = command.output().expect("portcullis runs");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    (status.code(), text(stdout), text(stderr))
}

/// With this configuration, in this folder, neither `serve` nor `check` goes on: both end with code 2, say `expected`, and show
/// nothing of what is secret.
#[track_caller]
pub(crate) fn is_faulty(folder: &Path, config: &Value, expected: &str, secrets: &[&str]) {
    file(folder, "service.json", &config.to_string());
    for arguments in [&["serve", "--config", "service.json"][..], &["check", "service.json"]] {
        let (code, out, err) = ended(portcullis(&[]).current_dir(folder).args(arguments));
        assert_eq!((code, out.as_str()), (Some(2), ""), "{err}");
        assert!(err.contains(expected), "{expected} is not in {err}");
        assert!(secrets.iter().all(|secret| !err.contains(secret)), "{err}");
    }
}

/// Polls until `probe` gives a value.
pub(crate) async fn until<T>(what: &str, mut probe: impl AsyncFnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = probe().await {
            return value;
        }
        assert!(start.elapsed() < DEADLINE, "gave up waiting for: {what}");
        sleep(Duration::from_millis(5)).await;
    }
}

/// A running `portcullis serve`.
pub(crate) struct Service {
    pub(crate) address: SocketAddr,
    child: Child,
    folder: TempDir,
}

/// The least configuration with a limiter.
pub(crate) fn in_memory() -> Value {
    json!({"profile": "development", "listen": "127.0.0.1:0", "limiter": {"url": "memory:"}})
}

impl Service {
    /// Starts, and waits for the line that says where it listens.
    pub(crate) async fn start(config: Value) -> Self {
        Self::start_with(config, &[], &[]).await
    }

    pub(crate) async fn start_with(config: Value, arguments: &[&str], settings: &[(&str, &str)]) -> Self {
        let folder = TempDir::new().expect("a temporary folder");
        let file = folder.path().join("service.json");
        fs::write(&file, config.to_string()).expect("the configuration can be written");
        let log = File::create(folder.path().join("stderr")).expect("a log file");
        let mut command = portcullis(settings);
        command
            .arg("serve")
            .arg("--config")
            .arg(&file)
            .args(arguments)
            .stdout(Stdio::null())
            .stderr(log);
        let child = command.spawn().expect("portcullis starts");
        let mut service = Self {
            address: ([127, 0, 0, 1], 0).into(),
            child,
            folder,
        };
        let listen = until("the line `started`", async || {
            if let Some(status) = service.child.try_wait().expect("the child can be asked") {
                panic!("serve ended with {status}: {}", service.log());
            }
            let started = service.lines().into_iter().find(|line| line["event"] == "started")?;
            started["listen"].as_str().map(str::to_owned)
        })
        .await;
        service.address = listen.parse().expect("an address");
        service
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("stderr")).unwrap_or_default()
    }

    /// The whole lines of the log so far; each has to be a JSON object.
    pub(crate) fn lines(&self) -> Vec<Value> {
        let log = self.log();
        let whole = log.rsplit_once('\n').map_or("", |(whole, _)| whole);
        let object = |line: &str| {
            let value: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
            assert!(value.is_object(), "{line}");
            value
        };
        whole.lines().map(object).collect()
    }

    /// The first line of an event, when it comes.
    pub(crate) async fn line(&self, event: &str) -> Value {
        until(event, async || {
            self.lines().into_iter().find(|line| line["event"] == event)
        })
        .await
    }

    pub(crate) async fn client(&self) -> Client {
        Client::connect(self.address).await
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.client().await.send("GET", path, "").await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Answer {
        self.client().await.send("POST", path, &body.to_string()).await
    }

    pub(crate) fn signal(&self, name: &str) {
        let status = Command::new("kill")
            .args([format!("-{name}"), self.child.id().to_string()])
            .status();
        assert!(status.expect("kill can be run").success());
    }

    /// The exit code, once it has ended.
    pub(crate) async fn end(&mut self) -> Option<i32> {
        let child = &mut self.child;
        until("the end of the service", async || {
            child.try_wait().expect("the child can be asked")
        })
        .await
        .code()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
        if std::thread::panicking() {
            eprintln!("--- the service's log\n{}", self.log());
        }
    }
}

/// A file of this name with this text in `folder`.
pub(crate) fn file(folder: &Path, name: &str, text: &str) -> std::path::PathBuf {
    let path = folder.join(name);
    fs::write(&path, text).expect("the file can be written");
    path
}
