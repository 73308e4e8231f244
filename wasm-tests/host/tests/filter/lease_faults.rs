//! Hosts whose shared data fails, races, evicts, is foreign, or is not there: decisions become exact, admissions may be
//! lost, and none is handed out that was not granted.

use portcullis_test_host::{Meddle, Personality, TestHost, status};
use serde_json::json;

use crate::lease_scene::{
    MAX_AGE_MS, asks, fetch, grant, hear, hit, hits, is_fetching, leased, leased_on, leasing, returned, with_block,
};
use crate::scene::{admit, assert_clean, deny, rules};

const SHARED: [&str; 2] = ["proxy_get_shared_data", "proxy_set_shared_data"];
const BOTH: [Personality; 2] = [Personality::ENVOY, Personality::WASMX];

/// The slot of the only bundle.
fn slot(host: &TestHost) -> String {
    let keys = host.shared_data().keys();
    let mut slots = keys.into_iter().filter(|key| key.starts_with("portcullis.lease."));
    let slot = slots.next().expect("a slot");
    assert_eq!(slots.next(), None);
    slot
}

/// Each request is decided by a callout of its own.
#[track_caller]
fn assert_exact(host: &mut TestHost) {
    let before = host.sent().iter().filter(|callout| callout.is_decide()).count();
    for n in 0..4 {
        let (stream, callout) = asks(host);
        if n == 2 {
            deny(host, &callout);
            assert_eq!(host.stream(stream).reply().status, 429);
        } else {
            admit(host, &callout);
            assert!(host.stream(stream).has_passed());
        }
        host.finish(stream);
    }
    let after = host.sent().iter().filter(|callout| callout.is_decide()).count();
    assert_eq!(after - before, 4);
    host.tick(20);
    assert_eq!(host.counter("lease_hits"), 0);
    assert_clean(host);
}

#[test]
fn a_host_without_shared_data_decides_each_request_by_a_callout() {
    let mut host = leased_on(Personality::APISIX);
    let (stream, callout) = asks(&mut host);
    assert!(
        callout.json()["lease"].is_null(),
        "a block is asked for that could not be kept"
    );
    admit(&mut host, &callout);
    host.finish(stream);
    assert_exact(&mut host);
}

#[test]
fn shared_data_that_fails_with_any_status_makes_decisions_exact() {
    for call in SHARED {
        for status in status::FAILURES {
            // A key that is not there, and a write that comes too late, are no failures: they are tested below.
            if (call, status) == (SHARED[0], status::NOT_FOUND) || (call, status) == (SHARED[1], status::CAS_MISMATCH) {
                continue;
            }
            let mut host = leased();
            host.faults().always(call, status);
            assert_exact(&mut host);
        }
    }
}

#[test]
fn shared_data_that_is_lost_in_the_middle_of_a_block_makes_decisions_exact_and_comes_back() {
    for call in SHARED {
        for status in status::FAILURES {
            let mut host = leased();
            with_block(&mut host, 20);
            assert_eq!(hits(&mut host, 2), 2);
            host.faults().always(call, status);
            let (_, callout) = asks(&mut host);
            admit(&mut host, &callout);
            host.faults().heal_all();
            // A host that has said that the slot is empty has had it overwritten.
            let left = if (call, status) == (SHARED[0], status::NOT_FOUND) {
                0
            } else {
                18
            };
            assert_eq!(hits(&mut host, 100), left, "{call} {status}");
            assert_clean(&host);
        }
    }
}

#[test]
fn a_block_that_cannot_be_kept_goes_back_at_once() {
    for status in [2, 8, 10, 12, 255] {
        let mut host = leased();
        let (stream, callout) = asks(&mut host);
        host.faults().always("proxy_set_shared_data", status);
        grant(&mut host, &callout, 20);
        assert!(host.stream(stream).has_passed());
        hear(&mut host);
        assert_eq!(returned(&host), [(callout.op(), 20, 0)], "{status}");
        assert_clean(&host);
    }
}

#[test]
fn a_lost_race_is_tried_again_and_hands_out_no_more_than_there_is() {
    for personality in BOTH {
        let mut host = leased_on(personality);
        let lease = with_block(&mut host, 9);
        for races in 0..=7 {
            host.shared_data().meddle(vec![Meddle::Touch; races]);
            assert!(hit(&mut host), "{} {races}", personality.name);
        }
        assert!(hit(&mut host) && !hit(&mut host));
        hear(&mut host);
        assert!(returned(&host).iter().all(|(of, ..)| *of != lease));
        assert_clean(&host);
    }
}

#[test]
fn a_race_that_is_never_won_is_decided_by_a_callout() {
    for personality in BOTH {
        let mut host = leased_on(personality);
        with_block(&mut host, 9);
        host.shared_data().meddle(vec![Meddle::Touch; 8]);
        assert!(!hit(&mut host));
        assert_eq!(hits(&mut host, 100), 9, "{}", personality.name);
        assert_clean(&host);
    }
}

#[test]
fn an_evicted_block_is_lost_and_the_next_request_asks_for_one() {
    for personality in BOTH {
        let mut host = leased_on(personality);
        let lost = with_block(&mut host, 20);
        assert_eq!(hits(&mut host, 3), 3);
        host.shared_data().evict_all();
        let (_, callout) = asks(&mut host);
        assert!(!callout.json()["lease"].is_null(), "{}", personality.name);
        grant(&mut host, &callout, 10);
        assert_eq!(hits(&mut host, 4), 4);
        host.tick(MAX_AGE_MS);
        hear(&mut host);
        assert_eq!(returned(&host), [(callout.op(), 6, 0)], "{lost} lapses with its window");
        assert_clean(&host);
    }
}

#[test]
fn a_block_evicted_between_read_and_write_is_handed_out_once_at_most() {
    for personality in BOTH {
        let mut host = leased_on(personality);
        with_block(&mut host, 20);
        host.shared_data().meddle([Meddle::Evict]);
        let sum = hits(&mut host, 100);
        // Envoy writes what was read; it never evicts, but other hosts may do as it does.
        assert!(sum <= 20, "{} {sum}", personality.name);
        assert_clean(&host);
    }
}

#[test]
fn foreign_values_are_no_leases_and_trap_nothing() {
    let mut host = leased();
    with_block(&mut host, 20);
    let key = slot(&host);
    let good = host.shared_data().value(&key).expect("a value").to_vec();
    let mut values = vec![
        Vec::new(),
        b"another plugin's".to_vec(),
        vec![0; 300],
        vec![0xff; 300],
        vec![1; 300],
    ];
    values.extend((0..good.len()).map(|length| good[..length].to_vec()));
    values.push([good.as_slice(), b"more"].concat());
    for at in 0..good.len() {
        let mut changed = good.clone();
        changed[at] ^= 0x80;
        values.push(changed);
    }
    for value in values {
        host.shared_data().put(&key, &value);
        let before = host.now_ms();
        hit(&mut host);
        host.tick(20);
        assert!(host.now_ms() > before);
        assert_clean(&host);
    }
}

#[test]
fn foreign_values_under_the_gateways_own_key_are_an_id_or_none() {
    for value in [&b""[..], b"short", &[0xff; 16], &[7; 4_000]] {
        let mut host = leased();
        host.shared_data().put("portcullis.gateway", value);
        let (_, callout) = asks(&mut host);
        admit(&mut host, &callout);
        assert_clean(&host);
    }
}

#[test]
fn workers_of_one_host_are_one_gateway() {
    for personality in BOTH {
        let mut first = leased_on(personality);
        let mut second = crate::lease_scene::worker_beside(&first, 2);
        let (_, of_first) = asks(&mut first);
        let other = [("x-admission-lane", "other")];
        let stream = second.request(&crate::scene::envelope_and(&other));
        let of_second = crate::scene::decide_of(&second, stream);
        let gateway = |callout: &portcullis_test_host::Callout| callout.json()["lease"]["gateway"].clone();
        assert_eq!(gateway(&of_first), gateway(&of_second));
        assert!(gateway(&of_first).is_string());
    }
}

#[test]
fn without_random_bytes_nothing_is_handed_out() {
    let mut host = leased();
    with_block(&mut host, 20);
    let mut second = crate::lease_scene::worker_beside(&host, 2);
    second.faults().always("random_get", 58);
    let stream = second.request(&crate::scene::ENVELOPE);
    crate::scene::assert_degraded(&second, stream);
    assert_eq!(hits(&mut host, 10), 10);
    // Without bits for an operation the next block cannot be asked for.
    host.faults().always("random_get", 58);
    let before = fetch(&host);
    assert_eq!(hits(&mut host, 10), 10);
    assert_eq!(fetch(&host), before);
    assert!(is_fetching(&host));
    assert_clean(&host);
}

#[test]
fn a_block_that_cannot_be_taken_out_at_its_end_goes_back_later_and_once() {
    for personality in BOTH {
        let mut host = leased_on(personality);
        let lease = with_block(&mut host, 20);
        host.jump(MAX_AGE_MS);
        host.shared_data().meddle(vec![Meddle::Touch; 8]);
        hear(&mut host);
        assert_eq!(returned(&host), [], "{}", personality.name);
        host.tick(1_000);
        // Nobody looks after it any more, so whoever comes does.
        assert!(!hit(&mut host));
        hear(&mut host);
        assert_eq!(returned(&host), [(lease, 20, 0)], "{}", personality.name);
        assert_clean(&host);
    }
}

#[test]
fn a_time_of_another_clock_does_not_end_leasing() {
    // One worker falls back to the wall clock, whose figures are far ahead of the others'.
    let mut first = leased();
    let mut second = crate::lease_scene::worker_beside(&first, 2);
    second.faults().always("clock_time_get", 28);
    let (_, callout) = asks(&mut second);
    second.fail(callout.token, portcullis_test_host::Failure::TimedOut);
    let (_, callout) = asks(&mut first);
    assert!(!callout.json()["lease"].is_null(), "nobody will ever fetch again");
    assert_clean(&first);
    assert_clean(&second);
}

#[test]
fn configurations_that_come_one_after_another_use_the_same_slots() {
    let mut host = leased();
    let root = host.root();
    for max_requests in 8..60 {
        let mut changed = leasing(&rules("leased", "reject"));
        changed["leases"] = json!({"max_requests": max_requests, "max_age_ms": MAX_AGE_MS, "slots": 2});
        host.reconfigure(root, &changed.to_string()).expect("no faults");
        with_block(&mut host, 8);
        host.tick(MAX_AGE_MS);
        hear(&mut host);
    }
    let keys = host.shared_data().keys();
    assert!(keys.len() <= 3, "nothing is ever deleted there: {keys:?}");
    assert_eq!(returned(&host).len(), 52);
    assert_clean(&host);
}
