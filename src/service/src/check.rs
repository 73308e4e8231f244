//! `portcullis check`: every fault of every file, by the parsers that `serve` and the filter use.
//!
//! A result goes to stdout and a fault to stderr, so that a pipeline can keep them apart.

use std::env;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use portcullis_decision::config::{
    Environment, Faults, FileKind, FilterConfig, ServiceConfig, parse_policy_file, parse_rule_file,
};
use portcullis_decision::json::Node;

use crate::door::DoorFiles;
use crate::limiter::{self, Limiter};
use crate::metering::{self, Meter};
use crate::policy;
use crate::spans::export::Collector;

/// Exit code for a fault in a file or in the environment.
pub const FAULTY: u8 = 2;

/// What the service reads of this process's environment. Bytes that aren't UTF-8 are replaced rather than dropped: a
/// setting that can't be read must be a fault, not an absent setting.
pub fn environment() -> Environment {
    let read = |name| env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    Environment {
        profile: read("PORTCULLIS_PROFILE"),
        redis_url: read("REDIS_URL"),
        postgres_dsn: read("POSTGRES_DSN"),
        allow_passthrough: read("PORTCULLIS_ALLOW_PASSTHROUGH"),
        ibex_allow_passthrough: read("IBEX_MODEL_POLICY_ALLOW_PASSTHROUGH"),
        otlp_endpoint: read("OTEL_EXPORTER_OTLP_ENDPOINT"),
        otlp_traces_endpoint: read("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
    }
}

/// Checks `files` and says what each is, or what is wrong with it.
pub fn run(files: &[PathBuf]) -> ExitCode {
    let environment = environment();
    let (mut out, mut err) = (io::stdout().lock(), io::stderr().lock());
    let mut faulty = false;
    for file in files {
        match examine(file, &environment) {
            // A reader that has closed the pipe has seen enough; the exit code still tells.
            Ok(what) => drop(writeln!(out, "{}: ok ({what})", file.display())),
            Err(faults) => {
                faulty = true;
                report(&mut err, file, &faults);
            }
        }
    }
    if faulty {
        ExitCode::from(FAULTY)
    } else {
        ExitCode::SUCCESS
    }
}

/// Writes one line for each fault: `FILE: path: message`.
pub fn report(to: &mut impl Write, file: &Path, faults: &Faults) {
    for fault in faults.iter() {
        drop(writeln!(to, "{}: {fault}", file.display()));
    }
}

/// The bytes of a file.
///
/// # Errors
/// One fault of the whole file: why it can't be read.
pub fn read(file: &Path) -> Result<Vec<u8>, Faults> {
    fs::read(file).map_err(|error| whole_file(format!("cannot be read: {error}")))
}

/// A service's configuration and the limiter that it names, which is opened but not reached out for.
///
/// # Errors
/// All faults of the text and of the environment; then an address that no limiter can be made of.
pub fn service(text: &[u8], environment: &Environment) -> Result<(ServiceConfig, Option<Arc<dyn Limiter>>), Faults> {
    let config = ServiceConfig::parse(text, environment)?;
    let limiter = limiter::open(&config.limiter).map_err(|fault| {
        let mut faults = Faults::default();
        faults.add("limiter.url", fault.to_string());
        faults
    })?;
    Ok((config, limiter))
}

/// The metering store that a configuration names, which is opened but not reached out for.
///
/// # Errors
/// An address that no metering store can be made of.
pub fn meter(config: &ServiceConfig) -> Result<Option<Arc<dyn Meter>>, Faults> {
    metering::open(&config.metering).map_err(|fault| {
        let mut faults = Faults::default();
        faults.add("metering.url", fault.to_string());
        faults
    })
}

fn whole_file(message: String) -> Faults {
    let mut faults = Faults::default();
    faults.add("", message);
    faults
}

fn examine(file: &Path, environment: &Environment) -> Result<String, Faults> {
    let text = read(file)?;
    let kind = match Node::parse(&text) {
        Ok(node) => FileKind::of(&node).ok_or_else(|| {
            whole_file(
                "cannot tell what it configures: a rule file has \"gates\", a filter configuration \"rules\", a service \
                 configuration \"listen\", a policy file \"orgs\""
                    .to_owned(),
            )
        })?,
        // Every parser says the same about a text that is not JSON.
        Err(_) => FileKind::Rules,
    };
    match kind {
        FileKind::Rules => parse_rule_file(&text).map(|rules| format!("rules {}", rules.name)),
        FileKind::Filter => FilterConfig::parse(&text).map(|_| "filter configuration".to_owned()),
        FileKind::Policy => parse_policy_file(&text).map(|_| "policy file".to_owned()),
        FileKind::Service => {
            let (config, _) = service(&text, environment)?;
            Collector::open(config.tracing.as_ref())?;
            policy::open(&config.policy)?;
            meter(&config)?;
            DoorFiles::open(&config).map(|_| "service configuration".to_owned())
        }
    }
}
