//! JSON Schemas of the configuration files, for editors, for authors of custom resources, and for Kong.
//!
//! They say what a file looks like: keys, kinds, words, bounds, defaults. The parsers beside this module decide, and what
//! they read is recorded ([`Asked`]), so that a test can hold every key, word and bound of a schema against them. Left out
//! on purpose: what a file means as a whole, such as the order of gates or what a profile forbids, and what a JSON Schema
//! cannot say, such as a key that stands twice. `portcullis check` says both.

mod filter;
mod policy;
mod rules;
mod service;
mod shape;

use alloc::borrow::ToOwned;
use alloc::string::String;
use alloc::vec::Vec;
use core::ops::RangeInclusive;

use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema};
use serde_json::{Value, json};

use super::{Faults, FileKind};

/// One thing that a parser has looked for, with the path of its place in the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked {
    /// An object's keys: there are no others.
    Keys(String, Vec<&'static str>),
    /// One of these words.
    Words(String, Vec<String>),
    /// An integer within these bounds.
    Figure(String, u64, u64),
}

impl Asked {
    pub(super) fn keys(path: &str, known: &[&'static str]) -> Self {
        Self::Keys(path.to_owned(), known.to_vec())
    }

    pub(super) fn words(path: &str, words: &[&str]) -> Self {
        Self::Words(path.to_owned(), words.iter().map(|word| (*word).to_owned()).collect())
    }

    pub(super) fn figure(path: &str, range: &RangeInclusive<u64>) -> Self {
        Self::Figure(path.to_owned(), *range.start(), *range.end())
    }
}

impl Faults {
    /// What the parser has looked for in the text that has these faults.
    pub fn asked(&self) -> &[Asked] {
        &self.asked
    }
}

/// The schema of a kind of file, in draft 2020-12. It is one tree without references.
pub fn of(kind: FileKind) -> Value {
    match kind {
        FileKind::Rules => whole::<rules::RulesFile>("rules"),
        FileKind::Filter => whole::<filter::FilterFile>("filter"),
        FileKind::Service => whole::<service::ServiceFile>("service"),
        FileKind::Policy => whole::<policy::PolicyText>("policy"),
    }
}

/// What Kong reads beside the module (`portcullis.meta.json`): the filter's schema in draft 4, the only one that it knows.
pub fn kong() -> Value {
    let mut schema = of(FileKind::Filter);
    shape::to_draft_4(&mut schema);
    json!({ "config_schema": schema })
}

fn whole<T: JsonSchema>(name: &str) -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true);
    let schema: Schema = settings.into_generator().into_root_schema_for::<T>();
    let mut schema = schema.to_value();
    shape::tidy(&mut schema);
    if let Some(root) = schema.as_object_mut() {
        root.insert("$id".to_owned(), json!(alloc::format!("urn:portcullis:schema:{name}")));
    }
    schema
}

/// A default that is a number.
const fn figure<const N: u64>() -> u64 {
    N
}
