//! `redis://` and `rediss://`: Redis 7.0 and later, or Valkey. Each operation is one script, and one round trip.
//!
//! What counts is decided in the scripts (`*.lua`, beside this file), by the server's clock; they do the same as
//! `portcullis_decision::ledger`. What can go wrong on the way there is looked after by `server`, `lane` and `link`; an
//! operation whose reply was lost with its connection is asked again, under the same id.
//!
//! Left out on purpose: log lines and metrics ([`super::watched`]), and clusters, whose keys live apart ([`cluster`]).

mod address;
pub mod cluster;
mod fault;
mod lane;
mod link;
mod script;
mod server;

use std::time::Duration;

use portcullis_decision::charge::{ChargePlan, Charged};
use portcullis_decision::config::{LimiterConfig, StoreUrl};
use portcullis_decision::ledger::Settled;
use portcullis_decision::operation::OperationId;
use portcullis_decision::wire::Return;
use tokio::time::Instant;

use self::script::{Answer as Words, Call, Place};
use self::server::Server;
use super::{Answer, Limiter, OpenFault, StoreFault};

/// Operations of a batch that travel in one message.
const BATCH: usize = 256;

/// A limiter in a Redis.
#[derive(Debug)]
pub struct RedisLimiter {
    scheme: &'static str,
    prefix: String,
    server: Server,
}

impl RedisLimiter {
    /// The limiter at `url`. Dials nothing before its first operation, so it needs no runtime.
    ///
    /// # Errors
    /// An address that can't be read.
    pub fn open(url: &StoreUrl, config: &LimiterConfig) -> Result<Self, OpenFault> {
        let op_timeout = Duration::from_millis(config.op_timeout_ms);
        let info = address::server(url.secret())?;
        let prefix = config.key_prefix.clone();
        Ok(Self {
            scheme: if url.scheme() == "rediss" { "rediss" } else { "redis" },
            prefix: prefix.clone(),
            server: Server::new(info, prefix, op_timeout),
        })
    }

    const fn at(&self, op: OperationId) -> Place<'_> {
        Place::single(self.prefix.as_str(), op)
    }

    /// Runs one call for each item, in order; an item is an operation, or says what becomes of one.
    async fn ask_each<I: Copy + Send + Sync, T: Send>(
        &self,
        items: &[I],
        deadline: Instant,
        call: impl Fn(I) -> Call + Send + Sync,
        mut take: impl FnMut(I, &Words) -> Option<T> + Send,
    ) -> Result<Vec<T>, StoreFault> {
        let mut taken = Vec::with_capacity(items.len());
        for batch in items.chunks(BATCH) {
            let calls: Vec<Call> = batch.iter().map(|item| call(*item)).collect();
            for (item, words) in batch.iter().zip(self.server.ask(&calls, deadline).await?) {
                taken.push(take(*item, &words).ok_or(StoreFault::NotSensible)?);
            }
        }
        Ok(taken)
    }
}

impl Limiter for RedisLimiter {
    fn scheme(&self) -> &'static str {
        self.scheme
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn charge<'a>(&'a self, plan: &'a ChargePlan, slot_ttl: Duration, deadline: Instant) -> Answer<'a, Charged> {
        Box::pin(async move {
            let call = Call::charge(&self.at(plan.op), plan, slot_ttl);
            let answers = self.server.ask(&[call], deadline).await?;
            answers
                .first()
                .and_then(|answer| answer.charged(plan))
                .ok_or(StoreFault::NotSensible)
        })
    }

    fn cancel<'a>(&'a self, ops: &'a [OperationId], deadline: Instant) -> Answer<'a, ()> {
        Box::pin(async move {
            let call = |op| Call::cancel(&self.at(op));
            self.ask_each(ops, deadline, call, |_, words| words.done())
                .await
                .map(drop)
        })
    }

    fn settle<'a>(&'a self, settled: &'a [Settled], deadline: Instant) -> Answer<'a, ()> {
        Box::pin(async move {
            let call = |settled: Settled| Call::settle(&self.at(settled.op), settled.tokens);
            self.ask_each(settled, deadline, call, |_, words| words.done())
                .await
                .map(drop)
        })
    }

    fn give_back_parts<'a>(&'a self, parts: &'a [Return], deadline: Instant) -> Answer<'a, ()> {
        Box::pin(async move {
            let call = |part: Return| Call::part(&self.at(part.lease), part);
            self.ask_each(parts, deadline, call, |_, words| words.done())
                .await
                .map(drop)
        })
    }

    fn renew<'a>(
        &'a self,
        ops: &'a [OperationId],
        slot_ttl: Duration,
        deadline: Instant,
    ) -> Answer<'a, Vec<OperationId>> {
        Box::pin(async move {
            let call = |op| Call::renew(&self.at(op), slot_ttl);
            let lost = |op, words: &Words| words.kept().map(|kept| (!kept).then_some(op));
            Ok(self
                .ask_each(ops, deadline, call, lost)
                .await?
                .into_iter()
                .flatten()
                .collect())
        })
    }

    fn ping(&self, deadline: Instant) -> Answer<'_, ()> {
        Box::pin(async move {
            match self.server.ask(&[self.server.probe()], deadline).await {
                Ok(answers) => answers.first().and_then(Words::done).ok_or(StoreFault::NotSensible),
                // Who asks how the store is wants to know why it is not asked.
                Err(StoreFault::CircuitOpen) => Err(self.server.fault().unwrap_or(StoreFault::CircuitOpen)),
                Err(fault) => Err(fault),
            }
        })
    }

    fn may_evict(&self, deadline: Instant) -> Answer<'_, bool> {
        Box::pin(self.server.may_evict(deadline))
    }
}
