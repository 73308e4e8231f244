//! The request body: which model it names, and what bounds its output. It is read as it arrives and never held, so what
//! was checked is what is forwarded.
//!
//! Read for a JSON body of OpenAI's chat, completions, responses and embeddings, of Anthropic's messages and of Gemini's
//! `generateContent`; Gemini's, Vertex's and Azure's path also names the model ([`model_of_path`]). A body is refused as
//! soon as two readers of it might come to different models or figures:
//!
//! - A key that is read stands twice in its object, or a key differs from it only in case (Go's JSON folds case), or both
//!   spellings of a Gemini field stand (protobuf's JSON takes `generationConfig` and `generation_config`): ambiguous.
//! - `model` is absent, `null` or `""`: it is not named here. It is required unless the path names it ([`reconcile`]).
//! - `model` is no string, longer than 256 bytes, has a control character or half a surrogate pair: unreadable.
//! - Not one JSON object in UTF-8 (empty, a byte order mark, something after it, a list, more than 128 levels, half a
//!   surrogate pair in any key): unreadable. Half a pair in another string is grammatical, and passes.
//! - Longer than the limit: too large, whatever it is. The first fault, in the order of the bytes, is the answer.
//!
//! Left out on purpose: the content type. A body that is not `application/json` (multipart uploads for example) must not
//! be fed here; whether it passes without a model is the caller's rule. A compressed body is unreadable.

use alloc::string::String;

use thiserror::Error;

use crate::class::Code;
use crate::hold::Figure;
use crate::json_scan::{Field, Found, MAX_TEXT, Scanner, Value};

pub use path::{model_of_path, reconcile};

mod path;
#[cfg(test)]
mod tests;

/// Why a request's model cannot be read without doubt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BodyFault {
    /// Neither path nor body names a model.
    #[error("the request names no model")]
    ModelRequired,
    /// A key that is read stands twice, in this or another spelling.
    #[error("the body's key `{0}` stands twice, or in another spelling")]
    AmbiguousKey(&'static str),
    /// Path and body name different models.
    #[error("the path and the body's `model` name different models")]
    PathAgainstBody,
    /// The path names a model in a way that servers may read differently.
    #[error("the path names a model in a way that can be read differently")]
    AmbiguousPath,
    /// The body is not what can be read; the text says what is wrong.
    #[error("the body {0}")]
    Unreadable(&'static str),
    /// The body is longer than this many bytes.
    #[error("the body is longer than {limit_bytes} bytes")]
    TooLarge {
        /// The limit.
        limit_bytes: u64,
    },
}

impl BodyFault {
    /// The reply's code.
    pub const fn code(self) -> Code {
        match self {
            Self::ModelRequired => Code::ModelRequired,
            Self::AmbiguousKey(_) | Self::PathAgainstBody | Self::AmbiguousPath => Code::ModelAmbiguous,
            Self::Unreadable(_) => Code::BodyUnreadable,
            Self::TooLarge { .. } => Code::BodyTooLarge,
        }
    }
}

/// What a body says.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BodyFacts {
    /// The model: 1 to 256 bytes without control characters, not trimmed or normalized.
    pub model: Option<String>,
    /// `max_tokens`.
    pub max_tokens: Figure,
    /// `max_completion_tokens`.
    pub max_completion_tokens: Figure,
    /// `max_output_tokens`.
    pub max_output_tokens: Figure,
    /// Gemini's `generationConfig.maxOutputTokens`.
    pub generation_max_output_tokens: Figure,
    /// Answers for each prompt: the largest of `n`, `best_of` and Gemini's `candidateCount`; 0 if none is usable.
    pub answers: u64,
    /// Elements of a `prompt` list that are prompts of their own; 0 for any other prompt.
    pub prompts: u64,
    /// A stream is asked for: `stream` is anything but absent, `null` or `false`.
    pub stream: bool,
    /// `stream_options.include_usage` is `true`.
    pub include_usage: bool,
    /// The length of the body.
    pub input_bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Key {
    Model,
    MaxTokens,
    MaxCompletionTokens,
    MaxOutputTokens,
    N,
    BestOf,
    Prompt,
    Stream,
    StreamOptions,
    IncludeUsage,
    GenerationConfig,
    GeminiMaxOutputTokens,
    CandidateCount,
}

const GENERATION_CONFIG: &[Field<Key>] = &[
    Field::leaf("maxOutputTokens", Key::GeminiMaxOutputTokens),
    Field::leaf("max_output_tokens", Key::GeminiMaxOutputTokens),
    Field::leaf("candidateCount", Key::CandidateCount),
    Field::leaf("candidate_count", Key::CandidateCount),
];

static FIELDS: [Field<Key>; 11] = [
    Field::leaf("model", Key::Model),
    Field::leaf("max_tokens", Key::MaxTokens),
    Field::leaf("max_completion_tokens", Key::MaxCompletionTokens),
    Field::leaf("max_output_tokens", Key::MaxOutputTokens),
    Field::leaf("n", Key::N),
    Field::leaf("best_of", Key::BestOf),
    Field::each("prompt", Key::Prompt, &[]),
    Field::leaf("stream", Key::Stream),
    Field::object(
        "stream_options",
        Key::StreamOptions,
        &[Field::leaf("include_usage", Key::IncludeUsage)],
    ),
    Field::object("generationConfig", Key::GenerationConfig, GENERATION_CONFIG),
    Field::object("generation_config", Key::GenerationConfig, GENERATION_CONFIG),
];

impl Key {
    const fn name(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::MaxTokens => "max_tokens",
            Self::MaxCompletionTokens => "max_completion_tokens",
            Self::MaxOutputTokens => "max_output_tokens",
            Self::N => "n",
            Self::BestOf => "best_of",
            Self::Prompt => "prompt",
            Self::Stream => "stream",
            Self::StreamOptions => "stream_options",
            Self::IncludeUsage => "stream_options.include_usage",
            Self::GenerationConfig => "generationConfig",
            Self::GeminiMaxOutputTokens => "generationConfig.maxOutputTokens",
            Self::CandidateCount => "generationConfig.candidateCount",
        }
    }
}

/// Reads one body, in pieces of any size. Memory: that of [`Scanner`] and one model name.
#[derive(Debug)]
pub struct BodyReader {
    limit_bytes: u64,
    scanner: Scanner<Key>,
    gathered: Gathered,
    fault: Option<BodyFault>,
}

/// What has been seen so far.
#[derive(Debug, Default)]
struct Gathered {
    facts: BodyFacts,
    /// A bit per key.
    seen: u32,
    in_prompt_list: bool,
    /// The root was an object, and has ended.
    is_object: bool,
    fault: Option<BodyFault>,
}

const NOT_JSON: BodyFault = BodyFault::Unreadable("is not one JSON object in UTF-8");

impl BodyReader {
    /// A reader that refuses more than `limit_bytes`.
    pub fn new(limit_bytes: u64) -> Self {
        Self {
            limit_bytes,
            scanner: Scanner::of_object(&FIELDS),
            gathered: Gathered::default(),
            fault: None,
        }
    }

    /// Reads the next piece.
    ///
    /// # Errors
    /// The fault of the body, as soon as it is known; the same from then on. Nothing more needs to be fed then.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), BodyFault> {
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        let read = self.read(bytes);
        self.fault = read.err();
        read
    }

    /// Ends the body.
    ///
    /// # Errors
    /// The first fault of the body.
    pub fn finish(mut self) -> Result<BodyFacts, BodyFault> {
        self.feed(&[])?;
        if self.gathered.facts.input_bytes == 0 {
            return Err(BodyFault::Unreadable("is empty"));
        }
        self.scanner.finish(&mut |_| {}).map_err(|_| NOT_JSON)?;
        if self.gathered.is_object {
            Ok(self.gathered.facts)
        } else {
            Err(NOT_JSON)
        }
    }

    /// Bytes of memory held beside the reader itself and the model's name.
    pub fn carried_bytes(&self) -> usize {
        self.scanner.carried_bytes()
    }

    fn read(&mut self, bytes: &[u8]) -> Result<(), BodyFault> {
        let facts = &mut self.gathered.facts;
        let left = self.limit_bytes.saturating_sub(facts.input_bytes);
        let fitting = usize::try_from(left).map_or(bytes.len(), |left| left.min(bytes.len()));
        // Faults are in the order of the bytes, however the body is cut: first those of the part that fits.
        let piece = bytes.get(..fitting).unwrap_or(bytes);
        facts.input_bytes = facts
            .input_bytes
            .saturating_add(u64::try_from(piece.len()).unwrap_or(u64::MAX));
        let gathered = &mut self.gathered;
        let scanned = self.scanner.feed(piece, &mut |found| gathered.take(found));
        if let Some(fault) = gathered.fault {
            return Err(fault);
        }
        scanned.map_err(|_| NOT_JSON)?;
        if fitting < bytes.len() {
            return Err(BodyFault::TooLarge {
                limit_bytes: self.limit_bytes,
            });
        }
        Ok(())
    }
}

impl Gathered {
    fn take(&mut self, found: Found<'_, Key>) {
        if self.fault.is_some() {
            return;
        }
        let taken = match found {
            Found::Key(key) => self.take_key(key),
            Found::FoldedKey(key) => Err(BodyFault::AmbiguousKey(key.name())),
            Found::Value(key, value) => self.take_value(key, value),
            Found::DocumentEnd => {
                self.is_object = true;
                Ok(())
            }
        };
        self.fault = taken.err();
    }

    fn take_key(&mut self, key: Key) -> Result<(), BodyFault> {
        let bit = 1 << (key as u32);
        if self.seen & bit != 0 {
            return Err(BodyFault::AmbiguousKey(key.name()));
        }
        self.seen |= bit;
        Ok(())
    }

    fn take_value(&mut self, key: Key, value: Value<'_>) -> Result<(), BodyFault> {
        let facts = &mut self.facts;
        match key {
            Key::Model => facts.model = model(value)?,
            Key::MaxTokens => facts.max_tokens = Figure::of(value),
            Key::MaxCompletionTokens => facts.max_completion_tokens = Figure::of(value),
            Key::MaxOutputTokens => facts.max_output_tokens = Figure::of(value),
            Key::GeminiMaxOutputTokens => facts.generation_max_output_tokens = Figure::of(value),
            Key::N | Key::BestOf | Key::CandidateCount => {
                if let Figure::Given(answers) = Figure::of(value) {
                    facts.answers = facts.answers.max(answers);
                }
            }
            // The list itself comes first, then its elements; token ids are no prompts of their own.
            Key::Prompt => match value {
                Value::Array if !self.in_prompt_list => self.in_prompt_list = true,
                Value::Text(_) | Value::LongText | Value::UnpairedText | Value::Array if self.in_prompt_list => {
                    facts.prompts = facts.prompts.saturating_add(1);
                }
                _ => {}
            },
            Key::Stream => facts.stream = !matches!(value, Value::Null | Value::Bool(false)),
            Key::IncludeUsage => facts.include_usage = value == Value::Bool(true),
            Key::StreamOptions | Key::GenerationConfig => {}
        }
        Ok(())
    }
}

fn model(value: Value<'_>) -> Result<Option<String>, BodyFault> {
    match value {
        Value::Null => Ok(None),
        Value::Text(name) if name.chars().any(char::is_control) => {
            Err(BodyFault::Unreadable("has a control character in `model`"))
        }
        Value::Text(name) => Ok((!name.is_empty()).then(|| name.into())),
        Value::LongText => {
            const { assert!(MAX_TEXT == 256, "the message names it") };
            Err(BodyFault::Unreadable("has a `model` of more than 256 bytes"))
        }
        Value::UnpairedText => Err(BodyFault::Unreadable("has half a surrogate pair in `model`")),
        _ => Err(BodyFault::Unreadable("has a `model` that is not a string")),
    }
}
