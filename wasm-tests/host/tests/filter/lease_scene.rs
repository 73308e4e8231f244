//! What the tests of leases share: a host that leases, blocks that the service grants, and what comes back of them.

use portcullis_test_host::{Callout, ContextId, Personality, TestHost};
use serde_json::{Value, json};

use crate::scene::{ENVELOPE, configuration, decide_of, rules, verdict};

/// How long a block and a denial last in every configuration here, in milliseconds.
pub(crate) const MAX_AGE_MS: u64 = 1_000;

/// A configuration that leases.
pub(crate) fn leasing(rules: &Value) -> Value {
    let mut leasing = configuration(rules);
    leasing["leases"] = json!({"max_requests": 64, "max_age_ms": MAX_AGE_MS, "slots": 64});
    leasing
}

/// A host that leases, with rules that reject whatever is not decided.
pub(crate) fn leased() -> TestHost {
    leased_on(Personality::ENVOY)
}

/// The same on a host of this kind.
pub(crate) fn leased_on(personality: Personality) -> TestHost {
    let mut host = TestHost::new(personality);
    configure(&mut host);
    host
}

/// Another worker of the same host, with the same configuration.
pub(crate) fn worker_beside(host: &TestHost, seed: u64) -> TestHost {
    let mut other = TestHost::beside(host, seed);
    configure(&mut other);
    other
}

fn configure(host: &mut TestHost) {
    let mut leasing = leasing(&rules("leased", "reject"));
    leasing["decision"]["upstream"] = json!(host.personality().decision_upstream());
    host.configure(&leasing.to_string())
        .expect("a configuration without faults");
}

/// Admits one request, and grants a block of so many more.
pub(crate) fn grant(host: &mut TestHost, callout: &Callout, requests: u64) {
    let lease = json!({"requests": requests, "ends_in_ms": MAX_AGE_MS});
    verdict(host, callout, json!({"verdict": "admit", "lease": lease}));
}

/// The first request of a bundle has brought a block of so many more; its operation.
pub(crate) fn with_block(host: &mut TestHost, requests: u64) -> String {
    let stream = host.request(&ENVELOPE);
    let callout = decide_of(host, stream);
    grant(host, &callout, requests);
    assert!(host.stream(stream).has_passed(), "{host:#?}");
    host.finish(stream);
    callout.op()
}

/// A request like the others; whether it was admitted without a callout.
pub(crate) fn hit(host: &mut TestHost) -> bool {
    let stream = host.request(&ENVELOPE);
    let waits = host
        .pending_callouts()
        .iter()
        .any(|callout| callout.context == stream && callout.is_decide());
    let passed = host.stream(stream).has_passed();
    assert!(waits != passed, "{host:#?}");
    host.finish(stream);
    passed
}

/// How many requests in a row are admitted without a callout, at most so many.
pub(crate) fn hits(host: &mut TestHost, most: u64) -> u64 {
    (0..most).take_while(|_| hit(host)).count() as u64
}

/// The block that is being fetched.
pub(crate) fn fetch(host: &TestHost) -> Callout {
    let fetch = host.pending_callouts().into_iter().find(Callout::is_fetch);
    fetch.unwrap_or_else(|| panic!("no block is being fetched: {host:#?}"))
}

/// Whether one is.
pub(crate) fn is_fetching(host: &TestHost) -> bool {
    host.pending_callouts().iter().any(Callout::is_fetch)
}

/// A request whose decision is exact: it waits for a callout.
#[track_caller]
pub(crate) fn asks(host: &mut TestHost) -> (ContextId, Callout) {
    let stream = host.request(&ENVELOPE);
    let callout = decide_of(host, stream);
    (stream, callout)
}

/// Everything that was returned, once for each id: leases with requests and tokens.
pub(crate) fn returned(host: &TestHost) -> Vec<(String, u64, i64)> {
    let mut by_id = std::collections::BTreeMap::new();
    for told in host
        .sent()
        .iter()
        .filter(|callout| callout.is_settle())
        .flat_map(Callout::returns)
    {
        by_id.insert(told["id"].to_string(), told);
    }
    let told = by_id.into_values();
    told.map(|told| {
        let lease = told["lease"].as_str().unwrap_or_default().to_owned();
        let requests = told["requests"].as_u64().unwrap_or_default();
        (lease, requests, told["tokens"].as_i64().unwrap_or_default())
    })
    .collect()
}

/// Every batch that is out is heard, until nothing is left to tell.
pub(crate) fn hear(host: &mut TestHost) {
    host.tick(40);
    while let Some(batch) = host.pending_callouts().into_iter().find(Callout::is_settle) {
        host.answer(batch.token, 200, b"{}");
        host.tick(40);
    }
}
