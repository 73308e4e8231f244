//! The scene of an imagined request: which rules, which service, which policy, what has been spent, and what is down.
//!
//! Files are read by the parsers of `serve`, `check` and the filter, so they have the same faults here. Left out on purpose:
//! every real store. Addresses in files are not called.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use portcullis_decision::class::Dependency;
use portcullis_decision::config::{
    Faults, FilterConfig, SHIPPED_RULES, ServiceConfig, Tiers, parse_policy_file, parse_rule_file,
};
use portcullis_decision::evaluation::Operator;
use portcullis_decision::policy::PolicyFile;
use portcullis_decision::rules::{Gate, GateRule, Rules};
use serde_json::{Value, json};

use super::counters::{self, Spent};
use super::filter::ImaginedFilter;
use super::sources::Source;
use super::{ImaginedService, Outage};
use crate::check;

/// The options that set the scene.
#[derive(Debug, Clone, Args)]
pub struct SceneArguments {
    /// The filter's configuration (JSON)
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// A shipped rule file's name, or a rule file: in place of the configuration's rules
    #[arg(long, value_name = "NAME|FILE")]
    pub rules: Option<String>,
    /// The policy file (JSON); without one the policy store counts as unavailable
    #[arg(long, value_name = "FILE")]
    pub policy: Option<PathBuf>,
    /// The service's configuration, for its tiers, window and profile; without one a limiter and no tiers
    #[arg(long, value_name = "FILE")]
    pub service: Option<PathBuf>,
    /// Where a counter stands: SCOPE:ID:RESOURCE=N, and @SECONDS until its window ends; may be given again
    #[arg(long, value_name = "COUNTER")]
    pub spent: Vec<Spent>,
    /// Where counters stand, as a list of {"scope", "ids", "resource", "used", "ends_in_s"}
    #[arg(long, value_name = "FILE")]
    pub counters: Option<PathBuf>,
    /// What does not answer; several with commas
    #[arg(long, value_name = "DEPENDENCY", value_delimiter = ',', value_enum)]
    pub down: Vec<Outage>,
}

/// A scene that is set.
pub struct Scene {
    /// The filter's configuration.
    pub config: FilterConfig,
    /// What it was parsed from.
    pub text: Vec<u8>,
    /// Where the rules stand.
    pub rules: Source,
    /// Where the other keys of the filter stand, if a file was given.
    pub filter: Option<Source>,
    /// The service's configuration, if one was given.
    pub tiers: Option<Source>,
    /// The policy file, if one was given.
    pub plans: Option<Source>,
    /// What was taken for granted, for the reader.
    pub notes: Vec<String>,
    service: ImaginedService,
    spent: Vec<Spent>,
}

/// What is wrong with the arguments: one line for each fault.
pub type Wrong = Vec<String>;

fn within(option: &str, file: &Path, faults: &Faults) -> Wrong {
    faults
        .iter()
        .map(|fault| format!("{option} {}: {fault}", file.display()))
        .collect()
}

fn read(option: &str, file: &Path) -> Result<Vec<u8>, Wrong> {
    fs::read(file).map_err(|error| vec![format!("{option} {}: cannot be read: {error}", file.display())])
}

impl SceneArguments {
    /// Reads every file.
    ///
    /// # Errors
    /// All faults of the first file that has any.
    pub fn set(&self) -> Result<Scene, Wrong> {
        let mut notes = Vec::new();
        let (config, text, rules, filter) = self.filter(&mut notes)?;
        let mut service = ImaginedService::new(
            config.profile,
            Operator {
                tiers: Tiers::default(),
                window_s: 60,
                slot_ttl_ms: 30_000,
            },
        );
        service.outages.clone_from(&self.down);
        let mut tiers = None;
        if let Some(file) = &self.service {
            let text = read("--service", file)?;
            let read = ServiceConfig::parse(&text, &check::environment())
                .map_err(|faults| within("--service", file, &faults))?;
            if read.profile != config.profile {
                notes.push(format!(
                    "the filter's profile is {}, the service's is {}: it does not answer this filter",
                    config.profile, read.profile
                ));
            }
            service.profile = read.profile;
            service.has_limiter = read.limiter.url.is_some();
            service.operator = Operator {
                tiers: read.capacity,
                window_s: read.limiter.window_s,
                slot_ttl_ms: read.limiter.slot_ttl_s.saturating_mul(1000),
            };
            tiers = Some(Source::new(file.display().to_string(), &text));
        }
        let mut plans = None;
        if let Some(file) = &self.policy {
            let text = read("--policy", file)?;
            let policy = parse_policy_file(&text).map_err(|faults| within("--policy", file, &faults))?;
            service = service.with_policy(policy);
            plans = Some(Source::new(file.display().to_string(), &text));
        }
        let reads_policy = |rule: &GateRule| rule.reads_plan() || rule.gate().dependency() == Some(Dependency::Policy);
        if plans.is_none() && config.rules.gates.iter().any(reads_policy) {
            notes.push("no --policy was given: the policy store counts as unavailable".to_owned());
        }
        let spent = self.counters()?;
        Ok(Scene {
            config,
            text,
            rules,
            filter,
            tiers,
            plans,
            notes,
            service,
            spent,
        })
    }

    fn filter(&self, notes: &mut Vec<String>) -> Result<(FilterConfig, Vec<u8>, Source, Option<Source>), Wrong> {
        let (tree, named) = match &self.config {
            None => {
                let Some(given) = &self.rules else {
                    let names = SHIPPED_RULES.map(|(name, _)| name).join(", ");
                    return Err(vec![format!(
                        "--config FILE or --rules NAME|FILE is needed; the shipped rules are {names}"
                    )]);
                };
                let named = rules(given)?;
                let (model, from) = match named.rules.gate(Gate::ModelPolicy) {
                    Some(_) => ("body", ", the model from the body"),
                    None => ("none", ""),
                };
                notes.push(format!(
                    "no --config was given: {given} in the development profile, every path guarded{from}, all else by default"
                ));
                // The upstream's name is the host's, and nothing is called.
                let tree = json!({"profile": "development", "rules": null, "model": {"from": model},
                    "decision": {"upstream": "portcullis"}});
                (tree, named)
            }
            Some(file) => {
                let text = read("--config", file)?;
                let config = FilterConfig::parse(&text).map_err(|faults| within("--config", file, &faults))?;
                let source = Source::new(file.display().to_string(), &text);
                let tree: Value = serde_json::from_slice(&text).map_err(|error| vec![error.to_string()])?;
                let Some(given) = &self.rules else {
                    let shipped = tree.get("rules").and_then(Value::as_str).and_then(Source::shipped);
                    let rules = shipped.unwrap_or_else(|| source.clone().inline());
                    return Ok((config, text, rules, Some(source)));
                };
                (tree, rules(given)?)
            }
        };
        let mut tree = tree;
        let given = self.rules.as_deref().unwrap_or_default();
        if let Some(keys) = tree.as_object_mut() {
            keys.insert("rules".to_owned(), named.key);
        }
        let text = tree.to_string().into_bytes();
        let config = FilterConfig::parse(&text).map_err(|faults| within("--rules", Path::new(given), &faults))?;
        let filter = self.config.as_ref().map(|file| {
            let text = fs::read(file).unwrap_or_default();
            Source::new(file.display().to_string(), &text)
        });
        Ok((config, text, named.source, filter))
    }

    fn counters(&self) -> Result<Vec<Spent>, Wrong> {
        let mut spent = self.spent.clone();
        if let Some(file) = &self.counters {
            let text = read("--counters", file)?;
            let wrong = |why: String| vec![format!("--counters {}: {why}", file.display())];
            let listed: Vec<Value> =
                serde_json::from_slice(&text).map_err(|error| wrong(format!("must be a list of counters: {error}")))?;
            for (at, one) in listed.into_iter().enumerate() {
                let one: Spent = serde_json::from_value(one).map_err(|error| wrong(format!("[{at}]: {error}")))?;
                if let Some(fault) = one.fault() {
                    return Err(wrong(format!("[{at}]: {fault}")));
                }
                spent.push(one);
            }
        }
        Ok(spent)
    }
}

/// Rules that were given by a shipped name or by a file.
struct Named {
    /// What stands for them in a configuration.
    key: Value,
    source: Source,
    rules: Rules,
}

fn rules(given: &str) -> Result<Named, Wrong> {
    let file = Path::new(given);
    let parsed = |text: &[u8]| parse_rule_file(text).map_err(|faults| within("--rules", file, &faults));
    let shipped = SHIPPED_RULES.iter().find(|(name, _)| *name == given);
    if let (Some((_, text)), Some(source)) = (shipped, Source::shipped(given)) {
        return Ok(Named {
            key: json!(given),
            source,
            rules: parsed(text.as_bytes())?,
        });
    }
    let text = fs::read(file).map_err(|error| {
        let names = SHIPPED_RULES.map(|(name, _)| name).join(", ");
        vec![format!(
            "--rules {given:?} is no shipped rule file ({names}), and no file that can be read: {error}"
        )]
    })?;
    Ok(Named {
        rules: parsed(&text)?,
        key: serde_json::from_slice(&text).map_err(|error| vec![error.to_string()])?,
        source: Source::new(given, &text),
    })
}

impl Scene {
    /// The policy, if one was given.
    pub fn policy(&self) -> Option<&PolicyFile> {
        self.service.policy()
    }

    /// A fresh gateway of this scene, whose counters stand where they were said to at `now_ms`, in milliseconds since 1970.
    ///
    /// # Errors
    /// A counter that can't stand so.
    pub fn filter(&self, now_ms: u64) -> Result<ImaginedFilter, Wrong> {
        self.filter_as(self.config.clone(), now_ms)
    }

    /// The same with another configuration.
    ///
    /// # Errors
    /// A counter that can't stand so.
    pub fn filter_as(&self, config: FilterConfig, now_ms: u64) -> Result<ImaginedFilter, Wrong> {
        let mut service = self.service.clone();
        counters::charge(&mut service, &self.spent, (&config.rules, config.window_s), now_ms)
            .map_err(|fault| vec![format!("--spent or --counters: {fault}")])?;
        Ok(ImaginedFilter::new(config, &self.text, service))
    }
}
