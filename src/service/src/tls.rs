//! TLS of the gateways' listener: the service's certificate, and whose certificates a client must have.
//!
//! The files are read again while the service runs ([`crate::rereading`]); a connection keeps the certificates that it began
//! with. Left out on purpose: names in clients' certificates. Whoever has one of `client_ca` is let in, so that authority must
//! sign gateways alone.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use portcullis_decision::config::{Faults, TlsConfig};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio_rustls::TlsAcceptor;

use crate::locked;
use crate::rereading::Reread;

/// What is spoken over TLS, the better one first.
const PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// The certificates of one configuration, as they were when the files last made sense.
pub struct Certificates {
    certificate: PathBuf,
    key: PathBuf,
    client_ca: Option<PathBuf>,
    good: Mutex<Good>,
}

struct Good {
    texts: Texts,
    config: Arc<ServerConfig>,
}

/// What stands in the files.
#[derive(PartialEq, Eq)]
struct Texts {
    certificate: Vec<u8>,
    key: Vec<u8>,
    client_ca: Option<Vec<u8>>,
}

/// A fault, with the key whose file it is about.
type Reason = (&'static str, String);

impl Certificates {
    /// Reads the files.
    ///
    /// # Errors
    /// The first file that can't be read or used, by its key; nothing of a key file is shown.
    pub fn open(config: &TlsConfig) -> Result<Arc<Self>, Faults> {
        let (certificate, key) = (PathBuf::from(&config.certificate), PathBuf::from(&config.key));
        let client_ca = config.client_ca.as_ref().map(PathBuf::from);
        let good = read(&certificate, &key, client_ca.as_ref())
            .and_then(Good::of)
            .map_err(|(key, reason)| {
                let mut faults = Faults::default();
                faults.add(key, reason);
                faults
            })?;
        Ok(Arc::new(Self {
            certificate,
            key,
            client_ca,
            good: Mutex::new(good),
        }))
    }

    /// What makes TLS of a new connection.
    pub fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(&locked(&self.good).config))
    }

    /// Whether clients need a certificate.
    pub const fn are_mutual(&self) -> bool {
        self.client_ca.is_some()
    }
}

impl Reread for Certificates {
    const LOADED: &str = "certificates_loaded";
    const UNUSABLE: &str = "certificates_unusable";

    fn key(&self) -> &'static str {
        "tls"
    }

    fn look(&self) -> Result<Option<String>, Vec<String>> {
        let told = |(key, reason)| vec![format!("{key}: {reason}")];
        let texts = read(&self.certificate, &self.key, self.client_ca.as_ref()).map_err(told)?;
        if texts == locked(&self.good).texts {
            return Ok(None);
        }
        let good = Good::of(texts).map_err(told)?;
        *locked(&self.good) = good;
        Ok(Some("its certificates".to_owned()))
    }
}

fn read(certificate: &PathBuf, key: &PathBuf, client_ca: Option<&PathBuf>) -> Result<Texts, Reason> {
    let read = |name, path| std::fs::read(path).map_err(|error| (name, format!("cannot be read: {error}")));
    Ok(Texts {
        certificate: read("tls.certificate", certificate)?,
        key: read("tls.key", key)?,
        client_ca: client_ca.map(|path| read("tls.client_ca", path)).transpose()?,
    })
}

impl Good {
    fn of(texts: Texts) -> Result<Self, Reason> {
        let chain = certificates("tls.certificate", &texts.certificate)?;
        let key = PrivateKeyDer::from_pem_slice(&texts.key).map_err(|_| {
            (
                "tls.key",
                "must be a PEM file with one unencrypted private key".to_owned(),
            )
        })?;
        let provider = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| ("tls", error.to_string()))?;
        let builder = match &texts.client_ca {
            None => builder.with_no_client_auth(),
            Some(text) => builder.with_client_cert_verifier(verifier(text, provider)?),
        };
        let mut config = builder.with_single_cert(chain, key).map_err(|error| {
            (
                "tls",
                format!("the certificate and the key can't be used together: {error}"),
            )
        })?;
        config.alpn_protocols = PROTOCOLS.iter().map(|name| name.to_vec()).collect();
        Ok(Self {
            texts,
            config: Arc::new(config),
        })
    }
}

fn verifier(
    text: &[u8],
    provider: Arc<CryptoProvider>,
) -> Result<Arc<dyn rustls::server::danger::ClientCertVerifier>, Reason> {
    let key = "tls.client_ca";
    let mut roots = RootCertStore::empty();
    for certificate in certificates(key, text)? {
        roots
            .add(certificate)
            .map_err(|error| (key, format!("holds a certificate that can't be a root: {error}")))?;
    }
    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
        .build()
        .map_err(|error| (key, error.to_string()))
}

fn certificates(key: &'static str, text: &[u8]) -> Result<Vec<CertificateDer<'static>>, Reason> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text).collect();
    match read {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        _ => Err((key, "must be a PEM file with at least one certificate".to_owned())),
    }
}
