//! The cache over a store that answers, fails and waits on demand, by a clock that the tests move.

use std::future::ready;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;

use portcullis_decision::policy::{ModelPattern, OrgStatus, Plan, Price};
use tokio::time::{advance, sleep};

use super::*;
use crate::locked;

const STALENESS: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_millis(100);

/// What the store does now, and how often it was asked.
struct Fickle {
    status: Mutex<Result<Option<OrgStatus>, StoreFault>>,
    delay: Mutex<Duration>,
    asked: AtomicUsize,
    asked_for_prices: AtomicUsize,
}

impl Fickle {
    fn says(&self, status: Result<Option<OrgStatus>, StoreFault>) {
        *locked(&self.status) = status;
    }

    fn takes(&self, delay_ms: u64) {
        *locked(&self.delay) = Duration::from_millis(delay_ms);
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

impl PolicyStore for Fickle {
    fn scheme(&self) -> &'static str {
        "fickle"
    }

    fn org<'a>(&'a self, _: &'a str, _: Instant) -> Answer<'a, Option<Arc<Org>>> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let answer = locked(&self.status).map(|status| {
            status.map(|status| {
                Arc::new(Org {
                    status,
                    plan: Plan::default(),
                    models: Vec::new(),
                })
            })
        });
        let delay = *locked(&self.delay);
        Box::pin(async move {
            sleep(delay).await;
            answer
        })
    }

    fn registry(&self, _: Instant) -> Answer<'_, Arc<Registry>> {
        let entry = |text, name: &str| (ModelPattern::parse(text).unwrap(), name.to_owned());
        Box::pin(ready(Ok(Arc::new(vec![entry("claude-*", "anthropic")]))))
    }

    fn prices(&self, _: Instant) -> Answer<'_, Arc<Prices>> {
        self.asked_for_prices.fetch_add(1, Ordering::SeqCst);
        let prices = locked(&self.status).map(|_| {
            let entry = |text, input| {
                let price = Price {
                    input,
                    cached_input: 0,
                    output: 0,
                };
                (ModelPattern::parse(text).unwrap(), price)
            };
            Arc::new(vec![entry("claude-*", 1), entry("claude-opus", 2)])
        });
        Box::pin(ready(prices))
    }

    fn ping(&self, _: Instant) -> Answer<'_, ()> {
        Box::pin(ready(Ok(())))
    }
}

fn fickle() -> (PolicyCache, Arc<Fickle>, Arc<Metrics>) {
    let store = Arc::new(Fickle {
        status: Mutex::new(Ok(Some(OrgStatus::Active))),
        delay: Mutex::default(),
        asked: AtomicUsize::new(0),
        asked_for_prices: AtomicUsize::new(0),
    });
    let metrics = Arc::new(Metrics::default());
    let shared = Arc::clone(&store) as Arc<dyn PolicyStore>;
    let cache = PolicyCache::new(shared, STALENESS, PATIENCE, Arc::clone(&metrics), Arc::default());
    (cache, store, metrics)
}

async fn status(cache: &PolicyCache) -> Lookup<OrgStatus> {
    let deadline = after(Instant::now(), Duration::from_secs(1));
    match cache.view("g", None, None, deadline).await.org {
        Lookup::Known(org) => Lookup::Known(org.map(|org| org.status)),
        Lookup::Unavailable => Lookup::Unavailable,
    }
}

const ACTIVE: Lookup<OrgStatus> = Lookup::Known(Some(OrgStatus::Active));
const SUSPENDED: Lookup<OrgStatus> = Lookup::Known(Some(OrgStatus::Suspended));

#[tokio::test(start_paused = true)]
async fn an_answer_counts_until_it_is_stale_and_then_is_nothing() {
    for status_then in [OrgStatus::Active, OrgStatus::Suspended] {
        let (cache, store, _) = fickle();
        store.says(Ok(Some(status_then)));
        store.takes(10);
        assert_eq!(status(&cache).await, Lookup::Known(Some(status_then)));
        store.says(Err(StoreFault::Connection));
        // Counted from when it was asked for, 10 ms ago.
        advance(Duration::from_millis(1_989)).await;
        assert_eq!(status(&cache).await, Lookup::Known(Some(status_then)));
        advance(Duration::from_millis(1)).await;
        assert_eq!(status(&cache).await, Lookup::Unavailable);
    }
}

#[tokio::test(start_paused = true)]
async fn an_unknown_organization_is_an_answer_like_any_other() {
    let (cache, store, _) = fickle();
    store.says(Ok(None));
    assert_eq!(status(&cache).await, Lookup::Known(None));
    assert_eq!(status(&cache).await, Lookup::Known(None));
    assert_eq!(store.asked(), 1);
}

#[tokio::test(start_paused = true)]
async fn two_hundred_requests_at_once_are_one_question() {
    let (cache, store, metrics) = fickle();
    store.takes(50);
    let requests: Vec<_> = (0..200)
        .map(|_| {
            let cache = cache.clone();
            tokio::spawn(async move { status(&cache).await })
        })
        .collect();
    for request in requests {
        assert_eq!(request.await.unwrap(), ACTIVE);
    }
    assert_eq!(store.asked(), 1);
    let text = metrics.encode();
    assert!(
        text.contains(r#"portcullis_policy_lookups_total{outcome="miss"} 200"#),
        "{text}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_fault_is_never_kept_as_an_answer() {
    let (cache, store, metrics) = fickle();
    for fault in [StoreFault::NotSensible, StoreFault::Schema, StoreFault::PoolExhausted] {
        store.says(Err(fault));
        assert_eq!(status(&cache).await, Lookup::Unavailable, "{fault}");
    }
    store.says(Ok(Some(OrgStatus::Active)));
    assert_eq!(status(&cache).await, ACTIVE);
    let text = metrics.encode();
    let line = r#"portcullis_dependency_errors_total{dependency="policy",kind="schema"} 1"#;
    assert!(text.contains(line), "{text}");
}

#[tokio::test(start_paused = true)]
async fn a_store_that_refuses_is_not_hammered_and_is_asked_again_in_no_time() {
    let (cache, store, _) = fickle();
    store.says(Err(StoreFault::Connection));
    for _ in 0..100 {
        assert_eq!(status(&cache).await, Lookup::Unavailable);
    }
    assert_eq!(store.asked(), 1);
    store.says(Ok(Some(OrgStatus::Active)));
    advance(Duration::from_millis(PAUSE_AFTER_REFUSAL_MS + 1)).await;
    assert_eq!(status(&cache).await, ACTIVE);
}

#[tokio::test(start_paused = true)]
async fn who_waits_gives_up_in_time_and_the_next_finds_the_answer() {
    let (cache, store, _) = fickle();
    store.takes(300);
    let start = Instant::now();
    assert_eq!(status(&cache).await, Lookup::Unavailable);
    assert_eq!(start.elapsed(), PATIENCE);
    sleep(Duration::from_millis(250)).await;
    assert_eq!(status(&cache).await, ACTIVE);
    assert_eq!(store.asked(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_hangs_blocks_no_key_for_longer_than_a_question_may_take() {
    let (cache, store, _) = fickle();
    store.takes(3_600_000);
    assert_eq!(status(&cache).await, Lookup::Unavailable);
    store.takes(0);
    sleep(QUESTION_TIMEOUT).await;
    assert_eq!(status(&cache).await, ACTIVE);
}

#[tokio::test(start_paused = true)]
async fn an_answer_in_use_is_renewed_halfway_and_nobody_waits_for_it() {
    let (cache, store, metrics) = fickle();
    assert_eq!(status(&cache).await, ACTIVE);
    store.says(Ok(Some(OrgStatus::Suspended)));
    advance(STALENESS / 2).await;
    assert_eq!(status(&cache).await, ACTIVE, "the old one still counts");
    sleep(Duration::from_millis(1)).await;
    assert_eq!(status(&cache).await, SUSPENDED);
    assert_eq!(store.asked(), 2);
    let text = metrics.encode();
    assert!(
        text.contains(r#"portcullis_policy_lookups_total{outcome="hit"} 2"#),
        "{text}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_spent_budget_asks_nobody() {
    let (cache, store, _) = fickle();
    assert_eq!(
        cache.view("g", Some("m"), Some("m"), Instant::now()).await,
        PolicyView::UNAVAILABLE
    );
    assert_eq!(store.asked(), 0);
}

#[tokio::test(start_paused = true)]
async fn the_registry_gives_the_closest_provider_or_says_that_there_is_none() {
    let (cache, ..) = fickle();
    let deadline = after(Instant::now(), PATIENCE);
    let provider = async |model| cache.view("g", Some(model), None, deadline).await.provider;
    assert_eq!(
        provider("claude-opus").await,
        Lookup::Known(Some("anthropic".to_owned()))
    );
    assert_eq!(provider("gpt-4o").await, Lookup::Known(None));
}

#[tokio::test(start_paused = true)]
async fn a_price_is_the_closest_one_is_asked_for_only_where_it_is_wanted_and_is_stale_like_everything() {
    let (cache, store, _) = fickle();
    let price = async |model| {
        let deadline = after(Instant::now(), PATIENCE);
        let view = cache.view("g", None, model, deadline).await;
        match view.price {
            Lookup::Known(price) => Lookup::Known(price.map(|price| price.input)),
            Lookup::Unavailable => Lookup::Unavailable,
        }
    };
    assert_eq!(price(None).await, Lookup::Known(None));
    assert_eq!(store.asked_for_prices.load(Ordering::SeqCst), 0);
    assert_eq!(price(Some("claude-opus")).await, Lookup::Known(Some(2)));
    assert_eq!(price(Some("claude-haiku")).await, Lookup::Known(Some(1)));
    assert_eq!(price(Some("gpt-4o")).await, Lookup::Known(None));
    assert_eq!(store.asked_for_prices.load(Ordering::SeqCst), 1);
    store.says(Err(StoreFault::Connection));
    advance(STALENESS).await;
    assert_eq!(price(Some("claude-opus")).await, Lookup::Unavailable);
}
