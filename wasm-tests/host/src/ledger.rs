//! What the module costs: host calls with the bytes that they carry, and fuel of each callback. The figures are the same
//! on every machine, so they can be compared with a file.

use std::collections::BTreeMap;

/// Host calls of one name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tally {
    /// How many.
    pub calls: u64,
    /// Bytes that went from the guest to the host and back.
    pub bytes: u64,
}

/// Callbacks of one name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Spent {
    /// How many.
    pub calls: u64,
    /// Fuel: about one unit for each instruction.
    pub fuel: u64,
}

/// Everything so far. Take a copy before and [`Ledger::since`] after to have one step's cost.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ledger {
    /// By the import's name.
    pub host_calls: BTreeMap<&'static str, Tally>,
    /// By the export's name.
    pub callbacks: BTreeMap<&'static str, Spent>,
}

impl Ledger {
    /// What was added to `earlier`; names without anything new are left out.
    pub fn since(&self, earlier: &Self) -> Self {
        let mut step = self.clone();
        for (name, before) in &earlier.host_calls {
            let tally = step.host_calls.entry(name).or_default();
            tally.calls -= before.calls;
            tally.bytes -= before.bytes;
        }
        for (name, before) in &earlier.callbacks {
            let spent = step.callbacks.entry(name).or_default();
            spent.calls -= before.calls;
            spent.fuel -= before.fuel;
        }
        step.host_calls.retain(|_, tally| tally.calls > 0);
        step.callbacks.retain(|_, spent| spent.calls > 0);
        step
    }

    /// Host calls of this name.
    pub fn tally(&self, name: &str) -> Tally {
        self.host_calls.get(name).copied().unwrap_or_default()
    }

    /// Callbacks of this name.
    pub fn spent(&self, name: &str) -> Spent {
        self.callbacks.get(name).copied().unwrap_or_default()
    }

    /// All host calls.
    pub fn total(&self) -> Tally {
        self.host_calls.values().fold(Tally::default(), |sum, tally| Tally {
            calls: sum.calls + tally.calls,
            bytes: sum.bytes + tally.bytes,
        })
    }

    /// Fuel of all callbacks.
    pub fn fuel(&self) -> u64 {
        self.callbacks.values().map(|spent| spent.fuel).sum()
    }

    /// Counts a call; which of its name it is, from 1.
    pub(crate) fn call(&mut self, name: &'static str) -> u64 {
        let tally = self.host_calls.entry(name).or_default();
        tally.calls += 1;
        tally.calls
    }

    pub(crate) fn carried(&mut self, name: &'static str, bytes: usize) {
        self.host_calls.entry(name).or_default().bytes += bytes as u64;
    }

    pub(crate) fn callback(&mut self, name: &'static str, fuel: u64) {
        let spent = self.callbacks.entry(name).or_default();
        spent.calls += 1;
        spent.fuel += fuel;
    }
}
