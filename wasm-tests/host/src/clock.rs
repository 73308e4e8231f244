//! Time that only a test moves, and random bytes that a seed decides.

/// Wall clock at the start of every host, in milliseconds since 1970: far from the monotonic clock's, as in reality.
const WALL_START_MS: u64 = 1_764_000_000_000;
/// Monotonic clock at the start of every host, in milliseconds.
const MONOTONIC_START_MS: u64 = 100_000;

/// The two clocks of a host.
#[derive(Debug, Clone)]
pub(crate) struct Clock {
    monotonic_ms: u64,
    wall_ms: u64,
}

impl Clock {
    pub(crate) const fn new() -> Self {
        Self {
            monotonic_ms: MONOTONIC_START_MS,
            wall_ms: WALL_START_MS,
        }
    }

    pub(crate) const fn advance(&mut self, ms: u64) {
        self.monotonic_ms += ms;
        self.wall_ms += ms;
    }

    pub(crate) const fn now_ms(&self) -> u64 {
        self.monotonic_ms
    }

    pub(crate) const fn monotonic_ns(&self) -> u64 {
        self.monotonic_ms * 1_000_000
    }

    pub(crate) const fn wall_ns(&self) -> u64 {
        self.wall_ms * 1_000_000
    }

    /// Somebody sets the wall clock.
    pub(crate) fn step_wall(&mut self, ms: i64) {
        self.wall_ms = self.wall_ms.saturating_add_signed(ms);
    }
}

/// `SplitMix64`: the same bytes for the same seed.
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = self.0;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            let bytes = (z ^ (z >> 31)).to_le_bytes();
            chunk.copy_from_slice(&bytes[..chunk.len()]);
        }
    }
}
