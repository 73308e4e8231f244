//! A real Envoy, started from the example's own configuration, so the example itself is under test in every case. What is
//! changed in it is in `plan.rs`; here is the running process: its start, its admin interface, its log and its end.

mod plan;

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

pub use plan::{GatewayPlan, merge};

use crate::process::{Process, free_port, json_lines};
use crate::{Answer, Call, Connection, DEADLINE, locate, until};

/// The file of an updatable gateway's listeners.
const OFFERED: &str = "listeners.json";

impl GatewayPlan {
    /// # Panics
    /// When Envoy doesn't come up; the message holds its log.
    pub async fn start(self) -> Gateway {
        match self.try_start().await {
            Ok(gateway) => gateway,
            Err(log) => panic!("Envoy did not start:\n{log}"),
        }
    }

    /// The gateway, or the log of an Envoy that refused its configuration.
    pub async fn try_start(self) -> Result<Gateway, String> {
        let folder = TempDir::new().expect("a temporary folder");
        let config = folder.path().join("envoy.json");
        let admin_file = folder.path().join("admin");
        let mut tree = self.tree();
        if self.updatable {
            let port = free_port();
            offer(folder.path(), &mut tree["static_resources"]["listeners"], port);
            tree["static_resources"]["listeners"] = json!([]);
            tree["dynamic_resources"] = json!({"lds_config": {"resource_api_version": "V3",
                "path_config_source": {"path": folder.path().join(OFFERED)}}});
        }
        std::fs::write(&config, tree.to_string()).expect("the configuration can be written");
        let mut command = Command::new(locate::envoy());
        command.arg("--config-path").arg(&config);
        command.arg("--admin-address-path").arg(&admin_file);
        command.args(["--service-node", "gateway", "--service-cluster", "gateway"]);
        command.args(["--use-dynamic-base-id", "--log-level", "info", "--drain-time-s", "1"]);
        command.args([
            "--parent-shutdown-time-s",
            "2",
            "--concurrency",
            &self.workers.to_string(),
        ]);
        let mut process = Process::spawn(command.current_dir(folder.path()), &folder.path().join("envoy.log"));
        let Some(admin) = ready(&mut process, &admin_file).await else {
            return Err(process.log());
        };
        let mut gateway = Gateway {
            admin,
            listeners: Vec::new(),
            process,
            folder,
        };
        gateway.listeners = gateway.bound_listeners().await;
        Ok(gateway)
    }
}

/// Puts the listeners where an updatable Envoy looks for them: on one fixed port, and by a rename, which it watches for.
fn offer(folder: &Path, listeners: &mut Value, port: u16) {
    for listener in listeners.as_array_mut().expect("listeners") {
        listener["@type"] = json!("type.googleapis.com/envoy.config.listener.v3.Listener");
        listener["address"]["socket_address"]["port_value"] = json!(port);
    }
    let written = folder.join("listeners.new");
    std::fs::write(&written, json!({"resources": listeners}).to_string()).expect("the listeners can be written");
    std::fs::rename(&written, folder.join(OFFERED)).expect("the listeners can be renamed");
}

/// Waits for Envoy's `/ready`, and gives the admin address; none if it ended before.
async fn ready(process: &mut Process, admin_file: &Path) -> Option<SocketAddr> {
    let start = Instant::now();
    while process.exited().is_none() {
        assert!(
            start.elapsed() < DEADLINE * 2,
            "Envoy neither came up nor ended:\n{}",
            process.log()
        );
        let admin = std::fs::read_to_string(admin_file)
            .ok()
            .and_then(|text| text.trim().parse().ok());
        if let Some(admin) = admin
            && Connection::try_call(admin, &Call::get("/ready"))
                .await
                .is_some_and(|ready| ready.status == 200)
        {
            return Some(admin);
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    None
}

/// A running Envoy; killed when dropped.
pub struct Gateway {
    admin: SocketAddr,
    listeners: Vec<(String, SocketAddr)>,
    process: Process,
    folder: TempDir,
}

impl Gateway {
    /// The address of the first listener.
    pub fn address(&self) -> SocketAddr {
        self.address_of("ingress")
    }

    pub fn address_of(&self, listener: &str) -> SocketAddr {
        let found = self.listeners.iter().find(|(name, _)| name == listener);
        found.unwrap_or_else(|| panic!("no listener {listener}")).1
    }

    /// One request on a connection of its own, to the first listener.
    pub async fn call(&self, call: &Call) -> Answer {
        Connection::open(self.address()).await.call(call).await
    }

    pub async fn call_on(&self, listener: &str, call: &Call) -> Answer {
        Connection::open(self.address_of(listener)).await.call(call).await
    }

    /// The value of one of our metrics, whatever prefix the host gives it; characters that a host may replace count as `_`.
    /// None if the filter never defined it.
    pub async fn metric(&self, name: &str) -> Option<i64> {
        let stats = Connection::open(self.admin)
            .await
            .call(&Call::get("/stats?filter=wasmcustom"))
            .await;
        let plain = |text: &str| text.replace(['-', '.'], "_");
        stats.text().lines().find_map(|line| {
            let (key, value) = line.split_once(": ")?;
            (plain(key) == plain(&format!("wasmcustom.{name}"))).then(|| value.trim().parse().ok())?
        })
    }

    /// The same for a counter, which is 0 until it is defined.
    pub async fn counter(&self, name: &str) -> i64 {
        self.metric(name).await.unwrap_or(0)
    }

    /// Waits until a metric has a value.
    pub async fn await_metric(&self, name: &str, value: i64) {
        let mut seen = None;
        until(&format!("{name} = {value}"), DEADLINE, async || {
            seen = self.metric(name).await;
            (seen == Some(value)).then_some(())
        })
        .await;
    }

    /// All of the filter's metrics, for messages.
    pub async fn metrics(&self) -> String {
        Connection::open(self.admin)
            .await
            .call(&Call::get("/stats?filter=wasmcustom"))
            .await
            .text()
    }

    /// Everything that Envoy prints for Prometheus.
    pub async fn prometheus(&self) -> String {
        let stats = Call::get("/stats/prometheus");
        Connection::open(self.admin).await.call(&stats).await.text()
    }

    /// Any of Envoy's own counters, by its full name.
    pub async fn envoy_stat(&self, name: &str) -> i64 {
        let stats = Connection::open(self.admin).await.call(&Call::get("/stats")).await;
        let line = stats
            .text()
            .lines()
            .find_map(|line| line.strip_prefix(&format!("{name}: "))?.trim().parse().ok());
        line.unwrap_or(0)
    }

    /// The filter's JSON log lines so far.
    pub fn log_lines(&self) -> Vec<Value> {
        let log = self.process.log();
        json_lines(
            &log.lines()
                .filter(|line| line.contains("wasm log"))
                .collect::<Vec<_>>()
                .join("\n"),
        )
    }

    /// Waits for a log line, and gives it with the level that the host printed.
    pub async fn await_log(&self, what: &str, matches: impl Fn(&Value) -> bool) -> (String, Value) {
        until(&format!("a log line: {what}"), DEADLINE, async || {
            self.process
                .log()
                .lines()
                .filter(|line| line.contains("wasm log"))
                .find_map(|line| {
                    let object = json_lines(line).pop()?;
                    // [time][thread][level][logger]
                    let level = line.split(['[', ']']).nth(5).unwrap_or_default();
                    matches(&object).then(|| (level.to_owned(), object))
                })
        })
        .await
    }

    pub fn log(&self) -> String {
        self.process.log()
    }

    /// Offers the listener of `plan` in place of the running one, and says whether Envoy took it.
    pub async fn update(&self, plan: &GatewayPlan) -> bool {
        let mut tree = plan.tree();
        let count = |name: &str| format!("listener_manager.lds.update_{name}");
        let before = (
            self.envoy_stat(&count("success")).await,
            self.envoy_stat(&count("rejected")).await,
        );
        offer(
            self.folder.path(),
            &mut tree["static_resources"]["listeners"],
            self.address().port(),
        );
        until("Envoy to take or refuse the update", DEADLINE, async || {
            let taken = self.envoy_stat(&count("success")).await > before.0;
            let refused = self.envoy_stat(&count("rejected")).await > before.1;
            (taken || refused).then_some(taken)
        })
        .await
    }

    /// The memory that Envoy has in use, in kB, as the kernel counts it.
    pub fn resident_kb(&self) -> u64 {
        self.process.resident_kb()
    }

    /// SIGTERM, then waits for the end.
    pub async fn stop(&mut self) {
        self.process.signal("TERM");
        let process = &mut self.process;
        until("the end of Envoy", DEADLINE, async || process.exited()).await;
    }

    /// SIGKILL: nothing is flushed, and every connection ends where it is.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Asserts that no VM trapped and that Envoy still runs.
    pub fn assert_sound(&mut self) {
        assert!(self.process.exited().is_none(), "Envoy ended:\n{}", self.process.log());
        let log = self.process.log();
        for sign in [
            "panicked at",
            "Function: proxy_on",
            "Uncaught RuntimeError",
            "wasm remote code",
            "VM is failed",
        ] {
            assert!(
                !log.contains(sign),
                "a trap ({sign}) in {}:\n{log}",
                self.folder.path().display()
            );
        }
    }

    async fn bound_listeners(&self) -> Vec<(String, SocketAddr)> {
        let listed = Connection::open(self.admin)
            .await
            .call(&Call::get("/listeners?format=json"))
            .await;
        let listed: Value = serde_json::from_slice(&listed.body).expect("Envoy lists its listeners");
        let statuses = listed["listener_statuses"].as_array().expect("listeners");
        let bound = statuses.iter().map(|status| {
            let address = &status["local_address"]["socket_address"];
            let port = address["port_value"].as_u64().expect("a port");
            let ip = address["address"]
                .as_str()
                .expect("an address")
                .parse()
                .expect("an IP address");
            (
                status["name"].as_str().unwrap_or_default().to_owned(),
                SocketAddr::new(ip, u16::try_from(port).unwrap()),
            )
        });
        bound.collect()
    }
}
