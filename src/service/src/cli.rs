//! The arguments of the command line, and the help that teaches them.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use portcullis_decision::config::{DEFAULT_MAX_AGE_S, MAX_AGE_S};

use crate::drill::DrillArguments;
use crate::explain::ExplainArguments;
use crate::replay::ReplayArguments;

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

/// What `explain --help` shows at its end.
const EXPLAIN_EXAMPLE: &str = r#"Examples:

  Under shipped rules, with the org's window nearly spent and 41 seconds left of it:
  $ portcullis explain --rules contract-limits -H 'x-admission-owner-id: o' -H 'x-admission-org-id: org-1' \
      -H 'x-admission-org-rate-limit-requests: 60' --spent org:org-1:requests=60@41

  The same request with the limiter out of order:
  $ portcullis explain --rules contract-limits --down limiter -H …

  A line that somebody has pasted, under one's own files, on the last day of a month:
  $ portcullis explain --config filter.json --policy policy.json --service service.json \
      --at 2026-03-31T23:00:00Z --curl "curl -X POST https://api.example.com/v1/chat/completions -H … -d '{…}'"

  Where counters stand, as a file: [{"scope": "org", "ids": ["org-1"], "resource": "requests", "used": 59, "ends_in_s": 41}]
  Resources: requests, tokens, concurrency (of owner, org, auth, platform, graph, organization, organization_model, lane);
  plan_concurrency, runs, cost, launches (of org).

Exit codes: 0 explained, whatever the verdict; 2 a fault in the arguments or in a file."#;

/// What `drill --help` shows at its end.
const DRILL_EXAMPLE: &str = r#"Examples:

  The least: shared inference in development, without outages.
  $ portcullis drill --gateway http://127.0.0.1:10000 --rules contract-limits

  All of it in staging, as evidence for a change:
  $ portcullis drill --gateway http://gateway.staging:10000 --config filter.json --policy policy.json --service service.json \
      -H 'x-admission-org-id: drill' -H 'x-admission-model: gpt-4o' --refused-org drill-suspended \
      --unserved-model drill-unserved --admin http://127.0.0.1:8182 --token-file admin.token \
      --upstream-header x-provider --report drill.md --json drill.json

The gateway is addressed behind the edge that stamps envelopes, since the drill stamps its own; --key-id and --secret-file
sign them where the configuration wants that.

Exit codes: 0 everything came as predicted; 1 something did not (the table says what); 2 a fault in the arguments or in a file,
or a production installation without --production --yes-in-production."#;

/// What `replay --help` shows at its end.
const REPLAY_EXAMPLE: &str = r#"Examples:

  $ cat requests.jsonl
  {"ts": "2026-03-01T12:00:00Z", "method": "POST", "path": "/v1/chat/completions", "status": 200, "tokens": 812,
   "envelope": {"owner-id": "o", "org-id": "org-1", "org-rate-limit-requests": 60}}      (in one line)

  Half the requests for every org:
  $ portcullis replay requests.jsonl --config filter.json --limit 'org:*:requests=30'

  A rule file that is not in use yet, over Envoy's access log:
  $ zcat access.jsonl.gz | portcullis replay - --from envoy --config filter.json --rules candidate.json --policy policy.json

Exit codes: 0 the whole log was played; 1 lines of it could not be read (the report is of the others); 2 a fault in the
arguments or in a file."#;

/// The arguments of `portcullis`.
#[derive(Debug, Parser)]
#[command(
    name = "portcullis",
    version,
    about = "Decides, for a gateway's filter, whether a request may reach its upstream",
    long_about = "Decides, for a gateway's filter, whether a request may reach its upstream.\n\n\
        The filter runs in the gateway and asks this service when it must; the service counts in a store that all \
        gateways share. `serve` runs it, `check` reads configuration files and lists the faults in them, `explain` says \
        what would happen to a request and `replay` to a log of them, `policy` loads \
        into a database who may use what.",
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
        Logs are JSON objects on stderr, one a line; RUST_LOG sets their level: off, error, warn, info (default), debug or \
        trace, or for a part of the program TARGET=LEVEL, several with commas between.\n\n\
        On SIGTERM it stops accepting, answers what is under way within 10 seconds, and ends with exit code 0.")]
    Serve(ServeArguments),
    /// Lists the faults of rule, filter, service and policy files
    #[command(
        long_about = "Lists the faults of rule, filter, service and policy files, one a line: FILE: path: message.\n\n\
        All faults of keys and values are listed at once. What only shows in a file that has none of them is listed \
        after that: what rules, profile and mode forbid each other, files and addresses that are named. So check again \
        what has been mended.\n\n\
        What a file is shows by its keys. A service file is read together with the environment, just as `serve` \
        reads it. Exit code 2 if any file has a fault."
    )]
    Check {
        /// Files to check, of any kind
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
    },
    /// Prints the JSON Schema of a kind of file
    #[command(
        long_about = "Prints the JSON Schema of a kind of file, so that an editor completes and checks it, or a custom \
        resource's author can use it. A schema says what a file looks like; `check` also says what is wrong with it as a \
        whole.\n\n\
        The drafts are 2020-12 and, for Kong, 4: `portcullis schema kong >portcullis.meta.json`, beside portcullis.wasm."
    )]
    Schema {
        /// The kind of file
        #[arg(value_enum, value_name = "KIND")]
        kind: SchemaKind,
    },
    /// Says what would happen to a request, and which line of the rules decides
    #[command(
        long_about = "Says what would happen to a request: each gate's outcome, the verdict, the reply as the client would \
        see it, and which line of the rules decided.\n\n\
        The request goes through the filter's own code and is decided by the service's, over memory. Nothing is called and \
        nothing real is counted. Values of headers that no decision depends on are not shown.",
        after_long_help = EXPLAIN_EXAMPLE
    )]
    Explain(ExplainArguments),
    /// Asks a running gateway whether it refuses what its rules say
    #[command(
        long_about = "Asks a running gateway whether it refuses what its rules say: one request for each failure class that the \
        rules can bring about, and what comes back is compared with what `explain` predicts from the same files.\n\n\
        Requests are real: they reach the upstream where they are admitted, and the test tenant's runs are recorded. \
        Outages are brought about by the services' fault switch (--admin), which hits every request meanwhile and does not \
        exist in production. docs/drill.md says what is sent.",
        after_long_help = DRILL_EXAMPLE
    )]
    Drill(Box<DrillArguments>),
    /// Plays a log of requests under other rules or limits, and counts who would be refused
    #[command(
        long_about = "Plays a log of requests, each at its own time, under the given rules and limits: how many would be \
        refused, by class, code, scope and hour, and which tenants are hit first and most.\n\n\
        Each request goes through the filter's own code and is decided by the service's, over memory. Nothing is called and \
        nothing real is counted. docs/replay.md has the format of the log.",
        after_long_help = REPLAY_EXAMPLE
    )]
    Replay(ReplayArguments),
    /// Loads policies into Postgres, or prints them
    Policy {
        /// What to do with them
        #[command(subcommand)]
        command: PolicyCommand,
    },
    /// Signs envelopes as an edge does, or verifies them as the filter does
    #[command(subcommand)]
    Envelope(EnvelopeCommand),
    /// Shows runs that went on unmetered, and have been journaled for billing
    #[command(subcommand)]
    Unmetered(UnmeteredCommand),
}

/// What `envelope --help` shows at its end.
const ENVELOPE_EXAMPLE: &str = r#"Example:

  $ openssl rand -base64 32 > edge-1.secret
  $ portcullis envelope sign --key-id edge-1 --secret-file edge-1.secret \
      --method POST --path /v1/chat -H 'x-admission-owner-id: owner-1'
  x-admission-signature: v1;key=edge-1;ts=1764000000;sig=...
  $ portcullis envelope verify --key-id edge-1 --secret-file edge-1.secret \
      --method POST --path /v1/chat -H 'x-admission-owner-id: owner-1' \
      -H 'x-admission-signature: v1;key=edge-1;ts=1764000000;sig=...'
  valid: signed by edge-1, 2 s ago

The secret is base64 of 32 bytes or more. It comes from --secret-file (- is standard input) or from
PORTCULLIS_ENVELOPE_SECRET, never from an argument, which every user of the machine could see.

Exit codes: 0 signed, or valid; 1 the filter would refuse it, and why; 2 a fault in the arguments."#;

/// The subcommands of `envelope`.
#[derive(Debug, Subcommand)]
pub enum EnvelopeCommand {
    /// Prints the signature's header for a request
    #[command(
        long_about = "Prints the signature's header for a request.\n\n\
        Covered are the method, the path with its query, the time, and every header under the prefix; other headers may be \
        given and are not covered. docs/envelope-signature.md says how an edge does the same.",
        after_long_help = ENVELOPE_EXAMPLE
    )]
    Sign(SignArguments),
    /// Says whether the filter would trust a request's envelope, or exactly why not
    #[command(
        long_about = "Says whether the filter would trust a request's envelope, or exactly why not: the first fault that it \
        would find, with the code that it would answer.\n\n\
        With --config the keys, the prefix and the allowed age are those of a filter's configuration.",
        after_long_help = ENVELOPE_EXAMPLE
    )]
    Verify(VerifyArguments),
}

/// A request on the command line.
#[derive(Debug, Args)]
pub struct RequestArguments {
    /// The request's method
    #[arg(long, value_name = "METHOD", default_value = "POST")]
    pub method: String,
    /// The request's path with its query, as the gateway's filter sees it
    #[arg(long, value_name = "PATH")]
    pub path: String,
    /// A header, "name: value"; again for each
    #[arg(long = "header", short = 'H', value_name = "HEADER")]
    pub headers: Vec<String>,
    /// The envelope's prefix
    #[arg(long, value_name = "PREFIX", default_value = "x-admission-")]
    pub prefix: String,
}

/// A key on the command line.
#[derive(Debug, Args)]
pub struct KeyArguments {
    /// The key's id
    #[arg(long, value_name = "ID")]
    pub key_id: Option<String>,
    /// The file that holds the key's secret; - is standard input, and without it PORTCULLIS_ENVELOPE_SECRET counts
    #[arg(long, value_name = "FILE")]
    pub secret_file: Option<PathBuf>,
}

/// The arguments of `envelope sign`.
#[derive(Debug, Args)]
pub struct SignArguments {
    /// The key
    #[command(flatten)]
    pub key: KeyArguments,
    /// The request
    #[command(flatten)]
    pub request: RequestArguments,
    /// The time to sign, in seconds since 1970, instead of now
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(..1_000_000_000_000))]
    pub at: Option<u64>,
    /// Prints the message that is signed instead of the header: to compare with what an edge signs
    #[arg(long)]
    pub message: bool,
}

/// The arguments of `envelope verify`.
#[derive(Debug, Args)]
pub struct VerifyArguments {
    /// The filter's configuration (JSON), instead of a key
    #[arg(long, value_name = "FILE", conflicts_with_all = ["key_id", "secret_file", "prefix", "max_age_s"])]
    pub config: Option<PathBuf>,
    /// The key
    #[command(flatten)]
    pub key: KeyArguments,
    /// The request
    #[command(flatten)]
    pub request: RequestArguments,
    /// For how long a signature holds, 1 to 3600
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_MAX_AGE_S, value_parser = clap::value_parser!(u64).range(MAX_AGE_S))]
    pub max_age_s: u64,
    /// The time at which to judge, in seconds since 1970, instead of now
    #[arg(long, value_name = "SECONDS")]
    pub at: Option<u64>,
}

/// What there are schemas of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SchemaKind {
    /// The filter's configuration
    Filter,
    /// The service's configuration
    Service,
    /// A rule file
    Rules,
    /// A policy file
    Policy,
    /// What Kong reads beside the module, with the filter's configuration in draft 4
    Kong,
}

/// The subcommands of `unmetered`.
#[derive(Debug, Subcommand)]
pub enum UnmeteredCommand {
    /// Lists journaled runs, oldest first
    #[command(
        long_about = "Lists the runs that went on while metering, or the decision service, was unavailable and the rules \
        said admit, oldest first. Each has been added to its organization's month when it was journaled; what a service \
        or a filter still keeps shows in portcullis_unmetered_waiting.\n\n\
        Exit code 0 after the whole list, 1 if the database can't be read, 2 for a fault in the arguments."
    )]
    List(UnmeteredListArguments),
}

/// The arguments of `unmetered list`.
#[derive(Debug, Args)]
pub struct UnmeteredListArguments {
    /// One JSON object a line instead of a table
    #[arg(long)]
    pub json: bool,
    /// Only the runs of this organization
    #[arg(long, value_name = "ORG")]
    pub org: Option<String>,
    /// The metering store, postgres://…; as an argument it shows in the list of processes, so prefer the environment
    #[arg(long, value_name = "URL", env = "POSTGRES_DSN", hide_env_values = true)]
    pub database: Option<String>,
}

/// The subcommands of `policy`.
#[derive(Debug, Subcommand)]
pub enum PolicyCommand {
    /// Makes the database hold what a policy file says
    #[command(
        long_about = "Makes the database hold what a policy file says, and prints the difference.\n\n\
        Declarative: afterwards the database holds the entries of the file and no others, or nothing was changed. A file \
        that lacks entries that the database has is refused unless --prune is given, since a file that was cut short would \
        lock customers out. Everything happens in one transaction; running services follow within their \
        policy.max_staleness_ms. Applied a second time, a file finds nothing to change. Missing tables are created.",
        after_long_help = "Exit codes: 0 done, 1 trouble with the database, 2 a fault in the file or in the arguments, or \
        entries that only --prune would remove."
    )]
    Apply {
        /// The policy file (JSON): providers, prices, plans, orgs
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Address of the database; in the environment it does not show in the list of processes
        #[arg(long, value_name = "URL", env = "POSTGRES_DSN", hide_env_values = true)]
        database: Option<String>,
        /// Prints the difference and changes nothing
        #[arg(long)]
        dry_run: bool,
        /// Removes entries that the file does not have
        #[arg(long)]
        prune: bool,
    },
    /// Prints the policy of the database in the format of the file
    #[command(
        long_about = "Prints the policy of the database in the format of the file (JSON), so that it can be kept, \
        compared, edited and applied again."
    )]
    Show {
        /// Address of the database; in the environment it does not show in the list of processes
        #[arg(long, value_name = "URL", env = "POSTGRES_DSN", hide_env_values = true)]
        database: Option<String>,
    },
}

/// The arguments of `serve`.
#[derive(Debug, Args)]
#[command(after_long_help = "Environment, which beats the file (empty counts as unset):\n  \
    PORTCULLIS_PROFILE  development, staging or production\n  \
    REDIS_URL           the limiter: redis://, rediss:// (TLS), redis-cluster:// or rediss-cluster://\n  \
    POSTGRES_DSN        the policy and metering store\n  \
    RUST_LOG            which lines are logged: off, error, warn, info (default), debug, trace, or TARGET=LEVEL")]
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
