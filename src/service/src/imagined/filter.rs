//! A filter before the imagined service: a request goes through the pure `Stream` as it does in a gateway, event by event.
//!
//! Left out on purpose: the host. Its memory is absent (so every decision is exact), it takes every call, and its timers
//! never fire: an outage is a refused connection, which a filter hears at once.

use portcullis_decision::config::FilterConfig;
use portcullis_decision::gatehouse::{Callout, Effect, Gatehouse};
use portcullis_decision::json;
use portcullis_decision::lease::{Host, SharedMemory};
use portcullis_decision::reply::Reply;
use portcullis_decision::stream::{CalloutAnswer, Header, RequestHead, Stream};
use portcullis_decision::wire::DecideRequest;

use super::{Decided, ImaginedService, WireAnswer};

/// A host with ids in a row, the caller's clock, and no memory.
#[derive(Debug, Default)]
struct Numbered {
    last: u128,
    now_ms: u64,
}

impl SharedMemory for Numbered {}

impl Host for Numbered {
    fn random(&mut self) -> Option<[u8; 16]> {
        self.last = self.last.saturating_add(1);
        Some(self.last.to_be_bytes())
    }

    fn unix_s(&mut self) -> Option<u64> {
        self.now_ms.checked_div(1000)
    }
}

/// A gateway of one VM, with its service.
pub struct ImaginedFilter {
    gatehouse: Gatehouse,
    host: Numbered,
    /// What it asks.
    pub service: ImaginedService,
}

/// What became of a request.
pub struct Exchange {
    /// What the host was told to do, but for the calls.
    pub effects: Vec<Effect>,
    /// The stream, which has not ended yet.
    pub stream: Stream,
}

impl Exchange {
    /// The reply, if the request does not go on.
    pub fn reply(&self) -> Option<&Reply> {
        self.effects.iter().find_map(|effect| match effect {
            Effect::Reply(reply) => Some(reply),
            _ => None,
        })
    }
}

impl ImaginedFilter {
    /// A fresh VM with this configuration, whose leases are put aside. `text` is what it was parsed from.
    pub fn new(mut config: FilterConfig, text: &[u8], service: ImaginedService) -> Self {
        config.leases.max_requests = 0;
        Self {
            gatehouse: Gatehouse::new(config, text).with_ticks(true),
            host: Numbered::default(),
            service,
        }
    }

    /// The configuration.
    pub const fn config(&self) -> &FilterConfig {
        self.gatehouse.config()
    }

    /// One request up to its end or to its way on. `headers` begin with the pseudo headers.
    pub fn request(
        &mut self,
        headers: &[Header<'_>],
        body: &[u8],
        now_ms: u64,
        mut witness: Option<&mut Vec<Decided>>,
    ) -> Exchange {
        let mut stream = Stream::default();
        let head = RequestHead {
            headers: Some(headers),
            ends_here: body.is_empty(),
        };
        self.host.now_ms = now_ms;
        let (house, host) = (&mut self.gatehouse, &mut self.host);
        let mut effects = stream.on_request_headers(house, head, host, now_ms);
        if stream.body_read().is_some() {
            if !body.is_empty() {
                effects.extend(stream.on_body_piece(house, Some(body), now_ms));
            }
            effects.extend(stream.on_body_end(house, host, now_ms));
        }
        let mut at = 0;
        // A retry is one more call.
        while let Some(effect) = effects.get_mut(at) {
            if let Effect::Dispatch(callout) = effect {
                let answer = match stream.asked() {
                    Some(asked) => {
                        // Reading it again would take longer than deciding it.
                        debug_assert_eq!(json::read::<DecideRequest>(&callout.body).ok().as_ref(), Some(asked));
                        self.service.decide(asked, now_ms, witness.as_deref_mut())
                    }
                    // Nothing else is asked while leases are put aside.
                    None => WireAnswer::nothing(400),
                };
                effects.extend(stream.on_dispatched());
                let answer = CalloutAnswer {
                    status: Some(answer.status),
                    body: Some(&answer.body),
                };
                effects.extend(stream.on_callout_answer(&mut self.gatehouse, &mut self.host, answer, now_ms));
            }
            at = at.saturating_add(1);
        }
        effects.retain(|effect| !matches!(effect, Effect::Dispatch(_)));
        Exchange { effects, stream }
    }

    /// The stream is over: what it leaves behind is told before the next one.
    pub fn end(&mut self, mut stream: Stream, now_ms: u64) {
        if stream.leaves_something() {
            stream.on_end(&mut self.gatehouse, now_ms);
            self.tell(now_ms);
        }
    }

    /// What time alone brings about: slots of streams that go on are renewed.
    pub fn passed(&mut self, now_ms: u64) {
        self.gatehouse.passed(now_ms);
        self.tell(now_ms);
    }

    /// Lines that were held back.
    pub fn last_words(&mut self) -> Vec<Effect> {
        self.gatehouse.last_words()
    }

    fn tell(&mut self, now_ms: u64) {
        while let Some(Callout { body, .. }) = self.gatehouse.settle_callout(now_ms) {
            let answer = self.service.settle(&body, now_ms);
            self.gatehouse.settled(Some(answer.status), &answer.body, now_ms);
        }
    }
}
