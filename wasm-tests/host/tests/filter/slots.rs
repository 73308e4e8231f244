//! What streams leave behind: cancels, releases and renewals, each told until somebody has heard it.

use portcullis_test_host::Failure;
use serde_json::json;

use crate::scene::{admit, admit_with_slot, assert_clean, closed, settle, settles, waiting};

#[test]
fn a_client_that_resets_while_the_decision_is_out_has_it_cancelled() {
    let mut host = closed();
    let (stream, callout) = waiting(&mut host);
    host.reset(stream);
    host.tick(20);
    let batch = settle(&host);
    assert_eq!(
        (batch.told("cancels"), batch.told("releases")),
        (vec![callout.op()], vec![])
    );
    assert_eq!(batch.json()["profile"], "production");
    // Envoy does not cancel the call: the verdict comes, and there is nobody to hear it.
    admit_with_slot(&mut host, &callout);
    assert!(!host.stream(stream).has_passed());
    host.answer(batch.token, 200, b"{}");
    host.tick(5_000);
    assert_eq!(settles(&host).len(), 1);
    assert_clean(&host);
}

#[test]
fn a_request_without_a_slot_leaves_nothing_behind() {
    let mut host = closed();
    let (stream, callout) = waiting(&mut host);
    admit(&mut host, &callout);
    host.finish(stream);
    host.tick(5_000);
    assert_eq!(settles(&host), []);
    assert_clean(&host);
}

#[test]
fn a_slot_is_renewed_at_a_third_of_its_time_to_live_and_released_at_the_end() {
    let mut host = closed();
    let (stream, callout) = waiting(&mut host);
    admit_with_slot(&mut host, &callout);
    host.tick(9_980);
    assert_eq!(settles(&host), []);
    for renewal in 1..=3 {
        host.tick(40);
        let batch = settle(&host);
        assert_eq!(
            (batch.told("renewals"), batch.told("releases")),
            (vec![callout.op()], vec![]),
            "{renewal}"
        );
        host.answer(batch.token, 200, b"{}");
        host.tick(9_960);
    }
    host.finish(stream);
    host.tick(20);
    let batch = settle(&host);
    assert_eq!(batch.told("releases"), [callout.op()]);
    host.answer(batch.token, 200, b"{}");
    host.tick(60_000);
    assert_eq!(settles(&host).len(), 4, "a slot is renewed after its release");
    assert_clean(&host);
}

#[test]
fn a_slot_that_lapsed_is_counted_logged_and_not_renewed_again() {
    let mut host = closed();
    let (_, callout) = waiting(&mut host);
    admit_with_slot(&mut host, &callout);
    host.tick(10_020);
    let batch = settle(&host);
    host.answer(
        batch.token,
        200,
        json!({"lost": [callout.op(), "0".repeat(32)]}).to_string().as_bytes(),
    );
    assert_eq!(host.counter("slot_lost"), 1);
    assert_eq!(host.lines("slot_lost").len(), 1);
    host.tick(30_000);
    assert_eq!(settles(&host).len(), 1);
    assert_clean(&host);
}

#[test]
fn a_batch_that_nobody_heard_is_told_again() {
    for failure in Failure::ALL {
        let mut host = closed();
        let (stream, callout) = waiting(&mut host);
        host.reset(stream);
        host.tick(20);
        for _ in 0..3 {
            let batch = settle(&host);
            assert_eq!(batch.told("cancels"), [callout.op()]);
            host.fail(batch.token, failure);
            host.tick(400);
            assert!(
                host.pending_callouts().iter().all(|callout| !callout.is_settle()),
                "it does not hammer"
            );
            host.tick(120);
        }
        let batch = settle(&host);
        host.answer(batch.token, 200, b"");
        host.tick(2_000);
        assert_eq!(settles(&host).len(), 4);
        assert_clean(&host);
    }
}

#[test]
fn a_batch_that_the_host_does_not_take_is_told_later() {
    let mut host = closed();
    let (stream, callout) = waiting(&mut host);
    host.reset(stream);
    host.faults().always("proxy_http_call", 10);
    host.tick(2_000);
    assert_eq!(settles(&host), []);
    host.faults().heal_all();
    host.tick(520);
    assert_eq!(settle(&host).told("cancels"), [callout.op()]);
    assert_clean(&host);
}

#[test]
fn one_batch_is_out_at_a_time_and_holds_at_most_256_operations() {
    let mut host = closed();
    for _ in 0..600 {
        let (stream, _) = waiting(&mut host);
        host.reset(stream);
    }
    let mut told = Vec::new();
    for expected in [256, 256, 88] {
        host.tick(40);
        let pending: Vec<_> = host
            .pending_callouts()
            .into_iter()
            .filter(|callout| callout.is_settle())
            .collect();
        assert_eq!(pending.len(), 1);
        let ops = pending[0].told("cancels");
        assert_eq!(ops.len(), expected);
        told.extend(ops);
        host.answer(pending[0].token, 200, b"{}");
    }
    told.sort();
    told.dedup();
    assert_eq!(told.len(), 600);
    assert_clean(&host);
}

#[test]
fn a_batch_whose_end_the_host_never_tells_does_not_block_the_next_for_ever() {
    let mut host = closed();
    let (stream, callout) = waiting(&mut host);
    host.reset(stream);
    host.tick(20);
    let lost = settle(&host);
    assert_eq!(lost.told("cancels"), [callout.op()]);
    let (stream, later) = waiting(&mut host);
    host.reset(stream);
    host.tick(30_000);
    let told: Vec<_> = settles(&host).iter().flat_map(|batch| batch.told("cancels")).collect();
    assert!(
        told.contains(&later.op()),
        "renewals and releases stop for as long as the VM lives"
    );
    assert_clean(&host);
}
