//! Where counters are imagined to stand: `--spent` of the command line, and the lines of a counters file.
//!
//! A counter is charged by the limiter's own algorithm, as an operation that came before. Left out on purpose: emergency
//! allowances and the breaker, which only requests that came before can have used (`--after`).

use std::fmt;
use std::str::FromStr;

use clap::ValueEnum as _;
use portcullis_decision::charge::{ChargeEntry, ChargePlan, key};
use portcullis_decision::ledger::LARGEST_COUNT;
use portcullis_decision::limits::{LARGEST_LIMIT, Resource, Scope};
use portcullis_decision::operation::OperationId;
use portcullis_decision::rules::{Gate, GateRule, Rules};
use serde::Deserialize;

use super::ImaginedService;
use crate::metering::memory::month_at;

/// Operations that are imagined have ids from here on, far from those of requests.
const FIRST_ID: u128 = 1 << 127;
/// More slots or launches than any sensible limit.
const MOST_AT_ONCE: u64 = 1_000_000;

/// What a counter counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Counted {
    /// Requests of a window
    Requests,
    /// Tokens of a window
    Tokens,
    /// Slots held now
    Concurrency,
    /// Slots of the org's plan held now
    PlanConcurrency,
    /// Runs of an org's month
    Runs,
    /// Micro-dollars of an org's month
    Cost,
    /// Launches of an org just now
    Launches,
}

/// One counter with its figure.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spent {
    /// Whom it is of.
    pub scope: Scope,
    /// The ids of the scope: none for `platform`, org and model for `organization_model`, else one.
    #[serde(default)]
    pub ids: Vec<String>,
    /// What it counts.
    pub resource: Counted,
    /// Where it stands.
    pub used: u64,
    /// When its window ends, in seconds from the request; absent: it has just begun.
    #[serde(default)]
    pub ends_in_s: Option<u64>,
}

impl fmt::Display for Spent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.scope.name(), self.ids.join(":"))
    }
}

impl FromStr for Spent {
    type Err = String;

    /// `SCOPE:ID:RESOURCE=N`, and `@SECONDS` until its window ends. An id may hold colons.
    fn from_str(text: &str) -> Result<Self, String> {
        const FORM: &str =
            "must be SCOPE:ID:RESOURCE=N or SCOPE:ID:RESOURCE=N@SECONDS, such as org:org-1:requests=59@41";
        let (what, figure) = text.rsplit_once('=').ok_or(FORM)?;
        let (figure, ends) = match figure.split_once('@') {
            Some((figure, ends)) => (figure, Some(ends)),
            None => (figure, None),
        };
        let number = |text: &str| {
            text.parse::<u64>()
                .map_err(|_| format!("{text:?} is not a whole number from 0: it {FORM}"))
        };
        let (scope, rest) = what.split_once(':').ok_or(FORM)?;
        let names = Scope::ALL.map(Scope::name);
        let scope = Scope::ALL
            .into_iter()
            .find(|known| known.name() == scope)
            .ok_or_else(|| format!("{scope:?} is no scope: there are {}", names.join(", ")))?;
        let (ids, resource) = rest.rsplit_once(':').unwrap_or(("", rest));
        let resource = Counted::from_str(resource, false).map_err(|_| {
            let known: Vec<_> = Counted::value_variants()
                .iter()
                .filter_map(Counted::to_possible_value)
                .collect();
            let known: Vec<_> = known.iter().map(clap::builder::PossibleValue::get_name).collect();
            format!("{resource:?} is not counted: there are {}", known.join(", "))
        })?;
        let ids = match scope {
            _ if ids.is_empty() => Vec::new(),
            Scope::OrganizationModel => ids.splitn(2, ':').map(str::to_owned).collect(),
            _ => vec![ids.to_owned()],
        };
        let spent = Self {
            scope,
            ids,
            resource,
            used: number(figure)?,
            ends_in_s: ends.map(number).transpose()?,
        };
        spent.fault().map_or(Ok(spent), Err)
    }
}

impl Spent {
    /// What is wrong with it by itself.
    pub fn fault(&self) -> Option<String> {
        let wanted = match self.scope {
            Scope::Platform => 0,
            Scope::OrganizationModel => 2,
            _ => 1,
        };
        let scope = self.scope.name();
        if self.ids.len() != wanted || self.ids.iter().any(String::is_empty) {
            return Some(format!("the scope {scope:?} has {wanted} ids, not {}", self.ids.len()));
        }
        if self.used > LARGEST_LIMIT {
            return Some(format!("{} is above {LARGEST_LIMIT}", self.used));
        }
        let of_org = matches!(
            self.resource,
            Counted::PlanConcurrency | Counted::Runs | Counted::Cost | Counted::Launches
        );
        if of_org && self.scope != Scope::Org {
            return Some(format!("the scope {scope:?} does not have this: only \"org\" does"));
        }
        let at_once = matches!(
            self.resource,
            Counted::Concurrency | Counted::PlanConcurrency | Counted::Launches
        );
        if at_once && self.used > MOST_AT_ONCE {
            return Some(format!("{} is above {MOST_AT_ONCE}", self.used));
        }
        let has_window = matches!(self.resource, Counted::Requests | Counted::Tokens);
        (self.ends_in_s.is_some() && !has_window).then(|| "only requests and tokens have a window that ends".to_owned())
    }

    /// The window's length in a filter and a service with these, in seconds.
    fn window_s(&self, of_filter: u64, of_service: u64) -> u64 {
        if Scope::CONTRACT.contains(&self.scope) {
            of_filter
        } else {
            of_service
        }
    }
}

/// Lets counters stand where they are said to.
///
/// # Errors
/// A window that would end after its length.
pub fn charge(
    service: &mut ImaginedService,
    all: &[Spent],
    (rules, window_s): (&Rules, u64),
    now_ms: u64,
) -> Result<(), String> {
    let mut next_id = FIRST_ID;
    let month = month_at(now_ms);
    for spent in all {
        let org = spent.ids.first().map(String::as_str).unwrap_or_default();
        let window_s = spent.window_s(window_s, service.operator.window_s);
        let ids: Vec<&str> = spent.ids.iter().map(String::as_str).collect();
        let (resource, suffix) = match spent.resource {
            Counted::Requests => (Resource::Requests, format!(":{window_s}")),
            Counted::Tokens => (Resource::Tokens, format!(":{window_s}")),
            Counted::Concurrency => (Resource::Concurrency, String::new()),
            Counted::PlanConcurrency => (Resource::Concurrency, "-plan".to_owned()),
            Counted::Runs => {
                service.meter.add_runs(&month, org, spent.used);
                continue;
            }
            Counted::Cost => {
                service.meter.add_cost(&month, org, spent.used);
                continue;
            }
            Counted::Launches => {
                if let Some(GateRule::LaunchRate { per_minute, burst }) = rules.gate(Gate::LaunchRate) {
                    for _ in 0..spent.used {
                        // What goes over the rate has been denied, and has taken nothing.
                        let _ = service.launches.take(org, *per_minute, *burst, now_ms);
                    }
                }
                continue;
            }
        };
        let ends_in_s = spent.ends_in_s.unwrap_or(window_s);
        if ends_in_s == 0 || ends_in_s > window_s {
            return Err(format!("{spent}: a window of {window_s} s can't end in {ends_in_s} s"));
        }
        let began_ms = now_ms.saturating_sub(window_s.saturating_sub(ends_in_s).saturating_mul(1000));
        let (times, cost, at_ms) = if resource == Resource::Concurrency {
            (spent.used, 1, now_ms)
        } else {
            (1, spent.used, began_ms)
        };
        for _ in 0..times {
            next_id = next_id.saturating_add(1);
            let entry = ChargeEntry {
                gate: Gate::Contract,
                scope: spent.scope,
                resource,
                key: format!("{}{suffix}", key(spent.scope, resource, &ids)),
                limit: LARGEST_COUNT,
                cost,
                window_s,
            };
            let plan = ChargePlan {
                op: OperationId::from_random(next_id.to_be_bytes()),
                entries: vec![entry],
                block: None,
            };
            service.ledger.charge(at_ms, &plan, service.operator.slot_ttl_ms);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_is_read_from_a_word() {
        let spent: Spent = "org:a:b:requests=59@41".parse().unwrap();
        assert_eq!(
            (spent.ids, spent.used, spent.ends_in_s),
            (vec!["a:b".to_owned()], 59, Some(41))
        );
        let spent: Spent = "platform:tokens=5".parse().unwrap();
        assert_eq!((spent.scope, spent.resource), (Scope::Platform, Counted::Tokens));
        let spent: Spent = "organization_model:g:gpt-4o:requests=1".parse().unwrap();
        assert_eq!(spent.ids, ["g", "gpt-4o"]);
        for (text, why) in [
            ("org", "must be SCOPE:ID:RESOURCE=N"),
            ("orgs:a:requests=1", "\"orgs\" is no scope"),
            ("org:a:request=1", "\"request\" is not counted"),
            ("org:a:requests=-1", "\"-1\" is not a whole number"),
            ("org:requests=1", "has 1 ids, not 0"),
            ("platform:x:requests=1", "has 0 ids, not 1"),
            ("owner:a:runs=1", "only \"org\" does"),
            ("org:a:runs=1@5", "only requests and tokens have a window"),
        ] {
            let fault = text.parse::<Spent>().unwrap_err();
            assert!(fault.contains(why), "{text}: {fault}");
        }
    }
}
