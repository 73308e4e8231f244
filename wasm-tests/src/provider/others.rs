//! The answers of Anthropic's messages and of Gemini's `generateContent`, as documents and as events.

use serde_json::{Value, json};

use super::answer::{Event, named, token, whole};
use super::asked::Asked;

fn stop_reason(asked: &Asked) -> &'static str {
    if asked.is_cut_short { "max_tokens" } else { "end_turn" }
}

fn message_usage(asked: &Asked, output: u64) -> Value {
    json!({
        "input_tokens": asked.input, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
        "output_tokens": output, "service_tier": "standard"
    })
}

pub(super) fn message(asked: &Asked) -> Value {
    json!({
        "id": "msg_1", "type": "message", "role": "assistant", "model": asked.model,
        "content": [{"type": "text", "text": whole(asked)}],
        "stop_reason": stop_reason(asked), "stop_sequence": null, "usage": message_usage(asked, asked.output())
    })
}

/// Input comes with the first event, together with the output so far; the output with the last but one.
pub(super) fn message_events(asked: &Asked) -> Vec<Event> {
    let mut started = message(asked);
    started["content"] = json!([]);
    started["stop_reason"] = Value::Null;
    started["usage"] = message_usage(asked, 1);
    let mut events = Vec::new();
    let mut event = |kind: &str, mut fields: Value| {
        fields["type"] = json!(kind);
        events.push(named(kind, &fields));
    };
    event("message_start", json!({"message": started}));
    event(
        "content_block_start",
        json!({"index": 0, "content_block": {"type": "text", "text": ""}}),
    );
    event("ping", json!({}));
    for at in 0..asked.length {
        event(
            "content_block_delta",
            json!({"index": 0, "delta": {"type": "text_delta", "text": token(at)}}),
        );
    }
    event("content_block_stop", json!({"index": 0}));
    event(
        "message_delta",
        json!({
            "delta": {"stop_reason": stop_reason(asked), "stop_sequence": null},
            "usage": {"output_tokens": asked.output()}
        }),
    );
    event("message_stop", json!({}));
    events
}

fn gemini_part(asked: &Asked, text: &str, so_far: u64, is_last: bool) -> Value {
    let mut candidate = json!({"content": {"parts": [{"text": text}], "role": "model"}, "index": 0});
    if is_last {
        candidate["finishReason"] = json!(if asked.is_cut_short { "MAX_TOKENS" } else { "STOP" });
    }
    json!({
        "candidates": [candidate],
        "usageMetadata": {"promptTokenCount": asked.input, "candidatesTokenCount": so_far,
            "totalTokenCount": asked.input + so_far},
        "modelVersion": asked.model, "responseId": "r1"
    })
}

pub(super) fn generated(asked: &Asked) -> Value {
    gemini_part(asked, &whole(asked), asked.output(), true)
}

/// Each document has the totals so far.
pub(super) fn generated_parts(asked: &Asked) -> Vec<Value> {
    (0..asked.length)
        .map(|at| gemini_part(asked, token(at), at + 1, at + 1 == asked.length))
        .collect()
}

/// Its lines end as those of HTTP do.
pub(super) fn generated_events(asked: &Asked) -> Vec<Event> {
    let parts = generated_parts(asked);
    parts.iter().map(|part| format!("data: {part}\r\n\r\n")).collect()
}

/// Without `alt=sse`: one list, an element at a time.
pub(super) fn generated_list(asked: &Asked) -> Vec<Event> {
    let parts = generated_parts(asked);
    let last = parts.len().saturating_sub(1);
    let element = |(at, part): (usize, &Value)| {
        let (before, after) = (if at == 0 { "[" } else { ",\r\n" }, if at == last { "]" } else { "" });
        format!("{before}{part}{after}")
    };
    parts.iter().enumerate().map(element).collect()
}
