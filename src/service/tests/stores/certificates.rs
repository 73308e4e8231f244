//! Certificates for tests, made by `openssl`: authorities, and what they sign.
//!
//! Left out on purpose: what is proven with them.
#![allow(dead_code, reason = "every test binary uses a part of it")]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// An authority with its files in a folder.
pub(crate) struct Authority {
    folder: PathBuf,
    name: String,
}

/// A certificate with its key, as PEM files.
pub(crate) struct Pair {
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
}

/// A certificate that its own key signs, in `NAME.pem` and `NAME.key`, unless `more` says otherwise.
pub(crate) fn openssl(folder: &Path, name: &str, more: &[&str]) {
    let (key, certificate) = (format!("{name}.key"), format!("{name}.pem"));
    let made = Command::new("openssl")
        .current_dir(folder)
        .args([
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
        ])
        .args(["-subj", &format!("/CN={name}"), "-keyout", &key, "-out", &certificate])
        .args(more)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    assert!(
        made.is_ok_and(|status| status.success()),
        "openssl makes no certificate {name}"
    );
}

impl Authority {
    /// A new authority; its certificate is `NAME.pem`.
    pub(crate) fn new(folder: &Path, name: &str) -> Self {
        let is_authority = [
            "-addext",
            "basicConstraints=critical,CA:TRUE",
            "-addext",
            "keyUsage=critical,keyCertSign",
        ];
        openssl(folder, name, &is_authority);
        Self {
            folder: folder.to_owned(),
            name: name.to_owned(),
        }
    }

    /// Its own certificate.
    pub(crate) fn certificate(&self) -> PathBuf {
        self.folder.join(format!("{}.pem", self.name))
    }

    /// A certificate for this DNS name, in `NAME.pem` and `NAME.key`, also over one that is there.
    pub(crate) fn sign(&self, name: &str, dns: &str) -> Pair {
        let (own, key) = (format!("{}.pem", self.name), format!("{}.key", self.name));
        let alternative = format!("subjectAltName=DNS:{dns}");
        let more = [
            "-CA",
            &own,
            "-CAkey",
            &key,
            "-addext",
            &alternative,
            "-addext",
            "basicConstraints=CA:FALSE",
        ];
        openssl(&self.folder, name, &more);
        Pair {
            certificate: self.folder.join(format!("{name}.pem")),
            key: self.folder.join(format!("{name}.key")),
        }
    }
}
