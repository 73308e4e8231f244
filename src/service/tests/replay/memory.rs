//! A log streams by: however long it is, a replay keeps no more than its windows and its tally.

use std::io::{BufWriter, Write as _};
use std::process::Stdio;

use crate::process::portcullis;

/// Where the peak is taken: early, and at the end.
const EARLY: u64 = 5_000;
const REQUESTS: u64 = 25_000;
/// How much the peak may grow between the two: 125 bytes for each request. What a ledger remembers of an operation takes
/// several times as much.
const MOST_KB: u64 = 2_500;

/// The peak of a process's memory.
fn peak_kb(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().trim_end_matches(" kB").parse().ok()
}

/// All requests come within one window, so nothing lapses that is kept of each: each is an operation of its own, holds a
/// slot for a while, and is admitted or refused by a limit.
#[test]
fn memory_does_not_grow_with_the_log() {
    let mut command = portcullis(&[]);
    command.args(["replay", "-", "--rules", "contract-limits", "--json"]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("portcullis replay runs");
    let mut log = BufWriter::new(child.stdin.take().expect("a pipe"));
    let mut early = 0;
    for at in 0..REQUESTS {
        let (ms, org) = (1_772_366_400_000 + at / 2, at % 50);
        let (s, ms) = (ms / 1000, ms % 1000);
        writeln!(
            log,
            r#"{{"ts":{s}.{ms:03},"status":200,"tokens":7,"duration_ms":5,"envelope":{{"owner-id":"owner-{org}","org-id":"org-{org}","org-rate-limit-requests":400,"org-rate-limit-tokens":9000000,"org-concurrency-limit":100}}}}"#
        )
        .expect("replay reads");
        if at == EARLY {
            early = peak_kb(child.id()).expect("the process runs");
        }
    }
    log.flush().expect("replay reads");
    // The pipe holds a little of the log: all but that has been played.
    let late = peak_kb(child.id()).expect("the process runs");
    drop(log);
    let output = child.wait_with_output().expect("it ends");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(
        (&report["requests"], &report["malformed"]),
        (&REQUESTS.into(), &0.into())
    );
    assert_eq!(report["admitted"], 20_000, "50 orgs of 400 each: {report}");
    assert!(
        // The kernel sums this up per processor, so that it may even go down a little.
        late.saturating_sub(early) < MOST_KB,
        "from {early} to {late} kB over {REQUESTS} requests"
    );
}
