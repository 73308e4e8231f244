//! Waiting for a condition. There is no fixed pause anywhere in the tests: a condition is polled until it holds or the
//! deadline passes, and the message says what was awaited.

use std::time::{Duration, Instant};

/// Far longer than anything here takes on an idle machine, and shorter than a test runner's patience.
pub const DEADLINE: Duration = Duration::from_secs(20);

/// Polls `probe` every 10 ms until it gives a value.
///
/// # Panics
/// When `deadline` passes first.
pub async fn until<T>(what: &str, deadline: Duration, mut probe: impl AsyncFnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = probe().await {
            return value;
        }
        assert!(
            start.elapsed() < deadline,
            "gave up after {deadline:?} waiting for: {what}"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
