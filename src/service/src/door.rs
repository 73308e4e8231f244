//! The files of the service's own door: tokens and certificates, read at the start and again while it runs.
//!
//! Left out on purpose: what is asked of a request with them.

use std::sync::Arc;

use portcullis_decision::config::{Faults, ServiceConfig};

use crate::rereading;
use crate::tls::Certificates;
use crate::tokens::Tokens;

/// What was read of the files that a configuration names for its door.
pub struct DoorFiles {
    /// Who may ask for decisions; `None`: everybody.
    pub tokens: Option<Arc<Tokens>>,
    /// With what the service shows who it is; `None`: without TLS.
    pub certificates: Option<Arc<Certificates>>,
    /// Who is let in at the operators' listener; `None`: whoever reaches it.
    pub admin_tokens: Option<Arc<Tokens>>,
}

impl DoorFiles {
    /// Reads the files.
    ///
    /// # Errors
    /// Every fault of every file, by the key that names it.
    pub fn open(config: &ServiceConfig) -> Result<Self, Faults> {
        let mut faults = Faults::default();
        let tokens = config
            .tokens_file
            .as_deref()
            .map(|path| Tokens::open("tokens_file", path));
        let admin_file = config.admin.as_ref().and_then(|admin| admin.token_file.as_deref());
        let admin_tokens = admin_file.map(|path| Tokens::open("admin.token_file", path));
        let certificates = config.tls.as_ref().map(Certificates::open);
        let files = Self {
            tokens: unless_faulty(tokens, &mut faults),
            certificates: unless_faulty(certificates, &mut faults),
            admin_tokens: unless_faulty(admin_tokens, &mut faults),
        };
        faults.into_result(Some(files))
    }

    /// Reads the files again and again, each on a task of its own.
    pub fn keep(&self) {
        for tokens in [&self.tokens, &self.admin_tokens].into_iter().flatten() {
            tokio::spawn(rereading::run(Arc::clone(tokens)));
        }
        if let Some(certificates) = &self.certificates {
            tokio::spawn(rereading::run(Arc::clone(certificates)));
        }
    }

    /// Who is let in, for the first line: that nobody has to show anything must not go unseen.
    pub fn kind(&self) -> &'static str {
        let is_mutual = self.certificates.as_ref().map(|certificates| certificates.are_mutual());
        match (is_mutual, self.tokens.is_some()) {
            (None, false) => "open",
            (None, true) => "token",
            (Some(false), false) => "tls, open",
            (Some(false), true) => "tls, token",
            (Some(true), false) => "mtls",
            (Some(true), true) => "mtls, token",
        }
    }
}

fn unless_faulty<T>(opened: Option<Result<T, Faults>>, faults: &mut Faults) -> Option<T> {
    match opened? {
        Ok(file) => Some(file),
        Err(found) => {
            for fault in found.iter() {
                faults.add(fault.path.clone(), fault.message.clone());
            }
            None
        }
    }
}
