//! Files of the service's door (tokens, certificates) that are replaced while it runs.
//!
//! They are read again each second, whole: a mounted secret is replaced by a link that may keep its time. A version that
//! can't be used changes nothing, so that nobody is locked out by half a file: the last good one stays in force, and an ERROR
//! line says so once a minute. It is told only at the second look in a row, since two files are not replaced at once.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::after;

/// Between two looks at the files.
const LOOK: Duration = Duration::from_secs(1);
/// Between two lines about files that can't be used.
const TELL: Duration = Duration::from_secs(60);

/// What is read from files that may change.
pub trait Reread: Send + Sync + 'static {
    /// The event of a new version that is in force.
    const LOADED: &str;
    /// The event of a version that can't be used.
    const UNUSABLE: &str;

    /// The key of the configuration that names the files.
    fn key(&self) -> &'static str;

    /// Takes the files as they stand now; what is in force then, if they have changed.
    ///
    /// # Errors
    /// Why they can't be used. Nothing of what is secret in them.
    fn look(&self) -> Result<Option<String>, Vec<String>>;
}

/// Looks at the files again and again, for ever.
pub async fn run<R: Reread>(read: Arc<R>) {
    let mut ticks = interval(LOOK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut in_a_row, mut next_tale) = (0_u32, Instant::now());
    loop {
        ticks.tick().await;
        let this = Arc::clone(&read);
        // A file on a network may take its time.
        let Ok(looked) = tokio::task::spawn_blocking(move || this.look()).await else {
            continue;
        };
        let reasons = match looked {
            Ok(news) => {
                (in_a_row, next_tale) = (0, Instant::now());
                if let Some(what) = news {
                    let key = read.key();
                    tracing::info!(
                        event = R::LOADED,
                        "{key}: the file has changed, and {what} are in force"
                    );
                }
                continue;
            }
            Err(reasons) => reasons,
        };
        in_a_row = in_a_row.saturating_add(1);
        if in_a_row > 1 && Instant::now() >= next_tale {
            next_tale = after(Instant::now(), TELL);
            let (key, reason) = (read.key(), reasons.join("; "));
            tracing::error!(
                event = R::UNUSABLE,
                "{key}: {reason}; what was read before stays in force"
            );
        }
    }
}
