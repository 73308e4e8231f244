//! What a request asks the stand-in provider for: which interface, how long an answer, with what reporting of usage.
//!
//! Left out on purpose: everything of the interfaces that changes no figure (tools, images, sampling).

use serde_json::Value;

/// Output of an answer that nothing limits, in tokens.
pub(super) const NATURAL_LENGTH: u64 = 16;
/// As many as OpenAI gives; it refuses more, which this stand-in does not.
const MOST_ANSWERS: u64 = 128;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Interface {
    Chat,
    Responses,
    Embeddings,
    Messages,
    Gemini,
}

impl Interface {
    /// By the path without its query.
    pub(super) fn of(path: &str) -> Option<Self> {
        match path {
            "/v1/chat/completions" => Some(Self::Chat),
            "/v1/responses" => Some(Self::Responses),
            "/v1/embeddings" => Some(Self::Embeddings),
            "/v1/messages" => Some(Self::Messages),
            _ => path.starts_with("/v1beta/models/").then_some(Self::Gemini),
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Asked {
    pub(super) interface: Interface,
    pub(super) model: String,
    pub(super) streams: bool,
    pub(super) includes_usage: bool,
    pub(super) in_base64: bool,
    /// Each answer's output.
    pub(super) length: u64,
    /// Something else than the answer's own end ended it.
    pub(super) is_cut_short: bool,
    pub(super) answers: u64,
    pub(super) input: u64,
}

impl Asked {
    /// None of a body that is no JSON object: a provider answers that with 400.
    pub(super) fn of(interface: Interface, path: &str, body: &[u8]) -> Option<Self> {
        let body: Value = serde_json::from_slice(body).ok()?;
        body.as_object()?;
        let last = path.split('?').next().and_then(|path| path.rsplit('/').next());
        let (in_path, verb) = last.and_then(|last| last.split_once(':')).unwrap_or_default();
        let is_gemini = interface == Interface::Gemini;
        let model = if is_gemini {
            in_path
        } else {
            body["model"].as_str().unwrap_or_default()
        };
        let limits = [
            &body["max_tokens"],
            &body["max_completion_tokens"],
            &body["max_output_tokens"],
            &body["generationConfig"]["maxOutputTokens"],
        ];
        let limit = limits.into_iter().filter_map(Value::as_u64).max();
        let length = limit.unwrap_or(NATURAL_LENGTH).min(NATURAL_LENGTH);
        let texts = [
            "messages",
            "input",
            "contents",
            "instructions",
            "system",
            "prompt",
            "systemInstruction",
        ];
        Some(Self {
            interface,
            model: model.to_owned(),
            streams: body["stream"] == true || verb == "streamGenerateContent",
            includes_usage: body["stream_options"]["include_usage"] == true,
            in_base64: body["encoding_format"] == "base64",
            length: if interface == Interface::Embeddings { 0 } else { length },
            is_cut_short: limit.is_some_and(|limit| limit < NATURAL_LENGTH),
            answers: body["n"].as_u64().unwrap_or(1).clamp(1, MOST_ANSWERS),
            input: texts.iter().map(|key| words(&body[*key])).sum(),
        })
    }

    /// The output of all answers.
    pub(super) fn output(&self) -> u64 {
        self.length * self.answers
    }
}

/// One token for each word of every text, whatever it is part of.
fn words(value: &Value) -> u64 {
    match value {
        Value::String(text) => text.split_whitespace().count() as u64,
        Value::Array(elements) => elements.iter().map(words).sum(),
        Value::Object(fields) => fields
            .iter()
            .filter(|(key, _)| !matches!(key.as_str(), "role" | "type"))
            .map(|(_, value)| words(value))
            .sum(),
        _ => 0,
    }
}
