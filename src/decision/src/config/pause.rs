//! `pause` in the filter's configuration: which headers are kept from the upstream while a request is held.
//!
//! Left out on purpose: headers by which a request is routed or framed. Hosts have chosen where it goes before the filter
//! sees it, and some do not send a request whose framing was changed.

use alloc::string::String;
use alloc::vec::Vec;

use super::faults::{Faults, shown};
use super::section::Section;
use crate::json::Node;

/// Longest name of a header, in bytes.
const LONGEST_NAME: usize = 64;

/// Headers that say where a request goes, where it ends, or what its connection does.
const NOT_TO_BE_WITHHELD: [&str; 10] = [
    "connection",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// The lower-case names of `pause.withhold`, in their order; none if the key is absent.
pub(super) fn read_pause(section: &mut Section<'_>, prefix: &str, faults: &mut Faults) -> Vec<String> {
    let Some(node) = section.get("pause") else {
        return Vec::new();
    };
    let Some(mut pause) = Section::of("pause", node, faults) else {
        return Vec::new();
    };
    let names = match pause.get("withhold") {
        None => Vec::new(),
        Some(Node::List(items)) => {
            if items.is_empty() {
                faults.add(
                    "pause.withhold",
                    "an empty list withholds nothing: leave the key out where that is meant",
                );
            }
            read_names(items, prefix, faults)
        }
        Some(other) => {
            faults.add(
                "pause.withhold",
                alloc::format!("must be an array, is {}", other.kind()),
            );
            Vec::new()
        }
    };
    pause.finish(faults);
    names
}

fn read_names(items: &[Node], prefix: &str, faults: &mut Faults) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for (at, item) in items.iter().enumerate() {
        let path = alloc::format!("pause.withhold[{at}]");
        let is = shown(item);
        match item {
            Node::Text(name) if !is_header_name(name) => {
                faults.add(
                    path,
                    alloc::format!("must be a header name of 1 to {LONGEST_NAME} lower-case characters, is {is}"),
                );
            }
            Node::Text(name) if NOT_TO_BE_WITHHELD.contains(&name.as_str()) => {
                faults.add(
                    path,
                    alloc::format!("{is} says where a request goes or how it is framed, and can't be withheld"),
                );
            }
            Node::Text(name) if name.starts_with(prefix) => {
                faults.add(
                    path,
                    alloc::format!("{is} belongs to the envelope: envelope.strip keeps that from the upstream"),
                );
            }
            Node::Text(name) if names.contains(name) => faults.add(path, alloc::format!("{is} stands twice")),
            Node::Text(name) => names.push(name.clone()),
            other => faults.add(path, alloc::format!("must be a string, is {}", other.kind())),
        }
    }
    names
}

/// A token of HTTP, without capitals.
fn is_header_name(name: &str) -> bool {
    let is_of_token =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"!#$%&'*+-.^_`|~".contains(&byte);
    (1..=LONGEST_NAME).contains(&name.len()) && name.bytes().all(is_of_token)
}
