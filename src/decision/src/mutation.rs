//! Test-only: removes one gate's check, so that a test can prove that named cases notice.

use core::sync::atomic::{AtomicUsize, Ordering};

use crate::rules::Gate;

static REMOVED: AtomicUsize = AtomicUsize::new(usize::MAX);

/// Removes the check of one gate, or restores all. Process-wide: such tests run one after another.
pub fn remove(gate: Option<Gate>) {
    let at = gate.and_then(|gate| Gate::ALL.into_iter().position(|other| other == gate));
    REMOVED.store(at.unwrap_or(usize::MAX), Ordering::SeqCst);
}

/// Whether the check of this gate is removed.
pub fn is_removed(gate: Gate) -> bool {
    Gate::ALL.get(REMOVED.load(Ordering::SeqCst)) == Some(&gate)
}
