//! TLS on the gateways' listener: who is let in, what is told of the others, and the replacement of certificates.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Duration, Instant};
use tokio_rustls::TlsConnector;

use crate::certificates::{Authority, Pair};
use crate::process::{Service, file, in_memory, is_faulty, until};
use crate::wire::head;

const NAME: &str = "portcullis.internal";

fn read(path: &Path) -> Vec<CertificateDer<'static>> {
    CertificateDer::pem_file_iter(path)
        .unwrap()
        .map(Result::unwrap)
        .collect()
}

/// What a client trusts, and what it shows.
fn client(trusted: &Authority, own: Option<&Pair>, protocol: &[u8]) -> TlsConnector {
    let mut roots = RootCertStore::empty();
    for certificate in read(&trusted.certificate()) {
        roots.add(certificate).unwrap();
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let mut config = match own {
        None => builder.with_no_client_auth(),
        Some(pair) => {
            let key = PrivateKeyDer::from_pem_file(&pair.key).unwrap();
            builder.with_client_auth_cert(read(&pair.certificate), key).unwrap()
        }
    };
    config.alpn_protocols = vec![protocol.to_vec()];
    Arc::new(config).into()
}

/// The status of `/live`, the protocol and the certificate that the service showed; nothing if it did not let us in.
async fn live(address: SocketAddr, client: &TlsConnector) -> Option<(String, Vec<u8>, Vec<u8>)> {
    let stream = TcpStream::connect(address).await.unwrap();
    let mut stream = client.connect(ServerName::try_from(NAME).unwrap(), stream).await.ok()?;
    let session = stream.get_ref().1;
    let protocol = session.alpn_protocol().unwrap_or_default().to_vec();
    let shown = session.peer_certificates().unwrap()[0].to_vec();
    stream.write_all(head("GET", "/live", 0).as_bytes()).await.ok()?;
    let mut said = [0; 12];
    // In TLS 1.3 a client learns only now that it was not let in.
    stream.read_exact(&mut said).await.ok()?;
    Some((String::from_utf8_lossy(&said).into_owned(), protocol, shown))
}

fn config(own: &Pair, client_ca: Option<&Authority>) -> Value {
    let mut config = in_memory();
    config["tls"] = json!({"certificate": own.certificate, "key": own.key,
        "client_ca": client_ca.map(Authority::certificate)});
    config["http"] = json!({"header_timeout_ms": 1000});
    config
}

#[tokio::test]
async fn with_client_ca_only_a_client_whose_certificate_it_signed_is_let_in() {
    let folder = TempDir::new().unwrap();
    let [ours, theirs] = ["ours", "theirs"].map(|name| Authority::new(folder.path(), name));
    let own = ours.sign("service", NAME);
    let (gateway, stranger) = (ours.sign("gateway", "gateway"), theirs.sign("stranger", "gateway"));
    let service = Service::start(config(&own, Some(&ours))).await;
    assert_eq!(service.line("started").await["door"], "mtls");
    let good = client(&ours, Some(&gateway), b"http/1.1");
    let (said, protocol, _) = live(service.address, &good).await.expect("let in");
    assert_eq!((said.as_str(), protocol.as_slice()), ("HTTP/1.1 200", &b"http/1.1"[..]));
    assert_eq!(live(service.address, &client(&ours, None, b"http/1.1")).await, None);
    assert_eq!(
        live(service.address, &client(&ours, Some(&stranger), b"http/1.1")).await,
        None
    );
    // Without TLS at all.
    let mut plain = TcpStream::connect(service.address).await.unwrap();
    drop(plain.write_all(head("GET", "/live", 0).as_bytes()).await);
    let mut said = Vec::new();
    drop(plain.read_to_end(&mut said).await);
    assert!(!String::from_utf8_lossy(&said).contains("HTTP"), "{said:?}");
    // One that begins and never goes on is ended in time.
    let mut stuck = TcpStream::connect(service.address).await.unwrap();
    stuck.write_all(&[22, 3, 1]).await.unwrap();
    let start = Instant::now();
    drop(stuck.read_to_end(&mut Vec::new()).await);
    assert!(start.elapsed() < Duration::from_secs(8), "{:?}", start.elapsed());
    let told = service.line("handshake_failed").await;
    assert_eq!(told["level"], "WARN");
    assert!(told["message"].as_str().unwrap().contains("from 127.0.0.1:"), "{told}");
    until("all of it told", async || {
        let lines = service.lines();
        let told = lines.iter().filter(|line| line["event"] == "handshake_failed");
        let count: u64 = told.map(|line| line["count"].as_u64().unwrap_or(1)).sum();
        (count == 4).then_some(())
    })
    .await;
}

#[tokio::test]
async fn both_protocols_are_spoken_over_tls_and_certificates_are_replaced_while_it_runs() {
    let folder = TempDir::new().unwrap();
    let ours = Authority::new(folder.path(), "ours");
    let own = ours.sign("service", NAME);
    let service = Service::start(config(&own, None)).await;
    assert_eq!(service.line("started").await["door"], "tls, open");
    let stream = TcpStream::connect(service.address).await.unwrap();
    let over_h2 = client(&ours, None, b"h2")
        .connect(ServerName::try_from(NAME).unwrap(), stream)
        .await
        .unwrap();
    assert_eq!(over_h2.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let (mut sender, connection) = hyper::client::conn::http2::handshake::<_, _, axum::body::Body>(
        hyper_util::rt::TokioExecutor::new(),
        hyper_util::rt::TokioIo::new(over_h2),
    )
    .await
    .unwrap();
    tokio::spawn(connection);
    let request = || {
        let request = hyper::Request::get(format!("https://{NAME}/live"));
        request.body(axum::body::Body::empty()).unwrap()
    };
    assert_eq!(sender.send_request(request()).await.unwrap().status(), 200);
    let asks = client(&ours, None, b"http/1.1");
    let (_, _, before) = live(service.address, &asks).await.unwrap();
    // Half of a replacement changes nothing: the key is not the certificate's.
    std::fs::write(&own.certificate, "no certificate").unwrap();
    let told = service.line("certificates_unusable").await;
    assert!(
        told["message"]
            .as_str()
            .unwrap()
            .contains("tls.certificate: must be a PEM file"),
        "{told}"
    );
    assert_eq!(live(service.address, &asks).await.unwrap().2, before);
    ours.sign("service", NAME);
    service.line("certificates_loaded").await;
    let (said, _, after) = live(service.address, &asks).await.unwrap();
    assert_eq!(said, "HTTP/1.1 200");
    assert_ne!(after, before, "the new certificate is shown");
    // Who was there stays.
    assert_eq!(sender.send_request(request()).await.unwrap().status(), 200);
}

#[test]
fn files_that_make_no_tls_are_exit_code_2_and_show_no_key() {
    let folder = TempDir::new().unwrap();
    let ours = Authority::new(folder.path(), "ours");
    ours.sign("service", NAME);
    ours.sign("another", NAME);
    file(folder.path(), "text.pem", "hunter2\n");
    let secret = std::fs::read_to_string(folder.path().join("service.key")).unwrap();
    let secret = secret.lines().nth(1).unwrap();
    for (tls, expected) in [
        (json!({"certificate": "service.pem"}), "tls.key: required, and missing"),
        (json!({"key": "service.key"}), "tls.certificate: required, and missing"),
        (
            json!({"certificate": "absent.pem", "key": "service.key"}),
            "tls.certificate: cannot be read: No such file",
        ),
        (
            json!({"certificate": "text.pem", "key": "service.key"}),
            "tls.certificate: must be a PEM file with at least one certificate",
        ),
        (
            json!({"certificate": "service.pem", "key": "text.pem"}),
            "tls.key: must be a PEM file with one unencrypted private key",
        ),
        (
            json!({"certificate": "service.pem", "key": "another.key"}),
            "tls: the certificate and the key can't be used together: ",
        ),
        (
            json!({"certificate": "service.pem", "key": "service.key", "client_ca": "text.pem"}),
            "tls.client_ca: must be a PEM file with at least one certificate",
        ),
    ] {
        let mut config = in_memory();
        config["tls"] = tls;
        is_faulty(folder.path(), &config, expected, &["hunter2", secret]);
    }
}
