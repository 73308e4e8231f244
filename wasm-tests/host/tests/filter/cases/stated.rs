//! The table of differences between hosts: what it states, and how it is shown to readers.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;

use portcullis_decision::config::FilterConfig;
use portcullis_decision::rules::Gate;
use serde_json::Value;

use crate::table::{self, Difference};

const TABLE: &str = include_str!("../../../../hosts.json");
/// Every case whose rules this host's module refuses.
const WITH_SLOTS: &str = "every case whose rules list the gate concurrency";
/// Every case that names a counter, and that no other row of the host is about.
const COUNTING: &str = "every other case that names a counter";

/// A host, a difference, and the case in which it is seen.
pub(super) type Stated = (String, Difference, String);

fn rows() -> Vec<Value> {
    serde_json::from_str(TABLE).expect("hosts.json is an array")
}

fn text<'a>(row: &'a Value, key: &str) -> &'a str {
    row[key].as_str().unwrap_or_else(|| panic!("{row} lacks {key}"))
}

fn names(cases: &Value) -> Vec<String> {
    let list = cases.as_array().expect("an array of names");
    list.iter()
        .map(|name| name.as_str().expect("a name").to_owned())
        .collect()
}

/// The cases of a row that have this in common.
fn alike(of: &str, cases: &[Value]) -> BTreeSet<String> {
    let is_meant = |case: &&Value| match of {
        WITH_SLOTS => {
            let filter = table::filter(case).to_string();
            let config = FilterConfig::parse(filter.as_bytes()).expect("no faults");
            config.rules.gate(Gate::Concurrency).is_some()
        }
        COUNTING => {
            let mut requests = case["requests"].as_array().expect("requests").iter();
            requests.any(|request| request["expect"]["count"].is_string())
        }
        other => panic!("nobody knows which cases are {other:?}"),
    };
    cases
        .iter()
        .filter(is_meant)
        .map(|case| text(case, "name").to_owned())
        .collect()
}

/// Everything that the table states, for each case.
pub(super) fn all(cases: &[Value]) -> BTreeSet<Stated> {
    let mut all = BTreeSet::new();
    let mut spoken_for: BTreeSet<(String, String)> = BTreeSet::new();
    for row in rows() {
        let host = text(&row, "host").to_owned();
        let aspect = [
            "body",
            "class",
            "configuration",
            "count",
            "log",
            "retry-after",
            "runs",
            "status",
            "upstream",
        ]
        .into_iter()
        .find(|aspect| row["aspect"] == *aspect)
        .unwrap_or_else(|| panic!("{row} is about nothing that a case says"));
        let came = text(&row, "came").to_owned();
        let names = match &row["cases"] {
            Value::String(of) => alike(of, cases),
            list => names(list).into_iter().collect(),
        };
        for name in names {
            let is_first = spoken_for.insert((host.clone(), name.clone()));
            if row["cases"] == COUNTING && !is_first {
                continue;
            }
            let difference = Difference {
                aspect,
                came: came.clone(),
            };
            let is_new = all.insert((host.clone(), difference, name.clone()));
            assert!(is_new, "{name} is named twice for {host}");
        }
    }
    all
}

#[test]
fn the_table_of_differences_is_shown_as_it_is() {
    let mut shown = String::from("| host | what differs | in these cases | why |\n| --- | --- | --- | --- |\n");
    for row in rows() {
        let cases = match &row["cases"] {
            Value::String(all) => all.clone(),
            list => names(list).join("; "),
        };
        let [host, aspect, came, why] = ["host", "aspect", "came", "why"].map(|key| text(&row, key).to_owned());
        writeln!(shown, "| {host} | {aspect}: {came} | {cases} | {why} |").expect("a string takes it");
    }
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/hosts.md");
    let document = std::fs::read_to_string(document).unwrap_or_default();
    assert!(
        document.contains(&shown),
        "docs/hosts.md should have this table:\n{shown}"
    );
}
