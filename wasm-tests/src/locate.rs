//! Where the programs under test are: an environment variable first, then the place where the repository's scripts put
//! them. Nothing is built or fetched here; a missing one names the script that makes it.

use std::env;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// The root of the repository.
pub fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the crate lies in the workspace")
}

/// `PORTCULLIS_ENVOY`, or the copy that `scripts/setup` installs.
pub(crate) fn envoy() -> PathBuf {
    find(
        "PORTCULLIS_ENVOY",
        &[repository().join(".tools/bin/envoy")],
        "Envoy",
        "scripts/setup",
    )
}

/// `PORTCULLIS_WASM`, or the module of the `filter` profile.
pub fn filter_module() -> PathBuf {
    let built = target().join("wasm32-wasip1/filter/portcullis.wasm");
    find("PORTCULLIS_WASM", &[built], "the filter module", "scripts/test")
}

/// The SHA-256 of the filter module, in hexadecimal. It has to be the one that `build_filter` has noted beside the module, as
/// it has to be where the test host runs it.
pub fn filter_module_sha256() -> String {
    let path = filter_module();
    let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{} cannot be read: {error}", path.display()));
    let hash: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    let note = path.with_extension("wasm.sha256");
    let noted = std::fs::read_to_string(&note).unwrap_or_default();
    assert_eq!(
        noted.split_whitespace().next(),
        Some(hash.as_str()),
        "{} does not name the module beside it: build that with build_filter of scripts/common.sh",
        note.display()
    );
    hash
}

/// `PORTCULLIS_BIN`, or the newest build of the service.
pub fn portcullis() -> PathBuf {
    let mut built = [target().join("debug/portcullis"), target().join("release/portcullis")];
    built.sort_by_key(|path| std::cmp::Reverse(path.metadata().and_then(|file| file.modified()).ok()));
    find("PORTCULLIS_BIN", &built, "the service", "scripts/test")
}

/// `PORTCULLIS_CLIENTS_PYTHON`, or the interpreter that `scripts/setup` gives the official clients.
pub(crate) fn clients_python() -> PathBuf {
    find(
        "PORTCULLIS_CLIENTS_PYTHON",
        &[repository().join(".tools/clients/bin/python")],
        "Python with the official OpenAI and Anthropic clients",
        "scripts/setup",
    )
}

fn target() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository().join("target"), PathBuf::from)
}

fn find(variable: &str, places: &[PathBuf], what: &str, script: &str) -> PathBuf {
    if let Some(path) = env::var_os(variable).map(PathBuf::from) {
        assert!(path.is_file(), "{variable} names {}, which is no file", path.display());
        return path;
    }
    places.iter().find(|path| path.is_file()).cloned().unwrap_or_else(|| {
        let looked: Vec<_> = places.iter().map(|path| path.display().to_string()).collect();
        panic!(
            "{what} is missing: looked at {}. Run {script}, or set {variable}.",
            looked.join(", ")
        )
    })
}
