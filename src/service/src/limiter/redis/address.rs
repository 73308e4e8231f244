//! The address of a Redis or of a cluster: what of it is a mistake, and how its servers are reached.
//!
//! Nothing of an address but its scheme is ever shown: whatever stands in a broken one may be a password.

use std::time::Duration;

use redis::io::tcp::TcpSettings;
use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo as _};
use socket2::TcpKeepalive;

use super::fault::Address;
use crate::limiter::OpenFault;

/// An idle connection is asked whether it still lives after this long: below the idle timeouts of common middleboxes.
const KEEPALIVE: Duration = Duration::from_secs(15);

/// Reads `redis://[user[:password]@]host[:port][/database]`, with `rediss://` for TLS. Certificates are checked with the
/// system's roots (`SSL_CERT_FILE` replaces them) unless the address ends in `#insecure`. Dials nothing.
///
/// # Errors
/// An address that can't be read.
pub(super) fn server(url: &str) -> Result<ConnectionInfo, OpenFault> {
    // Whoever was first has chosen the process's cryptography; there is only one, so the second attempt may fail.
    drop(rustls::crypto::ring::default_provider().install_default());
    let parsed = redis::parse_redis_url(url).ok_or(OpenFault::MalformedAddress)?;
    let info = parsed.into_connection_info().map_err(|_| OpenFault::MalformedAddress)?;
    // `CLIENT SETINFO` only exists since 7.2, and a narrow user may not be allowed it.
    let settings = info.redis_settings().clone().set_skip_set_lib_name();
    let tcp = TcpSettings::default()
        .set_nodelay(true)
        .set_keepalive(TcpKeepalive::new().with_time(KEEPALIVE));
    Ok(info.set_redis_settings(settings).set_tcp_settings(tcp))
}

/// Reads `redis-cluster://[user[:password]@]host[:port][,host[:port]...]`, with `rediss-cluster://` for TLS: members of which
/// any can say who the others are. One user and one password, for all. A cluster has no databases.
///
/// # Errors
/// An address that can't be read.
pub(super) fn seeds(url: &str) -> Result<Vec<ConnectionInfo>, OpenFault> {
    let (scheme, rest) = url.split_once("-cluster://").ok_or(OpenFault::MalformedAddress)?;
    let (authority, end) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let (user, hosts) = match authority.rsplit_once('@') {
        Some((user, hosts)) => (format!("{user}@"), hosts),
        None => (String::new(), authority),
    };
    let seed = |host: &str| {
        let info = server(&format!("{scheme}://{user}{host}{end}"))?;
        (info.redis_settings().db() == 0)
            .then_some(info)
            .ok_or(OpenFault::MalformedAddress)
    };
    hosts.split(',').map(seed).collect()
}

/// How a member is reached that the cluster names: as the seeds are, but for its address.
pub(super) fn member(like: &ConnectionInfo, (host, port): &Address) -> ConnectionInfo {
    let (host, port) = (host.clone(), *port);
    like.clone().set_addr(match like.addr() {
        ConnectionAddr::TcpTls {
            insecure, tls_params, ..
        } => ConnectionAddr::TcpTls {
            host,
            port,
            insecure: *insecure,
            tls_params: tls_params.clone(),
        },
        _ => ConnectionAddr::Tcp(host, port),
    })
}

/// The host of a server.
pub(super) fn host(info: &ConnectionInfo) -> &str {
    match info.addr() {
        ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. } => host,
        _ => "",
    }
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
            assert!(server(url).is_ok(), "{url}");
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
            let fault = server(url).err().unwrap_or_else(|| panic!("{url} was read"));
            assert!(!fault.to_string().contains("hunter2"), "{fault}");
        }
    }

    #[test]
    fn a_cluster_is_some_of_its_members_with_one_password() {
        let addresses = |url: &str| -> Vec<String> {
            let seeds = seeds(url).unwrap_or_else(|_| panic!("{url} was not read"));
            seeds.iter().map(|seed| seed.addr().to_string()).collect()
        };
        assert_eq!(addresses("redis-cluster://a"), ["a:6379"]);
        assert_eq!(
            addresses("redis-cluster://a:7000,b:7001,[::1]:7002/"),
            ["a:7000", "b:7001", "::1:7002"]
        );
        let seeds = seeds("rediss-cluster://user:p%40ss@a:1,b/#insecure").unwrap();
        for seed in &seeds {
            assert_eq!(seed.redis_settings().username(), Some("user"));
            assert_eq!(seed.redis_settings().password(), Some("p@ss"));
        }
        let other = member(&seeds[0], &("c".to_owned(), 9));
        assert_eq!((host(&other), other.addr().to_string().as_str()), ("c", "c:9"));
        assert!(matches!(other.addr(), ConnectionAddr::TcpTls { insecure: true, .. }));
        assert_eq!(other.redis_settings().password(), Some("p@ss"));
    }

    #[test]
    fn a_broken_address_of_a_cluster_is_refused_and_not_shown() {
        for url in [
            "redis-cluster://",
            "redis-cluster://:hunter2@",
            "redis-cluster://:hunter2@a,,b",
            "redis-cluster://:hunter2@a,b:port",
            "redis-cluster://:hunter2@a/1",
            "rediss-cluster://:hunter2@a#sure",
        ] {
            let fault = seeds(url).err().unwrap_or_else(|| panic!("{url} was read"));
            assert!(!fault.to_string().contains("hunter2"), "{fault}");
        }
    }
}
