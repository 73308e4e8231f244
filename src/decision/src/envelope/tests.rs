//! The grammar, by example and by property.

use std::vec::Vec;

#[cfg(target_arch = "wasm32")]
use wasm_bindgen_test::wasm_bindgen_test as test;

use super::*;

fn reading<'a>(headers: &[(&'a str, &'a [u8])]) -> Reading<'a> {
    read(
        headers.iter().map(|(name, value)| (name.as_bytes(), *value)),
        "x-admission-",
        false,
    )
}

fn code(headers: &[(&str, &[u8])]) -> Option<Code> {
    reading(headers).code()
}

const OWNER: (&str, &[u8]) = ("x-admission-owner-id", b"o");

#[test]
fn an_owner_alone_is_a_complete_envelope_without_limits() {
    let Reading::Present(envelope) = reading(&[OWNER]) else {
        panic!("not present")
    };
    assert_eq!(envelope.subject.owner, "o");
    assert!(envelope.limits.is_empty());
}

#[test]
fn other_headers_alone_make_no_envelope() {
    assert_eq!(
        code(&[("x-admission-org-id", b"g"), ("x-admission-lane", b"batch")]),
        Some(Code::EnvelopeMissing)
    );
    assert_eq!(code(&[("x-admission-org-id", b"\x07")]), Some(Code::EnvelopeMalformed));
}

#[test]
fn absent_is_unlimited_and_zero_is_blocked() {
    let Reading::Present(envelope) = reading(&[OWNER, ("X-Admission-Owner-Rate-Limit-Tokens", b"0")]) else {
        panic!("not present")
    };
    assert_eq!(envelope.limits.owner.tokens, Limit::Blocked);
    assert_eq!(envelope.limits.owner.requests, Limit::Unlimited);
    assert_eq!(envelope.limits.blocked(), Some((Scope::Owner, Resource::Tokens)));
}

#[test]
fn every_bad_number_is_malformed() {
    for bad in [
        &b""[..],
        b" ",
        b"+5",
        b"-1",
        b"05",
        b"00",
        b"1e3",
        b"5.0",
        b"5,5",
        b"5 ",
        b" 5",
        b"0x5",
        b"1_000",
        "٥".as_bytes(),
        "５".as_bytes(),
        b"9007199254740992",
        b"18446744073709551616",
        b"99999999999999999999999",
        b"NaN",
        b"unlimited",
        b"\xc0\xa7",
    ] {
        let name = "x-admission-owner-rate-limit-requests";
        assert_eq!(code(&[OWNER, (name, bad)]), Some(Code::EnvelopeMalformed), "{bad:?}");
    }
    assert_eq!(
        code(&[OWNER, ("x-admission-owner-rate-limit-requests", b"9007199254740991")]),
        None
    );
}

#[test]
fn a_duplicate_and_a_misspelt_limit_are_malformed() {
    assert_eq!(code(&[OWNER, OWNER]), Some(Code::EnvelopeMalformed));
    assert_eq!(
        code(&[OWNER, ("x-admission-org-id", b"g"), ("X-ADMISSION-ORG-ID", b"g")]),
        Some(Code::EnvelopeMalformed)
    );
    let limit = ("x-admission-owner-rate-limit-requests", &b"5"[..]);
    assert_eq!(code(&[OWNER, limit, limit]), Some(Code::EnvelopeMalformed));
    for name in [
        "owner-rate-limit-request",
        "org-limit",
        "owner-limit-requests",
        "team-concurrency-limit",
        "limit",
        "limit-requests",
    ] {
        let name = std::format!("x-admission-{name}");
        assert_eq!(code(&[OWNER, (&name, b"5")]), Some(Code::EnvelopeMalformed), "{name}");
        assert_eq!(code(&[(&name, b"5")]), Some(Code::EnvelopeMalformed), "{name}");
    }
}

#[test]
fn an_unknown_name_is_ignored_and_reported() {
    let Reading::Present(envelope) = reading(&[OWNER, ("x-admission-region", b"eu"), ("x-admission-limits", b"")])
    else {
        panic!("not present")
    };
    assert_eq!(envelope.unknown_header.as_deref(), Some("region"));
}

#[test]
fn an_unknown_name_with_an_ill_formed_value_is_malformed() {
    for bad in [&b"\xc0\xa7"[..], b"a\x01"] {
        assert_eq!(
            code(&[OWNER, ("x-admission-region", bad)]),
            Some(Code::EnvelopeMalformed),
            "{bad:?}"
        );
    }
}

#[test]
fn a_limit_without_its_ids_is_partial() {
    assert_eq!(
        code(&[("x-admission-owner-rate-limit-requests", b"5")]),
        Some(Code::EnvelopePartial)
    );
    assert_eq!(
        code(&[OWNER, ("x-admission-org-rate-limit-requests", b"5")]),
        Some(Code::EnvelopePartial)
    );
    assert_eq!(
        code(&[OWNER, ("x-admission-auth-concurrency-limit", b"0")]),
        Some(Code::EnvelopePartial)
    );
    assert_eq!(
        code(&[
            ("x-admission-org-id", b"g"),
            ("x-admission-org-rate-limit-requests", b"5")
        ]),
        Some(Code::EnvelopePartial)
    );
    let needs_org = read([OWNER].iter().map(|(n, v)| (n.as_bytes(), *v)), "x-admission-", true);
    assert_eq!(needs_org.code(), Some(Code::EnvelopePartial));
}

#[test]
fn malformed_is_named_before_partial() {
    let headers = [
        ("x-admission-owner-rate-limit-requests", &b"5"[..]),
        ("x-admission-org-id", b"\xff"),
    ];
    assert_eq!(code(&headers), Some(Code::EnvelopeMalformed));
}

#[test]
fn bytes_that_are_not_utf8_elsewhere_are_none_of_our_business() {
    assert_eq!(code(&[OWNER, ("x-other", b"\xc0\xa7"), ("x-admission", b"\xc0")]), None);
    assert_eq!(
        code(&[OWNER, ("x-admission-org-id", b"\xc0\xa7")]),
        Some(Code::EnvelopeMalformed)
    );
}

#[test]
fn ids_are_compared_byte_for_byte_and_bounded() {
    let long: Vec<u8> = std::vec![b'a'; 256];
    assert_eq!(code(&[("x-admission-owner-id", &long)]), None);
    let longer: Vec<u8> = std::vec![b'a'; 257];
    assert_eq!(
        code(&[("x-admission-owner-id", &longer)]),
        Some(Code::EnvelopeMalformed)
    );
    assert_eq!(code(&[("x-admission-owner-id", b"")]), Some(Code::EnvelopeMalformed));
    assert_eq!(
        code(&[("x-admission-owner-id", "\u{85}".as_bytes())]),
        Some(Code::EnvelopeMalformed)
    );
    let Reading::Present(envelope) = reading(&[("x-admission-owner-id", " a:b{x} 🦀 ".as_bytes())]) else {
        panic!("not present")
    };
    assert_eq!(envelope.subject.owner, " a:b{x} 🦀 ");
}

#[test]
fn the_headers_of_an_installation_with_another_prefix_are_read() {
    let headers: [(&[u8], &[u8]); 2] = [
        (b"x-saturn-owner-id", b"o"),
        (b"x-saturn-owner-rate-limit-requests", b"30"),
    ];
    let Reading::Present(envelope) = read(headers.into_iter(), "x-saturn-", false) else {
        panic!("not present")
    };
    assert_eq!(envelope.limits.owner.requests, Limit::of(30));
}

#[cfg(not(target_family = "wasm"))]
mod properties {
    use super::*;
    use proptest::prelude::*;
    use std::string::String;

    proptest! {
        #[test]
        fn a_figure_is_read_exactly_when_it_is_written_the_one_way(text in "[ +\\-0-9.,e_٥]{0,18}") {
            let expected = text.parse::<u64>().ok().filter(|n| *n <= LARGEST_LIMIT && std::format!("{n}") == text);
            prop_assert_eq!(figure(text.as_bytes()), expected);
        }

        #[test]
        fn no_bytes_break_the_reader(headers in proptest::collection::vec(("[a-zA-Z-]{0,30}", proptest::collection::vec(any::<u8>(), 0..300)), 0..12)) {
            let headers: Vec<(String, Vec<u8>)> =
                headers.into_iter().map(|(name, value)| (std::format!("x-admission-{name}"), value)).collect();
            read(headers.iter().map(|(n, v)| (n.as_bytes(), v.as_slice())), "x-admission-", true);
        }
    }
}
