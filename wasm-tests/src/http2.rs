//! An HTTP/2 client with prior knowledge (h2c): trailers, gRPC callers, many streams on one connection, and streams that
//! are reset at a chosen point.

use std::net::SocketAddr;
use std::time::Instant;

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::{Reason, SendStream};
use http::{HeaderMap, HeaderName, HeaderValue, Request};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::{Answer, Call, DEADLINE};

/// One HTTP/2 connection.
pub struct Http2 {
    send: SendRequest<Bytes>,
}

/// A request whose headers were sent.
pub struct OpenStream {
    answer: ResponseFuture,
    body: SendStream<Bytes>,
    sent: Instant,
}

impl Http2 {
    pub async fn open(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address)
            .await
            .unwrap_or_else(|error| panic!("connect {address}: {error}"));
        let (send, connection) = h2::client::handshake(stream).await.expect("an HTTP/2 handshake");
        tokio::spawn(connection);
        Self { send }
    }

    /// Sends the whole request and reads the whole answer.
    pub async fn call(&self, call: &Call) -> Answer {
        let mut stream = self.begin(call, false).await;
        stream.finish(call);
        stream.answer().await
    }

    /// Sends the headers, and nothing more if `keep_open`; otherwise a request without body and trailers ends here.
    pub async fn begin(&self, call: &Call, keep_open: bool) -> OpenStream {
        let mut request = Request::builder()
            .method(call.method.as_str())
            .uri(format!("http://gateway{}", call.path));
        for (name, value) in &call.headers {
            request = request.header(
                name,
                HeaderValue::from_bytes(value).expect("a value that HTTP/2 can carry"),
            );
        }
        let ends = !keep_open && call.body.is_none() && call.trailers.is_empty();
        let mut send = self.send.clone().ready().await.expect("the connection takes a stream");
        let (answer, body) = send
            .send_request(request.body(()).unwrap(), ends)
            .expect("the stream opens");
        OpenStream {
            answer,
            body,
            sent: Instant::now(),
        }
    }
}

impl OpenStream {
    /// Sends the body and the trailers of `call`.
    pub fn finish(&mut self, call: &Call) {
        if let Some(body) = &call.body {
            self.data(body, call.trailers.is_empty());
        }
        if !call.trailers.is_empty() {
            self.body
                .send_trailers(header_map(&call.trailers))
                .expect("the stream takes trailers");
        }
        self.sent = Instant::now();
    }

    pub fn data(&mut self, body: &[u8], end: bool) {
        self.body
            .send_data(Bytes::copy_from_slice(body), end)
            .expect("the stream takes data");
    }

    /// `RST_STREAM` with CANCEL.
    pub fn reset(mut self) {
        self.body.send_reset(Reason::CANCEL);
    }

    /// Waits for the answer's headers only, and gives the status.
    pub async fn head(&mut self) -> u16 {
        let answer = timeout(DEADLINE, &mut self.answer)
            .await
            .expect("an answer within the deadline");
        answer.expect("an answer").status().as_u16()
    }

    pub async fn answer(self) -> Answer {
        let sent = self.sent;
        let answer = timeout(DEADLINE, async {
            let (head, mut stream) = self.answer.await.expect("an answer").into_parts();
            let mut body = Vec::new();
            while let Some(data) = stream.data().await {
                let data = data.expect("the body is whole");
                body.extend_from_slice(&data);
                let _ = stream.flow_control().release_capacity(data.len());
            }
            let trailers = stream.trailers().await.expect("whole trailers").unwrap_or_default();
            Answer {
                status: head.status.as_u16(),
                headers: pairs(&head.headers),
                body,
                trailers: pairs(&trailers),
                took: sent.elapsed(),
            }
        });
        answer.await.expect("a whole answer within the deadline")
    }
}

fn pairs(map: &HeaderMap) -> Vec<(String, String)> {
    map.iter()
        .map(|(name, value)| (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned()))
        .collect()
}

pub(crate) fn header_map(pairs: &[(String, String)]) -> HeaderMap {
    pairs
        .iter()
        .map(|(name, value)| {
            (
                HeaderName::try_from(name.as_str()).unwrap(),
                HeaderValue::try_from(value.as_str()).unwrap(),
            )
        })
        .collect()
}
