//! An HTTP/1.1 client that writes exactly the bytes it is told to, so that duplicates, bytes that aren't UTF-8 and resets
//! at chosen points can be sent. What HTTP/2 needs is in `http2.rs`.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::{DEADLINE, Envelope};

/// A request, for HTTP/1.1 and HTTP/2 alike.
#[derive(Clone, Debug)]
pub struct Call {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) headers: Vec<(String, Vec<u8>)>,
    pub(crate) body: Option<Vec<u8>>,
    pub(crate) trailers: Vec<(String, String)>,
}

impl Call {
    pub fn new(method: &str, path: &str) -> Self {
        Self {
            method: method.to_owned(),
            path: path.to_owned(),
            headers: Vec::new(),
            body: None,
            trailers: Vec::new(),
        }
    }

    pub fn get(path: &str) -> Self {
        Self::new("GET", path)
    }

    pub fn post(path: &str, body: impl Into<Vec<u8>>) -> Self {
        Self {
            body: Some(body.into()),
            ..Self::new("POST", path)
        }
    }

    /// Adds a header line; a name given twice is sent twice, and the value may hold any bytes.
    #[must_use]
    pub fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.headers.push((name.to_owned(), value.as_ref().to_owned()));
        self
    }

    #[must_use]
    pub fn envelope(self, envelope: &Envelope) -> Self {
        envelope
            .headers()
            .iter()
            .fold(self, |call, (name, value)| call.header(name, value))
    }

    /// Trailers of the request (HTTP/2 only).
    #[must_use]
    pub fn trailer(mut self, name: &str, value: &str) -> Self {
        self.trailers.push((name.to_owned(), value.to_owned()));
        self
    }

    pub fn path(&self) -> &str {
        &self.path
    }

    /// The header section, up to and with the empty line.
    pub fn head(&self) -> Vec<u8> {
        let mut head = format!("{} {} HTTP/1.1\r\nhost: gateway\r\n", self.method, self.path).into_bytes();
        for (name, value) in &self.headers {
            head.extend_from_slice(name.as_bytes());
            head.extend_from_slice(b": ");
            head.extend_from_slice(value);
            head.extend_from_slice(b"\r\n");
        }
        if let Some(body) = &self.body {
            head.extend_from_slice(format!("content-length: {}\r\n", body.len()).as_bytes());
        }
        head.extend_from_slice(b"\r\n");
        head
    }

    /// The whole request.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.head();
        bytes.extend_from_slice(self.body.as_deref().unwrap_or_default());
        bytes
    }
}

/// An answer, with the time from the last byte sent to the last byte read.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    pub trailers: Vec<(String, String)>,
    pub took: Duration,
}

impl Answer {
    /// The only value of a header; none if it is absent.
    ///
    /// # Panics
    /// When it was sent twice.
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut values = self
            .headers
            .iter()
            .filter(|(key, _)| key == name)
            .map(|(_, value)| value.as_str());
        let first = values.next();
        assert!(values.next().is_none(), "{name} was sent twice: {self:?}");
        first
    }

    pub fn trailer(&self, name: &str) -> Option<&str> {
        self.trailers
            .iter()
            .find(|(key, _)| key == name)
            .map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body's `error` object.
    ///
    /// # Panics
    /// When there is none.
    pub fn error(&self) -> Value {
        let body: Value = serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("not JSON ({error}): {} {:?}", self.status, self.text()));
        assert!(body["error"].is_object(), "no error object: {} {body}", self.status);
        body["error"].clone()
    }

    /// `error.code`, or the empty string.
    pub fn code(&self) -> String {
        let body: Value = serde_json::from_slice(&self.body).unwrap_or_default();
        body["error"]["code"].as_str().unwrap_or_default().to_owned()
    }

    pub fn retry_after(&self) -> Option<u64> {
        self.header("retry-after")
            .map(|value| value.parse().unwrap_or_else(|_| panic!("retry-after: {value}")))
    }
}

/// One HTTP/1.1 connection.
pub struct Connection {
    stream: TcpStream,
    buffered: Vec<u8>,
    sent: Instant,
}

impl Connection {
    pub async fn open(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address)
            .await
            .unwrap_or_else(|error| panic!("connect {address}: {error}"));
        stream.set_nodelay(true).unwrap();
        Self {
            stream,
            buffered: Vec::new(),
            sent: Instant::now(),
        }
    }

    pub async fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.expect("the gateway takes the bytes");
        self.sent = Instant::now();
    }

    pub async fn call(&mut self, call: &Call) -> Answer {
        self.send(&call.bytes()).await;
        self.answer(&call.method).await
    }

    /// Where the other side may go away at any moment: none if it did.
    pub(crate) async fn try_call(address: SocketAddr, call: &Call) -> Option<Answer> {
        Self::try_open(address).await?.ask(call).await
    }

    /// The same as `open`, where nobody may listen: none if so.
    pub async fn try_open(address: SocketAddr) -> Option<Self> {
        let stream = TcpStream::connect(address).await.ok()?;
        stream.set_nodelay(true).ok()?;
        Some(Self {
            stream,
            buffered: Vec::new(),
            sent: Instant::now(),
        })
    }

    /// The same as `call`, where the other side may go away at any moment: none if it did.
    pub async fn ask(&mut self, call: &Call) -> Option<Answer> {
        self.stream.write_all(&call.bytes()).await.ok()?;
        self.sent = Instant::now();
        timeout(DEADLINE, self.read_answer(&call.method)).await.ok()?
    }

    /// Closes with a TCP reset, as a client that crashed.
    pub fn reset(self) {
        self.stream.set_zero_linger().expect("linger can be set");
    }

    /// Reads one answer; an interim 100 before it is passed over.
    ///
    /// # Panics
    /// When the connection ends before it is whole, or nothing comes until the deadline: both mean that a request was
    /// lost.
    pub async fn answer(&mut self, method: &str) -> Answer {
        match timeout(DEADLINE, self.read_answer(method)).await {
            Ok(Some(answer)) => answer,
            Ok(None) => panic!(
                "connection closed in the middle of an answer, after {:?}",
                self.so_far()
            ),
            Err(_) => panic!("no whole answer within {DEADLINE:?}, only {:?}", self.so_far()),
        }
    }

    /// Reads until a header section is whole, and gives its status; the body is left.
    pub async fn answer_head(&mut self) -> u16 {
        let head = timeout(DEADLINE, self.read_head())
            .await
            .expect("an answer within the deadline");
        head.expect("an answer's headers").status
    }

    /// Reads until these bytes have come, headers and chunk sizes included; what came stays to be read.
    ///
    /// # Panics
    /// When the connection ends first, or they don't come until the deadline.
    pub async fn await_bytes(&mut self, bytes: &[u8]) {
        let came = timeout(DEADLINE, async {
            while !self.buffered.windows(bytes.len()).any(|window| window == bytes) {
                if !self.fill().await {
                    return false;
                }
            }
            true
        });
        let came = came.await.unwrap_or(false);
        assert!(
            came,
            "no {:?} came, only {:?}",
            String::from_utf8_lossy(bytes),
            self.so_far()
        );
    }

    /// Reads everything until the other side closes, as it comes: of an answer that may be cut.
    ///
    /// # Panics
    /// When it doesn't close until the deadline.
    pub async fn rest(&mut self) -> Vec<u8> {
        let closed = timeout(DEADLINE, async { while self.fill().await {} }).await;
        assert!(closed.is_ok(), "not closed within {DEADLINE:?}: {:?}", self.so_far());
        std::mem::take(&mut self.buffered)
    }

    /// Reads everything until the other side closes, keeps none of it, and gives its length.
    ///
    /// # Panics
    /// When nothing comes until the deadline.
    pub async fn drain(&mut self) -> usize {
        let mut length = 0;
        while timeout(DEADLINE, self.fill()).await.expect("bytes, or the end") {
            length += std::mem::take(&mut self.buffered).len();
        }
        length
    }

    fn so_far(&self) -> String {
        String::from_utf8_lossy(&self.buffered).into_owned()
    }

    async fn fill(&mut self) -> bool {
        let mut chunk = [0_u8; 16_384];
        match self.stream.read(&mut chunk).await {
            Ok(0) | Err(_) => false,
            Ok(count) => {
                self.buffered.extend_from_slice(&chunk[..count]);
                true
            }
        }
    }

    async fn take(&mut self, count: usize) -> Option<Vec<u8>> {
        while self.buffered.len() < count {
            if !self.fill().await {
                return None;
            }
        }
        Some(self.buffered.drain(..count).collect())
    }

    /// Takes up to and with `end`, and gives it without `end`.
    async fn take_to(&mut self, end: &[u8]) -> Option<Vec<u8>> {
        loop {
            if let Some(at) = self.buffered.windows(end.len()).position(|window| window == end) {
                let mut taken: Vec<u8> = self.buffered.drain(..at + end.len()).collect();
                taken.truncate(at);
                return Some(taken);
            }
            if !self.fill().await {
                return None;
            }
        }
    }

    async fn read_head(&mut self) -> Option<Answer> {
        let head = self.take_to(b"\r\n\r\n").await?;
        let head = String::from_utf8_lossy(&head).into_owned();
        let mut lines = head.split("\r\n");
        let status = lines.next()?.split(' ').nth(1)?.parse().ok()?;
        let headers = lines
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
            .collect();
        Some(Answer {
            status,
            headers,
            ..Answer::default()
        })
    }

    async fn read_answer(&mut self, method: &str) -> Option<Answer> {
        let mut answer = self.read_head().await?;
        while answer.status == 100 {
            answer = self.read_head().await?;
        }
        let bodiless = method == "HEAD" || answer.status == 204 || answer.status == 304;
        if bodiless {
        } else if answer
            .header("transfer-encoding")
            .is_some_and(|value| value.contains("chunked"))
        {
            loop {
                let size = self.take_to(b"\r\n").await?;
                let size = usize::from_str_radix(std::str::from_utf8(&size).ok()?.trim(), 16).ok()?;
                let chunk = self.take(size + 2).await?;
                answer.body.extend_from_slice(&chunk[..size]);
                if size == 0 {
                    break;
                }
            }
        } else if let Some(length) = answer.header("content-length") {
            let length = length.parse().ok()?;
            answer.body = self.take(length).await?;
        } else {
            while self.fill().await {}
            answer.body = std::mem::take(&mut self.buffered);
        }
        answer.took = self.sent.elapsed();
        Some(answer)
    }
}
