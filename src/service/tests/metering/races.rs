//! PostgreSQL at the wrong moment: statements of one operation that meet, and a connection lost between two attempts.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use portcullis_decision::limits::Limit;
use portcullis_service::limiter::StoreFault;
use portcullis_service::metering::Cancel;
use portcullis_service::unmetered::Source;
use tokio_postgres::{Client, NoTls};

use crate::billing::runs;
use crate::postgres::{PASSWORD, Postgres};
use crate::proxy::Proxy;
use crate::store::{admission, cost, now_ms, op, open, plan, soon};
use crate::stores::eventually;

/// A connection whose transaction stays open as long as the test wants.
async fn connect(server: &Postgres) -> Client {
    let (client, connection) = tokio_postgres::connect(&server.url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

/// So many statements wait for a lock.
async fn wait(server: &Postgres, count: &str) {
    eventually("they wait for a lock", async || {
        let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
        (server.run(waiting).await[0][0] == count).then_some(())
    })
    .await;
}

fn journaling(n: u64) -> String {
    format!(
        "BEGIN; SELECT portcullis_journal(ARRAY['{}']::uuid[], ARRAY['g'], ARRAY['o'], ARRAY['r'], ARRAY[{}], \
         ARRAY[NULL]::text[], ARRAY['service'])",
        op(n),
        now_ms()
    )
}

fn voiding(n: u64) -> String {
    format!("BEGIN; SELECT portcullis_cancel(ARRAY['{}']::uuid[], true)", op(n))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_whose_cancel_meets_its_journal_is_not_billed_whichever_ends_first() {
    let server = Postgres::start().await;
    let (meter, other) = (open(server.url()).await, connect(&server).await);

    other.batch_execute(&journaling(1)).await.unwrap();
    let cancel = tokio::spawn({
        let meter = Arc::clone(&meter);
        async move { meter.cancel(&[op(1)], Cancel::Void, soon()).await }
    });
    wait(&server, "1").await;
    other.batch_execute("COMMIT").await.unwrap();
    assert_eq!(cancel.await.unwrap(), Ok(()));
    assert_eq!(runs(&server).await, "0", "the journal was first");

    other.batch_execute(&voiding(2)).await.unwrap();
    let journal = tokio::spawn({
        let (meter, admissions) = (Arc::clone(&meter), [admission(2, Source::Service, now_ms())]);
        async move { meter.journal(&admissions, soon()).unwrap().await }
    });
    wait(&server, "1").await;
    other.batch_execute("COMMIT").await.unwrap();
    assert_eq!(journal.await.unwrap(), Ok(()));
    assert_eq!(runs(&server).await, "0", "the cancel was first");
    assert_eq!(server.run("SELECT count(*) FROM portcullis_unmetered").await, [["0"]]);
}

/// Costs wait for a known operation, and whoever waits behind them must not hold the new one that they need next.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_of_known_and_new_operations_holds_no_new_one_while_it_waits_for_a_known_one() {
    let server = Postgres::start_with(&["deadlock_timeout=50ms"]).await;
    let (meter, other) = (open(server.url()).await, connect(&server).await);
    let unlimited = |n| plan(n, Limit::Unlimited, Limit::Unlimited);
    for (known, new) in [(1, 2), (3, 4)] {
        meter.record(&unlimited(known), soon()).await.unwrap();
        let hold = format!(
            "BEGIN; SELECT FROM portcullis_operations WHERE op = '{}' FOR UPDATE",
            op(known)
        );
        other.batch_execute(&hold).await.unwrap();
        let costs = tokio::spawn({
            let meter = Arc::clone(&meter);
            async move {
                let costs = [cost(known, "g", 5), cost(new, "g", 7)];
                meter.add_costs(&costs, soon()).await
            }
        });
        wait(&server, "1").await;
        let batch = tokio::spawn({
            let meter = Arc::clone(&meter);
            async move {
                if known == 1 {
                    return meter.cancel(&[op(known), op(new)], Cancel::GiveBack, soon()).await;
                }
                let told = [known, new].map(|n| admission(n, Source::Service, now_ms()));
                meter.journal(&told, soon()).unwrap().await
            }
        });
        wait(&server, "2").await;
        other.batch_execute("COMMIT").await.unwrap();
        assert_eq!((costs.await.unwrap(), batch.await.unwrap()), (Ok(()), Ok(())));
    }
    assert!(!server.log().contains("deadlock detected"), "{}", server.log());
    let spent = server.run("SELECT sum(runs), sum(cost) FROM portcullis_months").await;
    assert_eq!(spent, [["2", "24"]]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_second_attempt_does_not_hide_that_the_first_may_have_been_carried_out() {
    let server = Postgres::start().await;
    let proxy = Proxy::start(server.port, "portcullis_record".to_owned()).await;
    server
        .run(&format!("CREATE ROLE clerk SUPERUSER LOGIN PASSWORD '{PASSWORD}'"))
        .await;
    let url = format!("postgres://clerk:{PASSWORD}@127.0.0.1:{}/postgres", proxy.port);
    // Leaves its connection in the pool, where the next statement finds it.
    let meter = open(url).await;
    server.run("ALTER ROLE clerk PASSWORD 'another'").await;
    proxy.mood.cut_next_reply.store(true, Ordering::SeqCst);
    let answer = meter.record(&plan(1, Limit::Unlimited, Limit::Unlimited), soon()).await;
    assert_eq!(answer, Err(StoreFault::Connection));
    let answer = meter.record(&plan(2, Limit::Unlimited, Limit::Unlimited), soon()).await;
    assert_eq!(answer, Err(StoreFault::AccessDenied), "the only attempt");
}
