//! The mutation check: with one gate's check removed, the cases that name the gate turn red, and with it restored they are
//! green. Run with `--features mutation`; without it there is nothing to remove.
#![cfg(all(feature = "mutation", not(target_arch = "wasm32")))]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test may fail by panicking"
)]

mod table;

use table::pure::Pure;

use portcullis_decision::mutation::remove;
use portcullis_decision::rules::Gate;
use serde_json::Value;

#[test]
fn a_removed_check_turns_the_cases_red_that_name_its_gate() {
    for gate in Gate::ALL {
        let named: Vec<Value> = table::cases()
            .into_iter()
            .filter(|case| {
                case["removed_gate_shows"]
                    .as_array()
                    .is_some_and(|gates| gates.iter().any(|g| g == gate.name()))
            })
            .collect();
        assert!(!named.is_empty(), "no case names {}", gate.name());
        for case in named {
            remove(None);
            assert_eq!(table::run(&case, &mut Pure::of(&case)), Ok(()));
            remove(Some(gate));
            assert!(
                table::run(&case, &mut Pure::of(&case)).is_err(),
                "without the check of {}, {} is still green",
                gate.name(),
                case["name"]
            );
            remove(None);
        }
    }
}
