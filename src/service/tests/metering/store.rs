//! What every metering store does, and what PostgreSQL does beyond it.

use std::sync::Arc;
use std::time::Duration;

use portcullis_decision::config::{MeteringConfig, StoreUrl};
use portcullis_decision::limits::Limit;
use portcullis_decision::metering::{Cost, MeterPlan, Metered};
use portcullis_decision::operation::OperationId;
use portcullis_service::metering::watched::WatchedMeter;
use portcullis_service::metering::{self, Cancel, Meter};
use portcullis_service::unmetered::{Admission, Source};
use tokio::time::Instant;

use crate::postgres::{PgBouncer, Postgres};
use crate::stores::eventually;

/// A meter and what it needs to live.
pub(crate) struct Subject {
    pub(crate) meter: Arc<dyn Meter>,
    server: Option<Postgres>,
}

pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

pub(crate) async fn open(url: String) -> Arc<dyn Meter> {
    let config = MeteringConfig {
        url: Some(StoreUrl::new(url)),
    };
    let meter = metering::open(&config).unwrap().unwrap();
    meter.tend().await.unwrap();
    meter
}

pub(crate) async fn subjects() -> [Subject; 2] {
    let server = Postgres::start().await;
    [
        Subject {
            meter: open("memory:".to_owned()).await,
            server: None,
        },
        Subject {
            meter: open(server.url()).await,
            server: Some(server),
        },
    ]
}

pub(crate) fn op(n: u64) -> OperationId {
    OperationId::parse(&format!("{n:032x}")).unwrap()
}

pub(crate) fn plan(n: u64, runs: Limit, cost: Limit) -> MeterPlan {
    MeterPlan {
        op: op(n),
        org: "g".to_owned(),
        runs,
        cost,
        records: true,
        cost_first: false,
    }
}

pub(crate) fn cost(n: u64, org: &str, micro_dollars: u64) -> Cost {
    Cost {
        op: op(n),
        org: org.to_owned(),
        micro_dollars,
    }
}

impl Subject {
    pub(crate) async fn record(&self, plan: &MeterPlan) -> Metered {
        self.meter.record(plan, soon()).await.unwrap()
    }

    /// Runs of this month, by what is left of a limit above them.
    pub(crate) async fn runs(&self) -> u64 {
        let mut probe = plan(u64::MAX, Limit::of(0), Limit::Unlimited);
        probe.records = false;
        match self.record(&probe).await {
            Metered::Denied(state) => state.runs,
            other => panic!("{other:?}"),
        }
    }
}

/// Records, and asks again where that failed: a connection that is slow to come on a loaded machine is no fault of the
/// statement.
async fn persistently(meter: &dyn Meter, plan: MeterPlan) -> Metered {
    eventually("recorded", async || meter.record(&plan, soon()).await.ok()).await
}

pub(crate) fn admission(n: u64, source: Source, at_ms: u64) -> Admission {
    Admission {
        op: op(n),
        org: "g".to_owned(),
        owner: Some("o".to_owned()),
        rules: "launch-gate".to_owned(),
        at_ms,
        request_id: None,
        source,
    }
}

pub(crate) fn now_ms() -> u64 {
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap();
    u64::try_from(now.as_millis()).unwrap()
}

async fn journal(meter: &dyn Meter, admissions: &[Admission]) {
    meter.journal(admissions, soon()).unwrap().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_at_once_against_ten_remaining_runs_admit_exactly_ten() {
    for subject in subjects().await {
        let asked = (0..100).map(|n| persistently(&*subject.meter, plan(n, Limit::of(10), Limit::Unlimited)));
        let answers = futures_util::future::join_all(asked).await;
        let granted = answers.iter().filter(|answer| **answer == Metered::Granted).count();
        let denied = answers
            .iter()
            .filter(|answer| matches!(answer, Metered::Denied(_)))
            .count();
        assert_eq!((granted, denied), (10, 90), "{answers:?}");
        assert_eq!(subject.runs().await, 10);
        if let Some(server) = &subject.server {
            assert_eq!(
                server.run("SELECT count(*) FROM portcullis_operations").await[0][0],
                "10"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operation_counts_once_however_often_it_is_asked_and_its_give_back_is_final() {
    for subject in subjects().await {
        let plan = plan(1, Limit::of(1), Limit::Unlimited);
        for _ in 0..3 {
            assert_eq!(subject.record(&plan).await, Metered::Granted);
        }
        assert_eq!(subject.runs().await, 1);
        for _ in 0..2 {
            subject
                .meter
                .cancel(&[op(1), op(2), op(1)], Cancel::GiveBack, soon())
                .await
                .unwrap();
        }
        assert_eq!(subject.runs().await, 0);
        assert_eq!(subject.record(&plan).await, Metered::Cancelled);
        let late = MeterPlan { op: op(2), ..plan };
        assert_eq!(
            subject.record(&late).await,
            Metered::Cancelled,
            "cancelled before it came"
        );
        assert_eq!(subject.runs().await, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cap_below_what_is_spent_denies_whatever_the_figures_are() {
    for subject in subjects().await {
        let (meter, capped) = (&subject.meter, |n, cap| plan(n, Limit::Unlimited, Limit::of(cap)));
        assert_eq!(subject.record(&capped(1, 500)).await, Metered::Granted);
        for _ in 0..2 {
            meter.add_costs(&[cost(1, "g", 500)], soon()).await.unwrap();
        }
        let Metered::Denied(state) = subject.record(&capped(2, 500)).await else {
            panic!()
        };
        assert_eq!((state.runs, state.cost), (1, 500), "a cost is added once");
        assert_eq!(subject.record(&capped(3, 501)).await, Metered::Granted);
        assert!(
            matches!(subject.record(&capped(4, 1)).await, Metered::Denied(_)),
            "lowered"
        );
        assert!(matches!(subject.record(&capped(5, 0)).await, Metered::Denied(_)));
        for n in [6, 7] {
            meter.add_costs(&[cost(n, "g", u64::MAX)], soon()).await.unwrap();
        }
        let Metered::Denied(state) = subject.record(&capped(8, (1 << 53) - 1)).await else {
            panic!()
        };
        assert!(state.cost >= i64::MAX as u64);
        let other = MeterPlan {
            org: "other".to_owned(),
            ..capped(9, 1)
        };
        assert_eq!(subject.record(&other).await, Metered::Granted, "orgs are apart");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_check_without_a_record_leaves_nothing_and_a_denial_says_when_the_month_ends() {
    for subject in subjects().await {
        let check = MeterPlan {
            records: false,
            ..plan(1, Limit::of(1), Limit::of(1))
        };
        assert_eq!(subject.record(&check).await, Metered::Granted);
        assert_eq!(subject.runs().await, 0);
        let Metered::Denied(state) = subject.record(&plan(2, Limit::of(0), Limit::Unlimited)).await else {
            panic!()
        };
        assert!(
            (28 * 86_400..=31 * 86_400).contains(&state.length_s) && state.length_s % 86_400 == 0,
            "{state:?}"
        );
        assert!((1..=state.length_s * 1000).contains(&state.ends_in_ms), "{state:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_month_is_the_databases_and_earlier_ones_do_not_count() {
    let server = Postgres::start_with(&["timezone=Pacific/Kiritimati"]).await;
    let meter = open(server.url()).await;
    server
        .run(
            "INSERT INTO portcullis_months (org, month, runs, cost) SELECT 'g', m, 1000, 1000 FROM (VALUES \
             (date_trunc('month', now() AT TIME ZONE 'UTC') - interval '1 month'), \
             (date_trunc('month', now() AT TIME ZONE 'UTC') + interval '1 month')) AS t (m)",
        )
        .await;
    let answer = meter.record(&plan(1, Limit::of(1), Limit::of(1)), soon()).await;
    assert_eq!(answer, Ok(Metered::Granted));
    let month = "SELECT runs FROM portcullis_months WHERE month = date_trunc('month', now() AT TIME ZONE 'UTC')";
    assert_eq!(server.run(month).await, [["1"]]);
    let Ok(Metered::Denied(state)) = meter.record(&plan(2, Limit::of(1), Limit::of(1)), soon()).await else {
        panic!()
    };
    let left = "SELECT ceil(extract(epoch FROM date_trunc('month', now() AT TIME ZONE 'UTC') + interval '1 month' \
                - now() AT TIME ZONE 'UTC'))";
    let left: u64 = server.run(left).await[0][0].parse().unwrap();
    assert!(state.ends_in_ms.div_ceil(1000).abs_diff(left) <= 2, "{state:?} {left}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_journaled_run_counts_once_in_its_month_whatever_else_is_known_of_it() {
    let server = Postgres::start().await;
    let meter = open(server.url()).await;
    let (now, runs) = (now_ms(), "SELECT coalesce(sum(runs), 0) FROM portcullis_months");
    // 1: recorded after all, its answer lost. 2: the same, and given back. 3: never heard of. 4: both told it.
    for n in [1, 2] {
        meter
            .record(&plan(n, Limit::Unlimited, Limit::Unlimited), soon())
            .await
            .unwrap();
    }
    meter.cancel(&[op(2)], Cancel::GiveBack, soon()).await.unwrap();
    let batch = [
        admission(1, Source::Service, now),
        admission(2, Source::Service, now),
        admission(3, Source::Service, now),
        admission(4, Source::Service, now),
        admission(4, Source::Filter, now),
    ];
    for _ in 0..2 {
        journal(&*meter, &batch).await;
    }
    assert_eq!(server.run(runs).await, [["4"]]);
    let sources = "SELECT string_agg(source, ' ' ORDER BY op) FROM portcullis_unmetered";
    assert_eq!(server.run(sources).await, [["service service service filter"]]);
    // The give-backs that waited come too late to take a run away.
    meter
        .cancel(&[op(1), op(2), op(3), op(4)], Cancel::GiveBack, soon())
        .await
        .unwrap();
    assert_eq!(server.run(runs).await, [["4"]]);
    let answer = meter.record(&plan(3, Limit::Unlimited, Limit::Unlimited), soon()).await;
    assert_eq!(
        answer,
        Ok(Metered::Cancelled),
        "a run that is journaled is not recorded again"
    );
    let long_ago = 1_700_000_000_000;
    journal(&*meter, &[admission(5, Source::Filter, long_ago)]).await;
    let november = "SELECT runs FROM portcullis_months WHERE org = 'g' AND month = '2023-11-01'";
    assert_eq!(server.run(november).await, [["1"]]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_nobody_waited_for_is_not_billed_in_whichever_order_it_is_told() {
    let server = Postgres::start().await;
    let meter = open(server.url()).await;
    let (now, runs) = (now_ms(), "SELECT coalesce(sum(runs), 0) FROM portcullis_months");
    meter
        .record(&plan(1, Limit::Unlimited, Limit::Unlimited), soon())
        .await
        .unwrap();
    journal(
        &*meter,
        &[admission(1, Source::Service, now), admission(2, Source::Service, now)],
    )
    .await;
    assert_eq!(server.run(runs).await, [["2"]]);
    meter
        .cancel(&[op(1), op(2), op(3)], Cancel::Void, soon())
        .await
        .unwrap();
    assert_eq!(server.run(runs).await, [["0"]]);
    journal(&*meter, &[admission(3, Source::Service, now)]).await;
    assert_eq!(server.run(runs).await, [["0"]]);
    // The filter's word counts: it has let the request pass by itself.
    journal(
        &*meter,
        &[admission(1, Source::Filter, now), admission(3, Source::Filter, now)],
    )
    .await;
    meter.cancel(&[op(1), op(3)], Cancel::Void, soon()).await.unwrap();
    assert_eq!(server.run(runs).await, [["2"]]);
    assert_eq!(server.run("SELECT count(*) FROM portcullis_unmetered").await, [["2"]]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_id_that_no_text_can_hold_is_unavailable_alone_and_holds_up_no_journal() {
    let server = Postgres::start().await;
    let meter = open(server.url()).await;
    let odd = MeterPlan {
        org: "a\0b".to_owned(),
        ..plan(1, Limit::Unlimited, Limit::Unlimited)
    };
    assert!(meter.record(&odd, soon()).await.is_err());
    let odd = Admission {
        org: "a\0b".to_owned(),
        ..admission(1, Source::Filter, 0)
    };
    let quoted = Admission {
        org: "',\"}{NULL\\".to_owned(),
        ..admission(2, Source::Filter, 0)
    };
    journal(&*meter, &[odd, quoted.clone()]).await;
    let orgs = server.run("SELECT org FROM portcullis_unmetered ORDER BY op").await;
    assert_eq!(orgs, [["a\u{fffd}b".to_owned()], [quoted.org]]);
}

/// Sixteen operations from `first` on, in the way and the order of this worker.
async fn work(meter: &dyn Meter, worker: u64, first: u64) {
    let org = |n: u64| format!("org-{}", n % 5);
    let numbers = first..first + 16;
    match worker % 5 {
        0 | 1 => {
            for n in numbers {
                let plan = MeterPlan {
                    org: org(n),
                    ..plan(n, Limit::Unlimited, Limit::Unlimited)
                };
                persistently(meter, plan).await;
            }
        }
        2 => {
            let ops: Vec<_> = numbers.rev().step_by(2).map(op).collect();
            let why = if worker.is_multiple_of(2) {
                Cancel::GiveBack
            } else {
                Cancel::Void
            };
            eventually("cancelled", async || meter.cancel(&ops, why, soon()).await.ok()).await;
        }
        3 => {
            let told = |n| Admission {
                org: org(n),
                ..admission(n, Source::Service, now_ms())
            };
            let batch: Vec<_> = numbers.rev().step_by(3).map(told).collect();
            eventually("journaled", async || meter.journal(&batch, soon()).unwrap().await.ok()).await;
        }
        _ => {
            let batch: Vec<_> = numbers.rev().map(|n| cost(n, &org(n), n + 1)).collect();
            eventually("costs added", async || meter.add_costs(&batch, soon()).await.ok()).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn records_cancels_journals_and_costs_that_meet_neither_deadlock_nor_lose_a_run_or_a_micro_dollar() {
    let server = Postgres::start_with(&["deadlock_timeout=50ms"]).await;
    let meter = open(server.url()).await;
    let workers = (0..16_u64).map(|worker| {
        let meter = Arc::clone(&meter);
        async move {
            for first in (0..320_u64).step_by(16) {
                work(&*meter, worker, first).await;
            }
        }
    });
    futures_util::future::join_all(workers).await;
    assert!(!server.log().contains("deadlock detected"));
    let counted = server.run("SELECT coalesce(sum(runs), 0) FROM portcullis_months").await;
    let expected = server
        .run(
            "SELECT (SELECT count(*) FROM portcullis_operations WHERE state = 'recorded') \
             + (SELECT count(*) FROM portcullis_unmetered)",
        )
        .await;
    assert_eq!(counted, expected);
    let spent = server.run("SELECT sum(cost) FROM portcullis_months").await;
    assert_eq!(spent, [[(1..=320_u64).sum::<u64>().to_string()]]);
}

#[tokio::test(flavor = "multi_thread")]
async fn it_works_through_pgbouncer_in_transaction_mode() {
    let server = Postgres::start().await;
    let Some(bouncer) = PgBouncer::start(&server).await else {
        eprintln!("pgbouncer is not installed: not tested");
        return;
    };
    let meter = open(server.url_at(bouncer.port)).await;
    let asked = (0..40).map(|n| persistently(&*meter, plan(n, Limit::of(10), Limit::Unlimited)));
    let answers = futures_util::future::join_all(asked).await;
    assert_eq!(answers.iter().filter(|answer| **answer == Metered::Granted).count(), 10);
    journal(&*meter, &[admission(1_000, Source::Filter, now_ms())]).await;
    meter.cancel(&[op(0)], Cancel::Void, soon()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_is_one_statement_and_old_operations_are_forgotten() {
    let server = Postgres::start().await;
    let meter = open(server.url()).await;
    for n in 0..3 {
        meter
            .record(&plan(n, Limit::of(2), Limit::Unlimited), soon())
            .await
            .unwrap();
    }
    eventually("the log has them", async || {
        (server.statements("portcullis_record") >= 3).then_some(())
    })
    .await;
    assert_eq!(server.statements("portcullis_record"), 3);
    server
        .run("UPDATE portcullis_operations SET created_at = created_at - interval '25 hours' WHERE op::text LIKE '%1'")
        .await;
    meter.tend().await.unwrap();
    assert_eq!(server.run("SELECT count(*) FROM portcullis_operations").await, [["1"]]);
}

#[tokio::test(flavor = "multi_thread")]
async fn more_old_operations_than_one_statement_takes_are_forgotten_one_batch_soon_after_the_other() {
    let server = Postgres::start().await;
    let meter = open(server.url()).await;
    server
        .run(
            "INSERT INTO portcullis_operations (op, org, month, state, created_at) \
             SELECT gen_random_uuid(), 'g', '2024-01-01', 'recorded', now() - n / 25000 * interval '25 hours' \
             FROM generate_series(1, 50000) AS t (n)",
        )
        .await;
    let watched = WatchedMeter::new(meter, Duration::from_secs(5), Arc::default(), Arc::default());
    let tending = tokio::spawn(watched.run());
    eventually("all old ones are forgotten", async || {
        (server.run("SELECT count(*) FROM portcullis_operations").await == [["24999"]]).then_some(())
    })
    .await;
    tending.abort();
}
