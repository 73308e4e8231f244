//! Random operations on a real Redis and on the model, `portcullis_decision::ledger`: the outcomes are the same.
//!
//! The server's clock can't be moved, so time passes for real, in steps; windows and slots end halfway between two of
//! them, so that the model, whose clock knows only steps, agrees with any server that is not late by almost half a step. A
//! run that was is started again. All runs share one server and pass at the same time.

use std::sync::Arc;
use std::time::Duration;

use portcullis_decision::charge::{BlockAsk, ChargeEntry, ChargePlan, Charged, EntryState};
use portcullis_decision::ledger::{Ledger, Settled};
use portcullis_decision::limits::Resource;
use portcullis_decision::wire::Return;
use portcullis_service::limiter::Limiter;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep_until};

use crate::stores::{Store, cluster, open, open_under};
use crate::subject::{entry, id, soon};

const RUNS: u64 = 60;
/// Fewer, since each of its operations is several round trips.
const RUNS_ON_A_CLUSTER: u64 = 12;
const STEPS: u64 = 15;
const STEP_MS: u64 = 400;
/// One and a half steps. Windows are of 1 s and 3 s, two and a half and seven and a half.
const SLOT_TTL_MS: u64 = 600;
/// Less than half a step.
const LATEST: Duration = Duration::from_millis(150);
const OPERATIONS: u32 = 10;

/// One run of a seed.
struct Run {
    limiter: Arc<dyn Limiter>,
    ledger: Ledger,
    random: StdRng,
    /// Keeps the keys of runs apart.
    name: String,
    first_op: u32,
    history: Vec<String>,
}

impl Run {
    fn entries(&mut self) -> Vec<ChargeEntry> {
        let tokens = self.random.random_range(0..7);
        // Room for some requests, or for some blocks.
        let limit = if self.random.random_bool(0.5) {
            self.random.random_range(2..5)
        } else {
            self.random.random_range(20..60)
        };
        let all = self.all(tokens, limit);
        all.into_iter().filter(|_| self.random.random_bool(0.6)).collect()
    }

    fn all(&self, tokens: u64, limit: u64) -> [ChargeEntry; 6] {
        let (a, b) = (format!("{}a", self.name), format!("{}b", self.name));
        let long = |entry| ChargeEntry { window_s: 3, ..entry };
        let short = |entry| ChargeEntry { window_s: 1, ..entry };
        [
            short(entry(&a, Resource::Requests, limit, 1)),
            short(entry(&a, Resource::Tokens, 12 * limit, tokens)),
            entry(&a, Resource::Concurrency, 2, 1),
            long(entry(&b, Resource::Requests, 50, 1)),
            long(entry(&b, Resource::Tokens, 300, tokens)),
            entry(&b, Resource::Concurrency, 3, 1),
        ]
    }

    fn block(&mut self) -> Option<BlockAsk> {
        self.random.random_bool(0.5).then(|| BlockAsk {
            most: self.random.random_range(1..30),
            parts: self.random.random_range(1..4),
            ahead: self.random.random_bool(0.5),
        })
    }

    /// Whether all counters and slots of both are the same, by a charge that is denied.
    async fn look(&mut self, now_ms: u64) -> bool {
        let mut entries = vec![entry(&self.name, Resource::Requests, 0, 1)];
        entries.extend(self.all(0, 2));
        let plan = ChargePlan {
            op: id(self.first_op + OPERATIONS),
            entries,
            block: None,
        };
        let ours = self.ledger.charge(now_ms, &plan, SLOT_TTL_MS);
        let ttl = Duration::from_millis(SLOT_TTL_MS);
        let theirs = self.limiter.charge(&plan, ttl, soon()).await.unwrap();
        self.history.push(format!("  model {ours:?}\n  store {theirs:?}"));
        agree(&ours, &theirs)
    }

    /// Carries out one operation on both. Returns whether the outcomes are the same.
    async fn operate(&mut self, now_ms: u64) -> bool {
        let op = id(self.first_op + self.random.random_range(0..OPERATIONS));
        let ttl = Duration::from_millis(SLOT_TTL_MS);
        match self.random.random_range(0..14) {
            0..6 => {
                let mut entries = self.entries();
                let block = self.block();
                if block.is_some() && self.random.random_bool(0.8) {
                    entries.retain(|entry| entry.resource != Resource::Concurrency);
                }
                let plan = ChargePlan { op, entries, block };
                let ours = self.ledger.charge(now_ms, &plan, SLOT_TTL_MS);
                let theirs = self.limiter.charge(&plan, ttl, soon()).await.unwrap();
                let same = agree(&ours, &theirs);
                self.history
                    .push(format!("{now_ms}: {plan:?}\n  model {ours:?}\n  store {theirs:?}"));
                same
            }
            6 => {
                self.ledger.cancel(now_ms, op);
                self.limiter.cancel(&[op], soon()).await.unwrap();
                self.history.push(format!("{now_ms}: cancel {op}"));
                self.look(now_ms).await
            }
            7..9 => {
                let tokens = self.random.random_bool(0.8).then(|| self.random.random_range(0..20));
                let settled = Settled { op, tokens };
                self.ledger.settle(settled);
                self.limiter.settle(&[settled], soon()).await.unwrap();
                self.history.push(format!("{now_ms}: {settled:?}"));
                self.look(now_ms).await
            }
            9..12 => {
                let part = Return {
                    id: id(self.first_op + OPERATIONS + 1 + self.random.random_range(0..20)),
                    lease: op,
                    requests: self.random.random_range(0..12),
                    tokens: self.random.random_range(-20..60),
                };
                self.ledger.give_back_part(&part);
                self.limiter.give_back_parts(&[part], soon()).await.unwrap();
                self.history.push(format!("{now_ms}: {part:?}"));
                self.look(now_ms).await
            }
            _ => {
                let ours = self.ledger.renew(now_ms, op, SLOT_TTL_MS);
                let theirs = self.limiter.renew(&[op], ttl, soon()).await.unwrap().is_empty();
                self.history
                    .push(format!("{now_ms}: renew {op}: model {ours}, store {theirs}"));
                ours == theirs
            }
        }
    }

    /// Returns false if the machine was too slow for the two to be compared.
    async fn go(&mut self) -> bool {
        let start = Instant::now();
        for step in 0..STEPS {
            let due = start + Duration::from_millis(step * STEP_MS);
            sleep_until(due).await;
            for _ in 0..self.random.random_range(0..6) {
                let same = self.operate(step * STEP_MS).await;
                if due.elapsed() > LATEST {
                    return false;
                }
                assert!(
                    same,
                    "run {} parts from the model:\n{}",
                    self.name,
                    self.history.join("\n")
                );
            }
        }
        true
    }
}

/// The store's figures may differ from the model's by how late a step was.
fn agree(ours: &Charged, theirs: &Charged) -> bool {
    let near = |ours: &EntryState, theirs: &EntryState| {
        ours.used == theirs.used && ours.reset_ms.abs_diff(theirs.reset_ms) <= STEP_MS / 2
    };
    let all = |ours: &[EntryState], theirs: &[EntryState]| {
        ours.len() == theirs.len() && ours.iter().zip(theirs).all(|(ours, theirs)| near(ours, theirs))
    };
    match (ours, theirs) {
        (Charged::Granted(ours), Charged::Granted(theirs)) => all(ours, theirs),
        (
            Charged::Block {
                admissions: size_of_ours,
                states: ours,
            },
            Charged::Block { admissions, states },
        ) => size_of_ours == admissions && all(ours, states),
        (Charged::Denied(ours), Charged::Denied(theirs)) => {
            all(ours, theirs)
                && ours
                    .iter()
                    .zip(theirs)
                    .all(|(ours, theirs)| ours.exhausted == theirs.exhausted)
        }
        (Charged::Cancelled, Charged::Cancelled) => true,
        _ => false,
    }
}

#[tokio::test]
async fn random_operations_have_the_outcomes_of_the_model() {
    let store = Store::redis().await;
    compare(open(&store.url(), 5_000), RUNS).await;
}

/// Each run has two groups and a third, to look with: they lie on any of the members.
#[tokio::test]
async fn random_operations_on_a_cluster_have_the_outcomes_of_the_model() {
    let url = cluster::shared().await.url();
    compare(open_under(&url, 5_000, &cluster::fresh_prefix()), RUNS_ON_A_CLUSTER).await;
}

async fn compare(limiter: Arc<dyn Limiter>, count: u64) {
    // One after the other: two of these would be late because of each other.
    static TURN: Mutex<()> = Mutex::const_new(());
    let _turn = TURN.lock().await;
    limiter.ping(soon()).await.unwrap();
    let mut runs = tokio::task::JoinSet::new();
    for seed in 0..count {
        let limiter = Arc::clone(&limiter);
        runs.spawn(async move {
            // Not all at the same moment: the server is to be late for none.
            sleep_until(Instant::now() + Duration::from_millis(seed * STEP_MS / count)).await;
            for attempt in 0..16 {
                let mut run = Run {
                    limiter: Arc::clone(&limiter),
                    ledger: Ledger::default(),
                    random: StdRng::seed_from_u64(seed),
                    name: format!("{seed}-{attempt}"),
                    first_op: u32::try_from(seed * 2_000 + attempt * 100).unwrap(),
                    history: Vec::new(),
                };
                if run.go().await {
                    return;
                }
            }
            panic!("this machine is too slow to compare run {seed}");
        });
    }
    runs.join_all().await;
}
