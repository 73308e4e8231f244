//! The address of a Redis: what of it is a mistake, and the client made of it.
//!
//! Nothing of an address but its scheme is ever shown: whatever stands in a broken one may be a password.

use std::time::Duration;

use redis::IntoConnectionInfo as _;
use redis::io::tcp::TcpSettings;

use socket2::TcpKeepalive;

use crate::limiter::OpenFault;

/// An idle connection is asked whether it still lives after this long: below the idle timeouts of common middleboxes.
const KEEPALIVE: Duration = Duration::from_secs(15);

/// Reads `redis://[user[:password]@]host[:port][/database]`, with `rediss://` for TLS. Certificates are checked with the
/// system's roots (`SSL_CERT_FILE` replaces them) unless the address ends in `#insecure`. Dials nothing.
///
/// # Errors
/// An address that can't be read.
pub(super) fn client(url: &str) -> Result<redis::Client, OpenFault> {
    // Whoever was first has chosen the process's cryptography; there is only one, so the second attempt may fail.
    drop(rustls::crypto::ring::default_provider().install_default());
    let parsed = redis::parse_redis_url(url).ok_or(OpenFault::MalformedAddress)?;
    let info = parsed.into_connection_info().map_err(|_| OpenFault::MalformedAddress)?;
    // `CLIENT SETINFO` only exists since 7.2, and a narrow user may not be allowed it.
    let settings = info.redis_settings().clone().set_skip_set_lib_name();
    let tcp = TcpSettings::default()
        .set_nodelay(true)
        .set_keepalive(TcpKeepalive::new().with_time(KEEPALIVE));
    redis::Client::open(info.set_redis_settings(settings).set_tcp_settings(tcp))
        .map_err(|_| OpenFault::MalformedAddress)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_servers_with_and_without_tls_are_read() {
        for url in [
            "redis://localhost",
            "redis://127.0.0.1:7000/3",
            "redis://:p%40ss@[::1]:7000",
            "rediss://user:secret@store.example:6380",
            "rediss://store.example/#insecure",
        ] {
            assert!(client(url).is_ok(), "{url}");
        }
    }

    #[test]
    fn a_broken_address_is_refused_and_not_shown() {
        for url in [
            "redis://",
            "redis://:hunter2",
            "redis://u:hunter2@h:port",
            "rediss://:hunter2@h/#sure",
            "redis://:hunter2@h/db",
        ] {
            let fault = client(url).err().unwrap_or_else(|| panic!("{url} was read"));
            assert!(!fault.to_string().contains("hunter2"), "{fault}");
        }
    }
}
