#!/usr/bin/env bash
# Builds the fuzz targets as cargo-fuzz would, without cargo-fuzz and on stable Rust, and runs each for some seconds.
#
#   wasm-tests/fuzz/run.sh [SECONDS [TARGET...]]     default: 25 seconds, every target
#
# Fails if a target crashes, hangs or grows, and also if it has not really run: no executions, or none that the coverage
# guided. No sanitizer: the parsers have no unsafe code, and a sanitizer would need nightly Rust.

source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/common.sh"

FUZZ=$ROOT/wasm-tests/fuzz
seconds=${1-25}
[[ $seconds =~ ^[1-9][0-9]*$ ]] || die "'$seconds' is no number of seconds" "usage: run.sh [SECONDS [TARGET...]]"
shift $(($# > 0 ? 1 : 0))
targets=("$@")
((${#targets[@]})) || targets=(body signature usage)

# Under this many edges the code was not instrumented: then a fuzzer only rolls dice. Each target has over 300.
COVERAGE_MIN=200

triple=$(rustc -vV | sed -n 's/^host: //p')
flags=(
  -Cpasses=sancov-module
  -Cllvm-args=-sanitizer-coverage-level=4
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters
  -Cllvm-args=-sanitizer-coverage-pc-table
  -Cllvm-args=-sanitizer-coverage-trace-compares
  -Cllvm-args=-simplifycfg-branch-fold-threshold=0
  -Ccodegen-units=1
  --cfg=fuzzing
)
[[ $triple != *-linux-* ]] || flags+=(-Cllvm-args=-sanitizer-coverage-stack-depth)

command -v "${CXX:-c++}" >/dev/null || die "there is no C++ compiler, with which libFuzzer is built" "apt-get install g++"

# With --target the flags stay away from build scripts.
RUSTFLAGS="${flags[*]}" CARGO_TARGET_DIR=$TARGET/fuzz \
  cargo build --release --locked --target "$triple" --manifest-path "$FUZZ/Cargo.toml"

failed=0
for target in "${targets[@]}"; do
  corpus=$TARGET/fuzz/corpus/$target artifacts=$TARGET/fuzz/artifacts/$target
  log=$TARGET/fuzz/$target.log
  mkdir -p "$corpus" "$artifacts"
  status=0
  # What is found goes to the first folder; the seeds are only read.
  "$TARGET/fuzz/$triple/release/$target" "$corpus" "$FUZZ/seeds/$target" \
    -max_total_time="$seconds" -max_len=4096 -timeout=10 -rss_limit_mb=1024 -dict="$FUZZ/json.dict" \
    -artifact_prefix="$artifacts/" -print_final_stats=1 </dev/null >"$log" 2>&1 || status=$?
  runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
  rate=$(sed -n 's/^stat::average_exec_per_sec: *//p' "$log")
  coverage=$(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$log" | tail -n 1)
  say "$target: ${runs:-0} runs, ${rate:-0} a second, ${coverage:-0} edges covered"
  if ((status != 0)); then
    tail -n 30 "$log"
    say "$target: failed with status $status. The input is in $artifacts/, and runs alone with" \
      "    $TARGET/fuzz/$triple/release/$target FILE"
    failed=1
  elif ((${runs:-0} == 0 || ${coverage:-0} < COVERAGE_MIN)); then
    tail -n 30 "$log"
    say "$target: it has not run, or not by coverage (at least $COVERAGE_MIN edges are expected)"
    failed=1
  fi
done
exit $failed
