//! What a store's error means for the caller, and for the connection that it came by.
//!
//! A server's text is only ever compared, never kept: it may hold keys, names of users or parts of a command.

use redis::{ErrorKind, RedisError, ServerError, ServerErrorKind};

use crate::limiter::StoreFault;

/// Whether the connection may be used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Then {
    /// The error is about this one operation.
    Keep,
    /// The server itself can't be used as it is, or replies can't be told apart any more: dial again, which also
    /// resolves the name again and so finds another primary after a failover.
    Redial,
}

/// Where a member of a cluster sends a call that it does not answer itself. The call was not carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Elsewhere {
    /// To the owner of the slot.
    Moved(Address),
    /// To who is about to own the slot, for this once.
    Ask(Address),
    /// Nowhere yet: the keys of the call are on their way from one member to another.
    Soon,
}

/// Host and port. Without a host, it is that of whoever said it.
pub(super) type Address = (String, u16);

/// Whether an error reply says that a call belongs elsewhere.
pub(super) fn elsewhere(error: &ServerError) -> Option<Elsewhere> {
    let named = || {
        let (_, address) = error.details()?.split_once(' ')?;
        let (host, port) = address.trim().rsplit_once(':')?;
        Some((host.to_owned(), port.parse().ok()?))
    };
    match error.kind()? {
        ServerErrorKind::Moved => named().map(Elsewhere::Moved),
        ServerErrorKind::Ask => named().map(Elsewhere::Ask),
        ServerErrorKind::TryAgain => Some(Elsewhere::Soon),
        _ => None,
    }
}

/// What an error reply means.
pub(super) fn of_reply(error: &ServerError) -> (StoreFault, Then) {
    match (error.kind(), error.code()) {
        (Some(ServerErrorKind::ReadOnly | ServerErrorKind::MasterDown), _) | (_, "NOREPLICAS" | "MISCONF") => {
            (StoreFault::ReadOnly, Then::Redial)
        }
        (Some(ServerErrorKind::BusyLoading), _) => (StoreFault::Loading, Then::Redial),
        (_, "OOM") => (StoreFault::OutOfMemory, Then::Redial),
        (_, "NOAUTH" | "WRONGPASS") => (StoreFault::AccessDenied, Then::Redial),
        (Some(ServerErrorKind::NoPerm), _) => (StoreFault::AccessDenied, Then::Keep),
        // Somebody else's script runs for longer than the server's patience.
        (_, "BUSY") => (StoreFault::Timeout, Then::Redial),
        // Nobody serves this one slot; others may be served here.
        (Some(ServerErrorKind::ClusterDown), _) if says(error, "not served") => (StoreFault::ClusterDown, Then::Keep),
        (Some(ServerErrorKind::ClusterDown), _) => (StoreFault::ClusterDown, Then::Redial),
        // A member of a cluster: the keys of one charge do not all live there.
        (
            Some(
                ServerErrorKind::Moved | ServerErrorKind::Ask | ServerErrorKind::CrossSlot | ServerErrorKind::TryAgain,
            ),
            _,
        ) => (StoreFault::NotSensible, Then::Redial),
        _ if is_refused_in_script(error) => (StoreFault::AccessDenied, Then::Keep),
        _ => (StoreFault::NotSensible, Then::Keep),
    }
}

/// A command that the user may not run, met inside a script: only the text says so.
fn is_refused_in_script(error: &ServerError) -> bool {
    says(error, "user executing the script can't") || says(error, "ACL failure in script")
}

fn says(error: &ServerError, words: &str) -> bool {
    error.details().is_some_and(|text| text.contains(words))
}

/// What an error of the client means: the reply never came, or could not be read.
pub(super) fn of_transport(error: &RedisError) -> StoreFault {
    match error.kind() {
        ErrorKind::Io if error.is_timeout() => StoreFault::Timeout,
        ErrorKind::AuthenticationFailed => StoreFault::AccessDenied,
        ErrorKind::Server(_) | ErrorKind::Extension => match error.code() {
            Some("LOADING") => StoreFault::Loading,
            Some("NOAUTH" | "WRONGPASS" | "NOPERM") => StoreFault::AccessDenied,
            _ => StoreFault::NotSensible,
        },
        ErrorKind::Parse | ErrorKind::UnexpectedReturnType | ErrorKind::RESP3NotSupported => StoreFault::NotSensible,
        _ => StoreFault::Connection,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(line: &str) -> ServerError {
        let bytes = format!("-{line}\r\n");
        match redis::parse_redis_value(bytes.as_bytes()) {
            Ok(redis::Value::ServerError(error)) => error,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn replies_of_a_server_that_takes_no_writes_are_told_apart_and_redialled() {
        for (line, fault) in [
            (
                "READONLY You can't write against a read only replica.",
                StoreFault::ReadOnly,
            ),
            (
                "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
                StoreFault::ReadOnly,
            ),
            ("NOREPLICAS Not enough good replicas to write.", StoreFault::ReadOnly),
            (
                "OOM command not allowed when used memory > 'maxmemory'.",
                StoreFault::OutOfMemory,
            ),
            ("LOADING Redis is loading the dataset in memory", StoreFault::Loading),
            ("NOAUTH Authentication required.", StoreFault::AccessDenied),
            ("BUSY Redis is busy running a script.", StoreFault::Timeout),
            ("MOVED 3999 127.0.0.1:6381", StoreFault::NotSensible),
            ("CLUSTERDOWN The cluster is down", StoreFault::ClusterDown),
        ] {
            assert_eq!(of_reply(&reply(line)), (fault, Then::Redial), "{line}");
        }
    }

    #[test]
    fn an_error_about_one_operation_leaves_the_connection_alone() {
        for (line, fault) in [
            (
                "WRONGTYPE Operation against a key holding the wrong kind of value",
                StoreFault::NotSensible,
            ),
            (
                "NOPERM this user has no permissions to run the 'eval' command",
                StoreFault::AccessDenied,
            ),
            (
                "ERR The user executing the script can't run this command or subcommand script: 01b5",
                StoreFault::AccessDenied,
            ),
            ("ERR unknown command 'EVAL'", StoreFault::NotSensible),
            ("CLUSTERDOWN Hash slot not served", StoreFault::ClusterDown),
            ("", StoreFault::NotSensible),
        ] {
            assert_eq!(of_reply(&reply(line)), (fault, Then::Keep), "{line}");
        }
    }

    #[test]
    fn a_member_of_a_cluster_says_where_a_call_belongs() {
        let at = |host: &str| (host.to_owned(), 6381);
        for (line, belongs) in [
            ("MOVED 3999 127.0.0.1:6381", Some(Elsewhere::Moved(at("127.0.0.1")))),
            ("MOVED 3999 :6381", Some(Elsewhere::Moved(at("")))),
            ("ASK 3999 fe80::1:6381", Some(Elsewhere::Ask(at("fe80::1")))),
            (
                "TRYAGAIN Multiple keys request during rehashing of slot",
                Some(Elsewhere::Soon),
            ),
            ("MOVED 3999", None),
            ("MOVED 3999 host:port", None),
            ("CLUSTERDOWN Hash slot not served", None),
            ("ERR no", None),
        ] {
            assert_eq!(elsewhere(&reply(line)), belongs, "{line}");
        }
    }
}
