//! The address of a Postgres: what of it is a mistake, and how TLS is meant.
//!
//! `sslmode` follows libpq except that it is never laxer about certificates than its name sounds:
//!
//! | `sslmode` | encrypted | certificate and host name checked |
//! | --- | --- | --- |
//! | `disable` | no | |
//! | `allow`, `prefer` (default) | if the server offers it | no: who could forge one could also refuse TLS |
//! | `require`, `verify-ca`, `verify-full` | yes | yes, by the system's roots, `SSL_CERT_FILE` or `sslrootcert` |
//!
//! Nothing of an address is ever shown: whatever stands in a broken one may be a password.

use std::path::Path;
use std::time::Duration;

use tokio_postgres::Config;
use tokio_postgres::config::SslMode;
use tokio_postgres_rustls::MakeRustlsConnect;

use super::connect::{unverified, verified};

/// An idle connection is asked whether it still lives after this long: below the idle timeouts of common middleboxes.
const KEEPALIVE: Duration = Duration::from_secs(15);
/// Sent data that stays unacknowledged for this long means a dead peer.
const UNACKNOWLEDGED: Duration = Duration::from_secs(5);

/// Why no connection could be tried by an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AddressFault {
    /// It can't be read.
    #[error(
        "must be postgres://[user[:password]@]host[:port]/database[?sslmode=disable|prefer|require|verify-full] (its \
         value is not shown)"
    )]
    Malformed,
    /// TLS is required, and nothing can vouch for a certificate.
    #[error("sslmode asks to check the server's certificate, and no root certificates were found: set SSL_CERT_FILE")]
    NoRoots,
}

/// An address, read.
pub(super) struct Address {
    pub(super) config: Config,
    pub(super) tls: MakeRustlsConnect,
}

/// Reads an address.
///
/// # Errors
/// See [`AddressFault`].
pub(super) fn read(url: &str) -> Result<Address, AddressFault> {
    let (base, query) = url.split_once('?').unwrap_or((url, ""));
    let (mut mode, mut roots) = (SslMode::Prefer, None);
    let mut kept = Vec::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        match pair.split_once('=') {
            Some(("sslmode", "disable")) => mode = SslMode::Disable,
            Some(("sslmode", "allow" | "prefer")) => mode = SslMode::Prefer,
            Some(("sslmode", "require" | "verify-ca" | "verify-full")) => mode = SslMode::Require,
            Some(("sslmode", _)) => return Err(AddressFault::Malformed),
            Some(("sslrootcert", "system")) => roots = None,
            Some(("sslrootcert", file)) => roots = Some(Path::new(file)),
            _ => kept.push(pair),
        }
    }
    let rest = if kept.is_empty() {
        String::new()
    } else {
        format!("?{}", kept.join("&"))
    };
    let mut config: Config = format!("{base}{rest}").parse().map_err(|_| AddressFault::Malformed)?;
    if config.get_hosts().is_empty() {
        return Err(AddressFault::Malformed);
    }
    config
        .ssl_mode(mode)
        .application_name("portcullis")
        .connect_timeout(super::CONNECT_TIMEOUT)
        .keepalives_idle(KEEPALIVE)
        .tcp_user_timeout(UNACKNOWLEDGED);
    let tls = if mode == SslMode::Require {
        verified(roots)?
    } else {
        unverified()?
    };
    Ok(Address { config, tls })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_with_tls_as_it_is_meant() {
        for (url, mode) in [
            ("postgres://u:p%40ss@store.example/portcullis", SslMode::Prefer),
            ("postgresql://u@[::1]:6432/p?sslmode=disable", SslMode::Disable),
            (
                "postgres://u@a,b/p?sslmode=prefer&target_session_attrs=read-write",
                SslMode::Prefer,
            ),
        ] {
            let address = read(url).ok().unwrap_or_else(|| panic!("{url}"));
            assert_eq!(address.config.get_ssl_mode(), mode, "{url}");
            assert_eq!(address.config.get_application_name(), Some("portcullis"));
        }
    }

    #[test]
    fn a_broken_address_is_refused_and_not_shown() {
        for url in [
            "postgres://",
            "postgres://u:hunter2@h:port/d",
            "postgres://u:hunter2@h/d?sslmode=sure",
            "postgres://u:hunter2@h/d?hunter2=1",
        ] {
            let fault = read(url).err().unwrap_or_else(|| panic!("{url} was read"));
            assert!(!fault.to_string().contains("hunter2"), "{fault}");
        }
    }

    #[test]
    fn required_tls_needs_roots() {
        let fault = read("postgres://u@h/d?sslmode=require&sslrootcert=/nowhere").err();
        assert_eq!(fault, Some(AddressFault::NoRoots));
    }
}
