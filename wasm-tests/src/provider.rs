//! A stand-in for the paid providers: OpenAI's chat completions, responses and embeddings, Anthropic's messages and
//! Gemini's `generateContent`, as documents and as streams, over HTTP/1.1 and h2c.
//!
//! What it reports as used is computed: a token for each word of the input, and as much output as the request allows, up to
//! a small natural length. It counts hits when headers arrive, keeps every body byte for byte, and fails as it is told.

mod answer;
mod asked;
mod gzip;
mod openai;
mod others;

use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, header};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use crate::{DEADLINE, until};
use answer::Written;
use asked::{Asked, Interface};

/// How the provider answers; well, by default.
#[derive(Clone, Debug, Default)]
pub struct Behaviour {
    /// Fails with this status.
    pub fail: Option<u16>,
    /// Sends nothing until `Provider::release`.
    pub hold: bool,
    /// Sends so many events, and the rest at `Provider::release`.
    pub pause_after: Option<usize>,
    /// Closes the connection after so many events. A document counts as two.
    pub cut_after: Option<usize>,
    /// Cuts the bytes at these sizes, over and over, in place of one piece for each event.
    pub sizes: Vec<usize>,
    pub gzip: bool,
    /// Sends this in place of the answer's own bytes.
    pub bytes: Option<String>,
}

/// Tokens that a call has used, whether the answer says so or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    pub input: u64,
    pub output: u64,
}

impl Used {
    pub fn total(self) -> u64 {
        self.input + self.output
    }
}

#[derive(Default)]
struct Shared {
    hits: AtomicUsize,
    heads: Mutex<Vec<HeaderMap>>,
    bodies: Mutex<Vec<Vec<u8>>>,
    used: Mutex<Vec<Used>>,
    behaviour: Mutex<Behaviour>,
    released: watch::Sender<bool>,
}

/// A running provider; it stops when dropped.
pub struct Provider {
    pub address: SocketAddr,
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
}

impl Provider {
    pub async fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
        let address = listener.local_addr().unwrap();
        let shared = Arc::<Shared>::default();
        let accepting = tokio::spawn(accept(listener, Arc::clone(&shared)));
        Self {
            address,
            shared,
            accepting,
        }
    }

    pub fn behave(&self, behaviour: Behaviour) {
        self.shared.released.send_replace(false);
        *self.shared.behaviour.lock().unwrap() = behaviour;
    }

    /// Lets everything that waits go on.
    pub fn release(&self) {
        self.shared.released.send_replace(true);
    }

    /// How many requests reached it.
    pub fn hits(&self) -> usize {
        self.shared.hits.load(Ordering::SeqCst)
    }

    pub async fn await_hits(&self, count: usize) {
        until(&format!("{count} calls of the provider"), DEADLINE, async || {
            (self.hits() >= count).then_some(())
        })
        .await;
        assert_eq!(self.hits(), count, "calls of the provider");
    }

    /// The bodies that arrived whole, byte for byte.
    pub fn bodies(&self) -> Vec<Vec<u8>> {
        self.shared.bodies.lock().unwrap().clone()
    }

    /// # Panics
    /// When none arrived.
    pub fn last_body(&self) -> Vec<u8> {
        self.bodies().pop().expect("a body reached the provider")
    }

    /// A header of the newest request; none if it is absent.
    ///
    /// # Panics
    /// When there was no request.
    pub fn last_header(&self, name: &str) -> Option<String> {
        let heads = self.shared.heads.lock().unwrap();
        let value = heads.last().expect("a request reached the provider").get(name)?;
        Some(String::from_utf8_lossy(value.as_bytes()).into_owned())
    }

    /// What every call has used, in the order of their coming.
    pub fn used(&self) -> Vec<Used> {
        self.shared.used.lock().unwrap().clone()
    }

    /// What the newest call has used.
    ///
    /// # Panics
    /// When there was none.
    pub fn last_used(&self) -> Used {
        *self
            .shared
            .used
            .lock()
            .unwrap()
            .last()
            .expect("a call that was answered")
    }
}

impl Drop for Provider {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    while let Ok((stream, _)) = listener.accept().await {
        let _ = stream.set_nodelay(true);
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            let service = service_fn(move |request| serve(request, Arc::clone(&shared)));
            let _ = auto::Builder::new(TokioExecutor::new())
                .serve_connection_with_upgrades(TokioIo::new(stream), service)
                .await;
        });
    }
}

async fn serve(request: Request<Incoming>, shared: Arc<Shared>) -> Result<Response<Pieces>, Infallible> {
    shared.hits.fetch_add(1, Ordering::SeqCst);
    let (head, body) = request.into_parts();
    shared.heads.lock().unwrap().push(head.headers.clone());
    if head.headers.contains_key(header::UPGRADE) {
        return Ok(switch_protocols());
    }
    let Ok(body) = body.collect().await else {
        return Ok(respond(400, answer::failure(None, 400), &Behaviour::default(), &shared));
    };
    let body = body.to_bytes();
    shared.bodies.lock().unwrap().push(body.to_vec());
    let behaviour = shared.behaviour.lock().unwrap().clone();
    if behaviour.hold {
        let _ = shared.released.subscribe().wait_for(|released| *released).await;
    }
    let interface = Interface::of(head.uri.path());
    let path = head.uri.path_and_query().map(ToString::to_string).unwrap_or_default();
    let asked = interface.and_then(|interface| Asked::of(interface, &path, &body));
    let status = match (behaviour.fail, interface, &asked) {
        (Some(status), ..) => status,
        // What lists and describes has no body, and is no paid call.
        (None, None, _) => 200,
        (None, Some(_), None) => 400,
        (None, Some(_), Some(_)) => 200,
    };
    let written = match &asked {
        Some(asked) if status == 200 => {
            shared.used.lock().unwrap().push(Used {
                input: asked.input,
                output: asked.output(),
            });
            answer::answer(asked, head.uri.query().unwrap_or_default())
        }
        _ => answer::failure(interface, status),
    };
    Ok(respond(status, written, &behaviour, &shared))
}

fn switch_protocols() -> Response<Pieces> {
    let mut response = Response::new(Pieces(mpsc::channel(1).1));
    *response.status_mut() = http::StatusCode::SWITCHING_PROTOCOLS;
    for (name, value) in [(header::UPGRADE, "websocket"), (header::CONNECTION, "upgrade")] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

fn respond(status: u16, mut written: Written, behaviour: &Behaviour, shared: &Arc<Shared>) -> Response<Pieces> {
    if let Some(bytes) = &behaviour.bytes {
        written.pieces = vec![bytes.clone().into_bytes()];
    }
    if behaviour.gzip {
        written.compress();
    }
    if !behaviour.sizes.is_empty() {
        written.cut(&behaviour.sizes);
    }
    let (pause_after, cut_after) = (behaviour.pause_after, behaviour.cut_after);
    let mut released = shared.released.subscribe();
    let (send, pieces) = mpsc::channel(1);
    let mut response = Response::new(Pieces(pieces));
    tokio::spawn(async move {
        for (at, piece) in written.pieces.into_iter().enumerate() {
            if cut_after == Some(at) {
                let _ = send.send(Err(io::ErrorKind::ConnectionReset.into())).await;
                return;
            }
            if pause_after == Some(at) {
                tokio::select! {
                    _ = released.wait_for(|released| *released) => {}
                    () = send.closed() => return,
                }
            }
            if send.send(Ok(Frame::data(Bytes::from(piece)))).await.is_err() {
                return;
            }
            // So that the pieces go out one by one.
            tokio::task::yield_now().await;
        }
    });
    *response.status_mut() = status.try_into().expect("a status");
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(written.content_type));
    if behaviour.gzip {
        headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    response
}

/// A body that is fed from elsewhere; an error closes the connection.
struct Pieces(mpsc::Receiver<Result<Frame<Bytes>, io::Error>>);

impl Body for Pieces {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        self.0.poll_recv(context)
    }
}
