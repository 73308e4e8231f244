//! Bearer tokens in a file: one a line, `#` begins a comment, any of them is let in. That several are is how one is
//! replaced: add the new one here, then there, then take the old one out.
//!
//! The file is read again while the service runs; a version that can't be used (gone, empty, a line that is no token) changes
//! nothing ([`crate::rereading`]). Left out on purpose: who asks, and what is counted; and the tokens themselves, which no
//! line, fault or answer holds.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use axum::http::{HeaderMap, header};
use portcullis_decision::config::{Faults, NO_TOKEN, is_token};
use subtle::ConstantTimeEq as _;

use crate::locked;
use crate::rereading::Reread;

/// The longest file that is read: more lines than anybody replaces at once.
const LARGEST_FILE: usize = 64 * 1024;

/// The tokens of one file, as it was when it last made sense.
pub struct Tokens {
    /// The key of the configuration that names the file.
    key: &'static str,
    path: PathBuf,
    good: Mutex<Good>,
}

#[derive(Clone)]
struct Good {
    text: Vec<u8>,
    tokens: Arc<[Vec<u8>]>,
}

impl Tokens {
    /// Reads the file that `key` names.
    ///
    /// # Errors
    /// That it can't be read, holds no token, or every line that is none; never a part of a token.
    pub fn open(key: &'static str, path: &str) -> Result<Arc<Self>, Faults> {
        let path = PathBuf::from(path);
        let good = read(&path).and_then(Good::of).map_err(|reasons| {
            let mut faults = Faults::default();
            reasons.into_iter().for_each(|reason| faults.add(key, reason));
            faults
        })?;
        Ok(Arc::new(Self {
            key,
            path,
            good: Mutex::new(good),
        }))
    }

    /// Whether a request brings one of the tokens. How long that takes says nothing about how much of one is right.
    pub fn admit(&self, headers: &HeaderMap) -> bool {
        let mut lines = headers.get_all(header::AUTHORIZATION).iter();
        let (Some(line), None) = (lines.next(), lines.next()) else {
            return false;
        };
        let Some(brought) = bearer(line.as_bytes()) else {
            return false;
        };
        let tokens = Arc::clone(&locked(&self.good).tokens);
        let found = tokens.iter().fold(subtle::Choice::from(0), |found, token| {
            found | token.as_slice().ct_eq(brought)
        });
        found.into()
    }
}

impl Reread for Tokens {
    const LOADED: &str = "tokens_loaded";
    const UNUSABLE: &str = "tokens_unusable";

    fn key(&self) -> &'static str {
        self.key
    }

    fn look(&self) -> Result<Option<String>, Vec<String>> {
        let text = read(&self.path)?;
        if text == locked(&self.good).text {
            return Ok(None);
        }
        let good = Good::of(text)?;
        let count = good.tokens.len();
        *locked(&self.good) = good;
        Ok(Some(format!("{count} tokens")))
    }
}

impl Good {
    fn of(text: Vec<u8>) -> Result<Self, Vec<String>> {
        let lines = std::str::from_utf8(&text).map_err(|_| vec!["must be text, one token a line".to_owned()])?;
        let (mut tokens, mut reasons) = (Vec::new(), Vec::new());
        for (line, at) in lines.lines().zip(1_u64..) {
            let token = line.split('#').next().unwrap_or_default().trim();
            if token.is_empty() {
                continue;
            }
            if is_token(token) {
                tokens.push(token.as_bytes().to_vec());
            } else {
                reasons.push(format!("line {at} {NO_TOKEN}"));
            }
        }
        if tokens.is_empty() && reasons.is_empty() {
            reasons.push("has no token: at least one line must hold one".to_owned());
        }
        if reasons.is_empty() {
            Ok(Self {
                tokens: tokens.into(),
                text,
            })
        } else {
            Err(reasons)
        }
    }
}

fn read(path: &Path) -> Result<Vec<u8>, Vec<String>> {
    let text = std::fs::read(path).map_err(|error| vec![format!("cannot be read: {error}")])?;
    if text.len() > LARGEST_FILE {
        return Err(vec![format!(
            "has {} bytes, at most {LARGEST_FILE} are read",
            text.len()
        )]);
    }
    Ok(text)
}

/// What follows the scheme, whose case does not count.
fn bearer(line: &[u8]) -> Option<&[u8]> {
    let (scheme, rest) = line.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| rest.trim_ascii())
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    const ONE: &str = "0123456789abcdefghijklmnopqrstuv";
    const OTHER: &str = "vutsrqponmlkjihgfedcba9876543210";

    fn tokens(text: &str) -> Result<Good, Vec<String>> {
        Good::of(text.as_bytes().to_vec())
    }

    fn admits(text: &str, lines: &[&str]) -> bool {
        let tokens = Tokens {
            key: "tokens_file",
            path: PathBuf::new(),
            good: Mutex::new(tokens(text).unwrap_or_else(|reasons| panic!("{reasons:?}"))),
        };
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(header::AUTHORIZATION, HeaderValue::from_str(line).unwrap());
        }
        tokens.admit(&headers)
    }

    #[test]
    fn any_listed_token_is_let_in_and_nothing_like_it() {
        let text = format!("# the old one\n{ONE}\n\n  {OTHER}  # the new one\r\n");
        for good in [
            format!("Bearer {ONE}"),
            format!("bearer {OTHER}"),
            format!("BEARER  {OTHER}"),
        ] {
            assert!(admits(&text, &[&good]), "{good}");
        }
        let shorter = &ONE[..31];
        for bad in [
            String::new(),
            "Bearer".to_owned(),
            "Bearer ".to_owned(),
            ONE.to_owned(),
            format!("Basic {ONE}"),
            format!("Bearer {shorter}"),
            format!("Bearer {ONE}x"),
            format!("Bearer {}", ONE.to_uppercase()),
            format!("Bearer {ONE},{OTHER}"),
        ] {
            assert!(!admits(&text, &[&bad]), "{bad}");
        }
        assert!(!admits(&text, &[]));
        let good = format!("Bearer {ONE}");
        assert!(!admits(&text, &[&good, &good]), "two lines say nothing certain");
    }

    #[test]
    fn every_line_that_is_no_token_is_named_and_none_is_shown() {
        let reasons = tokens("hunter2\n# fine\nhunter2 hunter2 hunter2 hunter2 hunter2\n")
            .err()
            .unwrap();
        assert_eq!(reasons, [format!("line 1 {NO_TOKEN}"), format!("line 3 {NO_TOKEN}")]);
        for empty in ["", "\n# nothing\n"] {
            assert_eq!(
                tokens(empty).err().unwrap(),
                ["has no token: at least one line must hold one"]
            );
        }
    }
}
