//! Whatever is killed, no window sees more admissions than its limit: three gateways with eight workers lease from one
//! service over one Redis, and in each round some of them are killed in the middle of the load and started again.
//!
//! Admissions are counted where they arrive, at the upstream, and windows by the store's own clock. Each round has an
//! organization of its own, whose only window begins with the round's first request and is not over at its last answer.
//! Another organization has traffic in all rounds, and its windows follow each other. What had arrived when one of them
//! ended was charged to it or to one before; and which of them admitted a request its answer tells, by when that resets.
//!
//! Redis writes each command to disk before it answers, so a kill loses no count. One that loses its counts begins anew,
//! as every limiter does whose store is emptied.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use portcullis_wasm_tests::{Answer, Call, Connection, Envelope, Gateway, GatewayPlan, Service, Upstream};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use serde_json::json;
use tokio::task::JoinSet;

use crate::backed::over_redis;
use crate::stores::Store;
use crate::world::strict;

const WORKERS: [u32; 3] = [3, 3, 2];
const WINDOW: Duration = Duration::from_secs(3);
/// How long a round's requests go on; a decision under way and an answer come well within the window.
const LOAD: Duration = Duration::from_millis(2_000);
const LIMIT: usize = 1_500;
const CONNECTIONS_PER_GATEWAY: usize = 4;
const STEADY: &str = "steady";

#[derive(Clone, Copy, Debug)]
enum Victim {
    Gateway(usize),
    Service,
    Store,
    /// Stops for a moment, with its sockets open.
    FrozenService,
    FrozenStore,
}

/// One kill of a round.
#[derive(Clone, Copy, Debug)]
struct Kill {
    victim: Victim,
    after: Duration,
    gone_for: Duration,
}

fn kills(random: &mut StdRng) -> Vec<Kill> {
    use Victim::{FrozenService, FrozenStore, Service, Store};
    let mut at = Duration::ZERO;
    (0..random.random_range(1..=3))
        .map(|_| {
            at += Duration::from_millis(random.random_range(100..700));
            let gateway = Victim::Gateway(random.random_range(0..WORKERS.len()));
            let victims = [
                gateway,
                gateway,
                Service,
                Service,
                Store,
                Store,
                FrozenService,
                FrozenStore,
            ];
            Kill {
                victim: *victims.choose(random).unwrap(),
                after: at,
                gone_for: Duration::from_millis(random.random_range(0..300)),
            }
        })
        .collect()
}

/// An organization's request by one of its credentials: several bundles share the limit.
fn call(org: &str, auth: usize) -> Call {
    let envelope = Envelope::owner("o").org(org).auth(&format!("auth-{auth}"));
    Call::get(&format!("/{org}")).envelope(&envelope.requests("org", LIMIT))
}

struct World {
    redis: Store,
    service: Service,
    upstream: Upstream,
    gateways: Vec<Gateway>,
    /// Where the gateways are; none while one is gone, as its port may be anybody's.
    addresses: Arc<Mutex<Vec<Option<SocketAddr>>>>,
    /// About when the window ends that admitted a request of the steady organization, in milliseconds: of each answer.
    shown: Arc<Mutex<Vec<u64>>>,
    lease_hits: i64,
}

/// When the window ends that an admitted answer shows, give or take half a second and the time that it took to come.
fn shown_end(answer: &Answer) -> u64 {
    let reset = answer.header("x-ratelimit-reset-requests").expect("the limit is shown");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let end = now + Duration::from_secs(reset.parse().expect("seconds")) - Duration::from_millis(500);
    end.as_millis().try_into().unwrap()
}

impl World {
    async fn start() -> Self {
        let redis = Store::start("redis-server", &["--appendonly", "yes", "--appendfsync", "always"]).await;
        let (service, upstream) = tokio::join!(Service::start(over_redis(&redis.url())), Upstream::start());
        let mut world = Self {
            redis,
            service,
            upstream,
            gateways: Vec::new(),
            addresses: Arc::default(),
            shown: Arc::default(),
            lease_hits: 0,
        };
        for at in 0..WORKERS.len() {
            let gateway = world.gateway(at).await;
            world.addresses.lock().unwrap().push(Some(gateway.address()));
            world.gateways.push(gateway);
        }
        world
    }

    async fn gateway(&self, at: usize) -> Gateway {
        let plan = GatewayPlan::new(strict(), self.upstream.address)
            .decision(self.service.address)
            .workers(WORKERS[at])
            .plugin(json!({
                "window_s": WINDOW.as_secs(),
                "decision": {"timeout_ms": 400},
                "reply": {"limit_headers": "always"},
                "leases": {"max_requests": 256, "max_age_ms": 500}
            }));
        plan.start().await
    }

    async fn carry_out(&mut self, kill: Kill) {
        match kill.victim {
            Victim::Gateway(at) => {
                self.lease_hits += self.gateways[at].counter("portcullis_lease_hits").await;
                self.addresses.lock().unwrap()[at] = None;
                self.gateways[at].kill();
                tokio::time::sleep(kill.gone_for).await;
                self.gateways[at] = self.gateway(at).await;
                self.addresses.lock().unwrap()[at] = Some(self.gateways[at].address());
            }
            Victim::Service => {
                self.service.kill();
                tokio::time::sleep(kill.gone_for).await;
                self.service.restart().await;
            }
            Victim::Store => {
                self.redis.kill();
                tokio::time::sleep(kill.gone_for).await;
                self.redis.restart().await;
            }
            Victim::FrozenService => {
                self.service.freeze();
                tokio::time::sleep(kill.gone_for).await;
                self.service.thaw();
            }
            Victim::FrozenStore => {
                self.redis.freeze();
                tokio::time::sleep(kill.gone_for).await;
                self.redis.thaw();
            }
        }
    }

    /// One client: requests of both organizations, through one gateway, wherever that is now.
    fn client(
        &self,
        round: &str,
        at: usize,
        until: Instant,
        answers: &Arc<AtomicUsize>,
    ) -> impl Future<Output = ()> + use<> {
        let (addresses, answers) = (Arc::clone(&self.addresses), Arc::clone(answers));
        let shown = Arc::clone(&self.shown);
        let calls = [call(round, at % 3), call(round, at % 3), call(STEADY, at % 2)];
        async move {
            let mut connection = None;
            for call in calls.iter().cycle() {
                if Instant::now() >= until {
                    break;
                }
                let answer = match &mut connection {
                    None => {
                        let address = addresses.lock().unwrap()[at % WORKERS.len()];
                        if let Some(address) = address {
                            connection = Connection::try_open(address).await;
                        }
                        tokio::time::sleep(Duration::from_millis(5)).await;
                        continue;
                    }
                    Some(open) => Connection::ask(open, call).await,
                };
                match answer {
                    Some(answer) => {
                        assert!([200, 429, 503].contains(&answer.status), "{answer:?} {}", answer.text());
                        answers.fetch_add(1, Ordering::Relaxed);
                        if answer.status == 200 && call.path() == format!("/{STEADY}") {
                            shown.lock().unwrap().push(shown_end(&answer));
                        }
                    }
                    None => connection = None,
                }
                tokio::time::sleep(Duration::from_micros(500)).await;
            }
        }
    }

    /// All of a round, and how long it took from its first request to its last answer.
    async fn round(&mut self, round: &str, kills: &[Kill]) -> (Duration, usize) {
        let answers = Arc::default();
        let begun = Instant::now();
        let mut clients = JoinSet::new();
        for at in 0..WORKERS.len() * CONNECTIONS_PER_GATEWAY {
            clients.spawn(self.client(round, at, begun + LOAD, &answers));
        }
        let ended = tokio::spawn(async move {
            clients.join_all().await;
            begun.elapsed()
        });
        for kill in kills {
            tokio::time::sleep_until((begun + kill.after).into()).await;
            self.carry_out(*kill).await;
        }
        (ended.await.unwrap(), answers.load(Ordering::Relaxed))
    }
}

/// The ends of all windows of the steady organization, as the store's clock has them, in milliseconds.
fn watch_windows(url: String, ends: Arc<Mutex<BTreeSet<u64>>>, over: Arc<AtomicBool>) -> impl Future<Output = ()> {
    let client = redis::Client::open(url).unwrap();
    async move {
        let key = format!("portcullis:{{org:{STEADY}}}:requests:{}", WINDOW.as_secs());
        while !over.load(Ordering::Relaxed) {
            let Ok(Ok(mut connection)) =
                tokio::time::timeout(Duration::from_millis(500), client.get_multiplexed_async_connection()).await
            else {
                continue;
            };
            while !over.load(Ordering::Relaxed) {
                let asked: redis::RedisResult<i64> =
                    redis::cmd("PEXPIRETIME").arg(&key).query_async(&mut connection).await;
                match asked {
                    Ok(end) => {
                        if let Ok(end) = u64::try_from(end) {
                            ends.lock().unwrap().insert(end);
                        }
                    }
                    Err(_) => break,
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_window_sees_more_than_its_limit_whatever_is_killed() {
    let seed = std::env::var("PORTCULLIS_SEED").map_or_else(|_| rand::rng().random(), |seed| seed.parse().unwrap());
    eprintln!("PORTCULLIS_SEED={seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let rounds = if std::env::var_os("PORTCULLIS_QUICK").is_some() {
        3
    } else {
        20
    };
    let mut world = World::start().await;
    let (ends, over) = (Arc::default(), Arc::new(AtomicBool::new(false)));
    let watch = tokio::spawn(watch_windows(world.redis.url(), Arc::clone(&ends), Arc::clone(&over)));
    let (mut conclusive, mut admitted, mut full) = (0, 0, 0);
    for number in 0..rounds {
        let org = format!("round-{number}");
        let kills = kills(&mut random);
        let (took, answers) = world.round(&org, &kills).await;
        let hits = world.upstream.arrivals(&format!("/{org}")).len();
        eprintln!("{org}: {hits} of {LIMIT} admitted, {answers} answers in {took:?}, {kills:?}");
        // A machine that was too slow for one window may have seen another one begin.
        let windows = 1 + usize::try_from(took.as_millis() / WINDOW.as_millis()).unwrap();
        assert!(
            hits <= LIMIT * windows,
            "{hits} admissions in {windows} windows of {LIMIT}: seed {seed}"
        );
        conclusive += usize::from(windows == 1);
        full += usize::from(hits == LIMIT);
        admitted += hits;
    }
    over.store(true, Ordering::Relaxed);
    watch.await.unwrap();
    let ends: Vec<u64> = ends.lock().unwrap().iter().copied().collect();
    let arrivals = world.upstream.arrivals(&format!("/{STEADY}"));
    let until = |end_ms: u64| {
        let end = UNIX_EPOCH + Duration::from_millis(end_ms);
        arrivals.iter().filter(|came| **came < end).count()
    };
    let mut before = 0;
    let mut by_window = Vec::new();
    for (windows, end) in ends.iter().enumerate() {
        let so_far = until(*end);
        by_window.push(so_far - before);
        before = so_far;
        assert!(
            so_far <= LIMIT * (windows + 1),
            "{so_far} admissions in {} windows: seed {seed}",
            windows + 1
        );
    }
    assert!(
        arrivals.len() <= LIMIT * ends.len(),
        "{} in {} windows",
        arrivals.len(),
        ends.len()
    );
    let mut by_answers: BTreeMap<u64, usize> = ends.iter().map(|end| (*end, 0)).collect();
    for shown in world.shown.lock().unwrap().iter() {
        let nearest = ends.iter().min_by_key(|end| end.abs_diff(*shown)).expect("a window");
        // Windows are further apart than twice this.
        assert!(
            nearest.abs_diff(*shown) < 1_400,
            "no window ended about {shown}: {ends:?}"
        );
        *by_answers.get_mut(nearest).unwrap() += 1;
    }
    let by_answers: Vec<usize> = by_answers.into_values().collect();
    assert!(
        by_answers.iter().all(|admitted| *admitted <= LIMIT),
        "{by_answers:?} admitted by window: seed {seed}"
    );
    for gateway in &mut world.gateways {
        world.lease_hits += gateway.counter("portcullis_lease_hits").await;
        gateway.assert_sound();
    }
    eprintln!(
        "{conclusive} of {rounds} rounds had one window, {full} of them used it up; {admitted} admissions; steady: \
         {by_answers:?}, arrived meanwhile {by_window:?}; {} leased",
        world.lease_hits
    );
    assert!(
        conclusive * 2 > rounds,
        "the machine was too slow: {conclusive} of {rounds} rounds say something"
    );
    assert!(
        admitted * 10 > LIMIT * rounds,
        "{admitted} admissions in all: too few to say something"
    );
    assert!(world.lease_hits > 0, "nothing was leased");
}
