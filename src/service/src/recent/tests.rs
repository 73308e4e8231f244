//! The last hour, minute by minute, and what stays of more than there is room for.

use std::time::Duration;

use portcullis_decision::charge::{ChargeEntry, EntryState, key};
use portcullis_decision::class::{Code, Dependency};
use portcullis_decision::limits::{Resource, Scope};
use portcullis_decision::operation::OperationId;
use portcullis_decision::rules::Gate;
use portcullis_decision::verdict::{Bypass, Denial, Unavailability};
use tokio::time::advance;

use super::*;
use crate::decide::tests::request;

fn admission(bypassed: &[Bypass]) -> Verdict {
    Verdict::Admit(Admission {
        bypassed: bypassed.to_vec(),
        ..Admission::default()
    })
}

fn denial() -> Verdict {
    Verdict::Deny(Denial::plain(Code::RateLimited, None))
}

#[tokio::test(start_paused = true)]
async fn an_hour_is_remembered_minute_by_minute_and_no_longer() {
    let recent = Recent::default();
    let plain = request(1, json!({}));
    let shadow = request(2, json!({"mode": "shadow"}));
    let opened = [Bypass {
        class: FailureClass::LimiterUnavailable,
        gate: Gate::Contract,
    }];
    let closed = Verdict::Unavailable(Unavailability {
        dependency: Dependency::Policy,
        gate: None,
    });
    for verdict in [admission(&[]), admission(&opened), denial(), denial(), closed] {
        recent.note(&plain, &verdict);
    }
    recent.note(&shadow, &denial());
    recent.leased(40);
    advance(Duration::from_secs(61)).await;
    recent.note(&plain, &admission(&[]));
    let seen = recent.json();
    assert_eq!(
        seen["hour"]["sum"],
        json!({"admitted": 2, "bypassed": 1, "shadow_refused": 1, "leased": 40,
            "refused": {"quota_exhausted": 2, "policy_unavailable": 1}})
    );
    let minutes = seen["hour"]["minutes"].as_array().unwrap();
    assert_eq!(
        (minutes.len(), &minutes[0]["admitted"], &minutes[1]["admitted"]),
        (60, &json!(1), &json!(1))
    );
    assert_eq!(minutes[1]["refused"]["quota_exhausted"], 2);
    let bypass = &seen["bypasses"][0];
    assert_eq!(
        (&bypass["class"], &bypass["gate"]),
        (&json!("limiter_unavailable"), &json!("contract"))
    );
    advance(Duration::from_secs(59 * 60)).await;
    let seen = recent.json();
    assert_eq!(seen["hour"]["sum"]["admitted"], 1, "only the second minute is left");
    advance(Duration::from_secs(60)).await;
    assert_eq!(recent.json()["hour"]["sum"]["admitted"], 0);
}

#[tokio::test(start_paused = true)]
async fn the_newest_bypasses_stay() {
    let recent = Recent::default();
    for n in 0..70 {
        let opened = [Bypass {
            class: FailureClass::MeteringUnavailable,
            gate: Gate::Metering,
        }];
        recent.note(
            &request(1, json!({"request_id": format!("r-{n}")})),
            &admission(&opened),
        );
    }
    let seen = recent.json();
    let bypasses = seen["bypasses"].as_array().unwrap();
    assert_eq!((bypasses.len(), &bypasses[0]["request_id"]), (BYPASSES, &json!("r-69")));
}

/// A limit of an owner's requests, which has a row of this key, and so much used of it.
pub(super) fn standing(key: String, limit: u64, used: u64, reset_ms: u64) -> (ChargeEntry, EntryState) {
    let entry = ChargeEntry {
        gate: Gate::Contract,
        scope: Scope::Owner,
        resource: Resource::Requests,
        key,
        limit,
        cost: 1,
        window_s: 60,
    };
    let state = EntryState {
        used,
        reset_ms,
        exhausted: false,
    };
    (entry, state)
}

fn charged(recent: &Recent, owner: &str, used: u64, reset_ms: u64) {
    let key = format!("{}:60", key(Scope::Owner, Resource::Requests, &[owner]));
    let (entry, state) = standing(key, 1_000, used, reset_ms);
    let plan = ChargePlan {
        op: OperationId::from_random([7; 16]),
        entries: vec![entry],
        block: None,
    };
    recent.charged(&plan, &Charged::Granted(vec![state]));
}

#[tokio::test(start_paused = true)]
async fn the_nearest_limits_stay_until_their_windows_end() {
    let recent = Recent::default();
    for n in 0..1_000 {
        charged(&recent, &format!("o-{n}"), n, 60_000);
    }
    charged(&recent, "a/b:{c}é", 1_000, 5_000);
    charged(&recent, "portcullis-canary/x", 1_000, 60_000);
    let seen = recent.json();
    let first = &seen["scopes"][0];
    assert_eq!(
        *first,
        json!({"scope": "owner", "ids": ["a/b:{c}é"], "resource": "requests", "used": 1000, "limit": 1000, "ends_in_s": 5})
    );
    assert_eq!(seen["scopes"][1]["ids"], json!(["o-999"]));
    assert_eq!(seen["scopes"].as_array().unwrap().len(), SHOWN);
    advance(Duration::from_secs(6)).await;
    assert_eq!(recent.json()["scopes"][0]["ids"], json!(["o-999"]));
    // What was given back moves down.
    charged(&recent, "o-999", 1, 60_000);
    assert_eq!(recent.json()["scopes"][0]["ids"], json!(["o-998"]));
    advance(Duration::from_secs(61)).await;
    assert_eq!(recent.json()["scopes"], json!([]));
}
