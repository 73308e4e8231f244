//! `postgres://`: each operation is one statement, a call of a function of `migrations/`, where `0002_metering.sql` says how
//! they are atomic and idempotent. Months are the database's.
//!
//! Left out on purpose: connections, deadlines and asking again, which `crate::postgres` does.

use std::time::Duration;

use portcullis_decision::config::StoreUrl;
use portcullis_decision::limits::Limit;
use portcullis_decision::metering::{Cost, MeterPlan, Metered, MonthState};
use portcullis_decision::operation::OperationId;
use tokio::time::Instant;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::{Cancel, Meter, Tended};
use crate::after;
use crate::limiter::{Answer, StoreFault};
use crate::postgres::{AddressFault, Parameter, Postgres, column};
use crate::unmetered::Admission;

const RECORD: &str = "SELECT state, runs, cost, ends_in_ms, length_s \
    FROM portcullis_record($1::text::uuid, $2, $3, $4, $5)";
const CANCEL: &str = "SELECT portcullis_cancel($1::text[]::uuid[], $2)";
const ADD_COSTS: &str = "SELECT portcullis_add_costs($1::text[]::uuid[], $2, $3)";
const JOURNAL: &str = "SELECT portcullis_journal($1::text[]::uuid[], $2, $3, $4, $5, $6, $7)";
/// Operations are remembered for a day: longer than anybody asks again or gives back.
const FORGET: &str = "WITH gone AS (DELETE FROM portcullis_operations WHERE op IN (SELECT op FROM portcullis_operations \
    WHERE created_at < clock_timestamp() - interval '1 day' LIMIT $1 FOR UPDATE SKIP LOCKED) RETURNING op) \
    SELECT count(*) FROM gone";
/// Operations that are forgotten in one statement, so that none is long.
const FORGET_BATCH: i64 = 10_000;
/// For what nobody waits for.
const UNHURRIED: Duration = Duration::from_secs(10);

/// Months in a database that services share.
#[derive(Debug)]
pub struct PostgresMeter {
    database: Postgres,
}

impl PostgresMeter {
    /// A meter of the database at this address. Dials nothing.
    ///
    /// # Errors
    /// An address that can't be read.
    pub fn open(url: &StoreUrl) -> Result<Self, AddressFault> {
        Ok(Self {
            database: Postgres::open(url)?,
        })
    }
}

/// A figure as the database counts; NULL is unlimited.
fn figure(limit: Limit) -> Option<i64> {
    limit.figure().map(bigint)
}

fn bigint(figure: u64) -> i64 {
    i64::try_from(figure).unwrap_or(i64::MAX)
}

fn figure_of(row: &Row, at: usize) -> Result<u64, StoreFault> {
    u64::try_from(column::<i64>(row, at)?).map_err(|_| StoreFault::NotSensible)
}

/// What can't be stored as it is must not keep all others of its batch from being billed.
fn stored(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

/// The database has no zero byte in a text. An id that holds one is ill-formed, and is not made another's.
fn storable(id: &str) -> Result<&str, StoreFault> {
    if id.contains('\0') {
        Err(StoreFault::NotSensible)
    } else {
        Ok(id)
    }
}

fn metered(row: &Row) -> Result<Metered, StoreFault> {
    match column::<&str>(row, 0)? {
        "granted" => Ok(Metered::Granted),
        "cancelled" => Ok(Metered::Cancelled),
        "denied" => Ok(Metered::Denied(MonthState {
            runs: figure_of(row, 1)?,
            cost: figure_of(row, 2)?,
            ends_in_ms: figure_of(row, 3)?,
            length_s: figure_of(row, 4)?,
        })),
        _ => Err(StoreFault::NotSensible),
    }
}

impl Meter for PostgresMeter {
    fn scheme(&self) -> &'static str {
        "postgres"
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn record<'a>(&'a self, plan: &'a MeterPlan, deadline: Instant) -> Answer<'a, Metered> {
        Box::pin(async move {
            let (op, org) = (plan.op.to_string(), storable(&plan.org)?);
            let (runs, cost) = (figure(plan.runs), figure(plan.cost));
            let parameters: [Parameter<'_>; 5] = [
                (&op, Type::TEXT),
                (&org, Type::TEXT),
                (&runs, Type::INT8),
                (&cost, Type::INT8),
                (&plan.records, Type::BOOL),
            ];
            let rows = self.database.ask(RECORD, &parameters, deadline).await?;
            metered(rows.first().ok_or(StoreFault::NotSensible)?)
        })
    }

    fn cancel<'a>(&'a self, ops: &'a [OperationId], why: Cancel, deadline: Instant) -> Answer<'a, ()> {
        Box::pin(async move {
            let ops: Vec<String> = ops.iter().map(ToString::to_string).collect();
            let is_void = why == Cancel::Void;
            let parameters: [Parameter<'_>; 2] = [(&ops, Type::TEXT_ARRAY), (&is_void, Type::BOOL)];
            self.database.ask(CANCEL, &parameters, deadline).await.map(drop)
        })
    }

    fn add_costs<'a>(&'a self, costs: &'a [Cost], deadline: Instant) -> Answer<'a, ()> {
        Box::pin(async move {
            let ops: Vec<String> = costs.iter().map(|cost| cost.op.to_string()).collect();
            let orgs: Vec<String> = costs.iter().map(|cost| stored(&cost.org)).collect();
            let figures: Vec<i64> = costs.iter().map(|cost| bigint(cost.micro_dollars)).collect();
            let parameters: [Parameter<'_>; 3] = [
                (&ops, Type::TEXT_ARRAY),
                (&orgs, Type::TEXT_ARRAY),
                (&figures, Type::INT8_ARRAY),
            ];
            self.database.ask(ADD_COSTS, &parameters, deadline).await.map(drop)
        })
    }

    fn journal<'a>(&'a self, admissions: &'a [Admission], deadline: Instant) -> Option<Answer<'a, ()>> {
        Some(Box::pin(async move {
            let all = |of: fn(&Admission) -> Option<&String>| -> Vec<Option<String>> {
                let text = |text: &String| stored(text);
                admissions.iter().map(|admission| of(admission).map(text)).collect()
            };
            let ops: Vec<String> = admissions.iter().map(|admission| admission.op.to_string()).collect();
            let (orgs, owners) = (all(|one| Some(&one.org)), all(|one| one.owner.as_ref()));
            let (rules, request_ids) = (all(|one| Some(&one.rules)), all(|one| one.request_id.as_ref()));
            let at_ms: Vec<i64> = admissions.iter().map(|admission| bigint(admission.at_ms)).collect();
            let sources: Vec<&str> = admissions.iter().map(|admission| admission.source.name()).collect();
            let parameters: [Parameter<'_>; 7] = [
                (&ops, Type::TEXT_ARRAY),
                (&orgs, Type::TEXT_ARRAY),
                (&owners, Type::TEXT_ARRAY),
                (&rules, Type::TEXT_ARRAY),
                (&at_ms, Type::INT8_ARRAY),
                (&request_ids, Type::TEXT_ARRAY),
                (&sources, Type::TEXT_ARRAY),
            ];
            self.database.ask(JOURNAL, &parameters, deadline).await.map(drop)
        }))
    }

    fn ping(&self, deadline: Instant) -> Answer<'_, ()> {
        Box::pin(self.database.ping(deadline))
    }

    fn tend(&self) -> Answer<'_, Tended> {
        Box::pin(async move {
            self.database.migrate().await?;
            let (limit, deadline) = ([(&FORGET_BATCH as _, Type::INT8)], after(Instant::now(), UNHURRIED));
            let rows = self.database.ask(FORGET, &limit, deadline).await?;
            let gone: i64 = column(rows.first().ok_or(StoreFault::NotSensible)?, 0)?;
            Ok(if gone < FORGET_BATCH {
                Tended::AllDone
            } else {
                Tended::MoreToDo
            })
        })
    }
}
