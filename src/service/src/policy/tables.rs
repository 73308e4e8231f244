//! Policies in Postgres: one statement for an organization with its plan, one for the registry, one for the
//! price list.

use std::sync::Arc;

use portcullis_decision::limits::Limit;
use portcullis_decision::policy::{ModelPattern, Org, OrgStatus, Plan, Price};
use tokio::time::Instant;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::{PolicyStore, Prices, Registry};
use crate::limiter::{Answer, StoreFault};
use crate::postgres::{Migrated, Postgres, column};

const ORG: &str = "SELECT o.status, o.models, p.concurrency, p.requests, p.tokens, p.monthly_runs, p.monthly_cost \
                   FROM portcullis_orgs o LEFT JOIN portcullis_plans p ON p.name = o.plan WHERE o.id = $1";
const REGISTRY: &str = "SELECT model, provider FROM portcullis_providers";
pub(super) const PRICES: &str = "SELECT model, input, cached_input, output FROM portcullis_prices";

/// The policy tables of a database.
pub(super) struct PolicyTables {
    database: Postgres,
}

impl PolicyTables {
    pub(super) const fn new(database: Postgres) -> Self {
        Self { database }
    }
}

impl PolicyStore for PolicyTables {
    fn scheme(&self) -> &'static str {
        "postgres"
    }

    fn org<'a>(&'a self, id: &'a str, deadline: Instant) -> Answer<'a, Option<Arc<Org>>> {
        Box::pin(async move {
            // No text of Postgres holds a zero byte, so none of its ids does.
            if id.contains('\0') {
                return Ok(None);
            }
            let rows = self.database.ask(ORG, &[(&id, Type::TEXT)], deadline).await?;
            rows.first().map(|row| org(row).map(Arc::new)).transpose()
        })
    }

    fn registry(&self, deadline: Instant) -> Answer<'_, Arc<Registry>> {
        Box::pin(async move {
            let rows = self.database.ask(REGISTRY, &[], deadline).await?;
            let entry = |row: &Row| Ok((pattern(column(row, 0)?)?, column(row, 1)?));
            rows.iter().map(entry).collect::<Result<_, _>>().map(Arc::new)
        })
    }

    fn prices(&self, deadline: Instant) -> Answer<'_, Arc<Prices>> {
        Box::pin(async move {
            let rows = self.database.ask(PRICES, &[], deadline).await?;
            rows.iter().map(price).collect::<Result<_, _>>().map(Arc::new)
        })
    }

    fn ping(&self, deadline: Instant) -> Answer<'_, ()> {
        Box::pin(async move {
            match self.database.ping(deadline).await {
                Err(StoreFault::Schema) => {
                    if let Migrated::To(version) = self.database.migrate().await? {
                        tracing::info!(event = "migrated", version, "the tables are up to date");
                    }
                    Ok(())
                }
                answer => answer,
            }
        })
    }
}

fn org(row: &Row) -> Result<Org, StoreFault> {
    let models: Vec<&str> = column(row, 1)?;
    Ok(Org {
        status: status(column(row, 0)?)?,
        models: models.into_iter().map(pattern).collect::<Result<_, _>>()?,
        plan: plan(row, 2)?,
    })
}

/// The figures of a plan in five columns from `first` on, in the order of [`Plan`].
pub(super) fn plan(row: &Row, first: usize) -> Result<Plan, StoreFault> {
    let figure = |at: usize| {
        let figure: Option<i64> = column(row, first.saturating_add(at))?;
        match figure.map(u64::try_from) {
            None => Ok(Limit::Unlimited),
            Some(Ok(figure)) => Ok(Limit::of(figure)),
            Some(Err(_)) => Err(StoreFault::NotSensible),
        }
    };
    Ok(Plan {
        concurrency: figure(0)?,
        requests: figure(1)?,
        tokens: figure(2)?,
        monthly_runs: figure(3)?,
        monthly_cost: figure(4)?,
    })
}

/// An entry of the price list, in the columns of [`PRICES`].
pub(super) fn price(row: &Row) -> Result<(ModelPattern, Price), StoreFault> {
    let figure = |at| u64::try_from(column::<i64>(row, at)?).map_err(|_| StoreFault::NotSensible);
    let price = Price {
        input: figure(1)?,
        cached_input: figure(2)?,
        output: figure(3)?,
    };
    Ok((pattern(column(row, 0)?)?, price))
}

/// A status by its name.
pub(super) fn status(name: &str) -> Result<OrgStatus, StoreFault> {
    let known = OrgStatus::NAMED.iter().find(|(known, _)| *known == name);
    known.map(|(_, status)| *status).ok_or(StoreFault::NotSensible)
}

/// A pattern; one that somebody has written past `policy apply` and that means nothing makes no sense, rather than being
/// left out.
pub(super) fn pattern(text: &str) -> Result<ModelPattern, StoreFault> {
    ModelPattern::parse(text).ok_or(StoreFault::NotSensible)
}
