//! One decision for each operation id: a repetition waits for the first one's answer instead of deciding again.
//!
//! A filter repeats a decision whose connection broke, while the first goes on here. Deciding twice could answer twice
//! differently: the first one times out and gives back by operation id what the second one was granted, and an admitted
//! request would be counted nowhere. For the same reason the answer of an operation that gave something back is
//! remembered for a while. All other repetitions are the limiter's to recognise.
//!
//! Left out on purpose: repetitions that reach another process.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::mem::ManuallyDrop;
use std::sync::Mutex;
use std::time::Duration;

use portcullis_decision::operation::OperationId;
use portcullis_decision::wire::DecideAnswer;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::{after, locked};

/// How long an answer is remembered: as long as a filter may wait for one.
const REMEMBERED: Duration = Duration::from_secs(60);
/// Answers that are remembered at most; the oldest makes room.
const MOST_REMEMBERED: usize = 65_536;

/// What becomes of one operation.
#[derive(Debug)]
enum Flight {
    /// It is being decided; mostly nobody else waits for that.
    UnderWay(Vec<oneshot::Sender<DecideAnswer>>),
    /// It gave something back, and is answered the same again.
    Landed(DecideAnswer),
}

#[derive(Debug, Default)]
struct Board {
    flights: HashMap<OperationId, Flight>,
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
}

/// Waits for the answer of another, or has it.
#[derive(Debug)]
pub enum Passenger {
    /// It is still being decided.
    Waiting(oneshot::Receiver<DecideAnswer>),
    /// It was decided before.
    Answered(DecideAnswer),
}

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
        match board.flights.entry(op) {
            Entry::Occupied(mut known) => Seat::Passenger(match known.get_mut() {
                Flight::UnderWay(waiting) => {
                    let (answer, awaited) = oneshot::channel();
                    waiting.push(answer);
                    Passenger::Waiting(awaited)
                }
                Flight::Landed(answer) => Passenger::Answered(answer.clone()),
            }),
            Entry::Vacant(free) => {
                free.insert(Flight::UnderWay(Vec::new()));
                Seat::Pilot(Pilot { flights: self, op })
            }
        }
    }

    /// Ends a flight; who has waited for it.
    fn end(&self, op: OperationId, remembered: Option<DecideAnswer>) -> Vec<oneshot::Sender<DecideAnswer>> {
        let mut board = locked(&self.board);
        let ended = match remembered {
            Some(answer) => {
                board.landed.push_back((after(Instant::now(), REMEMBERED), op));
                board.flights.insert(op, Flight::Landed(answer))
            }
            None => board.flights.remove(&op),
        };
        match ended {
            Some(Flight::UnderWay(waiting)) => waiting,
            Some(Flight::Landed(_)) | None => Vec::new(),
        }
    }
}

impl Pilot<'_> {
    /// Gives the answer to all who wait; `remember` it if the operation gave something back.
    pub fn land(self, answer: &DecideAnswer, remember: bool) {
        // What ends here has not come to nothing.
        let pilot = ManuallyDrop::new(self);
        for waiting in pilot.flights.end(pilot.op, remember.then(|| answer.clone())) {
            // Who went away in between needs no answer.
            drop(waiting.send(answer.clone()));
        }
    }
}

impl Drop for Pilot<'_> {
    /// Nobody waits any longer for a decision that came to nothing.
    fn drop(&mut self) {
        drop(self.flights.end(self.op, None));
    }
}

impl Passenger {
    /// The answer of the first, or `None` if it ended without one.
    pub async fn answer(self) -> Option<DecideAnswer> {
        match self {
            Self::Waiting(awaited) => awaited.await.ok(),
            Self::Answered(answer) => Some(answer),
        }
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
        let Seat::Passenger(third) = flights.board(op) else {
            panic!("decided twice")
        };
        first.land(&answer(op), false);
        assert_eq!(second.answer().await, Some(answer(op)));
        assert_eq!(third.answer().await, Some(answer(op)));
        assert!(pilot(&flights, op).is_some(), "a landed flight is forgotten");
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_gave_back_is_remembered_for_a_minute() {
        let (flights, op) = (Flights::default(), OperationId::from_random([1; 16]));
        pilot(&flights, op).unwrap().land(&answer(op), true);
        tokio::time::advance(Duration::from_secs(59)).await;
        let Seat::Passenger(late) = flights.board(op) else {
            panic!("decided twice")
        };
        assert_eq!(late.answer().await, Some(answer(op)));
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
