//! The secret of a key: HMAC-SHA256 and nothing else. It is never shown: what is kept is the state of the function after
//! the secret went in, and no text is made of that.
//!
//! Without the feature `signature` there is no such function, so that no secret can exist and every one is a fault.

use thiserror::Error;

/// Fewest bytes of a secret: as many as the function gives.
pub const LEAST_SECRET_BYTES: usize = 32;
/// Most bytes of a secret: more add nothing.
pub const LONGEST_SECRET_BYTES: usize = 1024;

/// Why a text is no secret. Nothing of the text is in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum SecretFault {
    /// Not base64.
    #[error("must be base64 (with + and /, padded or not); its value is not shown")]
    NotBase64,
    /// Too short to be safe, or absurdly long.
    #[error(
        "must be {LEAST_SECRET_BYTES} to {LONGEST_SECRET_BYTES} bytes once decoded, is {0}: `openssl rand -base64 32` makes one"
    )]
    Length(
        /// Its bytes.
        usize,
    ),
    /// This build cannot sign.
    #[error("signatures are not part of this build (feature \"signature\")")]
    NotBuilt,
}

#[cfg(feature = "signature")]
mod keyed {
    use core::fmt;

    use base64ct::{Base64Unpadded, Encoding as _};
    use hmac::{Hmac, KeyInit as _, Mac as _};
    use sha2::Sha256;

    use super::{LEAST_SECRET_BYTES, LONGEST_SECRET_BYTES, SecretFault};

    /// The secret of a key.
    #[derive(Clone)]
    pub struct Secret(Hmac<Sha256>);

    impl Secret {
        /// Reads a secret out of base64.
        ///
        /// # Errors
        /// Why it is none.
        pub fn from_base64(text: &str) -> Result<Self, SecretFault> {
            let digits = text.trim_end_matches('=');
            let padding = text.len().saturating_sub(digits.len());
            if padding > 0 && (padding > 2 || !text.len().is_multiple_of(4)) {
                return Err(SecretFault::NotBase64);
            }
            let bytes = Base64Unpadded::decode_vec(digits).map_err(|_| SecretFault::NotBase64)?;
            Self::from_bytes(&bytes)
        }

        /// Takes these bytes for a secret.
        ///
        /// # Errors
        /// They are too few, or too many.
        pub fn from_bytes(bytes: &[u8]) -> Result<Self, SecretFault> {
            if !(LEAST_SECRET_BYTES..=LONGEST_SECRET_BYTES).contains(&bytes.len()) {
                return Err(SecretFault::Length(bytes.len()));
            }
            Hmac::new_from_slice(bytes)
                .map(Self)
                .map_err(|_| SecretFault::Length(bytes.len()))
        }

        /// The HMAC-SHA256 of a message.
        pub fn sign(&self, message: &[u8]) -> [u8; 32] {
            self.0.clone().chain_update(message).finalize().into_bytes().into()
        }

        /// Whether this is the message's, in a time that does not depend on how much of it is.
        pub fn has_signed(&self, message: &[u8], signature: &[u8; 32]) -> bool {
            self.0.clone().chain_update(message).verify_slice(signature).is_ok()
        }
    }

    /// Equal if they sign alike.
    impl PartialEq for Secret {
        fn eq(&self, other: &Self) -> bool {
            self.has_signed(&[], &other.sign(&[]))
        }
    }

    impl Eq for Secret {}

    impl fmt::Debug for Secret {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("Secret(not shown)")
        }
    }
}

#[cfg(not(feature = "signature"))]
mod keyed {
    use super::SecretFault;

    /// No secret exists in a build without signatures.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum Secret {}

    impl Secret {
        /// A fault.
        ///
        /// # Errors
        /// Always.
        pub const fn from_base64(_: &str) -> Result<Self, SecretFault> {
            Err(SecretFault::NotBuilt)
        }

        /// Never called: there is no secret to call it on.
        pub const fn sign(&self, _: &[u8]) -> [u8; 32] {
            match *self {}
        }

        /// Never called: there is no secret to call it on.
        pub const fn has_signed(&self, _: &[u8], _: &[u8; 32]) -> bool {
            match *self {}
        }
    }
}

pub use keyed::Secret;
