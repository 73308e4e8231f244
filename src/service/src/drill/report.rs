//! What a drill has found: as a table for the terminal, as Markdown and as JSON for whoever approves a change.
//!
//! Neither holds a token, a signature or the value of a header that no decision depends on.

use std::fmt::Write as _;

use serde::Serialize;

use super::judge::Got;
use super::probes::{Probe, name_of};
use crate::explain::report::Report;

/// How an answer was, or had to be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Told {
    /// The status; absent for a pass, which the upstream answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) status: Option<u16>,
    /// The code of a refusal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) code: Option<String>,
    /// The class of a refusal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) class: Option<String>,
    /// How many requests reach the upstream, if that is counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) upstream: Option<u64>,
}

impl Told {
    /// As `explain` predicts it.
    pub(super) fn predicted(report: &Report) -> Self {
        let reply = report.reply.as_ref();
        Self {
            status: reply.map(|reply| reply.status),
            code: reply.and(report.code).map(str::to_owned),
            class: reply.and(report.class).map(str::to_owned),
            upstream: Some(u64::from(report.upstream.reached)),
        }
    }

    /// As it was.
    pub(super) fn got(got: &Got) -> Self {
        Self {
            status: Some(got.status),
            code: got.code(),
            class: got.header("x-portcullis-class").map(str::to_owned),
            upstream: got.upstream,
        }
    }

    /// In a few words.
    fn words(&self) -> String {
        let status = self
            .status
            .map_or_else(|| "passes".to_owned(), |status| status.to_string());
        match &self.code {
            Some(code) => format!("{status} {code}"),
            None => status,
        }
    }
}

/// One probe and what came of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Row {
    /// What was sent.
    pub(super) probe: String,
    /// What it had to show: `admitted`, `denied` or a failure class.
    pub(super) shows: &'static str,
    /// What was let fail meanwhile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) let_fail: Option<&'static str>,
    /// How many requests it took.
    pub(super) sent: u32,
    /// Whether everything was as predicted.
    pub(super) green: bool,
    /// The prediction.
    pub(super) expected: Told,
    /// The last answer; absent if none came.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) got: Option<Told>,
    /// Why it is red.
    pub(super) reasons: Vec<String>,
}

impl Row {
    /// The row of a probe, judged by its reasons.
    pub(super) fn new(probe: &Probe, sent: u32, expected: Told, got: Option<Told>, reasons: Vec<String>) -> Self {
        Self {
            probe: probe.name.clone(),
            shows: probe.shows.name(),
            let_fail: probe.down.map(name_of),
            sent,
            green: reasons.is_empty(),
            expected,
            got,
            reasons,
        }
    }

    const fn colour(&self) -> &'static str {
        if self.green { "green" } else { "RED" }
    }
}

/// A class that was not shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct NotDriven {
    /// The class.
    pub(super) class: &'static str,
    /// Why not.
    pub(super) why: String,
}

/// Everything.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Findings {
    /// The version of the program.
    pub(super) version: &'static str,
    /// When it began, RFC 3339.
    pub(super) started: String,
    /// How long it took.
    pub(super) took_ms: u64,
    /// Host and port of the gateway.
    pub(super) gateway: String,
    /// The rules' name.
    pub(super) rules: String,
    /// The profile of the filter's configuration.
    pub(super) profile: String,
    /// The fingerprint of the filter's configuration.
    pub(super) filter_config_hash: String,
    /// The fingerprints of the services' configurations.
    pub(super) service_config_hashes: Vec<String>,
    /// Whether the upstream could be asked what it saw.
    pub(super) upstream_was_counted: bool,
    /// Whether every row is green.
    pub(super) green: bool,
    /// The probes, in order.
    pub(super) rows: Vec<Row>,
    /// Classes that were not shown.
    pub(super) not_driven: Vec<NotDriven>,
    /// What the prediction took for granted.
    pub(super) notes: Vec<String>,
}

impl Findings {
    fn reds(&self) -> usize {
        self.rows.iter().filter(|row| !row.green).count()
    }

    fn verdict(&self) -> String {
        let (all, reds) = (self.rows.len(), self.reds());
        if reds == 0 {
            format!("GREEN: all {all} probes were answered as predicted")
        } else {
            format!("RED: {reds} of {all} probes were not answered as predicted")
        }
    }

    /// For the terminal.
    pub(super) fn table(&self) -> String {
        let mut text = String::new();
        let width = |pick: fn(&Row) -> String| self.rows.iter().map(|row| pick(row).chars().count()).max();
        let (name_width, class_width) = (
            width(|row| row.probe.clone()).unwrap_or_default(),
            width(|row| row.shows.to_owned()).unwrap_or_default(),
        );
        for row in &self.rows {
            let expected = row.expected.words();
            let got = row.got.as_ref().map_or_else(|| "no answer".to_owned(), Told::words);
            let colour = row.colour();
            let (name, shows) = (&row.probe, row.shows);
            // Writing to a string does not fail.
            let _ = if row.green {
                writeln!(text, "{colour:<5}  {name:<name_width$}  {shows:<class_width$}  {got}")
            } else {
                writeln!(
                    text,
                    "{colour:<5}  {name:<name_width$}  {shows:<class_width$}  {got}, expected: {expected}"
                )
            };
            for reason in &row.reasons {
                let _ = writeln!(text, "       {reason}");
            }
        }
        for NotDriven { class, why } in &self.not_driven {
            let _ = writeln!(text, "-      {class} was not shown: {why}");
        }
        let _ = writeln!(text, "{}", self.verdict());
        text
    }

    /// For a change's record.
    pub(super) fn markdown(&self) -> String {
        let mut text = String::new();
        let counted = if self.upstream_was_counted { "yes" } else { "no" };
        let hashes = self.service_config_hashes.join(", ");
        let _ = writeln!(
            text,
            "# Drill of {}, rules {}\n\n**{}**\n\n| | |\n| --- | --- |\n| when | {}, for {} ms |\n| profile | {} |\n| \
             filter's configuration | {} |\n| services' configurations | {hashes} |\n| upstream counted | {counted} |\n| \
             portcullis | {} |\n\n## Probes\n\n| | probe | shows | let fail | sent | expected | got | upstream |\n| --- | --- | \
             --- | --- | --- | --- | --- | --- |",
            self.gateway,
            self.rules,
            self.verdict(),
            self.started,
            self.took_ms,
            self.profile,
            self.filter_config_hash,
            self.version,
        );
        for row in &self.rows {
            let seen = row.got.as_ref().and_then(|got| got.upstream);
            let _ = writeln!(
                text,
                "| {} | {} | {} | {} | {} | {} | {} | {} |",
                row.colour(),
                cell(&row.probe),
                row.shows,
                row.let_fail.unwrap_or_default(),
                row.sent,
                row.expected.words(),
                row.got.as_ref().map_or_else(|| "no answer".to_owned(), Told::words),
                seen.map_or_else(String::new, |seen| seen.to_string()),
            );
        }
        if self.reds() > 0 {
            text.push_str("\n## What was not as predicted\n\n");
            for row in self.rows.iter().filter(|row| !row.green) {
                let _ = writeln!(text, "- **{}**: {}", cell(&row.probe), cell(&row.reasons.join("; ")));
            }
        }
        if !self.not_driven.is_empty() {
            text.push_str("\n## What was not shown\n\n");
            for NotDriven { class, why } in &self.not_driven {
                let _ = writeln!(text, "- `{class}`: {}", cell(why));
            }
        }
        if !self.notes.is_empty() {
            text.push_str("\n## What the prediction took for granted\n\n");
            for note in &self.notes {
                let _ = writeln!(text, "- {}", cell(note));
            }
        }
        text
    }
}

/// A text that can't end a cell or a line.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace(['\n', '\r'], " ")
}
