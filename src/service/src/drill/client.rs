//! The drill's own client: one HTTP/1.1 request on a connection of its own, so that every worker of a gateway may get one.
//!
//! Left out on purpose: redirects, retries, proxies: what came back is what is judged.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::http::{HeaderName, HeaderValue, Method, Request, Uri, header};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::judge::Got;
use crate::explain::request::Request as Asked;
use crate::roots;

/// How long one answer may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// The most of a body that is read, in bytes.
const LARGEST_BODY: usize = 1 << 20;

/// Why there was no answer, as a sentence.
pub(super) type NoAnswer = String;

/// A place that answers HTTP.
#[derive(Clone)]
pub(super) struct Place {
    host: String,
    port: u16,
    tls: Option<TlsConnector>,
    /// What stands before every path.
    base: String,
}

impl Place {
    /// The place of an address; `ca` is a file of certificates to trust in place of the system's.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn of(option: &str, url: &str, ca: Option<&Path>) -> Result<Self, String> {
        let form = || format!("{option}: must be http://HOST[:PORT] or https://HOST[:PORT], and may have a path");
        let uri: Uri = url.parse().map_err(|_| form())?;
        let tls = match uri.scheme_str() {
            Some("http") => None,
            Some("https") => Some(connector(option, ca)?),
            _ => return Err(form()),
        };
        let authority = uri.authority().ok_or_else(form)?;
        if authority.as_str().contains('@') {
            return Err(format!("{option}: must not hold a name or a password"));
        }
        let port = authority.port_u16().unwrap_or(if tls.is_some() { 443 } else { 80 });
        Ok(Self {
            host: authority.host().trim_matches(['[', ']']).to_owned(),
            port,
            tls,
            base: uri.path().trim_end_matches('/').to_owned(),
        })
    }

    /// What a request names as its host.
    pub(super) fn authority(&self) -> String {
        let host = if self.host.contains(':') {
            format!("[{}]", self.host)
        } else {
            self.host.clone()
        };
        format!("{host}:{}", self.port)
    }

    /// The path of a request here.
    pub(super) fn path(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    /// Sends a request as it stands.
    ///
    /// # Errors
    /// No connection, no answer in time, or a request that HTTP can't carry.
    pub(super) async fn send(&self, asked: &Asked) -> Result<Got, NoAnswer> {
        let answer = timeout(PATIENCE, self.exchange(asked)).await;
        let (to, within_s) = (self.authority(), PATIENCE.as_secs());
        answer.unwrap_or_else(|_| Err(format!("{to} gave no answer within {within_s} s")))
    }

    async fn exchange(&self, asked: &Asked) -> Result<Got, NoAnswer> {
        let to = self.authority();
        let stream = TcpStream::connect((self.host.as_str(), self.port)).await;
        let stream = stream.map_err(|error| format!("{to} can't be reached: {error}"))?;
        match &self.tls {
            None => self.talk(stream, asked).await,
            Some(tls) => {
                let name = ServerName::try_from(self.host.clone()).map_err(|error| format!("{to}: {error}"))?;
                let stream = tls.connect(name, stream).await;
                self.talk(stream.map_err(|error| format!("{to}: TLS: {error}"))?, asked)
                    .await
            }
        }
    }

    async fn talk(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        asked: &Asked,
    ) -> Result<Got, NoAnswer> {
        let lost = |error: hyper::Error| format!("{} ended the connection: {error}", self.authority());
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(lost)?;
        tokio::spawn(connection);
        let answer = sender.send_request(self.request(asked)?).await.map_err(lost)?;
        let (head, body) = answer.into_parts();
        let body = to_bytes(Body::new(body), LARGEST_BODY).await;
        let text = |(name, value): (&HeaderName, &HeaderValue)| {
            let value = String::from_utf8_lossy(value.as_bytes()).into_owned();
            (name.as_str().to_owned(), value)
        };
        Ok(Got {
            status: head.status.as_u16(),
            headers: head.headers.iter().map(text).collect(),
            body: body
                .map_err(|error| format!("the body from {} broke off: {error}", self.authority()))?
                .to_vec(),
            upstream: None,
        })
    }

    fn request(&self, asked: &Asked) -> Result<Request<Body>, NoAnswer> {
        let unfit = |what: &str| format!("HTTP can't carry the {what} of this request");
        let method = Method::from_bytes(asked.method.as_bytes()).map_err(|_| unfit("method"))?;
        let uri: Uri = asked.path.parse().map_err(|_| unfit("path"))?;
        let mut request = Request::new(Body::from(asked.body.clone()));
        *request.method_mut() = method;
        *request.uri_mut() = uri;
        let host = asked.authority.clone().unwrap_or_else(|| self.authority());
        let headers = request.headers_mut();
        headers.insert(header::HOST, HeaderValue::try_from(host).map_err(|_| unfit("host"))?);
        for (name, value) in asked.headers.iter().filter(|(name, _)| name != "content-length") {
            let name = HeaderName::try_from(name).map_err(|_| unfit("headers"))?;
            headers.append(name, HeaderValue::try_from(value).map_err(|_| unfit("headers"))?);
        }
        Ok(request)
    }
}

fn connector(option: &str, ca: Option<&Path>) -> Result<TlsConnector, String> {
    let config = roots::verifying(ca).ok_or_else(|| {
        let file = ca.map_or_else(|| "the system".to_owned(), |file| file.display().to_string());
        format!("{option}: {file} has no certificates to trust")
    })?;
    Ok(TlsConnector::from(Arc::new(config)))
}
