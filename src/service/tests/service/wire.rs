//! A client small enough to see what it sends: HTTP/1.1 on one kept connection. And requests as filters make them.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;

/// One answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// One connection.
pub(crate) struct Client(BufReader<TcpStream>);

impl Client {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        Self(BufReader::new(
            TcpStream::connect(address).await.expect("the service accepts"),
        ))
    }

    pub(crate) async fn send(&mut self, method: &str, path: &str, body: &str) -> Answer {
        self.write(&head(method, path, body.len())).await;
        self.write(body).await;
        self.answer().await
    }

    pub(crate) async fn write(&mut self, text: &str) {
        self.0
            .get_mut()
            .write_all(text.as_bytes())
            .await
            .expect("the service reads");
    }

    pub(crate) async fn answer(&mut self) -> Answer {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            let read = self.0.read_line(&mut head).await.expect("the service answers");
            assert!(read > 0, "the connection ended after {head:?}");
        }
        let head = head.to_ascii_lowercase();
        let length = head
            .split("content-length: ")
            .nth(1)
            .and_then(|rest| rest.split("\r\n").next())
            .expect("a length");
        let mut body = vec![0; length.parse().expect("a length")];
        self.0.read_exact(&mut body).await.expect("a whole body");
        let status = head
            .split(' ')
            .nth(1)
            .and_then(|status| status.parse().ok())
            .expect("a status");
        Answer {
            status,
            body: String::from_utf8(body).expect("UTF-8"),
            head,
        }
    }

    /// Waits until the service closes this connection, and fails if it says anything before.
    pub(crate) async fn closed(&mut self) {
        let mut rest = Vec::new();
        self.0.read_to_end(&mut rest).await.expect("a clean end");
        assert!(rest.is_empty(), "{}", String::from_utf8_lossy(&rest));
    }
}

pub(crate) fn head(method: &str, path: &str, length: usize) -> String {
    format!("{method} {path} HTTP/1.1\r\nhost: portcullis\r\ncontent-length: {length}\r\n\r\n")
}

/// A new operation id.
pub(crate) fn op() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    format!("{:032x}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// A request under `contract-limits`, 30 requests for the owner `o`, with other keys on top.
pub(crate) fn request(changes: Value) -> Value {
    let mut request = json!({
        "op": op(), "profile": "development", "rules": "contract-limits", "mode": "enforce",
        "gates": [{"gate": "contract", "when_unavailable": "admit", "limits": "envelope"}],
        "budget_ms": 5000, "window_s": 60, "subject": {"owner": "o"}, "limits": {"owner": {"requests": 30}},
        "tokens": 1024, "request_id": "r-1"
    });
    request
        .as_object_mut()
        .expect("an object")
        .extend(changes.as_object().expect("an object").clone());
    request
}
