//! The case table against the pure crate, natively and on wasm32-unknown-unknown in Node.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail by panicking")]

mod table;

#[cfg_attr(not(target_arch = "wasm32"), test)]
#[cfg_attr(target_arch = "wasm32", wasm_bindgen_test::wasm_bindgen_test)]
fn every_case_of_the_table_is_answered_as_it_says() {
    let wrong: Vec<String> = table::cases()
        .iter()
        .filter_map(|case| table::run(case).err())
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
