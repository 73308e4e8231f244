//! The protected upstream: an HTTP/1.1 and h2c server that counts every request whose headers arrive, records it, and
//! answers as the test says. A hit counts when the headers come, since a closed gateway must not send even those.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::SystemTime;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use crate::http2::header_map;
use crate::{DEADLINE, until};

/// What the upstream answers.
#[derive(Clone, Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: String,
    pub trailers: Vec<(String, String)>,
    /// Send nothing until `Upstream::release`.
    pub hold: bool,
    /// Send the headers and the body, and end the answer at `Upstream::release`.
    pub stream: bool,
}

impl Default for Reply {
    fn default() -> Self {
        Self {
            status: 200,
            headers: Vec::new(),
            body: "served".to_owned(),
            trailers: Vec::new(),
            hold: false,
            stream: false,
        }
    }
}

/// A request that arrived.
#[derive(Clone, Debug)]
pub struct Seen {
    pub method: String,
    pub path: String,
    pub headers: HashMap<String, String>,
    /// Every header line, as bytes: those of one name in their order.
    pub lines: Vec<(String, Vec<u8>)>,
    pub body: Vec<u8>,
    pub trailers: HashMap<String, String>,
}

struct Shared {
    hits: AtomicUsize,
    /// When a request for each path came.
    arrivals: Mutex<HashMap<String, Vec<SystemTime>>>,
    seen: Mutex<Vec<Seen>>,
    reply: Mutex<Reply>,
    released: watch::Sender<bool>,
}

/// A running upstream; it stops when dropped.
pub struct Upstream {
    pub address: SocketAddr,
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
}

impl Upstream {
    pub async fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            hits: AtomicUsize::new(0),
            arrivals: Mutex::default(),
            seen: Mutex::default(),
            reply: Mutex::default(),
            released: watch::Sender::new(false),
        });
        let accepting = tokio::spawn(accept(listener, Arc::clone(&shared)));
        Self {
            address,
            shared,
            accepting,
        }
    }

    /// How many requests reached it.
    pub fn hits(&self) -> usize {
        self.shared.hits.load(Ordering::SeqCst)
    }

    /// When each of the requests for this path came, in the order of their coming.
    pub fn arrivals(&self, path: &str) -> Vec<SystemTime> {
        self.shared
            .arrivals
            .lock()
            .unwrap()
            .get(path)
            .cloned()
            .unwrap_or_default()
    }

    pub async fn await_hits(&self, count: usize) {
        until(&format!("{count} upstream hits"), DEADLINE, async || {
            (self.hits() >= count).then_some(())
        })
        .await;
        assert_eq!(self.hits(), count, "upstream hits");
    }

    /// The requests whose bodies arrived whole.
    pub fn seen(&self) -> Vec<Seen> {
        self.shared.seen.lock().unwrap().clone()
    }

    /// The newest request.
    ///
    /// # Panics
    /// When there is none.
    pub fn last(&self) -> Seen {
        self.seen().pop().expect("a request reached the upstream")
    }

    pub fn reply(&self, reply: Reply) {
        self.shared.released.send_replace(false);
        *self.shared.reply.lock().unwrap() = reply;
    }

    /// Lets every held or streaming answer go on to its end.
    pub fn release(&self) {
        self.shared.released.send_replace(true);
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    while let Ok((stream, _)) = listener.accept().await {
        let _ = stream.set_nodelay(true);
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            let service = service_fn(move |request| answer(request, Arc::clone(&shared)));
            let _ = auto::Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

/// As the example's upstream: asked directly, it tells the count without adding to it.
const COUNT: &str = "/-/hits";

async fn answer(request: Request<Incoming>, shared: Arc<Shared>) -> Result<Response<Frames>, Infallible> {
    if request.uri().path() == COUNT {
        let (send, frames) = mpsc::channel(1);
        let hits = format!("{{\"hits\": {}}}", shared.hits.load(Ordering::SeqCst));
        let _ = send.try_send(Frame::data(Bytes::from(hits)));
        return Ok(Response::new(Frames(frames)));
    }
    shared.hits.fetch_add(1, Ordering::SeqCst);
    shared
        .arrivals
        .lock()
        .unwrap()
        .entry(request.uri().path().to_owned())
        .or_default()
        .push(SystemTime::now());
    let (head, body) = request.into_parts();
    if let Ok(whole) = body.collect().await {
        let trailers = whole.trailers().map(text_map).unwrap_or_default();
        shared.seen.lock().unwrap().push(Seen {
            method: head.method.to_string(),
            path: head.uri.path_and_query().map(ToString::to_string).unwrap_or_default(),
            headers: text_map(&head.headers),
            lines: lines(&head.headers),
            body: whole.to_bytes().to_vec(),
            trailers,
        });
    }
    let reply = shared.reply.lock().unwrap().clone();
    let mut released = shared.released.subscribe();
    if reply.hold {
        let _ = released.wait_for(|released| *released).await;
    }
    let (send, frames) = mpsc::channel(4);
    if !reply.body.is_empty() && head.method != http::Method::HEAD {
        let _ = send.try_send(Frame::data(Bytes::from(reply.body)));
    }
    tokio::spawn(async move {
        if reply.stream {
            tokio::select! {
                _ = released.wait_for(|released| *released) => {}
                () = send.closed() => {}
            }
        }
        if !reply.trailers.is_empty() {
            let _ = send.send(Frame::trailers(header_map(&reply.trailers))).await;
        }
    });
    let mut response = Response::new(Frames(frames));
    *response.status_mut() = reply.status.try_into().expect("a status");
    response.headers_mut().extend(header_map(&reply.headers));
    Ok(response)
}

fn lines(map: &http::HeaderMap) -> Vec<(String, Vec<u8>)> {
    map.iter()
        .map(|(name, value)| (name.to_string(), value.as_bytes().to_vec()))
        .collect()
}

fn text_map(map: &http::HeaderMap) -> HashMap<String, String> {
    map.iter()
        .map(|(name, value)| (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned()))
        .collect()
}

/// A body that is fed from elsewhere and ends when the sender is dropped.
pub(crate) struct Frames(pub(crate) mpsc::Receiver<Frame<Bytes>>);

impl Body for Frames {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|frame| frame.map(Ok))
    }
}
