//! Costs: what every metering store adds, to which month, and how often.

use portcullis_decision::limits::Limit;
use portcullis_decision::metering::{MeterPlan, Metered};
use portcullis_service::metering::{Cancel, Meter};

use crate::postgres::Postgres;
use crate::store::{cost, op, open, plan, soon, subjects};

/// What an org has spent in this month, by a cap that nothing stays below.
async fn spent(meter: &dyn Meter, org: &str) -> u64 {
    let probe = MeterPlan {
        org: org.to_owned(),
        records: false,
        ..plan(u64::MAX, Limit::Unlimited, Limit::of(0))
    };
    match meter.record(&probe, soon()).await.unwrap() {
        Metered::Denied(state) => state.cost,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn costs_of_many_operations_and_orgs_are_added_in_one_call_and_each_operation_once() {
    for subject in subjects().await {
        let meter = &*subject.meter;
        // Of a recorded run, of a cancelled one, and of one that nobody has heard of.
        assert_eq!(
            subject.record(&plan(1, Limit::Unlimited, Limit::Unlimited)).await,
            Metered::Granted
        );
        meter.cancel(&[op(2)], Cancel::GiveBack, soon()).await.unwrap();
        let mut batch = vec![cost(3, "g", 1), cost(2, "h", 10), cost(1, "g", 100)];
        batch.extend((10..500).map(|n| cost(n, ["g", "h", "i"][n as usize % 3], 1_000)));
        for _ in 0..2 {
            meter.add_costs(&batch, soon()).await.unwrap();
            batch.reverse();
        }
        let of = |org| {
            batch
                .iter()
                .filter(move |cost| cost.org == org)
                .map(|cost| cost.micro_dollars)
        };
        for org in ["g", "h", "i"] {
            assert_eq!(spent(meter, org).await, of(org).sum::<u64>(), "{org}");
        }
        assert_eq!(subject.runs().await, 1, "a cost is no run");
        // Twice in one call, and nothing at all.
        meter
            .add_costs(&[cost(501, "j", 5), cost(501, "j", 5), cost(502, "j", 0)], soon())
            .await
            .unwrap();
        meter.add_costs(&[], soon()).await.unwrap();
        assert_eq!(spent(meter, "j").await, 5);
        meter
            .add_costs(&[cost(503, "", 7), cost(504, "a\0b", 7)], soon())
            .await
            .unwrap();
        assert_eq!(spent(meter, "").await, 7);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_month_that_is_full_stays_full_in_one_call_or_in_many() {
    let server = Postgres::start().await;
    let meter = open(server.url()).await;
    let full = i64::MAX as u64;
    let batch = [
        cost(1, "g", u64::MAX),
        cost(2, "g", full),
        cost(3, "g", 1),
        cost(4, "h", full - 1),
    ];
    meter.add_costs(&batch, soon()).await.unwrap();
    assert_eq!((spent(&*meter, "g").await, spent(&*meter, "h").await), (full, full - 1));
    for n in 5..8 {
        meter
            .add_costs(&[cost(n, "g", 1), cost(n + 10, "h", 1)], soon())
            .await
            .unwrap();
    }
    assert_eq!((spent(&*meter, "g").await, spent(&*meter, "h").await), (full, full));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cost_is_added_to_the_month_of_its_run_and_is_remembered_after_a_run_of_days() {
    let server = Postgres::start().await;
    let meter = open(server.url()).await;
    meter
        .record(&plan(1, Limit::Unlimited, Limit::Unlimited), soon())
        .await
        .unwrap();
    server
        .run(
            "UPDATE portcullis_operations SET month = month - interval '1 month', \
             created_at = created_at - interval '30 hours'",
        )
        .await;
    for _ in 0..2 {
        meter.add_costs(&[cost(1, "g", 700)], soon()).await.unwrap();
        meter.tend().await.unwrap();
    }
    let months = "SELECT cost FROM portcullis_months ORDER BY month";
    assert_eq!(server.run(months).await, [["700"], ["0"]]);
}
