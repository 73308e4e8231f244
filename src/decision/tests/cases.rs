//! The case table against the pure crate, natively and on wasm32-unknown-unknown in Node.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test may fail by panicking"
)]

mod table;

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

/// The README's outage table, row by row, as the table of cases says it.
#[cfg(not(target_arch = "wasm32"))]
#[test]
fn the_outage_table_of_the_readme_is_the_case_table() {
    use std::fmt::Write;
    let mut table = String::from(
        "| what fails, under which rules | the client sees | upstream | counted as |\n| --- | --- | --- | --- |\n",
    );
    for case in table::cases()
        .iter()
        .filter(|case| case["down"].is_array() || case["limiter"] == "none")
    {
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
            .map_or_else(|| "".to_string(), |count| format!("`{count}`"));
        writeln!(table, "| {what} | {seen} | {reached} | {counted} |").unwrap();
    }
    let readme =
        std::fs::read_to_string(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md")).unwrap();
    assert!(readme.contains(&table), "README.md should have this table:\n{table}");
}
