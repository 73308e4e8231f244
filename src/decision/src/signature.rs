//! Signed envelopes: whether the headers under the prefix were written by an edge that has a key, for this very request,
//! a moment ago.
//!
//! ```text
//! P signature = "v1;key=" id ";ts=" seconds ";sig=" 64 lower-case hex digits
//! sig         = HMAC-SHA256(secret of id, message), the message being that of `message.rs`
//! ```
//!
//! The signature covers the method, the path as the filter sees it (query included), the time, and *every* header under the
//! prefix: one that is added, removed, changed or doubled breaks it. What could make somebody behind the filter read other
//! headers than those that were signed is refused too: a name that is one of ours but for underscores, and a `connection`
//! or `trailer` header that lists one.
//!
//! Left out on purpose: the body, the authority, and any memory of signatures that were seen, so that a request can be
//! repeated on its own method and path until its signature is too old (docs/envelope-signature.md says how to live with it).

mod message;
mod secret;
mod token;

pub use message::{Twice, message};
pub use secret::{LEAST_SECRET_BYTES, LONGEST_SECRET_BYTES, Secret, SecretFault};
pub use token::{LONGEST_KEY_ID, Token, is_key_id};

use alloc::string::String;
use alloc::vec::Vec;

use thiserror::Error;

use crate::envelope::has_prefix;

/// The name of the signature's header, without the prefix.
pub const NAME: &str = "signature";

/// A request, as far as a signature covers it.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// `:method`.
    pub method: &'a [u8],
    /// `:path`, with the query.
    pub path: &'a [u8],
    /// All headers; only those under the prefix are covered.
    pub headers: &'a [(&'a [u8], &'a [u8])],
}

/// The keys that are accepted, and for how long a signature holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signatures {
    keys: Vec<(String, Secret)>,
    max_age_s: u64,
}

/// What a request without a fault is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing<'k> {
    /// No header under the prefix at all, so that there is nothing to sign: there is no envelope.
    Bare,
    /// Signed.
    Signed {
        /// By this key.
        key: &'k str,
        /// At this second.
        at_s: u64,
    },
}

/// Why an envelope is not trusted. No message holds a value of the request but a key's id, a figure or a header's name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Untrusted {
    /// There are headers under the prefix, and no signature.
    #[error("unsigned: there are headers of the envelope and no {prefix}{NAME}")]
    Unsigned {
        /// The prefix.
        prefix: String,
    },
    /// More than one signature, or a header that stands twice.
    #[error("{name} stands twice")]
    Twice {
        /// The header.
        name: String,
    },
    /// Not a signature of this form: cut off, of another version, or two in one line.
    #[error("{prefix}{NAME} is not of the form v1;key=ID;ts=SECONDS;sig=64 lower-case hex digits")]
    IllFormed {
        /// The prefix.
        prefix: String,
    },
    /// No key has this id.
    #[error("signed by the key {key:?}, which is not one of ours")]
    UnknownKey {
        /// The id that was claimed.
        key: String,
    },
    /// The host has no wall clock.
    #[error("this host has no wall clock, so that no signature can be known to be fresh")]
    NoClock,
    /// Signed too long ago.
    #[error("signed {age_s} s ago, and {max_age_s} are allowed")]
    Stale {
        /// How long ago.
        age_s: u64,
        /// How long is allowed.
        max_age_s: u64,
    },
    /// Signed in the future.
    #[error("signed {ahead_s} s ahead of this host's clock, and {max_age_s} are allowed")]
    Ahead {
        /// By how much.
        ahead_s: u64,
        /// By how much it may be.
        max_age_s: u64,
    },
    /// What was signed is not this.
    #[error("altered: the signature by the key {key:?} is not that of this method, path, time and envelope")]
    Altered {
        /// The key.
        key: String,
    },
    /// A name that a reader who takes `_` for `-` would take for one of the envelope's.
    #[error("the header name {name} looks like one of the envelope's, with _ for -")]
    LookAlike {
        /// The header.
        name: String,
    },
    /// A header that would have one of the envelope's removed, or announces one that comes later.
    #[error("the header {header} lists a name of the envelope")]
    Listed {
        /// `connection` or `trailer`.
        header: &'static str,
    },
}

/// Whether this is the name of the signature's header.
pub fn is_signature(name: &[u8], prefix: &str) -> bool {
    has_prefix(name, prefix)
        && name
            .get(prefix.len()..)
            .is_some_and(|suffix| suffix.eq_ignore_ascii_case(NAME.as_bytes()))
}

impl Signatures {
    /// Accepts these keys, each under its id, for `max_age_s` before and after the second that was signed.
    pub const fn new(keys: Vec<(String, Secret)>, max_age_s: u64) -> Self {
        Self { keys, max_age_s }
    }

    /// The ids of the keys, in the order of the configuration.
    pub fn key_ids(&self) -> impl Iterator<Item = &str> {
        self.keys.iter().map(|(id, _)| id.as_str())
    }

    /// How long a signature holds, in seconds.
    pub const fn max_age_s(&self) -> u64 {
        self.max_age_s
    }

    /// Judges a request. `unix_s` reads the wall clock, and is only asked where the rest of a signature is fine.
    ///
    /// # Errors
    /// Why its envelope is not trusted.
    pub fn check(
        &self,
        prefix: &str,
        request: Request<'_>,
        unix_s: impl FnOnce() -> Option<u64>,
    ) -> Result<Standing<'_>, Untrusted> {
        let Some(value) = one_signature(prefix, request.headers)? else {
            return Ok(Standing::Bare);
        };
        let token = Token::parse(value).ok_or_else(|| Untrusted::IllFormed { prefix: prefix.into() })?;
        let Some((key, secret)) = self.keys.iter().find(|(id, _)| id == token.key) else {
            return Err(Untrusted::UnknownKey { key: token.key.into() });
        };
        let message =
            message(prefix, request, token.key, token.at_s).map_err(|Twice(name)| Untrusted::Twice { name })?;
        // Before the age: who has no key is told nothing about the clock, not even in the log.
        if !secret.has_signed(&message, &token.signature) {
            return Err(Untrusted::Altered { key: key.clone() });
        }
        let now_s = unix_s().ok_or(Untrusted::NoClock)?;
        let max_age_s = self.max_age_s;
        let (age_s, ahead_s) = (now_s.saturating_sub(token.at_s), token.at_s.saturating_sub(now_s));
        if age_s > max_age_s {
            return Err(Untrusted::Stale { age_s, max_age_s });
        }
        if ahead_s > max_age_s {
            return Err(Untrusted::Ahead { ahead_s, max_age_s });
        }
        Ok(Standing::Signed { key, at_s: token.at_s })
    }
}

/// The value of the signature, if there is anything that ought to be signed.
fn one_signature<'a>(prefix: &str, headers: &[(&'a [u8], &'a [u8])]) -> Result<Option<&'a [u8]>, Untrusted> {
    let (mut is_claimed, mut signature) = (false, None);
    for (name, value) in headers {
        if has_prefix(name, prefix) {
            is_claimed = true;
            if is_signature(name, prefix) && signature.replace(*value).is_some() {
                return Err(Untrusted::Twice {
                    name: alloc::format!("{prefix}{NAME}"),
                });
            }
        } else if is_like_prefix(name, prefix) {
            return Err(Untrusted::LookAlike {
                name: message::visible(name),
            });
        } else if let Some(header) = ["connection", "trailer"]
            .into_iter()
            .find(|header| name.eq_ignore_ascii_case(header.as_bytes()))
            && value
                .split(|byte| *byte == b',')
                .any(|word| is_like_prefix(word.trim_ascii(), prefix))
        {
            return Err(Untrusted::Listed { header });
        }
    }
    match signature {
        None if is_claimed => Err(Untrusted::Unsigned { prefix: prefix.into() }),
        signature => Ok(signature),
    }
}

/// Whether a name starts with the prefix for a reader to whom `_` and `-` are one.
pub(crate) fn is_like_prefix(name: &[u8], prefix: &str) -> bool {
    let plain = |byte: u8| if byte == b'_' { b'-' } else { byte.to_ascii_lowercase() };
    name.get(..prefix.len())
        .is_some_and(|start| start.iter().zip(prefix.bytes()).all(|(a, b)| plain(*a) == plain(b)))
}

/// Signs a request with a key, as an edge does: the value of the signature's header.
///
/// # Errors
/// A header under the prefix stands twice: what would be refused is not signed. A signature that is there already counts
/// as such.
pub fn sign(prefix: &str, request: Request<'_>, key: &str, secret: &Secret, at_s: u64) -> Result<String, Twice> {
    if request.headers.iter().any(|(name, _)| is_signature(name, prefix)) {
        return Err(Twice(alloc::format!("{prefix}{NAME}")));
    }
    let signature = secret.sign(&message(prefix, request, key, at_s)?);
    Ok(alloc::string::ToString::to_string(&Token { key, at_s, signature }))
}

#[cfg(all(test, feature = "signature"))]
mod tests;
