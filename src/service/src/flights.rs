//! One decision for each operation id: a repetition waits for the first one's answer instead of deciding again.
//!
//! A filter repeats a decision whose connection broke, while the first goes on here. Deciding twice could answer twice
//! differently: the first one times out and gives back by operation id what the second one was granted, and an admitted
//! request would be counted nowhere. For the same reason the answer of an operation that gave something back is
//! remembered for a while. All other repetitions are the limiter's to recognise.
//!
//! Left out on purpose: repetitions that reach another process.

use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;
use std::time::Duration;

use portcullis_decision::operation::OperationId;
use portcullis_decision::wire::DecideAnswer;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::{after, locked};

/// How long an answer is remembered: as long as a filter may wait for one.
const REMEMBERED: Duration = Duration::from_secs(60);
/// Answers that are remembered at most; the oldest makes room.
const MOST_REMEMBERED: usize = 65_536;

type Pending = watch::Receiver<Option<DecideAnswer>>;

#[derive(Debug, Default)]
struct Board {
    flights: HashMap<OperationId, Pending>,
    landed: VecDeque<(Instant, OperationId)>,
}

/// The decisions under way, and the answers that have to stay as they were.
#[derive(Debug, Default)]
pub struct Flights {
    board: Mutex<Board>,
}

/// What a decision finds when it starts.
#[derive(Debug)]
pub enum Seat<'a> {
    /// Nobody decides this operation: decide it, then [`Pilot::land`].
    Pilot(Pilot<'a>),
    /// It is decided already, or about to be.
    Passenger(Passenger),
}

/// Has to decide.
#[derive(Debug)]
pub struct Pilot<'a> {
    flights: &'a Flights,
    op: OperationId,
    answer: watch::Sender<Option<DecideAnswer>>,
    remember: bool,
}

/// Waits for the answer of another.
#[derive(Debug)]
pub struct Passenger(Pending);

impl Flights {
    /// Takes a seat for this operation.
    pub fn board(&self, op: OperationId) -> Seat<'_> {
        let mut board = locked(&self.board);
        let now = Instant::now();
        while let Some((until, op)) = board.landed.front().copied() {
            if until > now && board.landed.len() <= MOST_REMEMBERED {
                break;
            }
            board.landed.pop_front();
            board.flights.remove(&op);
        }
        if let Some(pending) = board.flights.get(&op) {
            return Seat::Passenger(Passenger(pending.clone()));
        }
        let (answer, pending) = watch::channel(None);
        board.flights.insert(op, pending);
        Seat::Pilot(Pilot {
            flights: self,
            op,
            answer,
            remember: false,
        })
    }
}

impl Pilot<'_> {
    /// Gives the answer to all who wait; `remember` it if the operation gave something back.
    pub fn land(mut self, answer: &DecideAnswer, remember: bool) {
        self.remember = remember;
        self.answer.send_replace(Some(answer.clone()));
    }
}

impl Drop for Pilot<'_> {
    fn drop(&mut self) {
        let mut board = locked(&self.flights.board);
        if self.remember {
            board.landed.push_back((after(Instant::now(), REMEMBERED), self.op));
        } else {
            board.flights.remove(&self.op);
        }
    }
}

impl Passenger {
    /// The answer of the first, or `None` if it ended without one.
    pub async fn answer(mut self) -> Option<DecideAnswer> {
        let answer = self.0.wait_for(Option::is_some).await.ok()?;
        answer.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use portcullis_decision::verdict::{Admission, Verdict};

    fn answer(op: OperationId) -> DecideAnswer {
        DecideAnswer {
            op,
            verdict: Verdict::Admit(Admission::default()),
        }
    }

    fn pilot(flights: &Flights, op: OperationId) -> Option<Pilot<'_>> {
        match flights.board(op) {
            Seat::Pilot(pilot) => Some(pilot),
            Seat::Passenger(_) => None,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_repetition_gets_the_answer_of_the_first() {
        let (flights, op) = (Flights::default(), OperationId::from_random([1; 16]));
        let first = pilot(&flights, op).unwrap();
        let Seat::Passenger(second) = flights.board(op) else {
            panic!("decided twice")
        };
        first.land(&answer(op), false);
        assert_eq!(second.answer().await, Some(answer(op)));
        assert!(pilot(&flights, op).is_some(), "a landed flight is forgotten");
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_gave_back_is_remembered_for_a_minute() {
        let (flights, op) = (Flights::default(), OperationId::from_random([1; 16]));
        pilot(&flights, op).unwrap().land(&answer(op), true);
        tokio::time::advance(Duration::from_secs(59)).await;
        assert!(pilot(&flights, op).is_none());
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(pilot(&flights, op).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_decision_that_ends_without_an_answer_leaves_nobody_waiting() {
        let (flights, op) = (Flights::default(), OperationId::from_random([1; 16]));
        let first = pilot(&flights, op).unwrap();
        let Seat::Passenger(second) = flights.board(op) else {
            panic!("decided twice")
        };
        drop(first);
        assert_eq!(second.answer().await, None);
    }
}
