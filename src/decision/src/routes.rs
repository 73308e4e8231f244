//! Which requests are guarded: a path prefix and methods, compared after the path is brought into one form.
//!
//! The form: without query and fragment, percent-decoded, slashes merged, dot segments removed (RFC 3986, section 5.2.4,
//! after decoding). What cannot be decoded is guarded: a path that we do not understand must not be a way around.

use alloc::string::String;
use alloc::vec::Vec;

/// A guarded route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// Prefix of the normalized path, matched bytewise: `/v1/` guards all below it, `/v1` also `/v10`.
    pub path_prefix: String,
    /// The methods that are guarded; `None` guards all.
    pub methods: Option<Vec<String>>,
}

/// Whether a request is guarded. Without routes everything is, but `OPTIONS` (a CORS preflight carries no envelope).
pub fn is_guarded(routes: Option<&[Route]>, method: &[u8], path: &[u8]) -> bool {
    let Some(routes) = routes else {
        return method != b"OPTIONS";
    };
    let normalized = core::str::from_utf8(path).ok().and_then(normalize);
    routes.iter().any(|route| {
        let method_matches = route
            .methods
            .as_ref()
            .is_none_or(|methods| methods.iter().any(|guarded| guarded.as_bytes() == method));
        let path_matches = normalized
            .as_deref()
            .is_none_or(|path| path.starts_with(&route.path_prefix));
        method_matches && path_matches
    })
}

/// The one form of a path, or `None` if it cannot be decoded into UTF-8 without control characters.
///
/// Absolute-form targets (`http://host/path`) are cut to their path. `%2F` decodes to a slash and then separates: an
/// upstream may see it so. Decoded once: `%2561` stays `%61`, which then has to match as written.
pub fn normalize(target: &str) -> Option<String> {
    let path = match target.split_once("://") {
        Some((scheme, rest)) if !scheme.contains('/') => rest.find('/').map_or("/", |at| rest.get(at..).unwrap_or("/")),
        _ => target,
    };
    let path = path.split(['?', '#']).next().unwrap_or_default();
    let decoded = percent_decode(path.as_bytes())?;
    let decoded = core::str::from_utf8(&decoded).ok()?;
    if decoded.chars().any(char::is_control) {
        return None;
    }
    let mut segments: Vec<&str> = Vec::new();
    let mut trailing_slash = false;
    for segment in decoded.split(['/', '\\']) {
        trailing_slash = matches!(segment, "" | "." | "..");
        match segment {
            "" | "." => {}
            ".." => {
                segments.pop();
            }
            other => segments.push(other),
        }
    }
    let mut normalized = String::with_capacity(decoded.len());
    for segment in &segments {
        normalized.push('/');
        normalized.push_str(segment);
    }
    if trailing_slash || segments.is_empty() {
        normalized.push('/');
    }
    Some(normalized)
}

fn percent_decode(bytes: &[u8]) -> Option<Vec<u8>> {
    let digit = |byte: Option<u8>| byte.and_then(|b| char::from(b).to_digit(16));
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut rest = bytes.iter().copied();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let (high, low) = (digit(rest.next())?, digit(rest.next())?);
            decoded.push(u8::try_from(high.checked_mul(16)?.checked_add(low)?).ok()?);
        } else {
            decoded.push(byte);
        }
    }
    Some(decoded)
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(target_arch = "wasm32")]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    fn guarded(prefix: &str, method: &str, path: &[u8]) -> bool {
        let routes = [Route {
            path_prefix: prefix.into(),
            methods: Some(std::vec!["POST".into()]),
        }];
        is_guarded(Some(&routes), method.as_bytes(), path)
    }

    #[test]
    fn no_spelling_of_a_guarded_path_goes_around_the_guard() {
        for path in [
            "/v1/chat",
            "/v1/chat?x=/health",
            "//v1//chat",
            "/./v1/chat",
            "/health/../v1/chat",
            "/%76%31/chat",
            "/v1%2fchat",
            "/x/%2e%2e/v1/chat",
            "\\v1\\chat",
            "http://host/v1/chat",
            "/../../v1/chat",
            "/v1/%zz",
            "/health%",
            "/health/%ff",
            "/health/%00",
        ] {
            assert!(guarded("/v1/", "POST", path.as_bytes()), "{path}");
        }
        assert!(guarded("/v1/", "POST", b"/\xff"));
    }

    #[test]
    fn other_paths_and_methods_are_left_alone() {
        for path in ["/health", "/v2/chat", "/v1/../health", "/?/v1/", "/v1"] {
            assert!(!guarded("/v1/", "POST", path.as_bytes()), "{path}");
        }
        assert!(!guarded("/v1/", "GET", b"/v1/chat"));
    }

    #[test]
    fn without_routes_everything_but_options_is_guarded() {
        assert!(is_guarded(None, b"GET", b"/"));
        assert!(!is_guarded(None, b"OPTIONS", b"/"));
    }
}
