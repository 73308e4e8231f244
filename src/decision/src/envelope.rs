//! The envelope: trusted headers that say who is calling and what the contract allows.
//!
//! Grammar (after RFC 9110 field syntax; `P` is the prefix, names compared case-insensitively):
//!
//! ```text
//! id    = 1*256 bytes of UTF-8 without control characters      P owner-id, org-id, auth-id, graph-id, lane, model
//! limit = "0" / %x31-39 *DIGIT, at most 2^53 - 1               P {owner,org,auth}-rate-limit-{requests,tokens}
//!                                                              P {owner,org,auth}-concurrency-limit
//! ```
//!
//! Every header of the prefix that is ill-formed or stands twice makes the request malformed, envelope or not. A name that
//! looks like a limit and is none is malformed too: a typo must not mean unlimited. Who may set these headers is not
//! decided here: the edge is trusted to have removed what clients sent.

use alloc::borrow::{Cow, ToOwned};
use alloc::string::String;

use crate::class::Code;
use crate::limits::{LARGEST_LIMIT, Limit, Resource, Scope, StampedLimits};
use crate::wire::Subject;

/// Longest id, in bytes.
pub const LONGEST_ID: usize = 256;

/// What the headers say. It lies where they lie: most requests are settled without a copy of any id.
#[allow(
    clippy::large_enum_variant,
    reason = "the large one is the common one, and is not kept"
)]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reading<'a> {
    /// Neither an owner id nor a limit: no envelope.
    Missing,
    /// A well-formed envelope.
    Present(Envelope<'a>),
    /// Malformed; the text is for the log and holds no value of the request.
    Malformed(String),
    /// A limit without its id, or an id that the rules need; the text is for the log.
    Partial(String),
}

/// A well-formed envelope.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Envelope<'a> {
    /// Who is calling.
    pub subject: Ids<'a>,
    /// What the contract allows.
    pub limits: StampedLimits,
    /// A header name under the prefix that means nothing to us; logged once.
    pub unknown_header: Option<String>,
}

/// A subject, where its headers lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ids<'a> {
    /// The owner; never empty in a well-formed envelope.
    pub owner: &'a str,
    /// The organization.
    pub org: Option<&'a str>,
    /// The credential.
    pub auth: Option<&'a str>,
    /// The graph.
    pub graph: Option<&'a str>,
    /// The lane.
    pub lane: Option<&'a str>,
    /// The model.
    pub model: Option<&'a str>,
}

impl From<Ids<'_>> for Subject {
    fn from(ids: Ids<'_>) -> Self {
        Self {
            owner: ids.owner.to_owned(),
            org: ids.org.map(ToOwned::to_owned),
            auth: ids.auth.map(ToOwned::to_owned),
            graph: ids.graph.map(ToOwned::to_owned),
            lane: ids.lane.map(ToOwned::to_owned),
            model: ids.model.map(ToOwned::to_owned),
        }
    }
}

impl<'a> From<&'a Subject> for Ids<'a> {
    fn from(subject: &'a Subject) -> Self {
        Self {
            owner: &subject.owner,
            org: subject.org.as_deref(),
            auth: subject.auth.as_deref(),
            graph: subject.graph.as_deref(),
            lane: subject.lane.as_deref(),
            model: subject.model.as_deref(),
        }
    }
}

/// What a name under the prefix stands for.
enum Field {
    Owner,
    Org,
    Auth,
    Graph,
    Lane,
    Model,
    Limit(Scope, Resource),
    /// Looks like a limit, and is none of the nine.
    Misspelt,
    Unknown,
}

fn field(suffix: &str) -> Field {
    match suffix {
        "owner-id" => return Field::Owner,
        "org-id" => return Field::Org,
        "auth-id" => return Field::Auth,
        "graph-id" => return Field::Graph,
        "lane" => return Field::Lane,
        "model" => return Field::Model,
        _ => {}
    }
    for scope in Scope::CONTRACT {
        let Some(rest) = suffix.strip_prefix(scope.name()) else {
            continue;
        };
        match rest {
            "-rate-limit-requests" => return Field::Limit(scope, Resource::Requests),
            "-rate-limit-tokens" => return Field::Limit(scope, Resource::Tokens),
            "-concurrency-limit" => return Field::Limit(scope, Resource::Concurrency),
            _ => {}
        }
    }
    let is_near = suffix.ends_with("-limit") || suffix.contains("-limit-");
    if is_near || suffix == "limit" || suffix.starts_with("limit-") {
        Field::Misspelt
    } else {
        Field::Unknown
    }
}

/// Whether a header name belongs to the envelope.
pub fn has_prefix(name: &[u8], prefix: &str) -> bool {
    // Most names differ at once, and most hosts give them in lower case.
    let alike = |(byte, wanted): (&u8, &u8)| byte == wanted || byte.eq_ignore_ascii_case(wanted);
    name.get(..prefix.len())
        .is_some_and(|start| start.iter().zip(prefix.as_bytes()).all(alike))
}

/// Reads the envelope out of a request's headers. `needs_org`: a listed gate cannot be asked without the org's id.
pub fn read<'a>(headers: impl Iterator<Item = (&'a [u8], &'a [u8])>, prefix: &str, needs_org: bool) -> Reading<'a> {
    let mut envelope = Envelope::default();
    let mut limited = [false; 3];
    for (name, value) in headers {
        if !has_prefix(name, prefix) {
            continue;
        }
        if let Err(malformed) = take(&mut envelope, &mut limited, name, value, prefix) {
            return Reading::Malformed(malformed);
        }
    }
    let [owner_limited, org_limited, auth_limited] = limited;
    let subject = &envelope.subject;
    let has_owner = !subject.owner.is_empty();
    if !has_owner && !owner_limited && !org_limited && !auth_limited {
        return Reading::Missing;
    }
    let missing = if !has_owner {
        Some("owner-id")
    } else if org_limited && subject.org.is_none() {
        Some("org-id")
    } else if auth_limited && subject.auth.is_none() {
        Some("auth-id")
    } else if needs_org && subject.org.is_none() {
        Some("org-id, which a listed gate needs")
    } else {
        None
    };
    match missing {
        Some(missing) => Reading::Partial(alloc::format!("no {prefix}{missing}")),
        None => Reading::Present(envelope),
    }
}

fn take<'a>(
    envelope: &mut Envelope<'a>,
    limited: &mut [bool; 3],
    name: &[u8],
    value: &'a [u8],
    prefix: &str,
) -> Result<(), String> {
    let Some(suffix) = name
        .get(prefix.len()..)
        .and_then(|suffix| core::str::from_utf8(suffix).ok())
    else {
        return Err("a header name under the prefix is not ASCII".to_owned());
    };
    // Most hosts give them in lower case.
    let suffix = if suffix.bytes().any(|byte| byte.is_ascii_uppercase()) {
        Cow::Owned(suffix.to_ascii_lowercase())
    } else {
        Cow::Borrowed(suffix)
    };
    let subject = &mut envelope.subject;
    let optional = match field(&suffix) {
        Field::Owner => {
            let id = id(&suffix, prefix, value)?;
            if !subject.owner.is_empty() {
                return Err(twice(prefix, &suffix));
            }
            subject.owner = id;
            return Ok(());
        }
        Field::Limit(scope, resource) => {
            if envelope.limits.of(scope).get(resource) != Limit::Unlimited {
                return Err(twice(prefix, &suffix));
            }
            let figure = figure(value).ok_or_else(|| {
                alloc::format!(
                    "{prefix}{suffix} is not an integer from 0 to {LARGEST_LIMIT} without sign or leading zero"
                )
            })?;
            envelope.limits.set(scope, resource, Limit::of(figure));
            if let Some(flag) = Scope::CONTRACT
                .iter()
                .position(|s| *s == scope)
                .and_then(|at| limited.get_mut(at))
            {
                *flag = true;
            }
            return Ok(());
        }
        Field::Misspelt => {
            return Err(alloc::format!(
                "{prefix}{} looks like a limit and is none",
                visible(&suffix)
            ));
        }
        Field::Unknown => {
            if !core::str::from_utf8(value).is_ok_and(|text| !has_control(text)) {
                return Err(alloc::format!(
                    "{prefix}{} is not UTF-8 without control characters",
                    visible(&suffix)
                ));
            }
            envelope.unknown_header.get_or_insert_with(|| visible(&suffix));
            return Ok(());
        }
        Field::Org => &mut subject.org,
        Field::Auth => &mut subject.auth,
        Field::Graph => &mut subject.graph,
        Field::Lane => &mut subject.lane,
        Field::Model => &mut subject.model,
    };
    let id = id(&suffix, prefix, value)?;
    if optional.is_some() {
        return Err(twice(prefix, &suffix));
    }
    *optional = Some(id);
    Ok(())
}

fn twice(prefix: &str, suffix: &str) -> String {
    alloc::format!("{prefix}{suffix} stands twice")
}

/// A header name for a log line, cut, since a client may have chosen it.
fn visible(suffix: &str) -> String {
    suffix.chars().take(64).collect()
}

fn id<'a>(suffix: &str, prefix: &str, value: &'a [u8]) -> Result<&'a str, String> {
    let text = core::str::from_utf8(value).ok().filter(|text| !has_control(text));
    match text {
        Some(text) if (1..=LONGEST_ID).contains(&text.len()) => Ok(text),
        _ => Err(alloc::format!(
            "{prefix}{suffix} is not 1 to {LONGEST_ID} bytes of UTF-8 without control characters"
        )),
    }
}

/// Control characters of ASCII, and those of Unicode.
fn has_control(text: &str) -> bool {
    !text.bytes().all(|byte| matches!(byte, b' '..=b'~')) && text.chars().any(char::is_control)
}

/// `0|[1-9][0-9]*` up to 2^53 - 1; nothing else.
fn figure(value: &[u8]) -> Option<u64> {
    match value {
        [b'0'] => return Some(0),
        [b'1'..=b'9', ..] if value.len() <= 16 => {}
        _ => return None,
    }
    let mut figure = 0_u64;
    for byte in value {
        let digit = byte.checked_sub(b'0').filter(|digit| *digit <= 9)?;
        figure = figure.checked_mul(10)?.checked_add(u64::from(digit))?;
    }
    (figure <= LARGEST_LIMIT).then_some(figure)
}

impl Reading<'_> {
    /// The denial code of a reading that is one.
    pub const fn code(&self) -> Option<Code> {
        match self {
            Self::Missing => Some(Code::EnvelopeMissing),
            Self::Malformed(_) => Some(Code::EnvelopeMalformed),
            Self::Partial(_) => Some(Code::EnvelopePartial),
            Self::Present(_) => None,
        }
    }
}

#[cfg(test)]
mod tests;
