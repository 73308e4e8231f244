//! The official Python clients of the providers, in a process of their own: a script of `clients/` that makes one call for
//! each line that it is sent.

use std::net::SocketAddr;
use std::process::Stdio;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

use crate::{DEADLINE, Envelope, locate, repository};

/// A running script; killed when dropped.
pub struct PythonClient {
    _child: Child,
    calls: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl PythonClient {
    /// # Panics
    /// Where `scripts/setup` has not installed the clients.
    pub fn start(script: &str) -> Self {
        let mut child = Command::new(locate::clients_python())
            .arg(repository().join("wasm-tests/clients").join(script))
            // Neither files beside the sources, nor another machine's proxy between client and gateway.
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env("NO_PROXY", "*")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap_or_else(|error| panic!("{script} does not start: {error}"));
        let (calls, answers) = (child.stdin.take(), child.stdout.take());
        Self {
            _child: child,
            calls: calls.expect("its input is a pipe"),
            answers: BufReader::new(answers.expect("its output is a pipe")).lines(),
        }
    }

    /// Makes one call: `kind` and `model` in `asked`, and `text`, `more` and `max_retries` where they aren't the usual ones.
    ///
    /// # Panics
    /// When the script ends or says nothing; its own message is on standard error.
    pub async fn call(&mut self, gateway: SocketAddr, envelope: &Envelope, mut asked: Value) -> Value {
        asked["base_url"] = json!(format!("http://{gateway}"));
        asked["headers"] = envelope
            .headers()
            .iter()
            .map(|(name, value)| (name.clone(), json!(value)))
            .collect();
        let line = format!("{asked}\n");
        self.calls
            .write_all(line.as_bytes())
            .await
            .expect("the script reads its calls");
        let answer = timeout(DEADLINE * 4, self.answers.next_line()).await;
        let answer = answer.unwrap_or_else(|_| panic!("no answer to {asked}"));
        let answer = answer
            .expect("the answer is text")
            .unwrap_or_else(|| panic!("the script ended at {asked}"));
        serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{error}: {answer}"))
    }
}
