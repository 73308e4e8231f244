//! Targets for a fuzzer: plain functions that take any bytes and fail an assertion where a parser breaks its word.
//!
//! Each input is read whole, cut in two and byte by byte; the readings must agree, and stay under their bounds.

use alloc::string::String;
#[cfg(feature = "signature")]
use alloc::vec::Vec;

use crate::body::{BodyFacts, BodyFault, BodyReader, model_of_path, reconcile};
#[cfg(feature = "signature")]
use crate::envelope::has_prefix;
use crate::hold::Hold;
use crate::limits::LARGEST_LIMIT;
#[cfg(feature = "signature")]
use crate::signature::{Request, Secret, Signatures, Standing, Token, sign};
use crate::usage::{CARRY_LIMIT_BYTES, Format, Usage, UsageReader};

/// The first bytes choose the limit and the cut, the rest is a body.
pub fn fuzz_body(data: &[u8]) {
    let Some((&[limit, cut], body)) = data.split_first_chunk() else {
        return;
    };
    let limit = if limit == 0 {
        u64::MAX
    } else {
        u64::from(limit).saturating_mul(16)
    };
    let whole = read_body(limit, [body]);
    let (head, tail) = body.split_at_checked(usize::from(cut)).unwrap_or((body, &[]));
    assert_eq!(whole, read_body(limit, [head, tail]), "cut at {cut}");
    assert_eq!(whole, read_body(limit, body.chunks(1)), "byte by byte");
    if let Ok(facts) = whole {
        let hold = Hold::of(&facts, 1024);
        assert!((hold.input_tokens..=LARGEST_LIMIT).contains(&hold.tokens()));
        let path = model_of_path(&String::from_utf8_lossy(body)).unwrap_or_default();
        if let Ok(model) = reconcile(path, facts.model) {
            assert!((1..=256).contains(&model.len()));
        }
    }
}

/// The first bytes choose the format and the cut, the rest is a response.
pub fn fuzz_usage(data: &[u8]) {
    let Some((&[format, cut], body)) = data.split_first_chunk() else {
        return;
    };
    let format = if format & 1 == 0 {
        Format::Json
    } else {
        Format::EventStream
    };
    let whole = read_usage(format, [body]);
    let (head, tail) = body.split_at_checked(usize::from(cut)).unwrap_or((body, &[]));
    assert_eq!(whole, read_usage(format, [head, tail]), "cut at {cut}");
    assert_eq!(whole, read_usage(format, body.chunks(1)), "byte by byte");
    if let Some(usage) = whole {
        let figures = [usage.input, usage.cached_input, usage.output];
        assert!(figures.into_iter().flatten().all(|figure| figure <= LARGEST_LIMIT));
        assert!(usage.cached_input <= usage.input);
    }
}

/// The first byte chooses what is altered; then come, line by line, the value of a signature, a method, a path, and names and
/// values of headers in turn.
#[cfg(feature = "signature")]
pub fn fuzz_signature(data: &[u8]) {
    const PREFIX: &str = "x-admission-";
    const KEY: &str = "k";
    const NOW_S: u64 = 1_764_000_000;
    let Some((&at, text)) = data.split_first() else { return };
    let mut lines = text.split(|byte| *byte == b'\n');
    let (value, method, path) = (lines.next(), lines.next(), lines.next());
    let (value, method, path) = (
        value.unwrap_or_default(),
        method.unwrap_or_default(),
        path.unwrap_or_default(),
    );
    if let Some(token) = Token::parse(value) {
        assert_eq!(
            alloc::string::ToString::to_string(&token).as_bytes(),
            value,
            "written another way"
        );
    }
    let mut headers: Vec<(&[u8], &[u8])> = Vec::new();
    while let (Some(name), Some(value)) = (lines.next(), lines.next()) {
        headers.push((name, value));
    }
    let Ok(secret) = Secret::from_bytes(&[7; 32]) else {
        return;
    };
    let signatures = Signatures::new(alloc::vec![(KEY.into(), secret.clone())], 60);
    let is_trusted = |method: &[u8], path: &[u8], headers: &[(&[u8], &[u8])]| {
        let request = Request { method, path, headers };
        matches!(
            signatures.check(PREFIX, request, || Some(NOW_S)),
            Ok(Standing::Signed { .. })
        )
    };
    assert!(!is_trusted(method, path, &headers), "nobody has signed this");
    let request = Request {
        method,
        path,
        headers: &headers,
    };
    let Ok(signature) = sign(PREFIX, request, KEY, &secret, NOW_S) else {
        return;
    };
    headers.push((b"X-Admission-Signature", signature.as_bytes()));
    let is_refused_anyway = !is_trusted(method, path, &headers);
    let longer = |bytes: &[u8]| [bytes, b"0"].concat();
    assert!(!is_trusted(&longer(method), path, &headers), "another method");
    assert!(!is_trusted(method, &longer(path), &headers), "another path");
    if let Some((name, value)) = headers.get(usize::from(at)) {
        let (is_covered, value) = (has_prefix(name, PREFIX), longer(value));
        let mut altered = headers.clone();
        if let Some(field) = altered.get_mut(usize::from(at)) {
            field.1 = &value;
        }
        assert!(!is_covered || !is_trusted(method, path, &altered), "another value");
    }
    // A header that would hide another, or looks like one, is the only reason not to trust what was signed.
    let hides = |(name, value): &(&[u8], &[u8])| {
        let lists = [&b"connection"[..], b"trailer"]
            .iter()
            .any(|list| name.eq_ignore_ascii_case(list));
        (lists && !value.is_empty()) || name.contains(&b'_')
    };
    assert!(
        !is_refused_anyway || headers.iter().any(hides),
        "signed and not trusted"
    );
}

fn read_body<'a>(limit: u64, pieces: impl IntoIterator<Item = &'a [u8]>) -> Result<BodyFacts, BodyFault> {
    let mut reader = BodyReader::new(limit);
    for piece in pieces {
        reader.feed(piece)?;
        assert!(reader.carried_bytes() <= CARRY_LIMIT_BYTES);
    }
    reader.finish()
}

fn read_usage<'a>(format: Format, pieces: impl IntoIterator<Item = &'a [u8]>) -> Option<Usage> {
    let mut reader = UsageReader::new(format);
    for piece in pieces {
        reader.feed(piece);
        assert!(reader.carried_bytes() <= CARRY_LIMIT_BYTES);
    }
    reader.finish()
}
