//! Switches go on and off by order and by themselves, and a store that is switched off fails as one that can't be reached.

use portcullis_decision::operation::OperationId;

use super::stores::FailingLimiter;
use super::*;
use crate::limiter::memory::MemoryLimiter;
use crate::limiter::{Limiter as _, StoreFault};

fn order(dependencies: &[Dependency], for_s: u64) -> FaultOrder {
    FaultOrder {
        dependencies: dependencies.to_vec(),
        for_s: Some(for_s),
    }
}

fn faults() -> (Arc<FaultSwitch>, Arc<Metrics>) {
    let metrics: Arc<Metrics> = Arc::default();
    (FaultSwitch::of(Profile::Staging, &metrics).unwrap(), metrics)
}

fn gauge(metrics: &Metrics, dependency: &str) -> bool {
    let line = format!("portcullis_fault_active{{dependency=\"{dependency}\"}} 1\n");
    metrics.encode().contains(&line)
}

#[tokio::test(start_paused = true)]
async fn a_fault_ends_by_itself_and_the_gauge_with_it() {
    let (faults, metrics) = faults();
    faults.switch(&order(&[Dependency::Limiter, Dependency::Policy], 5));
    assert!(faults.fails(Dependency::Limiter) && !faults.fails(Dependency::Metering));
    assert!(gauge(&metrics, "limiter") && gauge(&metrics, "policy") && !gauge(&metrics, "metering"));
    assert_eq!(faults.report()["policy"]["ends_in_ms"], 5_000);
    tokio::time::sleep(Duration::from_millis(5_001)).await;
    assert!(!faults.fails(Dependency::Limiter));
    assert!(!gauge(&metrics, "limiter") && !gauge(&metrics, "policy"));
    assert_eq!(faults.report(), json!({}));
}

#[tokio::test(start_paused = true)]
async fn a_new_order_stands_in_place_of_the_old_one_also_after_its_time() {
    let (faults, metrics) = faults();
    faults.switch(&order(&[Dependency::Limiter], 5));
    faults.switch(&order(&[Dependency::Metering], 60));
    assert!(!faults.fails(Dependency::Limiter) && faults.fails(Dependency::Metering));
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert!(faults.fails(Dependency::Metering) && gauge(&metrics, "metering"));
    faults.switch(&order(&[], 0));
    assert!(!faults.fails(Dependency::Metering) && !gauge(&metrics, "metering"));
}

#[test]
fn an_order_without_a_sensible_time_is_refused_by_name_and_value() {
    for for_s in [0, LONGEST_S + 1] {
        let fault = order(&[Dependency::Limiter], for_s).check().unwrap_err();
        assert!(
            fault.contains("for_s") && fault.ends_with(&for_s.to_string()),
            "{fault}"
        );
    }
    order(&[], 0).check().unwrap();
    assert!(serde_json::from_str::<FaultOrder>(r#"{"dependencies": ["redis"], "for_s": 1}"#).is_err());
}

#[test]
fn production_has_no_switch() {
    let metrics: Arc<Metrics> = Arc::default();
    assert!(FaultSwitch::of(Profile::Production, &metrics).is_none());
    assert!(FaultSwitch::of(Profile::Development, &metrics).is_some());
}

#[tokio::test(start_paused = true)]
async fn a_limiter_that_is_switched_off_is_one_that_cannot_be_reached() {
    let (faults, _) = faults();
    let limiter = FailingLimiter::new(Arc::new(MemoryLimiter::default()), Arc::clone(&faults));
    let deadline = after(Instant::now(), Duration::from_secs(1));
    let ops = [OperationId::from_random([7; 16])];
    limiter.ping(deadline).await.unwrap();
    faults.switch(&order(&[Dependency::Limiter], 1));
    assert_eq!(limiter.ping(deadline).await, Err(StoreFault::Connection));
    assert_eq!(limiter.cancel(&ops, deadline).await, Err(StoreFault::Connection));
    faults.switch(&order(&[Dependency::Policy], 1));
    limiter.cancel(&ops, deadline).await.unwrap();
}
