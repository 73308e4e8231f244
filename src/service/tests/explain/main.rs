//! `portcullis explain` as users run it. That it predicts what real Envoy answers is tested where Envoy is
//! (`wasm-tests/tests/envoy/cases.rs`).
#![allow(
    clippy::arithmetic_side_effects,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    missing_docs,
    reason = "a test stops at the first surprise, with a message"
)]

#[allow(dead_code, reason = "shared with the tests in Envoy")]
mod case;
#[path = "../service/process.rs"]
#[allow(dead_code, reason = "every test binary uses a part of it")]
mod process;
#[path = "../../../decision/tests/table/mod.rs"]
mod table;
mod telling;
#[path = "../service/wire.rs"]
#[allow(dead_code, reason = "every test binary uses a part of it")]
mod wire;

use case::Explainer;
use process::portcullis;
use table::{Outcome, cases, difference, fields, filter};

/// The table as it stands: what it expects of Envoy, `explain` says.
#[test]
fn every_case_of_the_table_is_explained_as_it_is_answered() {
    let mut wrong = Vec::new();
    for case in cases() {
        let mut explainer = Explainer::of(&case, &filter(&case));
        for (at, request) in case["requests"].as_array().unwrap().iter().enumerate() {
            for time in 0..request["times"].as_u64().unwrap_or(1) {
                let report = explainer.explain(portcullis(&[]), &fields(request));
                let counted = serde_json::from_value(report["counted"].clone()).unwrap();
                let reply = &report["reply"];
                let outcome = Outcome {
                    status: reply["status"]
                        .as_u64()
                        .map_or(200, |status| u16::try_from(status).unwrap()),
                    headers: serde_json::from_value(reply["headers"].clone()).unwrap_or_default(),
                    body: reply["body"].as_str().unwrap_or_default().as_bytes().to_vec(),
                    upstream: u64::from(report["upstream"]["reached"].as_bool().unwrap()),
                    counted: Some(counted),
                };
                let expect = &request["expect"];
                let log: Vec<_> = report["log"].as_array().unwrap().clone();
                let lacks_line = !table::has_line(&log, &expect["log"]);
                if let Some(difference) =
                    difference(&outcome, expect).or_else(|| lacks_line.then(|| format!("no such line: {log:?}")))
                {
                    wrong.push(format!("{}: request {at}, time {time}: {difference}", case["name"]));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
