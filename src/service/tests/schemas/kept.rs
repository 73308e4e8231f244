//! The schemas in the repository are those that the types make, and what `portcullis schema` prints.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use portcullis_service::cli::SchemaKind;
use portcullis_service::schema::text;
use serde_json::Value;

/// The kinds, with the file of each.
const KEPT: [(&str, SchemaKind, &str); 5] = [
    ("filter", SchemaKind::Filter, "schemas/filter.json"),
    ("service", SchemaKind::Service, "schemas/service.json"),
    ("rules", SchemaKind::Rules, "schemas/rules.json"),
    ("policy", SchemaKind::Policy, "schemas/policy.json"),
    ("kong", SchemaKind::Kong, "examples/kong/portcullis.meta.json"),
];

/// The root of the repository.
pub(crate) fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn the_schemas_in_the_repository_are_those_of_the_types() {
    let update = env::var_os("PORTCULLIS_UPDATE").is_some_and(|update| update == "1");
    for (name, kind, place) in KEPT {
        let file = repository().join(place);
        if update {
            fs::write(&file, text(kind)).unwrap();
        }
        let kept = fs::read_to_string(&file).unwrap_or_default();
        assert!(
            kept == text(kind),
            "{place} is not what `portcullis schema {name}` prints. If that is meant, run this test with \
             PORTCULLIS_UPDATE=1 and commit the file."
        );
    }
}

#[test]
fn the_command_prints_them_and_names_the_kinds_that_there_are() {
    let portcullis = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_portcullis"))
            .args(arguments)
            .output()
            .unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    for (name, kind, _) in KEPT {
        assert_eq!(
            portcullis(&["schema", name]),
            (Some(0), text(kind), String::new()),
            "{name}"
        );
    }
    let (code, out, err) = portcullis(&["schema", "envoy"]);
    assert_eq!((code, out.as_str()), (Some(2), ""));
    for (name, ..) in KEPT {
        assert!(err.contains(name), "{err}");
    }
}

#[test]
fn every_schema_is_one_and_describes_each_of_its_keys() {
    for (name, kind, _) in KEPT {
        let schema: Value = serde_json::from_str(&text(kind)).unwrap();
        let schema = if kind == SchemaKind::Kong {
            &schema["config_schema"]
        } else {
            assert_eq!(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
            assert_eq!(schema["$id"], format!("urn:portcullis:schema:{name}"));
            &schema
        };
        jsonschema::meta::validate(schema).unwrap_or_else(|error| panic!("{name}: {error}"));
        crate::tree::each(schema, &mut |node| {
            for (key, property) in node["properties"].as_object().into_iter().flatten() {
                // What an open choice holds is said by the choice.
                let is_described = property["description"].is_string() || key == "admit" || key == "gate";
                assert!(is_described, "{name}: {key} has no description");
            }
        });
    }
}

#[test]
fn kong_gets_what_draft_4_knows() {
    let meta: Value = serde_json::from_str(&text(SchemaKind::Kong)).unwrap();
    let schema = &meta["config_schema"];
    assert_eq!(schema["$schema"], "http://json-schema.org/draft-04/schema#");
    assert_eq!(meta.as_object().unwrap().len(), 1);
    crate::tree::each(schema, &mut |node| {
        for keyword in [
            "const",
            "$id",
            "$defs",
            "$ref",
            "propertyNames",
            "deprecated",
            "examples",
            "if",
        ] {
            assert!(node.get(keyword).is_none(), "{keyword} is not of draft 4: {node:#}");
        }
        for bound in ["exclusiveMinimum", "exclusiveMaximum"] {
            assert!(
                node.get(bound).is_none_or(Value::is_boolean),
                "{bound} is a flag in draft 4: {node:#}"
            );
        }
    });
}
