//! The end of a service, its replacement on the same port, and both versions of HTTP on it.

use axum::body::{Body, to_bytes};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use tokio::net::TcpStream;

use crate::process::{Service, ended, file, in_memory, portcullis};
use crate::wire::{head, request};

#[tokio::test]
async fn sigterm_answers_what_is_under_way_closes_what_is_idle_and_ends_with_0() {
    for signal in ["TERM", "INT"] {
        let mut service = Service::start(in_memory()).await;
        let (mut idle, mut fresh, mut busy) = (service.client().await, service.client().await, service.client().await);
        assert_eq!(idle.send("GET", "/live", "").await.status, 200);
        let body = request(json!({})).to_string();
        let (first, rest) = body.split_at(10);
        busy.write(&head("POST", "/v1/decide", body.len())).await;
        busy.write(first).await;
        // A later answer on another connection: by then the service has read what was sent before.
        assert_eq!(service.get("/live").await.status, 200);
        service.signal(signal);
        service.line("stopping").await;
        idle.closed().await;
        fresh.closed().await;
        busy.write(rest).await;
        let answer = busy.answer().await;
        assert_eq!((answer.status, &answer.json()["verdict"]), (200, &json!("admit")));
        assert!(answer.head.contains("connection: close"), "{}", answer.head);
        assert_eq!(service.end().await, Some(0));
        assert_eq!(service.line("stopped").await["level"], "INFO");
    }
}

#[tokio::test]
async fn a_request_that_never_ends_holds_up_the_end_for_10_seconds_at_most() {
    let mut config = in_memory();
    // The bound of bodies is not what ends it.
    config["http"] = json!({"body_timeout_ms": 60_000});
    let mut service = Service::start(config).await;
    let mut stuck = service.client().await;
    stuck.write(&head("POST", "/v1/decide", 100)).await;
    assert_eq!(service.get("/live").await.status, 200);
    let start = std::time::Instant::now();
    service.signal("TERM");
    assert_eq!(service.end().await, Some(0));
    assert!((9..15).contains(&start.elapsed().as_secs()), "{:?}", start.elapsed());
    assert_eq!(service.line("stopped").await["level"], "WARN");
}

#[tokio::test]
async fn nothing_new_is_accepted_after_sigterm() {
    let mut service = Service::start(in_memory()).await;
    service.signal("TERM");
    assert_eq!(service.end().await, Some(0));
    assert!(TcpStream::connect(service.address).await.is_err());
}

#[tokio::test]
async fn lines_that_were_held_back_are_written_at_the_end() {
    let mut service = Service::start(in_memory()).await;
    for _ in 0..3 {
        service
            .post("/v1/decide", &request(json!({"limits": {"owner": {"requests": 0}}})))
            .await;
    }
    service.signal("TERM");
    assert_eq!(service.end().await, Some(0));
    let told = service.lines();
    let told = told
        .iter()
        .filter(|line| line["event"] == "denied")
        .map(|line| line["count"].as_u64().unwrap_or(1));
    assert_eq!(told.sum::<u64>(), 3);
}

#[tokio::test]
async fn an_address_in_use_is_exit_code_1_and_names_listen() {
    let service = Service::start(in_memory()).await;
    let folder = tempfile::TempDir::new().unwrap();
    let mut config = in_memory();
    config["listen"] = json!(service.address.to_string());
    let config = file(folder.path(), "second.json", &config.to_string());
    let (code, _, err) = ended(portcullis(&[]).arg("serve").arg("--config").arg(&config));
    assert_eq!(code, Some(1), "{err}");
    let expected = format!("{}: listen: cannot listen on {}: ", config.display(), service.address);
    assert!(err.starts_with(&expected) && err.contains("in use"), "{err}");
}

#[tokio::test]
async fn with_reuse_port_a_replacement_starts_before_the_old_process_is_stopped() {
    let mut old = Service::start_with(in_memory(), &["--reuse-port"], &[]).await;
    let mut config = in_memory();
    config["listen"] = json!(old.address.to_string());
    let new = Service::start_with(config, &["--reuse-port"], &[]).await;
    assert_eq!(old.address, new.address);
    old.signal("TERM");
    old.line("stopping").await;
    assert_eq!(old.end().await, Some(0));
    for _ in 0..10 {
        assert_eq!(new.get("/live").await.status, 200);
    }
}

#[tokio::test]
async fn http_2_without_tls_is_spoken_on_the_same_port() {
    let mut service = Service::start(in_memory()).await;
    let stream = TokioIo::new(TcpStream::connect(service.address).await.unwrap());
    let (mut sender, connection) = hyper::client::conn::http2::handshake::<_, _, Body>(TokioExecutor::new(), stream)
        .await
        .unwrap();
    let connection = tokio::spawn(connection);
    let uri = format!("http://{}/v1/decide", service.address);
    for _ in 0..3 {
        let request = hyper::Request::post(&uri)
            .body(Body::from(request(json!({})).to_string()))
            .unwrap();
        let answer = sender.send_request(request).await.unwrap();
        assert_eq!(answer.status(), 200);
        let body = to_bytes(Body::new(answer.into_body()), 65_536).await.unwrap();
        assert_eq!(serde_json::from_slice::<Value>(&body).unwrap()["verdict"], "admit");
    }
    service.signal("TERM");
    assert_eq!(service.end().await, Some(0));
    connection.await.unwrap().unwrap();
}
