//! Decisions over a metering store that fails on demand, by a clock that the tests move.

use std::collections::VecDeque;
use std::future::ready;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use portcullis_decision::config::{Environment, ServiceConfig};
use portcullis_decision::metering::Cost;
use portcullis_decision::operation::OperationId;
use portcullis_decision::wire::SettleRequest;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::*;
use crate::decide::tests::{request, verdict};
use crate::limiter::memory::MemoryLimiter;
use crate::limiter::{Answer, StoreFault};
use crate::metering::{Meter, Tended};

/// Takes its next records this long, then fails them with this fault or grants them; then it grants at once.
#[derive(Default)]
struct Moody {
    moods: Mutex<VecDeque<(u64, Option<StoreFault>)>>,
    failing_cancels: Mutex<u32>,
    /// How long the next cancel takes.
    cancel_takes_ms: Mutex<u64>,
    asked: Mutex<u32>,
    cancelled: Mutex<Vec<(OperationId, Cancel)>>,
    journaled: Mutex<Vec<Admission>>,
}

impl Meter for Moody {
    fn scheme(&self) -> &'static str {
        "moody"
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn record<'a>(&'a self, _: &'a MeterPlan, _: Instant) -> Answer<'a, Metered> {
        *locked(&self.asked) += 1;
        let (ms, fault) = locked(&self.moods).pop_front().unwrap_or_default();
        Box::pin(async move {
            sleep(Duration::from_millis(ms)).await;
            fault.map_or(Ok(Metered::Granted), Err)
        })
    }

    fn cancel<'a>(&'a self, ops: &'a [OperationId], why: Cancel, _: Instant) -> Answer<'a, ()> {
        let mut failing = locked(&self.failing_cancels);
        if *failing > 0 {
            *failing -= 1;
            return Box::pin(ready(Err(StoreFault::Connection)));
        }
        let ms = std::mem::take(&mut *locked(&self.cancel_takes_ms));
        Box::pin(async move {
            sleep(Duration::from_millis(ms)).await;
            locked(&self.cancelled).extend(ops.iter().map(|op| (*op, why)));
            Ok(())
        })
    }

    fn add_costs<'a>(&'a self, _: &'a [Cost], _: Instant) -> Answer<'a, ()> {
        Box::pin(ready(Ok(())))
    }

    fn journal<'a>(&'a self, admissions: &'a [Admission], _: Instant) -> Option<Answer<'a, ()>> {
        locked(&self.journaled).extend(admissions.iter().cloned());
        Some(Box::pin(ready(Ok(()))))
    }

    fn ping(&self, _: Instant) -> Answer<'_, ()> {
        Box::pin(ready(Ok(())))
    }

    fn tend(&self) -> Answer<'_, Tended> {
        Box::pin(ready(Ok(Tended::AllDone)))
    }
}

fn over(moods: &[(u64, Option<StoreFault>)]) -> (Arc<Decider>, Arc<Moody>) {
    let text = br#"{"profile": "development", "listen": "127.0.0.1:0"}"#;
    let config = ServiceConfig::parse(text, &Environment::default()).unwrap();
    let moody = Arc::new(Moody {
        moods: Mutex::new(moods.iter().copied().collect()),
        ..Moody::default()
    });
    let limiter = Some(Arc::new(MemoryLimiter::default()) as Arc<dyn crate::limiter::Limiter>);
    let decider = Decider::new(&config, limiter, Arc::default(), Arc::default());
    let decider = Arc::new(decider.with_meter(Some(Arc::clone(&moody) as Arc<dyn Meter>)));
    let (meter, give_backs) = (decider.meter().unwrap().clone(), decider.give_backs());
    tokio::spawn(give_backs.limiter.run(decider.limiter().unwrap().clone()));
    tokio::spawn(give_backs.metering.run((meter.clone(), Cancel::GiveBack)));
    tokio::spawn(give_backs.voids.run((meter, Cancel::Void)));
    (decider, moody)
}

fn gates(gates: Value) -> Value {
    json!({"gates": gates, "subject": {"owner": "o", "org": "g"}})
}

fn metering(when_unavailable: &str) -> Value {
    gates(json!([{"gate": "metering", "when_unavailable": when_unavailable}]))
}

async fn given_back(decider: &Decider, moody: &Moody) -> Vec<(OperationId, Cancel)> {
    let give_backs = decider.give_backs();
    tokio::time::timeout(Duration::from_secs(30), async {
        while !give_backs.are_empty() {
            sleep(Duration::from_millis(1)).await;
        }
    })
    .await
    .unwrap();
    locked(&moody.cancelled).clone()
}

#[tokio::test(start_paused = true)]
async fn a_slow_metering_store_is_unavailable_after_its_own_timeout_and_the_record_is_given_back() {
    let closed = json!({"verdict": "unavailable", "dependency": "metering", "gate": "metering"});
    let open = json!({"verdict": "admit", "bypassed": [{"class": "metering_unavailable", "gate": "metering"}]});
    for (choice, expected) in [("reject", closed), ("admit", open)] {
        let (decider, moody) = over(&[(300, None)]);
        *locked(&moody.failing_cancels) = 3;
        let (request, start) = (request(1, metering(choice)), Instant::now());
        assert_eq!(verdict(&decider, &request).await, expected);
        assert_eq!(start.elapsed().as_millis(), 100);
        assert_eq!(given_back(&decider, &moody).await, [(request.op, Cancel::GiveBack)]);
        assert_eq!(decider.unmetered().len(), usize::from(choice == "admit"));
    }
}

#[tokio::test(start_paused = true)]
async fn what_was_refused_before_anything_could_happen_is_not_given_back() {
    let (decider, moody) = over(&[(0, Some(StoreFault::AccessDenied))]);
    assert_eq!(
        verdict(&decider, &request(1, metering("reject"))).await["dependency"],
        "metering"
    );
    assert_eq!(given_back(&decider, &moody).await, []);
    assert!(decider.unmetered().is_empty(), "it was refused");
}

#[tokio::test(start_paused = true)]
async fn closed_metering_gives_back_the_limiters_charge_and_a_spent_budget_asks_nothing() {
    let (decider, moody) = over(&[(0, Some(StoreFault::PoolExhausted))]);
    let both = json!([
        {"gate": "contract", "when_unavailable": "reject"}, {"gate": "metering", "when_unavailable": "reject"}
    ]);
    let one = |op| {
        let mut changes = gates(both.clone());
        changes["limits"] = json!({"owner": {"requests": 1}});
        request(op, changes)
    };
    assert_eq!(verdict(&decider, &one(1)).await["dependency"], "metering");
    assert_eq!(
        verdict(&decider, &one(2)).await["verdict"],
        "admit",
        "the only request of the window is free again"
    );
    assert_eq!(verdict(&decider, &one(3)).await["code"], "RATE_LIMITED");
    assert_eq!(
        *locked(&moody.asked),
        2,
        "what an earlier gate denied is not asked about"
    );
    let spent = request(
        4,
        json!({"budget_ms": 0, "gates": [{"gate": "metering", "when_unavailable": "reject"}]}),
    );
    assert_eq!(verdict(&decider, &spent).await["dependency"], "metering");
    assert_eq!(*locked(&moody.asked), 2);
    let text = decider.metrics.encode();
    for line in [
        r#"portcullis_dependency_errors_total{dependency="metering",kind="pool_exhausted"} 1"#,
        r#"portcullis_dependency_errors_total{dependency="metering",kind="budget_spent"} 1"#,
        "portcullis_metering_seconds_count",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_later_denial_gives_a_run_back_before_the_answer_or_as_soon_as_the_store_hears_it() {
    let later = json!([
        {"gate": "metering", "when_unavailable": "reject"}, {"gate": "contract", "when_unavailable": "reject"}
    ]);
    for failing in [0, 4] {
        let (decider, moody) = over(&[]);
        *locked(&moody.failing_cancels) = failing;
        let mut changes = gates(later.clone());
        changes["limits"] = json!({"owner": {"requests": 0}});
        let request = request(1, changes);
        assert_eq!(verdict(&decider, &request).await["code"], "RATE_LIMITED");
        assert_eq!(locked(&moody.cancelled).len(), usize::from(failing == 0));
        assert_eq!(given_back(&decider, &moody).await, [(request.op, Cancel::GiveBack)]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_denial_is_not_lost_to_a_give_back_that_takes_longer_than_the_budget() {
    let (decider, moody) = over(&[(60, None)]);
    *locked(&moody.cancel_takes_ms) = 300;
    let mut changes = gates(json!([
        {"gate": "metering", "when_unavailable": "reject"}, {"gate": "contract", "when_unavailable": "reject"}
    ]));
    changes["limits"] = json!({"owner": {"requests": 0}});
    changes["budget_ms"] = json!(80);
    let (request, start) = (request(1, changes), Instant::now());
    assert_eq!(verdict(&decider, &request).await["code"], "RATE_LIMITED");
    assert_eq!(start.elapsed().as_millis(), 80);
    assert_eq!(given_back(&decider, &moody).await, [(request.op, Cancel::GiveBack)]);
}

#[tokio::test(start_paused = true)]
async fn a_cancel_of_the_filter_voids_what_this_service_let_pass_and_is_told_until_it_is_heard() {
    let (decider, moody) = over(&[(0, Some(StoreFault::CircuitOpen)), (0, Some(StoreFault::CircuitOpen))]);
    let (gone, stays) = (request(1, metering("admit")), request(2, metering("admit")));
    verdict(&decider, &gone).await;
    verdict(&decider, &stays).await;
    assert_eq!(decider.unmetered().len(), 2);
    *locked(&moody.failing_cancels) = 2;
    let batch = json!({"profile": "development", "cancels": [gone.op], "unmetered": []});
    let batch: SettleRequest = serde_json::from_value(batch).unwrap();
    assert!(
        decider.settle(batch).await.is_ok(),
        "a metering store that is down holds up no batch"
    );
    assert_eq!(decider.unmetered().len(), 1);
    assert_eq!(given_back(&decider, &moody).await, [(gone.op, Cancel::Void)]);
    tokio::spawn(decider.unmetered().run(decider.meter().unwrap().clone()));
    tokio::time::timeout(Duration::from_secs(5), async {
        while !decider.unmetered().is_empty() {
            sleep(Duration::from_millis(1)).await;
        }
    })
    .await
    .unwrap();
    let journaled: Vec<_> = locked(&moody.journaled).iter().map(|admission| admission.op).collect();
    assert_eq!(journaled, [stays.op]);
}
