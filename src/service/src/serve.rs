//! `portcullis serve`: from a file to a running service, and to its end.

use std::io::{self, Write as _};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use portcullis_decision::config::{Faults, HttpBounds, ServiceConfig, Tiers};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::{Instant, sleep, timeout_at};

use crate::admin::{self, AdminState};
use crate::canary::Canary;
use crate::check::{self, FAULTY, Plan};
use crate::cli::ServeArguments;
use crate::connections::Door;
use crate::decide::Decider;
use crate::ext_authz::Checks;
use crate::fault_switch::{FaultSwitch, switchable};
use crate::gates::Gates;
use crate::http::{App, router};
use crate::logs::{self, Journal};
use crate::metering::Cancel;
use crate::metering::watched::WatchedMeter;
use crate::metrics::Metrics;
use crate::readiness::Readiness;
use crate::spans::Spans;
use crate::{after, connections, unix_s};

/// How long the end may take: what is under way is answered, and what has to be given back is.
const GRACE: Duration = Duration::from_secs(10);
/// How long a limiter that doesn't answer may hold up the end once all requests are answered.
const GIVE_BACK_GRACE: Duration = Duration::from_secs(2);
/// Connections of operators at a time.
const MOST_OPERATORS: u64 = 64;
/// How long spans may take to be sent at the end, also where nothing of that is left.
const LEAST_FLUSH: Duration = Duration::from_millis(500);
/// Between two looks at whether all is given back.
const GLANCE: Duration = Duration::from_millis(5);

/// The sockets, before anybody is answered.
struct Listeners {
    gateways: TcpListener,
    operators: Option<TcpListener>,
}

/// Serves until a signal. Exit code 0 after an orderly end, 1 if it could not start, 2 for a fault of the configuration.
pub fn run(arguments: &ServeArguments) -> ExitCode {
    let (plan, config_hash) = match plan(arguments) {
        Ok(plan) => plan,
        Err(faults) => {
            check::report(&mut io::stderr().lock(), &arguments.config, &faults);
            return ExitCode::from(FAULTY);
        }
    };
    logs::start(plan.levels.clone());
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return no_start(arguments, &format!("cannot start its threads: {error}")),
    };
    let code = runtime.block_on(async {
        match listen(&plan.config, arguments.reuse_port).await {
            Ok(listeners) => serve(plan, config_hash, listeners)
                .await
                .map_or_else(|why| no_start(arguments, &why), |()| ExitCode::SUCCESS),
            Err(why) => no_start(arguments, &why),
        }
    });
    // A store that hangs must not hold up the process: what matters has been waited for.
    runtime.shutdown_background();
    code
}

async fn listen(config: &ServiceConfig, reuse_port: bool) -> Result<Listeners, String> {
    let bind = async |key: &str, address: &str| {
        let bound = connections::bind(address, reuse_port).await;
        bound.map_err(|error| format!("{key}: cannot listen on {address}: {error}"))
    };
    Ok(Listeners {
        gateways: bind("listen", &config.listen).await?,
        operators: match &config.admin {
            Some(admin) => Some(bind("admin.listen", &admin.listen.to_string()).await?),
            None => None,
        },
    })
}

fn no_start(arguments: &ServeArguments, why: &str) -> ExitCode {
    drop(writeln!(io::stderr().lock(), "{}: {why}", arguments.config.display()));
    ExitCode::FAILURE
}

/// A configuration that can be served, and its fingerprint.
fn plan(arguments: &ServeArguments) -> Result<(Plan, String), Faults> {
    let text = check::read(&arguments.config)?;
    let plan = check::service(&text, &check::environment())?;
    let config_hash = plan.config.fingerprint(&text);
    Ok((plan, config_hash))
}

async fn serve(plan: Plan, config_hash: String, listeners: Listeners) -> Result<(), String> {
    let Plan {
        collector,
        config,
        limiter,
        policy,
        meter,
        door: files,
        levels: _,
    } = plan;
    let listener = listeners.gateways;
    // Before the first line, so that who reads it may send a signal.
    let signal = |kind| signal(kind).map_err(|error| format!("cannot wait for signals: {error}"));
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let stop = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!(event = "stopping", "no longer accepting; answering what is under way");
    };
    let (metrics, journal) = (Arc::new(Metrics::default()), Arc::new(Journal::default()));
    let (spans, sending) = match collector {
        Some(collector) => {
            let (spans, sending) = collector.start(Arc::clone(&metrics), Arc::clone(&journal))?;
            (spans, Some(sending))
        }
        None => (Spans::default(), None),
    };
    let address = listener.local_addr().map_err(|error| format!("listen: {error}"))?;
    let scheme = limiter.as_ref().map_or("none", |limiter| limiter.scheme());
    metrics.build_info(config.profile.name(), &config_hash, scheme);
    tracing::info!(
        event = "started",
        listen = %address,
        profile = config.profile.name(),
        config_hash = config_hash,
        limiter = scheme,
        policy = policy.as_ref().map_or("none", |policy| policy.scheme()),
        metering = meter.as_ref().map_or("none", |meter| meter.scheme()),
        capacity = tiers(&config.capacity),
        door = files.kind(),
        ext_authz = config.ext_authz.as_ref().map_or("none", |checks| checks.rules.name.as_str()),
        version = env!("CARGO_PKG_VERSION"),
        tracing = if sending.is_some() { "otlp" } else { "none" },
        "listening on {address}",
    );
    let faults = FaultSwitch::of(config.profile, &metrics);
    let (limiter, policy, meter) = switchable(faults.as_ref(), limiter, policy, meter);
    let readiness = Arc::new(Readiness::new(&config, limiter.as_deref(), Arc::clone(&metrics)));
    let shared = limiter.as_ref().is_some_and(|limiter| limiter.is_shared());
    let decider = Decider::new(&config, limiter, Arc::clone(&metrics), Arc::clone(&journal));
    let max_staleness = Duration::from_millis(config.policy.max_staleness_ms);
    let decider = decider.with_policy(policy, max_staleness).with_spans(spans);
    let decider = Arc::new(decider.with_meter(meter));
    decider.tell_of_a_missing_limiter();
    tokio::spawn(Arc::clone(&journal).run());
    if let Some(limiter) = decider.limiter() {
        tokio::spawn(decider.give_back().run(limiter.clone()));
        if shared {
            tokio::spawn(Arc::clone(&readiness).run(limiter.clone()));
        }
    }
    if let Some(policy) = decider.policy() {
        tokio::spawn(Arc::clone(&readiness).run(policy.clone()));
    }
    if let Some(meter) = decider.meter() {
        let give_backs = decider.give_backs();
        tokio::spawn(give_backs.metering.run((meter.clone(), Cancel::GiveBack)));
        tokio::spawn(give_backs.voids.run((meter.clone(), Cancel::Void)));
        tokio::spawn(decider.unmetered().run(meter.clone()));
        if let Some(policy) = decider.policy() {
            tokio::spawn(decider.bills().run(policy.clone(), meter.clone()));
        }
        tokio::spawn(meter.clone().run());
        if meter.is_shared() {
            tokio::spawn(Arc::clone(&readiness).run(meter.clone()));
        }
    }
    files.keep();
    let (under_way, mut all_done) = mpsc::channel(1);
    let checks = config.ext_authz.clone();
    let checks = checks.map(|checks| Arc::new(Checks::new(checks, &config_hash, Arc::clone(&decider))));
    if let Some(checks) = &checks {
        tokio::spawn(Arc::clone(checks).run());
    }
    let gates = Arc::new(Gates::new(
        decider.sightings(),
        Arc::clone(&readiness),
        decider.policy().cloned(),
        &config.capacity,
        Arc::clone(&metrics),
    ));
    tokio::spawn(Arc::clone(&gates).run());
    let canary = config.canary.map(|canary| {
        let interval = Duration::from_millis(canary.interval_ms);
        Arc::new(Canary::new(Arc::clone(&decider), interval))
    });
    if let Some(canary) = &canary {
        tokio::spawn(Arc::clone(canary).run());
    }
    // Until the very end, so that it can be watched; then it ends with the process.
    let (admin_ends, admin_end) = oneshot::channel::<()>();
    if let Some(listener) = listeners.operators {
        let state = AdminState {
            decider: Arc::clone(&decider),
            readiness: Arc::clone(&readiness),
            config_hash: config_hash.as_str().into(),
            started_s: unix_s().unwrap_or_default(),
            gates: Arc::clone(&gates),
            tokens: files.admin_tokens.clone(),
            // One at a time: it is a thread's work.
            explaining: Arc::new(Semaphore::new(1)),
            faults: faults.clone(),
            max_staleness_ms: config.policy.max_staleness_ms,
        };
        let door = Door {
            bounds: HttpBounds {
                max_connections: MOST_OPERATORS,
                ..config.http
            },
            certificates: None,
            metrics: Arc::clone(&metrics),
            journal: Arc::clone(&journal),
        };
        admit_operators(listener, state, door, admin_end)?;
    }
    let app = App {
        decider: Arc::clone(&decider),
        readiness,
        gates,
        canary,
        faults,
        metrics: Arc::clone(&metrics),
        checks,
        tokens: files.tokens,
        body_timeout: Duration::from_millis(config.http.body_timeout_ms),
        under_way,
    };
    let door = Door {
        bounds: config.http,
        certificates: files.certificates,
        metrics,
        journal: Arc::clone(&journal),
    };
    let finished = connections::serve(listener, router(app), door, stop, GRACE).await;
    let end = after(Instant::now(), GIVE_BACK_GRACE);
    // Decisions whose connection has gone; the channel ends when the last one has dropped its sender.
    let decided = timeout_at(end, all_done.recv()).await.is_ok();
    let (give_backs, unmetered) = (decider.give_backs(), decider.unmetered());
    let is_shared = decider.meter().is_some_and(WatchedMeter::is_shared);
    let (bills, are_billed) = (decider.bills(), decider.meter().is_some() && decider.policy().is_some());
    let all_told =
        || give_backs.are_empty() && (unmetered.is_empty() || !is_shared) && (bills.is_empty() || !are_billed);
    while !all_told() && Instant::now() < end {
        sleep(GLANCE).await;
    }
    drop(admin_ends);
    if let Some(sending) = sending {
        sending
            .end(end.saturating_duration_since(Instant::now()).max(LEAST_FLUSH))
            .await;
    }
    journal.flush_all();
    unmetered.tell_of_the_lost();
    bills.tell_of_the_lost();
    if finished && decided && give_backs.are_empty() {
        tracing::info!(event = "stopped", "everything under way was answered");
    } else {
        tracing::warn!(event = "stopped", "something under way could not be finished in time");
    }
    Ok(())
}

/// Lets operators in until `end`, and says where and whom.
fn admit_operators(
    listener: TcpListener,
    state: AdminState,
    door: Door,
    end: oneshot::Receiver<()>,
) -> Result<(), String> {
    let address = listener
        .local_addr()
        .map_err(|error| format!("admin.listen: {error}"))?;
    let who = if state.tokens.is_some() {
        "who has a token"
    } else {
        "whoever reaches the address"
    };
    tracing::info!(event = "admin_listening", listen = %address, "operators look in at {address}: {who}");
    let end = async move { drop(end.await) };
    tokio::spawn(connections::serve(
        listener,
        admin::router(state),
        door,
        end,
        Duration::ZERO,
    ));
    Ok(())
}

/// The tiers that bind, for the first line: an operator sees at once whether the ones meant are there.
fn tiers(tiers: &Tiers) -> String {
    let named = [
        ("platform", tiers.platform),
        ("graph", tiers.graph),
        ("organization", tiers.organization),
        ("organization_model", tiers.organization_model),
    ];
    let named = named
        .into_iter()
        .filter(|(_, limits)| !limits.is_empty())
        .map(|(name, _)| name.to_owned());
    let lanes = tiers
        .lanes
        .iter()
        .filter(|(_, limits)| !limits.is_empty())
        .map(|(lane, _)| format!("lanes.{lane}"));
    named.chain(lanes).collect::<Vec<_>>().join(", ")
}
