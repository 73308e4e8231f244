//! Header maps as no client should send them and no host should hand them over.

use portcullis_test_host::{first, headers, serialize, status};

use crate::scene::{ENVELOPE, admit, assert_bypassed, assert_clean, assert_degraded, closed, envelope_and, open};

#[test]
fn a_map_that_cannot_be_read_is_undecided() {
    for status in status::FAILURES {
        let mut closed = closed();
        closed.faults().always("proxy_get_header_map_pairs", status);
        let stream = closed.request(&ENVELOPE);
        assert_degraded(&closed, stream);

        let mut open = open();
        open.faults().always("proxy_get_header_map_pairs", status);
        let stream = open.request(&ENVELOPE);
        assert_bypassed(&open, stream);
    }
}

#[test]
fn a_map_that_lies_about_its_lengths_is_undecided() {
    let honest = serialize(&headers(&ENVELOPE));
    let mut maps: Vec<Vec<u8>> = (1..honest.len()).map(|length| honest[..length].to_vec()).collect();
    for at in 0..(4 + 8 * ENVELOPE.len()) {
        let mut lying = honest.clone();
        lying[at] = 0xff;
        maps.push(lying);
    }
    maps.push(u32::MAX.to_le_bytes().to_vec());
    maps.push([0xff; 4_096].to_vec());
    let mut host = closed();
    for map in maps {
        host.garble_request_map(Some(map));
        let stream = host.request(&ENVELOPE);
        assert_degraded(&host, stream);
        host.finish(stream);
    }
    host.garble_request_map(None);
    let stream = host.request(&ENVELOPE);
    let callout = host.callout();
    admit(&mut host, &callout);
    assert!(host.stream(stream).has_passed(), "the next request works");
}

#[test]
fn an_empty_map_is_a_guarded_request_without_an_envelope() {
    let mut host = closed();
    host.garble_request_map(Some(Vec::new()));
    let stream = host.request(&ENVELOPE);
    assert_eq!(host.stream(stream).reply().code(), "ENVELOPE_MISSING");
    assert_clean(&host);
}

#[test]
fn bytes_that_are_not_utf_8_matter_in_the_envelope_only() {
    let mut host = closed();
    let mut map = headers(&ENVELOPE);
    map.push((b"x-other".to_vec(), vec![0xc0, 0xa7]));
    map.push((vec![0xff, 0xfe], b"name".to_vec()));
    let stream = host.open(host.root());
    host.send_headers(stream, map.clone(), true);
    let callout = host.callout();
    admit(&mut host, &callout);
    let upstream = host.stream(stream).upstream.clone().expect("it goes up");
    assert_eq!(first(&upstream, "x-other"), Some([0xc0, 0xa7].as_slice()));

    map.push((b"x-admission-org-id".to_vec(), vec![0xc0, 0xa7]));
    let stream = host.open(host.root());
    host.send_headers(stream, map, true);
    assert_eq!(host.stream(stream).reply().code(), "ENVELOPE_MALFORMED");
    assert_clean(&host);
}

#[test]
fn ill_formed_envelopes_are_refused_without_a_callout() {
    let cases = [
        (("x-admission-owner-rate-limit-requests", "30"), "ENVELOPE_MALFORMED"),
        (("x-admission-org-rate-limit-requests", "05"), "ENVELOPE_MALFORMED"),
        (("x-admission-org-rate-limit-requests", ""), "ENVELOPE_MALFORMED"),
        (("x-admission-owner-rate-limit-request", "5"), "ENVELOPE_MALFORMED"),
        (("x-admission-org-rate-limit-requests", "5"), "ENVELOPE_PARTIAL"),
    ];
    let mut host = closed();
    for (line, code) in cases {
        let stream = host.request(&envelope_and(&[line]));
        assert_eq!(
            (host.stream(stream).reply().status, host.stream(stream).reply().code()),
            (503, code.to_owned())
        );
        assert_eq!(host.stream(stream).reply().header("retry-after"), None);
    }
    assert_eq!(host.sent(), []);
    assert_clean(&host);
}

#[test]
fn a_large_map_is_read_whole() {
    let mut host = closed();
    let value = "v".repeat(1_000);
    let mut lines = envelope_and(&[]);
    lines.extend((0..500).map(|_| ("x-filler", value.as_str())));
    let stream = host.request(&lines);
    let callout = host.callout();
    admit(&mut host, &callout);
    assert_eq!(host.stream(stream).upstream.as_ref().map(Vec::len), Some(504));
    assert_clean(&host);
}
