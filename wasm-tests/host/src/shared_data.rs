//! The memory that all workers of a host share: values under keys, each with a version that compare-and-swap checks.
//!
//! Hosts differ in what a version of 0 means, and in whether a value can vanish ([`SharedDataKind`]). Between a read and the
//! write that follows it others may write: a test puts that in with [`SharedData::meddle`], or has a second worker
//! ([`crate::TestHost::beside`]). Left out on purpose: `vm_id`, as all workers of a test are of one plugin.

use std::collections::{BTreeMap, VecDeque};

use crate::fault::status::{CAS_MISMATCH, NOT_FOUND, OK, UNIMPLEMENTED};

/// How a host keeps shared data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SharedDataKind {
    /// Envoy: a write with version 0 is not checked, one with another version creates a key that is missing; versions are
    /// counted for all keys together, and nothing vanishes.
    Envoy,
    /// `WasmX`: version 0 is that of a missing key, and nothing else is; versions are counted for each key, from 1, and a
    /// value may be evicted.
    WasmX,
    /// APISIX: there is none.
    Missing,
}

/// What another worker, or the host, does just before a write of the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Meddle {
    /// Nothing.
    Nothing,
    /// It writes what is there once more.
    Touch,
    /// It writes this.
    Write(Vec<u8>),
    /// The value vanishes.
    Evict,
}

#[derive(Debug, Clone)]
struct Entry {
    value: Vec<u8>,
    version: u32,
}

/// The memory.
#[derive(Debug, Default)]
pub struct SharedData {
    entries: BTreeMap<Vec<u8>, Entry>,
    last_version: u32,
    meddles: VecDeque<Meddle>,
}

impl SharedData {
    /// The keys that have a value.
    pub fn keys(&self) -> Vec<String> {
        let keys = self.entries.keys();
        keys.map(|key| String::from_utf8_lossy(key).into_owned()).collect()
    }

    /// The value under a key.
    pub fn value(&self, key: &str) -> Option<&[u8]> {
        self.entries.get(key.as_bytes()).map(|entry| entry.value.as_slice())
    }

    /// Somebody else writes a value.
    pub fn put(&mut self, key: &str, value: &[u8]) {
        self.write(key.as_bytes(), value);
    }

    /// A value vanishes.
    pub fn evict(&mut self, key: &str) {
        self.entries.remove(key.as_bytes());
    }

    /// Every value vanishes.
    pub fn evict_all(&mut self) {
        self.entries.clear();
    }

    /// What happens just before each of the module's next writes, in order.
    pub fn meddle(&mut self, meddles: impl IntoIterator<Item = Meddle>) {
        self.meddles.extend(meddles);
    }

    /// Nothing meddles any more.
    pub fn leave_alone(&mut self) {
        self.meddles.clear();
    }

    fn write(&mut self, key: &[u8], value: &[u8]) {
        self.last_version += 1;
        let version = self.last_version;
        let value = value.to_vec();
        self.entries.insert(key.to_vec(), Entry { value, version });
    }

    /// The value and its version, or the status of a failure.
    pub(crate) fn get(&self, kind: SharedDataKind, key: &[u8]) -> Result<(Vec<u8>, u32), u32> {
        if kind == SharedDataKind::Missing {
            return Err(UNIMPLEMENTED);
        }
        let entry = self.entries.get(key).ok_or(NOT_FOUND)?;
        Ok((entry.value.clone(), entry.version))
    }

    /// Writes if the version allows it; the status.
    pub(crate) fn set(&mut self, kind: SharedDataKind, key: &[u8], value: &[u8], version: u32) -> u32 {
        if kind == SharedDataKind::Missing {
            return UNIMPLEMENTED;
        }
        match self.meddles.pop_front().unwrap_or(Meddle::Nothing) {
            Meddle::Nothing => {}
            Meddle::Touch => {
                if let Some(entry) = self.entries.get(key).cloned() {
                    self.overwrite(kind, key, &entry.value);
                }
            }
            Meddle::Write(other) => self.overwrite(kind, key, &other),
            Meddle::Evict => {
                self.entries.remove(key);
            }
        }
        let present = self.entries.get(key).map(|entry| entry.version);
        let is_allowed = match kind {
            SharedDataKind::Envoy => version == 0 || present.is_none_or(|present| present == version),
            _ => present.unwrap_or(0) == version,
        };
        if !is_allowed {
            return CAS_MISMATCH;
        }
        self.overwrite(kind, key, value);
        OK
    }

    fn overwrite(&mut self, kind: SharedDataKind, key: &[u8], value: &[u8]) {
        let before = self.entries.get(key).map_or(0, |entry| entry.version);
        self.write(key, value);
        if let Some(entry) = self.entries.get_mut(key).filter(|_| kind == SharedDataKind::WasmX) {
            entry.version = before + 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENVOY: SharedDataKind = SharedDataKind::Envoy;
    const WASMX: SharedDataKind = SharedDataKind::WasmX;

    #[test]
    fn envoy_checks_versions_of_what_is_there_and_only_those() {
        let mut memory = SharedData::default();
        assert_eq!(memory.get(ENVOY, b"k"), Err(NOT_FOUND));
        assert_eq!(memory.set(ENVOY, b"k", b"1", 77), OK, "it creates");
        assert_eq!(memory.get(ENVOY, b"k"), Ok((b"1".to_vec(), 1)));
        assert_eq!(memory.set(ENVOY, b"k", b"2", 0), OK, "0 is not checked");
        assert_eq!(memory.set(ENVOY, b"k", b"3", 1), CAS_MISMATCH);
        assert_eq!(memory.set(ENVOY, b"k", b"3", 2), OK);
        assert_eq!(memory.set(ENVOY, b"other", b"", 0), OK);
        assert_eq!(
            memory.get(ENVOY, b"other"),
            Ok((Vec::new(), 4)),
            "versions are of all keys"
        );
    }

    #[test]
    fn wasmx_takes_0_for_a_key_that_is_missing_and_counts_each_key() {
        let mut memory = SharedData::default();
        assert_eq!(memory.set(WASMX, b"k", b"1", 1), CAS_MISMATCH);
        assert_eq!(memory.set(WASMX, b"k", b"1", 0), OK);
        assert_eq!(memory.set(WASMX, b"k", b"2", 0), CAS_MISMATCH);
        assert_eq!(memory.set(WASMX, b"k", b"2", 1), OK);
        memory.evict("k");
        assert_eq!(memory.set(WASMX, b"k", b"3", 2), CAS_MISMATCH);
        assert_eq!(memory.set(WASMX, b"k", b"3", 0), OK);
        assert_eq!(memory.get(WASMX, b"k"), Ok((b"3".to_vec(), 1)));
    }

    #[test]
    fn a_meddler_comes_before_the_write_and_wins_it() {
        let mut memory = SharedData::default();
        memory.put("k", b"1");
        memory.meddle([Meddle::Touch, Meddle::Nothing, Meddle::Evict]);
        assert_eq!(memory.set(ENVOY, b"k", b"2", 1), CAS_MISMATCH);
        assert_eq!(memory.set(ENVOY, b"k", b"2", 2), OK);
        assert_eq!(memory.set(WASMX, b"k", b"3", 3), CAS_MISMATCH);
        assert_eq!(memory.value("k"), None);
    }
}
