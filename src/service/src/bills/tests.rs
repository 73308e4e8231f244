//! What is kept, priced, told once, and waited for.

use std::future::ready;
use std::sync::atomic::{AtomicUsize, Ordering};

use portcullis_decision::metering::{MeterPlan, Metered};
use portcullis_decision::policy::{ModelPattern, Org, Price};

use super::*;
use crate::limiter::{Answer, StoreFault};
use crate::metering::{Cancel, Meter, Tended};
use crate::policy::{PolicyStore, Registry};
use crate::unmetered::Admission;

fn op(n: u8) -> OperationId {
    OperationId::from_random([n; 16])
}

fn settlement(n: u8, model: &str, is_hold: bool) -> Settlement {
    Settlement {
        op: op(n),
        tokens: None,
        bill: Some(Bill {
            org: "g".to_owned(),
            model: model.to_owned(),
            input: 1_000,
            cached_input: 400,
            output: 10,
            is_hold,
        }),
    }
}

/// A price list and a meter that fail as often as they are told to.
#[derive(Default)]
struct Stores {
    failing_prices: AtomicUsize,
    failing_costs: AtomicUsize,
    costs: Mutex<Vec<Cost>>,
}

fn fails(times: &AtomicUsize) -> bool {
    times
        .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1))
        .is_ok()
}

struct PriceList(Arc<Stores>);

impl PolicyStore for PriceList {
    fn scheme(&self) -> &'static str {
        "list"
    }

    fn org<'a>(&'a self, _: &'a str, _: Instant) -> Answer<'a, Option<Arc<Org>>> {
        Box::pin(ready(Ok(None)))
    }

    fn registry(&self, _: Instant) -> Answer<'_, Arc<Registry>> {
        Box::pin(ready(Ok(Arc::default())))
    }

    fn prices(&self, _: Instant) -> Answer<'_, Arc<Prices>> {
        let price = Price {
            input: 2_500_000,
            cached_input: 1_250_000,
            output: 10_000_000,
        };
        let answer = if fails(&self.0.failing_prices) {
            Err(StoreFault::Connection)
        } else {
            Ok(Arc::new(vec![(ModelPattern::parse("gpt-*").unwrap(), price)]))
        };
        Box::pin(ready(answer))
    }

    fn ping(&self, _: Instant) -> Answer<'_, ()> {
        Box::pin(ready(Ok(())))
    }
}

struct Book(Arc<Stores>);

impl Meter for Book {
    fn scheme(&self) -> &'static str {
        "book"
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn record<'a>(&'a self, _: &'a MeterPlan, _: Instant) -> Answer<'a, Metered> {
        Box::pin(ready(Ok(Metered::Granted)))
    }

    fn cancel<'a>(&'a self, _: &'a [OperationId], _: Cancel, _: Instant) -> Answer<'a, ()> {
        Box::pin(ready(Ok(())))
    }

    fn add_costs<'a>(&'a self, costs: &'a [Cost], _: Instant) -> Answer<'a, ()> {
        // A failure whose statement was carried out all the same.
        locked(&self.0.costs).extend_from_slice(costs);
        let answer = if fails(&self.0.failing_costs) {
            Err(StoreFault::Timeout)
        } else {
            Ok(())
        };
        Box::pin(ready(answer))
    }

    fn journal<'a>(&'a self, _: &'a [Admission], _: Instant) -> Option<Answer<'a, ()>> {
        None
    }

    fn ping(&self, _: Instant) -> Answer<'_, ()> {
        Box::pin(ready(Ok(())))
    }

    fn tend(&self) -> Answer<'_, Tended> {
        Box::pin(ready(Ok(Tended::AllDone)))
    }
}

fn bills(capacity: usize, remembered: usize) -> (Arc<Bills>, Arc<Metrics>) {
    let metrics = Arc::new(Metrics::default());
    let mut bills = Bills::new(Arc::clone(&metrics), Arc::default());
    (bills.capacity, bills.remembered) = (capacity, remembered);
    (Arc::new(bills), metrics)
}

/// Delivers for this many seconds.
async fn run(bills: &Arc<Bills>, stores: &Arc<Stores>, seconds: u64) {
    let patience = Duration::from_millis(100);
    let policy = PolicyCache::new(
        Arc::new(PriceList(Arc::clone(stores))),
        Duration::from_secs(2),
        patience,
        Arc::default(),
        Arc::default(),
    );
    let meter = WatchedMeter::new(
        Arc::new(Book(Arc::clone(stores))),
        patience,
        Arc::default(),
        Arc::default(),
    );
    let task = tokio::spawn(Arc::clone(bills).run(policy, meter));
    sleep(Duration::from_secs(seconds)).await;
    task.abort();
}

#[tokio::test(start_paused = true)]
async fn a_bill_is_priced_to_the_micro_dollar_and_told_once_however_often_it_comes() {
    let (bills, metrics) = bills(9, 9);
    let stores = Arc::new(Stores::default());
    bills.take(&[settlement(1, "gpt-4o", false), settlement(1, "gpt-4o", false)]);
    bills.take(&[settlement(1, "gpt-4o", true)]);
    run(&bills, &stores, 1).await;
    bills.take(&[settlement(1, "gpt-4o", true)]);
    run(&bills, &stores, 1).await;
    // 600 of 2.5 and 400 of 1.25 and 10 of 10 micro-dollars.
    let expected = Cost {
        op: op(1),
        org: "g".to_owned(),
        micro_dollars: 2_100,
    };
    assert_eq!(*locked(&stores.costs), [expected]);
    assert!(bills.is_empty());
    assert_eq!((metrics.bills_waiting.get(), metrics.bills_of_holds.get()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_bill_of_a_hold_is_billed_like_any_other_and_counted() {
    let (bills, metrics) = bills(9, 9);
    let stores = Arc::new(Stores::default());
    bills.take(&[settlement(1, "gpt-4o", true), settlement(2, "gpt-4o", false)]);
    run(&bills, &stores, 1).await;
    assert_eq!(locked(&stores.costs).len(), 2);
    assert_eq!(metrics.bills_of_holds.get(), 1);
}

#[tokio::test(start_paused = true)]
async fn what_no_store_could_be_asked_or_told_is_told_later_in_its_order() {
    let (bills, metrics) = bills(9, 9);
    let stores = Arc::new(Stores {
        failing_prices: AtomicUsize::new(3),
        failing_costs: AtomicUsize::new(2),
        ..Stores::default()
    });
    bills.take(&[settlement(1, "gpt-4o", false), settlement(2, "gpt-4o", false)]);
    assert_eq!(metrics.bills_waiting.get(), 2);
    run(&bills, &stores, 10).await;
    assert!(bills.is_empty());
    assert_eq!(metrics.bills_waiting.get(), 0);
    let told: Vec<_> = locked(&stores.costs).iter().map(|cost| cost.op).collect();
    assert_eq!(told, [1, 2, 1, 2, 1, 2].map(op), "by the same operations each time");
}

#[tokio::test(start_paused = true)]
async fn a_model_without_a_price_is_counted_once_and_holds_up_no_other() {
    let (bills, metrics) = bills(9, 9);
    let stores = Arc::new(Stores {
        failing_costs: AtomicUsize::new(2),
        ..Stores::default()
    });
    bills.take(&[settlement(1, "mistral", false), settlement(2, "gpt-4o", false)]);
    run(&bills, &stores, 5).await;
    bills.take(&[settlement(1, "mistral", false)]);
    run(&bills, &stores, 1).await;
    assert!(bills.is_empty());
    assert_eq!(metrics.unpriced.get(), 1);
    assert!(locked(&stores.costs).iter().all(|cost| cost.op == op(2)));
}

#[test]
fn what_finds_no_room_is_counted_and_taken_when_it_comes_again_and_there_is_some() {
    let (bills, metrics) = bills(2, 1);
    for n in [1, 2, 3] {
        bills.take(&[settlement(n, "gpt-4o", true)]);
    }
    let batch = bills.next_batch();
    bills.take(&[settlement(3, "gpt-4o", true)]);
    assert_eq!((metrics.bills_dropped.get(), metrics.bills_of_holds.get()), (2, 2));
    bills.finish(&[batch[0].0, batch[1].0], Vec::new());
    for n in [3, 2, 1] {
        bills.take(&[settlement(n, "gpt-4o", false)]);
    }
    let kept: Vec<_> = bills.next_batch().into_iter().map(|(op, _)| op).collect();
    assert_eq!(kept, [op(3), op(1)], "the last one that is over is remembered");
}

#[test]
fn settlements_without_a_bill_are_none_and_a_name_is_shown_up_to_a_length() {
    let (bills, _) = bills(9, 9);
    bills.take(&[Settlement {
        bill: None,
        ..settlement(1, "m", false)
    }]);
    assert!(bills.is_empty());
    assert_eq!(no_price_for("gpt-4o"), "no price for model gpt-4o");
    let shown = no_price_for(&"é".repeat(1_000));
    assert!(shown.ends_with("é…") && shown.chars().count() < 160, "{shown}");
}
