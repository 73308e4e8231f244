//! The model that a path names, and what holds when the body names one too.
//!
//! - Gemini and Vertex: `…/models/NAME:verb` (any publisher); tuned models and endpoints with their collection, as
//!   `tunedModels/NAME` and `endpoints/NAME`.
//! - Azure OpenAI: `…/openai/deployments/NAME/…`. Azure serves the deployment and ignores the body's `model`, so the
//!   deployment is what must be allowed; the official client sends the same name in both.
//!
//! Left out on purpose: Bedrock's `/model/NAME/invoke`, whose replies are none of the dialects that are accounted.

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use super::BodyFault;
use crate::json_scan::MAX_TEXT;
use crate::routes::normalize;

const COLLECTIONS: [&str; 3] = ["models", "tunedModels", "endpoints"];

/// The model that a request's path names, if it names one. For requests that carry a body: `GET /v1/models/ft:x:y` only
/// describes a model. The path is taken as it was sent, query included; it is decoded once, like a route.
///
/// # Errors
/// [`BodyFault::AmbiguousPath`] if the path can't be decoded, or if what stands where a model is expected is not one
/// segment of 1 to 256 bytes (an encoded slash in a name, for example, separates for some servers and not for others).
pub fn model_of_path(path: &str) -> Result<Option<String>, BodyFault> {
    let normalized = normalize(path).ok_or(BodyFault::AmbiguousPath)?;
    let segments: Vec<&str> = normalized.split('/').filter(|segment| !segment.is_empty()).collect();
    let name = match segments.split_last() {
        Some((last, above)) if last.contains(':') => match collection(above) {
            Some(collection) => named_in(collection, last)?,
            None if above.iter().any(|segment| collection(&[segment]).is_some()) => {
                return Err(BodyFault::AmbiguousPath);
            }
            None => None,
        },
        _ => None,
    };
    let name = name.or_else(|| deployment(&segments).map(ToOwned::to_owned));
    match name {
        Some(name) if name.len() > MAX_TEXT => Err(BodyFault::AmbiguousPath),
        name => Ok(name),
    }
}

/// The collection that the last of these segments is.
fn collection(above: &[&str]) -> Option<&'static str> {
    let last = above.last()?;
    COLLECTIONS
        .into_iter()
        .find(|collection| collection.eq_ignore_ascii_case(last))
}

/// The name before the verb, which follows the last colon.
fn named_in(collection: &str, segment: &str) -> Result<Option<String>, BodyFault> {
    match segment.rsplit_once(':') {
        Some(("", _)) | None => Err(BodyFault::AmbiguousPath),
        Some((name, _)) if collection == "models" => Ok(Some(name.to_owned())),
        Some((name, _)) => Ok(Some(format!("{collection}/{name}"))),
    }
}

fn deployment<'a>(segments: &[&'a str]) -> Option<&'a str> {
    segments.windows(4).find_map(|window| match window {
        [openai, deployments, name, _]
            if openai.eq_ignore_ascii_case("openai") && deployments.eq_ignore_ascii_case("deployments") =>
        {
            Some(*name)
        }
        _ => None,
    })
}

/// The one model of a request.
///
/// Names are compared byte for byte. A body may give the path's model by its resource name, as Gemini's embeddings do:
/// `models/NAME`, or with more collections before it.
///
/// # Errors
/// [`BodyFault::ModelRequired`] if neither names one, [`BodyFault::PathAgainstBody`] if they name different ones.
pub fn reconcile(path_model: Option<String>, body_model: Option<String>) -> Result<String, BodyFault> {
    match (path_model, body_model) {
        (None, None) => Err(BodyFault::ModelRequired),
        (Some(model), None) | (None, Some(model)) => Ok(model),
        (Some(path), Some(body)) => {
            let before = body.strip_suffix(path.as_str());
            let is_same = before.is_some_and(|before| {
                before.is_empty()
                    || before == "models/"
                    || (before.starts_with("publishers/") || before.starts_with("projects/"))
                        && before.ends_with("/models/")
            });
            if is_same {
                Ok(path)
            } else {
                Err(BodyFault::PathAgainstBody)
            }
        }
    }
}
