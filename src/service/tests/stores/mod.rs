//! Real stores for tests: a server process on a free port, with a folder of its own, gone when it is dropped.
//!
//! Left out on purpose: what is tested with them.
#![allow(dead_code, reason = "every test binary uses a part of it")]

pub(crate) mod cluster;

use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use portcullis_decision::config::{Environment, LimiterConfig, ServiceConfig};
use portcullis_service::limiter::{self, Limiter};
use redis::Value;
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

/// How long a test waits for what must happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Asks until the answer is something, every few milliseconds; fails with `what` after [`PATIENCE`].
pub(crate) async fn eventually<T>(what: &str, ask: impl AsyncFnMut() -> Option<T>) -> T {
    eventually_within(PATIENCE, what, ask).await
}

/// The same with another patience.
pub(crate) async fn eventually_within<T>(patience: Duration, what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let end = Instant::now() + patience;
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(Instant::now() < end, "{what}: not within {patience:?}");
        sleep(Duration::from_millis(10)).await;
    }
}

/// A port that was free a moment ago.
pub(crate) fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

/// Sockets of living processes that are connected to a port or about to be. The tester's own come and go.
pub(crate) fn sockets_to(port: u16) -> usize {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let port = format!(":{port:04X}");
    let counts = |line: &&str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        // Remote address; established or opening; an inode, which a socket that nobody holds has not.
        fields[2].ends_with(&port) && matches!(fields[3], "01" | "02") && fields[9] != "0"
    };
    table.lines().skip(1).filter(counts).count()
}

/// Whether a program can be started.
pub(crate) fn is_installed(program: &str) -> bool {
    Command::new(program)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok()
}

/// A server without persistence.
pub(crate) struct Store {
    program: &'static str,
    arguments: Vec<String>,
    folder: TempDir,
    child: Child,
    pub(crate) port: u16,
    admin_url: String,
}

impl Drop for Store {
    fn drop(&mut self) {
        // Also ends a process that is stopped.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Store {
    /// A Redis that answers.
    pub(crate) async fn redis() -> Self {
        Self::start("redis-server", &[]).await
    }

    /// A server of this program with more arguments, once it answers.
    pub(crate) async fn start(program: &'static str, arguments: &[&str]) -> Self {
        let arguments: Vec<String> = arguments.iter().map(ToString::to_string).collect();
        let end = Instant::now() + PATIENCE;
        loop {
            let (port, folder) = (free_port(), tempfile::tempdir().unwrap());
            let child = spawn(program, &arguments, &folder, port);
            let admin_url = format!("redis://127.0.0.1:{port}");
            let mut store = Self {
                program,
                arguments: arguments.clone(),
                folder,
                child,
                port,
                admin_url,
            };
            if store.answers().await {
                return store;
            }
            assert!(Instant::now() < end, "{program} does not start");
        }
    }

    /// Whether it came up, or lost its port to somebody else.
    async fn answers(&mut self) -> bool {
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end {
            if let Some(said) = self.try_run(&["INFO", "server"]).await {
                // Whoever took the port in between may be a server of another test.
                let said: String = redis::from_redis_value(said).unwrap();
                let own = format!("process_id:{}", self.child.id());
                return said.lines().any(|line| line == own);
            }
            if self.child.try_wait().unwrap().is_some() {
                return false;
            }
            sleep(Duration::from_millis(10)).await;
        }
        false
    }

    /// Its address, without credentials.
    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// How the test itself gets in from here on.
    pub(crate) fn admit_tester_by(&mut self, url: String) {
        self.admin_url = url;
    }

    /// Runs a command as the tester, if it can.
    pub(crate) async fn try_run(&self, words: &[&str]) -> Option<Value> {
        let client = redis::Client::open(self.admin_url.as_str()).unwrap();
        let mut connection = client.get_multiplexed_async_connection().await.ok()?;
        let mut command = redis::cmd(words.first()?);
        command.arg(&words[1..]);
        command.query_async(&mut connection).await.ok()
    }

    /// Runs a command as the tester.
    pub(crate) async fn run(&self, words: &[&str]) -> Value {
        self.try_run(words).await.unwrap_or_else(|| panic!("{words:?} failed"))
    }

    /// Runs a command whose answer is a number.
    pub(crate) async fn number(&self, words: &[&str]) -> i64 {
        match self.run(words).await {
            Value::Int(number) => number,
            Value::BulkString(text) => String::from_utf8(text).unwrap().parse().unwrap(),
            Value::Nil => 0,
            other => panic!("{words:?}: {other:?}"),
        }
    }

    /// All keys.
    pub(crate) async fn keys(&self) -> Vec<String> {
        redis::from_redis_value(self.run(&["KEYS", "*"]).await).unwrap()
    }

    /// Sockets that are connected to it or about to be.
    pub(crate) fn sockets(&self) -> usize {
        sockets_to(self.port)
    }

    /// Stops the process in its tracks: sockets stay open, nothing is answered.
    pub(crate) fn freeze(&self) {
        self.signal("-STOP");
    }

    /// Undoes [`Store::freeze`].
    pub(crate) fn thaw(&self) {
        self.signal("-CONT");
    }

    fn signal(&self, signal: &str) {
        let done = Command::new("kill")
            .args([signal, &self.child.id().to_string()])
            .status()
            .unwrap();
        assert!(done.success());
    }

    /// Ends the process at once.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Starts it again on the same port, empty.
    pub(crate) async fn restart(&mut self) {
        let end = Instant::now() + PATIENCE;
        loop {
            self.child = spawn(self.program, &self.arguments, &self.folder, self.port);
            if self.answers().await {
                return;
            }
            assert!(Instant::now() < end, "{} does not start again", self.program);
        }
    }
}

fn spawn(program: &str, arguments: &[String], folder: &TempDir, port: u16) -> Child {
    Command::new(program)
        .args([
            "--port",
            &port.to_string(),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
        ])
        .arg(folder.path())
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap_or_else(|error| panic!("{program}: {error}"))
}

/// The limiter's part of a configuration.
pub(crate) fn limiter_config(url: &str, op_timeout_ms: u64) -> LimiterConfig {
    let text = format!(
        r#"{{"profile": "development", "listen": "127.0.0.1:0",
            "limiter": {{"url": "{url}", "op_timeout_ms": {op_timeout_ms}}}}}"#
    );
    ServiceConfig::parse(text.as_bytes(), &Environment::default())
        .unwrap()
        .limiter
}

/// A limiter as the service opens it.
pub(crate) fn open(url: &str, op_timeout_ms: u64) -> Arc<dyn Limiter> {
    limiter::open(&limiter_config(url, op_timeout_ms)).unwrap().unwrap()
}

/// The same, with a prefix of its own in a store that is shared.
pub(crate) fn open_under(url: &str, op_timeout_ms: u64, prefix: &str) -> Arc<dyn Limiter> {
    let mut config = limiter_config(url, op_timeout_ms);
    prefix.clone_into(&mut config.key_prefix);
    limiter::open(&config).unwrap().unwrap()
}
