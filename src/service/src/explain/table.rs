//! The report for people: what is asked, each gate with its outcome, what decided, and the reply as it is on the wire.

use std::fmt::Write as _;

use super::report::{Ending, Place, Report, WireReply};

fn place(place: &Place) -> String {
    match (&place.file, place.line) {
        (Some(file), Some(line)) => format!("{} (line {line} of {file})", place.path),
        (Some(file), None) => format!("{} ({file})", place.path),
        (None, _) => place.path.clone(),
    }
}

fn reply(text: &mut String, reply: &WireReply) {
    let _ = writeln!(text, "  HTTP {}", reply.status);
    for (name, value) in &reply.headers {
        let _ = writeln!(text, "  {name}: {value}");
    }
    let _ = writeln!(text, "\n  {}", reply.body);
}

/// The whole text.
pub fn of(report: &Report) -> String {
    let mut text = String::new();
    let request = &report.request;
    let _ = writeln!(
        text,
        "{} {} ({} bytes of body)",
        request.method, request.path, request.body_bytes
    );
    for (name, value) in &request.headers {
        let _ = writeln!(text, "  {name}: {value}");
    }
    let mode = if report.enforced {
        "enforced"
    } else {
        "NOT enforced: mode is \"shadow\""
    };
    let _ = writeln!(text, "\nrules {}, {mode}", report.rules);
    for row in &report.gates {
        let line = row.line.map(|line| format!("line {line}")).unwrap_or_default();
        let outcome = match row.class {
            Some(class) => format!("{} ({class})", row.outcome.words()),
            None => row.outcome.words().to_owned(),
        };
        let _ = writeln!(
            text,
            "{}",
            format!("  {:14} {line:8} {outcome:42} {}", row.gate, row.why).trim_end()
        );
    }
    let _ = writeln!(text, "  not listed: {}", report.not_listed.join(", "));
    let verdict = match (report.ending, report.class, report.code) {
        (Ending::NotGuarded, ..) => "not guarded".to_owned(),
        (Ending::Admitted, ..) => "admitted".to_owned(),
        (_, class, code) => format!("refused: {} {}", code.unwrap_or_default(), class.unwrap_or_default()),
    };
    let _ = writeln!(text, "\nverdict: {verdict}");
    let rule = report.decided_by.rule.as_ref().map(place);
    let _ = match rule {
        Some(rule) => writeln!(text, "decided by: {rule}\n  {}", report.decided_by.why),
        None => writeln!(text, "decided by: {}", report.decided_by.why),
    };
    if let Some(source) = &report.decided_by.source {
        let _ = writeln!(text, "  from {}", place(source));
    }
    let seen = if report.upstream.reached {
        "is reached"
    } else {
        "sees nothing"
    };
    let _ = writeln!(text, "upstream: {seen}");
    if !report.upstream.removed.is_empty() {
        let _ = writeln!(text, "  without {}", report.upstream.removed.join(", "));
    }
    for (name, value) in &report.upstream.set {
        let _ = writeln!(text, "  with {name}: {value}");
    }
    let _ = writeln!(text, "\nthe client gets:");
    match &report.reply {
        Some(of_filter) => reply(&mut text, of_filter),
        None => {
            let _ = writeln!(text, "  the upstream's answer");
            for (name, value) in &report.upstream.response_headers {
                let _ = writeln!(text, "  with {name}: {value}");
            }
        }
    }
    if let Some(would) = &report.shadow_reply {
        let _ = writeln!(text, "\nif it were enforced, the client would get:");
        reply(&mut text, would);
    }
    let _ = writeln!(text, "\ncounted: {}", report.counted.join(", "));
    for line in &report.log {
        let _ = writeln!(text, "logged: {line}");
    }
    for hint in &report.hints {
        let _ = writeln!(text, "hint: {hint}");
    }
    text
}
