//! Random interleavings of requests, answers, failing calls, traps and time on hosts that let requests go by themselves: what
//! reaches the upstream is whole if the module let it go, and lacks everything that is withheld if the host did, unless the
//! request was admitted by then.
//!
//! Left out on purpose: failures of the very calls that take out and put back, which `withholding.rs` goes through one by one.

use std::collections::BTreeSet;

use portcullis_test_host::{ContextId, Headers, Personality, TestHost};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use serde_json::json;

use crate::interleavings::for_all;
use crate::scene::{admit, deny, verdict};
use crate::withholding::{credentials, lines, withholding};

#[derive(Debug, Clone, Copy)]
enum Answer {
    Admit,
    Deny,
    Unavailable,
    Garbage,
    Failure,
}

#[derive(Debug, Clone)]
enum Step {
    Request,
    Answer(Index, Answer),
    Tick(u64),
    Finish(Index),
    Break(&'static str, u32, bool),
    Heal,
    TrapAfter(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let answers = vec![
        Answer::Admit,
        Answer::Deny,
        Answer::Unavailable,
        Answer::Garbage,
        Answer::Failure,
    ];
    let calls = vec![
        "proxy_set_effective_context",
        "proxy_send_local_response",
        "proxy_continue_stream",
        "proxy_http_call",
        "clock_time_get",
        "random_get",
        "proxy_log",
    ];
    prop_oneof![
        6 => Just(Step::Request),
        8 => (any::<Index>(), select(answers)).prop_map(|(call, answer)| Step::Answer(call, answer)),
        2 => (0_u64..400).prop_map(Step::Tick),
        1 => any::<Index>().prop_map(Step::Finish),
        3 => (select(calls), select(vec![1, 2, 10, 12]), any::<bool>())
            .prop_map(|(call, status, always)| Step::Break(call, status, always)),
        2 => Just(Step::Heal),
        1 => (1_u64..40_000).prop_map(Step::TrapAfter),
    ]
}

fn personality() -> impl Strategy<Value = Personality> {
    let resuming = Personality {
        name: "Envoy that resumes by itself",
        resumes_by_itself: true,
        ..Personality::ENVOY
    };
    select(vec![
        Personality::ENVOY,
        Personality::WASMX,
        Personality::APISIX,
        resuming,
    ])
}

/// What each request came to, by the answers that it got.
struct Run {
    host: TestHost,
    opens: bool,
    admitted: BTreeSet<ContextId>,
}

impl Run {
    fn take(&mut self, step: &Step) {
        let host = &mut self.host;
        match step {
            Step::Request => {
                let stream = host.open(host.root());
                host.send_headers(stream, lines(), true);
            }
            Step::Answer(index, answer) => {
                let pending = host.pending_callouts();
                if pending.is_empty() {
                    return;
                }
                let callout = index.get(&pending).clone();
                if callout.is_settle() {
                    return host.answer(callout.token, 200, b"{}");
                }
                match answer {
                    Answer::Admit => {
                        self.admitted.insert(callout.context);
                        admit(host, &callout);
                    }
                    Answer::Deny => deny(host, &callout),
                    Answer::Unavailable => {
                        verdict(
                            host,
                            &callout,
                            json!({"verdict": "unavailable", "dependency": "limiter"}),
                        );
                    }
                    Answer::Garbage => host.answer(callout.token, 200, b"{"),
                    Answer::Failure => host.fail(callout.token, portcullis_test_host::Failure::TimedOut),
                }
            }
            Step::Tick(ms) => host.tick(*ms),
            Step::Finish(index) => {
                let open: Vec<_> = host
                    .streams()
                    .filter(|stream| !stream.is_deleted)
                    .map(|stream| stream.id)
                    .collect();
                if !open.is_empty() {
                    host.finish(*index.get(&open));
                }
            }
            Step::Break(call, status, always) if *always => host.faults().always(call, *status),
            Step::Break(call, status, _) => host.faults().once(call, *status),
            Step::Heal => host.faults().heal_all(),
            Step::TrapAfter(instructions) => host.trap_after(*instructions),
        }
    }

    /// What reached the upstream and should not look as it does.
    fn wrong(&self) -> Vec<String> {
        let all = credentials(&lines());
        let is_wrong = |id: ContextId, came: &Headers| {
            let stream = self.host.stream(id);
            if !stream.was_let_go {
                return *came != all;
            }
            // Putting back may be cut short by a trap.
            let may_be_back = self.admitted.contains(&id) || self.opens;
            if may_be_back {
                *came != all[..came.len().min(all.len())]
            } else {
                !came.is_empty()
            }
        };
        let gone_up = self
            .host
            .streams()
            .filter_map(|stream| Some((stream.id, stream.upstream.as_ref()?)));
        gone_up
            .map(|(id, upstream)| (id, credentials(upstream)))
            .filter(|(id, came)| is_wrong(*id, came))
            .map(|(id, came)| format!("{came:?} went up: {:?}", self.host.stream(id)))
            .collect()
    }
}

#[test]
fn what_goes_up_is_whole_if_the_module_let_it_go_and_useless_if_the_host_did() {
    let (mut whole, mut useless) = (0, 0);
    let strategy = (personality(), any::<bool>(), any::<u64>(), vec(step(), 1..40));
    for_all(400, &strategy, |(personality, opens, seed, steps)| {
        let mut host = TestHost::with_seed(personality, seed);
        let configuration = withholding(personality, if opens { "admit" } else { "reject" });
        host.configure(&configuration.to_string()).expect("no faults");
        let mut run = Run {
            host,
            opens,
            admitted: BTreeSet::new(),
        };
        for step in &steps {
            run.take(step);
        }
        let wrong = run.wrong();
        prop_assert!(wrong.is_empty(), "{wrong:#?}");
        for stream in run.host.streams().filter(|stream| stream.has_passed()) {
            if stream.was_let_go {
                useless += 1;
            } else {
                whole += 1;
            }
        }
        Ok(())
    });
    assert!(
        whole > 50 && useless > 10,
        "{whole} whole, {useless} let go: too few to show anything"
    );
}
