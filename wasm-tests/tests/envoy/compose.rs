//! The docker-compose file of the example: what it mounts and starts is what the tests run, on the version that they run.
//! Not here: Docker itself.

use std::path::{Component, Path, PathBuf};

use portcullis_wasm_tests::repository;
use serde_json::Value;

fn folder() -> PathBuf {
    repository().join("examples/envoy")
}

fn services() -> Value {
    let text = std::fs::read_to_string(folder().join("docker-compose.yml")).unwrap();
    let file: Value = serde_yaml_ng::from_str(&text).unwrap();
    file["services"].clone()
}

/// A path of the compose file, from the root of the repository.
fn resolved(path: &str) -> PathBuf {
    let mut found = PathBuf::from("examples/envoy");
    for part in Path::new(path).components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => assert!(found.pop(), "{path} leaves the repository"),
            part => found.push(part),
        }
    }
    found
}

/// What a container sees where: (path in the repository, path in the container), read-only.
fn mounts(service: &Value) -> Vec<(PathBuf, String)> {
    let volumes = service["volumes"].as_array().unwrap();
    let mount = |volume: &Value| {
        let parts: Vec<&str> = volume.as_str().unwrap().split(':').collect();
        let [from, to, "ro"] = parts[..] else {
            panic!("{volume} is not mounted read-only")
        };
        (resolved(from), to.to_owned())
    };
    volumes.iter().map(mount).collect()
}

/// The value of a setting of `scripts/common.sh`.
fn setting(name: &str) -> String {
    let text = std::fs::read_to_string(repository().join("scripts/common.sh")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name}=")));
    line.unwrap_or_else(|| panic!("no {name}")).to_owned()
}

#[test]
fn the_containers_see_the_very_files_that_the_tests_run() {
    let services = services();
    let files: Vec<PathBuf> = ["envoy", "portcullis", "upstream"]
        .iter()
        .flat_map(|name| mounts(&services[name]))
        .map(|(file, _)| file)
        .collect();
    // The first is what `GatewayPlan` starts from; built artefacts are where Cargo puts them without a setting.
    let expected = [
        "examples/envoy/envoy.yaml",
        "target/wasm32-wasip1/filter/portcullis.wasm",
        "target/debug/portcullis",
        "examples/envoy/service.json",
        "examples/envoy/upstream.py",
    ];
    assert_eq!(files, expected.map(PathBuf::from));
    for file in files.iter().filter(|file| !file.starts_with("target")) {
        assert!(repository().join(file).is_file(), "{} does not exist", file.display());
    }
    assert_eq!(services.as_object().unwrap().len(), 3, "no container is left unchecked");
}

#[test]
fn each_container_starts_what_is_mounted_in_it() {
    let services = services();
    for (name, at) in [("envoy", 2), ("portcullis", 0), ("portcullis", 3), ("upstream", 1)] {
        let argument = services[name]["command"][at].as_str().unwrap();
        let is_mounted = mounts(&services[name]).iter().any(|(_, to)| to == argument);
        assert!(is_mounted, "{name}: {argument} is mounted nowhere");
        assert_eq!(
            services[name]["network_mode"], "host",
            "every address in the files is 127.0.0.1"
        );
    }
    // The configuration names the module from the folder that Envoy starts in.
    let text = std::fs::read_to_string(folder().join("envoy.yaml")).unwrap();
    let envoy: Value = serde_yaml_ng::from_str(&text).unwrap();
    let manager = &envoy["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"];
    let code = &manager["http_filters"][0]["typed_config"]["config"]["vm_config"]["code"];
    let module = code["local"]["filename"].as_str().unwrap();
    let seen = format!("{}/{module}", services["envoy"]["working_dir"].as_str().unwrap());
    assert!(
        mounts(&services["envoy"])
            .iter()
            .any(|(from, to)| *to == seen && from.ends_with(module)),
        "Envoy looks for {seen}"
    );
}

#[test]
fn the_image_of_envoy_is_of_the_version_that_the_tests_run() {
    let version = setting("ENVOY_VERSION");
    let minor = version.rsplit_once('.').unwrap().0;
    assert_eq!(
        services()["envoy"]["image"],
        format!("envoyproxy/envoy:v{minor}-latest")
    );
}
