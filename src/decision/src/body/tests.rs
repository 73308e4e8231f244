//! Bodies and paths, by example and against serde_json.

use std::format;
use std::string::{String, ToString};
#[cfg(not(target_family = "wasm"))]
use std::vec::Vec;

#[cfg(not(target_family = "wasm"))]
use proptest::prelude::*;

use super::*;
#[cfg(not(target_family = "wasm"))]
use crate::json_scan::tests::{json, mutated_json, pieces};

fn read(body: &[u8]) -> Result<BodyFacts, BodyFault> {
    read_pieces(1 << 20, [body])
}

fn read_pieces<'a>(limit: u64, pieces: impl IntoIterator<Item = &'a [u8]>) -> Result<BodyFacts, BodyFault> {
    let mut reader = BodyReader::new(limit);
    for piece in pieces {
        reader.feed(piece)?;
        assert!(reader.carried_bytes() <= 1024);
    }
    reader.finish()
}

/// The model, or the code of the fault.
fn model_of(body: &str) -> Result<Option<String>, Code> {
    read(body.as_bytes()).map(|facts| facts.model).map_err(BodyFault::code)
}

fn named(model: &str) -> Result<Option<String>, Code> {
    Ok(Some(model.to_string()))
}

#[test]
fn the_model_is_the_top_level_key_alone() {
    assert_eq!(
        model_of(r#"{"messages":[{"model":"no"}],"model":"gpt-4o","x":{"model":"no"}}"#),
        named("gpt-4o")
    );
    assert_eq!(model_of(r#"{"x":"\"model\":\"no\""}"#), Ok(None));
}

#[test]
fn escapes_are_decoded_before_the_key_is_compared() {
    assert_eq!(model_of(r#"{"mod\u0065l":"gpt\u002d4o"}"#), named("gpt-4o"));
    assert_eq!(model_of(r#"{"mod\u0065l":"a","model":"b"}"#), Err(Code::ModelAmbiguous));
    assert_eq!(model_of(r#"{"model":"\ud83d\ude00ä"}"#), named("😀ä"));
}

#[test]
fn two_spellings_of_a_key_are_ambiguous() {
    for body in [
        r#"{"model":"a","model":"a"}"#,
        r#"{"model":null,"model":"a"}"#,
        r#"{"model":"a","Model":"b"}"#,
        r#"{"MODEL":"a"}"#,
        r#"{"m\u004fdel":"a"}"#,
        r#"{"model":"a","max_tokens":1,"max_tokens":2}"#,
        r#"{"model":"a","max_tokens":1,"Max_Tokens":2}"#,
        "{\"model\":\"a\",\"max_to\u{212A}ens\":2}",
        "{\"model\":\"a\",\"max_token\u{17F}\":2}",
        r#"{"model":"a","generationConfig":{},"generation_config":{}}"#,
        r#"{"generationConfig":{"maxOutputTokens":1,"max_output_tokens":2}}"#,
        r#"{"model":"a","stream_options":{"include_usage":true,"include_usage":false}}"#,
    ] {
        assert_eq!(model_of(body), Err(Code::ModelAmbiguous), "{body}");
    }
    assert_eq!(
        model_of(r#"{"model":"a","x":1,"x":2,"X":3}"#),
        named("a"),
        "keys that are not read may"
    );
}

#[test]
fn a_model_that_is_absent_null_or_empty_is_not_named() {
    for body in ["{}", r#"{"model":null}"#, r#"{"model":""}"#] {
        assert_eq!(model_of(body), Ok(None), "{body}");
    }
    assert_eq!(reconcile(None, None).map_err(BodyFault::code), Err(Code::ModelRequired));
}

#[test]
fn a_model_that_is_no_name_is_unreadable() {
    let long = |length: usize| format!(r#"{{"model":"{}"}}"#, "é".repeat(length));
    assert!(model_of(&long(128)).is_ok());
    assert_eq!(model_of(&long(129)), Err(Code::BodyUnreadable));
    for model in [
        "5",
        "true",
        "[\"a\"]",
        "{}",
        r#""a\u0000""#,
        r#""a\n""#,
        r#""\ud800""#,
        r#""a\udc00b""#,
    ] {
        assert_eq!(
            model_of(&format!("{{\"model\":{model}}}")),
            Err(Code::BodyUnreadable),
            "{model}"
        );
    }
}

#[test]
fn a_body_that_is_not_one_json_object_is_unreadable() {
    let bad: [&[u8]; 12] = [
        b"",
        b"  ",
        b"[]",
        b"[{\"model\":\"a\"}]",
        b"\"model\"",
        b"5",
        b"{\"model\":\"a\"",
        b"{\"model\":\"a\"}{}",
        b"\xEF\xBB\xBF{\"model\":\"a\"}",
        b"{\"model\":\"\xFF\"}",
        b"{\"x\":\"\xC3\"}",
        b"{\"x\":{\"\\ud800\":1}}",
    ];
    for body in bad {
        let code = read(body).map_err(BodyFault::code);
        assert_eq!(code, Err(Code::BodyUnreadable), "{:?}", String::from_utf8_lossy(body));
    }
    let deep = |levels: usize| format!("{{\"x\":{}{}}}", "[".repeat(levels), "]".repeat(levels));
    assert!(model_of(&deep(127)).is_ok());
    assert_eq!(model_of(&deep(128)), Err(Code::BodyUnreadable));
    assert_eq!(
        model_of(r#"{"model":"a","x":"\ud800"}"#),
        named("a"),
        "half a pair in other text passes"
    );
}

#[test]
fn a_body_over_the_limit_is_too_large_and_one_at_it_is_not() {
    let body = br#"{"model":"a"}"#;
    let length = body.len() as u64;
    assert!(read_pieces(length, [&body[..]]).is_ok());
    let fault = read_pieces(length - 1, [&body[..]]).unwrap_err();
    assert_eq!(
        (fault.code(), fault.to_string()),
        (Code::BodyTooLarge, "the body is longer than 12 bytes".into())
    );
    assert_eq!(read_pieces(length - 1, body.chunks(1)), Err(fault));
    assert_eq!(
        read_pieces(4, [&b"x}"[..], b"long enough"]).unwrap_err().code(),
        Code::BodyUnreadable,
        "first fault"
    );
}

#[test]
fn a_fault_is_told_early_and_stays() {
    let mut reader = BodyReader::new(100);
    let fault = reader.feed(br#"{"model":"a","model":"#).unwrap_err();
    assert_eq!(reader.feed(b"\"b\"}"), Err(fault));
    assert_eq!(reader.finish(), Err(fault));
}

#[test]
fn the_other_facts_are_read() {
    let body = br#"{"model":"m","stream":true,"stream_options":{"include_usage":true},"max_tokens":7,"n":2,
        "tools":[{"max_tokens":9}]}"#;
    let facts = read(body).unwrap();
    assert!(facts.stream && facts.include_usage);
    assert_eq!((facts.max_tokens, facts.answers), (Figure::Given(7), 2));
    assert_eq!(facts.input_bytes, body.len() as u64);
    for (text, stream) in [("false", false), ("null", false), ("1", true), ("\"true\"", true)] {
        let facts = read(format!("{{\"stream\":{text}}}").as_bytes()).unwrap();
        assert_eq!(facts.stream, stream, "{text}");
    }
    assert!(
        !read(br#"{"include_usage":true,"stream_options":{"include_usage":1}}"#)
            .unwrap()
            .include_usage
    );
}

#[test]
fn the_path_names_the_model_of_gemini_vertex_and_azure() {
    for (path, expected) in [
        ("/v1beta/models/gemini-2.5-pro:generateContent", Some("gemini-2.5-pro")),
        (
            "/v1beta/models/gemini-2.5-pro:streamGenerateContent?alt=sse",
            Some("gemini-2.5-pro"),
        ),
        (
            "//v1beta/%6dodels/gemini%2D2.5-pro%3AgenerateContent",
            Some("gemini-2.5-pro"),
        ),
        ("/v1beta/tunedModels/mine:generateContent", Some("tunedModels/mine")),
        (
            "/v1/projects/p/locations/l/publishers/anthropic/models/claude:rawPredict",
            Some("claude"),
        ),
        ("/v1/projects/p/locations/l/endpoints/7:predict", Some("endpoints/7")),
        (
            "/openai/deployments/my-gpt/chat/completions?api-version=1",
            Some("my-gpt"),
        ),
        ("/openai/deployments/my-gpt", None),
        ("/v1/chat/completions", None),
        ("/v1/models/gpt-4o", None),
        ("/v1/custom:verb", None),
    ] {
        assert_eq!(model_of_path(path), Ok(expected.map(ToString::to_string)), "{path}");
    }
    let long = format!("/v1/models/{}:x", "a".repeat(257));
    for path in [
        "/v1/models/a%2Fb:generateContent",
        "/v1/models/:generateContent",
        "/v1/models/%FF:x",
        "/%zz",
        &long,
    ] {
        assert_eq!(
            model_of_path(path).map_err(BodyFault::code),
            Err(Code::ModelAmbiguous),
            "{path}"
        );
    }
}

#[test]
fn a_path_and_a_body_must_name_the_same_model() {
    let both = |path: &str, body: &str| reconcile(Some(path.into()), Some(body.into())).map_err(BodyFault::code);
    assert_eq!(both("a", "a"), Ok("a".into()));
    assert_eq!(both("a", "models/a"), Ok("a".into()));
    assert_eq!(both("a", "publishers/google/models/a"), Ok("a".into()));
    for other in ["b", "A", "xa", "x/models/a", "models/b", "models/models/a"] {
        assert_eq!(both("a", other), Err(Code::ModelAmbiguous), "{other}");
    }
    assert_eq!(reconcile(Some("a".into()), None), Ok("a".into()));
    assert_eq!(reconcile(None, Some("b".into())), Ok("b".into()));
}

/// Every key and value of the root object, doubles included.
#[cfg(not(target_family = "wasm"))]
struct Entries(Vec<(String, serde_json::Value)>);

#[cfg(not(target_family = "wasm"))]
impl<'de> serde::Deserialize<'de> for Entries {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = Entries;
            fn expecting(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut access: A) -> Result<Entries, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = access.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(Visitor)
    }
}

#[cfg(not(target_family = "wasm"))]
proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn it_never_reads_another_model_than_serde_json(text in mutated_json()) {
        if let (Ok(facts), Ok(Entries(entries))) = (read(&text), serde_json::from_slice(&text)) {
            let models: Vec<_> = entries.iter().filter(|(key, _)| key.eq_ignore_ascii_case("model")).collect();
            prop_assert!(models.len() <= 1);
            let model = models.first().and_then(|(_, value)| value.as_str()).filter(|model| !model.is_empty());
            prop_assert_eq!(facts.model.as_deref(), model);
        }
    }

    #[test]
    fn every_object_that_names_one_model_is_read(mut value in json(), model in "[a-zA-Z0-9._:/-]{1,40}") {
        let Some(object) = value.as_object_mut() else { return Ok(()) };
        object.retain(|key, _| !key.eq_ignore_ascii_case("model"));
        object.insert("model".into(), model.clone().into());
        let facts = read(value.to_string().as_bytes()).unwrap();
        prop_assert_eq!(facts.model, Some(model));
    }

    #[test]
    fn every_chunking_reads_the_same(
        text in mutated_json(), cuts in proptest::collection::vec(any::<proptest::sample::Index>(), 0..8), limit in 0..200_u64
    ) {
        let whole = read_pieces(limit, [&text[..]]);
        prop_assert_eq!(&whole, &read_pieces(limit, pieces(&text, &cuts)));
        prop_assert_eq!(&whole, &read_pieces(limit, text.chunks(1)));
    }

    #[test]
    fn no_bytes_break_a_target(data in proptest::collection::vec(any::<u8>(), 0..200), text in mutated_json(), head: [u8; 2]) {
        crate::fuzz::fuzz_body(&data);
        crate::fuzz::fuzz_body(&[&head[..], &text].concat());
    }

    #[test]
    fn no_path_breaks_the_reader(path in any::<String>(), name in "[^/]{1,8}") {
        let _ = model_of_path(&path);
        let _ = model_of_path(&format!("/v1/models/{name}:x"));
    }
}
