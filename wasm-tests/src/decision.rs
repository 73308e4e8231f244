//! A scripted decision service: it admits, denies, or fails in one of the ways a service on a network can fail, and
//! records what it was asked. It holds no counters; what the real one decides is tested with the real one.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::{DEADLINE, until};

/// How `/v1/decide` is answered.
#[derive(Clone, Debug)]
pub enum Decision {
    Admit,
    AdmitAfter(Duration),
    /// `{"verdict": "deny", …}` with these fields.
    Deny(Value),
    /// A 200 with the operation id and these fields.
    Verdict(Value),
    /// Admits another operation.
    OtherOperation,
    /// This status, with a body that would admit.
    Status(u16),
    /// A 200 with exactly these bytes.
    Body(Vec<u8>),
    /// The connection stays open and silent.
    Hang,
    /// The connection is closed in place of an answer.
    Drop,
    /// The connection is closed after the headers and half of the body.
    DieMidBody,
}

struct Shared {
    decision: Mutex<Decision>,
    decides: Mutex<Vec<Value>>,
    heads: Mutex<Vec<http::HeaderMap>>,
    settles: Mutex<Vec<Value>>,
    /// Requests that a connection answers before it is dropped, as a server does whose keep-alive ran out.
    answers_per_connection: AtomicUsize,
}

/// A running scripted service; it stops when dropped.
pub struct FakeDecision {
    pub address: SocketAddr,
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
}

impl FakeDecision {
    pub async fn start(decision: Decision) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            decision: Mutex::new(decision),
            decides: Mutex::default(),
            heads: Mutex::default(),
            settles: Mutex::default(),
            answers_per_connection: AtomicUsize::new(usize::MAX),
        });
        let accepting = tokio::spawn(accept(listener, Arc::clone(&shared)));
        Self {
            address,
            shared,
            accepting,
        }
    }

    pub fn behave(&self, decision: Decision) {
        *self.shared.decision.lock().unwrap() = decision;
    }

    pub fn answers_per_connection(&self, count: usize) {
        self.shared.answers_per_connection.store(count, Ordering::SeqCst);
    }

    /// The bodies of all `/v1/decide` calls, answered or not.
    pub fn decides(&self) -> Vec<Value> {
        self.shared.decides.lock().unwrap().clone()
    }

    /// The values of a header of all `/v1/decide` calls, in order; of each call all lines.
    pub fn decide_headers(&self, name: &str) -> Vec<Vec<String>> {
        let heads = self.shared.heads.lock().unwrap();
        let text = |value: &http::HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
        heads
            .iter()
            .map(|head| head.get_all(name).iter().map(text).collect())
            .collect()
    }

    pub async fn await_decides(&self, count: usize) -> Vec<Value> {
        until(&format!("{count} decide calls"), DEADLINE, async || {
            Some(self.decides()).filter(|decides| decides.len() >= count)
        })
        .await
    }

    /// The bodies of all `/v1/settle` calls.
    pub fn settles(&self) -> Vec<Value> {
        self.shared.settles.lock().unwrap().clone()
    }

    /// The operation ids under `list` (`releases`, `renewals`, `cancels`) of all settles, in order.
    pub fn settled(&self, list: &str) -> Vec<String> {
        let settles = self.settles();
        let ids = settles.iter().filter_map(|settle| settle[list].as_array()).flatten();
        ids.filter_map(Value::as_str).map(str::to_owned).collect()
    }
}

impl Drop for FakeDecision {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    while let Ok((stream, _)) = listener.accept().await {
        let _ = stream.set_nodelay(true);
        let shared = Arc::clone(&shared);
        let served = Arc::new(AtomicUsize::new(0));
        tokio::spawn(async move {
            let service = service_fn(move |request| answer(request, Arc::clone(&shared), Arc::clone(&served)));
            let _ = auto::Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

/// An error makes the server drop the connection without an answer.
async fn answer(
    request: Request<Incoming>,
    shared: Arc<Shared>,
    served: Arc<AtomicUsize>,
) -> Result<Response<Written>, io::Error> {
    let path = request.uri().path().to_owned();
    let head = request.headers().clone();
    let body = request
        .into_body()
        .collect()
        .await
        .map_err(io::Error::other)?
        .to_bytes();
    let asked: Value = serde_json::from_slice(&body).unwrap_or_default();
    if path == "/v1/decide" {
        shared.heads.lock().unwrap().push(head);
        shared.decides.lock().unwrap().push(asked.clone());
    }
    if served.fetch_add(1, Ordering::SeqCst) >= shared.answers_per_connection.load(Ordering::SeqCst) {
        return Err(io::ErrorKind::ConnectionReset.into());
    }
    let decision = shared.decision.lock().unwrap().clone();
    if path != "/v1/decide" {
        if path == "/v1/settle" {
            shared.settles.lock().unwrap().push(asked.clone());
        }
        match decision {
            Decision::Hang => std::future::pending().await,
            Decision::Drop => return Err(io::ErrorKind::ConnectionReset.into()),
            _ => return Ok(respond(200, br#"{"lost":[]}"#.to_vec())),
        }
    }
    let operation = asked["op"].clone();
    let verdict = |fields: Value| {
        let mut whole = json!({"op": operation});
        whole
            .as_object_mut()
            .unwrap()
            .extend(fields.as_object().cloned().unwrap_or_default());
        whole.to_string().into_bytes()
    };
    let admit = || verdict(json!({"verdict": "admit"}));
    Ok(match decision {
        Decision::Admit => respond(200, admit()),
        Decision::AdmitAfter(delay) => {
            tokio::time::sleep(delay).await;
            respond(200, admit())
        }
        Decision::Deny(mut fields) => {
            fields["verdict"] = json!("deny");
            respond(200, verdict(fields))
        }
        Decision::Verdict(fields) => respond(200, verdict(fields)),
        Decision::OtherOperation => respond(200, verdict(json!({"op": "0".repeat(32), "verdict": "admit"}))),
        Decision::Status(status) => respond(status, admit()),
        Decision::Body(bytes) => respond(200, bytes),
        Decision::Hang => std::future::pending().await,
        Decision::Drop => return Err(io::ErrorKind::ConnectionReset.into()),
        Decision::DieMidBody => {
            let mut response = respond(200, admit()[..10].to_vec());
            response.body_mut().dies = true;
            response
        }
    })
}

fn respond(status: u16, body: Vec<u8>) -> Response<Written> {
    let mut response = Response::new(Written {
        body: Some(Bytes::from(body)),
        dies: false,
    });
    *response.status_mut() = status.try_into().expect("a status");
    response
        .headers_mut()
        .insert("content-type", http::HeaderValue::from_static("application/json"));
    response
}

/// A body of one piece that may end in an error.
struct Written {
    body: Option<Bytes>,
    dies: bool,
}

impl Body for Written {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        Poll::Ready(match self.body.take() {
            Some(body) => Some(Ok(Frame::data(body))),
            None if self.dies => Some(Err(io::ErrorKind::ConnectionReset.into())),
            None => None,
        })
    }
}
