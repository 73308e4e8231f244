//! What is kept from the upstream while a request is held, and put back when it goes on.
//!
//! Some hosts let a held request go up without having been told to: when nothing is pending any more, or when the module has
//! trapped. What such a request lacks then is what the operator has named, usually the credential without which the
//! upstream serves nobody.
//!
//! - A request that goes on at once, by a lease for example, keeps its headers, and costs nothing more. One that is refused at
//!   once loses them: it is held if the host does not take the reply.
//! - All lines of a name are taken, and put back as they were and in their order. They come after all others then, which
//!   means nothing in HTTP: only the order of lines with one name does.
//! - A refused request gets nothing back.
//!
//! Left out on purpose: replacing what can't be taken away (path, authority), which hosts have read by then.

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use super::{Header, Stream};
use crate::gatehouse::{Effect, Gatehouse};
use crate::log_line::Level;

/// A header line that was taken out of a request. Its value is not shown.
#[derive(Clone, PartialEq, Eq)]
pub struct HeaderLine {
    /// The name as the host gave it.
    pub name: String,
    /// The value's bytes.
    pub value: Vec<u8>,
}

impl fmt::Debug for HeaderLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} bytes)", self.name, self.value.len())
    }
}

impl Stream {
    /// Takes what has to be withheld out of a request that is held from here on, or refused at once: before anything else
    /// that it brings about.
    pub(super) fn withhold(&mut self, names: &[String], headers: &[Header<'_>], effects: &mut Vec<Effect>) {
        let is_refused = || effects.iter().any(|effect| matches!(effect, Effect::Reply(_)));
        if names.is_empty() || (self.wait().is_none() && !is_refused()) {
            return;
        }
        let mut removals: Vec<Effect> = Vec::new();
        for (name, value) in headers {
            let is_meant = names.iter().any(|of| of.as_bytes().eq_ignore_ascii_case(name));
            let Some(name) = core::str::from_utf8(name).ok().filter(|_| is_meant) else {
                continue;
            };
            // Each spelling once.
            if self.withheld.iter().all(|line| line.name != name) {
                removals.push(Effect::WithholdRequestHeader(name.to_string()));
            }
            self.withheld.push(HeaderLine {
                name: name.to_string(),
                value: value.to_vec(),
            });
        }
        effects.splice(0..0, removals);
    }

    /// The request goes on with all that it came with.
    pub(super) fn put_back(&mut self, effects: &mut Vec<Effect>) {
        let withheld = core::mem::take(&mut self.withheld);
        effects.extend(withheld.into_iter().map(Effect::PutBackRequestHeader));
    }

    /// The host did not take out what [`Effect::WithholdRequestHeader`] names: it is still there, and not put back.
    pub fn on_not_withheld(&mut self, gatehouse: &mut Gatehouse, name: &str, now_ms: u64) -> Vec<Effect> {
        self.withheld.retain(|line| line.name != name);
        let message = alloc::format!("the host did not remove {name}: a request that it lets go by itself is whole");
        self.headers_are_off(gatehouse, "not_withheld", message, now_ms)
    }

    /// The host did not take back what [`Effect::PutBackRequestHeader`] holds: the request goes on without it.
    pub fn on_not_put_back(&mut self, gatehouse: &mut Gatehouse, name: &str, now_ms: u64) -> Vec<Effect> {
        let message = alloc::format!("the host did not take back {name}: the request goes on without it");
        self.headers_are_off(gatehouse, "not_put_back", message, now_ms)
    }

    fn headers_are_off(
        &self,
        gatehouse: &mut Gatehouse,
        event: &'static str,
        message: String,
        now_ms: u64,
    ) -> Vec<Effect> {
        let mut effects = Vec::new();
        let line = self.line(Level::Error, event, message);
        gatehouse.log(line, now_ms, &mut effects);
        effects
    }
}
