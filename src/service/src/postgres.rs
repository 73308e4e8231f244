//! Postgres, as policies and meters use it: a bounded pool of connections, statements bounded in time, and the tables.
//!
//! It works through PgBouncer in transaction mode: no named statements, no session settings, every statement in a
//! transaction of its own. What a statement says is its caller's business. Left out on purpose: the database's own words,
//! which may hold an address, a name or a value; of an error only its kind leaves this module.

mod address;
mod connect;
mod fault;
mod migrations;

use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use deadpool_postgres::{Manager, ManagerConfig, Object, Pool, PoolError, RecyclingMethod, Runtime, Timeouts};
use portcullis_decision::config::StoreUrl;
use tokio::time::{Instant, timeout_at};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Error, Row};

pub use self::address::AddressFault;
use self::connect::Connector;
pub use self::migrations::Migrated;
use crate::limiter::StoreFault;
use crate::{after, locked};

/// Connections that one pool holds at most. Policies and meters have a pool each, so that neither starves the other.
const CONNECTIONS: usize = 8;
/// Name, connection, TLS and password: no more than this, all together.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// For what the service does on its own account, with nobody waiting.
const UNHURRIED: Duration = Duration::from_secs(30);

/// What a command says that was told of no database.
pub const NO_DATABASE: &str = "no database: give --database postgres://… or set POSTGRES_DSN";

/// A value of a statement and its type; with the type said, no round trip is spent on asking for it.
pub type Parameter<'a> = (&'a (dyn ToSql + Sync), Type);

/// A database, reached when it is needed.
#[derive(Clone)]
pub struct Postgres {
    pool: Pool,
    /// See [`Postgres::cause`].
    cause: Arc<Mutex<Option<&'static str>>>,
}

impl std::fmt::Debug for Postgres {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Postgres")
    }
}

impl Postgres {
    /// A pool for the database at this address. Dials nothing.
    ///
    /// # Errors
    /// An address that can't be read, or that wants certificates checked where there are no roots to check them by.
    pub fn open(url: &StoreUrl) -> Result<Self, AddressFault> {
        let address = address::read(url.secret())?;
        let manager = Manager::from_connect(
            address.config,
            Connector::new(address.tls),
            ManagerConfig {
                recycling_method: RecyclingMethod::Fast,
            },
        );
        let pool = Pool::builder(manager)
            .max_size(CONNECTIONS)
            .runtime(Runtime::Tokio1)
            .build()
            .map_err(|_| AddressFault::Malformed)?;
        Ok(Self {
            pool,
            cause: Arc::default(),
        })
    }

    /// Runs one statement in a transaction of its own, in one round trip. The server ends it by itself shortly before the
    /// deadline. When the connection breaks it is asked once more over another one: so a statement must be idempotent.
    ///
    /// # Errors
    /// No answer in time or none at all. After [`StoreFault::may_have_happened`] it may have been carried out.
    pub async fn ask(
        &self,
        statement: &str,
        parameters: &[Parameter<'_>],
        deadline: Instant,
    ) -> Result<Vec<Row>, StoreFault> {
        match self.ask_once(statement, parameters, deadline).await {
            // A connection that has lain in the pool may have died there.
            Err(first @ StoreFault::Connection) if Instant::now() < deadline => {
                let second = self.ask_once(statement, parameters, deadline).await;
                second.map_err(|fault| fault.after(first))
            }
            answer => answer,
        }
    }

    async fn ask_once(
        &self,
        statement: &str,
        parameters: &[Parameter<'_>],
        deadline: Instant,
    ) -> Result<Vec<Row>, StoreFault> {
        let mut lease = self.lease(deadline).await?;
        let begin = begin(deadline);
        let client = lease.client()?;
        let answer = timeout_at(deadline, async {
            // All three are sent before the first is answered; the database takes them in this order.
            tokio::join!(
                biased;
                client.batch_execute(&begin),
                client.query_typed(statement, parameters),
                client.batch_execute("COMMIT")
            )
        });
        let (begun, rows, committed) = answer.await.map_err(|_| StoreFault::Timeout)?;
        if begun.is_ok() && committed.is_ok() {
            lease.keep();
        }
        begun
            .and(rows)
            .and_then(|rows| committed.map(|()| rows))
            .map_err(|error| fault::of(&error))
    }

    /// Starts a transaction of several statements, which end together by the deadline; dropped, it is rolled back.
    ///
    /// # Errors
    /// As [`Postgres::ask`].
    pub async fn begin(&self, deadline: Instant) -> Result<Transaction, StoreFault> {
        let transaction = Transaction {
            lease: self.lease(deadline).await?,
            deadline,
        };
        transaction.script(&begin(deadline)).await?;
        Ok(transaction)
    }

    /// Whether the database answers, has our tables, and they are new enough.
    ///
    /// # Errors
    /// The fault that keeps it from it.
    pub async fn ping(&self, deadline: Instant) -> Result<(), StoreFault> {
        let rows = self
            .ask(
                "SELECT 1 FROM portcullis_migrations WHERE version >= $1 LIMIT 1",
                &[(&migrations::NEWEST, Type::INT4)],
                deadline,
            )
            .await?;
        if rows.is_empty() {
            Err(StoreFault::Schema)
        } else {
            Ok(())
        }
    }

    /// Creates or updates the tables, if they are older than this program. Safe when many do it at once.
    ///
    /// # Errors
    /// As [`Postgres::ask`].
    pub async fn migrate(&self) -> Result<Migrated, StoreFault> {
        migrations::apply(self, after(Instant::now(), UNHURRIED)).await
    }

    /// Why the last connection that failed could not be made, without a word of the address or of the server; for the command
    /// line, since a fault's kind alone leaves whoever has mistyped an address to guess.
    pub fn cause(&self) -> Option<&'static str> {
        *locked(&self.cause)
    }

    /// A connection. Making one goes on when the caller gives up, or a server that takes longer to connect to than a
    /// request may wait would never be reached at all.
    async fn lease(&self, deadline: Instant) -> Result<Lease, StoreFault> {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeouts = Timeouts {
            // A little less than what is left, so that who had to queue is told so.
            wait: Some(left.mul_f32(0.9)),
            create: Some(CONNECT_TIMEOUT),
            recycle: Some(CONNECT_TIMEOUT),
        };
        let pool = self.pool.clone();
        let connection = tokio::spawn(async move { pool.timeout_get(&timeouts).await });
        match timeout_at(deadline, connection).await {
            Ok(Ok(Ok(object))) => Ok(Lease {
                object: Some(object),
                is_sound: false,
            }),
            Ok(Ok(Err(PoolError::Backend(error)))) => {
                *locked(&self.cause) = fault::cause(&error);
                Err(fault::of(&error))
            }
            Ok(Ok(Err(PoolError::Timeout(deadpool_postgres::TimeoutType::Wait)))) => Err(StoreFault::PoolExhausted),
            Ok(Ok(Err(PoolError::Timeout(_)))) | Err(_) => Err(StoreFault::Timeout),
            Ok(Ok(Err(_)) | Err(_)) => Err(StoreFault::Connection),
        }
    }
}

/// The start of a transaction whose statements the server ends a little before the deadline, while somebody still listens.
fn begin(deadline: Instant) -> String {
    let left = deadline.saturating_duration_since(Instant::now()).mul_f32(0.9);
    format!("BEGIN; SET LOCAL statement_timeout = {}", left.as_millis().max(1))
}

/// A connection in use. It goes back into the pool only if nothing is under way on it.
struct Lease {
    object: Option<Object>,
    is_sound: bool,
}

impl Lease {
    fn client(&self) -> Result<&Client, StoreFault> {
        self.object
            .as_ref()
            .map(|object| &***object)
            .ok_or(StoreFault::Connection)
    }

    const fn keep(&mut self) {
        self.is_sound = true;
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if !self.is_sound {
            // The pool makes another; this one's transaction is rolled back by its end.
            drop(self.object.take().map(Object::take));
        }
    }
}

/// Several statements that take effect together, or not at all.
pub struct Transaction {
    lease: Lease,
    deadline: Instant,
}

impl Transaction {
    /// Runs one statement.
    ///
    /// # Errors
    /// As [`Postgres::ask`]; the transaction can only be dropped then.
    pub async fn query(&self, statement: &str, parameters: &[Parameter<'_>]) -> Result<Vec<Row>, StoreFault> {
        self.bounded(self.lease.client()?.query_typed(statement, parameters))
            .await
    }

    /// Runs statements without values.
    ///
    /// # Errors
    /// As [`Transaction::query`].
    pub async fn script(&self, statements: &str) -> Result<(), StoreFault> {
        self.bounded(self.lease.client()?.batch_execute(statements)).await
    }

    /// Makes it take effect.
    ///
    /// # Errors
    /// As [`Postgres::ask`].
    pub async fn commit(mut self) -> Result<(), StoreFault> {
        self.script("COMMIT").await?;
        self.lease.keep();
        Ok(())
    }

    async fn bounded<T>(&self, answer: impl Future<Output = Result<T, Error>>) -> Result<T, StoreFault> {
        match timeout_at(self.deadline, answer).await {
            Ok(answer) => answer.map_err(|error| fault::of(&error)),
            Err(_) => Err(StoreFault::Timeout),
        }
    }
}

/// A column of a row, or [`StoreFault::NotSensible`] where it has another type.
///
/// # Errors
/// A column that isn't there, is null where nothing may be, or has another type.
pub fn column<'a, T: tokio_postgres::types::FromSql<'a>>(row: &'a Row, at: usize) -> Result<T, StoreFault> {
    row.try_get(at).map_err(|_| StoreFault::NotSensible)
}
