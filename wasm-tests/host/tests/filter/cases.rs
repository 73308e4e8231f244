//! The case table (`wasm-tests/cases/`) against the real `.wasm` under the test host: the same data that drives the pure
//! crate and real Envoy, with the service's own code behind the callouts.

use portcullis_test_host::{Personality, TestHost};
use serde_json::Value;

use crate::table::{self, Gateway, Outcome, Service};

struct Hosted(TestHost);

impl Gateway for Hosted {
    fn request(&mut self, fields: &[(String, String)], service: &mut Service) -> Outcome {
        let host = &mut self.0;
        let before: Vec<(String, u64)> = host
            .counters()
            .iter()
            .map(|(name, n)| ((*name).to_owned(), *n))
            .collect();
        let mut lines = vec![(":method", "POST"), (":path", "/v1/chat"), (":authority", "gateway")];
        lines.extend(fields.iter().map(|(name, value)| (name.as_str(), value.as_str())));
        let stream = host.request(&lines);
        // One decision and at most one retry of it.
        for _ in 0..2 {
            let Some(callout) = host
                .pending_callouts()
                .into_iter()
                .find(|c| c.context == stream && c.is_decide())
            else {
                break;
            };
            match service.answer(callout.json().to_string().as_bytes()) {
                Some(answer) => host.answer(callout.token, 200, answer.as_bytes()),
                None => host.answer(callout.token, 504, b"upstream request timeout"),
            }
        }
        let grown = host.counters().into_iter().filter(|(name, n)| {
            let was = before
                .iter()
                .find(|(known, _)| known == name)
                .map_or(0, |(_, was)| *was);
            *n == was + 1
        });
        let counted = Some(grown.map(|(name, _)| name.to_owned()).collect());
        let seen = host.stream(stream);
        let upstream = u64::from(seen.upstream.is_some());
        let mut outcome = Outcome {
            status: 200,
            upstream,
            counted,
            ..Outcome::default()
        };
        if let [reply] = seen.replies.as_slice() {
            outcome.status = u16::try_from(reply.status).expect("a status");
            outcome.headers = ["x-portcullis-class", "retry-after", "x-should-retry"]
                .iter()
                .filter_map(|name| Some(((*name).to_owned(), reply.header(name)?.to_owned())))
                .collect();
            outcome.body.clone_from(&reply.body);
        }
        host.finish(stream);
        outcome
    }

    fn lines(&mut self) -> Vec<Value> {
        // A second later whatever was held back is written.
        self.0.tick(1_000);
        self.0.logs().iter().map(|line| line.json()).collect()
    }
}

#[test]
fn every_case_of_the_table_is_answered_as_it_says() {
    let run = |case: &Value| {
        let mut host = TestHost::new(Personality::ENVOY);
        host.configure(&table::filter(case).to_string())
            .expect("a configuration without faults");
        let mut hosted = Hosted(host);
        let outcome = table::run(case, &mut hosted);
        assert!(
            hosted.0.violations().is_empty(),
            "{}: {:?}",
            case["name"],
            hosted.0.violations()
        );
        outcome
    };
    let wrong: Vec<String> = table::cases().iter().filter_map(|case| run(case).err()).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
