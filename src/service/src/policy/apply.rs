//! `portcullis policy apply` and `show`: a policy file into the database, and back.
//!
//! Declarative: afterwards the database holds what the file says and nothing else, or nothing has changed. Entries that the
//! file doesn't have are only removed with `--prune`; without it a file that lacks some is refused, since a file that was
//! cut short would lock customers out. Everything happens in one transaction, and a second run finds nothing to change.

use std::io::{self, Write as _};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use portcullis_decision::config::{Environment, Faults, PolicyConfig, ServiceConfig, StoreUrl, parse_policy_file};
use portcullis_decision::policy::{DeclaredOrg, PolicyFile};
use serde_json::Value;
use tokio::time::Instant;
use tokio_postgres::types::Type;

use super::document::{self, Change};
use super::tables;
use crate::after;
use crate::check::{self, FAULTY};
use crate::cli::PolicyCommand;
use crate::limiter::StoreFault;
use crate::postgres::{Migrated, NO_DATABASE, Postgres, Transaction, column};

/// For everything together.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Keeps writers out from the comparison to the end; readers go on.
const LOCK: &str = "LOCK TABLE portcullis_orgs, portcullis_plans, portcullis_providers, portcullis_prices \
                    IN SHARE ROW EXCLUSIVE MODE";

/// How the entries of a section, as one JSON object, are written. Plans come before the organizations that name them.
const WRITES: [(&str, &str); 4] = [
    (
        "providers",
        "INSERT INTO portcullis_providers (model, provider) SELECT key, value FROM jsonb_each_text($1::text::jsonb) \
         ON CONFLICT (model) DO UPDATE SET provider = excluded.provider",
    ),
    (
        "prices",
        "INSERT INTO portcullis_prices (model, input, cached_input, output) \
         SELECT key, (value->>'input')::bigint, (value->>'cached_input')::bigint, (value->>'output')::bigint \
         FROM jsonb_each($1::text::jsonb) ON CONFLICT (model) DO UPDATE \
         SET input = excluded.input, cached_input = excluded.cached_input, output = excluded.output",
    ),
    (
        "plans",
        "INSERT INTO portcullis_plans (name, concurrency, requests, tokens, monthly_runs, monthly_cost) \
         SELECT key, (value->>'concurrency')::bigint, (value->>'requests')::bigint, (value->>'tokens')::bigint, \
         (value->>'monthly_runs')::bigint, (value->>'monthly_cost')::bigint FROM jsonb_each($1::text::jsonb) \
         ON CONFLICT (name) DO UPDATE SET concurrency = excluded.concurrency, requests = excluded.requests, \
         tokens = excluded.tokens, monthly_runs = excluded.monthly_runs, monthly_cost = excluded.monthly_cost",
    ),
    (
        "orgs",
        "INSERT INTO portcullis_orgs (id, status, plan, models) SELECT key, value->>'status', value->>'plan', \
         ARRAY(SELECT model FROM jsonb_array_elements_text(value->'models') WITH ORDINALITY AS m (model, place) \
         ORDER BY place) FROM jsonb_each($1::text::jsonb) ON CONFLICT (id) DO UPDATE \
         SET status = excluded.status, plan = excluded.plan, models = excluded.models",
    ),
];
/// How the entries of a section are removed, by their keys. Organizations go before the plans that they name.
const REMOVALS: [(&str, &str); 4] = [
    ("orgs", "DELETE FROM portcullis_orgs WHERE id = ANY($1)"),
    ("plans", "DELETE FROM portcullis_plans WHERE name = ANY($1)"),
    ("providers", "DELETE FROM portcullis_providers WHERE model = ANY($1)"),
    ("prices", "DELETE FROM portcullis_prices WHERE model = ANY($1)"),
];

/// Why a command did not do what it was asked.
enum Trouble {
    /// Exit code 1; with the cause where there is more to say than the kind.
    Database(StoreFault, Option<&'static str>),
    /// Exit code 1: results could not be written.
    Output(io::Error),
    /// Exit code 2: of the file.
    Faults(Faults),
    /// Exit code 2: of the arguments or the environment.
    Arguments(String),
    /// Exit code 2: so many entries would have to go.
    WouldRemove(usize),
}

impl From<StoreFault> for Trouble {
    fn from(fault: StoreFault) -> Self {
        Self::Database(fault, None)
    }
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

impl Trouble {
    /// With what this database has to say of it.
    fn of(self, database: &Postgres) -> Self {
        match self {
            Self::Database(fault, _) => Self::Database(fault, database.cause()),
            other => other,
        }
    }
}

/// Runs `portcullis policy …`.
pub fn run(command: &PolicyCommand) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tell(&format!("cannot start: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let (file, outcome) = match command {
        PolicyCommand::Apply {
            file,
            database,
            dry_run,
            prune,
        } => {
            let outcome = runtime.block_on(apply(file, database.as_deref(), *dry_run, *prune));
            (file.as_path(), outcome)
        }
        PolicyCommand::Show { database } => (Path::new("database"), runtime.block_on(show(database.as_deref()))),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(Trouble::Database(fault, cause)) => {
            let cause = cause.map_or_else(String::new, |cause| format!(": {cause}"));
            tell(&format!("the database failed: {fault} ({}){cause}", fault.kind()));
            ExitCode::FAILURE
        }
        Err(Trouble::Arguments(fault)) => {
            tell(&fault);
            ExitCode::from(FAULTY)
        }
        Err(Trouble::Output(error)) => {
            tell(&format!("cannot write the result: {error}"));
            ExitCode::FAILURE
        }
        Err(Trouble::Faults(faults)) => {
            check::report(&mut io::stderr().lock(), file, &faults);
            ExitCode::from(FAULTY)
        }
        Err(Trouble::WouldRemove(count)) => {
            tell(&format!(
                "{}: lacks {count} entries that the database has; nothing was changed. --prune removes them, `portcullis \
                 policy show` prints them",
                file.display()
            ));
            ExitCode::from(FAULTY)
        }
    }
}

fn tell(message: &str) {
    drop(writeln!(io::stderr().lock(), "{message}"));
}

/// The database of `--database` or `POSTGRES_DSN`, checked as the service would.
fn database(url: Option<&str>) -> Result<Postgres, Trouble> {
    let Some(url) = url.filter(|url| !url.is_empty()) else {
        return Err(Trouble::Arguments(NO_DATABASE.to_owned()));
    };
    let fault = |message: String| Trouble::Arguments(format!("--database or POSTGRES_DSN: {message}"));
    let url = store_url(url)
        .ok_or_else(|| fault("must be an address that starts with postgres:// (its value is not shown)".to_owned()))?;
    Postgres::open(&url).map_err(|address| fault(address.to_string()))
}

/// An address of a database, read by the parser of the service's configuration.
fn store_url(url: &str) -> Option<StoreUrl> {
    let environment = Environment {
        postgres_dsn: Some(url.to_owned()),
        ..Environment::default()
    };
    let config = ServiceConfig::parse(br#"{"profile": "development", "listen": "127.0.0.1:0"}"#, &environment).ok()?;
    let PolicyConfig { url, .. } = config.policy;
    url.filter(|url| !url.is_embedded())
}

async fn apply(file: &Path, url: Option<&str>, dry_run: bool, prune: bool) -> Result<(), Trouble> {
    let text = check::read(file).map_err(Trouble::Faults)?;
    let wanted = document::of(&parse_policy_file(&text).map_err(Trouble::Faults)?);
    let database = database(url)?;
    let applied = applied(&database, &wanted, dry_run, prune).await;
    applied.map_err(|trouble| trouble.of(&database))
}

async fn applied(database: &Postgres, wanted: &Value, dry_run: bool, prune: bool) -> Result<(), Trouble> {
    let deadline = after(Instant::now(), TIMEOUT);
    let mut out = io::stdout().lock();
    if dry_run {
        let present = match present(database, deadline).await {
            // Without tables there is nothing yet.
            Err(StoreFault::Schema) => PolicyFile::default(),
            present => present?,
        };
        let changes = document::changes(&document::of(&present), wanted);
        for change in &changes {
            writeln!(out, "{change}")?;
        }
        writeln!(out, "{} (dry run: nothing was changed)", summary(&changes))?;
        return refuse_removals(&changes, prune);
    }
    if let Migrated::To(version) = database.migrate().await? {
        writeln!(out, "tables brought up to version {version}")?;
    }
    let transaction = database.begin(deadline).await?;
    transaction.script(LOCK).await?;
    let changes = document::changes(&document::of(&read(&transaction).await?), wanted);
    refuse_removals(&changes, prune)?;
    for (section, statement) in WRITES {
        let entries: serde_json::Map<String, Value> = of_section(&changes, section)
            .filter_map(|change| Some((change.key.clone(), change.after.clone()?)))
            .collect();
        if !entries.is_empty() {
            let entries = Value::Object(entries).to_string();
            transaction.query(statement, &[(&entries, Type::TEXT)]).await?;
        }
    }
    for (section, statement) in REMOVALS {
        let keys: Vec<&str> = of_section(&changes, section)
            .filter(|change| change.after.is_none())
            .map(|change| change.key.as_str())
            .collect();
        if !keys.is_empty() {
            transaction.query(statement, &[(&keys, Type::TEXT_ARRAY)]).await?;
        }
    }
    transaction.commit().await?;
    for change in &changes {
        writeln!(out, "{change}")?;
    }
    writeln!(out, "{}", summary(&changes))?;
    Ok(())
}

fn of_section<'a>(changes: &'a [Change], section: &'a str) -> impl Iterator<Item = &'a Change> {
    changes.iter().filter(move |change| change.section == section)
}

fn refuse_removals(changes: &[Change], prune: bool) -> Result<(), Trouble> {
    match changes.iter().filter(|change| change.after.is_none()).count() {
        count if count > 0 && !prune => Err(Trouble::WouldRemove(count)),
        _ => Ok(()),
    }
}

fn summary(changes: &[Change]) -> String {
    if changes.is_empty() {
        return "nothing to change".to_owned();
    }
    let count = |kind: fn(&Change) -> bool| changes.iter().filter(|change| kind(change)).count();
    format!(
        "{} added, {} changed, {} removed",
        count(|change| change.before.is_none()),
        count(|change| change.before.is_some() && change.after.is_some()),
        count(|change| change.after.is_none())
    )
}

async fn show(url: Option<&str>) -> Result<(), Trouble> {
    let database = database(url)?;
    let policy = present(&database, after(Instant::now(), TIMEOUT)).await;
    let policy = policy.map_err(|fault| Trouble::from(fault).of(&database))?;
    let mut out = io::stdout().lock();
    writeln!(out, "{:#}", document::of(&policy))?;
    Ok(())
}

/// What is in the database, as of one moment.
async fn present(database: &Postgres, deadline: Instant) -> Result<PolicyFile, StoreFault> {
    let transaction = database.begin(deadline).await?;
    transaction
        .script("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        .await?;
    let policy = read(&transaction).await?;
    transaction.commit().await?;
    Ok(policy)
}

async fn read(transaction: &Transaction) -> Result<PolicyFile, StoreFault> {
    let mut policy = PolicyFile::default();
    for row in transaction
        .query("SELECT model, provider FROM portcullis_providers", &[])
        .await?
    {
        policy
            .providers
            .push((tables::pattern(column(&row, 0)?)?, column(&row, 1)?));
    }
    for row in transaction.query(tables::PRICES, &[]).await? {
        policy.prices.push(tables::price(&row)?);
    }
    let plans = "SELECT name, concurrency, requests, tokens, monthly_runs, monthly_cost FROM portcullis_plans";
    for row in transaction.query(plans, &[]).await? {
        policy.plans.push((column(&row, 0)?, tables::plan(&row, 1)?));
    }
    for row in transaction
        .query("SELECT id, status, plan, models FROM portcullis_orgs", &[])
        .await?
    {
        let models: Vec<&str> = column(&row, 3)?;
        let org = DeclaredOrg {
            status: tables::status(column(&row, 1)?)?,
            plan: column(&row, 2)?,
            models: models.into_iter().map(tables::pattern).collect::<Result<_, _>>()?,
        };
        policy.orgs.push((column(&row, 0)?, org));
    }
    Ok(policy)
}
