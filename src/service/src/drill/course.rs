//! The course of a drill: each probe predicted, sent and judged, with its fault switched on before and off after.

use std::io::{self, Write as _};
use std::time::Duration;

use portcullis_decision::config::{ModelSource, Profile, ServiceConfig, Tiers};
use portcullis_decision::rules::{Gate, GateRule};
use portcullis_decision::signature::{NAME, Request as Signed, Secret, sign};
use serde_json::Value;
use tokio::time::{Instant, sleep};

use super::arguments::DrillArguments;
use super::client::Place;
use super::judge::{Got, differences, prediction_fault};
use super::probes::{self, Plan, Planner, Probe, Refused, Shows, Times, class_of};
use super::report::{Findings, NotDriven, Row, Told};
use super::switch::{Standing, Switches};
use crate::check;
use crate::envelope::key;
use crate::explain::explained;
use crate::explain::report::{Ending, Report};
use crate::explain::request::Request;
use crate::imagined::Outage;
use crate::imagined::scene::{Scene, Wrong};
use crate::metering::memory::unix_ms;
use crate::readiness::now;
use crate::{random, unix_s};

/// Beyond what a service says that a fault takes to show.
const SETTLE_SLACK: Duration = Duration::from_millis(300);
/// How long a gateway may take to admit again after an outage; its breaker probes once a second.
const RECOVERY: Duration = Duration::from_secs(10);
/// Between two tries of that.
const RETRY: Duration = Duration::from_millis(250);
/// The longest pause for a launch rate, in milliseconds.
const LONGEST_PAUSE_MS: u64 = 30_000;

/// How the upstream is asked what it saw.
enum Counter {
    None,
    Url(Place),
    Header(String),
}

impl Counter {
    /// How many requests the upstream has seen so far.
    async fn seen(&self) -> Result<Option<u64>, String> {
        let Self::Url(place) = self else {
            return Ok(None);
        };
        let path = place.path("");
        let asked = Request {
            method: "GET".to_owned(),
            path: if path.is_empty() { "/".to_owned() } else { path },
            ..Request::default()
        };
        let got = place.send(&asked).await;
        let got = got.map_err(|why| format!("--upstream-count: {why}"))?;
        let body: Value = serde_json::from_slice(&got.body).unwrap_or_default();
        let hits = body.as_u64().or_else(|| body.get("hits")?.as_u64());
        let hits = hits.ok_or_else(|| {
            format!(
                "--upstream-count: {}{} must answer {{\"hits\": N}} or N, and answers {} without a number of hits",
                place.authority(),
                asked.path,
                got.status
            )
        })?;
        Ok(Some(hits))
    }
}

/// A drill whose arguments make sense.
pub(super) struct Drill<'a> {
    arguments: &'a DrillArguments,
    gateway: Place,
    scene: Scene,
    tenant: Request,
    tiers: Option<Tiers>,
    signer: Option<(&'a str, Secret)>,
    switches: Switches,
    standings: Vec<Standing>,
    counter: Counter,
    /// Makes the ids of this drill its own.
    id: String,
}

impl<'a> Drill<'a> {
    /// Reads every file, asks the services of which profile they are, and the upstream what it has seen: who is asked at the
    /// wrong address must not look like a gateway that is at fault.
    pub(super) async fn set(arguments: &'a DrillArguments) -> Result<Self, Wrong> {
        let one = |fault: String| vec![fault];
        let ca = arguments.ca.as_deref();
        let gateway = Place::of("--gateway", &arguments.gateway, ca).map_err(one)?;
        let scene = arguments.scene(&[], &[])?;
        let tenant = arguments.tenant(&scene, &gateway)?;
        let signer = match (&scene.config.signatures, &arguments.key.key_id) {
            (None, None) => None,
            (None, Some(_)) => return Err(one("--key-id: the configuration wants no signed envelopes".to_owned())),
            (Some(_), None) => {
                return Err(one(
                    "the configuration wants signed envelopes: give --key-id and --secret-file".to_owned(),
                ));
            }
            (Some(_), Some(_)) => Some(key(&arguments.key).map_err(one)?),
        };
        let tiers = match &arguments.service {
            None => None,
            Some(file) => {
                let text = check::read(file).map_err(|faults| one(faults.to_string()))?;
                let config = ServiceConfig::parse(&text, &check::environment());
                Some(config.map_err(|faults| one(faults.to_string()))?.capacity)
            }
        };
        let places = arguments.admins.iter().map(|url| Place::of("--admin", url, ca));
        let places = places.collect::<Result<Vec<_>, _>>().map_err(one)?;
        let switches = Switches::new(places, arguments.token().map_err(one)?);
        let standings = switches.standings().await.map_err(one)?;
        let production = standings
            .iter()
            .map(|standing| standing.profile)
            .chain([scene.config.profile]);
        if production.into_iter().any(|profile| profile == Profile::Production) && !arguments.yes_in_production {
            return Err(one(
                "this is a production installation: a drill sends requests that its rules refuse, and some that they \
                 admit. Say --production --yes-in-production if that is meant"
                    .to_owned(),
            ));
        }
        let counter = match (&arguments.upstream_count, &arguments.upstream_header) {
            (Some(url), _) => {
                let place = Place::of("--upstream-count", url, ca).map_err(one)?;
                Counter::Url(place)
            }
            (None, Some(name)) => Counter::Header(name.to_ascii_lowercase()),
            (None, None) => Counter::None,
        };
        counter.seen().await.map_err(one)?;
        let id = random_id().ok_or_else(|| one("the system gives no random numbers".to_owned()))?;
        Ok(Self {
            arguments,
            gateway,
            scene,
            tenant,
            tiers,
            signer,
            switches,
            standings,
            counter,
            id,
        })
    }

    /// Drives all probes.
    pub(super) async fn findings(&self) -> Result<Findings, Wrong> {
        let (began, started) = (Instant::now(), now());
        let Plan { probes, not_driven } = self.plan();
        let mut not_driven: Vec<NotDriven> = not_driven
            .into_iter()
            .map(|(class, why)| NotDriven { class, why })
            .collect();
        self.check_the_tenant(&probes)?;
        let (mut rows, count) = (Vec::new(), probes.len());
        for (at, probe) in probes.iter().enumerate() {
            let report = self.predicted(probe)?;
            if let Some(why) = asks_nobody(probe, &report) {
                not_driven.push(NotDriven {
                    class: probe.shows.name(),
                    why,
                });
                continue;
            }
            let number = at.saturating_add(1);
            // Progress is for whoever waits; the table comes at the end.
            let mut err = io::stderr().lock();
            drop(write!(err, "[{number}/{count}] {} ... ", probe.name));
            drop(err.flush());
            drop(err);
            let row = self.row(probe, &report).await;
            let colour = if row.green { "green" } else { "RED" };
            drop(writeln!(io::stderr().lock(), "{colour}"));
            rows.push(row);
        }
        let config = &self.scene.config;
        Ok(Findings {
            version: env!("CARGO_PKG_VERSION"),
            started,
            took_ms: u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX),
            gateway: self.gateway.authority(),
            rules: config.rules.name.clone(),
            profile: config.profile.name().to_owned(),
            filter_config_hash: config.fingerprint(&self.scene.text),
            service_config_hashes: self.standings.iter().map(|of| of.config_hash.clone()).collect(),
            upstream_was_counted: !matches!(self.counter, Counter::None),
            green: rows.iter().all(|row| row.green),
            rows,
            not_driven,
            notes: self.scene.notes.clone(),
        })
    }

    fn plan(&self) -> Plan {
        let in_production = self.standings.iter().any(|of| of.profile == Profile::Production);
        let all = [Outage::Limiter, Outage::Policy, Outage::Metering, Outage::Decision];
        let outages = if self.switches.is_empty() {
            Err("no --admin was given: outages can't be brought about")
        } else if in_production {
            Err("the services are of the production profile, which has no fault switch")
        } else {
            Ok(&all[..])
        };
        let planner = Planner::new(&self.scene.config, &self.tenant, &self.id);
        let refused = Refused {
            orgs: &self.arguments.refused_orgs,
            unserved_model: self.arguments.unserved_model.as_deref(),
        };
        planner.plan(self.tiers.as_ref(), refused, outages)
    }

    /// Whoever has no tenant that would be admitted can't tell a refusal by mistake from one by right.
    fn check_the_tenant(&self, probes: &[Probe]) -> Result<(), Wrong> {
        let Some(first) = probes.first() else { return Ok(()) };
        let report = self.predicted(first)?;
        if matches!(report.ending, Ending::Denied | Ending::Unavailable) {
            let code = report.code.unwrap_or_default();
            let reads_body = self.scene.config.model == ModelSource::Body;
            return Err(vec![format!(
                "by these files the test tenant's request would be refused ({code}: {}): give its envelope with -H,{} and its \
                 policy with --policy",
                report.decided_by.why,
                if reads_body {
                    " a body that names its model with --body,"
                } else {
                    ""
                }
            )]);
        }
        Ok(())
    }

    /// What has to come of a probe.
    fn predicted(&self, probe: &Probe) -> Result<Report, Wrong> {
        let down: Vec<Outage> = probe.down.into_iter().collect();
        let scene = self.arguments.scene(&down, &probe.spent)?;
        let request = self.signed(probe)?;
        explained(&scene, &[], &request, probe.predicted_times(), unix_ms())
    }

    /// The request with a signature of this moment, where one is wanted.
    fn signed(&self, probe: &Probe) -> Result<Request, Wrong> {
        let mut request = probe.request.clone();
        let prefix = &self.scene.config.prefix;
        let has_envelope = request
            .headers
            .iter()
            .any(|(name, _)| name.starts_with(prefix.as_str()));
        if let Some((id, secret)) = self.signer.as_ref().filter(|_| has_envelope && probe.is_signed) {
            let fields: Vec<(&[u8], &[u8])> = request
                .headers
                .iter()
                .map(|(name, value)| (name.as_bytes(), value.as_bytes()))
                .collect();
            let signed = Signed {
                method: request.method.as_bytes(),
                path: request.path.as_bytes(),
                headers: &fields,
            };
            let at_s = unix_s().ok_or_else(|| vec!["the clock of this machine stands before 1970".to_owned()])?;
            let value = sign(prefix, signed, id, secret, at_s)
                .map_err(|twice| vec![format!("{} stands twice in the envelope", twice.0)])?;
            request.headers.push((format!("{prefix}{NAME}"), value));
        }
        Ok(request)
    }

    /// Drives one probe.
    async fn row(&self, probe: &Probe, report: &Report) -> Row {
        let expected = Told::predicted(report);
        let mut reasons: Vec<String> = prediction_fault(probe.shows, report).into_iter().collect();
        self.leave_time_for_launches(probe).await;
        let (sent, got) = match self.driven(probe, report).await {
            Ok((sent, got)) => {
                reasons.extend(differences(report, &got));
                (sent, Some(Told::got(&got)))
            }
            Err(why) => {
                reasons.push(why);
                (0, None)
            }
        };
        Row::new(probe, sent, expected, got, reasons)
    }

    /// The answer that counts, and how many requests it took. A fault that was switched on is off again afterwards.
    async fn driven(&self, probe: &Probe, report: &Report) -> Result<(u32, Got), String> {
        let Some(outage) = probe.down else {
            return self.sent(probe, report).await;
        };
        let settles_in_ms = self.switches.let_fail(&[outage]).await?;
        sleep(Duration::from_millis(settles_in_ms).saturating_add(SETTLE_SLACK)).await;
        let sent = self.sent(probe, report).await;
        self.switches.let_fail(&[]).await?;
        sent
    }

    async fn sent(&self, probe: &Probe, report: &Report) -> Result<(u32, Got), String> {
        let (start, mut sent) = (Instant::now(), 0_u32);
        loop {
            let got = self.once(probe).await?;
            sent = sent.saturating_add(1);
            let is_the_last = match probe.times {
                Times::Exactly(times) => sent >= times,
                Times::UntilRefused(most) => got.is_refused() || sent >= most,
                Times::UntilAdmitted => differences(report, &got).is_empty() || start.elapsed() >= RECOVERY,
            };
            if is_the_last {
                return Ok((sent, got));
            }
            if probe.times == Times::UntilAdmitted {
                sleep(RETRY).await;
            }
        }
    }

    async fn once(&self, probe: &Probe) -> Result<Got, String> {
        let request = self.signed(probe).map_err(|wrong| wrong.join("; "))?;
        let before = self.counter.seen().await?;
        let mut got = self.gateway.send(&request).await?;
        got.upstream = match (&self.counter, before, self.counter.seen().await?) {
            (Counter::Header(name), ..) => Some(u64::from(got.header(name).is_some())),
            (_, Some(before), Some(after)) => Some(after.saturating_sub(before)),
            _ => None,
        };
        Ok(got)
    }

    /// Launches of the tenant's org are admitted by the minute: without a pause a probe would be refused for those before it.
    async fn leave_time_for_launches(&self, probe: &Probe) {
        let Some(GateRule::LaunchRate { per_minute, .. }) = self.scene.config.rules.gate(Gate::LaunchRate) else {
            return;
        };
        if probe.shows != Shows::Admission && probe.down.is_none() && probe.spent.is_empty() {
            return;
        }
        let pause_ms = 60_000_u64.checked_div(*per_minute).unwrap_or(LONGEST_PAUSE_MS);
        sleep(Duration::from_millis(pause_ms.min(LONGEST_PAUSE_MS))).await;
    }
}

/// Why an outage would show nothing: under these rules, and for this tenant, nothing asks what fails.
fn asks_nobody(probe: &Probe, report: &Report) -> Option<String> {
    let outage = probe.down.filter(|down| probe.shows == Shows::Class(class_of(*down)))?;
    let is_affected = prediction_fault(probe.shows, report).is_none();
    let is_plain = report.ending == Ending::Admitted && report.enforced;
    (!is_affected && is_plain).then(|| {
        let name = probes::name_of(outage);
        format!("under these rules nothing asks {name} for the test tenant")
    })
}

fn random_id() -> Option<String> {
    let bytes: [u8; 6] = random()?;
    Some(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
