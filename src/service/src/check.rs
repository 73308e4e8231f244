//! `portcullis check`: the faults of every file, by the parsers that `serve` and the filter use.
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
use crate::logs::Levels;
use crate::metering::{self, Meter};
use crate::policy::{self, PolicyStore};
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
    fs::read(file).map_err(|error| one("", format!("cannot be read: {error}")))
}

/// A service's configuration, and what it names: files are read, stores are opened and not reached out for.
pub struct Plan {
    /// The configuration.
    pub config: ServiceConfig,
    /// Its limiter.
    pub limiter: Option<Arc<dyn Limiter>>,
    /// Its policy store.
    pub policy: Option<Arc<dyn PolicyStore>>,
    /// Its metering store.
    pub meter: Option<Arc<dyn Meter>>,
    /// Where its spans go.
    pub collector: Option<Collector>,
    /// Its tokens and certificates.
    pub door: DoorFiles,
    /// Which lines it writes.
    pub levels: Levels,
}

/// What is to be served by this text and this process's environment.
///
/// # Errors
/// All faults of the text and of the environment; without any, all of what is named there.
pub fn service(text: &[u8], environment: &Environment) -> Result<Plan, Faults> {
    let config = ServiceConfig::parse(text, environment)?;
    let mut faults = Faults::default();
    let limiter = limiter::open(&config.limiter).map_err(|fault| one("limiter.url", fault.to_string()));
    let limiter = noted(limiter, &mut faults);
    let policy = noted(policy::open(&config.policy), &mut faults);
    let meter = metering::open(&config.metering).map_err(|fault| one("metering.url", fault.to_string()));
    let meter = noted(meter, &mut faults);
    let collector = noted(Collector::open(config.tracing.as_ref()), &mut faults);
    let door = noted(DoorFiles::open(&config), &mut faults);
    let levels = noted(Levels::of_environment(), &mut faults);
    let plan = (|| {
        Some(Plan {
            limiter: limiter?,
            policy: policy?,
            meter: meter?,
            collector: collector?,
            door: door?,
            levels: levels?,
            config,
        })
    })();
    faults.into_result(plan)
}

/// What was opened, or nothing and its faults beside those of the others.
fn noted<T>(opened: Result<T, Faults>, faults: &mut Faults) -> Option<T> {
    opened.map_err(|of_it| faults.append(of_it)).ok()
}

fn one(path: &str, message: String) -> Faults {
    let mut faults = Faults::default();
    faults.add(path, message);
    faults
}

fn examine(file: &Path, environment: &Environment) -> Result<String, Faults> {
    let text = read(file)?;
    let kind = match Node::parse(&text) {
        Ok(node) => FileKind::of(&node).ok_or_else(|| {
            one(
                "",
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
        FileKind::Service => service(&text, environment).map(|_| "service configuration".to_owned()),
    }
}
