//! What drills are tested in: an installation as it stands in staging, and the drill as a process with its reports.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, Output};

use portcullis_wasm_tests::{Gateway, GatewayPlan, Reply, Service, Upstream, free_port, merge, portcullis};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::backed::apply;
use crate::postgres::Postgres;
use crate::stores::Store;

pub(crate) const TOKEN: &str = "drill-token-0123456789abcdef0123456789";
/// A model of the tenant's that has no provider.
pub(crate) const UNSERVED: &str = "drill-unserved";
/// Set by the upstream alone.
pub(crate) const BY_UPSTREAM: &str = "x-served-by";

pub(crate) fn policy() -> Value {
    json!({
        "providers": {"gpt-4o": "openai"},
        "prices": {"*": {"input": 0, "output": 0}},
        "plans": {
            "team": {"concurrency": 100, "requests": 1_000_000, "monthly_runs": 1_000_000, "monthly_cost": 1_000_000},
            "spent": {"monthly_runs": 0}
        },
        "orgs": {
            "drill": {"status": "active", "plan": "team", "models": ["gpt-4o", UNSERVED]},
            "drill-suspended": {"status": "suspended", "plan": "team", "models": ["gpt-4o"]},
            "drill-spent": {"status": "active", "plan": "spent", "models": ["gpt-4o"]}
        }
    })
}

/// The whole configuration of a filter, as its gateway has it and as the drill is told.
pub(crate) fn filter(rules: &str, changes: Value) -> Value {
    let model = if rules.starts_with("fail-closed") {
        "header"
    } else {
        "none"
    };
    let mut filter = json!({
        "profile": "staging", "rules": rules, "model": {"from": model},
        "decision": {"upstream": "portcullis", "timeout_ms": 2000}
    });
    merge(&mut filter, changes);
    filter
}

/// Files for a drill, and what it wrote.
pub(crate) struct Drill {
    pub(crate) folder: TempDir,
    pub(crate) arguments: Vec<String>,
}

/// What came of a drill.
pub(crate) struct Outcome {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
    pub(crate) report: Value,
    pub(crate) markdown: String,
}

impl Outcome {
    pub(crate) fn row(&self, probe: &str) -> &Value {
        let rows = self.report["rows"].as_array().unwrap();
        let found = rows.iter().find(|row| row["probe"] == probe);
        found.unwrap_or_else(|| panic!("no probe {probe:?} in {:#}", self.report))
    }

    pub(crate) fn reasons(&self, probe: &str) -> String {
        let row = self.row(probe);
        assert_eq!(row["green"], false, "{row}");
        row["reasons"].to_string()
    }

    pub(crate) fn is_red(&self) {
        assert_eq!(
            (self.code, &self.report["green"]),
            (Some(1), &json!(false)),
            "{}",
            self.told()
        );
        assert!(
            self.out.contains("RED:") && self.markdown.contains("**RED:"),
            "{}",
            self.told()
        );
    }

    pub(crate) fn told(&self) -> String {
        format!("{}\n{}", self.out, self.err)
    }
}

impl Drill {
    pub(crate) fn of(gateway: SocketAddr, filter: &Value) -> Self {
        let mut drill = Self {
            folder: TempDir::new().unwrap(),
            arguments: Vec::new(),
        };
        drill.say("--gateway", &format!("http://{gateway}"));
        drill.file("--config", "filter.json", filter);
        for (option, name) in [("--report", "report.md"), ("--json", "report.json")] {
            let path = drill.path(name).display().to_string();
            drill.say(option, &path);
        }
        drill
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn say(&mut self, option: &str, value: &str) {
        self.arguments.extend([option.to_owned(), value.to_owned()]);
    }

    pub(crate) fn file(&mut self, option: &str, name: &str, document: &Value) {
        let path = self.path(name);
        std::fs::write(&path, document.to_string()).unwrap();
        self.say(option, &path.display().to_string());
    }

    pub(crate) fn tenant(&mut self) {
        self.say("-H", "x-admission-org-id: drill");
        self.say("-H", "x-admission-model: gpt-4o");
    }

    pub(crate) async fn run(self) -> Outcome {
        let mut command = Command::new(portcullis());
        command.arg("drill").args(&self.arguments);
        for name in [
            "REDIS_URL",
            "POSTGRES_DSN",
            "PORTCULLIS_PROFILE",
            "PORTCULLIS_ENVELOPE_SECRET",
        ] {
            command.env_remove(name);
        }
        let ended = tokio::task::spawn_blocking(move || command.output()).await;
        let Output { status, stdout, stderr } = ended.unwrap().expect("portcullis drill runs");
        let text = |name: &str| std::fs::read_to_string(self.path(name)).unwrap_or_default();
        Outcome {
            code: status.code(),
            out: String::from_utf8(stdout).unwrap(),
            err: String::from_utf8(stderr).unwrap(),
            report: serde_json::from_str(&text("report.json")).unwrap_or_default(),
            markdown: text("report.md"),
        }
    }
}

/// An installation as it stands in staging.
pub(crate) struct Staging {
    pub(crate) gateway: Gateway,
    pub(crate) service: Service,
    pub(crate) upstream: Upstream,
    pub(crate) admin: u16,
    pub(crate) config: Value,
    _stores: (Store, Postgres),
    pub(crate) folder: TempDir,
}

impl Staging {
    pub(crate) async fn start(filter: &Value) -> Self {
        Self::with(filter, |plan| plan).await
    }

    pub(crate) async fn with(filter: &Value, change: impl FnOnce(GatewayPlan) -> GatewayPlan) -> Self {
        let (redis, postgres) = tokio::join!(Store::redis(), Postgres::start());
        apply(&postgres.url(), &policy());
        let folder = TempDir::new().unwrap();
        let tokens = folder.path().join("tokens");
        std::fs::write(&tokens, format!("# of the drill\n{TOKEN}\n")).unwrap();
        let admin = free_port();
        let config = json!({
            "profile": "staging", "listen": "127.0.0.1:1",
            "limiter": {"url": redis.url(), "op_timeout_ms": 1_500},
            "policy": {"url": postgres.url(), "max_staleness_ms": 1_000}, "metering": {"url": postgres.url()},
            "capacity": {"lanes": {"closed": {"requests": 0}}},
            "admin": {"listen": format!("127.0.0.1:{admin}"), "token_file": tokens}
        });
        let service = Service::start(config.clone()).await;
        for store in ["limiter", "policy", "metering"] {
            service.await_state(store, "up").await;
        }
        let upstream = upstream().await;
        let plan = GatewayPlan::new("contract-limits", upstream.address)
            .decision(service.address)
            .patient_connects()
            .plugin(filter.clone());
        Self {
            gateway: change(plan).start().await,
            service,
            upstream,
            admin,
            config,
            _stores: (redis, postgres),
            folder,
        }
    }

    /// A drill with everything that there is to say.
    pub(crate) fn drill(&self, filter: &Value) -> Drill {
        let mut drill = Drill::of(self.gateway.address(), filter);
        drill.file("--policy", "policy.json", &policy());
        drill.file("--service", "service.json", &self.config);
        drill.tenant();
        drill.say("--admin", &format!("http://127.0.0.1:{}", self.admin));
        drill.say("--token-file", &self.folder.path().join("tokens").display().to_string());
        drill.say("--upstream-count", &format!("http://{}/-/hits", self.upstream.address));
        drill
    }
}

pub(crate) async fn upstream() -> Upstream {
    let upstream = Upstream::start().await;
    upstream.reply(Reply {
        headers: vec![(BY_UPSTREAM.to_owned(), "provider".to_owned())],
        ..Reply::default()
    });
    upstream
}
