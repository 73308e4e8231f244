//! A TCP proxy in front of a store that can lose replies and be late.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::sleep;

/// What it does at this moment; every connection looks again with every piece that passes.
#[derive(Debug, Default)]
pub(crate) struct Mood {
    /// Replies wait for as long.
    pub(crate) delay_ms: AtomicU64,
    /// The next request that holds this mark is passed on, but the connection is cut instead of its reply.
    pub(crate) cut_next_reply: AtomicBool,
    /// The next request that holds the mark is passed on, its reply is swallowed, and the connection stays.
    pub(crate) swallow_next_reply: AtomicBool,
    /// Requests that held the mark and whose reply has come back, also if it still waits here.
    pub(crate) marked_replies: AtomicUsize,
    /// Connections so far.
    pub(crate) accepted: AtomicUsize,
    /// Connections now.
    pub(crate) open: AtomicUsize,
}

/// A proxy; ends with all its connections when it is dropped.
pub(crate) struct Proxy {
    pub(crate) port: u16,
    pub(crate) mood: Arc<Mood>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Proxy {
    /// A proxy in front of `port`; `mark` tells the requests that [`Mood`] is about.
    pub(crate) async fn start(port: u16, mark: String) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let own = listener.local_addr().unwrap().port();
        let mood = Arc::new(Mood::default());
        let shared = Arc::clone(&mood);
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                shared.accepted.fetch_add(1, Ordering::SeqCst);
                connections.spawn(pass(client, port, mark.clone(), Arc::clone(&shared)));
                while connections.try_join_next().is_some() {}
            }
        });
        Self { port: own, mood, task }
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }
}

async fn pass(mut client: TcpStream, port: u16, mark: String, mood: Arc<Mood>) {
    let Ok(mut server) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await else {
        return;
    };
    mood.open.fetch_add(1, Ordering::SeqCst);
    drop(relay(&mut client, &mut server, &mark, &mood).await);
    mood.open.fetch_sub(1, Ordering::SeqCst);
}

async fn relay(client: &mut TcpStream, server: &mut TcpStream, mark: &str, mood: &Mood) -> std::io::Result<()> {
    let (mut asked, mut answered) = (vec![0; 65_536], vec![0; 65_536]);
    let (mut cut, mut swallow, mut is_marked) = (false, false, false);
    loop {
        tokio::select! {
            read = client.read(&mut asked) => {
                let piece = &asked[..read?];
                if piece.is_empty() {
                    return Ok(());
                }
                if piece.windows(mark.len()).any(|part| part == mark.as_bytes()) {
                    is_marked = true;
                    cut |= mood.cut_next_reply.swap(false, Ordering::SeqCst);
                    swallow |= mood.swallow_next_reply.swap(false, Ordering::SeqCst);
                }
                server.write_all(piece).await?;
            }
            read = server.read(&mut answered) => {
                let piece = &answered[..read?];
                if piece.is_empty() || cut {
                    return Ok(());
                }
                if std::mem::take(&mut is_marked) {
                    mood.marked_replies.fetch_add(1, Ordering::SeqCst);
                }
                let delay = mood.delay_ms.load(Ordering::SeqCst);
                if delay > 0 {
                    sleep(Duration::from_millis(delay)).await;
                }
                if std::mem::take(&mut swallow) {
                    continue;
                }
                client.write_all(piece).await?;
            }
        }
    }
}
