//! What is signed: the parts of a request as netstrings, so that no two requests give the same bytes, whatever is in them.
//!
//! ```text
//! message   = part("portcullis-envelope-v1") part(key id) part(seconds) part(method) part(path) *( part(name) part(value) )
//! part(x)   = decimal length of x in bytes ":" x ","
//! ```
//!
//! The names are those under the prefix, without the signature's own, in lower case and in the order of their bytes. A
//! header that stands twice has no message: which line a later reader takes would be anybody's guess.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::{Request, is_signature};
use crate::envelope::has_prefix;

/// The first part: tells this message from any other that a key may ever sign.
const PURPOSE: &str = "portcullis-envelope-v1";

/// A header of the envelope that stands twice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Twice(
    /// Its name, in lower case.
    pub String,
);

/// The bytes to sign.
///
/// # Errors
/// A header under the prefix stands twice.
pub fn message(prefix: &str, request: Request<'_>, key: &str, at_s: u64) -> Result<Vec<u8>, Twice> {
    // Kept in order as they come: there are few, and a host bounds how many.
    let mut fields: Vec<(Vec<u8>, &[u8])> = Vec::new();
    for (name, value) in request.headers {
        if !has_prefix(name, prefix) || is_signature(name, prefix) {
            continue;
        }
        let name = name.to_ascii_lowercase();
        match fields.binary_search_by(|(other, _)| other.as_slice().cmp(&name)) {
            Ok(_) => return Err(Twice(visible(&name))),
            Err(at) => fields.insert(at, (name, *value)),
        }
    }
    let mut message = Vec::with_capacity(512);
    for text in [PURPOSE, key, &at_s.to_string()] {
        part(&mut message, text.as_bytes());
    }
    part(&mut message, request.method);
    part(&mut message, request.path);
    for (name, value) in fields {
        part(&mut message, &name);
        part(&mut message, value);
    }
    Ok(message)
}

/// A header's name for a log line, cut, since a client may have chosen it.
pub(super) fn visible(name: &[u8]) -> String {
    let name = name.get(..64).unwrap_or(name);
    name.iter()
        .map(|byte| {
            if byte.is_ascii_graphic() {
                char::from(*byte)
            } else {
                '?'
            }
        })
        .collect()
}

fn part(message: &mut Vec<u8>, bytes: &[u8]) {
    message.extend_from_slice(bytes.len().to_string().as_bytes());
    message.push(b':');
    message.extend_from_slice(bytes);
    message.push(b',');
}
