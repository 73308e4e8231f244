//! Two services whose clocks differ, over one Redis: the store's clock is the only one that counts.

use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use portcullis_wasm_tests::{Call, Envelope, GatewayPlan, Service, Upstream};
use serde_json::Value;

use crate::backed::{over_redis, patient};
use crate::expect::{RATE_LIMITED, refused, served};
use crate::stores::Store;
use crate::world::strict;

/// The library that shifts a process's clock, where Debian's `faketime` puts it.
fn faketime() -> Option<PathBuf> {
    let folders = std::fs::read_dir("/usr/lib").ok()?;
    let mut libraries = folders
        .flatten()
        .map(|folder| folder.path().join("faketime/libfaketimeMT.so.1"));
    libraries.find(|library| library.is_file())
}

const DAY_S: f64 = 86_400.0;

/// Seconds into the day by the right clock.
fn now() -> f64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("a clock after 1970");
    since.as_secs_f64().rem_euclid(DAY_S)
}

/// Seconds into its own day, by the clock of whoever wrote this line.
fn seconds_of_day(line: &Value) -> f64 {
    let text = line["timestamp"].as_str().expect("a line says when");
    let (_, time) = text.split_once('T').expect("date and time");
    time.trim_end_matches('Z')
        .split(':')
        .fold(0.0, |sum, part| sum * 60.0 + part.parse::<f64>().expect("a number"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_requests_in_turn_through_services_whose_clocks_are_three_seconds_apart_admit_thirty() {
    let Some(library) = faketime() else {
        println!("skipped: libfaketime is not installed (Debian's package faketime)");
        return;
    };
    let redis = Store::redis().await;
    let config = || over_redis(&redis.url());
    let shift = [
        ("LD_PRELOAD", library.to_str().expect("a path of letters")),
        ("FAKETIME", "+3s"),
        // Only what it takes the time of day to be; its timers have to work.
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
    ];
    let asked = now();
    let (right, ahead) = tokio::join!(
        Service::start(config()),
        Service::start_with_environment(config(), &shift)
    );
    for service in [&right, &ahead] {
        service.await_state("limiter", "up").await;
    }
    // Modulo a day, since around midnight the day itself differs.
    let by_its_clock = (seconds_of_day(&ahead.log_lines()[0]) - asked).rem_euclid(DAY_S);
    assert!(
        (2.9..60.0).contains(&by_its_clock),
        "it started {by_its_clock} s after it was asked to: its clock is not 3 s ahead"
    );

    let upstream = Upstream::start().await;
    let plan = |service: &Service| {
        GatewayPlan::new(strict(), upstream.address)
            .decision(service.address)
            .plugin(patient())
    };
    let (first, second) = tokio::join!(plan(&right).start(), plan(&ahead).start());
    let call = Call::get("/v1/models").envelope(&Envelope::owner("o").requests("owner", 30));
    let start = std::time::Instant::now();
    for at in 0..100 {
        let gateway = if at % 2 == 0 { &first } else { &second };
        let answer = gateway.call(&call).await;
        if at < 30 {
            served(&answer);
        } else {
            refused(&answer, RATE_LIMITED);
        }
    }
    assert!(start.elapsed() < Duration::from_secs(50), "the window may be over");
    assert_eq!(upstream.hits(), 30);
    assert_eq!(redis.number(&["GET", "portcullis:{owner:o}:requests:60"]).await, 30);
}
