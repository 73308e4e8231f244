//! Making a connection: TLS, and the task that drives it and keeps the server's notices to itself.

use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;

use deadpool_postgres::Connect;
use futures_util::future::poll_fn;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use tokio::task::JoinHandle;
use tokio_postgres::{Client, Config, Error};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::address::AddressFault;
use crate::roots;

/// TLS whose certificates are checked by the roots in a file, or by the system's.
pub(super) fn verified(file: Option<&Path>) -> Result<MakeRustlsConnect, AddressFault> {
    let config = roots::verifying(file).ok_or(AddressFault::NoRoots)?;
    Ok(MakeRustlsConnect::new(config))
}

/// TLS against listeners, not against who stands in between.
pub(super) fn unverified() -> Result<MakeRustlsConnect, AddressFault> {
    let provider = Arc::new(ring::default_provider());
    let config = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|_| AddressFault::NoRoots)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyCertificate(provider)))
        .with_no_client_auth();
    Ok(MakeRustlsConnect::new(config))
}

#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(
            message,
            certificate,
            signature,
            &self.0.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(
            message,
            certificate,
            signature,
            &self.0.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// Dials for the pool. The pool's own dialler would log the server's words.
pub(super) struct Connector(MakeRustlsConnect);

impl Connector {
    pub(super) const fn new(tls: MakeRustlsConnect) -> Self {
        Self(tls)
    }
}

type Dialled<'a> = Pin<Box<dyn Future<Output = Result<(Client, JoinHandle<()>), Error>> + Send + 'a>>;

impl Connect for Connector {
    fn connect(&self, config: &Config) -> Dialled<'_> {
        let (config, tls) = (config.clone(), self.0.clone());
        Box::pin(async move {
            let (client, mut connection) = config.connect(tls).await?;
            // An error ends every statement under way, and the client sees it there; notices are for nobody.
            let driver = tokio::spawn(async move {
                while let Some(Ok(_)) = poll_fn(|context| connection.poll_message(context)).await {}
            });
            Ok((client, driver))
        })
    }
}
