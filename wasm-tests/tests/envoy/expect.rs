//! What a served and a refused request look like to the client, in one place: DESIGN's failure classes with everything
//! that each of them promises about headers and body. The table is written out here, not taken from the product.

use portcullis_wasm_tests::Answer;

/// A code, with the class and status it has to come with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Refusal {
    pub(crate) status: u16,
    pub(crate) code: &'static str,
    pub(crate) class: &'static str,
    /// The numbers of seconds that Retry-After may give; none if it must be absent.
    pub(crate) retry_after: Option<(u64, u64)>,
    pub(crate) message: Option<&'static str>,
}

const fn envelope(code: &'static str, class: &'static str) -> Refusal {
    Refusal {
        status: 503,
        code,
        class,
        retry_after: None,
        message: None,
    }
}

const fn quota(code: &'static str, message: Option<&'static str>) -> Refusal {
    Refusal {
        status: 429,
        code,
        class: "quota_exhausted",
        retry_after: Some((1, 60)),
        message,
    }
}

pub(crate) const ENVELOPE_MISSING: Refusal = envelope("ENVELOPE_MISSING", "envelope_missing");
pub(crate) const ENVELOPE_UNTRUSTED: Refusal = envelope("ENVELOPE_UNTRUSTED", "envelope_malformed");
pub(crate) const ENVELOPE_MALFORMED: Refusal = envelope("ENVELOPE_MALFORMED", "envelope_malformed");
pub(crate) const ENVELOPE_PARTIAL: Refusal = envelope("ENVELOPE_PARTIAL", "envelope_malformed");
pub(crate) const RATE_LIMITED: Refusal = quota("RATE_LIMITED", Some("shared inference rate limit exceeded"));
pub(crate) const TOKENS_LIMITED: Refusal = quota("TOKENS_LIMITED", None);
pub(crate) const CONCURRENCY_LIMITED: Refusal = quota("CONCURRENCY_LIMITED", None);
pub(crate) const CAPACITY_EXHAUSTED: Refusal = Refusal {
    status: 503,
    code: "CAPACITY_EXHAUSTED",
    class: "capacity_exhausted",
    retry_after: Some((1, 60)),
    message: None,
};
pub(crate) const DECISION_UNAVAILABLE: Refusal = Refusal {
    status: 503,
    code: "SERVICE_DEGRADED",
    class: "decision_unavailable",
    retry_after: Some((1, 1)),
    message: Some("a dependency of admission is unavailable"),
};

/// The request went up and came back as the upstream answered it.
#[track_caller]
pub(crate) fn served(answer: &Answer) {
    assert_eq!((answer.status, answer.text().as_str()), (200, "served"), "{answer:?}");
    assert_eq!(answer.header("x-portcullis-class"), None, "{answer:?}");
    assert_eq!(answer.header("retry-after"), None, "{answer:?}");
}

/// The request was answered by the filter, with all that belongs to this refusal. Gives the Retry-After.
#[track_caller]
pub(crate) fn refused(answer: &Answer, refusal: Refusal) -> u64 {
    assert_eq!(
        (answer.status, answer.code().as_str()),
        (refusal.status, refusal.code),
        "{answer:?} {}",
        answer.text()
    );
    assert_eq!(answer.header("x-portcullis-class"), Some(refusal.class), "{answer:?}");
    assert_eq!(answer.header("content-type"), Some("application/json"), "{answer:?}");
    let error = answer.error();
    assert_eq!(error["type"], refusal.class, "{error}");
    assert!(error["request_id"].as_str().is_some_and(|id| !id.is_empty()), "{error}");
    match refusal.message {
        Some(message) => assert_eq!(error["message"], message),
        None => assert!(
            error["message"].as_str().is_some_and(|message| !message.is_empty()),
            "{error}"
        ),
    }
    let wait = answer.retry_after();
    assert_eq!(error["retry_after"].as_u64(), wait, "header and body differ: {error}");
    match refusal.retry_after {
        Some((least, most)) => assert!(
            wait.is_some_and(|wait| (least..=most).contains(&wait)),
            "{wait:?} {answer:?}"
        ),
        None => {
            assert_eq!(wait, None, "{answer:?}");
            assert_eq!(
                answer.header("x-should-retry"),
                Some("false"),
                "waiting can't cure it: {answer:?}"
            );
        }
    }
    wait.unwrap_or(0)
}

/// The limit that denied, as both families of rate-limit headers show it.
#[track_caller]
pub(crate) fn shows_limit(answer: &Answer, resource: &str, limit: u64, remaining: u64) {
    let shown = |name: &str| {
        answer
            .header(&format!("x-ratelimit-{name}-{resource}"))
            .map(str::to_owned)
    };
    assert_eq!(shown("limit"), Some(limit.to_string()), "{answer:?}");
    assert_eq!(shown("remaining"), Some(remaining.to_string()), "{answer:?}");
    assert!(shown("reset").is_some(), "{answer:?}");
    let policy = answer.header("ratelimit-policy").unwrap_or_default();
    assert!(
        policy.contains(&format!("q={limit}")) && policy.contains("w="),
        "{policy}"
    );
    let state = answer.header("ratelimit").unwrap_or_default();
    assert!(
        state.contains(&format!("r={remaining}")) && state.contains("t="),
        "{state}"
    );
}

/// The numbers of answers by status and code, for messages that tell what a burst saw.
pub(crate) fn summary(answers: &[Answer]) -> Vec<(u16, String, usize)> {
    let mut seen: Vec<(u16, String, usize)> = Vec::new();
    for answer in answers {
        let code = answer.code();
        match seen
            .iter_mut()
            .find(|(status, known, _)| (*status, known.as_str()) == (answer.status, code.as_str()))
        {
            Some((_, _, count)) => *count += 1,
            None => seen.push((answer.status, code, 1)),
        }
    }
    seen
}
