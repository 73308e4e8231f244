//! What an error of Postgres, of PgBouncer or of the client means. Their words are compared at most, never kept.

use std::error::Error as _;
use std::io;

use tokio_postgres::Error;
use tokio_postgres::error::SqlState;

use crate::limiter::StoreFault;

/// The kind of an error.
pub(super) fn of(error: &Error) -> StoreFault {
    if let Some(code) = error.code() {
        return of_code(code.code());
    }
    // The client's own words, which hold nothing of the server's: only they tell a refused password from a broken line.
    match error.to_string().as_str() {
        "authentication error" | "invalid configuration" => StoreFault::AccessDenied,
        "unexpected message from server" | "error parsing response from server" => StoreFault::NotSensible,
        text if text.starts_with("error serializing") || text.starts_with("error deserializing") => {
            StoreFault::NotSensible
        }
        _ => StoreFault::Connection,
    }
}

/// Why no connection could be made, in words of our own: for whoever sits at a terminal and has just said the address.
/// `None` where the kind says all.
pub(super) fn cause(error: &Error) -> Option<&'static str> {
    match error.code().map(SqlState::code) {
        Some("3D000") => return Some("the database that the address names does not exist"),
        Some("28P01") => return Some("the password is wrong, or the user does not exist"),
        Some(_) => return None,
        None => {}
    }
    if error.to_string() == "error performing TLS handshake" {
        return Some("no TLS: the server has none, or its certificate is not trusted");
    }
    let mut source = error.source();
    while let Some(of) = source {
        if let Some(io) = of.downcast_ref::<io::Error>() {
            return of_io(io);
        }
        source = of.source();
    }
    None
}

fn of_io(error: &io::Error) -> Option<&'static str> {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => Some("the connection was refused: nothing listens at that host and port"),
        io::ErrorKind::TimedOut => Some("the host does not answer"),
        io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => Some("there is no way to the host"),
        // The system has no kind for it; these are the standard library's own words.
        _ if error.to_string().starts_with("failed to lookup address information") => {
            Some("the host's name can't be resolved")
        }
        _ => None,
    }
}

/// The kind of an SQLSTATE (PostgreSQL manual, appendix A).
fn of_code(code: &str) -> StoreFault {
    match code {
        // invalid_password and its like; a user without the right to the database, the table or DDL.
        "42501" => StoreFault::AccessDenied,
        _ if code.starts_with("28") => StoreFault::AccessDenied,
        // too_many_connections, also where the rest are reserved.
        "53300" => StoreFault::PoolExhausted,
        "53100" | "53200" => StoreFault::OutOfMemory,
        // query_canceled by the statement's timeout; lock_not_available.
        "57014" | "55P03" => StoreFault::Timeout,
        "57P03" => StoreFault::Loading,
        "25006" => StoreFault::ReadOnly,
        // undefined_table, undefined_column, undefined_function.
        "42P01" | "42703" | "42883" | "3F000" => StoreFault::Schema,
        // A database that does not exist; PgBouncer's own errors (08P01); a backend that was ended.
        "3D000" => StoreFault::Connection,
        _ if code.starts_with("08") || code.starts_with("57") => StoreFault::Connection,
        // Nothing was carried out, and asking again is right: serialization_failure, deadlock_detected.
        "40001" | "40P01" => StoreFault::Connection,
        _ => StoreFault::NotSensible,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_be_refused_has_its_kind() {
        for (code, fault) in [
            ("28P01", StoreFault::AccessDenied),
            ("28000", StoreFault::AccessDenied),
            ("42501", StoreFault::AccessDenied),
            ("53300", StoreFault::PoolExhausted),
            ("57P01", StoreFault::Connection),
            ("57P03", StoreFault::Loading),
            ("08P01", StoreFault::Connection),
            ("57014", StoreFault::Timeout),
            ("25006", StoreFault::ReadOnly),
            ("42P01", StoreFault::Schema),
            ("22P02", StoreFault::NotSensible),
        ] {
            assert_eq!(of_code(code), fault, "{code}");
        }
    }
}
