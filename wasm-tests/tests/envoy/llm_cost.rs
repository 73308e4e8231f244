//! What calls cost, over a real PostgreSQL: each one's tokens by the price of its model are in its org's month after it,
//! and a month that has reached its cap admits no more.

use portcullis_wasm_tests::{Behaviour, Envelope, Gateway, GatewayPlan, Provider, Service, Used, until};
use serde_json::{Value, json};

use crate::backed::{COST_CAP_EXCEEDED, POLICY_UNAVAILABLE, apply, over_redis};
use crate::expect::refused;
use crate::llm_world::{Asked, SETTLED, by_body, chat, chat_stream, message};
use crate::postgres::Postgres;
use crate::stores::Store;

/// A cap that the calls of one test don't reach.
const WIDE: u64 = 1_000_000_000;
/// Micro-dollars for a million tokens.
const INPUT: u64 = 2_500_000;
const OUTPUT: u64 = 10_000_000;
const CLAUDE: u64 = 30_000_000;

struct World {
    postgres: Postgres,
    gateway: Gateway,
    provider: Provider,
    service: Service,
    redis: Store,
}

fn policy() -> Value {
    let price = |input, output| json!({"input": input, "cached_input": 0, "output": output});
    let org = |plan: &str| json!({"status": "active", "plan": plan, "models": ["*"]});
    json!({
        "providers": {"*": "somebody"},
        "prices": {"gpt-4o": price(INPUT, OUTPUT), "claude-*": price(CLAUDE, CLAUDE)},
        "plans": {"wide": {"monthly_cost": WIDE}, "narrow": {"monthly_cost": 100}, "free": {}},
        "orgs": {"wide": org("wide"), "narrow": org("narrow"), "free": org("free")}
    })
}

impl World {
    async fn start() -> Self {
        let (redis, postgres) = tokio::join!(Store::redis(), Postgres::start());
        postgres.trust_everybody().await;
        apply(&postgres.url(), &policy());
        let mut config = over_redis(&redis.url());
        config["limiter"]["op_timeout_ms"] = json!(1_500);
        config["policy"] = json!({"url": postgres.url(), "max_staleness_ms": 600_000});
        config["metering"] = json!({"url": postgres.url()});
        let (service, provider) = tokio::join!(Service::start(config), Provider::start());
        let plan = GatewayPlan::new("fail-closed-metered", provider.address).decision(service.address);
        let plan = plan
            .patient_connects()
            .workers(1)
            .plugin(by_body())
            .plugin(json!({"decision": {"timeout_ms": 4_000}}));
        let gateway = plan.start().await;
        for store in ["limiter", "policy", "metering"] {
            service.await_state(store, "up").await;
        }
        Self {
            postgres,
            gateway,
            provider,
            service,
            redis,
        }
    }

    /// Micro-dollars in the org's month.
    async fn cost(&self, org: &str) -> u64 {
        let sql = format!("SELECT coalesce(sum(cost), 0) FROM portcullis_months WHERE org = '{org}'");
        self.postgres.run(&sql).await[0][0].parse().expect("a number")
    }

    /// A call, and what it must have cost its org.
    async fn costs(&self, org: &str, asked: &Asked, status: u16, cost: impl FnOnce() -> u64) {
        let before = self.cost(org).await;
        let answer = self.gateway.call(&asked.call(&of(org))).await;
        assert_eq!(answer.status, status, "{}", answer.text());
        let expected = before + cost();
        let mut seen = before;
        until(
            &format!("{org} to have cost {expected}, not {seen}"),
            SETTLED * 2,
            async || {
                seen = self.cost(org).await;
                (seen == expected).then_some(())
            },
        )
        .await;
    }

    fn used(&self) -> Used {
        self.provider.last_used()
    }
}

fn of(org: &str) -> Envelope {
    Envelope::owner("o").org(org)
}

/// Rounded up once.
fn priced(input: u64, output: u64) -> u64 {
    (input * INPUT + output * OUTPUT).div_ceil(1_000_000)
}

#[tokio::test(flavor = "multi_thread")]
async fn each_call_is_in_its_orgs_month_after_it() {
    let mut world = World::start().await;
    let used = || priced(world.used().input, world.used().output);
    world.costs("wide", &chat(), 200, used).await;
    world.costs("wide", &chat_stream(), 200, used).await;
    let claude = || (world.used().total() * CLAUDE).div_ceil(1_000_000);
    world.costs("wide", &message(), 200, claude).await;
    // Nobody knows what these have used, so they cost what they held.
    let asked = chat().and(json!({"max_tokens": 5_000}));
    let held = || priced(asked.estimate(), 5_000);
    world.provider.behave(Behaviour {
        gzip: true,
        ..Behaviour::default()
    });
    world.costs("wide", &asked, 200, held).await;
    // A provider that fails is not paid.
    world.provider.behave(Behaviour {
        fail: Some(500),
        ..Behaviour::default()
    });
    world.costs("wide", &asked, 500, || 0).await;
    // What comes last would show a bill of the call before it.
    world.provider.behave(Behaviour::default());
    world.costs("wide", &chat(), 200, used).await;
    // Runs are counted apart from what they cost, and nobody else pays.
    let rows = world
        .postgres
        .run("SELECT org, runs FROM portcullis_months ORDER BY org")
        .await;
    assert_eq!(rows, [["wide".to_owned(), "6".to_owned()]]);
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_calls_cost_reaches_their_month_while_the_limiter_is_gone_and_once() {
    let mut world = World::start().await;
    world.redis.kill();
    // More than fit into one batch of the only worker: what the limiter does not take must not keep back the bills that come later.
    let mut expected = 0;
    for _ in 0..300 {
        let answer = world.gateway.call(&chat().call(&of("wide"))).await;
        assert_eq!(
            answer.status,
            200,
            "no limit binds it, so the limiter is not asked: {}",
            answer.text()
        );
        expected += priced(world.used().input, world.used().output);
    }
    let mut seen = 0;
    until("all bills in the month", SETTLED * 2, async || {
        seen = world.cost("wide").await;
        (seen >= expected).then_some(())
    })
    .await;
    world.service.await_state("limiter", "down").await;
    world.redis.restart().await;
    world.service.await_state("limiter", "up").await;
    // Each call's bill comes once, also where the rest of its note has to be told again.
    world
        .costs("wide", &chat(), 200, || {
            expected - seen + priced(world.used().input, world.used().output)
        })
        .await;
    assert_eq!(world.gateway.counter("portcullis_outbox_dropped").await, 0);
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_month_that_has_reached_its_cap_admits_no_more() {
    let mut world = World::start().await;
    let used = || priced(world.used().input, world.used().output);
    while world.cost("narrow").await < 100 {
        world.costs("narrow", &chat(), 200, used).await;
    }
    let hits = world.provider.hits();
    assert!(hits < 10, "each call has cost something");
    let denied = world.gateway.call(&chat().call(&of("narrow"))).await;
    refused(&denied, COST_CAP_EXCEEDED);
    assert_eq!(denied.header("x-should-retry"), Some("false"));
    assert_eq!(world.provider.hits(), hits);
    // Without a price a cap can't be kept; without a cap no price is needed.
    let unpriced = chat().and(json!({"model": "unpriced"}));
    refused(
        &world.gateway.call(&unpriced.call(&of("wide"))).await,
        POLICY_UNAVAILABLE,
    );
    assert_eq!(world.provider.hits(), hits);
    world.costs("free", &unpriced, 200, || 0).await;
    world.gateway.assert_sound();
}
