//! `portcullis replay`: what a log of requests would come to under other rules or limits.
//!
//! One thread reads lines, another plays them: each goes through the filter's own code at its own time, and is decided by
//! the service's over memory. The log streams by. What is kept is what a limiter would keep (the windows that run, requests
//! under way) and a tally of bounded size.

pub mod envoy;
pub mod limit;
pub mod player;
pub mod progress;
pub mod record;
pub mod table;
pub mod tally;

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use clap::{Args, ValueEnum};
use portcullis_decision::config::Mode;

use crate::check::FAULTY;
use crate::imagined::scene::{SceneArguments, Wrong};
use limit::LimitChange;
use player::Player;
use progress::Progress;
use record::Record;
use tally::{Report, Tally};

/// Lines that are handed over at once.
const BATCH: usize = 512;
/// Batches that may wait.
const WAITING: usize = 8;
/// A longer line is no record of a request.
const LONGEST_LINE: u64 = 1_048_576;

/// Who has written the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Form {
    /// The keys of docs/replay.md
    Native,
    /// Envoy's JSON access log, in the format of docs/replay.md
    Envoy,
}

/// The arguments of `replay`.
#[derive(Debug, Args)]
pub struct ReplayArguments {
    /// The log, one JSON object a line; - is standard input
    #[arg(value_name = "FILE")]
    log: PathBuf,
    #[command(flatten)]
    scene: SceneArguments,
    /// What the lines look like
    #[arg(long, value_enum, default_value_t = Form::Native)]
    from: Form,
    /// A contract limit for every request that has the scope's id: SCOPE:ID|*:RESOURCE=N|none; may be given again
    #[arg(long, value_name = "LIMIT")]
    limit: Vec<LimitChange>,
    /// Tenants in each list
    #[arg(long, value_name = "N", default_value_t = 10)]
    top: usize,
    /// A JSON object instead of tables
    #[arg(long)]
    json: bool,
}

/// A request, and when it came in milliseconds since 1970.
type Timed = (Record, u64);

/// Lines of a log, read.
struct Batch {
    /// Each with its number.
    records: Vec<(u64, Result<Timed, String>)>,
    /// Lines and bytes up to here.
    lines: u64,
    bytes: u64,
    /// Why there are no more, if that is no end.
    broken: Option<String>,
}

impl ReplayArguments {
    fn open(&self) -> Result<(Box<dyn io::Read + Send>, Option<u64>), Wrong> {
        if self.log == Path::new("-") {
            return Ok((Box::new(io::stdin()), None));
        }
        let wrong = |error: io::Error| vec![format!("{}: cannot be read: {error}", self.log.display())];
        let file = File::open(&self.log).map_err(wrong)?;
        let facts = file.metadata().map_err(wrong)?;
        if facts.is_dir() {
            return Err(vec![format!("{}: cannot be read: is a folder", self.log.display())]);
        }
        Ok((Box::new(file), facts.is_file().then_some(facts.len())))
    }

    /// The report, and why the log could not be read to its end, if that is so.
    fn report(&self) -> Result<(Report, Option<String>), Wrong> {
        let scene = self.scene.set()?;
        let (log, bytes) = self.open()?;
        for note in &scene.notes {
            eprintln!("portcullis replay: note: {note}");
        }
        let mut config = scene.config.clone();
        // What would be refused is the question, whether or not it is carried out today.
        config.mode = Mode::Enforce;
        // What was signed is gone from a log, and a limit that is changed here is signed by nobody.
        config.signatures = None;
        let prefix = config.prefix.clone();
        let (sender, receiver) = sync_channel(WAITING);
        let (form, limits, of_reader) = (self.from, self.limit.clone(), prefix.clone());
        let reader = thread::spawn(move || read(log, form, &limits, &of_reader, &sender));
        let mut progress = Progress::of(bytes);
        // The counters that were said to stand somewhere do so at the first request.
        let start = |now_ms| Ok(Player::new(scene.filter_as(config.clone(), now_ms)?, now_ms));
        let played = play(&receiver, start, &prefix, &mut progress);
        drop(receiver);
        progress.done();
        // A reader that panicked has ended the log early, and its last batch says nothing of it.
        let ended = reader.join().map_err(|_| vec!["the log could not be read".to_owned()]);
        let (tally, broken, ends) = played?;
        ended?;
        Ok((tally.report(&scene.config.rules.name, self.top, ends), broken))
    }
}

type Played = (Tally, Option<String>, (u64, u64));

fn play(
    batches: &Receiver<Batch>,
    start: impl Fn(u64) -> Result<Player, Wrong>,
    prefix: &str,
    progress: &mut Progress,
) -> Result<Played, Wrong> {
    let mut tally = Tally::default();
    let mut player: Option<Player> = None;
    let mut broken = None;
    for batch in batches {
        for (number, timed) in batch.records {
            let (record, at_ms) = match timed {
                Ok(timed) => timed,
                Err(fault) => {
                    tally.malformed(number, fault);
                    continue;
                }
            };
            let player = match &mut player {
                Some(player) => player,
                none => none.insert(start(at_ms)?),
            };
            let fate = player.play(&record, at_ms);
            tally.add(&record, at_ms, fate, prefix);
        }
        progress.at(batch.lines, batch.bytes);
        broken = batch.broken;
    }
    let ends = player.map_or((0, 0), |player| (player.unordered, player.ended_early));
    Ok((tally, broken, ends))
}

/// Reads a log to its end, or until nobody listens.
fn read(log: Box<dyn io::Read + Send>, form: Form, limits: &[LimitChange], prefix: &str, batches: &SyncSender<Batch>) {
    let mut log = BufReader::with_capacity(1 << 16, log);
    let mut line = Vec::new();
    let (mut lines, mut bytes) = (0_u64, 0_u64);
    loop {
        let mut records = Vec::with_capacity(BATCH);
        let mut broken = None;
        let mut is_over = false;
        while records.len() < BATCH {
            line.clear();
            let taken = (&mut log).take(LONGEST_LINE).read_until(b'\n', &mut line);
            let length = match taken {
                Ok(length) => length,
                Err(error) => {
                    broken = Some(format!("the log can't be read after line {lines}: {error}"));
                    0
                }
            };
            is_over = length == 0;
            if is_over {
                break;
            }
            lines = lines.saturating_add(1);
            bytes = bytes.saturating_add(u64::try_from(length).unwrap_or(u64::MAX));
            if line.last() != Some(&b'\n') && u64::try_from(length).unwrap_or(u64::MAX) >= LONGEST_LINE {
                bytes = bytes.saturating_add(skip_line(&mut log));
                records.push((lines, Err(format!("it is longer than {LONGEST_LINE} bytes"))));
                continue;
            }
            let text = line.trim_ascii();
            if text.is_empty() {
                continue;
            }
            let timed = timed(text, form, prefix).map(|(mut record, at_ms)| {
                limits.iter().for_each(|limit| limit.apply(&mut record, prefix));
                (record, at_ms)
            });
            records.push((lines, timed));
        }
        let batch = Batch {
            records,
            lines,
            bytes,
            broken,
        };
        if batches.send(batch).is_err() || is_over {
            return;
        }
    }
}

/// Reads a line.
fn timed(line: &[u8], form: Form, prefix: &str) -> Result<Timed, String> {
    let (record, time) = match form {
        Form::Native => (Record::parse(line, prefix), "ts"),
        Form::Envoy => (envoy::parse(line, prefix), "start_time"),
    };
    let timed = record.and_then(|record| {
        let at_ms = record.at_ms.ok_or_else(|| format!("it has no time ({time:?})"))?;
        Ok((record, at_ms))
    });
    timed.map_err(|fault| {
        let has = |key: &[u8]| line.windows(key.len()).any(|piece| piece == key);
        if form == Form::Native && has(b"\"start_time\"") && !has(b"\"ts\"") {
            format!("{fault}; it looks like a line of Envoy's log (\"start_time\"): give --from envoy")
        } else {
            fault
        }
    })
}

/// Passes over the rest of a line; how many bytes that was.
fn skip_line(log: &mut impl BufRead) -> u64 {
    let mut skipped = 0_u64;
    while let Ok(piece) = log.fill_buf() {
        let end = piece.iter().position(|byte| *byte == b'\n');
        let length = end.map_or(piece.len(), |end| end.saturating_add(1));
        log.consume(length);
        skipped = skipped.saturating_add(u64::try_from(length).unwrap_or(u64::MAX));
        if end.is_some() || length == 0 {
            break;
        }
    }
    skipped
}

/// Replays a log.
pub fn run(arguments: &ReplayArguments) -> ExitCode {
    let (report, broken) = match arguments.report() {
        Ok(played) => played,
        Err(faults) => {
            let mut err = io::stderr().lock();
            for fault in faults {
                drop(writeln!(err, "portcullis replay: {fault}"));
            }
            return ExitCode::from(FAULTY);
        }
    };
    let text = if arguments.json {
        serde_json::to_string_pretty(&report).map_or_else(|_| String::new(), |text| format!("{text}\n"))
    } else {
        table::of(&report)
    };
    // A reader that has closed the pipe has seen enough.
    drop(io::stdout().lock().write_all(text.as_bytes()));
    if let Some(why) = &broken {
        eprintln!("portcullis replay: {why}");
    }
    if report.malformed > 0 || broken.is_some() {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}
