//! The trusted headers that an edge would stamp, in their usual spelling. Malformed ones are written by the tests with
//! `Call::header`.

use std::fmt::Display;

/// An envelope under the default prefix.
#[derive(Clone, Debug, Default)]
pub struct Envelope {
    headers: Vec<(String, String)>,
}

impl Envelope {
    pub fn owner(id: &str) -> Self {
        Self::default().with("owner-id", id)
    }

    #[must_use]
    pub fn org(self, id: &str) -> Self {
        self.with("org-id", id)
    }

    #[must_use]
    pub fn auth(self, id: &str) -> Self {
        self.with("auth-id", id)
    }

    /// A limit on requests per window of `scope` (`owner`, `org`, `auth`).
    #[must_use]
    pub fn requests(self, scope: &str, limit: impl Display) -> Self {
        self.with(&format!("{scope}-rate-limit-requests"), limit)
    }

    #[must_use]
    pub fn tokens(self, scope: &str, limit: impl Display) -> Self {
        self.with(&format!("{scope}-rate-limit-tokens"), limit)
    }

    #[must_use]
    pub fn concurrency(self, scope: &str, limit: impl Display) -> Self {
        self.with(&format!("{scope}-concurrency-limit"), limit)
    }

    /// Any header of the prefix: `lane`, `graph-id`, `model`.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Display) -> Self {
        self.headers.push((format!("x-admission-{name}"), value.to_string()));
        self
    }

    pub fn headers(&self) -> &[(String, String)] {
        &self.headers
    }
}
