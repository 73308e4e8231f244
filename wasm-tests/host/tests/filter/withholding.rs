//! A request that the host lets go by itself lacks what is withheld (`pause.withhold`), and one that the module lets go has
//! all that it came with.
//!
//! The hosts are those that let go: after an answer that could not be carried out, and after a trap. That what is withheld
//! would be there otherwise is shown too.

use portcullis_test_host::{Callout, ContextId, Headers, Personality, TestHost, headers, status};
use serde_json::{Value, json};

use crate::cases::HOSTS;
use crate::lease_scene::{grant, leasing};
use crate::scene::{ENVELOPE, PATIENCE_MS, admit, assert_clean, configuration, decide_of, deny, rules, verdict};

/// What a credential looks like on the wire: several lines, spellings and bytes.
const CREDENTIALS: [(&str, &[u8]); 4] = [
    ("authorization", b"Bearer secret-1"),
    ("x-api-key", b"secret-2 \xc0\xa7"),
    ("x-api-key", b""),
    ("authorization", b"Basic secret-3"),
];

/// A configuration that withholds them.
pub(crate) fn withholding(personality: Personality, when_unavailable: &str) -> Value {
    let mut configuration = configuration(&rules("withholding", when_unavailable));
    configuration["decision"]["upstream"] = json!(personality.decision_upstream());
    configuration["pause"] = json!({"withhold": ["authorization", "x-api-key"]});
    configuration
}

fn host_with(personality: Personality, configuration: &Value) -> TestHost {
    let mut host = TestHost::new(personality);
    host.configure(&configuration.to_string()).expect("no faults");
    host
}

/// The request's lines: credentials among others.
pub(crate) fn lines() -> Headers {
    let mut lines = headers(&ENVELOPE);
    lines.push((b"x-before".to_vec(), b"1".to_vec()));
    lines.extend(CREDENTIALS.map(|(name, value)| (name.as_bytes().to_vec(), value.to_vec())));
    lines.push((b"x-after".to_vec(), b"2".to_vec()));
    lines
}

/// The lines of these that are withheld, in their order.
pub(crate) fn credentials(lines: &Headers) -> Headers {
    let is_one =
        |name: &[u8]| [b"authorization".as_slice(), b"x-api-key"].contains(&name.to_ascii_lowercase().as_slice());
    lines.iter().filter(|(name, _)| is_one(name)).cloned().collect()
}

fn others(lines: &Headers) -> Headers {
    let withheld = credentials(lines);
    let lines = lines.iter().filter(|line| !withheld.contains(line));
    lines
        .filter(|(name, _)| !name.starts_with(b"x-admission-"))
        .cloned()
        .collect()
}

fn ask(host: &mut TestHost) -> (ContextId, Callout) {
    let stream = host.open(host.root());
    host.send_headers(stream, lines(), true);
    let callout = decide_of(host, stream);
    (stream, callout)
}

/// It has gone up with everything that it came with but the envelope, each line once.
#[track_caller]
fn assert_whole(host: &TestHost, stream: ContextId) {
    let upstream = host.stream(stream).upstream.clone().expect("it has gone up");
    assert_eq!(credentials(&upstream), credentials(&lines()));
    assert_eq!(others(&upstream), others(&lines()));
}

/// It has gone up without what is withheld, and with everything else.
#[track_caller]
fn assert_useless(host: &TestHost, stream: ContextId) {
    let stream = host.stream(stream);
    assert!(stream.was_let_go, "the host did not let it go: {stream:?}");
    let upstream = stream.upstream.clone().expect("it has gone up");
    assert_eq!(credentials(&upstream), Headers::new());
    assert_eq!(others(&upstream), others(&lines()));
}

#[test]
fn an_admitted_request_has_everything_that_it_came_with_on_every_host() {
    for personality in HOSTS {
        let mut host = host_with(personality, &withholding(personality, "reject"));
        let (stream, callout) = ask(&mut host);
        assert_eq!(
            credentials(&host.stream(stream).request),
            Headers::new(),
            "{}",
            personality.name
        );
        admit(&mut host, &callout);
        assert_whole(&host, stream);
        host.tick(1_000);
        assert_eq!(credentials(&host.stream(stream).request), credentials(&lines()));
        assert_clean(&host);
    }
}

#[test]
fn a_request_that_goes_on_undecided_or_watched_has_it_back_and_a_refused_one_has_not() {
    for personality in HOSTS {
        let mut shadow = withholding(personality, "reject");
        shadow["mode"] = json!("shadow");
        for configuration in [withholding(personality, "admit"), shadow] {
            let mut host = host_with(personality, &configuration);
            let (stream, callout) = ask(&mut host);
            host.answer(callout.token, 500, b"");
            assert_whole(&host, stream);
            assert_clean(&host);
        }
        let mut host = host_with(personality, &withholding(personality, "reject"));
        let (stream, callout) = ask(&mut host);
        deny(&mut host, &callout);
        let record = host.stream(stream);
        assert_eq!((record.reply().status, record.has_passed()), (429, false));
        assert_eq!(credentials(&record.request), Headers::new());
        assert_clean(&host);
    }
}

/// Nothing is asked about it, and so it would not have been held for an answer.
#[test]
fn a_request_whose_refusal_at_once_the_host_does_not_take_goes_up_useless() {
    let mut host = host_with(Personality::APISIX, &withholding(Personality::APISIX, "reject"));
    let (first, _) = ask(&mut host);
    host.finish(first);
    host.faults().once("random_get", status::INTERNAL_FAILURE);
    host.faults()
        .once("proxy_send_local_response", status::INTERNAL_FAILURE);
    let stream = host.open(host.root());
    host.send_headers(stream, lines(), true);
    // Whatever is answered, this host lets go then what waits.
    for callout in host.pending_callouts() {
        host.answer(callout.token, 200, b"{}");
    }
    assert_useless(&host, stream);
}

/// Every way in which an answer is there and nothing is made of it.
#[test]
fn a_host_that_resumes_by_itself_sends_up_what_is_useless() {
    for personality in [Personality::WASMX, Personality::APISIX] {
        for call in ["proxy_set_effective_context", "proxy_send_local_response"] {
            for status in [status::INTERNAL_FAILURE, status::UNIMPLEMENTED] {
                let mut host = host_with(personality, &withholding(personality, "reject"));
                let (stream, callout) = ask(&mut host);
                host.faults().always(call, status);
                deny(&mut host, &callout);
                assert_useless(&host, stream);
                host.tick(PATIENCE_MS);
                host.finish(stream);
                assert_clean(&host);

                let mut bare = withholding(personality, "reject");
                bare.as_object_mut().expect("an object").remove("pause");
                let mut host = host_with(personality, &bare);
                let (stream, callout) = ask(&mut host);
                host.faults().always(call, status);
                deny(&mut host, &callout);
                assert!(host.stream(stream).was_let_go);
                assert_whole(&host, stream);
            }
        }
    }
}

/// The module is killed after each number of instructions of a callback: before, while and after it looks at the answer.
#[test]
fn a_trap_while_a_request_is_held_sends_up_what_is_useless_unless_it_was_admitted() {
    let personality = Personality::WASMX;
    let unavailable = json!({"verdict": "unavailable", "dependency": "limiter"});
    let mut seen = [0, 0, 0];
    for (which, instructions) in (0..3).flat_map(|which| (0..400).map(move |nth| (which, 1 + nth * 97))) {
        let mut host = host_with(personality, &withholding(personality, "reject"));
        let (stream, callout) = ask(&mut host);
        host.trap_after(instructions);
        match which {
            0 => deny(&mut host, &callout),
            1 => verdict(&mut host, &callout, unavailable.clone()),
            _ => host.tick(PATIENCE_MS),
        }
        if host.has_trapped() && host.stream(stream).has_passed() {
            seen[which] += 1;
            assert_useless(&host, stream);
        }
        assert_clean(&host);
    }
    assert!(seen.iter().all(|seen| *seen > 10), "too few traps came to it: {seen:?}");
}

#[test]
fn a_trap_in_the_middle_of_an_admission_sends_up_no_line_twice_and_none_that_was_not_there() {
    let personality = Personality::WASMX;
    let mut lacking = 0;
    for nth in 0..600 {
        let mut host = host_with(personality, &withholding(personality, "reject"));
        let (stream, callout) = ask(&mut host);
        host.trap_after(1 + nth * 67);
        admit(&mut host, &callout);
        let upstream = host.stream(stream).upstream.clone().expect("it has gone up");
        let (came, all) = (credentials(&upstream), credentials(&lines()));
        assert_eq!(came, all[..came.len()], "after {nth}");
        assert!(host.has_trapped() || came.len() == all.len());
        lacking += usize::from(came.len() < all.len());
    }
    assert!(lacking > 10, "only {lacking} traps came before the end");
}

#[test]
fn a_trap_leaves_a_held_request_held_in_envoy_and_refused_in_apisix() {
    for (personality, host_status) in [(Personality::ENVOY, None), (Personality::APISIX, Some(503))] {
        let mut host = host_with(personality, &withholding(personality, "reject"));
        let (stream, callout) = ask(&mut host);
        host.trap_after(100);
        admit(&mut host, &callout);
        assert!(host.has_trapped());
        let record = host.stream(stream);
        assert_eq!((record.has_passed(), record.host_status), (false, host_status));
        let next = host.request(&ENVELOPE);
        assert!(!host.stream(next).has_passed());
    }
}

#[test]
fn what_the_host_does_not_remove_goes_up_once_and_is_told() {
    let personality = Personality::ENVOY;
    for status in status::FAILURES {
        let mut configuration = withholding(personality, "reject");
        configuration["envelope"] = json!({"strip": false});
        let mut host = host_with(personality, &configuration);
        host.faults().once("proxy_remove_header_map_value", status);
        let (stream, callout) = ask(&mut host);
        admit(&mut host, &callout);
        let upstream = host.stream(stream).upstream.clone().expect("it has gone up");
        let sorted = |mut lines: Headers| {
            lines.sort();
            lines
        };
        assert_eq!(sorted(credentials(&upstream)), sorted(credentials(&lines())));
        assert_eq!(host.lines("not_withheld").len(), 1);
        assert_no_secret(&host);
        assert_clean(&host);
    }
}

#[test]
fn what_the_host_does_not_take_back_is_missing_and_told() {
    for status in status::FAILURES {
        let mut host = host_with(Personality::ENVOY, &withholding(Personality::ENVOY, "reject"));
        let (stream, callout) = ask(&mut host);
        host.faults().always("proxy_add_header_map_value", status);
        admit(&mut host, &callout);
        let upstream = host.stream(stream).upstream.clone().expect("it has gone up");
        assert_eq!(credentials(&upstream), Headers::new());
        assert_eq!(host.lines("not_put_back").len(), 1, "one line a second");
        assert_no_secret(&host);
        assert_clean(&host);
    }
}

#[track_caller]
fn assert_no_secret(host: &TestHost) {
    let secret = host.logs().iter().find(|line| line.text.contains("secret"));
    assert!(secret.is_none(), "{secret:?}");
}

/// What is decided at once is not held, and costs what it costs without the key.
#[test]
fn a_leased_admission_costs_no_host_call_more() {
    let cost = |withhold: bool| {
        let mut configuration = leasing(&rules("leased", "reject"));
        if withhold {
            configuration["pause"] = json!({"withhold": ["authorization", "x-api-key"]});
        }
        let mut host = host_with(Personality::ENVOY, &configuration);
        let (stream, callout) = ask(&mut host);
        grant(&mut host, &callout, 20);
        host.finish(stream);
        let before = host.ledger().clone();
        let stream = host.open(host.root());
        host.send_headers(stream, lines(), true);
        assert_whole(&host, stream);
        host.finish(stream);
        host.ledger().since(&before).host_calls
    };
    assert_eq!(cost(true), cost(false));
}
