//! What the places of a document mean, and how the statements of a response add up to one usage.

use super::Usage;
use crate::json_scan::{Field, Found, Value};
use crate::limits::LARGEST_LIMIT;

/// The places that are looked at.
#[derive(Debug, Clone, Copy)]
pub(super) enum Place {
    /// An event's kind.
    Type,
    /// A container that only leads to others.
    Way,
    /// The object with the figures.
    Usage(Origin),
    Figure(Figure),
    /// OpenAI's answers: none of them in the event that only reports usage.
    Choices,
    /// Why a Gemini answer ended.
    FinishReason,
}

/// Where a usage object stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Origin {
    #[default]
    Root,
    /// Anthropic's `message_start`.
    Message,
    /// OpenAI's `response.*` events.
    Response,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Figure {
    Prompt,
    Completion,
    Input,
    Output,
    Total,
    Cached,
    CacheRead,
    CacheCreation,
    GeminiPrompt,
    GeminiToolUse,
    GeminiCandidates,
    GeminiThoughts,
    GeminiCached,
    GeminiTotal,
}

const fn figure(key: &'static str, figure: Figure) -> Field<Place> {
    Field::leaf(key, Place::Figure(figure))
}

const DETAILS: &[Field<Place>] = &[figure("cached_tokens", Figure::Cached)];

const USAGE: &[Field<Place>] = &[
    figure("prompt_tokens", Figure::Prompt),
    figure("completion_tokens", Figure::Completion),
    figure("input_tokens", Figure::Input),
    figure("output_tokens", Figure::Output),
    figure("total_tokens", Figure::Total),
    Field::object("prompt_tokens_details", Place::Way, DETAILS),
    Field::object("input_tokens_details", Place::Way, DETAILS),
    figure("cache_read_input_tokens", Figure::CacheRead),
    figure("cache_creation_input_tokens", Figure::CacheCreation),
];

const GEMINI_USAGE: &[Field<Place>] = &[
    figure("promptTokenCount", Figure::GeminiPrompt),
    figure("toolUsePromptTokenCount", Figure::GeminiToolUse),
    figure("candidatesTokenCount", Figure::GeminiCandidates),
    figure("thoughtsTokenCount", Figure::GeminiThoughts),
    figure("cachedContentTokenCount", Figure::GeminiCached),
    figure("totalTokenCount", Figure::GeminiTotal),
];

const fn usage(origin: Origin) -> Field<Place> {
    Field::object("usage", Place::Usage(origin), USAGE)
}

pub(super) const PLACES: &[Field<Place>] = &[
    Field::leaf("type", Place::Type),
    usage(Origin::Root),
    Field::object("message", Place::Way, &[usage(Origin::Message)]),
    Field::object("response", Place::Way, &[usage(Origin::Response)]),
    Field::object("usageMetadata", Place::Usage(Origin::Root), GEMINI_USAGE),
    Field::each("choices", Place::Choices, &[]),
    Field::each(
        "candidates",
        Place::Way,
        &[Field::leaf("finishReason", Place::FinishReason)],
    ),
];

/// What has been said of one figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Statement {
    #[default]
    None,
    Known(u64),
    /// Something that is no count of tokens.
    Unknown,
}

impl Statement {
    fn of(value: Value<'_>) -> Self {
        match value {
            Value::Null => Self::None,
            Value::Number(digits) => digits
                .parse()
                .ok()
                .filter(|figure| *figure <= LARGEST_LIMIT)
                .map_or(Self::Unknown, Self::Known),
            _ => Self::Unknown,
        }
    }

    /// The first of the two that says anything.
    const fn or(self, other: Self) -> Self {
        if matches!(self, Self::None) { other } else { self }
    }

    /// A sum in which what isn't stated is 0.
    const fn plus(self, other: Self) -> Self {
        match (self, other) {
            (Self::Known(a), Self::Known(b)) => {
                let sum = a.saturating_add(b);
                Self::Known(if sum < LARGEST_LIMIT { sum } else { LARGEST_LIMIT })
            }
            (Self::Unknown, _) | (_, Self::Unknown) => Self::Unknown,
            (stated, Self::None) => stated,
            (Self::None, stated) => stated,
        }
    }

    /// A total less a part of it; says nothing unless both are known.
    const fn less(self, part: Self) -> Self {
        match (self, part) {
            (Self::Known(total), Self::Known(part)) => Self::Known(total.saturating_sub(part)),
            _ => Self::None,
        }
    }

    const fn known(self) -> Option<u64> {
        match self {
            Self::Known(figure) => Some(figure),
            Self::None | Self::Unknown => None,
        }
    }
}

/// One statement per figure.
#[derive(Debug, Clone, Copy, Default)]
struct Statements([Statement; 14]);

impl Statements {
    fn get(&self, figure: Figure) -> Statement {
        self.0.get(figure as usize).copied().unwrap_or_default()
    }

    fn set(&mut self, figure: Figure, statement: Statement) {
        if let Some(place) = self.0.get_mut(figure as usize) {
            *place = statement;
        }
    }

    /// Takes over what a later document says.
    fn update(&mut self, later: &Self) {
        for (earlier, later) in self.0.iter_mut().zip(&later.0) {
            *earlier = later.or(*earlier);
        }
    }

    fn input(&self) -> Statement {
        let [prompt, input] = [Figure::Prompt, Figure::Input].map(|figure| self.get(figure));
        let apart = self.get(Figure::CacheRead).plus(self.get(Figure::CacheCreation));
        let input = match input {
            // Without the input itself its cached parts are no sum.
            Statement::None => Statement::None,
            input => input.plus(apart),
        };
        // Gateways that speak chat completions for Anthropic count the cache in, and still name it.
        prompt.or(input).or(self.gemini_input())
    }

    fn gemini_input(&self) -> Statement {
        match self.get(Figure::GeminiPrompt) {
            Statement::None => Statement::None,
            prompt => prompt.plus(self.get(Figure::GeminiToolUse)),
        }
    }

    fn cached(&self) -> Statement {
        let [read, cached, gemini] =
            [Figure::CacheRead, Figure::Cached, Figure::GeminiCached].map(|figure| self.get(figure));
        match self.get(Figure::Prompt) {
            Statement::None => read.or(cached).or(gemini),
            _ => cached.or(read),
        }
    }

    fn output(&self) -> Statement {
        let stated = self.get(Figure::Completion).or(self.get(Figure::Output));
        let total = self.get(Figure::Total).less(self.input());
        let gemini = match self.get(Figure::GeminiCandidates) {
            Statement::None => self.get(Figure::GeminiTotal).less(self.gemini_input()),
            candidates => candidates.plus(self.get(Figure::GeminiThoughts)),
        };
        stated.or(total).or(gemini)
    }
}

/// What an event is, as far as it matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Kind {
    #[default]
    Other,
    MessageStart,
    MessageStop,
    Response,
    LastResponse,
}

impl Kind {
    fn of(name: &str) -> Self {
        match name {
            "message_start" => Self::MessageStart,
            "message_stop" => Self::MessageStop,
            "response.completed" | "response.incomplete" | "response.failed" => Self::LastResponse,
            _ if name.starts_with("response.") => Self::Response,
            _ => Self::Other,
        }
    }
}

/// One document, while it is read. Its kind may come after its figures, so they wait until it is whole.
#[derive(Debug, Default)]
pub(super) struct Document {
    kind: Kind,
    /// Where the usage object stands whose figures are being read.
    origin: Origin,
    root: Statements,
    message: Statements,
    response: Statements,
    has_usage: bool,
    choices: Option<u32>,
    is_finished: bool,
}

impl Document {
    pub(super) fn take(&mut self, found: Found<'_, Place>, tally: &mut Tally) {
        match found {
            Found::Value(place, value) => self.take_value(place, value),
            Found::DocumentEnd => tally.add(&core::mem::take(self)),
            Found::Key(_) | Found::FoldedKey(_) => {}
        }
    }

    fn take_value(&mut self, place: Place, value: Value<'_>) {
        match (place, value) {
            (Place::Type, Value::Text(name)) => self.kind = Kind::of(name),
            (Place::Usage(origin), Value::Object) => {
                self.origin = origin;
                self.has_usage = true;
            }
            (Place::Figure(figure), value) => {
                let statements = match self.origin {
                    Origin::Root => &mut self.root,
                    Origin::Message => &mut self.message,
                    Origin::Response => &mut self.response,
                };
                statements.set(figure, Statement::of(value));
            }
            // The list, then each of its elements.
            (Place::Choices, _) => self.choices = Some(self.choices.map_or(0, |count| count.saturating_add(1))),
            (Place::FinishReason, Value::Text(_)) => self.is_finished = true,
            _ => {}
        }
    }
}

/// What a response has said so far.
#[derive(Debug, Default)]
pub(super) struct Tally {
    statements: Statements,
    has_ended: bool,
}

impl Tally {
    fn add(&mut self, document: &Document) {
        self.statements.update(match document.kind {
            Kind::MessageStart => &document.message,
            Kind::Response | Kind::LastResponse => &document.response,
            Kind::MessageStop | Kind::Other => &document.root,
        });
        let is_last = matches!(document.kind, Kind::MessageStop | Kind::LastResponse)
            || document.is_finished
            // The event that OpenAI sends for `stream_options.include_usage`.
            || document.choices == Some(0) && document.has_usage;
        self.has_ended |= is_last;
    }

    /// The provider has said that nothing follows.
    pub(super) const fn end(&mut self) {
        self.has_ended = true;
    }

    pub(super) fn usage(&self) -> Option<Usage> {
        let input = self.statements.input().known();
        let output = self.statements.output().known();
        if input.is_none() && output.is_none() {
            return None;
        }
        Some(Usage {
            input,
            cached_input: input.and_then(|input| Some(self.statements.cached().known()?.min(input))),
            output,
            is_complete: self.has_ended && input.is_some() && output.is_some(),
        })
    }
}
