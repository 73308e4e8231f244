//! The tables: numbered files, each applied once, in order, in one transaction under one lock.
//!
//! Architecture invariant: a file that has been released is never changed; a change is a new file. A database that is newer
//! than this program is left alone, so that a deployment can be rolled back.

use tokio::time::Instant;
use tokio_postgres::types::Type;

use super::{Postgres, Transaction, column};
use crate::limiter::StoreFault;

/// What each version adds.
const MIGRATIONS: [(i32, &str); 4] = [
    (1, include_str!("../../migrations/0001_policy.sql")),
    (2, include_str!("../../migrations/0002_metering.sql")),
    (3, include_str!("../../migrations/0003_costs.sql")),
    (4, include_str!("../../migrations/0004_lock_order.sql")),
];
/// The version that this program needs.
pub(super) const NEWEST: i32 = 4;
/// Key of the advisory lock: the ASCII codes of `portcull`.
const LOCK: i64 = 0x706f_7274_6375_6c6c;

/// What was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Migrated {
    /// Nothing: the tables were there.
    Nothing,
    /// The tables were created, or brought up to this version.
    To(i32),
}

/// Applies what is missing.
pub(super) async fn apply(database: &Postgres, deadline: Instant) -> Result<Migrated, StoreFault> {
    // Without the right to create tables one may still run on those that somebody else has created.
    if database.ping(deadline).await.is_ok() {
        return Ok(Migrated::Nothing);
    }
    let transaction = database.begin(deadline).await?;
    // Also keeps two from creating the first table at once, which `IF NOT EXISTS` alone does not.
    transaction
        .query("SELECT pg_advisory_xact_lock($1)", &[(&LOCK, Type::INT8)])
        .await?;
    transaction
        .script(
            "CREATE TABLE IF NOT EXISTS portcullis_migrations \
             (version integer PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now())",
        )
        .await?;
    let applied = version(&transaction).await?;
    let mut migrated = Migrated::Nothing;
    for (number, script) in MIGRATIONS.iter().filter(|(number, _)| *number > applied) {
        transaction.script(script).await?;
        transaction
            .query(
                "INSERT INTO portcullis_migrations (version) VALUES ($1)",
                &[(number, Type::INT4)],
            )
            .await?;
        migrated = Migrated::To(*number);
    }
    transaction.commit().await?;
    Ok(migrated)
}

async fn version(transaction: &Transaction) -> Result<i32, StoreFault> {
    let rows = transaction
        .query("SELECT coalesce(max(version), 0) FROM portcullis_migrations", &[])
        .await?;
    rows.first().map_or(Ok(0), |row| column(row, 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_are_numbered_without_a_gap() {
        let numbers = MIGRATIONS.map(|(number, _)| number);
        assert!(numbers.iter().copied().eq(1..=NEWEST), "{numbers:?}");
    }
}
