//! What callers may take of the service: slow and large ones are ended, idle ones are not, and too many are turned away.

use axum::body::{Body, to_bytes};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Duration, Instant, interval, sleep};

use crate::process::{Service, in_memory, until};
use crate::wire::{head, request};

/// Long enough to tell from at once, short enough to wait for several times.
const PATIENCE_MS: u64 = 400;
const PATIENCE: Duration = Duration::from_millis(PATIENCE_MS);
/// Far below the defaults, which would end nothing within it.
const LIMIT: Duration = Duration::from_secs(8);

async fn bounded(http: Value) -> Service {
    let mut config = in_memory();
    config["http"] = http;
    Service::start(config).await
}

async fn turned_away(service: &Service, reason: &str) -> u64 {
    let metrics = service.get("/metrics").await.body;
    let name = format!("portcullis_turned_away_total{{reason=\"{reason}\"}} ");
    let line = metrics.lines().find_map(|line| line.strip_prefix(&name)?.parse().ok());
    line.unwrap_or(0)
}

/// Sends this byte by byte until the service hangs up; how long that took, and what it said.
async fn trickle(service: &Service, text: &str) -> (Duration, String) {
    let mut stream = TcpStream::connect(service.address).await.unwrap();
    let start = Instant::now();
    let mut ticks = interval(Duration::from_millis(30));
    let mut bytes = text.as_bytes().iter().cycle();
    let mut said = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        assert!(start.elapsed() < LIMIT, "nobody ended it");
        tokio::select! {
            _ = ticks.tick() => {
                // It may have hung up in between; what it said is read all the same.
                drop(stream.write_all(&[*bytes.next().unwrap()]).await);
            }
            read = stream.read(&mut buffer) => match read {
                Ok(0) | Err(_) => return (start.elapsed(), String::from_utf8_lossy(&said).into_owned()),
                Ok(read) => said.extend_from_slice(&buffer[..read]),
            }
        }
    }
}

#[tokio::test]
async fn a_head_in_pieces_is_ended_and_a_kept_connection_is_not() {
    let service = bounded(json!({"header_timeout_ms": PATIENCE_MS})).await;
    let mut kept = service.client().await;
    assert_eq!(kept.send("GET", "/live", "").await.status, 200);
    for ended in 1..=2 {
        let (took, said) = trickle(&service, "x-a: b\r\n").await;
        assert!((PATIENCE..LIMIT).contains(&took), "{took:?}");
        assert!(!said.contains("200"), "{said}");
        until("its count", async || {
            (turned_away(&service, "header_timeout").await == ended).then_some(())
        })
        .await;
    }
    assert!(
        service.line("connection_late").await["message"]
            .as_str()
            .unwrap()
            .contains("http.header_timeout_ms")
    );
    // By now it has waited for twice as long as a head may take.
    assert_eq!(kept.send("GET", "/live", "").await.status, 200);
    // Its next head has to come in time as any other.
    kept.write("GET /live HT").await;
    let start = Instant::now();
    kept.closed().await;
    assert!(
        (PATIENCE / 2..LIMIT).contains(&start.elapsed()),
        "{:?}",
        start.elapsed()
    );
}

#[tokio::test]
async fn a_connection_that_never_asks_is_ended_and_one_that_has_asked_waits_for_the_idle_timeout() {
    let service = bounded(json!({"header_timeout_ms": PATIENCE_MS, "idle_timeout_ms": 3 * PATIENCE_MS})).await;
    let (mut silent, mut kept) = (service.client().await, service.client().await);
    assert_eq!(kept.send("GET", "/live", "").await.status, 200);
    let start = Instant::now();
    silent.closed().await;
    assert!(
        (PATIENCE / 2..LIMIT).contains(&start.elapsed()),
        "{:?}",
        start.elapsed()
    );
    kept.closed().await;
    assert!(
        (2 * PATIENCE..LIMIT).contains(&start.elapsed()),
        "{:?}",
        start.elapsed()
    );
    assert_eq!(turned_away(&service, "header_timeout").await, 1);
    assert_eq!(turned_away(&service, "idle_timeout").await, 0, "as it is meant");
    // The first line is of what came after the silent one.
    trickle(&service, "x-a: b\r\n").await;
    service.line("connection_late").await;
    let lines = service.lines().into_iter();
    assert_eq!(lines.filter(|line| line["event"] == "connection_late").count(), 1);
}

#[tokio::test]
async fn a_body_in_pieces_is_408_and_charges_nothing() {
    let service = bounded(json!({"body_timeout_ms": PATIENCE_MS})).await;
    let body = request(json!({"limits": {"owner": {"requests": 1}}})).to_string();
    let mut client = service.client().await;
    client.write(&head("POST", "/v1/decide", body.len())).await;
    client.write(&body[..20]).await;
    let start = Instant::now();
    let answer = client.answer().await;
    assert!(
        (PATIENCE / 2..LIMIT).contains(&start.elapsed()),
        "{:?}",
        start.elapsed()
    );
    assert_eq!(answer.status, 408, "{answer:?}");
    assert_eq!(
        answer.json(),
        json!({"error": "the body took longer than http.body_timeout_ms, 400 ms"})
    );
    let line = service.line("request_refused").await["message"].to_string();
    assert!(
        line.contains("a decision from 127.0.0.1:") && line.contains("http.body_timeout_ms, 400 ms"),
        "{line}"
    );
    client.closed().await;
    assert_eq!(turned_away(&service, "body_timeout").await, 1);
    let whole = service.client().await.send("POST", "/v1/decide", &body).await;
    assert_eq!(whole.json()["verdict"], "admit", "{whole:?}");
}

#[tokio::test]
async fn a_body_that_is_too_long_is_413_however_it_is_framed() {
    let service = Service::start(in_memory()).await;
    let long = json!({"x": "y".repeat(70_000)}).to_string();
    let answer = service.client().await.send("POST", "/v1/decide", &long).await;
    assert_eq!(answer.status, 413, "{answer:?}");
    assert_eq!(answer.json(), json!({"error": "the body is longer than 65536 bytes"}));
    let line = service.line("request_refused").await["message"].to_string();
    assert!(
        line.contains("a decision from 127.0.0.1:")
            && line.contains("could not be read: the body is longer than 65536 bytes"),
        "{line}"
    );
    let longest = json!({"x": "y".repeat(1 << 20)}).to_string();
    let answer = service.client().await.send("POST", "/v1/settle", &longest).await;
    assert_eq!(
        (answer.status, answer.json()),
        (413, json!({"error": "the body is longer than 1048576 bytes"}))
    );
    let mut client = service.client().await;
    client
        .write("POST /v1/decide HTTP/1.1\r\nhost: p\r\ntransfer-encoding: chunked\r\n\r\n")
        .await;
    client.write(&format!("{:x}\r\n{long}\r\n0\r\n\r\n", long.len())).await;
    assert_eq!(client.answer().await.status, 413);
    assert_eq!(turned_away(&service, "body_too_large").await, 3);
}

#[tokio::test]
async fn a_head_that_is_too_long_is_431() {
    let service = bounded(json!({"max_header_bytes": 8192})).await;
    let fits = format!("GET /live HTTP/1.1\r\nhost: p\r\nx-long: {}\r\n\r\n", "y".repeat(6_000));
    let mut client = service.client().await;
    client.write(&fits).await;
    assert_eq!(client.answer().await.status, 200);
    let mut stream = TcpStream::connect(service.address).await.unwrap();
    let long = format!(
        "GET /live HTTP/1.1\r\nhost: p\r\nx-long: {}\r\n\r\n",
        "y".repeat(40_000)
    );
    drop(stream.write_all(long.as_bytes()).await);
    let mut said = [0; 12];
    stream.read_exact(&mut said).await.unwrap();
    assert_eq!(&said, b"HTTP/1.1 431");
    until("its count", async || {
        (turned_away(&service, "headers_too_large").await == 1).then_some(())
    })
    .await;
}

#[tokio::test]
async fn one_connection_too_many_is_closed_at_once_and_finds_a_place_when_another_ends() {
    let service = bounded(json!({"max_connections": 3})).await;
    let mut kept = Vec::new();
    for _ in 0..3 {
        let mut client = service.client().await;
        assert_eq!(client.send("GET", "/live", "").await.status, 200);
        kept.push(client);
    }
    let mut stream = TcpStream::connect(service.address).await.unwrap();
    let mut rest = Vec::new();
    drop(stream.read_to_end(&mut rest).await);
    assert_eq!(rest, b"");
    let told = service.line("connection_refused").await;
    assert!(
        told["message"].as_str().unwrap().contains("http.max_connections"),
        "{told}"
    );
    for client in &mut kept {
        assert_eq!(client.send("GET", "/live", "").await.status, 200);
    }
    let metrics = kept[0].send("GET", "/metrics", "").await.body;
    assert!(
        metrics.contains(r#"portcullis_turned_away_total{reason="max_connections"} "#),
        "{metrics}"
    );
    drop(kept.pop());
    until("a place", async || {
        let mut stream = TcpStream::connect(service.address).await.ok()?;
        drop(stream.write_all(head("GET", "/live", 0).as_bytes()).await);
        let mut said = [0; 12];
        let read = stream.read_exact(&mut said).await;
        (read.is_ok() && &said == b"HTTP/1.1 200").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_client_that_does_not_read_is_ended() {
    let service = bounded(json!({"header_timeout_ms": PATIENCE_MS})).await;
    let mut stream = TcpStream::connect(service.address).await.unwrap();
    let asks = tokio::spawn(async move {
        let many = head("GET", "/metrics", 0).repeat(1_000);
        // Until the service has hung up: what it says is never read.
        while stream.write_all(many.as_bytes()).await.is_ok() {}
    });
    until("its count", async || {
        (turned_away(&service, "write_timeout").await == 1).then_some(())
    })
    .await;
    asks.await.unwrap();
}

#[tokio::test]
async fn http_2_is_bounded_as_well_and_waits_between_two_requests() {
    let service = bounded(json!({"header_timeout_ms": PATIENCE_MS, "max_header_bytes": 8192})).await;
    let stream = TokioIo::new(TcpStream::connect(service.address).await.unwrap());
    let (mut sender, connection) = hyper::client::conn::http2::handshake::<_, _, Body>(TokioExecutor::new(), stream)
        .await
        .unwrap();
    tokio::spawn(connection);
    let live = |padding: usize| {
        let request = hyper::Request::get(format!("http://{}/live", service.address));
        request
            .header("x-long", "y".repeat(padding))
            .body(Body::empty())
            .unwrap()
    };
    let answer = sender.send_request(live(10)).await.unwrap();
    assert_eq!(answer.status(), 200);
    drop(to_bytes(Body::new(answer.into_body()), 4096).await.unwrap());
    // It waits for longer than a head may take.
    sleep(2 * PATIENCE).await;
    assert_eq!(sender.send_request(live(10)).await.unwrap().status(), 200);
    assert_eq!(sender.send_request(live(20_000)).await.unwrap().status(), 431);
    // A connection that speaks, but asks nothing.
    let mut silent = TcpStream::connect(service.address).await.unwrap();
    silent
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
        .await
        .unwrap();
    let start = Instant::now();
    let mut rest = Vec::new();
    drop(silent.read_to_end(&mut rest).await);
    assert!(
        (PATIENCE / 2..LIMIT).contains(&start.elapsed()),
        "{:?}",
        start.elapsed()
    );
    until("its count", async || {
        (turned_away(&service, "header_timeout").await == 1).then_some(())
    })
    .await;
}
