//! The project's own files against the schemas: rule files, faulty ones, and the examples.

use std::fs;
use std::path::{Path, PathBuf};

use jsonschema::Validator;
use portcullis_decision::config::{FileKind, FilterConfig, SHIPPED_RULES, schema};
use serde_json::Value;

use crate::kept::repository;

/// Faulty files whose keys, kinds, words and bounds are all in order: what is wrong is what they mean as a whole, or that a
/// key stands twice.
const FAULTY_IN_MEANING: [&str; 12] = [
    "capacity-after-contract",
    "capacity-without-envelope",
    "filter-policy-opened-in-production",
    "filter-policy-without-model",
    "gate-listed-twice",
    "key-stands-twice",
    "limiter-gates-apart",
    "metering-before-concurrency",
    "metering-before-launch-rate",
    "metering-gates-apart",
    "policy-after-charging-gate",
    "quota-without-metering",
];

fn validator(kind: FileKind) -> Validator {
    jsonschema::validator_for(&schema::of(kind)).unwrap()
}

fn read(file: &Path) -> Value {
    let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

/// The JSON files of a folder, named from the root of the repository.
fn json_files(folder: impl AsRef<Path>) -> Vec<PathBuf> {
    let entries = fs::read_dir(repository().join(folder)).unwrap();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    files
}

#[test]
fn every_shipped_rule_file_obeys_the_schema_and_is_known_to_it() {
    let (rules, filter) = (validator(FileKind::Rules), validator(FileKind::Filter));
    let files = json_files("rules");
    assert_eq!(files.len(), SHIPPED_RULES.len());
    for file in files {
        rules
            .validate(&read(&file))
            .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let named = serde_json::json!({"profile": "production", "rules": file.file_stem().unwrap().to_str(),
            "decision": {"upstream": "p"}});
        assert!(filter.is_valid(&named), "{named}");
    }
}

#[test]
fn a_faulty_file_is_refused_by_the_schema_unless_its_fault_is_one_of_meaning() {
    let (rules, filter) = (validator(FileKind::Rules), validator(FileKind::Filter));
    let mut in_meaning = Vec::new();
    for file in json_files("rules/invalid") {
        let name = file.file_stem().unwrap().to_str().unwrap().to_owned();
        let kind = if name.starts_with("filter-") { &filter } else { &rules };
        if kind.is_valid(&read(&file)) {
            in_meaning.push(name);
        }
    }
    assert_eq!(in_meaning, FAULTY_IN_MEANING);
}

#[test]
fn the_services_of_the_examples_obey_the_schema() {
    let service = validator(FileKind::Service);
    let mut count = 0;
    for example in fs::read_dir(repository().join("examples")).unwrap() {
        for file in json_files(example.unwrap().path()) {
            if !file.file_name().unwrap().to_str().unwrap().starts_with("service") {
                continue;
            }
            service
                .validate(&read(&file))
                .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
            count += 1;
        }
    }
    assert_eq!(count, 4, "a new one is counted, and a lost one noticed");
}

/// The blocks of JSON in a document.
fn blocks(text: &str) -> Vec<Value> {
    let parts = text.split("```json\n").skip(1);
    parts
        .map(|part| part.split("```").next().unwrap())
        .map(|block| serde_json::from_str(block).unwrap_or_else(|error| panic!("{error} in {block}")))
        .collect()
}

#[test]
fn the_configurations_in_the_readme_obey_the_schemas() {
    let text = fs::read_to_string(repository().join("README.md")).unwrap();
    let blocks = blocks(&text);
    let [filter, service] = &blocks[..] else {
        panic!("two configurations, not {}", blocks.len())
    };
    FilterConfig::parse(filter.to_string().as_bytes()).unwrap();
    validator(FileKind::Filter).validate(filter).unwrap();
    validator(FileKind::Service).validate(service).unwrap();
}
