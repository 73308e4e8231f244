//! The module under test: where it is, and its compiled form, made once per process.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use sha2::{Digest, Sha256};
use wasmtime::{Config, Engine, Module, OptLevel};

/// `PORTCULLIS_WASM`, or the module of the `filter` profile under the target directory.
pub fn filter_module() -> PathBuf {
    if let Some(path) = env::var_os("PORTCULLIS_WASM").map(PathBuf::from) {
        assert!(
            path.is_file(),
            "PORTCULLIS_WASM names {}, which is no file",
            path.display()
        );
        return path;
    }
    let repository = Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .expect("the crate lies two folders below the repository's root");
    let target = env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository.join("target"), PathBuf::from);
    let path = target.join("wasm32-wasip1/filter/portcullis.wasm");
    assert!(
        path.is_file(),
        "the filter module is missing: looked at {}. Run scripts/test, which builds it, or set PORTCULLIS_WASM.",
        path.display()
    );
    path
}

/// The SHA-256 of the module under test, in hexadecimal. It has to be the one that `build_filter` has noted beside the module:
/// so whatever runs the module, this host or a real one, is known to run the same file.
pub fn filter_module_sha256() -> String {
    let path = filter_module();
    let bytes = fs::read(&path).unwrap_or_else(|error| panic!("{} cannot be read: {error}", path.display()));
    let hash: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    let note = path.with_extension("wasm.sha256");
    let noted = fs::read_to_string(&note).unwrap_or_default();
    assert_eq!(
        noted.split_whitespace().next(),
        Some(hash.as_str()),
        "{} does not name the module beside it: build that with build_filter of scripts/common.sh",
        note.display()
    );
    hash
}

/// The engine and the compiled module of this process. Fuel is counted: it is the same for the same work on any machine.
pub(crate) fn compiled() -> &'static (Engine, Module) {
    static COMPILED: OnceLock<(Engine, Module)> = OnceLock::new();
    COMPILED.get_or_init(|| {
        let mut config = Config::new();
        // Tests run each path a few times: compiling quickly is worth more than running quickly.
        config.consume_fuel(true).cranelift_opt_level(OptLevel::None);
        let engine = Engine::new(&config).expect("an engine with fuel");
        let path = filter_module();
        let bytes = fs::read(&path).unwrap_or_else(|error| panic!("{} cannot be read: {error}", path.display()));
        let module = Module::new(&engine, bytes)
            .unwrap_or_else(|error| panic!("{} is not a module that runs: {error:#}", path.display()));
        (engine, module)
    })
}
