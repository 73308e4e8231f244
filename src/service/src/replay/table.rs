//! The report of a replay for people.

use std::fmt::Write as _;

use super::tally::{Hit, Report};

fn counts<'a>(text: &mut String, title: &str, counts: impl Iterator<Item = (&'a str, u64)>) {
    let mut counts: Vec<_> = counts.collect();
    if counts.is_empty() {
        return;
    }
    counts.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(b.0)));
    let _ = writeln!(text, "\n{title}");
    for (name, count) in counts {
        let _ = writeln!(text, "  {count:>10}  {name}");
    }
}

fn hits(text: &mut String, title: &str, hits: &[Hit]) {
    if hits.is_empty() {
        return;
    }
    let _ = writeln!(text, "\n{title}");
    for hit in hits {
        let _ = writeln!(
            text,
            "  {:>10}  {}  first {} by {}",
            hit.refused, hit.tenant, hit.first, hit.class
        );
    }
}

/// Hundredths of a percent as text.
fn share(part: u64, whole: u64) -> String {
    let of = part.saturating_mul(10_000).checked_div(whole).unwrap_or(0);
    format!("{}.{:02} %", of.div_euclid(100), of.rem_euclid(100))
}

/// The whole text.
pub fn of(report: &Report) -> String {
    let mut text = String::new();
    let (from, to) = (
        report.from.as_deref().unwrap_or("-"),
        report.to.as_deref().unwrap_or("-"),
    );
    let _ = writeln!(
        text,
        "{} requests from {from} to {to} under {}",
        report.requests, report.rules
    );
    let _ = writeln!(text, "  {:>10}  admitted", report.admitted);
    let _ = writeln!(
        text,
        "  {:>10}  refused ({})",
        report.refused,
        share(report.refused, report.requests)
    );
    let _ = writeln!(text, "  {:>10}  not guarded", report.not_guarded);
    let _ = writeln!(text, "  {:>10}  refused that passed then", report.newly_refused);
    let _ = writeln!(text, "  {:>10}  admitted that were 429 then", report.newly_admitted);
    let fixed = |(name, count): (&&'static str, &u64)| (*name, *count);
    counts(
        &mut text,
        "admitted unchecked, by class",
        report.unchecked.iter().map(fixed),
    );
    counts(&mut text, "refused by class", report.by_class.iter().map(fixed));
    counts(
        &mut text,
        "refused by code",
        report.by_code.iter().map(|(name, count)| (name.as_str(), *count)),
    );
    counts(
        &mut text,
        "refused by scope",
        report.by_scope.iter().map(|(name, count)| (name.as_str(), *count)),
    );
    if report.refused > 0 {
        let _ = writeln!(text, "\nrefused by hour");
        for hour in report.by_hour.iter().filter(|hour| hour.refused > 0) {
            let share = share(hour.refused, hour.requests);
            let _ = writeln!(
                text,
                "  {:>10}  {}  of {} ({share})",
                hour.refused, hour.hour, hour.requests
            );
        }
    }
    hits(&mut text, "tenants that are hit first", &report.first_hit);
    hits(&mut text, "tenants that are hit most", &report.most_refused);
    if report.tenants_refused > report.most_refused.len() {
        let _ = writeln!(text, "  {:>10}  tenants are refused in all", report.tenants_refused);
    }
    let notes = [
        (
            report.refusals_of_other_tenants,
            "refusals of tenants that are not told apart any more",
        ),
        (
            report.unordered,
            "requests were older than one before them, and came at its time",
        ),
        (
            report.ended_early,
            "requests were taken to end early: too many were under way",
        ),
        (report.malformed, "lines could not be read"),
    ];
    for (count, what) in notes.into_iter().filter(|(count, _)| *count > 0) {
        let _ = writeln!(text, "\nnote: {count} {what}");
    }
    for fault in &report.first_malformed {
        let _ = writeln!(text, "  line {}: {}", fault.line, fault.fault);
    }
    text
}
