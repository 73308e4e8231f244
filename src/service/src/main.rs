//! The command `portcullis`: reads its arguments, runs one subcommand, ends with its exit code. All else is in the library.

use std::process::ExitCode;

use clap::Parser as _;
use portcullis_service::cli::{Cli, Command, UnmeteredCommand};
use portcullis_service::policy::apply;
use portcullis_service::{check, drill, envelope, explain, replay, schema, serve, unmetered};

/// A decision makes some dozens of short-lived pieces, which the C library's allocator spends a quarter of it on.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Serve(arguments) => serve::run(&arguments),
        Command::Check { files } => check::run(&files),
        Command::Envelope(command) => envelope::run(&command),
        Command::Schema { kind } => schema::run(kind),
        Command::Explain(arguments) => explain::run(&arguments),
        Command::Drill(arguments) => drill::run(&arguments),
        Command::Replay(arguments) => replay::run(&arguments),
        Command::Policy { command } => apply::run(&command),
        Command::Unmetered(UnmeteredCommand::List(arguments)) => unmetered::list(&arguments),
    }
}
