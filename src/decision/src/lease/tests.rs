use std::collections::HashMap;
use std::string::String;
use std::vec;

use super::*;
use crate::class::Code;
use crate::limits::{Limit, Scope, StampedLimits};
use crate::rules::Gate;
use crate::wire::{DecideRequest, Subject};
#[cfg(target_arch = "wasm32")]
use wasm_bindgen_test::wasm_bindgen_test as test;

/// A host's memory. `races` writes of others come between a read and the next write.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    values: HashMap<u64, (Vec<u8>, u32)>,
    version: u32,
    races: u32,
    refuses: bool,
    pub(crate) is_absent: bool,
    pub(crate) has_no_random: bool,
    pub(crate) unix_s: Option<u64>,
}

impl Host for Memory {
    fn random(&mut self) -> Option<[u8; 16]> {
        (!self.has_no_random).then_some([7; 16])
    }

    fn unix_s(&mut self) -> Option<u64> {
        self.unix_s
    }
}

impl SharedMemory for Memory {
    fn get(&mut self, slot: u64) -> Result<Option<(Vec<u8>, u32)>, NoMemory> {
        if self.is_absent {
            return Err(NoMemory);
        }
        Ok(self.values.get(&slot).cloned())
    }

    fn set(&mut self, slot: u64, value: &[u8], version: u32) -> Written {
        if self.refuses {
            return Written::Refused;
        }
        if self.races > 0 {
            self.races -= 1;
            return Written::Raced;
        }
        if self.values.get(&slot).map_or(0, |(_, version)| *version) != version {
            return Written::Raced;
        }
        self.version += 1;
        self.values.insert(slot, (value.to_vec(), self.version));
        Written::Done
    }
}

fn request(owner: &str) -> DecideRequest {
    let text = std::format!(
        r#"{{"op": "{}", "profile": "development", "rules": "r", "mode": "enforce",
            "gates": [{{"gate": "contract", "when_unavailable": "reject", "limits": "envelope"}}],
            "budget_ms": 100, "window_s": 60, "tokens": 10, "subject": {{"owner": "{owner}"}},
            "limits": {{"owner": {{"requests": 100}}}}}}"#,
        op(1)
    );
    serde_json::from_str(&text).unwrap()
}

fn op(n: u8) -> OperationId {
    OperationId::from_random([n; 16])
}

fn bundle(owner: &str) -> Bundle {
    let request = request(owner);
    Bundle::of((&request.subject).into(), &request.limits, "config", 8).unwrap()
}

const fn at(now_ms: u64) -> Times {
    Times {
        now_ms,
        max_age_ms: 1_000,
        fetch_ms: 250,
    }
}

const fn grant(requests: u64, tokens: Option<u64>) -> Grant {
    Grant {
        requests,
        tokens,
        largest_hold: match tokens {
            Some(_) => Some(50),
            None => None,
        },
        ends_in_ms: 1_000,
    }
}

fn fetched(n: u8, grant: Grant, asked_ms: u64) -> Fetched {
    Fetched {
        lease: op(n),
        grant,
        tightest: None,
        asked_ms,
    }
}

fn taken(memory: &mut Memory, hold: u64, now_ms: u64) -> Take {
    take(memory, &bundle("o"), hold, at(now_ms), &mut Vec::new())
}

fn installed(memory: &mut Memory, n: u8, grant: Grant, now_ms: u64) -> Option<Installed> {
    install(
        memory,
        &bundle("o"),
        fetched(n, grant, now_ms),
        at(now_ms),
        &mut Vec::new(),
    )
}

#[test]
fn a_block_is_handed_out_to_the_last_admission_and_not_one_more() {
    let mut memory = Memory::default();
    assert_eq!(taken(&mut memory, 1, 0), Take::Ask { fetch: true });
    assert_eq!(
        taken(&mut memory, 1, 1),
        Take::Ask { fetch: false },
        "one asker at a time"
    );
    installed(&mut memory, 1, grant(10, None), 2).unwrap();
    let mut fetches = 0;
    for _ in 0..10 {
        let Take::Leased(share) = taken(&mut memory, 1, 3) else {
            panic!("ten admissions")
        };
        assert_eq!((share.lease, share.held_tokens), (op(1), None));
        fetches += u32::from(share.fetch);
    }
    assert_eq!(fetches, 1, "half way, and only once");
    assert_eq!(taken(&mut memory, 1, 4), Take::Ask { fetch: false });
    assert_eq!(
        taken(&mut memory, 1, 300),
        Take::Ask { fetch: true },
        "whoever fetched is late"
    );
}

#[test]
fn a_block_ends_by_its_time_and_what_is_left_goes_back_once() {
    let mut memory = Memory::default();
    let block = installed(&mut memory, 1, grant(10, Some(100)), 0).unwrap();
    assert!(matches!(taken(&mut memory, 30, 999), Take::Leased(_)));
    assert!(matches!(taken(&mut memory, 30, 1_000), Take::Ask { .. }));
    let unspent = retire(&mut memory, &block, 1_000).unwrap();
    assert_eq!((unspent.lease, unspent.requests, unspent.tokens), (op(1), 9, 70));
    assert_eq!(retire(&mut memory, &block, 1_000), None);
}

#[test]
fn what_a_gone_vm_has_fetched_is_returned_by_the_next_one() {
    let mut memory = Memory::default();
    installed(&mut memory, 1, grant(10, None), 0);
    let mut returns = Vec::new();
    take(&mut memory, &bundle("o"), 1, at(1_999), &mut returns);
    assert_eq!(returns, []);
    take(&mut memory, &bundle("o"), 1, at(2_300), &mut returns);
    assert_eq!(
        returns,
        [Unspent {
            lease: op(1),
            requests: 10,
            tokens: 0
        }]
    );
    take(&mut memory, &bundle("o"), 1, at(2_301), &mut returns);
    assert_eq!(returns.len(), 1);
}

#[test]
fn tokens_bound_the_admissions_and_the_leftover_of_the_last_one_goes_back() {
    let mut memory = Memory::default();
    installed(&mut memory, 1, grant(3, Some(100)), 0);
    assert!(
        matches!(
            taken(&mut memory, 1_000, 1),
            Take::Leased(Share {
                held_tokens: Some(50),
                ..
            })
        ),
        "clamped"
    );
    assert!(matches!(taken(&mut memory, 40, 1), Take::Leased(_)));
    assert!(matches!(taken(&mut memory, 40, 1), Take::Ask { .. }), "10 are left");
    let mut returns = Vec::new();
    let last = take(&mut memory, &bundle("o"), 4, at(1), &mut returns);
    assert!(matches!(last, Take::Leased(_)));
    assert_eq!(
        returns,
        [Unspent {
            lease: op(1),
            requests: 0,
            tokens: 6
        }]
    );
}

#[test]
fn a_lost_race_is_tried_again_and_a_lasting_one_decided_by_a_callout() {
    let mut memory = Memory::default();
    installed(&mut memory, 1, grant(10, None), 0);
    memory.races = 3;
    assert!(matches!(taken(&mut memory, 1, 1), Take::Leased(_)));
    memory.races = 1_000;
    assert_eq!(taken(&mut memory, 1, 1), Take::Ask { fetch: false });
    memory.races = 0;
    memory.refuses = true;
    assert_eq!(taken(&mut memory, 1, 1), Take::Ask { fetch: false });
    memory.is_absent = true;
    assert_eq!(taken(&mut memory, 1, 1), Take::Ask { fetch: false });
}

#[test]
fn any_value_that_is_not_this_bundles_own_is_no_lease() {
    let mut memory = Memory::default();
    let block = installed(&mut memory, 1, grant(10, None), 0).unwrap();
    let value = memory.values[&block.slot].0.clone();
    for cut in 0..value.len() {
        memory.values.insert(block.slot, (value[..cut].to_vec(), 7));
        assert!(matches!(taken(&mut memory, 1, 1), Take::Ask { .. }), "{cut}");
    }
    // Another configuration's.
    memory.values.clear();
    let like = request("o");
    let other = Bundle::of((&like.subject).into(), &like.limits, "another", 8).unwrap();
    for slot in bundle("o").slots {
        let foreign = Bundle {
            key: other.key.clone(),
            slots: [slot; 2],
        };
        install(
            &mut memory,
            &foreign,
            fetched(2, grant(10, None), 0),
            at(0),
            &mut Vec::new(),
        )
        .unwrap();
    }
    assert_eq!(
        taken(&mut memory, 1, 1),
        Take::Ask { fetch: false },
        "it is not displaced either"
    );
    assert!(
        matches!(taken(&mut memory, 1, 2_500), Take::Ask { fetch: true }),
        "once it is gone it is"
    );
}

#[test]
fn a_time_of_another_life_of_the_host_is_no_lease() {
    let mut memory = Memory::default();
    installed(&mut memory, 1, grant(10, None), 1_000_000);
    assert!(matches!(taken(&mut memory, 1, 5), Take::Ask { .. }));
}

#[test]
fn a_denial_is_remembered_until_its_reset_or_its_age_and_counts_down() {
    let limit = |resource, reset_ms| LimitState {
        scope: Scope::Owner,
        resource,
        limit: 100,
        remaining: 0,
        reset_ms,
        window_s: 60,
    };
    let denial = |resource, reset_ms: u64| Denial {
        code: Code::RateLimited,
        gate: Some(Gate::Contract),
        limit: Some(limit(resource, reset_ms)),
        retry_after_s: Some(reset_ms.div_ceil(1000)),
    };
    let mut memory = Memory::default();
    remember(&mut memory, &bundle("o"), &denial(Resource::Requests, 41_500), 0, at(0));
    let Take::Denied(said) = taken(&mut memory, 1, 600) else {
        panic!("denied")
    };
    assert_eq!((said.retry_after_s, said.limit.unwrap().reset_ms), (Some(41), 40_900));
    assert!(
        matches!(taken(&mut memory, 1, 1_000), Take::Ask { .. }),
        "at most max_age"
    );
    remember(
        &mut memory,
        &bundle("o"),
        &denial(Resource::Requests, 400),
        0,
        at(2_000),
    );
    assert!(matches!(taken(&mut memory, 1, 2_399), Take::Denied(_)));
    assert!(
        matches!(taken(&mut memory, 1, 2_400), Take::Ask { .. }),
        "at most its reset"
    );
    remember(
        &mut memory,
        &bundle("o"),
        &denial(Resource::Tokens, 4_000),
        30,
        at(3_000),
    );
    assert!(matches!(taken(&mut memory, 30, 3_001), Take::Denied(_)));
    assert!(
        matches!(taken(&mut memory, 29, 3_001), Take::Ask { .. }),
        "less may fit"
    );
    remember(
        &mut memory,
        &bundle("o"),
        &Denial::plain(Code::OrgSuspended, None),
        0,
        at(5_000),
    );
    assert!(matches!(taken(&mut memory, 1, 5_001), Take::Ask { .. }));
}

#[test]
fn a_denial_for_want_of_a_slot_is_not_remembered_and_what_is_charged_comes_before_any_denial() {
    let denial = |resource| Denial {
        code: Code::CapacityExhausted,
        gate: Some(Gate::Capacity),
        limit: Some(LimitState {
            scope: Scope::Platform,
            resource,
            limit: 3,
            remaining: 0,
            reset_ms: 1_000,
            window_s: 60,
        }),
        retry_after_s: Some(1),
    };
    let mut memory = Memory::default();
    remember(&mut memory, &bundle("o"), &denial(Resource::Concurrency), 0, at(0));
    assert!(matches!(taken(&mut memory, 1, 1), Take::Ask { .. }));
    let mut memory = Memory::default();
    installed(&mut memory, 1, grant(2, Some(100)), 0);
    remember(&mut memory, &bundle("o"), &denial(Resource::Tokens), 10, at(1));
    assert!(matches!(taken(&mut memory, 10, 2), Take::Leased(_)));
    assert!(matches!(taken(&mut memory, 10, 2), Take::Leased(_)));
    assert!(matches!(taken(&mut memory, 10, 2), Take::Denied(_)));
}

#[test]
fn only_rules_that_hold_nothing_and_count_no_runs_are_leased() {
    let leasable = |gates: &str| {
        let text = std::format!(
            r#"{{"profile": "development", "decision": {{"upstream": "p"}}, "rules": {{"name": "r", "gates": {gates},
                "envelope": {{"when_missing": "reject"}}, "decision": {{"when_unavailable": "reject"}}}}}}"#
        );
        are_leasable(&crate::config::FilterConfig::parse(text.as_bytes()).unwrap().rules)
    };
    let gate = |name: &str| std::format!(r#"{{"gate": "{name}", "when_unavailable": "reject"}}"#);
    let all = [gate("org_status"), gate("capacity"), gate("contract")].join(",");
    assert!(leasable(&std::format!("[{all}]")));
    assert!(!leasable(r#"[{"gate": "launch_rate", "per_minute": 3, "burst": 1}]"#));
    assert!(!leasable(&std::format!("[{}]", gate("concurrency"))));
    assert!(!leasable(&std::format!("[{}]", gate("metering"))));
    let limits: StampedLimits = serde_json::from_str(r#"{"auth": {"concurrency": 3}}"#).unwrap();
    assert_eq!(Bundle::of((&request("o").subject).into(), &limits, "c", 8), None);
}

#[test]
fn whatever_differs_to_a_gate_is_another_bundle() {
    let base = request("o");
    let mut others = vec![base.clone(); 5];
    others[0].subject = Subject {
        owner: "o2".into(),
        ..Subject::default()
    };
    others[1].subject.org = Some(String::new());
    others[2].subject.auth = Some(String::new());
    others[3].limits.owner.requests = Limit::of(101);
    others[4].limits.owner.tokens = Limit::of(5);
    let key_under = |request: &DecideRequest, configuration: &str| {
        Bundle::of((&request.subject).into(), &request.limits, configuration, 8)
            .unwrap()
            .key
    };
    let key = |request: &DecideRequest| key_under(request, "c");
    for other in &others {
        assert_ne!(key(&base), key(other));
    }
    assert_ne!(key(&base), key_under(&base, "d"));
    let mut same = base.clone();
    (same.op, same.tokens, same.budget_ms) = (op(9), 77, 1);
    assert_eq!(key(&base), key(&same));
}

/// Workers that take, fetch, install and retire in any order: what is handed out and what goes back is never more than what
/// was granted.
#[test]
fn however_workers_interleave_nothing_is_handed_out_twice() {
    let mut seed = 0x9e37_79b9_u64;
    let mut random = move |below: u64| {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    for _ in 0..200 {
        let mut memory = Memory::default();
        let (mut granted, mut handed_out, mut now_ms) = (0, 0, 0);
        let (mut blocks, mut returns) = (Vec::new(), Vec::new());
        for step in 0..200_u8 {
            now_ms += random(40);
            memory.races = u32::try_from(random(3)).unwrap();
            match random(8) {
                0 => {
                    let requests = 1 + random(20);
                    granted += requests;
                    let block = install(
                        &mut memory,
                        &bundle("o"),
                        fetched(step, grant(requests, None), now_ms.saturating_sub(random(300))),
                        at(now_ms),
                        &mut returns,
                    );
                    blocks.extend(block);
                }
                1 if !blocks.is_empty() => {
                    let block = blocks.swap_remove(usize::try_from(random(blocks.len() as u64)).unwrap());
                    returns.extend(retire(&mut memory, &block, now_ms));
                }
                _ => {
                    let take = take(&mut memory, &bundle("o"), 1, at(now_ms), &mut returns);
                    handed_out += u64::from(matches!(take, Take::Leased(_)));
                }
            }
        }
        for block in blocks {
            returns.extend(retire(&mut memory, &block, now_ms));
        }
        let returned: u64 = returns.iter().map(|unspent| unspent.requests).sum();
        assert_eq!(handed_out + returned, granted);
    }
}
