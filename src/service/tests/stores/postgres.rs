//! A real PostgreSQL on a free port, and a PgBouncer in front of one.
//!
//! PostgreSQL refuses to run as root: then its processes belong to the user `postgres`, or `nobody`.
#![allow(dead_code, reason = "every test binary uses a part of it")]

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;
use tokio::time::{Instant, sleep};
use tokio_postgres::{NoTls, SimpleQueryMessage};

use crate::stores::{PATIENCE, eventually, free_port, is_installed};

/// The password of every user; no log line may ever hold it.
pub(crate) const PASSWORD: &str = "hunter2-of-the-store";

/// Where the programs are: in the path, or where Debian puts them.
fn program(name: &str) -> PathBuf {
    if is_installed(name) {
        return name.into();
    }
    let mut found: Vec<PathBuf> = fs::read_dir("/usr/lib/postgresql")
        .map(|versions| {
            versions
                .flatten()
                .map(|version| version.path().join("bin").join(name))
                .collect()
        })
        .unwrap_or_default();
    found.retain(|path| path.exists());
    found.sort();
    found.pop().unwrap_or_else(|| panic!("{name} is not installed"))
}

fn output_of(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    output.map_or_else(
        |_| String::new(),
        |output| String::from_utf8_lossy(&output.stdout).trim().to_owned(),
    )
}

/// The user that servers run as, if it may not be ours.
fn servant() -> Option<&'static str> {
    if output_of("id", &["-u"]) != "0" {
        return None;
    }
    ["postgres", "nobody"]
        .into_iter()
        .find(|user| !output_of("id", &["-u", user]).is_empty())
}

/// A command of the servant's.
fn as_servant(program: &Path) -> Command {
    let Some(user) = servant() else {
        return Command::new(program);
    };
    let (uid, gid) = (output_of("id", &["-u", user]), output_of("id", &["-g", user]));
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid", &uid, "--regid", &gid, "--clear-groups", "--"])
        .arg(program);
    command
}

fn give_to_servant(path: &Path) {
    if let Some(user) = servant() {
        let done = Command::new("chown").args(["-R", user]).arg(path).status().unwrap();
        assert!(done.success());
    }
}

fn signal(pid: &str, signal: &str) {
    // A process that has just ended is fine.
    drop(Command::new("kill").args([signal, pid]).stderr(Stdio::null()).status());
}

/// A server with one superuser, `postgres`.
pub(crate) struct Postgres {
    folder: TempDir,
    settings: Vec<String>,
    child: Child,
    pub(crate) port: u16,
}

impl Drop for Postgres {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Postgres {
    /// A server that answers.
    pub(crate) async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// A server with more settings (`name=value`), once it answers.
    pub(crate) async fn start_with(settings: &[&str]) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), settings).await
    }

    /// A server with TLS, by a certificate for `localhost`, and where that is; `None` where no certificate can be made.
    pub(crate) async fn start_with_tls() -> Option<(Self, PathBuf)> {
        let folder = tempfile::tempdir().unwrap();
        let [certificate, key] = ["server.crt", "server.key"].map(|name| folder.path().join(name));
        let made = Command::new("openssl")
            .args([
                "req",
                "-x509",
                "-newkey",
                "rsa:2048",
                "-nodes",
                "-days",
                "2",
                "-subj",
                "/CN=localhost",
            ])
            .args([
                "-addext",
                "subjectAltName=DNS:localhost",
                "-addext",
                "basicConstraints=critical,CA:FALSE",
            ])
            .arg("-out")
            .arg(&certificate)
            .arg("-keyout")
            .arg(&key)
            .output();
        if !made.is_ok_and(|made| made.status.success()) {
            return None;
        }
        let settings = ["ssl=on", "ssl_cert_file=../server.crt", "ssl_key_file=../server.key"];
        Some((Self::start_in(folder, &settings).await, certificate))
    }

    async fn start_in(folder: TempDir, settings: &[&str]) -> Self {
        fs::write(folder.path().join("password"), PASSWORD).unwrap();
        give_to_servant(folder.path());
        let mut make = as_servant(&program("initdb"));
        make.current_dir(folder.path())
            .args([
                "--no-sync",
                "--username=postgres",
                "--auth=scram-sha-256",
                "--encoding=UTF8",
                "--locale=C",
            ])
            .args(["--pwfile=password", "--pgdata=data"]);
        // It takes seconds, in which others that start in the same task have to get on.
        let made = tokio::task::spawn_blocking(move || make.output())
            .await
            .unwrap()
            .unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let settings: Vec<String> = settings.iter().map(ToString::to_string).collect();
        let port = free_port();
        let child = spawn(&folder, &settings, port);
        let mut server = Self {
            folder,
            settings,
            child,
            port,
        };
        let end = Instant::now() + PATIENCE;
        while !server.answers().await {
            assert!(Instant::now() < end, "postgres does not start:\n{}", server.log());
            // Somebody else took the port.
            server.kill();
            server.port = free_port();
            server.child = spawn(&server.folder, &server.settings, server.port);
        }
        server
    }

    async fn answers(&mut self) -> bool {
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end {
            // Whoever took the port in between may be a server of another test.
            let data = self.folder.path().join("data");
            if let Some(rows) = self.try_run("SHOW data_directory").await {
                return Path::new(&rows[0][0]) == data;
            }
            if self.child.try_wait().unwrap().is_some() {
                return false;
            }
            sleep(std::time::Duration::from_millis(20)).await;
        }
        false
    }

    /// Lets everybody in without a proof, from the next connection on: unoptimised programs take long to compute one.
    pub(crate) async fn trust_everybody(&self) {
        let rule = "host all all 127.0.0.1/32 trust\n";
        fs::write(self.folder.path().join("data/pg_hba.conf"), rule).unwrap();
        self.run("SELECT pg_reload_conf()").await;
    }

    /// The address for the service.
    pub(crate) fn url(&self) -> String {
        self.url_at(self.port)
    }

    /// The same by way of another port of this machine.
    pub(crate) fn url_at(&self, port: u16) -> String {
        format!("postgres://postgres:{PASSWORD}@127.0.0.1:{port}/postgres")
    }

    async fn try_run(&self, script: &str) -> Option<Vec<Vec<String>>> {
        self.try_run_at(&self.url(), script).await
    }

    async fn try_run_at(&self, url: &str, script: &str) -> Option<Vec<Vec<String>>> {
        let url = format!("{url}?application_name=tester&sslmode=disable");
        let (client, connection) = tokio_postgres::connect(&url, NoTls).await.ok()?;
        let driver = tokio::spawn(connection);
        let answer = client.simple_query(script).await.ok()?;
        drop(client);
        drop(driver.await);
        let rows = answer.iter().filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some(
                (0..row.len())
                    .map(|at| row.get(at).unwrap_or("NULL").to_owned())
                    .collect(),
            ),
            _ => None,
        });
        Some(rows.collect())
    }

    /// Runs statements as the tester, and gives all rows as text.
    pub(crate) async fn run(&self, script: &str) -> Vec<Vec<String>> {
        self.try_run(script)
            .await
            .unwrap_or_else(|| panic!("{script} failed:\n{}", self.log()))
    }

    /// The same in another database of this server.
    pub(crate) async fn run_at(&self, url: &str, script: &str) -> Vec<Vec<String>> {
        self.try_run_at(url, script)
            .await
            .unwrap_or_else(|| panic!("{script} failed:\n{}", self.log()))
    }

    /// What the server has logged: every statement among it.
    pub(crate) fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.folder.path().join("log")).unwrap_or_default()).into_owned()
    }

    /// Statements so far that contain these words.
    pub(crate) fn statements(&self, words: &str) -> usize {
        let log = self.log();
        log.lines()
            .filter(|line| (line.contains("execute <unnamed>:") || line.contains("statement:")) && line.contains(words))
            .count()
    }

    /// Ends every backend but the tester's own.
    pub(crate) async fn terminate_backends(&self) {
        self.run(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
             WHERE backend_type = 'client backend' AND application_name <> 'tester'",
        )
        .await;
    }

    /// All its processes.
    fn processes(&self) -> Vec<String> {
        let own = self.child.id().to_string();
        let children = fs::read_to_string(format!("/proc/{own}/task/{own}/children")).unwrap_or_default();
        std::iter::once(own)
            .chain(children.split_whitespace().map(str::to_owned))
            .collect()
    }

    /// Stops all processes in their tracks: sockets stay open, nothing is answered.
    pub(crate) fn freeze(&self) {
        self.processes().iter().for_each(|pid| signal(pid, "-STOP"));
    }

    /// Undoes [`Postgres::freeze`].
    pub(crate) fn thaw(&self) {
        self.processes().iter().for_each(|pid| signal(pid, "-CONT"));
    }

    /// Ends the server at once, also one that is frozen.
    pub(crate) fn kill(&mut self) {
        signal(&self.child.id().to_string(), "-QUIT");
        self.thaw();
        drop(self.child.wait());
    }

    /// Starts it again on the same port, with its data.
    pub(crate) async fn restart(&mut self) {
        let end = Instant::now() + PATIENCE;
        loop {
            self.child = spawn(&self.folder, &self.settings, self.port);
            if self.answers().await {
                return;
            }
            assert!(Instant::now() < end, "postgres does not start again:\n{}", self.log());
        }
    }
}

fn spawn(folder: &TempDir, settings: &[String], port: u16) -> Child {
    let log = File::options()
        .create(true)
        .append(true)
        .open(folder.path().join("log"))
        .unwrap();
    let mut command = as_servant(&program("postgres"));
    command
        .current_dir(folder.path())
        .args(["-D", "data", "-p", &port.to_string()]);
    for setting in [
        "listen_addresses=127.0.0.1",
        "unix_socket_directories=",
        "fsync=off",
        "log_statement=all",
    ] {
        command.args(["-c", setting]);
    }
    for setting in settings {
        command.args(["-c", setting]);
    }
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap()
}

/// A PgBouncer in transaction mode with one server connection, so that two transactions share it at once.
pub(crate) struct PgBouncer {
    _folder: TempDir,
    child: Child,
    pub(crate) port: u16,
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl PgBouncer {
    /// `None` where it is not installed.
    pub(crate) async fn start(behind: &Postgres) -> Option<Self> {
        let program = ["pgbouncer", "/usr/sbin/pgbouncer"]
            .into_iter()
            .find(|program| is_installed(program))?;
        let (folder, port) = (tempfile::tempdir().unwrap(), free_port());
        fs::write(folder.path().join("users"), format!("\"postgres\" \"{PASSWORD}\"\n")).unwrap();
        let settings = format!(
            "[databases]\n* = host=127.0.0.1 port={}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n\
             unix_socket_dir =\nauth_type = scram-sha-256\nauth_file = users\npool_mode = transaction\n\
             default_pool_size = 1\nserver_tls_sslmode = disable\n",
            behind.port
        );
        fs::write(folder.path().join("settings"), settings).unwrap();
        give_to_servant(folder.path());
        let log = File::create(folder.path().join("log")).unwrap();
        let child = as_servant(Path::new(program))
            .current_dir(folder.path())
            .arg("settings")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        eventually("pgbouncer listens", async || {
            tokio::net::TcpStream::connect(("127.0.0.1", port)).await.ok()
        })
        .await;
        Some(Self {
            _folder: folder,
            child,
            port,
        })
    }
}
