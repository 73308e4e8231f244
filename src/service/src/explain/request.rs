//! The request that is explained, as it would arrive at the filter, and what of it may be shown.
//!
//! Shown are the values that a decision can depend on: the envelope and a handful of fields. Of every other header only the
//! name is, and of the path no query: a credential can stand in any of them.

use portcullis_decision::envelope::has_prefix;
use portcullis_decision::signature::is_signature;
use portcullis_decision::stream::Header;

/// Headers beside the envelope that the filter looks at.
const LOOKED_AT: &[&str] = &[
    "accept-encoding",
    "connection",
    "content-length",
    "content-type",
    "expect",
    "transfer-encoding",
    "upgrade",
    "x-request-id",
];
/// Stands for a value that is not shown.
const HIDDEN: &str = "(not shown)";

/// One request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Request {
    /// The method.
    pub method: String,
    /// The path with its query.
    pub path: String,
    /// Host and port.
    pub authority: Option<String>,
    /// Fields, lower-case, in order.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Vec<u8>,
}

/// `Name: value`, or `Name;` for an empty value as curl says it; `Name:` sends none.
///
/// # Errors
/// What is no header, by its first word alone: the rest may be a credential.
pub fn header(option: &str, text: &str) -> Result<Option<(String, String)>, String> {
    let (name, value) = match (text.split_once(':'), text.strip_suffix(';')) {
        (Some((name, value)), _) => (name, Some(value.trim()).filter(|value| !value.is_empty())),
        (None, Some(name)) => (name, Some("")),
        (None, None) => {
            let first = first_word(text);
            return Err(format!("{option} {first:?} must be \"Name: value\": it has no colon"));
        }
    };
    let name = name.trim().to_ascii_lowercase();
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    if name.is_empty() || !name.bytes().all(is_token) {
        let shown = first_word(&name);
        return Err(format!("{option} {shown:?} is no name of a header"));
    }
    Ok(value.map(|value| (name, value.to_owned())))
}

/// What `--body BODY|@FILE` says: nothing, itself, or what stands in a file.
///
/// # Errors
/// A file that can't be read.
pub fn body(text: Option<&str>) -> Result<Vec<u8>, String> {
    let Some(text) = text else { return Ok(Vec::new()) };
    match text.strip_prefix('@') {
        None => Ok(text.as_bytes().to_vec()),
        Some(file) => std::fs::read(file).map_err(|error| format!("--body @{file}: cannot be read: {error}")),
    }
}

/// What may be shown of a text that may hold a credential.
fn first_word(text: &str) -> String {
    text.split_whitespace()
        .next()
        .unwrap_or_default()
        .chars()
        .take(40)
        .collect()
}

impl Request {
    /// Adds a field unless it is there.
    pub fn default_header(&mut self, name: &str, value: &str) {
        if !self.headers.iter().any(|(known, _)| known == name) {
            self.headers.push((name.to_owned(), value.to_owned()));
        }
    }

    /// The path without its query.
    pub fn bare_path(&self) -> &str {
        self.path.split('?').next().unwrap_or_default()
    }

    /// What the filter sees.
    pub fn fields(&self) -> Vec<Header<'_>> {
        let mut fields: Vec<Header<'_>> = vec![
            (b":method", self.method.as_bytes()),
            (b":path", self.path.as_bytes()),
            (
                b":authority",
                self.authority.as_deref().unwrap_or("localhost").as_bytes(),
            ),
            (b":scheme", b"http"),
        ];
        fields.extend(
            self.headers
                .iter()
                .map(|(name, value)| (name.as_bytes(), value.as_bytes())),
        );
        fields
    }

    /// The headers as they may be shown.
    pub fn shown(&self, prefix: &str) -> Vec<(&str, &str)> {
        let show = |(name, value): &'_ (String, String)| {
            // A signature can be sent again until it is too old.
            let is_of_envelope = has_prefix(name.as_bytes(), prefix) && !is_signature(name.as_bytes(), prefix);
            is_of_envelope || LOOKED_AT.contains(&name.as_str()) || value.is_empty()
        };
        let shown = self.headers.iter().map(|field| {
            let value = if show(field) { field.1.as_str() } else { HIDDEN };
            (field.0.as_str(), value)
        });
        shown.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_decision_depends_on_is_shown() {
        let mut request = Request {
            path: "/v1?key=hunter2".to_owned(),
            ..Request::default()
        };
        for text in [
            "Authorization: Bearer hunter2",
            "Cookie: hunter2",
            "x-api-key: hunter2",
            "anything: hunter2",
            "x-admission-signature: hunter2",
            "X-Admission-Org-Id: g",
        ] {
            request.headers.extend(header("-H", text).unwrap());
        }
        let shown = format!("{:?} {}", request.shown("x-admission-"), request.bare_path());
        assert!(!shown.contains("hunter2"), "{shown}");
        assert!(shown.contains("(\"x-admission-org-id\", \"g\")"), "{shown}");
    }

    #[test]
    fn what_is_no_header_is_named_by_its_first_word() {
        assert_eq!(header("-H", "a:").unwrap(), None);
        assert_eq!(header("-H", "A:  b ").unwrap(), Some(("a".into(), "b".into())));
        for (text, why) in [
            (
                "Authorization Bearer hunter2",
                "-H \"Authorization\" must be \"Name: value\"",
            ),
            ("a b: hunter2", "-H \"a\" is no name of a header"),
            (": hunter2", "-H \"\" is no name of a header"),
        ] {
            let fault = header("-H", text).unwrap_err();
            assert!(fault.contains(why) && !fault.contains("hunter2"), "{fault}");
        }
    }
}
