//! Plays the requests of a log, each at its own time, through the imagined filter and service.
//!
//! The clock is the log's, and never runs back: a request that is older than one before it comes at that one's time, and is
//! counted. A request holds its slot for as long as it took then. Left out on purpose: what clients do when they are refused
//! (they may retry, or give up), since no log says it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use portcullis_decision::class::FailureClass;
use portcullis_decision::config::LimitHeaders;
use portcullis_decision::gatehouse::Effect;
use portcullis_decision::metric::Counter;
use portcullis_decision::stream::{Header, Stream};
use serde::Deserialize;

use super::record::Record;
use crate::imagined::filter::ImaginedFilter;

/// Between two looks at the slots of requests under way, in milliseconds. A slot may live as short as a second.
const TICK_MS: u64 = 250;
/// Requests under way at most; beyond that the one that ends first ends early. Some 100 MB.
const MOST_UNDER_WAY: usize = 100_000;

/// A request that goes on.
struct UnderWay {
    ends_ms: u64,
    number: u64,
    /// Boxed, since the queue moves its entries about.
    stream: Box<Stream>,
    used: Option<(u64, u64)>,
    status: Option<u16>,
}

impl PartialEq for UnderWay {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for UnderWay {}

impl PartialOrd for UnderWay {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for UnderWay {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.ends_ms, self.number).cmp(&(other.ends_ms, other.number))
    }
}

/// What became of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fate {
    /// No route guards it.
    NotGuarded,
    /// It went on; through these classes if something was not checked.
    Admitted(Vec<FailureClass>),
    /// It was refused.
    Refused {
        /// The class.
        class: FailureClass,
        /// The code, unless the call was gRPC.
        code: Option<String>,
        /// Whom the limit binds that denied, if one did.
        scope: Option<String>,
    },
}

#[derive(Deserialize)]
struct ReplyBody {
    error: ErrorObject,
}

#[derive(Deserialize)]
struct ErrorObject {
    code: String,
    scope: Option<String>,
}

/// A gateway whose clock is a log's.
pub struct Player {
    filter: ImaginedFilter,
    under_way: BinaryHeap<Reverse<UnderWay>>,
    now_ms: u64,
    next_tick_ms: u64,
    number: u64,
    /// Requests that were older than one before them.
    pub unordered: u64,
    /// Requests that ended early, since too many were under way.
    pub ended_early: u64,
}

impl Player {
    /// A player whose clock stands at `now_ms`.
    pub const fn new(filter: ImaginedFilter, now_ms: u64) -> Self {
        Self {
            filter,
            under_way: BinaryHeap::new(),
            now_ms,
            next_tick_ms: now_ms,
            number: 0,
            unordered: 0,
            ended_early: 0,
        }
    }

    /// Plays one request.
    pub fn play(&mut self, record: &Record, at_ms: u64) -> Fate {
        if at_ms < self.now_ms {
            self.unordered = self.unordered.saturating_add(1);
        } else {
            self.advance(at_ms);
        }
        let body = record.body();
        let fields = record.headers.iter();
        let headers: Vec<Header<'_>> = fields
            .map(|(name, value)| (name.as_bytes(), value.as_bytes()))
            .collect();
        let exchange = self.filter.request(&headers, &body, self.now_ms, None);
        let fate = fate(&exchange.effects);
        if exchange.stream.leaves_something() {
            self.number = self.number.saturating_add(1);
            let going = UnderWay {
                ends_ms: self.now_ms.saturating_add(record.duration_ms),
                number: self.number,
                stream: Box::new(exchange.stream),
                used: record.used,
                status: record.status,
            };
            if record.duration_ms == 0 {
                self.end(going);
            } else {
                self.under_way.push(Reverse(going));
                if self.under_way.len() > MOST_UNDER_WAY
                    && let Some(Reverse(first)) = self.under_way.pop()
                {
                    self.ended_early = self.ended_early.saturating_add(1);
                    self.end(first);
                }
            }
        }
        fate
    }

    /// Lets the time pass: requests end, and slots of those that go on are renewed.
    fn advance(&mut self, to_ms: u64) {
        while let Some(Reverse(first)) = self.under_way.peek() {
            let ends_ms = first.ends_ms;
            if self.next_tick_ms.min(ends_ms) > to_ms {
                break;
            }
            if self.next_tick_ms < ends_ms {
                self.now_ms = self.now_ms.max(self.next_tick_ms);
                self.filter.passed(self.now_ms);
                self.next_tick_ms = self.now_ms.saturating_add(TICK_MS);
            } else if let Some(Reverse(first)) = self.under_way.pop() {
                self.now_ms = self.now_ms.max(ends_ms);
                self.end(first);
            }
        }
        self.now_ms = to_ms;
        self.next_tick_ms = self.next_tick_ms.max(to_ms);
    }

    /// The request's answer passes the filter, as far as the log knows it.
    fn end(&mut self, going: UnderWay) {
        let UnderWay {
            mut stream,
            used,
            status,
            ..
        } = going;
        let status = used.map_or(status, |_| Some(200)).map(|status| status.to_string());
        if let Some(status) = &status {
            let headers: [Header<'_>; 2] = [(b":status", status.as_bytes()), (b"content-type", b"application/json")];
            stream.on_response_headers(LimitHeaders::Denied, Some(&headers));
        }
        if let Some((input, output)) = used {
            let report = format!(r#"{{"usage":{{"prompt_tokens":{input},"completion_tokens":{output}}}}}"#);
            stream.on_response_body(Some(report.as_bytes()));
        }
        self.filter.end(*stream, self.now_ms);
    }
}

fn fate(effects: &[Effect]) -> Fate {
    let mut bypassed = Vec::new();
    let mut is_guarded = false;
    for effect in effects {
        match effect {
            Effect::Count(Counter::Rejected(class), _) => {
                let body = effects.iter().find_map(|effect| match effect {
                    Effect::Reply(reply) => serde_json::from_slice::<ReplyBody>(&reply.body).ok(),
                    _ => None,
                });
                let (code, scope) = body.map_or((None, None), |body| (Some(body.error.code), body.error.scope));
                return Fate::Refused {
                    class: *class,
                    code,
                    scope,
                };
            }
            Effect::Count(Counter::Bypassed(class), _) => bypassed.push(*class),
            Effect::Count(Counter::Admitted, _) => is_guarded = true,
            _ => {}
        }
    }
    if is_guarded {
        Fate::Admitted(bypassed)
    } else {
        Fate::NotGuarded
    }
}
