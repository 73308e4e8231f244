//! Policies in a file, for development: `file:policy.json`, relative to where the service was started.
//!
//! The file is read whenever it is asked, which the cache does at most once for each key and `max_staleness_ms`. A version
//! with faults is no policy: nothing of it counts, and the one before no longer does.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use portcullis_decision::config::{Faults, parse_policy_file};
use portcullis_decision::policy::{Org, PolicyFile};
use tokio::time::Instant;

use super::{PolicyStore, Prices, Registry};
use crate::check;
use crate::limiter::{Answer, StoreFault};
use crate::locked;

/// A policy file.
pub(super) struct FilePolicy {
    path: PathBuf,
    read: Mutex<Version>,
}

/// What was read last; `policy` is `None` if that had faults.
struct Version {
    text: Vec<u8>,
    policy: Option<Arc<PolicyFile>>,
}

impl FilePolicy {
    /// Reads the file of `file:PATH`.
    ///
    /// # Errors
    /// That it can't be read, or all its faults, each with its path in the file.
    pub(super) fn open(url: &str) -> Result<Self, Faults> {
        let path = url.strip_prefix("file:").unwrap_or(url);
        let path = PathBuf::from(path.strip_prefix("//").unwrap_or(path));
        let text = check::read(&path).map_err(|faults| within(&path, &faults))?;
        let policy = parse_policy_file(&text).map_err(|faults| within(&path, &faults))?;
        Ok(Self {
            path,
            read: Mutex::new(Version {
                text,
                policy: Some(Arc::new(policy)),
            }),
        })
    }

    /// The policy as it stands in the file now.
    fn policy(&self) -> Result<Arc<PolicyFile>, StoreFault> {
        let text = fs::read(&self.path);
        let mut read = locked(&self.read);
        match text {
            Ok(text) if text == read.text => {}
            Ok(text) => {
                read.policy = match parse_policy_file(&text) {
                    Ok(policy) => {
                        tracing::info!(
                            event = "policy_loaded",
                            dependency = "policy",
                            "the policy file has changed"
                        );
                        Some(Arc::new(policy))
                    }
                    Err(faults) => {
                        self.tell(&format!("has faults: {faults}"));
                        None
                    }
                };
                read.text = text;
            }
            Err(error) => {
                if read.policy.is_some() || !read.text.is_empty() {
                    self.tell(&format!("cannot be read: {}", error.kind()));
                }
                *read = Version {
                    text: Vec::new(),
                    policy: None,
                };
            }
        }
        read.policy.clone().ok_or(StoreFault::NotSensible)
    }

    /// Once for each version.
    fn tell(&self, what: &str) {
        tracing::error!(
            event = "policy_faulty",
            class = "policy_unavailable",
            dependency = "policy",
            "{} {what}; what is known of the version before counts until it is stale",
            self.path.display()
        );
    }
}

fn within(path: &Path, faults: &Faults) -> Faults {
    let mut outer = Faults::default();
    for fault in faults.iter() {
        outer.add(format!("policy.url: {}", path.display()), fault.to_string());
    }
    outer
}

impl PolicyStore for FilePolicy {
    fn scheme(&self) -> &'static str {
        "file"
    }

    fn org<'a>(&'a self, id: &'a str, _: Instant) -> Answer<'a, Option<Arc<Org>>> {
        Box::pin(async move { Ok(self.policy()?.org(id).map(Arc::new)) })
    }

    fn registry(&self, _: Instant) -> Answer<'_, Arc<Registry>> {
        Box::pin(async move { Ok(Arc::new(self.policy()?.providers.clone())) })
    }

    fn prices(&self, _: Instant) -> Answer<'_, Arc<Prices>> {
        Box::pin(async move { Ok(Arc::new(self.policy()?.prices.clone())) })
    }

    fn ping(&self, _: Instant) -> Answer<'_, ()> {
        Box::pin(async move { self.policy().map(drop) })
    }
}
