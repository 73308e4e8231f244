//! TLS to others: certificates checked by the roots of a file, or by the system's.

use std::path::Path;
use std::sync::Arc;

use rustls::crypto::ring;
use rustls::{ClientConfig, RootCertStore};

/// A client that takes only certificates that these roots vouch for; `None` if there is no root among them.
pub(crate) fn verifying(file: Option<&Path>) -> Option<ClientConfig> {
    let found = match file {
        Some(file) => rustls_native_certs::load_certs_from_paths(Some(file), None),
        None => rustls_native_certs::load_native_certs(),
    };
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        return None;
    }
    with_roots(roots)
}

/// A client that takes no certificate at all: for who speaks without TLS.
pub(crate) fn trusting_nobody() -> Option<ClientConfig> {
    with_roots(RootCertStore::empty())
}

fn with_roots(roots: RootCertStore) -> Option<ClientConfig> {
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .ok()?;
    Some(config.with_root_certificates(roots).with_no_client_auth())
}
