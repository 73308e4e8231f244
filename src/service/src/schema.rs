//! `portcullis schema`: prints the JSON Schema of a kind of file. What is in it is the pure crate's.

use std::io::{self, Write as _};
use std::process::ExitCode;

use portcullis_decision::config::FileKind;
use portcullis_decision::config::schema;

use crate::cli::SchemaKind;

/// Prints a schema.
pub fn run(kind: SchemaKind) -> ExitCode {
    // A reader that has closed the pipe has seen enough.
    drop(io::stdout().lock().write_all(text(kind).as_bytes()));
    ExitCode::SUCCESS
}

/// The text of a schema: what is printed, and what is kept in the repository.
pub fn text(kind: SchemaKind) -> String {
    let schema = match kind {
        SchemaKind::Filter => schema::of(FileKind::Filter),
        SchemaKind::Service => schema::of(FileKind::Service),
        SchemaKind::Rules => schema::of(FileKind::Rules),
        SchemaKind::Policy => schema::of(FileKind::Policy),
        SchemaKind::Kong => schema::kong(),
    };
    format!("{schema:#}\n")
}
