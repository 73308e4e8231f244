//! OpenAI's answers: chat completions, responses and embeddings, as documents and as events.

use serde_json::{Value, json};

use super::answer::{Event, data, named, token, whole};
use super::asked::Asked;

const CREATED: u64 = 1_760_000_000;

fn chat_usage(asked: &Asked) -> Value {
    json!({
        "prompt_tokens": asked.input, "completion_tokens": asked.output(),
        "total_tokens": asked.input + asked.output(),
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0}
    })
}

fn finish_reason(asked: &Asked) -> &'static str {
    if asked.is_cut_short { "length" } else { "stop" }
}

pub(super) fn chat(asked: &Asked) -> Value {
    let choice = |index| {
        json!({
            "index": index, "logprobs": null, "finish_reason": finish_reason(asked),
            "message": {"role": "assistant", "content": whole(asked), "refusal": null, "annotations": []}
        })
    };
    json!({
        "id": "chatcmpl-1", "object": "chat.completion", "created": CREATED, "model": asked.model,
        "choices": (0..asked.answers).map(choice).collect::<Value>(),
        "usage": chat_usage(asked), "service_tier": "default"
    })
}

/// Usage only where `stream_options.include_usage` asks for it: `null` in each event, and then one without choices.
pub(super) fn chat_events(asked: &Asked) -> Vec<Event> {
    let chunk = |choices: Value| {
        let mut chunk = json!({
            "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": CREATED, "model": asked.model,
            "choices": choices
        });
        if asked.includes_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    };
    let delta = |index: u64, delta: Value, reason: Value| {
        data(&chunk(
            json!([{"index": index, "delta": delta, "logprobs": null, "finish_reason": reason}]),
        ))
    };
    let mut events = Vec::new();
    for index in 0..asked.answers {
        events.push(delta(
            index,
            json!({"role": "assistant", "content": "", "refusal": null}),
            Value::Null,
        ));
    }
    for at in 0..asked.length {
        for index in 0..asked.answers {
            events.push(delta(index, json!({"content": token(at)}), Value::Null));
        }
    }
    for index in 0..asked.answers {
        events.push(delta(index, json!({}), json!(finish_reason(asked))));
    }
    if asked.includes_usage {
        let mut last = chunk(json!([]));
        last["usage"] = chat_usage(asked);
        events.push(data(&last));
    }
    events.push("data: [DONE]\n\n".to_owned());
    events
}

fn message(asked: &Asked, status: &str) -> Value {
    json!({
        "type": "message", "id": "msg_1", "status": status, "role": "assistant",
        "content": [{"type": "output_text", "text": whole(asked), "annotations": [], "logprobs": []}]
    })
}

pub(super) fn response(asked: &Asked) -> Value {
    let (status, details) = if asked.is_cut_short {
        ("incomplete", json!({"reason": "max_output_tokens"}))
    } else {
        ("completed", Value::Null)
    };
    response_as(asked, status, details, json!([message(asked, status)]), true)
}

fn response_as(asked: &Asked, status: &str, incomplete: Value, output: Value, is_over: bool) -> Value {
    let usage = json!({
        "input_tokens": asked.input, "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": asked.output(), "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": asked.input + asked.output()
    });
    json!({
        "id": "resp_1", "object": "response", "created_at": CREATED, "status": status, "error": null,
        "incomplete_details": incomplete, "instructions": null, "model": asked.model, "output": output,
        "parallel_tool_calls": true, "previous_response_id": null, "temperature": 1.0, "tool_choice": "auto",
        "tools": [], "top_p": 1.0, "metadata": {}, "usage": if is_over { usage } else { Value::Null }
    })
}

pub(super) fn response_events(asked: &Asked) -> Vec<Event> {
    let mut events = Vec::new();
    let mut event = |kind: &str, mut fields: Value| {
        fields["type"] = json!(kind);
        fields["sequence_number"] = json!(events.len());
        events.push(named(kind, &fields));
    };
    let started = response_as(asked, "in_progress", Value::Null, json!([]), false);
    event("response.created", json!({"response": started}));
    event("response.in_progress", json!({"response": started}));
    let empty = json!({"type": "message", "id": "msg_1", "status": "in_progress", "role": "assistant", "content": []});
    event("response.output_item.added", json!({"output_index": 0, "item": empty}));
    let at = |mut fields: Value| {
        fields["item_id"] = json!("msg_1");
        fields["output_index"] = json!(0);
        fields["content_index"] = json!(0);
        fields
    };
    let part = |text: &str| json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []});
    event("response.content_part.added", at(json!({"part": part("")})));
    for index in 0..asked.length {
        event(
            "response.output_text.delta",
            at(json!({"delta": token(index), "logprobs": []})),
        );
    }
    event(
        "response.output_text.done",
        at(json!({"text": whole(asked), "logprobs": []})),
    );
    event("response.content_part.done", at(json!({"part": part(&whole(asked))})));
    let over = response(asked);
    event(
        "response.output_item.done",
        json!({"output_index": 0, "item": over["output"][0]}),
    );
    let kind = format!("response.{}", over["status"].as_str().unwrap_or_default());
    event(&kind, json!({"response": over}));
    events
}

pub(super) fn embeddings(asked: &Asked) -> Value {
    // 0.5 and -0.5, as floats of four bytes in the order that the interface uses.
    let vector = if asked.in_base64 {
        json!("AAAAPwAAAL8=")
    } else {
        json!([0.5, -0.5])
    };
    json!({
        "object": "list", "model": asked.model,
        "data": [{"object": "embedding", "index": 0, "embedding": vector}],
        "usage": {"prompt_tokens": asked.input, "total_tokens": asked.input}
    })
}
