//! The arguments of the command line, and the help that teaches them.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// What `--help` shows at its end.
const EXAMPLE: &str = r#"Example, on a developer's machine:

  $ cat service.json
  {"profile": "development", "listen": "127.0.0.1:8181", "limiter": {"url": "memory:"}}
  $ portcullis check service.json
  service.json: ok (service configuration)
  $ portcullis serve --config service.json &
  $ curl -s http://127.0.0.1:8181/live
  {"live":true}

Exit codes: 0 ended as asked, 1 could not start (such as an address in use), 2 a fault in the arguments or in a file."#;

/// The arguments of `portcullis`.
#[derive(Debug, Parser)]
#[command(
    name = "portcullis",
    version,
    about = "Decides, for a gateway's filter, whether a request may reach its upstream",
    long_about = "Decides, for a gateway's filter, whether a request may reach its upstream.\n\n\
        The filter runs in the gateway and asks this service when it must; the service counts in a store that all \
        gateways share. `serve` runs it, `check` reads configuration files and lists every fault in them.",
    after_long_help = EXAMPLE
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Runs the decision service until SIGTERM or SIGINT
    #[command(long_about = "Runs the decision service until SIGTERM or SIGINT.\n\n\
        It answers POST /v1/decide and POST /v1/settle for filters, GET /live (200 while it runs), GET /ready (200 \
        while it can enforce: a shared limiter is reachable and the policy is loaded) and GET /metrics (Prometheus). \
        Logs are JSON objects on stderr, one a line; RUST_LOG sets their level (default info).\n\n\
        On SIGTERM it stops accepting, answers what is under way within 10 seconds, and ends with exit code 0.")]
    Serve(ServeArguments),
    /// Lists every fault of rule, filter and service files
    #[command(
        long_about = "Lists every fault of rule, filter and service files, one a line: FILE: path: message.\n\n\
        What a file is shows by its keys. A service file is read together with the environment, just as `serve` \
        reads it. Exit code 2 if any file has a fault."
    )]
    Check {
        /// Files to check, of any kind
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
    },
}

/// The arguments of `serve`.
#[derive(Debug, Args)]
#[command(after_long_help = "Environment, which beats the file (empty counts as unset):\n  \
    PORTCULLIS_PROFILE  development, staging or production\n  \
    REDIS_URL           the limiter\n  \
    POSTGRES_DSN        the policy and metering store")]
pub struct ServeArguments {
    /// The service's configuration (JSON)
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
    /// Shares the listening port, so that a replacement can start before this process is stopped
    #[arg(long)]
    pub reuse_port: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_arguments_are_well_formed_and_the_help_shows_an_example() {
        Cli::command().debug_assert();
        let help = Cli::command().render_long_help().to_string();
        assert!(help.contains("portcullis serve --config service.json"), "{help}");
    }
}
