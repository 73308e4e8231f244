//! A schema and the parser of its kind say the same: the same keys, the same words, the same bounds, the same defaults, and
//! the same judgement of every document that differs in one place from one that holds every key.

use std::collections::BTreeSet;

use portcullis_decision::config::schema::{self, Asked};
use serde_json::{Value, json};

use crate::complete::{Kind, kinds};
use crate::tree::{Step, each, nodes, places, steps, value, with, words};

/// What only a parser can find, since it takes more than one place, or more than JSON Schema: parts of its messages.
const MEANING: [&str; 8] = [
    "nothing fills it in",
    "say where spans go",
    "must be \"header\" or \"body\" while the gate \"model_policy\" is listed",
    "no plan of this file is named",
    "needs the gate \"metering\"",
    "must stand next to",
    "is listed twice",
    "must be \"reject\" while the gate \"capacity\" is listed",
];

/// What the parser has looked for in a document.
fn asked(kind: &Kind, document: &Value) -> Vec<Asked> {
    // A fault, since only faults carry the record.
    let faulty = with(document, &steps("not-a-key"), Some(json!(1)));
    let faults = (kind.parse)(&faulty).expect_err("a fault");
    assert_eq!(faults.iter().count(), 1, "{}: {faults}", kind.name);
    // Rules that are named stand elsewhere.
    let is_here = |asked: &&Asked| {
        let (Asked::Keys(path, _) | Asked::Words(path, _) | Asked::Figure(path, ..)) = asked;
        value(document, &steps(path)).is_some_and(|here| here.is_object() || !matches!(asked, Asked::Keys(..)))
    };
    faults.asked().iter().filter(is_here).cloned().collect()
}

#[test]
fn the_documents_that_hold_every_key_are_taken_by_both() {
    for kind in kinds() {
        let schema = jsonschema::validator_for(&schema::of(kind.kind)).unwrap();
        for document in &kind.documents {
            (kind.parse)(document).unwrap_or_else(|faults| panic!("{}: {faults}", kind.name));
            schema
                .validate(document)
                .unwrap_or_else(|error| panic!("{}: {error}", kind.name));
        }
    }
}

#[test]
fn a_schema_has_exactly_the_keys_that_its_parser_knows() {
    // Over all kinds: what is part of several files is written and read by the same code in each.
    let mut seen = BTreeSet::new();
    for kind in kinds() {
        let schema = schema::of(kind.kind);
        for document in &kind.documents {
            for asked in asked(&kind, document) {
                let Asked::Keys(path, keys) = asked else { continue };
                let found = nodes(&schema, &steps(&path), Some(document));
                let objects: Vec<_> = found
                    .into_iter()
                    .filter(|node| node["properties"].is_object())
                    .collect();
                assert_eq!(objects.len(), 1, "{}: one object at {path:?}: {objects:#?}", kind.name);
                seen.insert(objects[0].to_string());
                let has: BTreeSet<&str> = objects[0]["properties"]
                    .as_object()
                    .unwrap()
                    .keys()
                    .map(String::as_str)
                    .collect();
                let knows: BTreeSet<&str> = keys.into_iter().collect();
                // A gate without a dependency is told that it has no such key, by name; so is one who lets the service be
                // asked by Envoy itself.
                let refused: &[&str] = match path.as_str() {
                    "ext_authz" => &["leases", "pause"],
                    _ if knows.contains("burst") => &["when_unavailable"],
                    _ => &[],
                };
                let knows = knows.into_iter().filter(|key| !refused.contains(key)).collect();
                assert_eq!(has, knows, "{}: the keys of {path:?}", kind.name);
                assert_eq!(objects[0]["additionalProperties"], false, "{}: {path:?}", kind.name);
            }
        }
        each(&schema, &mut |node| {
            let is_read = node["properties"].is_null() || seen.contains(&node.to_string());
            assert!(is_read, "{}: no parser reads {node:#}", kind.name);
        });
    }
}

#[test]
fn a_schema_has_exactly_the_words_and_the_bounds_of_its_parser() {
    // Over all kinds: what is part of several files is written and read by the same code in each.
    let mut seen = BTreeSet::new();
    for kind in kinds() {
        let schema = schema::of(kind.kind);
        for document in &kind.documents {
            for asked in asked(&kind, document) {
                match asked {
                    Asked::Keys(..) => {}
                    Asked::Words(path, mut known) => {
                        known.sort();
                        assert_eq!(
                            words(&schema, &steps(&path)),
                            known,
                            "{}: the words of {path:?}",
                            kind.name
                        );
                    }
                    Asked::Figure(path, from, to) => {
                        let found = nodes(&schema, &steps(&path), Some(document));
                        let node = found
                            .first()
                            .unwrap_or_else(|| panic!("{}: nothing at {path:?}", kind.name));
                        assert_eq!(
                            (&node["minimum"], &node["maximum"]),
                            (&json!(from), &json!(to)),
                            "{}: the bounds of {path:?}",
                            kind.name
                        );
                        seen.insert(node.to_string());
                    }
                }
            }
        }
        each(&schema, &mut |node| {
            let is_read = node["maximum"].is_null() || seen.contains(&node.to_string());
            assert!(is_read, "{}: no parser reads the figure {node:#}", kind.name);
        });
    }
}

#[test]
fn a_schema_and_its_parser_judge_every_document_alike_that_differs_in_one_place() {
    for kind in kinds() {
        let schema = jsonschema::validator_for(&schema::of(kind.kind)).unwrap();
        for document in &kind.documents {
            let bounds = asked(&kind, document).into_iter().filter_map(|asked| match asked {
                Asked::Figure(path, from, to) => {
                    Some((steps(&path), [from.checked_sub(1), Some(from), Some(to), Some(to + 1)]))
                }
                _ => None,
            });
            let mut changed: Vec<Value> = Vec::new();
            for (place, values) in bounds {
                let values = values.into_iter().flatten();
                changed.extend(values.map(|value| with(document, &place, Some(json!(value)))));
            }
            for place in places(document) {
                for other in [
                    json!(null),
                    json!(true),
                    json!("x"),
                    json!(""),
                    json!(1.5),
                    json!(-1),
                    json!(0),
                    json!([]),
                    json!([0]),
                    json!({}),
                    json!({"x": 0}),
                ] {
                    changed.push(with(document, &place, Some(other)));
                }
                if value(document, &place).unwrap().is_object() {
                    let unknown = [&place[..], &[Step::Key("not-a-key".to_owned())]].concat();
                    changed.push(with(document, &unknown, Some(json!(1))));
                }
                changed.push(with(document, &place, None));
            }
            assert!(changed.len() > 100, "{}: {}", kind.name, changed.len());
            for changed in changed {
                let parsed = (kind.parse)(&changed);
                match (schema.is_valid(&changed), parsed) {
                    (true, Ok(_)) | (false, Err(_)) => {}
                    (true, Err(faults)) => assert!(
                        faults
                            .iter()
                            .all(|fault| MEANING.iter().any(|part| fault.message.contains(part))),
                        "{}: only the parser refuses {changed:#}\n{faults}",
                        kind.name
                    ),
                    (false, Ok(_)) => panic!(
                        "{}: only the schema refuses {changed:#}\n{}",
                        kind.name,
                        schema.validate(&changed).unwrap_err()
                    ),
                }
            }
        }
    }
}

#[test]
fn a_key_that_is_left_out_has_the_default_that_the_schema_names() {
    // Over all kinds: what is part of several files is written and read by the same code in each.
    let mut seen = BTreeSet::new();
    for kind in kinds() {
        let schema = schema::of(kind.kind);
        for document in &kind.documents {
            for place in places(document) {
                for node in nodes(&schema, &place, Some(document)) {
                    let Some(default) = node.get("default") else { continue };
                    let Ok(without) = (kind.parse)(&with(document, &place, None)) else {
                        continue;
                    };
                    let named = (kind.parse)(&with(document, &place, Some(default.clone()))).unwrap();
                    assert_eq!(without, named, "{}: the default of {place:?}", kind.name);
                    let other = (kind.parse)(document).unwrap();
                    assert_ne!(
                        named, other,
                        "{}: {place:?} has its default, which shows nothing",
                        kind.name
                    );
                    seen.insert(node.to_string());
                }
            }
        }
        each(&schema, &mut |node| {
            let is_shown = node.get("default").is_none() || seen.contains(&node.to_string());
            assert!(is_shown, "{}: nothing shows the default of {node:#}", kind.name);
        });
    }
}
