//! The test vectors of docs/envelope-signature.md, which other languages are held to as well.

use std::string::String;
use std::vec::Vec;

use serde::Deserialize;
#[cfg(target_arch = "wasm32")]
use wasm_bindgen_test::wasm_bindgen_test as test;

use super::*;

const DOCUMENT: &str = include_str!("../../../../../docs/envelope-signature.md");

#[derive(Deserialize)]
struct Vector {
    what: String,
    key: String,
    seconds: u64,
    secret: String,
    method: String,
    path: String,
    prefix: String,
    headers: Vec<(String, String)>,
    signature: String,
}

fn vectors() -> Vec<Vector> {
    let (_, section) = DOCUMENT.split_once("## Test vectors").unwrap();
    let (_, block) = section.split_once("```json").unwrap();
    let (block, _) = block.split_once("```").unwrap();
    serde_json::from_str(block).unwrap()
}

impl Vector {
    fn with<T>(&self, headers: &[(String, String)], f: impl FnOnce(Request<'_>) -> T) -> T {
        let headers: Vec<(&[u8], &[u8])> = headers.iter().map(|(n, v)| (n.as_bytes(), v.as_bytes())).collect();
        f(Request {
            method: self.method.as_bytes(),
            path: self.path.as_bytes(),
            headers: &headers,
        })
    }
}

#[test]
fn each_vector_is_what_we_sign_and_what_we_trust() {
    let vectors = vectors();
    assert_eq!(vectors.len(), 4);
    for vector in vectors {
        let secret = Secret::from_base64(&vector.secret).unwrap();
        let signed = vector.with(&vector.headers, |request| {
            sign(&vector.prefix, request, &vector.key, &secret, vector.seconds).unwrap()
        });
        assert_eq!(signed, vector.signature, "{}", vector.what);
        let signatures = Signatures::new(std::vec![(vector.key.clone(), secret)], 60);
        let mut headers = vector.headers.clone();
        headers.push((vector.prefix.clone() + NAME, vector.signature.clone()));
        let judged = vector.with(&headers, |request| {
            signatures
                .check(&vector.prefix, request, || Some(vector.seconds))
                .map(|_| ())
        });
        assert_eq!(judged, Ok(()), "{}", vector.what);
    }
}

#[test]
fn the_message_that_the_document_shows_is_that_of_its_first_vector() {
    let vector = &vectors()[0];
    let message = vector.with(&vector.headers, |request| {
        message(&vector.prefix, request, &vector.key, vector.seconds).unwrap()
    });
    let line = std::format!("\n{}\n", String::from_utf8(message).unwrap());
    assert!(DOCUMENT.contains(&line), "{line}");
    assert!(DOCUMENT.contains(&std::format!("\nx-admission-signature: {}\n", vector.signature)));
}
