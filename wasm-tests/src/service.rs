//! The real decision service as a process: started with a configuration file, awaited on `/live`, stopped, frozen or
//! killed by signals. Also `portcullis check`.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::process::{Process, free_port, json_lines};
use crate::{Answer, Call, Connection, DEADLINE, locate, until};

/// Settings that the product reads from its environment, which a test must not inherit.
const SETTINGS: [&str; 7] = [
    "REDIS_URL",
    "POSTGRES_DSN",
    "PORTCULLIS_PROFILE",
    "PORTCULLIS_ALLOW_PASSTHROUGH",
    "IBEX_MODEL_POLICY_ALLOW_PASSTHROUGH",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
];

/// A running `portcullis serve`; killed when dropped.
pub struct Service {
    pub address: SocketAddr,
    config: PathBuf,
    environment: Vec<(String, String)>,
    /// It speaks TLS, so the harness does not ask it.
    is_tls: bool,
    process: Process,
    _folder: TempDir,
}

/// The configuration most tests use: development, the limiter in memory, the given tiers.
pub fn development_service(capacity: Value) -> Value {
    json!({"profile": "development", "limiter": {"url": "memory:"}, "capacity": capacity})
}

impl Service {
    /// Starts with `config`, whose `listen` is set to a free port, and waits until it is alive.
    pub async fn start(config: Value) -> Self {
        Self::start_on(free_port(), config, &[]).await
    }

    /// The same on a given port, with more arguments for `serve`.
    pub async fn start_on(port: u16, config: Value, arguments: &[&str]) -> Self {
        Self::start_as(port, config, arguments, &[]).await
    }

    /// The same on a free port, with more variables in its environment, which it keeps when it restarts.
    pub async fn start_with_environment(config: Value, environment: &[(&str, &str)]) -> Self {
        Self::start_as(free_port(), config, &[], environment).await
    }

    async fn start_as(port: u16, mut config: Value, arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        config["listen"] = json!(address.to_string());
        let folder = TempDir::new().expect("a temporary folder");
        let file = folder.path().join("service.json");
        std::fs::write(&file, config.to_string()).expect("the configuration can be written");
        let environment: Vec<(String, String)> = environment
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        let process = serve(&file, arguments, &environment, folder.path());
        let mut service = Self {
            address,
            config: file,
            environment,
            is_tls: config["tls"].is_object(),
            process,
            _folder: folder,
        };
        service.await_live().await;
        service
    }

    async fn await_live(&mut self) {
        let (address, is_tls) = (self.address, self.is_tls);
        let process = &mut self.process;
        until("the service's /live", DEADLINE, async || {
            if let Some(status) = process.exited() {
                panic!("portcullis serve ended with {status}:\n{}", process.log());
            }
            // A port shared by two processes may be answered by the older one, so the newer has to say that it listens.
            if !listening(&process.log()) {
                return None;
            }
            if is_tls {
                return Some(());
            }
            let live = Connection::try_call(address, &Call::get("/live")).await?;
            (live.status == 200).then_some(())
        })
        .await;
    }

    pub async fn get(&self, path: &str) -> Answer {
        Connection::open(self.address).await.call(&Call::get(path)).await
    }

    /// The value of one of its metrics, labels and all; 0 until it is defined.
    pub async fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").await.text();
        let value = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
        value.unwrap_or(0.0)
    }

    /// The state of a dependency as `/ready` tells it; empty without an answer.
    pub async fn state(&self, dependency: &str) -> String {
        let ready: Value = serde_json::from_slice(&self.get("/ready").await.body).unwrap_or_default();
        let state = ready["dependencies"][dependency]["state"].as_str();
        state.unwrap_or_default().to_owned()
    }

    pub async fn await_state(&self, dependency: &str, state: &str) {
        until(&format!("{dependency} to be {state}"), DEADLINE * 2, async || {
            (self.state(dependency).await == state).then_some(())
        })
        .await;
    }

    /// Waits for a log line.
    pub async fn await_log(&self, what: &str, matches: impl Fn(&Value) -> bool) -> Value {
        until(&format!("a log line of the service: {what}"), DEADLINE, async || {
            self.log_lines().into_iter().find(|line| matches(line))
        })
        .await
    }

    /// SIGTERM, without waiting.
    pub fn terminate(&self) {
        self.process.signal("TERM");
    }

    /// SIGTERM, then waits for the end, and gives the exit code.
    pub async fn stop(&mut self) -> Option<i32> {
        self.terminate();
        let process = &mut self.process;
        until("the end of the service", DEADLINE, async || process.exited())
            .await
            .code()
    }

    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Starts again on the same port, after a kill or a stop, with empty memory.
    pub async fn restart(&mut self) {
        self.process.kill();
        self.process = serve(
            &self.config,
            &[],
            &self.environment,
            self.config.parent().expect("the file is in a folder"),
        );
        self.await_live().await;
    }

    /// Stops the process without closing anything: it looks alive and never answers.
    pub fn freeze(&self) {
        self.process.freeze();
    }

    pub fn thaw(&self) {
        self.process.signal("CONT");
    }

    /// The JSON log lines so far.
    pub fn log_lines(&self) -> Vec<Value> {
        json_lines(&self.process.log())
    }

    pub fn log(&self) -> String {
        self.process.log()
    }
}

fn listening(log: &str) -> bool {
    !json_lines(log).is_empty()
}

fn serve(config: &Path, arguments: &[&str], environment: &[(String, String)], folder: &Path) -> Process {
    let mut command = Command::new(locate::portcullis());
    command
        .arg("serve")
        .arg("--config")
        .arg(config)
        .args(arguments)
        .current_dir(folder);
    SETTINGS.iter().for_each(|name| {
        command.env_remove(name);
    });
    command.envs(environment.iter().map(|(name, value)| (name, value)));
    Process::spawn(&mut command, &folder.join("service.log"))
}

/// Runs `portcullis check` on a file, and gives the exit code and everything that it printed.
pub fn check(file: &Path) -> (Option<i32>, String) {
    let mut command = Command::new(locate::portcullis());
    SETTINGS.iter().for_each(|name| {
        command.env_remove(name);
    });
    let output = command.arg("check").arg(file).output().expect("portcullis check runs");
    let printed = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&printed).into_owned())
}
