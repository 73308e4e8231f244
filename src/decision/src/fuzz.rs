//! Targets for a fuzzer: plain functions that take any bytes and fail an assertion where a parser breaks its word.
//!
//! Each input is read whole, cut in two and byte by byte; the readings must agree, and stay under their bounds.

use alloc::string::String;

use crate::body::{BodyFacts, BodyFault, BodyReader, model_of_path, reconcile};
use crate::hold::Hold;
use crate::limits::LARGEST_LIMIT;
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
