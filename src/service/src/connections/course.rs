//! The course of one connection: what it is waited for, and until when; and the stream that breaks off what is late.
//!
//! A client that sends a head byte by byte would hold its connection for ever. A gateway that has nothing to ask holds it for
//! long, rightly. hyper's own `header_read_timeout` takes them for the same (in version 1.12 it runs from when a connection
//! begins to wait for a head), so the time of a head is measured here: from its first byte, or, for the first head of all,
//! from the connection's begin. A connection between two requests has the idle timeout instead, and one whose client does not
//! read its answer is broken off too.
//!
//! In HTTP/2 frames other than heads come at any time, so after its first request such a connection has the idle timeout
//! alone: what a head in pieces can hold there is one connection, bounded in size by the largest list of headers. Left out on
//! purpose: bodies, which have a deadline of their own where they are read.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

use crate::{after, locked};

/// How long the parts of a connection's life may take.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    /// For a head, and for a client that does not read.
    pub(super) head: Duration,
    /// Between two requests.
    pub(super) idle: Duration,
}

/// Why a connection was broken off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Late {
    /// A head did not come to its end.
    Head = 1,
    /// No request came.
    Idle = 2,
    /// The client did not read its answer.
    Reading = 3,
    /// Not a byte has ever come.
    Silent = 4,
}

impl Late {
    /// The label `reason` of the metric.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Head | Self::Silent => "header_timeout",
            Self::Idle => "idle_timeout",
            Self::Reading => "write_timeout",
        }
    }

    /// What happened, for a log line; nothing where a gateway does what gateways do.
    pub(super) const fn message(self) -> Option<&'static str> {
        match self {
            Self::Head => Some("a request's head took longer than http.header_timeout_ms"),
            Self::Reading => Some("the client did not read its answer"),
            Self::Idle | Self::Silent => None,
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Phase {
    /// The first byte is to come, and the head that it begins to end, until then.
    New(Instant),
    /// A head is to come to its end until then.
    Head(Instant),
    /// A request is to begin until then.
    Idle(Instant),
    /// So many requests are being answered.
    Busy(u32),
}

/// The course of a connection, shared by its stream and its requests.
#[derive(Debug)]
pub(super) struct Course {
    patience: Patience,
    phase: Mutex<Phase>,
    /// HTTP/2: bytes between two requests are no head's. 0 until a request has said.
    version: AtomicU8,
    late: AtomicU8,
}

impl Course {
    /// A connection that begins now.
    pub(super) fn new(patience: Patience) -> Arc<Self> {
        Arc::new(Self {
            patience,
            phase: Mutex::new(Phase::New(after(Instant::now(), patience.head))),
            version: AtomicU8::new(0),
            late: AtomicU8::new(0),
        })
    }

    /// A request's head has come to its end; it is being answered until what is returned is dropped.
    pub(super) fn request(self: &Arc<Self>, is_http2: bool) -> Request {
        self.version.store(if is_http2 { 2 } else { 1 }, Ordering::Relaxed);
        let mut phase = locked(&self.phase);
        *phase = match *phase {
            Phase::Busy(requests) => Phase::Busy(requests.saturating_add(1)),
            Phase::New(_) | Phase::Head(_) | Phase::Idle(_) => Phase::Busy(1),
        };
        Request(Arc::clone(self))
    }

    /// Why it was broken off, if it was.
    pub(super) fn late(&self) -> Option<Late> {
        match self.late.load(Ordering::Relaxed) {
            1 => Some(Late::Head),
            2 => Some(Late::Idle),
            3 => Some(Late::Reading),
            4 => Some(Late::Silent),
            _ => None,
        }
    }

    fn bytes_came(&self) {
        let mut phase = locked(&self.phase);
        *phase = match *phase {
            Phase::New(until) => Phase::Head(until),
            Phase::Idle(_) if self.version.load(Ordering::Relaxed) == 2 => {
                Phase::Idle(after(Instant::now(), self.patience.idle))
            }
            Phase::Idle(_) => Phase::Head(after(Instant::now(), self.patience.head)),
            phase => phase,
        };
    }

    /// Until when something has to come, and what it is otherwise.
    fn due(&self) -> Option<(Instant, Late)> {
        match *locked(&self.phase) {
            Phase::New(until) => Some((until, Late::Silent)),
            Phase::Head(until) => Some((until, Late::Head)),
            Phase::Idle(until) => Some((until, Late::Idle)),
            Phase::Busy(_) => None,
        }
    }

    fn broken_off(&self, late: Late) -> io::Error {
        self.late.store(late as u8, Ordering::Relaxed);
        io::Error::new(io::ErrorKind::TimedOut, late.name())
    }
}

/// A request that is being answered.
#[derive(Debug)]
pub(super) struct Request(Arc<Course>);

impl Drop for Request {
    fn drop(&mut self) {
        let mut phase = locked(&self.0.phase);
        *phase = match *phase {
            Phase::Busy(requests) if requests > 1 => Phase::Busy(requests.saturating_sub(1)),
            _ => Phase::Idle(after(Instant::now(), self.0.patience.idle)),
        };
    }
}

/// A deadline that may move. It wakes the task at the first that was set, or before: a later one is set anew only then, so
/// that the requests of a busy connection don't each move a timer.
#[derive(Default)]
struct Alarm(Option<Pin<Box<Sleep>>>);

impl Alarm {
    /// Whether the time has come; if not, the task is woken then, or before.
    fn poll(&mut self, context: &mut Context<'_>, at: Instant) -> bool {
        let sleep = self.0.get_or_insert_with(|| Box::pin(sleep_until(at)));
        if sleep.deadline() > at {
            sleep.as_mut().reset(at);
        }
        while sleep.as_mut().poll(context).is_ready() {
            if Instant::now() >= at {
                return true;
            }
            sleep.as_mut().reset(at);
        }
        false
    }
}

/// A stream that breaks off when its course is late.
pub(super) struct Timed<S> {
    stream: S,
    course: Arc<Course>,
    reading: Alarm,
    writing: Alarm,
    /// Until when the client has to take what is written, while it does not.
    unread_until: Option<Instant>,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Timed<S> {
    pub(super) fn new(stream: S, course: Arc<Course>) -> Self {
        Self {
            stream,
            course,
            reading: Alarm::default(),
            writing: Alarm::default(),
            unread_until: None,
        }
    }

    /// What became of an attempt to write, unless the client has not read for too long.
    fn written<T>(&mut self, context: &mut Context<'_>, polled: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            self.unread_until = None;
            return polled;
        }
        let patience = self.course.patience.head;
        let until = *self.unread_until.get_or_insert_with(|| after(Instant::now(), patience));
        if self.writing.poll(context, until) {
            return Poll::Ready(Err(self.course.broken_off(Late::Reading)));
        }
        Poll::Pending
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Timed<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buffer.filled().len();
        let polled = Pin::new(&mut this.stream).poll_read(context, buffer);
        if polled.is_ready() {
            if buffer.filled().len() > before {
                this.course.bytes_came();
            } else {
                return polled;
            }
        }
        let Some((until, late)) = this.course.due() else {
            // Once the request is answered nobody reads again by himself, so that a look at the clock is due by then.
            let patience = this.course.patience;
            let look = after(Instant::now(), patience.head.min(patience.idle));
            this.reading.poll(context, look);
            return polled;
        };
        // A head that comes byte by byte is late all the same.
        let is_late = if polled.is_ready() {
            Instant::now() >= until
        } else {
            this.reading.poll(context, until)
        };
        if is_late {
            return Poll::Ready(Err(this.course.broken_off(late)));
        }
        polled
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Timed<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.written(context, polled)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_flush(context);
        self.written(context, polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_shutdown(context);
        self.written(context, polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.written(context, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
