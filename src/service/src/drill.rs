//! `portcullis drill`: whether a running gateway refuses what its rules say, by one request for each failure class.
//!
//! What has to come is said by the code of `explain`, from the files that the gateway was configured by; what came is taken
//! from the wire. Outages are brought about by the services' own fault switch, which production does not have.
//!
//! Left out on purpose: load, and whether a limit holds under many requests at once, which tests show.

mod arguments;
mod client;
mod course;
mod judge;
mod probes;
mod report;
mod switch;

use std::fs;
use std::io::{self, Write as _};
use std::process::ExitCode;

pub use self::arguments::DrillArguments;
use self::course::Drill;
use crate::check::FAULTY;

/// Drills a gateway. Exit code 0 if all is as predicted, 1 if anything is not, 2 for a fault in the arguments.
pub fn run(arguments: &DrillArguments) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return faulty(&[format!("cannot start: {error}")]),
    };
    let findings = runtime.block_on(async {
        let drill = Drill::set(arguments).await?;
        drill.findings().await
    });
    let findings = match findings {
        Ok(findings) => findings,
        Err(wrong) => return faulty(&wrong),
    };
    drop(io::stdout().lock().write_all(findings.table().as_bytes()));
    let json = serde_json::to_string_pretty(&findings).unwrap_or_default();
    for (option, file, text) in [
        ("--report", &arguments.report, findings.markdown()),
        ("--json", &arguments.json, format!("{json}\n")),
    ] {
        if let Some(file) = file
            && let Err(error) = fs::write(file, text)
        {
            return faulty(&[format!("{option} {}: cannot be written: {error}", file.display())]);
        }
    }
    if findings.green {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn faulty(wrong: &[String]) -> ExitCode {
    let mut err = io::stderr().lock();
    for fault in wrong {
        drop(writeln!(err, "portcullis drill: {fault}"));
    }
    ExitCode::from(FAULTY)
}
