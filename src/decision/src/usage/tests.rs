//! Responses of each dialect, laid out as the providers' references show them, at every cut.

use std::format;
use std::string::String;
use std::vec::Vec;

#[cfg(not(target_family = "wasm"))]
use proptest::prelude::*;

use super::*;
#[cfg(not(target_family = "wasm"))]
use crate::json_scan::tests::{mutated_json, pieces};

fn read<'a>(format: Format, pieces: impl IntoIterator<Item = &'a [u8]>) -> Option<Usage> {
    let mut reader = UsageReader::new(format);
    for piece in pieces {
        reader.feed(piece);
        assert!(reader.carried_bytes() <= CARRY_LIMIT_BYTES);
    }
    reader.finish()
}

fn json(text: &str) -> Option<Usage> {
    read(Format::Json, [text.as_bytes()])
}

fn stream(text: &str) -> Option<Usage> {
    read(Format::EventStream, [text.as_bytes()])
}

#[allow(clippy::unnecessary_wraps, reason = "compared with what a reader returns")]
fn usage(input: u64, cached: impl Into<Option<u64>>, output: u64) -> Option<Usage> {
    Some(Usage {
        input: Some(input),
        cached_input: cached.into(),
        output: Some(output),
        is_complete: true,
    })
}

const CHAT: &str = r#"{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"gpt-4o","choices":[{"index":0,"message":{"role":"assistant","content":"{\"usage\":{\"prompt_tokens\":999}} 😀"},"finish_reason":"stop","usage":{"prompt_tokens":7}}],
"usage":{"prompt_tokens":19,"completion_tokens":10,"total_tokens":29,"prompt_tokens_details":{"cached_tokens":8,"audio_tokens":0},"completion_tokens_details":{"reasoning_tokens":4,"cached_tokens":99}},"system_fingerprint":"fp"}"#;

const CHAT_STREAM: &str = r#": OPENROUTER PROCESSING

data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}],"usage":null}

data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"a 😀 \"usage\":{\"prompt_tokens\":1}\n\ndata: {}"},"finish_reason":null}],"usage":null}

data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"usage":null}

data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[],"usage":{"prompt_tokens":19,"completion_tokens":10,"total_tokens":29,"prompt_tokens_details":{"cached_tokens":8}}}

data: [DONE]

"#;

const RESPONSE: &str = r#"{"id":"resp_1","object":"response","status":"completed","output":[{"type":"message","content":[{"type":"output_text","text":"𝄞","usage":{"input_tokens":5}}]}],"usage":{"input_tokens":36,"input_tokens_details":{"cached_tokens":4},"output_tokens":87,"output_tokens_details":{"reasoning_tokens":64},"total_tokens":123}}"#;

const RESPONSE_STREAM: &str = r#"event: response.created
data: {"type":"response.created","sequence_number":0,"response":{"id":"resp_1","status":"in_progress","output":[],"usage":null}}

event: response.output_text.delta
data: {"type":"response.output_text.delta","delta":"𝄞 {\"usage\":{\"output_tokens\":3}}"}

event: response.completed
data: {"type":"response.completed","response":{"id":"resp_1","status":"completed","output":[{"usage":{"input_tokens":1}}],"usage":{"input_tokens":36,"input_tokens_details":{"cached_tokens":4},"output_tokens":87,"total_tokens":123}},"usage":{"input_tokens":1}}

"#;

const MESSAGE: &str = r#"{"id":"msg_1","type":"message","role":"assistant","content":[{"type":"tool_use","input":{"😀":1,"usage":{"input_tokens":4444}}}],"stop_reason":"tool_use","usage":{"input_tokens":25,"cache_creation_input_tokens":100,"cache_read_input_tokens":1000,"cache_creation":{"ephemeral_5m_input_tokens":100},"output_tokens":15,"server_tool_use":{"web_search_requests":1}}}"#;

const MESSAGE_STREAM: &str = r#"event: message_start
data: {"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant","content":[],"usage":{"input_tokens":25,"cache_creation_input_tokens":100,"cache_read_input_tokens":1000,"output_tokens":1}}}

event: content_block_start
data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}

event: ping
data: {"type": "ping"}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"😀 usage"},"message":{"usage":{"input_tokens":7}}}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":9}}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"input_tokens":null,"output_tokens":15}}

event: message_stop
data: {"type":"message_stop"}

"#;

const GEMINI: &str = r#"{"candidates":[{"content":{"parts":[{"text":"x😀"}],"role":"model"},"finishReason":"STOP","index":0,"usageMetadata":{"promptTokenCount":1}}],"usageMetadata":{"promptTokenCount":10,"candidatesTokenCount":5,"thoughtsTokenCount":3,"cachedContentTokenCount":6,"toolUsePromptTokenCount":2,"totalTokenCount":20},"modelVersion":"gemini-2.5-pro"}"#;

const GEMINI_STREAM: &str = r#"data: {"candidates":[{"content":{"parts":[{"text":"😀"}],"role":"model"},"index":0}],"usageMetadata":{"promptTokenCount":10,"candidatesTokenCount":1,"totalTokenCount":11}}

data: {"candidates":[{"content":{"parts":[{"text":"b"}],"role":"model"},"index":0}],"usageMetadata":{"promptTokenCount":10,"candidatesTokenCount":3,"thoughtsTokenCount":3,"totalTokenCount":16}}

data: {"candidates":[{"content":{"parts":[{"text":"."}],"role":"model"},"finishReason":"STOP","index":0}],"usageMetadata":{"promptTokenCount":10,"candidatesTokenCount":5,"thoughtsTokenCount":3,"cachedContentTokenCount":6,"toolUsePromptTokenCount":2,"totalTokenCount":20}}

"#;

/// Each response with the usage that it reports.
fn responses() -> Vec<(Format, String, Option<Usage>)> {
    let gemini_list = format!(
        "[{}\n]\n",
        GEMINI_STREAM.replace("\n\ndata: ", "\n,\r\n").replace("data: ", "")
    );
    let mut responses: Vec<_> = [
        (CHAT, usage(19, 8, 10)),
        (RESPONSE, usage(36, 4, 87)),
        (MESSAGE, usage(1125, 1000, 15)),
        (GEMINI, usage(12, 6, 8)),
        (gemini_list.as_str(), usage(12, 6, 8)),
        (
            r#"{"object":"list","data":[{"embedding":[0.1,-2e-3]}],"usage":{"prompt_tokens":8,"total_tokens":8}}"#,
            usage(8, None, 0),
        ),
    ]
    .map(|(text, expected)| (Format::Json, String::from(text), expected))
    .into();
    for (text, expected) in [
        (CHAT_STREAM, usage(19, 8, 10)),
        (RESPONSE_STREAM, usage(36, 4, 87)),
        (MESSAGE_STREAM, usage(1125, 1000, 15)),
        (GEMINI_STREAM, usage(12, 6, 8)),
    ] {
        for text in [
            String::from(text),
            text.replace('\n', "\r\n"),
            text.replace('\n', "\r"),
            // Without the last newlines, without the spaces, with a mark, and with each event over several lines.
            text.trim_end().into(),
            text.trim_end().replace('\n', "\r\n"),
            text.replace("data: ", "data:"),
            format!("\u{FEFF}{text}"),
            text.replace("data: {", "id: 7\ndata: {\nretry: 5\ndata\ndata: ")
                .replace("\",\"", "\",\r\ndata:   \""),
        ] {
            responses.push((Format::EventStream, text, expected));
        }
    }
    responses
}

#[test]
fn each_dialect_reports_its_usage() {
    for (format, text, expected) in responses() {
        assert_eq!(read(format, [text.as_bytes()]), expected, "{text}");
    }
}

#[test]
fn the_usage_is_the_same_wherever_the_response_is_cut_in_two() {
    for text in [
        CHAT,
        RESPONSE,
        MESSAGE,
        GEMINI,
        CHAT_STREAM,
        RESPONSE_STREAM,
        MESSAGE_STREAM,
        GEMINI_STREAM,
    ] {
        assert!(
            text.chars().any(|c| c.len_utf8() == 4),
            "no cut is inside a character of four bytes: {text}"
        );
    }
    for (format, text, expected) in responses() {
        for at in 0..=text.len() {
            let (head, tail) = text.as_bytes().split_at(at);
            assert_eq!(read(format, [head, tail]), expected, "cut at {at}: {text}");
        }
    }
}

#[test]
fn the_usage_is_the_same_byte_by_byte() {
    for (format, text, expected) in responses() {
        assert_eq!(read(format, text.as_bytes().chunks(1)), expected, "{text}");
        assert_eq!(read(format, text.as_bytes().chunks(3)), expected, "{text}");
    }
}

#[test]
fn running_totals_are_not_summed_up() {
    let events = r#"data: {"choices":[{"index":0}],"usage":{"prompt_tokens":4,"completion_tokens":1}}

data: {"choices":[{"index":0}],"usage":{"prompt_tokens":4,"completion_tokens":2}}

"#;
    let partial = |output| {
        usage(4, None, output).map(|usage| Usage {
            is_complete: false,
            ..usage
        })
    };
    assert_eq!(stream(events), partial(2));
    assert_eq!(stream(&format!("{events}data: [DONE]\n\n")), usage(4, None, 2));
    assert_eq!(stream(&format!("{events}data:  [DONE] \n\n")), usage(4, None, 2));
    for other in ["[DONE]x", "[DONE", "x[DONE]", "[ DONE]"] {
        assert_eq!(stream(&format!("{events}data: {other}\n\n")), partial(2), "{other}");
    }
    assert_eq!(stream(events.split_once("\n\n").unwrap().0), partial(1));
}

#[test]
fn a_response_that_is_cut_off_reports_what_has_passed() {
    let (head, _) = MESSAGE_STREAM.split_once("event: message_delta").unwrap();
    let expected = usage(1125, 1000, 1).map(|usage| Usage {
        is_complete: false,
        ..usage
    });
    assert_eq!(stream(head), expected);
    let (head, _) = CHAT_STREAM.split_once("\"completion_tokens\"").unwrap();
    assert_eq!(stream(head), None, "a document that isn't whole says nothing");
    assert_eq!(json(&CHAT[..CHAT.len() - 1]), None);
    for length in 0..MESSAGE_STREAM.trim_end().len() {
        let usage = read(Format::EventStream, [&MESSAGE_STREAM.as_bytes()[..length]]);
        assert!(usage.is_none_or(|usage| !usage.is_complete), "cut off at {length}");
    }
}

#[test]
fn figures_that_are_no_counts_are_unknown() {
    for figure in [
        "-1",
        "1.5",
        "1.0",
        "1e3",
        "9007199254740992",
        "1e999",
        "\"5\"",
        "null",
        "true",
        "[5]",
        "{}",
        "-0",
    ] {
        let read = json(&format!(
            r#"{{"usage":{{"prompt_tokens":{figure},"completion_tokens":3}}}}"#
        ))
        .unwrap();
        assert_eq!(
            (read.input, read.output, read.is_complete),
            (None, Some(3), false),
            "{figure}"
        );
        let read = json(&format!(r#"{{"usage":{{"input_tokens":3,"output_tokens":{figure}}}}}"#)).unwrap();
        assert_eq!(
            (read.input, read.output, read.is_complete),
            (Some(3), None, false),
            "{figure}"
        );
        let read = json(&format!(
            r#"{{"usageMetadata":{{"promptTokenCount":3,"candidatesTokenCount":{figure}}}}}"#
        ));
        assert_eq!(read.unwrap().output, None, "{figure}");
    }
    let largest = (1 << 53) - 1;
    let text = format!(r#"{{"usage":{{"prompt_tokens":{largest},"completion_tokens":0}}}}"#);
    assert_eq!(json(&text), usage(largest, None, 0));
    let text = format!(r#"{{"usage":{{"input_tokens":{largest},"cache_read_input_tokens":9,"output_tokens":0}}}}"#);
    assert_eq!(json(&text), usage(largest, 9, 0), "a sum stops at the largest figure");
}

#[test]
fn a_later_statement_makes_a_figure_unknown_and_silence_does_not() {
    let after = |figure: &str| {
        let delta = format!(r#"data: {{"type":"message_delta","usage":{{"output_tokens":{figure}}}}}"#);
        stream(&format!("{}\n\n{delta}\n\n", MESSAGE_STREAM.trim_end()))
            .unwrap()
            .output
    };
    assert_eq!([after("-1"), after("null"), after("20")], [None, Some(15), Some(20)]);
}

#[test]
fn cached_input_is_a_part_of_the_input() {
    assert_eq!(
        json(r#"{"usage":{"prompt_tokens":5,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":50}}}"#),
        usage(5, 5, 1)
    );
    // As gateways speak chat completions for Anthropic: the cache is counted in already.
    assert_eq!(
        json(r#"{"usage":{"prompt_tokens":50,"completion_tokens":1,"cache_read_input_tokens":40}}"#),
        usage(50, 40, 1)
    );
    let read = json(r#"{"usage":{"cache_read_input_tokens":40,"output_tokens":1}}"#).unwrap();
    assert_eq!((read.input, read.cached_input), (None, None));
}

#[test]
fn a_response_without_usage_is_unknown() {
    for text in [
        "",
        "{}",
        "not json",
        r#"{"error":{"message":"no","usage":{"prompt_tokens":1}}}"#,
        r#"{"usage":[{"prompt_tokens":1,"completion_tokens":1}]}"#,
        r#"{"usage":"{\"prompt_tokens\":1}"}"#,
        r#"{"message":{"usage":{"input_tokens":1}},"response":{"usage":{"input_tokens":1}}}"#,
        r#"{"type":"response.completed","usage":{"input_tokens":1}}"#,
        "{\"usage\":{\"prompt_tokens\":1},\"x\":\"\u{1}\"}",
    ] {
        assert_eq!(json(text), None, "{text}");
        assert_eq!(stream(&format!("data: {text}\n\ndata: [DONE]\n\n")), None, "{text}");
    }
    assert_eq!(
        stream("event: {\"usage\":{\"prompt_tokens\":1}}\n\n:data: {}\n\ndatax: {}\n\n"),
        None
    );
}

#[test]
fn an_event_that_is_not_json_does_not_hide_the_others() {
    let events = "data: {\"broken\n\ndata: \u{FFFD}\n\ndata: [1,2\n\n";
    assert_eq!(stream(&format!("{events}{CHAT_STREAM}{events}")), usage(19, 8, 10));
}

#[test]
fn a_huge_line_is_read_without_being_held() {
    let mut reader = UsageReader::new(Format::EventStream);
    reader.feed(b"data: {\"choices\":[{\"delta\":{\"content\":\"");
    let piece = "𝄞 text ".repeat(8192);
    // Ten megabytes here; nothing depends on the number of turns.
    for _ in 0..100 {
        reader.feed(piece.as_bytes());
        assert!(reader.carried_bytes() <= CARRY_LIMIT_BYTES);
    }
    reader.feed(b"\"}}],\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":2}}\n\ndata: [DONE]");
    assert_eq!(reader.finish(), usage(1, None, 2));
    let text = format!(
        r#"{{"type":"{piece}","usage":{{"prompt_tokens":{}}}}}"#,
        "9".repeat(100_000)
    );
    assert_eq!(read(Format::Json, text.as_bytes().chunks(997)), None);
}

#[test]
fn only_readable_responses_have_a_format() {
    for (content_type, encoding, expected) in [
        (Some("application/json"), None, Some(Format::Json)),
        (
            Some("Application/JSON; charset=utf-8"),
            Some("identity"),
            Some(Format::Json),
        ),
        (Some("application/problem+json"), None, Some(Format::Json)),
        (
            Some(" text/event-stream;charset=utf-8"),
            Some(""),
            Some(Format::EventStream),
        ),
        (Some("application/json"), Some("gzip"), None),
        (Some("text/event-stream"), Some("br"), None),
        (Some("application/octet-stream"), None, None),
        (Some("é+json"), None, Some(Format::Json)),
        (Some("json"), None, None),
        (Some(""), None, None),
        (None, None, None),
    ] {
        assert_eq!(
            Format::of_headers(content_type, encoding),
            expected,
            "{content_type:?} {encoding:?}"
        );
    }
}

#[cfg(not(target_family = "wasm"))]
proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_chunking_reads_the_same(
        which in any::<proptest::sample::Index>(),
        cuts in proptest::collection::vec(any::<proptest::sample::Index>(), 0..20),
    ) {
        let responses = responses();
        let (format, text, expected) = which.get(&responses);
        prop_assert_eq!(&read(*format, pieces(text.as_bytes(), &cuts)), expected);
    }

    #[test]
    fn every_chunking_of_a_damaged_response_reads_the_same(
        which in any::<proptest::sample::Index>(),
        edits in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..4),
        cuts in proptest::collection::vec(any::<proptest::sample::Index>(), 0..8),
    ) {
        let responses = responses();
        let (format, text, _) = which.get(&responses);
        let mut text = text.clone().into_bytes();
        for (at, byte) in edits {
            *at.get_mut(&mut text) = byte;
        }
        let whole = read(*format, [&text[..]]);
        prop_assert_eq!(&whole, &read(*format, pieces(&text, &cuts)));
        prop_assert_eq!(&whole, &read(*format, text.chunks(1)));
    }

    #[test]
    fn no_bytes_break_a_target(data in proptest::collection::vec(any::<u8>(), 0..200), text in mutated_json(), cut: u8) {
        crate::fuzz::fuzz_usage(&data);
        crate::fuzz::fuzz_usage(&[&[0, cut][..], &text].concat());
        crate::fuzz::fuzz_usage(&[&[1, cut][..], b"data: ", &text, b"\r\n\r\ndata: [DONE]"].concat());
    }
}
