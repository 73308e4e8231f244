//! `portcullis unmetered list`: what stands in the journal's table, for whoever bills it.
//!
//! Results go to stdout and faults to stderr. Left out on purpose: what services and filters still keep, which nobody can
//! list from here.

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use portcullis_decision::config::StoreUrl;
use serde_json::{Map, Value, json};
use tokio::time::Instant;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use crate::after;
use crate::check::FAULTY;
use crate::cli::UnmeteredListArguments;
use crate::limiter::StoreFault;
use crate::postgres::{NO_DATABASE, Parameter, Postgres, column};

/// Rows of one page, so that a long journal needs no long statement and no memory.
const PAGE: i64 = 1_000;
/// How long a page may take.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Microseconds keep the order that the table has; the rest is for reading.
const SELECT: &str = "SELECT replace(op::text, '-', ''), \
    to_char(at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"'), org, owner, rules, source, request_id, \
    (extract(epoch FROM at) * 1000000)::bigint \
    FROM portcullis_unmetered \
    WHERE ($1::text IS NULL OR org = $1) \
    AND (at, op) > (timestamptz 'epoch' + $2 * interval '1 microsecond', $3::text::uuid) \
    ORDER BY at, op LIMIT $4";
const COLUMNS: [&str; 7] = ["op", "at", "org", "owner", "rules", "source", "request_id"];

/// Why there is no whole list.
enum Fault {
    Store(StoreFault),
    /// Whoever read the list has seen enough.
    Closed,
}

impl From<StoreFault> for Fault {
    fn from(fault: StoreFault) -> Self {
        Self::Store(fault)
    }
}

/// Lists the journal. Exit code 1 if the database can't be read, 2 without a usable address.
pub fn run(arguments: &UnmeteredListArguments) -> ExitCode {
    let say = |text: &str| drop(writeln!(io::stderr().lock(), "{text}"));
    let Some(address) = arguments.database.as_ref().filter(|text| !text.is_empty()) else {
        say(NO_DATABASE);
        return ExitCode::from(FAULTY);
    };
    let url = StoreUrl::new(address.clone());
    let database = match Postgres::open(&url) {
        Ok(database) => database,
        Err(fault) => {
            say(&format!("--database or POSTGRES_DSN: {fault}"));
            return ExitCode::from(FAULTY);
        }
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            say(&format!("cannot start: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let listed = runtime.block_on(list(&database, arguments, &mut io::stdout().lock()));
    match listed {
        Ok(()) | Err(Fault::Closed) => ExitCode::SUCCESS,
        Err(Fault::Store(fault)) => {
            let cause = database.cause().map_or_else(String::new, |cause| format!(": {cause}"));
            say(&format!("cannot read the journal: {fault}{cause}"));
            ExitCode::FAILURE
        }
    }
}

async fn list(database: &Postgres, arguments: &UnmeteredListArguments, out: &mut impl Write) -> Result<(), Fault> {
    let closed = |_| Fault::Closed;
    if !arguments.json {
        let heading = ["AT", "SOURCE", "ORG", "OWNER", "RULES", "REQUEST_ID", "OP"];
        writeln!(out, "{}", line(heading.map(str::to_owned))).map_err(closed)?;
    }
    let (mut after_us, mut after_op) = (-1_i64, "0".repeat(32));
    let mut count = 0_u64;
    loop {
        let parameters: [Parameter<'_>; 4] = [
            (&arguments.org, Type::TEXT),
            (&after_us, Type::INT8),
            (&after_op, Type::TEXT),
            (&PAGE, Type::INT8),
        ];
        let rows = database
            .ask(SELECT, &parameters, after(Instant::now(), TIMEOUT))
            .await?;
        for row in &rows {
            let text = if arguments.json {
                object(row)?.to_string()
            } else {
                row_line(row)?
            };
            writeln!(out, "{text}").map_err(closed)?;
            count = count.saturating_add(1);
        }
        let Some(last) = rows.last() else { break };
        after_op = column::<&str>(last, 0)?.to_owned();
        after_us = column(last, 7)?;
    }
    if !arguments.json {
        writeln!(out, "{count} unmetered runs").map_err(closed)?;
    }
    Ok(())
}

fn object(row: &Row) -> Result<Value, StoreFault> {
    let mut object = Map::new();
    for (at, name) in COLUMNS.into_iter().enumerate() {
        if let Some(text) = column::<Option<&str>>(row, at)? {
            object.insert(name.to_owned(), json!(text));
        }
    }
    Ok(Value::Object(object))
}

fn row_line(row: &Row) -> Result<String, StoreFault> {
    let mut cells: [String; 7] = Default::default();
    for (cell, at) in cells.iter_mut().zip([1, 5, 2, 3, 4, 6, 0]) {
        let text = column::<Option<&str>>(row, at)?
            .filter(|text| !text.is_empty())
            .unwrap_or("-");
        // A client chose some of these words: a terminal must not take them for commands.
        *cell = text
            .chars()
            .map(|c| if c.is_control() { '\u{fffd}' } else { c })
            .collect();
    }
    Ok(line(cells))
}

fn line(cells: [String; 7]) -> String {
    let [at, source, org, owner, rules, request_id, op] = cells;
    format!("{at:<24}  {source:<7}  {org:<20}  {owner:<20}  {rules:<20}  {request_id:<36}  {op}")
}
