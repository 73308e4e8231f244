//! What each way of a request costs on the hot path: host calls by name with the bytes that they carry, and instructions.
//! The figures are kept in `host-calls.json`, and the test fails when one has grown.
//!
//! Calls and bytes are compared exactly: a host call costs a gateway more than a hundred instructions, and instructions
//! alone hide it. Those may differ by 5 %, as another compiler makes other ones. Left out on purpose: time, which no two
//! machines agree on, and the first request of a VM.

mod scenarios;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

use portcullis_test_host::{Ledger, Tally};
use serde_json::Value;

use crate::costs::scenarios::SCENARIOS;

/// How much instructions may differ, in percent.
const TOLERANCE: u64 = 5;

/// What one scenario costs.
#[derive(Debug, PartialEq, Eq)]
struct Cost {
    instructions: u64,
    host_calls: BTreeMap<String, Tally>,
}

impl From<Ledger> for Cost {
    fn from(ledger: Ledger) -> Self {
        let named = |(name, tally): (&&str, &Tally)| ((*name).to_owned(), *tally);
        Self {
            instructions: ledger.fuel(),
            host_calls: ledger.host_calls.iter().map(named).collect(),
        }
    }
}

fn file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("host-calls.json")
}

fn written(costs: &[(&str, Cost)]) -> String {
    let scenarios: Vec<String> = costs
        .iter()
        .map(|(name, cost)| {
            let mut text = format!("  {:?}: {{\n    \"instructions\": {}", name, cost.instructions);
            for (call, tally) in &cost.host_calls {
                let Tally { calls, bytes } = tally;
                let _ = write!(text, ",\n    {call:?}: {{\"calls\": {calls}, \"bytes\": {bytes}}}");
            }
            text + "\n  }"
        })
        .collect();
    format!("{{\n{}\n}}\n", scenarios.join(",\n"))
}

fn read(of: &Value) -> Option<Cost> {
    let fields = of.as_object()?;
    let tally = |(name, value): (&String, &Value)| {
        let tally = Tally {
            calls: value["calls"].as_u64()?,
            bytes: value["bytes"].as_u64()?,
        };
        Some((name.clone(), tally))
    };
    Some(Cost {
        instructions: fields.get("instructions")?.as_u64()?,
        host_calls: fields.iter().filter_map(tally).collect(),
    })
}

/// What differs between the file and the module, in a line for each figure.
fn differences(kept: &Cost, now: &Cost) -> Vec<String> {
    let mut lines = Vec::new();
    for name in kept.host_calls.keys().chain(
        now.host_calls
            .keys()
            .filter(|name| !kept.host_calls.contains_key(*name)),
    ) {
        let of = |cost: &Cost| cost.host_calls.get(name).copied().unwrap_or_default();
        let (kept, now) = (of(kept), of(now));
        if kept != now {
            let Tally { calls, bytes } = now;
            lines.push(format!(
                "{name}: {calls} calls with {bytes} bytes, kept are {} with {}",
                kept.calls, kept.bytes
            ));
        }
    }
    let (kept, now) = (kept.instructions, now.instructions);
    if kept.abs_diff(now) * 100 > kept * TOLERANCE {
        lines.push(format!("{now} instructions, kept are {kept}"));
    }
    lines
}

#[test]
fn no_scenario_costs_more_than_is_kept() {
    let costs: Vec<(&str, Cost)> = SCENARIOS.iter().map(|(name, cost)| (*name, cost().into())).collect();
    let path = file();
    if env::var_os("PORTCULLIS_UPDATE").is_some_and(|update| update == "1") {
        fs::write(&path, written(&costs)).expect("the file can be written");
        return;
    }
    let text = fs::read_to_string(&path).unwrap_or_default();
    let kept: Value = serde_json::from_str(&text).unwrap_or_default();
    let mut grown = Vec::new();
    for (name, now) in &costs {
        let lines = match kept.get(*name).and_then(read) {
            Some(kept) => differences(&kept, now),
            None => vec!["nothing is kept of it".to_owned()],
        };
        grown.extend(lines.into_iter().map(|line| format!("{name}: {line}")));
    }
    let names = kept.as_object().into_iter().flatten().map(|(name, _)| name);
    let is_gone = |name: &&String| costs.iter().all(|(of, _)| of != name);
    grown.extend(
        names
            .filter(is_gone)
            .map(|name| format!("{name}: there is no such scenario any more")),
    );
    assert!(
        grown.is_empty(),
        "costs differ from {}:\n  {}\nIf that is meant, run this test with PORTCULLIS_UPDATE=1 and commit the file.",
        path.file_name().unwrap_or_default().display(),
        grown.join("\n  ")
    );
}

#[test]
fn a_scenario_costs_the_same_each_time() {
    for (name, cost) in SCENARIOS {
        assert_eq!(Cost::from(cost()), Cost::from(cost()), "{name}");
    }
}

#[test]
fn what_is_written_is_read_back() {
    let tally = Tally { calls: 2, bytes: 300 };
    let cost = |instructions, calls: &[(&str, Tally)]| Cost {
        instructions,
        host_calls: calls.iter().map(|(name, tally)| ((*name).to_owned(), *tally)).collect(),
    };
    let text = written(&[("one", cost(7, &[("proxy_log", tally)])), ("none", cost(0, &[]))]);
    let kept: Value = serde_json::from_str(&text).expect("JSON");
    let read = |name| read(&kept[name]).expect("a scenario");
    assert_eq!(read("one"), cost(7, &[("proxy_log", tally)]));
    assert_eq!(read("none"), cost(0, &[]));
}

#[test]
fn a_call_a_byte_or_six_percent_of_the_instructions_are_told() {
    let cost = |instructions, calls, bytes| Cost {
        instructions,
        host_calls: BTreeMap::from([("proxy_log".to_owned(), Tally { calls, bytes })]),
    };
    let kept = cost(1_000, 2, 300);
    assert_eq!(differences(&kept, &cost(1_050, 2, 300)), Vec::<String>::new());
    assert_eq!(differences(&kept, &cost(1_060, 2, 300)).len(), 1);
    assert_eq!(differences(&kept, &cost(940, 2, 300)).len(), 1);
    assert_eq!(differences(&kept, &cost(1_000, 3, 300)).len(), 1);
    assert_eq!(differences(&kept, &cost(1_000, 2, 301)).len(), 1);
    let other = Cost {
        host_calls: BTreeMap::from([("random_get".to_owned(), Tally { calls: 1, bytes: 16 })]),
        ..cost(1_000, 0, 0)
    };
    assert_eq!(differences(&kept, &other).len(), 2, "one call is gone, another is new");
}
