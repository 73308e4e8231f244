//! An upstream that is no bottleneck: one thread for each connection, one answer for every request, and a count of them.
//!
//!     upstream PORT       then GET /-/hits says how many requests have been answered
//!
//! Built by scripts/bench with rustc alone. Left out on purpose: all of HTTP that the gateways under test don't send to it
//! (chunked bodies, upgrades, pipelines longer than a buffer); what it can't read ends the connection.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};

const BODY: &str = r#"{"ok":true}"#;

static HITS: AtomicU64 = AtomicU64::new(0);

fn answer(body: &str) -> Vec<u8> {
    let length = body.len();
    format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}").into_bytes()
}

/// How long the first request in these bytes is, if it is all there; `Err` if it is one of those that are left out.
fn request_length(bytes: &[u8]) -> Result<Option<usize>, ()> {
    let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") else {
        return Ok(None);
    };
    let mut body = 0;
    for line in bytes[..end].split(|byte| *byte == b'\n').skip(1) {
        let Some(colon) = line.iter().position(|byte| *byte == b':') else {
            continue;
        };
        let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
        if name.eq_ignore_ascii_case(b"content-length") {
            body = std::str::from_utf8(value)
                .ok()
                .and_then(|text| text.parse().ok())
                .ok_or(())?;
        } else if name.eq_ignore_ascii_case(b"transfer-encoding") {
            return Err(());
        }
    }
    let length = end + 4 + body;
    Ok((bytes.len() >= length).then_some(length))
}

fn serve(mut connection: TcpStream) -> std::io::Result<()> {
    connection.set_nodelay(true)?;
    let usual = answer(BODY);
    let mut bytes = Vec::new();
    let mut chunk = [0; 16 * 1024];
    loop {
        let read = connection.read(&mut chunk)?;
        if read == 0 {
            return Ok(());
        }
        bytes.extend_from_slice(&chunk[..read]);
        while let Some(length) = request_length(&bytes).map_err(|()| std::io::ErrorKind::InvalidData)? {
            if bytes.starts_with(b"GET /-/hits ") {
                connection.write_all(&answer(&HITS.load(Ordering::Relaxed).to_string()))?;
            } else {
                HITS.fetch_add(1, Ordering::Relaxed);
                connection.write_all(&usual)?;
            }
            bytes.drain(..length);
        }
    }
}

fn main() {
    let port = std::env::args().nth(1).and_then(|port| port.parse::<u16>().ok());
    let port = port.expect("usage: upstream PORT");
    let listener = TcpListener::bind(("127.0.0.1", port)).expect("the port is taken");
    for connection in listener.incoming().flatten() {
        // A connection that breaks is its client's business.
        std::thread::spawn(move || serve(connection));
    }
}
