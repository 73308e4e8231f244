//! `redis-cluster://` and `rediss-cluster://`: Redis or Valkey Cluster, where the keys of one charge live on several servers.
//!
//! A group is what has one hash tag: one subject of one scope. Each group is charged by the script that charges a single
//! server, in one atomic step; the groups of a plan one after the other, in the order of precedence, and given back if a
//! later one denies. Meanwhile another request may be denied wrongly, and none is ever admitted wrongly. What an operation
//! touches stands in its directory (`directory`), so that every process can give it back, settle and renew it.
//!
//! Left out on purpose: the steps of a charge (`charge`), what becomes of an operation after it (`errand`), and who is asked for
//! which key (`members`).

mod charge;
mod directory;
mod errand;
mod members;
mod slot;
mod view;

use std::sync::Arc;
use std::time::Duration;

use portcullis_decision::charge::{ChargePlan, Charged};
use portcullis_decision::config::{LimiterConfig, StoreUrl};
use portcullis_decision::ledger::Settled;
use portcullis_decision::operation::OperationId;
use portcullis_decision::wire::Return;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use self::errand::Errand;
use self::members::Members;
use super::address;
use super::script::{Answer as Words, Call, Place, Verb};
use crate::limiter::{Answer, Limiter, OpenFault, StoreFault};

/// What may wait for a lost member at a time; what is beyond lapses.
const UNDOING: usize = 1024;

/// A limiter in a cluster.
#[derive(Debug, Clone)]
pub struct ClusterLimiter {
    scheme: &'static str,
    prefix: String,
    members: Arc<Members>,
    undoing: Arc<Semaphore>,
}

impl ClusterLimiter {
    /// The limiter at `url`. Dials nothing before its first operation, so it needs no runtime.
    ///
    /// # Errors
    /// An address that can't be read.
    pub fn open(url: &StoreUrl, config: &LimiterConfig) -> Result<Self, OpenFault> {
        let mut seeds = address::seeds(url.secret())?.into_iter();
        let seed = seeds.next().ok_or(OpenFault::MalformedAddress)?;
        let op_timeout = Duration::from_millis(config.op_timeout_ms);
        let is_tls = url.scheme() == "rediss-cluster";
        Ok(Self {
            scheme: if is_tls { "rediss-cluster" } else { "redis-cluster" },
            prefix: config.key_prefix.clone(),
            members: Arc::new(Members::new(
                seed,
                seeds.collect(),
                config.key_prefix.clone(),
                op_timeout,
            )),
            undoing: Arc::new(Semaphore::new(UNDOING)),
        })
    }
}

impl Limiter for ClusterLimiter {
    fn scheme(&self) -> &'static str {
        self.scheme
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn charge<'a>(&'a self, plan: &'a ChargePlan, slot_ttl: Duration, deadline: Instant) -> Answer<'a, Charged> {
        Box::pin(self.charge_groups(plan, slot_ttl, deadline))
    }

    fn cancel<'a>(&'a self, ops: &'a [OperationId], deadline: Instant) -> Answer<'a, ()> {
        Box::pin(self.carry_out(ops.iter().map(|op| Errand::Cancel(*op)).collect(), deadline))
    }

    fn settle<'a>(&'a self, settled: &'a [Settled], deadline: Instant) -> Answer<'a, ()> {
        let errands = settled.iter().map(|settled| Errand::Settle(*settled));
        Box::pin(self.carry_out(errands.collect(), deadline))
    }

    fn give_back_parts<'a>(&'a self, parts: &'a [Return], deadline: Instant) -> Answer<'a, ()> {
        Box::pin(self.carry_out(parts.iter().map(|part| Errand::Part(*part)).collect(), deadline))
    }

    fn renew<'a>(
        &'a self,
        ops: &'a [OperationId],
        slot_ttl: Duration,
        deadline: Instant,
    ) -> Answer<'a, Vec<OperationId>> {
        Box::pin(async move {
            let errands: Vec<Errand> = ops.iter().map(|op| Errand::Renew(*op, slot_ttl)).collect();
            let answers = self.ask_groups(&errands, deadline).await;
            let (mut lost, mut fault) = (Vec::new(), None);
            for (op, said) in ops.iter().zip(answers.each) {
                let said = match said {
                    Ok(said) => said,
                    // Nothing is known of its slots. The next renewal may be in time, or is told that they have lapsed.
                    Err(unheard) => {
                        fault = Some(unheard);
                        continue;
                    }
                };
                let kept: Option<Vec<bool>> = said.iter().map(Words::kept).collect();
                let kept = kept.ok_or(StoreFault::NotSensible)?;
                // Of an operation that charged nothing, or is gone, there is no slot.
                if kept.is_empty() || kept.contains(&false) {
                    lost.push(*op);
                }
            }
            match fault {
                Some(fault) if !answers.is_reached => Err(fault),
                _ => Ok(lost),
            }
        })
    }

    /// A part of the cluster that is lost leaves the others as they are, so this fails only if nobody answers.
    fn ping(&self, deadline: Instant) -> Answer<'_, ()> {
        Box::pin(async move {
            let mut fault = StoreFault::ClusterDown;
            for member in self.members.probe(deadline).await? {
                match member {
                    Ok(()) => return Ok(()),
                    Err(lost) => fault = lost,
                }
            }
            Err(fault)
        })
    }

    fn may_evict(&self, deadline: Instant) -> Answer<'_, bool> {
        Box::pin(self.members.may_evict(deadline))
    }
}
