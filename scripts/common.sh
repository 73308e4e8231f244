# shellcheck shell=bash
# What the scripts share: where things are, which tool versions, and how a step speaks. Sourced, never run.
#
# Left out on purpose: doing anything. Sourcing this file changes no state and looks for no tool.

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"

# The one place that names tool versions. The Rust version is `rust-version` in Cargo.toml, and the runner of
# wasm-bindgen has to be of exactly the version of the library in Cargo.lock.
ENVOY_VERSION=1.40.0
NODE_MAJOR_MIN=18
# The official clients that tests call the gateway with.
OPENAI_VERSION=3.57.0
ANTHROPIC_VERSION=2.14.0

# Tools are kept outside the clone, by version, so that the next clone finds them; the clone has links to them.
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/portcullis/tools
TOOLS=$ROOT/.tools

# Absolute, since the artefacts are handed to processes that run elsewhere.
TARGET=${CARGO_TARGET_DIR:-$ROOT/target}
[[ $TARGET == /* ]] || TARGET=$ROOT/$TARGET

WASM=$TARGET/wasm32-wasip1/filter/portcullis.wasm
SERVICE=$TARGET/debug/portcullis
ENVOY=$TOOLS/bin/envoy
WASM_BINDGEN_RUNNER=$TOOLS/bin/wasm-bindgen-test-runner

rust_version() { sed -n 's/^rust-version *= *"\(.*\)"/\1/p' Cargo.toml; }

# Prints nothing while Cargo.lock has no wasm-bindgen.
wasm_bindgen_version() { sed -n '/^name = "wasm-bindgen"$/{n;s/^version = "\(.*\)"/\1/p}' Cargo.lock; }

# at_least 1.95 1.96.1: is the second version at least the first?
at_least() { [[ $(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1) == "$1" ]]; }

say() { printf '%s\n' "$*"; }

# die WHAT-IS-MISSING [HOW-TO-GET-IT...]
die() {
  printf '%s: cannot go on: %s\n' "${0##*/}" "$1" >&2
  shift
  (($# == 0)) || printf '    %s\n' "$@" >&2
  exit 1
}

# Builds of the two artefacts; the profiles are explained in Cargo.toml.
build_filter() {
  cargo build --profile filter --target wasm32-wasip1 -p portcullis-filter || return
  # Every test that runs the case table, whatever the host, holds its module against this.
  sha256 "$WASM" >"$WASM.sha256"
}
sha256() { if command -v sha256sum >/dev/null; then sha256sum "$1"; else shasum -a 256 "$1"; fi; }
build_service() { cargo build -p portcullis; }
