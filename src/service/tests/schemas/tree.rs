//! Ways through a schema, and the node of a place in a document. The schemas are trees: they have no references.

use serde_json::Value;

/// Calls `look` with every schema of a tree.
pub(crate) fn each<'a>(schema: &'a Value, look: &mut impl FnMut(&'a Value)) {
    look(schema);
    if let Some(properties) = schema["properties"].as_object() {
        properties.values().for_each(|property| each(property, look));
    }
    for keyword in ["items", "additionalProperties"] {
        if let Some(inner) = schema.get(keyword).filter(|inner| inner.is_object()) {
            each(inner, look);
        }
    }
    alternatives(schema).for_each(|one| each(one, look));
}

fn alternatives(schema: &Value) -> impl Iterator<Item = &Value> {
    ["oneOf", "anyOf"]
        .into_iter()
        .filter_map(|keyword| schema[keyword].as_array())
        .flatten()
}

/// A schema and the alternatives in it, however deep.
fn expanded(schema: &Value) -> Vec<&Value> {
    let mut list = vec![schema];
    list.extend(alternatives(schema).flat_map(expanded));
    list
}

/// One step of a path such as `gates[1].gate`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    Key(String),
    Item(usize),
}

/// The steps of a path as faults and records name it.
pub(crate) fn steps(path: &str) -> Vec<Step> {
    let mut steps = Vec::new();
    for part in path.split('.').filter(|part| !part.is_empty()) {
        let mut pieces = part.split('[');
        steps.push(Step::Key(pieces.next().unwrap().to_owned()));
        steps.extend(pieces.map(|piece| Step::Item(piece.trim_end_matches(']').parse().unwrap())));
    }
    steps
}

/// What a document holds there.
pub(crate) fn value<'a>(document: &'a Value, steps: &[Step]) -> Option<&'a Value> {
    steps.iter().try_fold(document, |value, step| match step {
        Step::Key(key) => value.get(key),
        Step::Item(at) => value.get(at),
    })
}

/// The schemas of a place. With a document only the alternatives that what it holds there obeys, else all of them.
pub(crate) fn nodes<'a>(schema: &'a Value, steps: &[Step], document: Option<&Value>) -> Vec<&'a Value> {
    let obeyed = |list: Vec<&'a Value>, value: Option<&Value>| -> Vec<&'a Value> {
        let all = list.into_iter().flat_map(expanded);
        all.filter(|node| value.is_none_or(|value| jsonschema::is_valid(node, value)))
            .collect()
    };
    let mut list = obeyed(vec![schema], document);
    for at in 0..steps.len() {
        let inner = list.into_iter().filter_map(|node| match &steps[at] {
            Step::Key(key) => node["properties"]
                .get(key)
                .or_else(|| node.get("additionalProperties").filter(|inner| inner.is_object())),
            Step::Item(_) => node.get("items"),
        });
        let value = document.and_then(|document| value(document, &steps[..=at]));
        list = obeyed(inner.collect(), value);
    }
    list
}

/// The words among which a place has to choose.
pub(crate) fn words(schema: &Value, steps: &[Step]) -> Vec<String> {
    let mut words: Vec<String> = nodes(schema, steps, None)
        .into_iter()
        .flat_map(|node| {
            let listed = node["enum"].as_array().into_iter().flatten();
            listed.chain(node.get("const")).filter_map(Value::as_str)
        })
        .map(str::to_owned)
        .collect();
    words.sort();
    words.dedup();
    words
}

/// Every place of a document below its root.
pub(crate) fn places(document: &Value) -> Vec<Vec<Step>> {
    fn below(value: &Value, path: &[Step], list: &mut Vec<Vec<Step>>) {
        let keys = value.as_object().into_iter().flatten();
        let keyed = keys.map(|(key, value)| (Step::Key(key.clone()), value));
        let items = value.as_array().into_iter().flatten().enumerate();
        for (step, value) in keyed.chain(items.map(|(at, value)| (Step::Item(at), value))) {
            let path = [path, &[step]].concat();
            list.push(path.clone());
            below(value, &path, list);
        }
    }
    let mut list = Vec::new();
    below(document, &[], &mut list);
    list
}

/// The document with something else in a place, or without it.
pub(crate) fn with(document: &Value, steps: &[Step], value: Option<Value>) -> Value {
    let mut changed = document.clone();
    let (last, before) = steps.split_last().unwrap();
    let parent = before.iter().fold(&mut changed, |value, step| match step {
        Step::Key(key) => &mut value[key],
        Step::Item(at) => &mut value[at],
    });
    match (last, value) {
        (Step::Key(key), Some(value)) => parent[key] = value,
        (Step::Item(at), Some(value)) => parent[at] = value,
        (Step::Key(key), None) => drop(parent.as_object_mut().unwrap().remove(key)),
        (Step::Item(at), None) => drop(parent.as_array_mut().unwrap().remove(*at)),
    }
    changed
}
