//! What is kept, what is forgotten, and what is delivered once.

use portcullis_decision::class::FailureClass;
use portcullis_decision::verdict::Bypass;
use serde_json::json;

use super::*;

fn op(n: u8) -> OperationId {
    OperationId::from_random([n; 16])
}

fn admission(n: u8, source: Source) -> Admission {
    Admission {
        op: op(n),
        org: "g".to_owned(),
        owner: None,
        rules: "launch-gate".to_owned(),
        at_ms: 1,
        request_id: None,
        source,
    }
}

fn journal(capacity: usize) -> (UnmeteredJournal, Arc<Metrics>) {
    let metrics = Arc::new(Metrics::default());
    let mut journal = UnmeteredJournal::new(Arc::clone(&metrics), Arc::default());
    journal.capacity = capacity;
    (journal, metrics)
}

fn request() -> DecideRequest {
    let request = json!({
        "op": op(1), "profile": "development", "rules": "launch-gate", "mode": "enforce", "budget_ms": 220, "window_s": 60,
        "gates": [{"gate": "monthly_quota", "when_unavailable": "admit"}, {"gate": "metering", "when_unavailable": "admit"}],
        "subject": {"owner": "o", "org": "g"}, "tokens": 0, "request_id": "r".repeat(1_000)
    });
    serde_json::from_value(request).unwrap()
}

fn bypassed(gates: &[(FailureClass, Gate)]) -> Verdict {
    Verdict {
        bypassed: gates
            .iter()
            .map(|(class, gate)| Bypass {
                class: *class,
                gate: *gate,
            })
            .collect(),
        ..Verdict::default()
    }
}

#[test]
fn a_run_that_metering_did_not_record_is_kept_and_one_that_it_recorded_is_not() {
    let down = FailureClass::MeteringUnavailable;
    let unmetered = bypassed(&[(down, Gate::MonthlyQuota), (down, Gate::Metering)]);
    let kept = Admission::of(&request(), &unmetered).unwrap();
    assert_eq!(
        (kept.org.as_str(), kept.owner.as_deref(), kept.op),
        ("g", Some("o"), op(1))
    );
    assert_eq!(kept.request_id.unwrap().len(), LONGEST_REQUEST_ID);
    let unchecked = bypassed(&[(FailureClass::PolicyUnavailable, Gate::MonthlyQuota)]);
    assert_eq!(Admission::of(&request(), &unchecked), None);
    assert_eq!(Admission::of(&request(), &Verdict::default()), None);
}

#[test]
fn what_a_filter_tells_again_is_kept_once_and_what_finds_no_room_is_counted() {
    let (journal, metrics) = journal(2);
    for n in [1, 1, 2, 3] {
        journal.add(admission(n, Source::Filter));
    }
    assert_eq!(journal.len(), 2);
    let counts = (
        metrics.unmetered.get(),
        metrics.unmetered_dropped.get(),
        metrics.unmetered_waiting.get(),
    );
    assert_eq!(counts, (3, 1, 2));
}

#[test]
fn a_batch_that_failed_waits_again_in_order_and_still_takes_its_room() {
    let (journal, metrics) = journal(2);
    journal.add(admission(1, Source::Service));
    journal.add(admission(2, Source::Service));
    let batch = journal.next_batch();
    journal.add(admission(3, Source::Service));
    assert_eq!(metrics.unmetered_dropped.get(), 1);
    journal.finish(batch, false);
    let again = journal.next_batch();
    assert_eq!([again[0].op, again[1].op], [op(1), op(2)]);
    journal.finish(again, true);
    assert!(journal.is_empty());
    assert_eq!(metrics.unmetered_waiting.get(), 0);
}

#[test]
fn a_cancelled_decision_is_forgotten_but_not_what_the_filter_let_pass() {
    let (journal, _) = journal(9);
    journal.add(admission(1, Source::Service));
    journal.add(admission(1, Source::Filter));
    journal.void(&[op(1), op(2)]);
    let left = journal.next_batch();
    assert_eq!(left, [admission(1, Source::Filter)]);
}

#[test]
fn a_filters_clock_is_only_asked_for_how_long_ago_it_was() {
    let told = |age_ms| {
        Admission::told(Unmetered {
            op: op(1),
            org: None,
            owner: Some(String::new()),
            rules: "r".to_owned(),
            request_id: None,
            age_ms,
        })
    };
    assert_eq!(told(u64::MAX).at_ms, 0);
    assert!(told(60_000).at_ms <= unix_ms() - 60_000);
    assert_eq!((told(0).org.as_str(), told(0).owner), ("", None));
}
