//! The listening socket and its connections: HTTP/1.1 and HTTP/2 without TLS on one port, and an end without loss.
//!
//! The end has three steps. First nothing new is accepted, except what already waits in the socket's queue: closing it
//! with connections in it would reset them, also when a replacement shares the port. Then, for a moment, connections are
//! only told to close with their next answer, so that a busy gateway moves over by itself. Then idle ones are closed and
//! busy ones finish their answer.

use std::convert::Infallible;
use std::future::{Future, ready};
use std::io;
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
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::{TcpListener, TcpSocket, TcpStream, lookup_host};
use tokio::time::{Instant, sleep};
use tower_service::Service as _;

use crate::after;

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

/// Serves until `stop` is ready, then ends as described above, at `grace` after that at the latest. Returns whether every
/// connection could finish.
pub async fn serve(listener: TcpListener, router: Router, stop: impl Future<Output = ()>, grace: Duration) -> bool {
    let graceful = GracefulShutdown::new();
    let closing = Arc::new(AtomicBool::new(false));
    let mut stop = std::pin::pin!(stop);
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => spawn(stream, router.clone(), Arc::clone(&closing), &graceful),
                Err(error) => pause_after(&error).await,
            },
            () = &mut stop => break,
        }
    }
    let end = after(Instant::now(), grace);
    closing.store(true, Ordering::Relaxed);
    while let Some(stream) = waiting(&listener).await {
        spawn(stream, router.clone(), Arc::clone(&closing), &graceful);
    }
    drop(listener);
    let moved_over = after(Instant::now(), MOVING_OVER).min(end);
    while graceful.count() > 0 && Instant::now() < moved_over {
        sleep(GLANCE).await;
    }
    tokio::time::timeout_at(end, graceful.shutdown()).await.is_ok()
}

/// A connection that is already in the socket's queue.
async fn waiting(listener: &TcpListener) -> Option<TcpStream> {
    tokio::select! {
        biased;
        accepted = listener.accept() => accepted.ok().map(|(stream, _)| stream),
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

fn spawn(stream: TcpStream, router: Router, closing: Arc<AtomicBool>, graceful: &GracefulShutdown) {
    // An answer is one small segment, and the gateway waits for it.
    drop(stream.set_nodelay(true));
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        answer(router.clone(), request.map(Body::new), Arc::clone(&closing))
    });
    let mut builder = Builder::new(TokioExecutor::new());
    // Gateways keep idle connections for long; closing them here would race with their next request.
    builder.http1().header_read_timeout(None);
    let watcher = graceful.watcher();
    tokio::spawn(async move {
        let connection = builder.serve_connection(TokioIo::new(stream), service);
        // A connection that breaks is the client's affair; its decisions go on.
        drop(watcher.watch(connection).await);
    });
}

type Answer = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

fn answer(mut router: Router, request: Request, closing: Arc<AtomicBool>) -> Answer {
    let persistent = request.version() == Version::HTTP_11;
    let response = router.call(request);
    Box::pin(async move {
        let mut response = response.await?;
        if persistent && closing.load(Ordering::Relaxed) {
            response
                .headers_mut()
                .insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        Ok(response)
    })
}
