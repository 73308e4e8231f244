//! The table with its bounds against one that goes through its rows each time.

use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{Rng as _, SeedableRng as _};

use super::*;
use crate::recent::tests::standing;

/// Key, used of a million, and end.
type Plain = (String, u64, u64);

fn note(rows: &mut Vec<Plain>, key: &str, used: u64, ends_ms: u64, now_ms: u64) {
    if let Some(known) = rows.iter_mut().find(|(known, ..)| known == key) {
        (known.1, known.2) = (used, ends_ms);
        return;
    }
    if rows.len() >= KEPT {
        rows.retain(|(_, _, ends_ms)| *ends_ms > now_ms);
    }
    if rows.len() >= KEPT {
        let (at, furthest) = rows.iter().enumerate().min_by_key(|(_, row)| row.1).unwrap();
        if furthest.1 >= used {
            return;
        }
        rows.swap_remove(at);
    }
    rows.push((key.to_owned(), used, ends_ms));
}

#[test]
fn the_bounds_keep_the_rows_that_going_through_all_of_them_would_keep() {
    let mut rng = StdRng::seed_from_u64(7);
    // Each figure once, so that no two shares are equal.
    let mut figures: Vec<u64> = (0..12_000).collect();
    figures.shuffle(&mut rng);
    let (mut scopes, mut rows, mut now_ms) = (Scopes::default(), Vec::new(), 0_u64);
    let (mut full, mut taken_in) = (0, 0);
    for (at, used) in figures.into_iter().enumerate() {
        if at % 500 == 499 {
            // Once after all have ended.
            now_ms += if at > 6_000 && at < 6_500 { 60_000 } else { 0 };
            scopes.nearest(1, now_ms);
            rows.retain(|(_, _, ends_ms)| *ends_ms > now_ms);
        }
        now_ms += rng.random_range(0..20);
        let owner = format!("{{owner:{}}}:requests:60", rng.random_range(0..2_000));
        let reset_ms = rng.random_range(1..60_000);
        let (entry, state) = standing(owner.clone(), 1_000_000, used, reset_ms);
        let is_new = !scopes.rows.contains_key(&owner);
        full += u32::from(is_new && scopes.rows.len() == KEPT);
        scopes.note(&entry, &state, now_ms);
        note(&mut rows, &owner, used, now_ms + reset_ms, now_ms);
        taken_in += u32::from(is_new && scopes.rows.contains_key(&owner));
        let mut kept: Vec<Plain> = scopes
            .rows
            .iter()
            .map(|(key, row)| (key.clone(), row.used, row.ends_ms))
            .collect();
        kept.sort();
        rows.sort();
        assert_eq!(kept, rows);
    }
    assert!(
        full > 3_000 && taken_in > 500,
        "{full} met a full table, {taken_in} were taken in"
    );
}
