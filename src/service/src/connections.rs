//! The listening socket and its connections: HTTP/1.1 and HTTP/2 on one port, with TLS or without, bounded in number, size
//! and time, and an end without loss.
//!
//! A connection beyond the bound is closed at once: one that waited would look to the gateway like a service that hangs. How
//! long a connection may take for what stands in `course`; a body has its deadline where it is read.
//!
//! The end has three steps. First nothing new is accepted, except what already waits in the socket's queue: closing it
//! with connections in it would reset them, also when a replacement shares the port. Then, for a moment, connections are
//! only told to close with their next answer, so that a busy gateway moves over by itself. Then idle ones are closed and
//! busy ones finish their answer.

use std::convert::Infallible;
use std::error::Error;
use std::future::{Future, ready};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderValue, Version, header};
use axum::response::Response;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use portcullis_decision::config::HttpBounds;
use portcullis_decision::log_line::{Level, LogLine};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket, TcpStream, lookup_host};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep, timeout};
use tower_service::Service as _;

use self::course::{Course, Late, Patience, Timed};
use crate::after;
use crate::logs::Journal;
use crate::metrics::Metrics;
use crate::tls::Certificates;

mod course;

/// Connections that wait to be accepted at most.
const BACKLOG: u32 = 4_096;
/// Pause after an accept that failed for want of file descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// How long busy connections are let to close with their next answer.
const MOVING_OVER: Duration = Duration::from_millis(250);
/// Between two looks at whether all have gone.
const GLANCE: Duration = Duration::from_millis(5);

/// Listens on `listen`, `host:port`; the first address that can be bound is taken. With `reuse_port` another process may
/// listen on it at the same time.
///
/// # Errors
/// The operating system's, of the last address that was tried.
pub async fn bind(listen: &str, reuse_port: bool) -> io::Result<TcpListener> {
    let mut last = io::Error::new(io::ErrorKind::AddrNotAvailable, "the name has no address");
    for address in lookup_host(listen).await? {
        let socket = if address.is_ipv4() {
            TcpSocket::new_v4()?
        } else {
            TcpSocket::new_v6()?
        };
        // Only past connections of this port are overlooked by this one; a live listener still is an error.
        socket.set_reuseaddr(true)?;
        #[cfg(unix)]
        if reuse_port {
            socket.set_reuseport(true)?;
        }
        match socket.bind(address).and_then(|()| socket.listen(BACKLOG)) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Who comes in by a listening socket, and what is told of those who don't.
pub struct Door {
    /// What callers may take.
    pub bounds: HttpBounds,
    /// `None`: without TLS.
    pub certificates: Option<Arc<Certificates>>,
    /// Counts those who are turned away.
    pub metrics: Arc<Metrics>,
    /// Tells of them.
    pub journal: Arc<Journal>,
}

/// Where a request comes from.
#[derive(Debug, Clone, Copy)]
pub struct Peer(pub SocketAddr);

type Answer = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

/// What all connections of one socket share.
struct Hall {
    door: Door,
    places: Arc<Semaphore>,
    router: Router,
    closing: AtomicBool,
    patience: Patience,
    builder: Builder<TokioExecutor>,
}

/// Serves until `stop` is ready, then ends as described above, at `grace` after that at the latest. Returns whether every
/// connection could finish.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    door: Door,
    stop: impl Future<Output = ()>,
    grace: Duration,
) -> bool {
    let graceful = GracefulShutdown::new();
    let hall = Arc::new(Hall::new(door, router));
    let mut stop = std::pin::pin!(stop);
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, peer)) => hall.admit(stream, peer, &graceful),
                Err(error) => pause_after(&error).await,
            },
            () = &mut stop => break,
        }
    }
    let end = after(Instant::now(), grace);
    hall.closing.store(true, Ordering::Relaxed);
    while let Some((stream, peer)) = waiting(&listener).await {
        hall.admit(stream, peer, &graceful);
    }
    drop(listener);
    let moved_over = after(Instant::now(), MOVING_OVER).min(end);
    while graceful.count() > 0 && Instant::now() < moved_over {
        sleep(GLANCE).await;
    }
    tokio::time::timeout_at(end, graceful.shutdown()).await.is_ok()
}

/// A connection that is already in the socket's queue.
async fn waiting(listener: &TcpListener) -> Option<(TcpStream, SocketAddr)> {
    tokio::select! {
        biased;
        accepted = listener.accept() => accepted.ok(),
        () = ready(()) => None,
    }
}

/// A client that went away before it was accepted is nothing; any other failure would come again at once.
async fn pause_after(error: &io::Error) {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    if !matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset) {
        tracing::warn!(event = "accept_failed", kind = %error.kind(), "no connection could be accepted");
        sleep(ACCEPT_PAUSE).await;
    }
}

impl Hall {
    fn new(door: Door, router: Router) -> Self {
        let bounds = door.bounds;
        let size = |figure: u64| usize::try_from(figure).unwrap_or(usize::MAX);
        let mut builder = Builder::new(TokioExecutor::new());
        let head = size(bounds.max_header_bytes);
        // The time of a head is measured by `course`: hyper's begins while nothing is asked for yet.
        builder.http1().header_read_timeout(None).max_buf_size(head);
        let list = u32::try_from(bounds.max_header_bytes).unwrap_or(u32::MAX);
        builder.http2().max_header_list_size(list);
        Self {
            places: Arc::new(Semaphore::new(size(bounds.max_connections).min(Semaphore::MAX_PERMITS))),
            router,
            closing: AtomicBool::new(false),
            patience: Patience {
                head: Duration::from_millis(bounds.header_timeout_ms),
                idle: Duration::from_millis(bounds.idle_timeout_ms),
            },
            builder,
            door,
        }
    }

    /// Gives a connection its place, or closes it.
    fn admit(self: &Arc<Self>, stream: TcpStream, peer: SocketAddr, graceful: &GracefulShutdown) {
        let Ok(place) = Arc::clone(&self.places).try_acquire_owned() else {
            let most = self.door.bounds.max_connections;
            let message =
                format!("all {most} connections (http.max_connections) are in use: one from {peer} was closed");
            self.turned_away("max_connections", "connection_refused", message);
            return;
        };
        // An answer is one small segment, and the gateway waits for it.
        drop(stream.set_nodelay(true));
        let (hall, watcher) = (Arc::clone(self), graceful.watcher());
        tokio::spawn(async move {
            match &hall.door.certificates {
                None => hall.converse(stream, peer, watcher).await,
                Some(certificates) => {
                    let handshake = certificates.acceptor().accept(stream);
                    match timeout(hall.patience.head, handshake).await {
                        Ok(Ok(stream)) => hall.converse(stream, peer, watcher).await,
                        // Who only looks whether the port is open says nothing.
                        Ok(Err(error)) if is_farewell(&error) => {}
                        Ok(Err(error)) => hall.no_handshake(peer, &error.to_string()),
                        Err(_) => hall.no_handshake(peer, "it took too long"),
                    }
                }
            }
            drop::<OwnedSemaphorePermit>(place);
        });
    }

    fn no_handshake(&self, peer: SocketAddr, why: &str) {
        let message = format!("a connection from {peer} was closed in its TLS handshake: {why}");
        self.turned_away("handshake", "handshake_failed", message);
    }

    /// Answers what comes over a connection, until it ends.
    async fn converse<S>(self: &Arc<Self>, stream: S, peer: SocketAddr, watcher: Watcher)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let course = Course::new(self.patience);
        let service = service_fn(|mut request: hyper::Request<Incoming>| {
            let under_way = course.request(request.version() == Version::HTTP_2);
            request.extensions_mut().insert(Peer(peer));
            let answer = self.answer(request.map(Body::new));
            async move {
                let answer = answer.await;
                drop(under_way);
                answer
            }
        });
        let stream = TokioIo::new(Timed::new(stream, Arc::clone(&course)));
        let connection = self.builder.serve_connection(stream, service).into_owned();
        let ended = watcher.watch(connection).await;
        // A connection that breaks is the client's affair; its decisions go on.
        if let Some(late) = course.late() {
            if let Some(why) = late.message() {
                let message = format!("a connection from {peer} was closed: {why}");
                self.turned_away(late.name(), "connection_late", message);
            } else if late == Late::Silent {
                // A gateway opens more connections than it comes to need. One that has asked and idles is as it is meant.
                self.door.metrics.turned_away(late.name());
            }
        } else if ended.is_err_and(|error| is_too_large(error.as_ref())) {
            let message = format!("a request from {peer} was refused: its head is longer than http.max_header_bytes");
            self.turned_away("headers_too_large", "headers_too_large", message);
        }
    }

    fn turned_away(&self, reason: &'static str, event: &'static str, message: String) {
        self.door.metrics.turned_away(reason);
        self.door.journal.write(None, LogLine::new(Level::Warn, event, message));
    }

    fn answer(self: &Arc<Self>, request: Request) -> Answer {
        let persistent = request.version() == Version::HTTP_11;
        let (hall, response) = (Arc::clone(self), self.router.clone().call(request));
        Box::pin(async move {
            let mut response = response.await?;
            if persistent && hall.closing.load(Ordering::Relaxed) {
                response
                    .headers_mut()
                    .insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            Ok(response)
        })
    }
}

/// A client that left before it was known.
fn is_farewell(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), UnexpectedEof | ConnectionReset | ConnectionAborted)
}

fn is_too_large(error: &(dyn Error + 'static)) -> bool {
    error
        .downcast_ref::<hyper::Error>()
        .is_some_and(hyper::Error::is_parse_too_large)
}
