//! `portcullis explain`: what would happen to a request, and which line of the rules says so.
//!
//! The request goes through the filter's own code and is decided by the service's, over memory: nothing is called, nothing
//! real is counted. What came before is played first (`--after`, `--times`), what is spent is charged (`--spent`).

pub mod curl;
pub mod gates;
mod reasons;
pub mod report;
pub mod request;
pub mod table;

use std::fs;
use std::io::{self, IsTerminal as _, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use portcullis_decision::config::Mode;
use portcullis_decision::reply::Reply;

use crate::check::FAULTY;
use crate::imagined::filter::{Exchange, ImaginedFilter};
use crate::imagined::scene::{Scene, SceneArguments, Wrong};
use crate::imagined::{Decided, Outage};
use crate::metering::memory::unix_ms;
use crate::replay::record::{Record, time_ms};
use report::{Report, Seen};
use request::Request;

/// The arguments of `explain`.
#[derive(Debug, Args)]
pub struct ExplainArguments {
    #[command(flatten)]
    scene: SceneArguments,
    /// The request as a curl line; without any other option that says a request, it is read from standard input
    #[arg(long, value_name = "LINE")]
    curl: Option<String>,
    /// The method
    #[arg(long, short = 'X', value_name = "METHOD", conflicts_with = "curl")]
    method: Option<String>,
    /// The path, with its query if it has one
    #[arg(long, value_name = "PATH", conflicts_with = "curl")]
    path: Option<String>,
    /// A header, "Name: value"; may be given again, also beside --curl
    #[arg(long = "header", short = 'H', value_name = "HEADER")]
    headers: Vec<String>,
    /// The body, or @FILE
    #[arg(long, value_name = "BODY|@FILE", conflicts_with = "curl")]
    body: Option<String>,
    /// When it comes: RFC 3339, or seconds since 1970; months depend on it. Now unless given
    #[arg(long, value_name = "TIME", value_parser = time_ms)]
    at: Option<u64>,
    /// Sends the request so many times, and explains the last
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    times: u32,
    /// Requests that came before, one a line, in the format of `replay`; a line without "ts" comes at the same moment
    #[arg(long, value_name = "FILE")]
    after: Option<PathBuf>,
    /// A JSON object instead of a table
    #[arg(long)]
    json: bool,
}

impl ExplainArguments {
    fn request(&self) -> Result<Request, Wrong> {
        let one = |fault: String| vec![fault];
        let says_none = self.method.is_none() && self.path.is_none() && self.body.is_none() && self.headers.is_empty();
        let mut request = match &self.curl {
            Some(line) => curl::parse(line).map_err(|fault| one(format!("--curl: {fault}")))?,
            None if says_none && !io::stdin().is_terminal() => {
                let mut line = String::new();
                let read = io::stdin().read_to_string(&mut line);
                read.map_err(|error| one(format!("standard input can't be read: {error}")))?;
                curl::parse(&line).map_err(|fault| one(format!("the curl line of standard input: {fault}")))?
            }
            None if says_none => {
                return Err(one(
                    "no request: say --curl LINE, or --method, --path, -H and --body".into()
                ));
            }
            None => Request::default(),
        };
        for text in &self.headers {
            request.headers.extend(request::header("-H", text).map_err(one)?);
        }
        if self.curl.is_none() && !says_none {
            request.body = request::body(self.body.as_deref()).map_err(one)?;
            let method = if request.body.is_empty() { "GET" } else { "POST" };
            request.method = self.method.clone().unwrap_or_else(|| method.to_owned());
            request.path = self.path.clone().unwrap_or_else(|| "/".to_owned());
            if !request.path.starts_with('/') && !request.path.contains("://") {
                return Err(one(format!("--path {:?} must begin with \"/\"", request.bare_path())));
            }
        }
        Ok(request)
    }

    fn report(&self) -> Result<Report, Wrong> {
        let scene = self.scene.set()?;
        let request = self.request()?;
        let at_ms = self.at.unwrap_or_else(unix_ms);
        let before = match &self.after {
            None => Vec::new(),
            Some(file) => before(file, &scene, at_ms)?,
        };
        explained(&scene, &before, &request, self.times, at_ms)
    }
}

/// What becomes of the last of `times` equal requests at `at_ms`, after those that came before.
///
/// # Errors
/// A counter of the scene that can't stand so.
pub fn explained(
    scene: &Scene,
    before: &[(Request, u64)],
    request: &Request,
    times: u32,
    at_ms: u64,
) -> Result<Report, Wrong> {
    let enforced_reply = enforced_reply(scene, before, request, times, at_ms)?;
    let mut filter = scene.filter(at_ms)?;
    let (exchange, decided) = play(&mut filter, before, request, times, at_ms);
    let lines = filter.last_words();
    let seen = Seen {
        scene,
        request,
        exchange,
        lines,
        decided,
        enforced_reply,
    };
    Ok(seen.report())
}

/// What came before, and then the request.
fn play(
    filter: &mut ImaginedFilter,
    before: &[(Request, u64)],
    request: &Request,
    times: u32,
    at_ms: u64,
) -> (Exchange, Option<Decided>) {
    for (earlier, at_ms) in before {
        let exchange = filter.request(&earlier.fields(), &earlier.body, *at_ms, None);
        filter.end(exchange.stream, *at_ms);
    }
    for _ in 1..times {
        let exchange = filter.request(&request.fields(), &request.body, at_ms, None);
        filter.end(exchange.stream, at_ms);
    }
    // Lines of earlier requests are none of this one.
    filter.last_words();
    let mut decided = Vec::new();
    let exchange = filter.request(&request.fields(), &request.body, at_ms, Some(&mut decided));
    (exchange, decided.pop())
}

/// In shadow mode: what the client would get, as the same filter would say it if it enforced.
fn enforced_reply(
    scene: &Scene,
    before: &[(Request, u64)],
    request: &Request,
    times: u32,
    at_ms: u64,
) -> Result<Option<Reply>, Wrong> {
    if scene.config.mode == Mode::Enforce {
        return Ok(None);
    }
    let mut config = scene.config.clone();
    config.mode = Mode::Enforce;
    let mut filter = scene.filter_as(config, at_ms)?;
    let (exchange, _) = play(&mut filter, before, request, times, at_ms);
    Ok(exchange.reply().cloned())
}

/// The requests of a file, with their times.
fn before(file: &Path, scene: &Scene, at_ms: u64) -> Result<Vec<(Request, u64)>, Wrong> {
    let wrong = |why: String| vec![format!("--after {}: {why}", file.display())];
    let text = fs::read(file).map_err(|error| wrong(format!("cannot be read: {error}")))?;
    let lines = text.split(|byte| *byte == b'\n').enumerate();
    let mut before = Vec::new();
    for (at, line) in lines.filter(|(_, line)| !line.trim_ascii().is_empty()) {
        let number = at.saturating_add(1);
        let record =
            Record::parse(line, &scene.config.prefix).map_err(|fault| wrong(format!("line {number}: {fault}")))?;
        let at_ms = record.at_ms.unwrap_or(at_ms);
        let body = record.body();
        let owned = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
        let of_head = |name| record.headers.get(name).unwrap_or_default().to_owned();
        let request = Request {
            method: of_head(":method"),
            path: of_head(":path"),
            authority: None,
            // Method and path come first.
            headers: record.headers.iter().skip(2).map(owned).collect(),
            body,
        };
        before.push((request, at_ms));
    }
    Ok(before)
}

/// Explains a request that somebody pasted: under shipped rules, with nothing of this machine's disk. The explanation, and the
/// command's table of it.
///
/// # Errors
/// What can't be understood of it.
pub fn pasted(curl: &str, rules: String, down: Vec<Outage>) -> Result<(Report, String), Wrong> {
    let scene = SceneArguments {
        config: None,
        rules: Some(rules),
        policy: None,
        service: None,
        spent: Vec::new(),
        counters: None,
        down,
    };
    let scene = scene.set()?;
    let request = curl::parse_without_files(curl).map_err(|fault| vec![format!("the request: {fault}")])?;
    let report = explained(&scene, &[], &request, 1, unix_ms())?;
    let table = table::of(&report);
    Ok((report, table))
}

/// Explains one request.
pub fn run(arguments: &ExplainArguments) -> ExitCode {
    match arguments.report() {
        Ok(report) => {
            let text = if arguments.json {
                serde_json::to_string_pretty(&report).map_or_else(|_| String::new(), |text| format!("{text}\n"))
            } else {
                table::of(&report)
            };
            // A reader that has closed the pipe has seen enough.
            drop(io::stdout().lock().write_all(text.as_bytes()));
            ExitCode::SUCCESS
        }
        Err(faults) => {
            let mut err = io::stderr().lock();
            for fault in faults {
                drop(writeln!(err, "portcullis explain: {fault}"));
            }
            ExitCode::from(FAULTY)
        }
    }
}
