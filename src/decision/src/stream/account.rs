//! The account of an admitted request: what it holds, what its response reports, and what is settled when it ends.
//!
//! | what came of it | token windows are charged | the bill is for |
//! | --- | --- | --- |
//! | a response that reports its usage to the end | what it used, less or more than the hold | what it used |
//! | a status of 300 or more (no route too) but 408 and 504 | the estimate of the input, at most the hold | nothing |
//! | anything else: cut short, unreadable, no report, no answer | the hold | the hold, or what was reported if that is more |
//!
//! Nobody gets a call for nothing by leaving early or by not asking for a report: then the hold stands. A provider may
//! have worked for a request that timed out (408, 504), and a client can bring a timeout about. Left out on purpose:
//! what a response was worth that was cut short, since a provider's unseen output (reasoning) can't be counted here.

use alloc::string::String;

use super::Header;
use crate::hold::Hold;
use crate::limits::LARGEST_LIMIT;
use crate::operation::OperationId;
use crate::usage::{Format, Usage, UsageReader};
use crate::wire::{Bill, DecideRequest, Settlement};

/// What an admitted request has to answer for.
#[derive(Debug)]
pub(super) struct Account {
    op: OperationId,
    has_slot: bool,
    hold: Hold,
    /// The operation that charged the block of which this request is a part.
    lease: Option<OperationId>,
    /// What its token windows are charged so far.
    held_tokens: Option<u64>,
    /// Whose month its cost is added to, and the model by whose price.
    payer: Option<(String, String)>,
    response: Response,
}

#[derive(Debug)]
enum Response {
    /// No headers yet.
    Awaited,
    /// An answer that no provider charges for.
    NotServed,
    /// It reports nothing that can be read.
    Unreadable,
    Readable(alloc::boxed::Box<UsageReader>),
}

/// How an account is closed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Closing {
    /// What has to be told; `None` if nothing is held.
    pub(super) settlement: Option<Settlement>,
    /// The block, and the tokens that go back to its windows.
    pub(super) returned: Option<(OperationId, i64)>,
    /// The hold stands, since nobody knows better.
    pub(super) is_hold: bool,
}

impl Account {
    /// Of a request that holds a slot or tokens, or whose cost is recorded.
    pub(super) fn new(
        request: &DecideRequest,
        hold: Hold,
        has_slot: bool,
        held_tokens: Option<u64>,
        records_cost: bool,
    ) -> Self {
        let subject = &request.subject;
        Self {
            op: request.op,
            has_slot,
            hold,
            lease: None,
            held_tokens,
            payer: subject.org.clone().zip(subject.model.clone()).filter(|_| records_cost),
            response: Response::Awaited,
        }
    }

    /// Of a request that was admitted by a part of a block: only the difference to its hold is told.
    pub(super) const fn leased(lease: OperationId, hold: Hold, held_tokens: u64) -> Self {
        Self {
            op: lease,
            has_slot: false,
            hold,
            lease: Some(lease),
            held_tokens: Some(held_tokens),
            payer: None,
            response: Response::Awaited,
        }
    }

    /// Whether what the response reports makes a difference.
    pub(super) const fn counts_usage(&self) -> bool {
        self.held_tokens.is_some() || self.payer.is_some()
    }

    /// Whether the body of the response is to be read.
    pub(super) const fn reads_response(&self) -> bool {
        matches!(self.response, Response::Readable(_))
    }

    /// The headers of the response.
    pub(super) fn on_response_headers(&mut self, headers: &[Header<'_>]) {
        let single = |name: &str| {
            let mut lines = headers.iter().filter(|(n, _)| n.eq_ignore_ascii_case(name.as_bytes()));
            let (_, value) = lines.next()?;
            // Two lines are one list; what is encoded twice can't be read either.
            if lines.next().is_some() { None } else { Some(*value) }
        };
        let text = |name| single(name).and_then(|value| core::str::from_utf8(value).ok());
        let is_encoded = headers
            .iter()
            .any(|(name, _)| name.eq_ignore_ascii_case(b"content-encoding"));
        let encoding = if is_encoded {
            Some(text("content-encoding").unwrap_or("unreadable"))
        } else {
            None
        };
        let status = text(":status").and_then(|status| status.parse::<u16>().ok());
        self.response = match status {
            Some(408 | 504) | None => Response::Unreadable,
            Some(300..) => Response::NotServed,
            Some(_) => match Format::of_headers(text("content-type"), encoding) {
                Some(format) => Response::Readable(alloc::boxed::Box::new(UsageReader::new(format))),
                None => Response::Unreadable,
            },
        };
    }

    /// The next piece of the response, or `None` if the host could not give it.
    pub(super) fn on_response_body(&mut self, piece: Option<&[u8]>) {
        match (&mut self.response, piece) {
            (Response::Readable(reader), Some(piece)) => reader.feed(piece),
            (Response::Readable(_), None) => self.response = Response::Unreadable,
            _ => {}
        }
    }

    /// The stream is over.
    pub(super) fn close(self) -> Closing {
        let is_served = !matches!(self.response, Response::NotServed);
        let usage = match self.response {
            Response::Readable(reader) => reader.finish(),
            _ => None,
        };
        let complete = usage
            .filter(|usage| usage.is_complete)
            .and_then(|usage| Some((usage.input?, usage.output?, usage.cached_input.unwrap_or(0))));
        let is_hold = is_served && complete.is_none() && (self.held_tokens.is_some() || self.payer.is_some());
        let estimate = self.hold.input_tokens;
        let tokens = self.held_tokens.and_then(|held| match complete {
            Some((input, output, _)) => Some(input.saturating_add(output).min(LARGEST_LIMIT)),
            None if is_served => None,
            None => Some(estimate.min(held)),
        });
        // A charge that stays as it is needs no settling.
        let tokens = tokens.filter(|tokens| Some(*tokens) != self.held_tokens);
        let bill = self.payer.filter(|_| is_served).map(|(org, model)| match complete {
            Some((input, output, cached_input)) => Bill {
                org,
                model,
                input,
                cached_input,
                output,
                is_hold: false,
            },
            None => {
                let (input, output) = at_least_reported(&self.hold, usage);
                Bill {
                    org,
                    model,
                    input,
                    cached_input: 0,
                    output,
                    is_hold: true,
                }
            }
        });
        if let Some(lease) = self.lease {
            let difference = |tokens: u64| {
                let signed = |tokens: u64| i64::try_from(tokens).unwrap_or(i64::MAX);
                signed(self.held_tokens.unwrap_or(0)).saturating_sub(signed(tokens))
            };
            return Closing {
                settlement: None,
                returned: tokens.map(|tokens| (lease, difference(tokens))),
                is_hold,
            };
        }
        let has_anything = self.has_slot || tokens.is_some() || bill.is_some();
        let op = self.op;
        Closing {
            settlement: has_anything.then_some(Settlement { op, tokens, bill }),
            returned: None,
            is_hold,
        }
    }
}

/// What a request without a whole report is billed: what it held, or what was reported of it if that is more.
fn at_least_reported(hold: &Hold, reported: Option<Usage>) -> (u64, u64) {
    let (input, output) = reported.map_or((None, None), |usage| (usage.input, usage.output));
    (
        input.unwrap_or(hold.input_tokens),
        output.unwrap_or(0).max(hold.output_tokens),
    )
}
