//! What is done in place is what is done to a decoded slot, and a key finds its slots.

use std::collections::HashSet;
use std::vec::Vec;

#[cfg(target_arch = "wasm32")]
use wasm_bindgen_test::wasm_bindgen_test as test;

use super::super::slot::{Remembered, Slot};
use super::*;
use crate::class::Code;
use crate::envelope::Ids;
use crate::lease::Bundle;
use crate::limits::{Scope, StampedLimits};
use crate::operation::OperationId;
use crate::verdict::Denial;

const BUNDLE: &[u8] = b"whose it is";
const NOW_MS: u64 = 100_000;
const TIMES: Times = Times {
    now_ms: NOW_MS,
    max_age_ms: 1_000,
    fetch_ms: 250,
};

/// Numbers that look random, the same each time.
fn numbers() -> impl FnMut(u64) -> u64 {
    let mut seed = 0x2545_f491_u64;
    move |below| {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    }
}

fn any_slot(random: &mut impl FnMut(u64) -> u64) -> Slot {
    let blocks = (0..random(5)).map(|n| Block {
        op: OperationId::from_random([u8::try_from(n).unwrap(); 16]),
        requests: random(4),
        granted: random(8),
        tokens: Some(random(100)).filter(|_| n % 2 == 0),
        largest_hold: 1 + random(60),
        ends_ms: match random(40) {
            0 => NOW_MS - 1_500,
            1 => NOW_MS + 100_000,
            _ => NOW_MS - 100 + random(1_500),
        },
    });
    Slot {
        blocks: blocks.take(MOST_BLOCKS).collect(),
        fetching_until_ms: random(2) * (NOW_MS + random(200)),
        remembered: (random(10) == 0).then(|| Remembered {
            denial: Denial::plain(Code::RateLimited, None),
            hold: 3,
            since_ms: NOW_MS,
            until_ms: NOW_MS + 10,
        }),
        seen: (random(2) == 0).then(|| Seen {
            tightest: LimitState {
                scope: Scope::Org,
                resource: if random(2) == 0 {
                    Resource::Requests
                } else {
                    Resource::Tokens
                },
                limit: 100,
                remaining: random(100),
                reset_ms: random(1_000),
                window_s: 60,
            },
            at_ms: NOW_MS - random(500),
        }),
    }
}

#[test]
fn an_admission_in_place_is_the_one_of_the_decoded_slot() {
    let mut random = numbers();
    let (mut in_place, mut declined) = (0, 0);
    for _ in 0..20_000 {
        let mut slot = any_slot(&mut random);
        let before = slot.encode(BUNDLE);
        let hold = random(80);
        let mut value = before.clone();
        let share = Handout::of(&mut value).and_then(|handout| handout.spend(hold, TIMES));
        let has_more_to_do = slot.remembered.is_some() || !slot.take_orphans(NOW_MS).is_empty();
        let spent = slot.spend(hold, TIMES);
        match share {
            Some(share) => {
                assert!(!has_more_to_do);
                assert_eq!(spent, Some((share, None)));
                assert_eq!(value, slot.encode(BUNDLE));
                in_place += 1;
            }
            None => {
                assert_eq!(value, before, "nothing was handed out");
                assert!(has_more_to_do || spent.is_none_or(|(_, leftover)| leftover.is_some()));
                declined += 1;
            }
        }
    }
    assert!(in_place > 2_000 && declined > 2_000, "{in_place} and {declined}");
}

#[test]
fn a_value_that_is_cut_or_lies_about_its_parts_hands_out_nothing() {
    let mut slot = any_slot(&mut numbers());
    slot.remembered = None;
    slot.blocks.retain(|block| block.requests > 1);
    let whole = slot.encode(BUNDLE);
    for length in 0..whole.len() {
        assert!(Handout::of(&mut whole[..length].to_vec()).is_none(), "{length}");
    }
    let longer = [&whole[..], b"x"].concat();
    assert!(Handout::of(&mut longer.clone()).is_none());
    assert!(Handout::of(&mut whole.clone()).is_some());
    for at in [0, 1, 3 + BUNDLE.len() + 8] {
        let mut other = whole.clone();
        other[at] = 77;
        assert!(Handout::of(&mut other).is_none(), "{at}");
    }
}

#[test]
fn neighbouring_keys_are_spread_over_the_slots_and_share_no_two_of_them() {
    let (tenants, slots) = (8_192, 8_192);
    let of = |tenant: u64| {
        let owner = std::format!("tenant-{tenant:07}");
        let subject = Ids {
            owner: &owner,
            ..Ids::default()
        };
        Bundle::of(subject, &StampedLimits::default(), "portcullis/0123456789abcdef", slots)
            .unwrap()
            .slots
    };
    let all: Vec<[u64; 2]> = (0..tenants).map(of).collect();
    for which in [0, 1] {
        let distinct = all.iter().map(|slots| slots[which]).collect::<HashSet<_>>().len();
        // Of as many balls thrown at random into as many boxes, 1 - 1/e of the boxes get one: 5178.
        assert!(
            (5_050..5_300).contains(&distinct),
            "{distinct} slots are some tenant's number {which}"
        );
    }
    assert!(all.iter().collect::<HashSet<_>>().len() > 8_180);
}
