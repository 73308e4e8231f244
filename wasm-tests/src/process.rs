//! A child process with its output in a file, killed when it goes out of scope, and ports for processes that can't be
//! asked for one.

use std::collections::HashSet;
use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{LazyLock, Mutex};
use std::time::Instant;

use rand::Rng;
use serde_json::Value;

pub(crate) struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `command` with both output streams in the file `log`.
    pub(crate) fn spawn(command: &mut Command, log: &Path) -> Self {
        let out = File::create(log).expect("the log file can be created");
        let err = out.try_clone().expect("the log file can be shared");
        let child = command
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?} does not start: {error}"));
        Self {
            child,
            log: log.to_owned(),
        }
    }

    pub(crate) fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("the child can be asked")
    }

    /// Everything that it wrote so far; bytes that aren't UTF-8 are replaced.
    pub(crate) fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Its resident memory in kB (Linux).
    pub(crate) fn resident_kb(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("the process runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let figure = line.and_then(|line| line.split_whitespace().next());
        figure.and_then(|kb| kb.parse().ok()).expect("a figure in kB")
    }

    /// Sends a signal by name (`TERM`, `STOP`, `CONT`).
    pub(crate) fn signal(&self, name: &str) {
        let status = Command::new("kill")
            .args([format!("-{name}"), self.child.id().to_string()])
            .status()
            .expect("kill can be run");
        assert!(status.success(), "kill -{name} failed");
    }

    /// SIGSTOP, and waits until every thread has stopped: until then the process may still answer.
    pub(crate) fn freeze(&self) {
        self.signal("STOP");
        let start = Instant::now();
        while !self.is_frozen() {
            assert!(start.elapsed() < crate::DEADLINE, "the process does not stop");
            std::thread::yield_now();
        }
    }

    fn is_frozen(&self) -> bool {
        let threads = fs::read_dir(format!("/proc/{}/task", self.child.id())).expect("the process runs");
        threads.flatten().all(|thread| {
            let status = fs::read_to_string(thread.path().join("status")).unwrap_or_default();
            // A thread that has ended meanwhile is as good.
            status.is_empty() || status.lines().any(|line| line.starts_with("State:\tT"))
        })
    }

    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        // The log file goes away with its folder; a failed test still has it in its own output.
        if std::thread::panicking() {
            let log = self.log();
            let tail: Vec<_> = log.lines().rev().take(25).collect();
            eprintln!("--- end of {}", self.log.display());
            tail.iter().rev().for_each(|line| eprintln!("{line:.500}"));
        }
    }
}

/// The JSON object of each log line that holds one, whatever stands before it.
pub(crate) fn json_lines(log: &str) -> Vec<Value> {
    log.lines()
        .filter_map(|line| line.find('{').and_then(|at| serde_json::from_str(&line[at..]).ok()))
        .filter(Value::is_object)
        .collect()
}

/// A port that nothing listens on and that no other caller in this process gets. It lies below the range of ports that the
/// kernel gives to outgoing connections, so it stays free until it is used.
pub fn free_port() -> u16 {
    static GIVEN: LazyLock<Mutex<HashSet<u16>>> = LazyLock::new(Mutex::default);
    let mut given = GIVEN.lock().unwrap();
    loop {
        let port = rand::rng().random_range(15_000..32_000);
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() && given.insert(port) {
            return port;
        }
    }
}

/// An address that refuses connections.
pub fn closed_port() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()))
}
