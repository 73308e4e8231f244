//! The launch rate of this process: `portcullis_decision::launch_rate`, and which operation took a launch from it.
//!
//! A repeated operation takes no second launch, and one that is cancelled has taken none, whichever comes first. Both are
//! remembered for as long as a filter may repeat or cancel, and bounded in number: what is forgotten counts anew.
//!
//! Left out on purpose: repetitions and cancels that reach another process, whose launches are its own.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use portcullis_decision::launch_rate::LaunchRate;
use portcullis_decision::operation::OperationId;
use tokio::time::Instant;

use crate::{after, millis_since};

/// How long an operation is remembered: as long as a filter may wait for its answer.
const REMEMBERED: Duration = Duration::from_secs(60);
/// Operations that are remembered at most; the oldest makes room. Some 30 MB with the longest ids.
const MOST_REMEMBERED: usize = 65_536;
const MINUTE_MS: u64 = 60_000;

/// What became of an operation's launch.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Fate {
    Taken { org: String, per_minute: u64, at: Instant },
    Cancelled,
}

/// What an operation gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launch {
    /// It has its launch.
    Taken,
    /// None is free for so many milliseconds.
    Denied(u64),
    /// It was cancelled before it came, and takes none.
    Cancelled,
}

/// The launches of this process.
#[derive(Debug)]
pub struct Launches {
    rate: LaunchRate,
    fates: HashMap<OperationId, Fate>,
    /// Until when each is remembered, in this order. An entry may outlive its fate.
    until: VecDeque<(Instant, OperationId)>,
    epoch: Instant,
}

impl Default for Launches {
    fn default() -> Self {
        Self {
            rate: LaunchRate::default(),
            fates: HashMap::new(),
            until: VecDeque::new(),
            epoch: Instant::now(),
        }
    }
}

impl Launches {
    /// Takes one launch of the org for this operation, unless it has one.
    pub fn take(&mut self, op: OperationId, org: &str, per_minute: u64, burst: u64) -> Launch {
        self.forget();
        match self.fates.get(&op) {
            Some(Fate::Taken { .. }) => return Launch::Taken,
            Some(Fate::Cancelled) => return Launch::Cancelled,
            None => {}
        }
        match self.rate.take(org, per_minute, burst, millis_since(self.epoch)) {
            Ok(()) => {
                let at = Instant::now();
                let org = org.to_owned();
                self.remember(op, Fate::Taken { org, per_minute, at });
                Launch::Taken
            }
            Err(wait_ms) => Launch::Denied(wait_ms),
        }
    }

    /// Gives back what this operation took, after a later gate has denied it. Asked again, it is decided anew.
    pub fn give_back(&mut self, op: OperationId) {
        if let Some(Fate::Taken { org, per_minute, .. }) = self.fates.remove(&op) {
            self.rate.give_back(&org, per_minute);
        }
    }

    /// Gives back what these operations took, and keeps them from taking anything later.
    ///
    /// A launch whose interval has passed stays taken: its place may have been filled again by then, and given back it
    /// would be one more than the burst.
    pub fn cancel(&mut self, ops: &[OperationId]) {
        self.forget();
        for op in ops {
            match self.fates.get_mut(op) {
                Some(fate) => {
                    if let Fate::Taken { org, per_minute, at } = std::mem::replace(fate, Fate::Cancelled)
                        && at.elapsed() < interval(per_minute)
                    {
                        self.rate.give_back(&org, per_minute);
                    }
                }
                None => self.remember(*op, Fate::Cancelled),
            }
        }
    }

    fn remember(&mut self, op: OperationId, fate: Fate) {
        self.fates.insert(op, fate);
        self.until.push_back((after(Instant::now(), REMEMBERED), op));
        if self.until.len() > MOST_REMEMBERED {
            self.forget_oldest();
        }
    }

    fn forget(&mut self) {
        let now = Instant::now();
        while self.until.front().is_some_and(|(until, _)| *until <= now) {
            self.forget_oldest();
        }
    }

    fn forget_oldest(&mut self) {
        if let Some((_, op)) = self.until.pop_front() {
            self.fates.remove(&op);
        }
    }
}

/// Between two launches in the long run.
fn interval(per_minute: u64) -> Duration {
    Duration::from_millis(MINUTE_MS.checked_div(per_minute).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    fn op(n: u32) -> OperationId {
        OperationId::from_random(u128::from(n).to_be_bytes())
    }

    fn take(launches: &mut Launches, n: u32) -> Launch {
        launches.take(op(n), "g", 2, 1)
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_later_gate_denied_is_given_back_once_and_decided_anew() {
        let mut launches = Launches::default();
        assert_eq!(take(&mut launches, 1), Launch::Taken);
        for _ in 0..2 {
            launches.give_back(op(1));
        }
        launches.cancel(&[op(1)]);
        assert_eq!(take(&mut launches, 2), Launch::Taken);
        assert_eq!(take(&mut launches, 3), Launch::Denied(30_000));
        assert_eq!(take(&mut launches, 1), Launch::Cancelled);
    }

    #[tokio::test(start_paused = true)]
    async fn a_cancel_after_the_place_was_filled_again_gives_nothing_back() {
        let mut launches = Launches::default();
        assert_eq!(take(&mut launches, 1), Launch::Taken);
        advance(Duration::from_secs(31)).await;
        assert_eq!(take(&mut launches, 2), Launch::Taken);
        launches.cancel(&[op(1)]);
        assert!(matches!(take(&mut launches, 3), Launch::Denied(_)));
    }

    #[tokio::test(start_paused = true)]
    async fn operations_are_remembered_for_a_minute_and_so_many_at_most() {
        let mut launches = Launches::default();
        assert_eq!(take(&mut launches, 0), Launch::Taken);
        advance(Duration::from_secs(59)).await;
        assert_eq!(take(&mut launches, 1), Launch::Taken);
        assert_eq!(take(&mut launches, 0), Launch::Taken, "its own");
        advance(Duration::from_secs(1)).await;
        assert!(matches!(take(&mut launches, 0), Launch::Denied(_)), "forgotten");
        let many: Vec<_> = (0..200_000).map(op).collect();
        launches.cancel(&many);
        assert_eq!(launches.fates.len(), MOST_REMEMBERED);
        assert_eq!(launches.until.len(), MOST_REMEMBERED);
    }
}
