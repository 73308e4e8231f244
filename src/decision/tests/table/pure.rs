//! The pure stream as a gateway.

use portcullis_decision::config::FilterConfig;
use portcullis_decision::gatehouse::{Effect, Gatehouse};
use portcullis_decision::lease::{Host, SharedMemory};
use portcullis_decision::stream::{CalloutAnswer, Header, RequestHead, Stream};
use serde_json::Value;

use super::{Gateway, Outcome, Service, filter};

/// A host with random bits and no memory: every decision is exact.
struct Alone([u8; 16]);

impl SharedMemory for Alone {}

impl Host for Alone {
    fn random(&mut self) -> Option<[u8; 16]> {
        Some(self.0)
    }

    fn unix_s(&mut self) -> Option<u64> {
        None
    }
}

/// A gatehouse whose clock stands still.
pub struct Pure {
    gatehouse: Gatehouse,
    operations: u128,
    lines: Vec<Value>,
}

impl Pure {
    pub fn of(case: &Value) -> Self {
        let text = filter(case).to_string();
        let config = FilterConfig::parse(text.as_bytes()).unwrap_or_else(|faults| panic!("{faults}"));
        Self {
            gatehouse: Gatehouse::new(config, text.as_bytes()),
            operations: 0,
            lines: Vec::new(),
        }
    }

    fn note(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            if let Effect::Log(line) = effect {
                self.lines.push(serde_json::from_str(&line.to_json()).unwrap());
            }
        }
    }
}

impl Gateway for Pure {
    fn request(&mut self, fields: &[(String, String)], service: &mut Service) -> Outcome {
        let mut headers: Vec<Header<'_>> = vec![(b":method", b"POST"), (b":path", b"/")];
        headers.extend(fields.iter().map(|(name, value)| (name.as_bytes(), value.as_bytes())));
        let mut stream = Stream::default();
        self.operations += 1;
        let op = self.operations.to_be_bytes();
        let mut outcome = Outcome {
            status: 200,
            counted: Some(Vec::new()),
            ..Outcome::default()
        };
        let mut replies = 0;
        let head = RequestHead {
            headers: Some(&headers),
            ends_here: true,
        };
        let mut effects = stream.on_request_headers(&mut self.gatehouse, head, &mut Alone(op), 0);
        loop {
            let mut dispatched = None;
            for effect in &effects {
                match effect {
                    Effect::Dispatch(callout) => dispatched = Some(callout.clone()),
                    Effect::Count(counter, 1) => outcome.counted.iter_mut().for_each(|all| all.push(counter.name())),
                    Effect::Reply(reply) => {
                        replies += 1;
                        outcome.status = reply.status;
                        outcome.headers = reply
                            .headers
                            .iter()
                            .map(|(n, v)| ((*n).to_owned(), v.clone()))
                            .collect();
                        outcome.body.clone_from(&reply.body);
                    }
                    _ => {}
                }
            }
            self.note(effects);
            let Some(callout) = dispatched else { break };
            effects = stream.on_dispatched();
            let body = service.answer(&callout.body);
            let answer = CalloutAnswer {
                status: Some(if body.is_some() { 200 } else { 504 }),
                body: body.as_deref().map(str::as_bytes),
            };
            effects.extend(stream.on_callout_answer(&mut self.gatehouse, &mut Alone(op), answer, 0));
        }
        assert!(replies <= 1, "{replies} replies");
        outcome.upstream = u64::from(!stream.is_held());
        stream.on_end(&mut self.gatehouse, 0);
        outcome
    }

    fn lines(&mut self) -> Vec<Value> {
        let held_back = self.gatehouse.last_words();
        self.note(held_back);
        self.lines.clone()
    }
}
