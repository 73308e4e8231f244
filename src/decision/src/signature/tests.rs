//! What is signed, by example and by property, and every way to break it.

use std::string::{String, ToString};
use std::vec::Vec;

#[cfg(target_arch = "wasm32")]
use wasm_bindgen_test::wasm_bindgen_test as test;

use super::*;

const P: &str = "x-admission-";
const NOW: u64 = 1_764_000_000;
const SIGNATURE: &str = "x-admission-signature";

mod vectors;

type Headers = Vec<(Vec<u8>, Vec<u8>)>;

fn secret(byte: u8) -> Secret {
    Secret::from_bytes(&[byte; 32]).unwrap()
}

fn signatures() -> Signatures {
    Signatures::new(std::vec![("old".into(), secret(1)), ("new".into(), secret(2))], 60)
}

fn owned(headers: &[(&str, &str)]) -> Headers {
    headers
        .iter()
        .map(|(name, value)| (name.as_bytes().to_vec(), value.as_bytes().to_vec()))
        .collect()
}

fn with<T>(method: &[u8], path: &[u8], headers: &Headers, f: impl FnOnce(Request<'_>) -> T) -> T {
    let headers: Vec<(&[u8], &[u8])> = headers.iter().map(|(n, v)| (n.as_slice(), v.as_slice())).collect();
    f(Request {
        method,
        path,
        headers: &headers,
    })
}

fn judged(method: &[u8], path: &[u8], headers: &Headers) -> Result<String, Untrusted> {
    with(method, path, headers, |request| {
        signatures()
            .check(P, request, || Some(NOW))
            .map(|standing| std::format!("{standing:?}"))
    })
}

fn envelope() -> Headers {
    owned(&[
        ("host", "gateway"),
        ("x-admission-owner-id", "owner-1"),
        ("x-admission-org-id", "org-1"),
        ("x-admission-owner-rate-limit-requests", "30"),
        ("accept", "*/*"),
    ])
}

fn signed_by(key: &str, secret: &Secret, at_s: u64) -> Headers {
    let mut headers = envelope();
    let value = with(b"POST", b"/v1/x?a=1", &headers, |request| {
        sign(P, request, key, secret, at_s).unwrap()
    });
    headers.push((SIGNATURE.into(), value.into_bytes()));
    headers
}

fn signed() -> Headers {
    signed_by("new", &secret(2), NOW)
}

fn why(headers: &Headers) -> String {
    judged(b"POST", b"/v1/x?a=1", headers).unwrap_err().to_string()
}

fn value<'a>(headers: &'a mut Headers, name: &str) -> &'a mut Vec<u8> {
    &mut headers.iter_mut().find(|(n, _)| n == name.as_bytes()).unwrap().1
}

#[test]
fn what_an_edge_signed_is_trusted_by_either_key_and_in_any_order_and_case() {
    for (key, secret) in [("old", secret(1)), ("new", secret(2))] {
        let mut headers = signed_by(key, &secret, NOW);
        let expected = std::format!("Signed {{ key: {key:?}, at_s: {NOW} }}");
        assert_eq!(judged(b"POST", b"/v1/x?a=1", &headers).unwrap(), expected);
        headers.reverse();
        for (name, _) in &mut headers {
            name.make_ascii_uppercase();
        }
        assert_eq!(judged(b"POST", b"/v1/x?a=1", &headers).unwrap(), expected);
    }
}

#[test]
fn a_request_without_any_header_of_the_prefix_is_bare() {
    assert_eq!(judged(b"GET", b"/", &owned(&[("accept", "*/*")])).unwrap(), "Bare");
}

#[test]
fn an_edge_can_sign_that_there_is_no_envelope() {
    let mut headers = owned(&[("accept", "*/*")]);
    let value = with(b"GET", b"/", &headers, |request| {
        sign(P, request, "new", &secret(2), NOW).unwrap()
    });
    headers.push((SIGNATURE.into(), value.into_bytes()));
    assert!(judged(b"GET", b"/", &headers).unwrap().starts_with("Signed"));
}

#[test]
fn the_message_is_what_the_document_says() {
    let headers = owned(&[
        ("X-Admission-Owner-Id", "é"),
        ("x-admission-lane", ""),
        ("x-admission-signature", "not covered"),
        ("x-other", "not covered"),
    ]);
    let bytes = with(b"POST", b"/v1", &headers, |request| {
        message(P, request, "k1", 1_764_000_000).unwrap()
    });
    assert_eq!(
        String::from_utf8(bytes).unwrap(),
        "22:portcullis-envelope-v1,2:k1,10:1764000000,4:POST,3:/v1,16:x-admission-lane,0:,20:x-admission-owner-id,2:é,"
    );
}

#[test]
fn hmac_sha256_is_that_of_rfc_4231() {
    // Test case 6: a key longer than a block.
    let secret = Secret::from_bytes(&[0xaa; 131]).unwrap();
    let signature = secret.sign(b"Test Using Larger Than Block-Size Key - Hash Key First");
    let hex: String = signature.iter().map(|byte| std::format!("{byte:02x}")).collect();
    assert_eq!(hex, "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

#[test]
fn headers_without_a_signature_are_unsigned() {
    assert_eq!(
        why(&envelope()),
        "unsigned: there are headers of the envelope and no x-admission-signature"
    );
    let lane = owned(&[("x-admission-lane", "batch")]);
    assert!(matches!(judged(b"GET", b"/", &lane), Err(Untrusted::Unsigned { .. })));
}

#[test]
fn another_method_or_path_or_query_is_altered() {
    let headers = signed();
    assert!(judged(b"POST", b"/v1/x?a=1", &headers).is_ok());
    for (method, path) in [
        ("GET", "/v1/x?a=1"),
        ("post", "/v1/x?a=1"),
        ("POST", "/v1/y?a=1"),
        ("POST", "/v1/x"),
        ("POST", "/v1/x?a=2"),
        ("POST", "/v1/x/?a=1"),
        ("POST/", "v1/x?a=1"),
    ] {
        assert_eq!(
            judged(method.as_bytes(), path.as_bytes(), &headers),
            Err(Untrusted::Altered { key: "new".into() }),
            "{method} {path}"
        );
    }
}

#[test]
fn a_header_that_is_added_removed_or_changed_is_altered() {
    let altered = "altered: the signature by the key \"new\" is not that of this method, path, time and envelope";
    let mut raised = signed();
    *value(&mut raised, "x-admission-owner-rate-limit-requests") = b"31".to_vec();
    assert_eq!(why(&raised), altered);
    let mut removed = signed();
    removed.retain(|(name, _)| name != b"x-admission-owner-rate-limit-requests");
    assert_eq!(why(&removed), altered);
    for name in [
        "x-admission-lane",
        "x-admission-unheard-of",
        "X-Admission-Owner_Id",
        "x-admission-",
    ] {
        let mut added = signed();
        added.push((name.into(), b"v".to_vec()));
        assert_eq!(why(&added), altered, "{name}");
    }
}

#[test]
fn what_moves_between_two_headers_is_altered() {
    let sign_and_move = |from: &[(&str, &str)], to: &[(&str, &str)]| {
        let (from, mut to) = (owned(from), owned(to));
        let value = with(b"GET", b"/", &from, |request| {
            sign(P, request, "new", &secret(2), NOW).unwrap()
        });
        to.push((SIGNATURE.into(), value.into_bytes()));
        judged(b"GET", b"/", &to)
    };
    let altered = Err(Untrusted::Altered { key: "new".into() });
    assert_eq!(
        sign_and_move(
            &[("x-admission-org-id", "a,3:b"), ("x-admission-owner-id", "c")],
            &[("x-admission-org-id", "a"), ("x-admission-owner-id", "3:b,c")]
        ),
        altered
    );
    assert_eq!(
        sign_and_move(
            &[("x-admission-auth-id", "o"), ("x-admission-owner-id", "a")],
            &[("x-admission-auth-id", "a"), ("x-admission-owner-id", "o")]
        ),
        altered
    );
}

#[test]
fn a_header_that_stands_twice_is_refused_also_when_both_agree() {
    for name in ["x-admission-owner-id", "X-ADMISSION-OWNER-ID"] {
        let mut headers = signed();
        headers.push((name.into(), b"owner-1".to_vec()));
        assert_eq!(why(&headers), "x-admission-owner-id stands twice");
    }
    let mut headers = signed();
    let again = headers.last().unwrap().clone();
    headers.push(again);
    assert_eq!(why(&headers), "x-admission-signature stands twice");
    with(b"GET", b"/", &headers, |request| {
        assert_eq!(
            sign(P, request, "new", &secret(2), NOW),
            Err(Twice("x-admission-signature".into()))
        );
    });
}

#[test]
fn an_age_is_allowed_to_the_second_in_both_directions() {
    for at_s in [NOW - 60, NOW, NOW + 60] {
        assert!(judged(b"POST", b"/v1/x?a=1", &signed_by("new", &secret(2), at_s)).is_ok());
    }
    assert_eq!(
        why(&signed_by("new", &secret(2), NOW - 61)),
        "signed 61 s ago, and 60 are allowed"
    );
    assert_eq!(
        why(&signed_by("new", &secret(2), NOW + 61)),
        "signed 61 s ahead of this host's clock, and 60 are allowed"
    );
}

#[test]
fn a_host_without_a_clock_trusts_nothing() {
    let clock = || None;
    with(b"POST", b"/v1/x?a=1", &signed(), |request| {
        assert_eq!(signatures().check(P, request, clock), Err(Untrusted::NoClock));
    });
}

#[test]
fn a_time_that_is_changed_is_altered() {
    let mut headers = signed_by("new", &secret(2), NOW - 61);
    let stale = String::from_utf8(value(&mut headers, SIGNATURE).clone()).unwrap();
    *value(&mut headers, SIGNATURE) = stale.replace(&(NOW - 61).to_string(), &NOW.to_string()).into_bytes();
    assert!(why(&headers).starts_with("altered"));
}

#[test]
fn an_unknown_key_and_a_key_under_anothers_id_are_refused() {
    assert_eq!(
        why(&signed_by("gone", &secret(2), NOW)),
        "signed by the key \"gone\", which is not one of ours"
    );
    assert!(why(&signed_by("new", &secret(1), NOW)).starts_with("altered"));
    let mut headers = signed();
    let renamed = String::from_utf8(value(&mut headers, SIGNATURE).clone()).unwrap();
    *value(&mut headers, SIGNATURE) = renamed.replace("key=new", "key=old").into_bytes();
    assert!(why(&headers).starts_with("altered"));
}

#[test]
fn what_is_not_exactly_of_the_form_is_refused() {
    let whole = "v1;key=new;ts=1764000000;sig=".to_string() + &"0f".repeat(32);
    assert!(Token::parse(whole.as_bytes()).is_some_and(|token| token.to_string() == whole));
    for cut in 0..whole.len() {
        assert_eq!(Token::parse(&whole.as_bytes()[..cut]), None, "{cut}");
    }
    for bad in [
        whole.replace("0f", "0F"),
        whole.replace("v1", "v2"),
        whole.replace("v1;", "v1; "),
        whole.replace("ts=", "ts=0"),
        whole.replace("ts=", "ts=+"),
        whole.replace("ts=1764000000", "ts="),
        whole.replace("ts=1764000000", "ts=1764000000000"),
        whole.replace("key=new", "key="),
        whole.replace("key=new", "key=a b"),
        whole.replace("new", &"k".repeat(33)),
        whole.clone() + "0",
        whole.clone() + " ",
        whole.clone() + ";",
        std::format!("{whole}, {whole}"),
        whole.replace("sig", "SIG"),
        String::new(),
    ] {
        assert_eq!(Token::parse(bad.as_bytes()), None, "{bad}");
        let mut headers = signed();
        *value(&mut headers, SIGNATURE) = bad.into_bytes();
        assert_eq!(
            why(&headers),
            "x-admission-signature is not of the form v1;key=ID;ts=SECONDS;sig=64 lower-case hex digits"
        );
    }
}

#[test]
fn names_with_underscores_and_lists_of_our_names_are_refused_signed_or_not() {
    for mut headers in [signed(), owned(&[("accept", "*/*")])] {
        headers.push((b"X_Admission-owner_id".to_vec(), b"o".to_vec()));
        assert_eq!(
            why(&headers),
            "the header name X_Admission-owner_id looks like one of the envelope's, with _ for -"
        );
        for (name, list) in [
            ("connection", "close, X-Admission-Owner-Id"),
            ("Connection", "x_admission_owner_id"),
            ("trailer", "\tx-admission-owner-rate-limit-requests ,other"),
        ] {
            *headers.last_mut().unwrap() = (name.into(), list.into());
            let header = name.to_ascii_lowercase();
            assert_eq!(
                why(&headers),
                std::format!("the header {header} lists a name of the envelope")
            );
        }
        *headers.last_mut().unwrap() = (b"connection".to_vec(), b"keep-alive, x-admissio, x".to_vec());
        assert!(judged(b"POST", b"/v1/x?a=1", &headers).is_ok());
    }
}

#[test]
fn a_secret_is_base64_of_32_bytes_or_more_and_is_never_shown() {
    let text = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    let secret = Secret::from_base64(text).unwrap();
    assert_eq!(secret, Secret::from_bytes(&(0..32).collect::<Vec<u8>>()).unwrap());
    assert_eq!(secret, Secret::from_base64(text.trim_end_matches('=')).unwrap());
    assert_ne!(secret, super::tests::secret(0));
    assert_eq!(std::format!("{secret:?}"), "Secret(not shown)");
    assert_eq!(Secret::from_base64("AAAA"), Err(SecretFault::Length(3)));
    assert_eq!(Secret::from_base64(""), Err(SecretFault::Length(0)));
    for bad in ["hunter2 hunter2", "=", "AAA===", "AAAA====", "A", "AB", "-_-_", "AAA=A"] {
        let fault = Secret::from_base64(bad).unwrap_err();
        assert_eq!(fault, SecretFault::NotBase64, "{bad}");
        assert!(!fault.to_string().contains(bad));
    }
}

#[cfg(not(target_family = "wasm"))]
mod properties {
    use super::*;
    use proptest::prelude::*;

    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![
            proptest::collection::vec(any::<u8>(), 0..40),
            "[0-9:,]{0,12}".prop_map(String::into_bytes)
        ]
    }

    fn headers() -> impl Strategy<Value = Headers> {
        proptest::collection::btree_map("(x-admission-|x-other-)[a-z:,0-9]{0,4}", bytes(), 0..6).prop_map(|map| {
            map.into_iter()
                .map(|(name, value)| (name.into_bytes(), value))
                .collect()
        })
    }

    proptest! {
        #[test]
        fn what_was_signed_is_trusted_whatever_its_bytes(method in bytes(), path in bytes(), mut headers in headers()) {
            let value = with(&method, &path, &headers, |request| sign(P, request, "new", &secret(2), NOW).unwrap());
            headers.push((SIGNATURE.into(), value.into_bytes()));
            prop_assert!(judged(&method, &path, &headers).is_ok());
        }

        #[test]
        fn no_two_requests_have_one_message(
            a in (bytes(), bytes(), headers()), b in (bytes(), bytes(), headers()), at in 0_u64..3, bt in 0_u64..3,
        ) {
            let message = |(method, path, headers): &(Vec<u8>, Vec<u8>, Headers), at_s| {
                with(method, path, headers, |request| message(P, request, "k", at_s).unwrap())
            };
            let covered = |request: &(Vec<u8>, Vec<u8>, Headers)| {
                let mut request = request.clone();
                request.2.retain(|(name, _)| has_prefix(name, P));
                request
            };
            prop_assert_eq!(message(&a, at) == message(&b, bt), (covered(&a), at) == (covered(&b), bt));
        }

        #[test]
        fn any_change_of_any_covered_byte_is_refused(part in 0_usize..12, at in any::<prop::sample::Index>(), flip in 1_u8..) {
            let (mut method, mut path, mut headers) = (b"POST".to_vec(), b"/v1/x?a=1".to_vec(), signed());
            let covered: Vec<usize> = (0..headers.len()).filter(|i| has_prefix(&headers[*i].0, P)).collect();
            let field = match part {
                0 => &mut method,
                1 => &mut path,
                _ => {
                    let (name, value) = &mut headers[covered[(part / 2 - 1) % covered.len()]];
                    if part.is_multiple_of(2) { name } else { value }
                }
            };
            let at = at.index(field.len());
            let before = field.clone();
            field[at] ^= flip;
            // Letters of a name in another case are the same name.
            prop_assume!(!(part > 1 && part.is_multiple_of(2) && field.eq_ignore_ascii_case(&before)));
            prop_assert!(judged(&method, &path, &headers).is_err());
        }

        #[test]
        fn no_bytes_break_the_check(headers in proptest::collection::vec((bytes(), bytes()), 0..8), value in bytes()) {
            let mut headers = headers;
            headers.push((SIGNATURE.into(), value));
            prop_assert!(judged(b"GET", b"/", &headers).is_err());
        }
    }
}
