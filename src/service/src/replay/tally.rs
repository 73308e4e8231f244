//! What a replay adds up to. Its size is bounded: hours and refused tenants are kept up to a number, and what goes beyond
//! is counted as others.

use std::collections::{BTreeMap, HashMap};

use jiff::Timestamp;
use portcullis_decision::class::FailureClass;
use serde::Serialize;

use super::player::Fate;
use super::record::Record;

const HOUR_MS: u64 = 3_600_000;
/// Two years of hours.
const MOST_HOURS: usize = 17_544;
/// Refused tenants that are told apart, some 20 MB with ids of usual length.
const MOST_TENANTS: usize = 100_000;
/// Faults of lines that are shown.
const MOST_FAULTS: usize = 5;

/// Requests of one hour, in UTC.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Hour {
    requests: u64,
    refused: u64,
}

#[derive(Debug, Clone)]
struct Tenant {
    refused: u64,
    first_ms: u64,
    class: FailureClass,
}

/// The counts so far.
#[derive(Debug, Default)]
pub struct Tally {
    requests: u64,
    not_guarded: u64,
    admitted: u64,
    refused: u64,
    newly_refused: u64,
    newly_admitted: u64,
    first_ms: Option<u64>,
    last_ms: Option<u64>,
    bypassed: BTreeMap<&'static str, u64>,
    classes: BTreeMap<&'static str, u64>,
    codes: BTreeMap<String, u64>,
    scopes: BTreeMap<String, u64>,
    hours: BTreeMap<u64, Hour>,
    other_hours: Hour,
    tenants: HashMap<String, Tenant>,
    other_tenants: u64,
    malformed: u64,
    faults: Vec<Fault>,
}

/// A line that could not be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Fault {
    /// Its number, from 1.
    pub line: u64,
    /// What is wrong with it.
    pub fault: String,
}

fn grow(count: &mut u64) {
    *count = count.saturating_add(1);
}

impl Tally {
    /// A line that could not be read.
    pub fn malformed(&mut self, line: u64, fault: String) {
        grow(&mut self.malformed);
        if self.faults.len() < MOST_FAULTS {
            self.faults.push(Fault { line, fault });
        }
    }

    /// Lines that could not be read.
    pub const fn faults(&self) -> u64 {
        self.malformed
    }

    /// What became of a request that came at `at_ms`.
    pub fn add(&mut self, record: &Record, at_ms: u64, fate: Fate, prefix: &str) {
        grow(&mut self.requests);
        self.first_ms = Some(self.first_ms.map_or(at_ms, |first| first.min(at_ms)));
        self.last_ms = Some(self.last_ms.map_or(at_ms, |last| last.max(at_ms)));
        let number = at_ms.div_euclid(HOUR_MS);
        let has_room = self.hours.len() < MOST_HOURS || self.hours.contains_key(&number);
        let hour = if has_room {
            self.hours.entry(number).or_default()
        } else {
            &mut self.other_hours
        };
        grow(&mut hour.requests);
        match fate {
            Fate::NotGuarded => grow(&mut self.not_guarded),
            Fate::Admitted(bypassed) => {
                grow(&mut self.admitted);
                if record.status == Some(429) {
                    grow(&mut self.newly_admitted);
                }
                for class in bypassed {
                    grow(self.bypassed.entry(class.name()).or_default());
                }
            }
            Fate::Refused { class, code, scope } => {
                grow(&mut self.refused);
                grow(&mut hour.refused);
                if record.status.is_some_and(|status| status < 400) {
                    grow(&mut self.newly_refused);
                }
                grow(self.classes.entry(class.name()).or_default());
                grow(
                    self.codes
                        .entry(code.unwrap_or_else(|| "(grpc)".to_owned()))
                        .or_default(),
                );
                grow(
                    self.scopes
                        .entry(scope.unwrap_or_else(|| "(none)".to_owned()))
                        .or_default(),
                );
                self.refuse(tenant(record, prefix), at_ms, class);
            }
        }
    }

    fn refuse(&mut self, tenant: String, at_ms: u64, class: FailureClass) {
        if let Some(known) = self.tenants.get_mut(&tenant) {
            grow(&mut known.refused);
            if at_ms < known.first_ms {
                known.first_ms = at_ms;
                known.class = class;
            }
        } else if self.tenants.len() < MOST_TENANTS {
            let first = Tenant {
                refused: 1,
                first_ms: at_ms,
                class,
            };
            self.tenants.insert(tenant, first);
        } else {
            grow(&mut self.other_tenants);
        }
    }

    /// The report, with the `top` tenants of each list.
    pub fn report(self, rules: &str, top: usize, (unordered, ended_early): (u64, u64)) -> Report {
        let mut tenants: Vec<Hit> = self.tenants.into_iter().map(Hit::of).collect();
        let tenants_refused = tenants.len();
        tenants.sort_by(|a, b| (a.first_ms, &a.tenant).cmp(&(b.first_ms, &b.tenant)));
        let first_hit = tenants.iter().take(top).cloned().collect();
        tenants.sort_by(|a, b| b.refused.cmp(&a.refused).then_with(|| a.tenant.cmp(&b.tenant)));
        tenants.truncate(top);
        let mut by_hour: Vec<HourRow> = self
            .hours
            .into_iter()
            .map(|(number, hour)| HourRow {
                hour: moment(number.saturating_mul(HOUR_MS)),
                requests: hour.requests,
                refused: hour.refused,
            })
            .collect();
        if self.other_hours.requests > 0 {
            by_hour.push(HourRow {
                hour: "(others)".to_owned(),
                requests: self.other_hours.requests,
                refused: self.other_hours.refused,
            });
        }
        Report {
            rules: rules.to_owned(),
            from: self.first_ms.map(moment),
            to: self.last_ms.map(moment),
            requests: self.requests,
            admitted: self.admitted,
            refused: self.refused,
            not_guarded: self.not_guarded,
            newly_refused: self.newly_refused,
            newly_admitted: self.newly_admitted,
            unchecked: self.bypassed,
            by_class: self.classes,
            by_code: self.codes,
            by_scope: self.scopes,
            by_hour,
            tenants_refused,
            first_hit,
            most_refused: tenants,
            refusals_of_other_tenants: self.other_tenants,
            unordered,
            ended_early,
            malformed: self.malformed,
            first_malformed: self.faults,
        }
    }
}

/// Whose request it was: the org, or else the owner.
fn tenant(record: &Record, prefix: &str) -> String {
    let id = |scope: &str| {
        record
            .headers
            .iter()
            .find(|(name, _)| name.strip_prefix(prefix).and_then(|name| name.strip_suffix("-id")) == Some(scope))
            .map(|(_, id)| format!("{scope}:{id}"))
    };
    id("org")
        .or_else(|| id("owner"))
        .unwrap_or_else(|| "(no id)".to_owned())
}

fn moment(ms: u64) -> String {
    let ms = i64::try_from(ms).unwrap_or(i64::MAX);
    Timestamp::from_millisecond(ms).map_or_else(|_| "(no time)".to_owned(), |time| time.to_string())
}

/// Requests of an hour.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HourRow {
    /// When it began, in UTC.
    pub hour: String,
    /// Requests that came in it.
    pub requests: u64,
    /// Those of them that were refused.
    pub refused: u64,
}

/// A tenant that was refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Hit {
    /// `org:ID`, or `owner:ID` where there is no org.
    pub tenant: String,
    /// How often.
    pub refused: u64,
    /// When first.
    pub first: String,
    /// By what then.
    pub class: &'static str,
    #[serde(skip)]
    first_ms: u64,
}

impl Hit {
    fn of((tenant, hit): (String, Tenant)) -> Self {
        Self {
            tenant,
            refused: hit.refused,
            first: moment(hit.first_ms),
            class: hit.class.name(),
            first_ms: hit.first_ms,
        }
    }
}

/// Everything.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The rules' name.
    pub rules: String,
    /// The first request's time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// The last one's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// Lines that were read.
    pub requests: u64,
    /// Requests that would go on.
    pub admitted: u64,
    /// Requests that would be refused.
    pub refused: u64,
    /// Requests that no route guards.
    pub not_guarded: u64,
    /// Refused ones that were answered with less than 400 then.
    pub newly_refused: u64,
    /// Admitted ones that were answered 429 then.
    pub newly_admitted: u64,
    /// Admitted ones of which something was not checked, by class.
    pub unchecked: BTreeMap<&'static str, u64>,
    /// Refused ones by class.
    pub by_class: BTreeMap<&'static str, u64>,
    /// Refused ones by code.
    pub by_code: BTreeMap<String, u64>,
    /// Refused ones by the scope of the limit that denied.
    pub by_scope: BTreeMap<String, u64>,
    /// By hour.
    pub by_hour: Vec<HourRow>,
    /// Tenants that were refused at all.
    pub tenants_refused: usize,
    /// Those that were refused first.
    pub first_hit: Vec<Hit>,
    /// Those that were refused most.
    pub most_refused: Vec<Hit>,
    /// Refusals of tenants beyond those that are told apart.
    pub refusals_of_other_tenants: u64,
    /// Requests that were older than one before them.
    pub unordered: u64,
    /// Requests that were taken to end early, since too many were under way.
    pub ended_early: u64,
    /// Lines that could not be read.
    pub malformed: u64,
    /// The first of them.
    pub first_malformed: Vec<Fault>,
}
