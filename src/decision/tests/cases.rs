//! The case table against the pure crate, natively and on wasm32-unknown-unknown in Node.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test may fail by panicking"
)]

mod table;

#[cfg(not(target_arch = "wasm32"))]
use portcullis_decision::config::SHIPPED_RULES;
use table::pure::Pure;

#[cfg_attr(not(target_arch = "wasm32"), test)]
#[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
fn every_case_of_the_table_is_answered_as_it_says() {
    let wrong: Vec<String> = table::cases()
        .iter()
        .filter_map(|case| table::run(case, &mut Pure::of(case)).err())
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[cfg(not(target_arch = "wasm32"))]
#[test]
fn no_file_of_the_table_is_left_out() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../wasm-tests/cases");
    let mut files: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| {
            std::path::Path::new(name)
                .extension()
                .is_some_and(|extension| extension == "json")
        })
        .collect();
    files.sort();
    assert_eq!(files, table::FILES.map(|(name, _)| name));
}

/// Outages, a row for each, as the table of cases says it: what fails under which rules, and the whole row.
#[cfg(not(target_arch = "wasm32"))]
fn outages() -> Vec<(String, String)> {
    let all = table::cases();
    let outages = all
        .iter()
        .filter(|case| case["down"].is_array() || case["limiter"] == "none");
    outages
        .map(|case| {
            let last = case["requests"].as_array().unwrap().last().unwrap();
            let (expect, name) = (&last["expect"], case["name"].as_str().unwrap());
            let what = name.split_once(": ").map_or(name, |(what, _)| what);
            let seen = expect["code"].as_str().map_or_else(
                || "the upstream's answer".to_string(),
                |code| format!("{} `{code}`", expect["status"]),
            );
            let reached = if expect["upstream"] == 1 {
                "reached"
            } else {
                "sees nothing"
            };
            let counted = expect["count"]
                .as_str()
                .map_or_else(String::new, |count| format!("`{count}`"));
            (
                what.to_string(),
                format!("| {what} | {seen} | {reached} | {counted} |\n"),
            )
        })
        .collect()
}

/// A document of the repository has a table of these rows and no others.
#[cfg(not(target_arch = "wasm32"))]
#[track_caller]
fn has_table(document: &str, rows: impl Iterator<Item = String>) {
    let head =
        "| what fails, under which rules | the client sees | upstream | counted as |\n| --- | --- | --- | --- |\n";
    let table = format!("\n{head}{}\n", rows.collect::<String>());
    let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(document);
    let text = std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{document}: {error}"));
    assert!(text.contains(&table), "{document} should have this table:\n{table}");
}

#[cfg(not(target_arch = "wasm32"))]
#[test]
fn the_outage_table_of_the_readme_is_the_case_table() {
    has_table("README.md", outages().into_iter().map(|(_, row)| row));
}

#[cfg(not(target_arch = "wasm32"))]
#[test]
fn the_page_of_each_rule_file_has_its_rows_of_the_outage_table() {
    for (name, _) in SHIPPED_RULES {
        let is_its = |(what, _): &(String, String)| {
            let of = what.rsplit_once(", ").map_or("", |(_, of)| of);
            of.strip_suffix(" with tiers").unwrap_or(of) == name
        };
        let rows: Vec<_> = outages().into_iter().filter(is_its).map(|(_, row)| row).collect();
        assert!(!rows.is_empty(), "{name}: no outage");
        has_table(&format!("docs/rules/{name}.md"), rows.into_iter());
    }
}
