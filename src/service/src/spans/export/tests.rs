//! How many spans wait for a collector that says nothing, and what becomes of the others.

use std::time::Instant as Clock;

use portcullis_decision::verdict::{Admission, Verdict};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::time::Instant;

use super::*;
use crate::decide::tests::request;
use crate::spans::Arrival;

#[tokio::test(flavor = "multi_thread")]
async fn so_many_spans_wait_and_the_others_are_dropped_and_counted() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let config = TracingConfig {
        endpoint: format!("http://{}/v1/traces", silent.local_addr().unwrap()),
        sample_one_in: 1,
    };
    let (metrics, journal) = (Arc::new(Metrics::default()), Arc::new(Journal::default()));
    let collector = Collector::open(Some(&config)).unwrap().expect("a collector");
    let (spans, sending) = collector.start(Arc::clone(&metrics), journal).unwrap();
    let request = request(1, json!({}));
    for _ in 0..10_000 {
        let traced = spans.begin(&Arrival::from(Instant::now()), &request);
        traced.end(&Verdict::Admit(Admission::default()));
    }
    let counted = metrics.encode();
    let dropped = format!(
        "portcullis_spans_total{{outcome=\"dropped\"}} {}\n",
        10_000 - MOST_WAITING
    );
    assert!(counted.contains(&dropped), "{counted}");
    assert!(
        !counted.contains("outcome=\"lost\"") && !counted.contains("outcome=\"sent\""),
        "{counted}"
    );
    let begun = Clock::now();
    sending.end(Duration::from_millis(200)).await;
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
}
