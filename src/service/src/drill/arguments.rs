//! The arguments of `portcullis drill`, and the files and the request that they name.

use std::fs;
use std::path::PathBuf;

use clap::Args;
use portcullis_decision::config::ModelSource;

use super::client::Place;
use crate::cli::KeyArguments;
use crate::explain::request::{self, Request};
use crate::imagined::Outage;
use crate::imagined::counters::Spent;
use crate::imagined::scene::{Scene, SceneArguments, Wrong};

/// The arguments of `drill`.
#[derive(Debug, Args)]
pub struct DrillArguments {
    /// The gateway, behind whatever stamps envelopes: http[s]://HOST[:PORT]
    #[arg(long, value_name = "URL")]
    pub(super) gateway: String,
    /// The filter's configuration that the gateway has (JSON)
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
    /// A shipped rule file's name, or a rule file: in place of the configuration's rules
    #[arg(long, value_name = "NAME|FILE")]
    pub(super) rules: Option<String>,
    /// The policy file that the database holds (JSON)
    #[arg(long, value_name = "FILE")]
    pub(super) policy: Option<PathBuf>,
    /// The service's configuration, for its tiers and window
    #[arg(long, value_name = "FILE")]
    pub(super) service: Option<PathBuf>,
    /// A header of the test tenant's requests, "Name: value"; may be given again. The owner id and limits are the drill's own
    #[arg(long = "header", short = 'H', value_name = "HEADER")]
    pub(super) headers: Vec<String>,
    /// The method; that of the configuration's first route unless given
    #[arg(long, short = 'X', value_name = "METHOD")]
    pub(super) method: Option<String>,
    /// The path; that of the configuration's first route unless given
    #[arg(long, value_name = "PATH")]
    pub(super) path: Option<String>,
    /// The body, or @FILE
    #[arg(long, value_name = "BODY|@FILE")]
    pub(super) body: Option<String>,
    /// An org that the policy must refuse, such as a suspended one; may be given again
    #[arg(long = "refused-org", value_name = "ORG")]
    pub(super) refused_orgs: Vec<String>,
    /// A model that the policy allows the test tenant, and that no provider serves: shows provider_unconfigured
    #[arg(long, value_name = "MODEL")]
    pub(super) unserved_model: Option<String>,
    /// The key that signs envelopes, where the configuration wants signed ones
    #[command(flatten)]
    pub(super) key: KeyArguments,
    /// The admin listener of a service; again for each of several. Without it no outage is brought about
    #[arg(long = "admin", value_name = "URL")]
    pub(super) admins: Vec<String>,
    /// The file that holds the admin listener's token; its first line counts
    #[arg(long, value_name = "FILE")]
    pub(super) token_file: Option<PathBuf>,
    /// A URL that tells how many requests the upstream has seen: {"hits": N}, or N
    #[arg(long, value_name = "URL", conflicts_with = "upstream_header")]
    pub(super) upstream_count: Option<String>,
    /// A response header that only the upstream sets
    #[arg(long, value_name = "NAME")]
    pub(super) upstream_header: Option<String>,
    /// Certificates to trust in place of the system's, for https (PEM)
    #[arg(long, value_name = "FILE")]
    pub(super) ca: Option<PathBuf>,
    /// Writes the report as Markdown
    #[arg(long, value_name = "FILE")]
    pub(super) report: Option<PathBuf>,
    /// Writes the report as JSON
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// Drills a production installation; no outage is brought about there
    #[arg(long, requires = "yes_in_production")]
    pub(super) production: bool,
    /// Yes, in production: both are needed
    #[arg(long, requires = "production")]
    pub(super) yes_in_production: bool,
}

impl DrillArguments {
    /// The files as `explain` reads them.
    pub(super) fn scene(&self, down: &[Outage], spent: &[Spent]) -> Result<Scene, Wrong> {
        let arguments = SceneArguments {
            config: self.config.clone(),
            rules: self.rules.clone(),
            policy: self.policy.clone(),
            service: self.service.clone(),
            spent: spent.to_vec(),
            counters: None,
            down: down.to_vec(),
        };
        arguments.set()
    }

    /// The request of the test tenant, without an owner and limits of its own.
    pub(super) fn tenant(&self, scene: &Scene, gateway: &Place) -> Result<Request, Wrong> {
        let one = |fault: String| vec![fault];
        let config = &scene.config;
        let route = config.routes.as_ref().and_then(|routes| routes.first());
        let mut request = Request::default();
        for text in &self.headers {
            request.headers.extend(request::header("-H", text).map_err(one)?);
        }
        request.body = request::body(self.body.as_deref()).map_err(one)?;
        if config.model == ModelSource::Body {
            request.default_header("content-type", "application/json");
        }
        let by_route = route.and_then(|route| route.methods.as_ref()?.first().cloned());
        let plain = if request.body.is_empty() { "GET" } else { "POST" };
        request.method = self.method.clone().or(by_route).unwrap_or_else(|| plain.to_owned());
        let path = self
            .path
            .clone()
            .or_else(|| route.map(|route| route.path_prefix.clone()));
        let path = path.unwrap_or_else(|| "/".to_owned());
        if !path.starts_with('/') {
            return Err(one(format!("--path {path:?} must begin with \"/\"")));
        }
        request.path = gateway.path(&path);
        Ok(request)
    }

    pub(super) fn token(&self) -> Result<Option<String>, String> {
        let Some(file) = &self.token_file else { return Ok(None) };
        let name = file.display();
        let text = fs::read_to_string(file).map_err(|error| format!("--token-file {name}: cannot be read: {error}"))?;
        let mut lines = text.lines().map(str::trim);
        let token = lines.find(|line| !line.is_empty() && !line.starts_with('#'));
        token
            .map(|token| Some(token.to_owned()))
            .ok_or_else(|| format!("--token-file {name}: holds no token"))
    }
}
