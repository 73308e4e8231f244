//! Real clusters for tests: primaries, each with a replica if asked for, that have found each other.
#![allow(dead_code, reason = "every test binary uses a part of it")]

use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use redis::Value;
use tokio::sync::OnceCell;
use tokio::task::JoinSet;

use super::{Store, eventually, free_port};

const SLOTS: usize = 16_384;

/// A cluster, gone when it is dropped.
pub(crate) struct Cluster {
    /// The primaries first, then a replica of each, in their order.
    pub(crate) members: Vec<Store>,
    pub(crate) primaries: usize,
}

impl Cluster {
    /// Three primaries. A part that is lost leaves the others as they are.
    pub(crate) async fn of_three() -> Self {
        Self::start(3, false, &["--cluster-require-full-coverage", "no"]).await
    }

    /// Three primaries, each with a replica.
    pub(crate) async fn with_replicas() -> Self {
        Self::start(3, true, &["--cluster-require-full-coverage", "no"]).await
    }

    pub(crate) async fn start(primaries: usize, replicas: bool, arguments: &[&str]) -> Self {
        let count = if replicas { 2 * primaries } else { primaries };
        let start_one = |arguments: Vec<String>| async move {
            let bus = free_port().to_string();
            let mut all = vec![
                "--cluster-enabled",
                "yes",
                "--cluster-node-timeout",
                "2000",
                "--cluster-port",
                &bus,
            ];
            // A replica that has not heard of its primary for long may take over all the same.
            all.extend([
                "--cluster-replica-validity-factor",
                "0",
                "--repl-diskless-sync-delay",
                "0",
            ]);
            all.extend(arguments.iter().map(String::as_str));
            (Store::start("redis-server", &all).await, bus)
        };
        let arguments: Vec<String> = arguments.iter().map(ToString::to_string).collect();
        let mut starts = JoinSet::new();
        for _ in 0..count {
            starts.spawn(start_one(arguments.clone()));
        }
        let (members, buses): (Vec<Store>, Vec<String>) = starts.join_all().await.into_iter().unzip();
        let cluster = Self { members, primaries };
        for (at, member) in cluster.members.iter().enumerate() {
            member
                .run(&["CLUSTER", "SET-CONFIG-EPOCH", &(at + 1).to_string()])
                .await;
        }
        for (at, member) in cluster.members.iter().take(primaries).enumerate() {
            let (first, end) = (at * SLOTS / primaries, (at + 1) * SLOTS / primaries);
            let range = [first.to_string(), (end - 1).to_string()];
            member.run(&["CLUSTER", "ADDSLOTSRANGE", &range[0], &range[1]]).await;
        }
        for (member, bus) in cluster.members.iter().zip(&buses).skip(1) {
            let port = member.port.to_string();
            cluster.members[0]
                .run(&["CLUSTER", "MEET", "127.0.0.1", &port, bus])
                .await;
        }
        for (at, replica) in cluster.members.iter().enumerate().skip(primaries) {
            let id = cluster.members[at - primaries].id().await;
            eventually("a replica finds its primary", async || {
                replica.try_run(&["CLUSTER", "REPLICATE", &id]).await.map(drop)
            })
            .await;
        }
        for member in &cluster.members {
            eventually("the cluster works", async || {
                let whole = member.cluster_info("cluster_state").await? == "ok"
                    && member.cluster_info("cluster_slots_ok").await? == SLOTS.to_string()
                    && member.cluster_info("cluster_known_nodes").await? == count.to_string();
                whole.then_some(())
            })
            .await;
        }
        for replica in cluster.members.iter().skip(primaries) {
            eventually("a replica follows", async || {
                let said: String = redis::from_redis_value(replica.try_run(&["INFO", "replication"]).await?).unwrap();
                said.contains("master_link_status:up").then_some(())
            })
            .await;
        }
        cluster
    }

    /// The address of all members.
    pub(crate) fn url(&self) -> String {
        let hosts: Vec<String> = self
            .members
            .iter()
            .map(|member| format!("127.0.0.1:{}", member.port))
            .collect();
        format!("redis-cluster://{}", hosts.join(","))
    }

    /// The slot of a key, as the cluster says.
    pub(crate) async fn slot(&self, key: &str) -> i64 {
        self.members[0].number(&["CLUSTER", "KEYSLOT", key]).await
    }

    /// The primary that owned a key when the cluster was formed.
    pub(crate) async fn first_owner(&self, key: &str) -> usize {
        let slot = usize::try_from(self.slot(key).await).unwrap();
        (0..self.primaries)
            .find(|at| (at * SLOTS / self.primaries..(at + 1) * SLOTS / self.primaries).contains(&slot))
            .unwrap()
    }

    /// The smallest number so that `{name(number)}` lives on this primary.
    pub(crate) async fn name_on(&self, primary: usize, name: impl Fn(u32) -> String) -> String {
        let mut number = 0;
        loop {
            let name = name(number);
            if self.first_owner(&format!("{{{name}}}")).await == primary {
                return name;
            }
            number += 1;
        }
    }

    /// All keys of all members that can be asked.
    pub(crate) async fn keys(&self) -> Vec<String> {
        let mut keys = Vec::new();
        for member in self.members.iter().take(self.primaries) {
            if let Some(found) = member.try_run(&["KEYS", "*"]).await {
                keys.extend(redis::from_redis_value::<Vec<String>>(found).unwrap());
            }
        }
        keys
    }
}

impl Store {
    pub(crate) async fn id(&self) -> String {
        redis::from_redis_value(self.run(&["CLUSTER", "MYID"]).await).unwrap()
    }

    pub(crate) async fn cluster_info(&self, field: &str) -> Option<String> {
        let said: String = redis::from_redis_value(self.try_run(&["CLUSTER", "INFO"]).await?).ok()?;
        let line = said
            .lines()
            .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        line.map(|value| value.trim().to_owned())
    }

    /// Whether it is a primary now.
    pub(crate) async fn is_primary(&self) -> bool {
        match self.try_run(&["ROLE"]).await {
            Some(Value::Array(role)) => matches!(role.first(), Some(Value::BulkString(name)) if name == b"master"),
            _ => false,
        }
    }
}

/// A cluster for a whole test binary, whose cases keep apart by their prefixes. It ends with the process.
pub(crate) async fn shared() -> &'static Cluster {
    static SHARED: OnceCell<(Cluster, Child)> = OnceCell::const_new();
    let start = async || {
        let cluster = Cluster::of_three().await;
        let mut watch = Command::new("sh");
        // A static is never dropped. The pipe closes when this process ends, however it does.
        watch.args(["-c", "read _; kill -9 $PIDS; rm -rf $FOLDERS"]);
        let of = |each: fn(&Store) -> String| cluster.members.iter().map(each).collect::<Vec<_>>().join(" ");
        watch.env("PIDS", of(|member| member.child.id().to_string()));
        watch.env("FOLDERS", of(|member| member.folder.path().display().to_string()));
        let watch = watch.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let watch = watch.spawn().expect("a shell");
        (cluster, watch)
    };
    &SHARED.get_or_init(start).await.0
}

/// A prefix of its own.
pub(crate) fn fresh_prefix() -> String {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    format!("p{}", NEXT.fetch_add(1, Ordering::Relaxed))
}
