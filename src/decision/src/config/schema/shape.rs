//! What is done to every schema after the types have made it, and how one becomes a schema of draft 4.

use alloc::borrow::ToOwned;
use alloc::string::String;
use alloc::vec::Vec;

use serde_json::{Map, Value, json};

/// Removes what nobody needs: formats such as `uint64`, which bounds say better, and a `null` that stands for "no default".
pub(super) fn tidy(schema: &mut Value) {
    each_object(schema, &mut |object| {
        object.remove("format");
        if object.get("default") == Some(&Value::Null) {
            object.remove("default");
        }
        unwrap_descriptions(object);
    });
}

/// Doc comments are wrapped at a column; a description is one line.
fn unwrap_descriptions(object: &mut Map<String, Value>) {
    if let Some(Value::String(text)) = object.get_mut("description") {
        *text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    }
}

/// Draft 4 has no `const`, no `$id`, no `propertyNames` and no `deprecated`. Alternatives that are all words become one
/// `enum`, and names of keys become patterns.
pub(super) fn to_draft_4(schema: &mut Value) {
    each_object(schema, &mut |object| {
        object.remove("$id");
        object.remove("deprecated");
        if let Some(word) = object.remove("const") {
            object.insert("enum".to_owned(), json!([word]));
        }
        if let Some(pattern) = object
            .remove("propertyNames")
            .and_then(|mut names| names.get_mut("pattern").map(Value::take))
            && let (Some(pattern), Some(value)) = (pattern.as_str(), object.remove("additionalProperties"))
        {
            object.insert("patternProperties".to_owned(), json!({ pattern: value }));
            object.insert("additionalProperties".to_owned(), json!(false));
        }
        let words = object.get("oneOf").and_then(Value::as_array).and_then(|alternatives| {
            let words = alternatives
                .iter()
                .map(|one| one.get("const").filter(|word| word.is_string()));
            words.map(|word| word.cloned()).collect::<Option<Vec<Value>>>()
        });
        if let Some(words) = words {
            object.remove("oneOf");
            object.insert("type".to_owned(), json!("string"));
            object.insert("enum".to_owned(), Value::Array(words));
        }
    });
    if let Some(root) = schema.as_object_mut() {
        root.insert("$schema".to_owned(), json!("http://json-schema.org/draft-04/schema#"));
    }
}

/// Calls `change` on each schema object of a tree, outer ones first. The names under `properties` are not schemas.
fn each_object(schema: &mut Value, change: &mut impl FnMut(&mut Map<String, Value>)) {
    match schema {
        Value::Object(object) => {
            change(object);
            for (keyword, value) in object {
                match (keyword.as_str(), value) {
                    ("properties" | "patternProperties", Value::Object(properties)) => {
                        properties
                            .values_mut()
                            .for_each(|property| each_object(property, change));
                    }
                    ("default" | "enum" | "const" | "required" | "examples", _) => {}
                    (_, value) => each_object(value, change),
                }
            }
        }
        Value::Array(list) => list.iter_mut().for_each(|one| each_object(one, change)),
        _ => {}
    }
}
