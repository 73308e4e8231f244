//! How far a replay is: a bar on a terminal, else a line every few seconds, both on standard error.

use std::io::{self, IsTerminal as _};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Between two lines where there is no terminal.
const INTERVAL: Duration = Duration::from_secs(5);

/// Who shows it.
pub enum Progress {
    /// A bar.
    Bar(ProgressBar),
    /// Lines.
    Lines {
        /// Bytes in all, if that is known.
        bytes: Option<u64>,
        /// When the next one is due.
        next: Instant,
    },
}

impl Progress {
    /// `bytes` is the log's size, if that is known.
    pub fn of(bytes: Option<u64>) -> Self {
        if !io::stderr().is_terminal() {
            return Self::Lines { bytes, next: later() };
        }
        let template = match bytes {
            Some(_) => "{bar:40} {percent} %  {msg}  {elapsed_precise}, {eta_precise} left",
            None => "{spinner} {msg}  {elapsed_precise}",
        };
        let bar = bytes.map_or_else(ProgressBar::new_spinner, ProgressBar::new);
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Self::Bar(bar)
    }

    /// So many lines and bytes have been read.
    pub fn at(&mut self, lines: u64, read: u64) {
        match self {
            Self::Bar(bar) => {
                bar.set_position(read);
                bar.set_message(format!("{lines} lines"));
            }
            Self::Lines { bytes, next } if Instant::now() >= *next => {
                let share = bytes.and_then(|bytes| read.saturating_mul(100).checked_div(bytes));
                let share = share.map(|share| format!(", {share} %")).unwrap_or_default();
                eprintln!("portcullis replay: {lines} lines{share}");
                *next = later();
            }
            Self::Lines { .. } => {}
        }
    }

    /// The bar goes away: the report follows.
    pub fn done(self) {
        if let Self::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}

fn later() -> Instant {
    let now = Instant::now();
    now.checked_add(INTERVAL).unwrap_or(now)
}
