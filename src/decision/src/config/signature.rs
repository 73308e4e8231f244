//! `envelope.signature`: whose signatures an envelope needs. No fault holds a part of a secret, nor of what stands where an
//! id should be: somebody may have written the one in the place of the other.

use alloc::string::String;
use alloc::vec::Vec;
use core::ops::RangeInclusive;

use super::faults::Faults;
use super::section::Section;
use crate::json::Node;
use crate::signature::{LONGEST_KEY_ID, Secret, Signatures, is_key_id};

/// How long a signature holds unless configured, in seconds.
pub const DEFAULT_MAX_AGE_S: u64 = 60;
/// How long a signature may hold, in seconds.
pub const MAX_AGE_S: RangeInclusive<u64> = 1..=3_600;
/// Most keys: one for each edge, and twice that while they are replaced.
const MOST_KEYS: usize = 64;

pub(super) fn read_signatures(path: &str, node: &Node, faults: &mut Faults) -> Option<Signatures> {
    let mut section = Section::of(path, node, faults)?;
    let max_age_s = section.integer("max_age_s", MAX_AGE_S, faults);
    let keys_path = section.path("keys");
    let keys = section
        .required("keys", faults)
        .and_then(|node| read_keys(&keys_path, node, faults));
    section.finish(faults);
    Some(Signatures::new(keys?, max_age_s.unwrap_or(DEFAULT_MAX_AGE_S)))
}

fn read_keys(path: &str, node: &Node, faults: &mut Faults) -> Option<Vec<(String, Secret)>> {
    let Node::Object(entries) = node else {
        faults.add(path, alloc::format!("must be an object, is {}", node.kind()));
        return None;
    };
    if entries.is_empty() || entries.len() > MOST_KEYS {
        let count = entries.len();
        faults.add(path, alloc::format!("must have 1 to {MOST_KEYS} keys, has {count}"));
    }
    let mut keys: Vec<(String, Secret)> = Vec::new();
    for (at, (id, node)) in entries.iter().enumerate() {
        if !is_key_id(id) {
            faults.add(
                alloc::format!("{path}[{at}]"),
                alloc::format!(
                    "an id must be 1 to {LONGEST_KEY_ID} letters, digits, \".\", \"_\" or \"-\"; it is not shown"
                ),
            );
            continue;
        }
        let path = alloc::format!("{path}.{id}");
        if entries.iter().take(at).any(|(earlier, _)| earlier == id) {
            faults.add(path, "stands twice");
        } else if let Some(secret) = read_secret(&path, node, faults) {
            keys.push((id.clone(), secret));
        }
    }
    Some(keys)
}

fn read_secret(path: &str, node: &Node, faults: &mut Faults) -> Option<Secret> {
    let mut section = Section::of(path, node, faults)?;
    section.required("secret", faults);
    let secret = section.text("secret", faults).map(Secret::from_base64);
    let path = section.path("secret");
    section.finish(faults);
    secret?
        .map_err(|fault| faults.add(path, alloc::format!("{fault}")))
        .ok()
}

/// The fingerprint of a configuration with every secret taken out of the section under `path`.
pub(super) fn fingerprint_without_secrets(path: &[&str], text: &[u8]) -> String {
    let Ok(mut node) = Node::parse(text) else {
        return super::fingerprint(&[]);
    };
    for key in path
        .iter()
        .copied()
        .chain(["envelope", "signature", "keys"])
        .try_fold(&mut node, |node, key| node.get_mut(key))
        .into_iter()
        .flat_map(Node::values_mut)
    {
        // Whatever stands there: nothing but a secret has any business in it.
        *key = Node::Null;
    }
    if let Some(token) = node.get_mut("decision").and_then(|decision| decision.get_mut("token")) {
        *token = Node::Null;
    }
    let mut text = Vec::new();
    write(&node, &mut text);
    super::fingerprint(&text)
}

/// Tells every value from every other: what is long comes after its length.
fn write(node: &Node, to: &mut Vec<u8>) {
    // Of one width everywhere: a filter and a command line must say the same.
    let length = |length: usize| u64::try_from(length).unwrap_or(u64::MAX).to_le_bytes();
    let text = |text: &str, to: &mut Vec<u8>| {
        to.extend_from_slice(&length(text.len()));
        to.extend_from_slice(text.as_bytes());
    };
    match node {
        Node::Null => to.push(0),
        Node::Bool(value) => to.extend_from_slice(&[1, u8::from(*value)]),
        Node::Integer(value) => {
            to.push(2);
            to.extend_from_slice(&value.to_le_bytes());
        }
        Node::OtherNumber(value) => {
            to.push(3);
            to.extend_from_slice(&value.to_bits().to_le_bytes());
        }
        Node::Text(value) => {
            to.push(4);
            text(value, to);
        }
        Node::List(items) => {
            to.push(5);
            to.extend_from_slice(&length(items.len()));
            items.iter().for_each(|item| write(item, to));
        }
        Node::Object(entries) => {
            to.push(6);
            to.extend_from_slice(&length(entries.len()));
            for (name, value) in entries {
                text(name, to);
                write(value, to);
            }
        }
    }
}
