//! Decisions over a limiter that fails on demand, by a clock that the tests move.

use std::collections::VecDeque;
use std::future::ready;

use portcullis_decision::charge::{Charged, EntryState};
use portcullis_decision::config::Environment;
use portcullis_decision::ledger::Settled;
use portcullis_decision::operation::OperationId;
use portcullis_decision::verdict::Admission;
use portcullis_decision::wire::Return;
use serde_json::{Value, json};
use tokio::time::{advance, sleep};

use super::*;
use crate::limiter::memory::MemoryLimiter;
use crate::limiter::{Answer, StoreFault};

/// How the limiter takes its next charges; then it grants at once.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Mood {
    GrantAfter(u64),
    Fail(StoreFault),
}

#[derive(Debug, Default)]
pub(crate) struct Moody {
    charges: Mutex<VecDeque<Mood>>,
    failing_cancels: Mutex<u32>,
    cancels_take_ms: Mutex<u64>,
    charged: Mutex<Vec<OperationId>>,
    cancelled: Mutex<Vec<OperationId>>,
    pub(crate) renewed: Mutex<Vec<OperationId>>,
    pub(crate) settled: Mutex<Vec<OperationId>>,
}

impl Moody {
    pub(crate) fn fail_cancels(&self, times: u32) {
        *locked(&self.failing_cancels) = times;
    }

    /// How long the next cancel takes.
    pub(crate) fn slow_cancel(&self, ms: u64) {
        *locked(&self.cancels_take_ms) = ms;
    }
}

impl Limiter for Moody {
    fn scheme(&self) -> &'static str {
        "moody"
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn charge<'a>(&'a self, plan: &'a ChargePlan, _: Duration, _: Instant) -> Answer<'a, Charged> {
        locked(&self.charged).push(plan.op);
        let mood = locked(&self.charges).pop_front().unwrap_or(Mood::GrantAfter(0));
        Box::pin(async move {
            match mood {
                Mood::Fail(fault) => Err(fault),
                Mood::GrantAfter(ms) => {
                    sleep(Duration::from_millis(ms)).await;
                    let state = EntryState {
                        used: 1,
                        reset_ms: 60_000,
                        exhausted: false,
                    };
                    Ok(Charged::Granted(vec![state; plan.entries.len()]))
                }
            }
        })
    }

    fn cancel<'a>(&'a self, ops: &'a [OperationId], _: Instant) -> Answer<'a, ()> {
        let mut failing = locked(&self.failing_cancels);
        if *failing > 0 {
            *failing -= 1;
            return Box::pin(ready(Err(StoreFault::Connection)));
        }
        let ms = std::mem::take(&mut *locked(&self.cancels_take_ms));
        Box::pin(async move {
            sleep(Duration::from_millis(ms)).await;
            locked(&self.cancelled).extend(ops);
            Ok(())
        })
    }

    fn settle<'a>(&'a self, settled: &'a [Settled], _: Instant) -> Answer<'a, ()> {
        locked(&self.settled).extend(settled.iter().map(|one| one.op));
        Box::pin(ready(Ok(())))
    }

    fn give_back_parts<'a>(&'a self, _: &'a [Return], _: Instant) -> Answer<'a, ()> {
        Box::pin(ready(Ok(())))
    }

    fn renew<'a>(&'a self, ops: &'a [OperationId], _: Duration, _: Instant) -> Answer<'a, Vec<OperationId>> {
        locked(&self.renewed).extend(ops);
        Box::pin(ready(Ok(Vec::new())))
    }

    fn ping(&self, _: Instant) -> Answer<'_, ()> {
        Box::pin(ready(Ok(())))
    }
}

fn decider(limiter: Option<Arc<dyn Limiter>>) -> Arc<Decider> {
    let text = json!({"profile": "development", "listen": "127.0.0.1:0", "capacity": {"platform": {"requests": 1000}}});
    let config = ServiceConfig::parse(text.to_string().as_bytes(), &Environment::default()).unwrap();
    Arc::new(Decider::new(&config, limiter, Arc::default(), Arc::default()))
}

pub(crate) fn over(moods: &[Mood]) -> (Arc<Decider>, Arc<Moody>) {
    let moody = Arc::new(Moody {
        charges: Mutex::new(moods.iter().copied().collect()),
        ..Moody::default()
    });
    let decider = decider(Some(Arc::clone(&moody) as Arc<dyn Limiter>));
    tokio::spawn(decider.give_back().run(decider.limiter().unwrap().clone()));
    (decider, moody)
}

pub(crate) fn request(op: u8, changes: Value) -> DecideRequest {
    let mut request = json!({
        "op": OperationId::from_random([op; 16]), "profile": "development", "rules": "contract-limits", "mode": "enforce",
        "gates": [{"gate": "contract", "when_unavailable": "reject"}], "budget_ms": 220, "window_s": 60,
        "subject": {"owner": "o"}, "limits": {"owner": {"requests": 3}}, "tokens": 0
    });
    request
        .as_object_mut()
        .unwrap()
        .extend(changes.as_object().unwrap().clone());
    serde_json::from_value(request).unwrap()
}

fn open() -> Value {
    json!({"gates": [{"gate": "contract", "when_unavailable": "admit"}]})
}

pub(crate) async fn verdict(decider: &Decider, request: &DecideRequest) -> Value {
    of_answer(&decider.decide(request, Instant::now()).await)
}

/// An answer as it is written, but for its operation.
fn of_answer(answer: &DecideAnswer) -> Value {
    let mut answer = serde_json::to_value(answer).unwrap();
    answer.as_object_mut().unwrap().remove("op");
    answer
}

fn unavailable() -> Value {
    json!({"verdict": "unavailable", "dependency": "limiter", "gate": "contract"})
}

fn bypassed() -> Value {
    json!({"verdict": "admit", "bypassed": [{"class": "limiter_unavailable", "gate": "contract"}]})
}

pub(crate) async fn given_back(decider: &Decider, moody: &Moody) -> Vec<OperationId> {
    let give_back = decider.give_back();
    tokio::time::timeout(Duration::from_secs(30), async {
        while !give_back.is_empty() {
            sleep(Duration::from_millis(1)).await;
        }
    })
    .await
    .unwrap();
    locked(&moody.cancelled).clone()
}

#[tokio::test(start_paused = true)]
async fn a_slow_limiter_is_unavailable_after_its_own_timeout_and_what_it_took_is_given_back() {
    for (changes, expected) in [(json!({}), unavailable()), (open(), bypassed())] {
        let (decider, moody) = over(&[Mood::GrantAfter(300)]);
        let (request, start) = (request(1, changes), Instant::now());
        assert_eq!(verdict(&decider, &request).await, expected);
        assert_eq!(start.elapsed().as_millis(), 100);
        assert_eq!(given_back(&decider, &moody).await, [request.op]);
    }
}

#[tokio::test(start_paused = true)]
async fn the_budget_clips_the_limiters_timeout() {
    let (decider, moody) = over(&[Mood::GrantAfter(60)]);
    let (request, start) = (request(1, json!({"budget_ms": 50})), Instant::now());
    assert_eq!(verdict(&decider, &request).await, unavailable());
    assert_eq!(start.elapsed().as_millis(), 50);
    assert_eq!(given_back(&decider, &moody).await, [request.op]);
}

#[tokio::test(start_paused = true)]
async fn a_spent_budget_is_unavailable_and_the_limiter_is_not_asked() {
    let (decider, moody) = over(&[]);
    assert_eq!(
        verdict(&decider, &request(1, json!({"budget_ms": 0}))).await,
        unavailable()
    );
    let arrived = Instant::now();
    advance(Duration::from_millis(220)).await;
    let late = decider.decide(&request(2, open()), arrived).await;
    assert_eq!(of_answer(&late), bypassed());
    assert!(locked(&moody.charged).is_empty());
    assert!(given_back(&decider, &moody).await.is_empty());
}

#[tokio::test(start_paused = true)]
async fn only_what_may_have_been_charged_is_given_back_and_that_until_the_limiter_hears_it() {
    let (decider, moody) = over(&[Mood::Fail(StoreFault::CircuitOpen), Mood::Fail(StoreFault::Connection)]);
    moody.fail_cancels(5);
    assert_eq!(verdict(&decider, &request(1, json!({}))).await, unavailable());
    assert_eq!(verdict(&decider, &request(2, json!({}))).await, unavailable());
    assert_eq!(given_back(&decider, &moody).await, [OperationId::from_random([2; 16])]);
}

#[tokio::test(start_paused = true)]
async fn a_repetition_of_an_operation_under_way_gets_its_answer_and_is_not_charged_again() {
    let (decider, moody) = over(&[Mood::GrantAfter(300)]);
    let request = request(1, open());
    let (first, second) = tokio::join!(verdict(&decider, &request), verdict(&decider, &request));
    assert_eq!((first, second), (bypassed(), bypassed()));
    // The limiter would grant it now, and the give-back would take that away again.
    assert_eq!(verdict(&decider, &request).await, bypassed());
    assert_eq!(locked(&moody.charged).len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_later_gate_that_stays_closed_gives_back_before_the_answer() {
    let (decider, moody) = over(&[]);
    let gates = json!({"gates": [
        {"gate": "contract", "when_unavailable": "admit"}, {"gate": "metering", "when_unavailable": "reject"}
    ]});
    let request = request(1, gates);
    let expected = json!({"verdict": "unavailable", "dependency": "metering", "gate": "metering"});
    assert_eq!(verdict(&decider, &request).await, expected);
    assert_eq!(*locked(&moody.cancelled), [request.op]);
}

#[tokio::test(start_paused = true)]
async fn a_give_back_that_takes_too_long_costs_no_more_than_the_budget_and_is_done_later() {
    let (decider, moody) = over(&[Mood::GrantAfter(60)]);
    moody.slow_cancel(300);
    let gates = json!({"budget_ms": 80, "gates": [
        {"gate": "contract", "when_unavailable": "admit"}, {"gate": "metering", "when_unavailable": "reject"}
    ]});
    let (request, start) = (request(1, gates), Instant::now());
    let expected = json!({"verdict": "unavailable", "dependency": "metering", "gate": "metering"});
    assert_eq!(verdict(&decider, &request).await, expected);
    assert_eq!(start.elapsed().as_millis(), 80);
    assert_eq!(given_back(&decider, &moody).await, [request.op]);
}

#[tokio::test(start_paused = true)]
async fn an_emergency_allowance_opens_so_often_a_minute_and_then_closes() {
    let (decider, _) = over(&[Mood::Fail(StoreFault::ReadOnly); 4]);
    let gates = json!({"gates": [{"gate": "contract", "when_unavailable": {"admit": {"max_per_minute": 2}}}]});
    let mut verdicts = Vec::new();
    for op in 1..=3 {
        verdicts.push(verdict(&decider, &request(op, gates.clone())).await);
    }
    assert_eq!(verdicts, [bypassed(), bypassed(), unavailable()]);
    advance(Duration::from_secs(60)).await;
    assert_eq!(verdict(&decider, &request(4, gates)).await, bypassed());
}

#[tokio::test(start_paused = true)]
async fn an_allowance_that_a_later_gate_made_useless_is_given_back() {
    let (decider, _) = over(&[Mood::Fail(StoreFault::ReadOnly); 3]);
    let contract = json!({"gate": "contract", "when_unavailable": {"admit": {"max_per_minute": 1}}});
    let refused = json!({"gates": [contract, {"gate": "metering", "when_unavailable": "reject"}]});
    assert_eq!(verdict(&decider, &request(1, refused)).await["dependency"], "metering");
    let gates = json!({"gates": [contract]});
    assert_eq!(verdict(&decider, &request(2, gates.clone())).await, bypassed());
    assert_eq!(verdict(&decider, &request(3, gates)).await, unavailable());
}

#[tokio::test(start_paused = true)]
async fn waiting_as_long_as_told_is_enough() {
    let decider = decider(Some(Arc::new(MemoryLimiter::default())));
    for op in 1..=3 {
        assert_eq!(verdict(&decider, &request(op, json!({}))).await["verdict"], "admit");
    }
    advance(Duration::from_millis(18_500)).await;
    let denied = verdict(&decider, &request(4, json!({}))).await;
    assert_eq!(
        (&denied["code"], &denied["retry_after_s"]),
        (&json!("RATE_LIMITED"), &json!(42))
    );
    assert_eq!(denied["limit"]["reset_ms"], 41_500);
    advance(Duration::from_millis(41_499)).await;
    assert_eq!(verdict(&decider, &request(5, json!({}))).await["verdict"], "deny");
    advance(Duration::from_millis(1)).await;
    assert_eq!(verdict(&decider, &request(6, json!({}))).await["verdict"], "admit");
}

#[tokio::test(start_paused = true)]
async fn without_a_limiter_all_pass_unenforced_but_a_limit_of_zero_still_denies() {
    let decider = decider(None);
    let admitted = decider.decide(&request(1, json!({})), Instant::now()).await.verdict;
    assert_eq!(
        admitted,
        Verdict::Admit(Admission {
            unenforced: true,
            ..Admission::default()
        })
    );
    let blocked = request(2, json!({"limits": {"owner": {"requests": 0}}}));
    assert_eq!(verdict(&decider, &blocked).await["code"], "RATE_LIMITED");
    let text = decider.metrics.encode();
    assert!(text.contains("portcullis_unenforced_total 1\n"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn shadow_mode_charges_what_would_be_admitted() {
    let decider = decider(Some(Arc::new(MemoryLimiter::default())));
    let shadow = |op| request(op, json!({"mode": "shadow", "limits": {"owner": {"requests": 1}}}));
    assert_eq!(verdict(&decider, &shadow(1)).await["verdict"], "admit");
    assert_eq!(verdict(&decider, &shadow(2)).await["verdict"], "deny");
}

#[tokio::test(start_paused = true)]
async fn every_verdict_bypass_and_failure_is_counted() {
    let (decider, _) = over(&[Mood::Fail(StoreFault::Loading), Mood::Fail(StoreFault::Timeout)]);
    verdict(&decider, &request(1, open())).await;
    verdict(&decider, &request(2, json!({}))).await;
    let text = decider.metrics.encode();
    for line in [
        r#"portcullis_verdicts_total{verdict="admit",class="none"} 1"#,
        r#"portcullis_verdicts_total{verdict="unavailable",class="limiter_unavailable"} 1"#,
        r#"portcullis_bypassed_total{class="limiter_unavailable",gate="contract"} 1"#,
        r#"portcullis_dependency_errors_total{dependency="limiter",kind="loading"} 1"#,
        r#"portcullis_dependency_errors_total{dependency="limiter",kind="timeout"} 1"#,
        "portcullis_decide_seconds_count 2",
        "portcullis_limiter_seconds_count",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
}
