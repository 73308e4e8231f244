//! The console page in a real browser, over a real Redis: the numbers of a burst, a store that breaks, an error of the page
//! itself, and an explanation. `PORTCULLIS_PICTURES` names a folder in which its pictures are kept.

use std::path::PathBuf;

use serde_json::{Value, json};
use tokio::time::{Duration, Instant};

use crate::chromium::Chromium;
use crate::process::{Service, file};
use crate::stores::{Store, eventually};
use crate::wire::request;

const TOKEN: &str = "operator-token-0123456789-abcdefgh";
/// A broken store shows within this.
const AT_ONCE: Duration = Duration::from_secs(2);

fn count(name: &str) -> String {
    format!("document.querySelector('[data-count={name}]')?.dataset.value")
}

fn state(of: &str, name: &str) -> String {
    format!("document.querySelector('[data-{of}={name}]')?.dataset.state")
}

const SCOPE: &str = "(() => { const row = document.querySelector('[data-scope=\"owner:o:requests\"]'); \
                     return row && row.dataset.used + '/' + row.dataset.limit; })()";

async fn log_in(page: &mut Chromium, token: &str) {
    let typed =
        format!("document.getElementById('token').value = '{token}'; document.getElementById('login').requestSubmit()");
    page.value(&typed).await;
}

#[tokio::test]
async fn the_console_shows_the_numbers_of_a_burst_and_a_broken_store_within_two_seconds() {
    let Some(mut page) = Chromium::start().await else {
        eprintln!("skipped: chromium is not installed");
        return;
    };
    let mut redis = Store::redis().await;
    let folder = tempfile::tempdir().unwrap();
    let tokens = file(folder.path(), "tokens", &format!("{TOKEN}\n"));
    let service = Service::start(json!({
        "profile": "development", "listen": "127.0.0.1:0", "limiter": {"url": redis.url()},
        "admin": {"listen": "127.0.0.1:0", "token_file": tokens},
        "capacity": {"platform": {"requests": 6000}}
    }))
    .await;
    eventually("ready", async || {
        (service.get("/ready").await.status == 200).then_some(())
    })
    .await;
    let base = format!(
        "http://{}/",
        service.line("admin_listening").await["listen"].as_str().unwrap()
    );

    page.looks(390, 844, false).await;
    page.open(&base).await;
    page.becomes("document.getElementById('ask')?.hidden", json!(false))
        .await;
    log_in(&mut page, "not-the-token-0123456789-abcdefgh").await;
    page.becomes("document.getElementById('wrong').hidden", json!(false))
        .await;
    log_in(&mut page, TOKEN).await;
    page.becomes("document.getElementById('ask').hidden", json!(true)).await;
    page.becomes(&state("dependency", "limiter"), json!("up")).await;
    page.becomes(&count("admitted"), json!("0")).await;

    // 30 of 35 pass; five more have no time left, and the rules open what was not checked.
    let gates =
        json!([{"gate": "capacity", "when_unavailable": "admit"}, {"gate": "contract", "when_unavailable": "admit"}]);
    let mut client = service.client().await;
    for n in 0..40 {
        let mut changes = json!({"gates": gates, "request_id": format!("r-{n}")});
        if n >= 35 {
            changes["budget_ms"] = json!(0);
        }
        let answer = client.send("POST", "/v1/decide", &request(changes).to_string()).await;
        assert_eq!(answer.status, 200);
    }
    for (name, expected) in [("admitted", "30"), ("quota_exhausted", "5"), ("passed_unchecked", "5")] {
        page.becomes(&count(name), json!(expected)).await;
    }
    page.becomes(SCOPE, json!("30/30")).await;
    page.becomes("document.querySelectorAll('#bypasses > li .name').length", json!(5))
        .await;
    page.becomes(&state("gate", "contract"), json!("bypassing")).await;
    let text = page.value("document.body.innerText").await;
    let text = text.as_str().unwrap();
    for part in [
        "30 of 30 requests",
        "owner o",
        "r-39",
        "limiter_unavailable",
        "development",
        "ready",
    ] {
        assert!(text.contains(part), "{part} is not in the page:\n{text}");
    }

    let pictures = std::env::var_os("PORTCULLIS_PICTURES").map_or_else(|| folder.path().to_owned(), PathBuf::from);
    for (width, height) in [(390, 844), (1280, 900)] {
        for is_dark in [false, true] {
            page.looks(width, height, is_dark).await;
            let overflows = "document.documentElement.scrollWidth > document.documentElement.clientWidth";
            assert_eq!(page.value(overflows).await, json!(false), "{width}");
            let scheme = if is_dark { "dark" } else { "light" };
            page.picture(&pictures.join(format!("console-{width}-{scheme}.png")))
                .await;
        }
    }

    redis.kill();
    let start = Instant::now();
    let broken = "['failing', 'down'].includes(document.querySelector('[data-dependency=limiter]')?.dataset.state)";
    page.becomes(broken, json!(true)).await;
    assert!(start.elapsed() < AT_ONCE, "it took {:?}", start.elapsed());
    page.looks(390, 844, false).await;
    page.picture(&pictures.join("console-broken.png")).await;
    page.becomes(&state("dependency", "limiter"), json!("down")).await;
    redis.restart().await;
    page.becomes(&state("dependency", "limiter"), json!("up")).await;

    let elsewhere: Vec<_> = page
        .asked
        .iter()
        .filter(|asked| !asked.starts_with(&base) && !asked.starts_with("data:"))
        .collect();
    assert!(elsewhere.is_empty(), "it asks others: {elsewhere:?}");
    assert!(
        page.asked.iter().all(|asked| !asked.contains(TOKEN)),
        "a token in an address"
    );
    assert_eq!(page.value("document.getElementById('error').hidden").await, json!(true));
}

#[tokio::test]
async fn the_console_explains_a_request_and_says_its_own_errors_and_a_silent_service() {
    let Some(mut page) = Chromium::start().await else {
        eprintln!("skipped: chromium is not installed");
        return;
    };
    let mut service = Service::start(json!({
        "profile": "development", "listen": "127.0.0.1:0", "limiter": {"url": "memory:"}, "admin": {"listen": "127.0.0.1:0"}
    }))
    .await;
    let base = format!(
        "http://{}/",
        service.line("admin_listening").await["listen"].as_str().unwrap()
    );
    page.looks(1280, 900, false).await;
    page.open(&base).await;
    page.becomes("document.getElementById('rules')?.options.length", json!(5))
        .await;
    assert_eq!(
        page.value("document.getElementById('ask').hidden").await,
        json!(true),
        "no token is needed"
    );
    let explain = "document.getElementById('rules').value = 'fail-closed'; \
                   document.querySelector('input[value=decision]').checked = true; \
                   document.getElementById('explain').requestSubmit()";
    page.value(explain).await;
    page.becomes(
        "document.getElementById('explained').textContent.includes('SERVICE_DEGRADED')",
        json!(true),
    )
    .await;
    page.value("document.getElementById('curl').value = 'curl http://h/ -d @secret'; document.getElementById('explain').requestSubmit()")
        .await;
    page.becomes(
        "document.getElementById('explained').textContent.includes('would read a file')",
        json!(true),
    )
    .await;

    page.value("void setTimeout(() => { throw new Error('made by a test') })")
        .await;
    page.becomes("document.getElementById('error').hidden", json!(false))
        .await;
    let said = page.value("document.getElementById('error').textContent").await;
    assert!(said.as_str().unwrap().contains("made by a test"), "{said}");
    // A script that is not the page's own is not run.
    let smuggled = "(() => { const made = document.createElement('script'); made.textContent = 'window.smuggled = 1'; \
                    document.body.append(made); return window.smuggled ?? null; })()";
    assert_eq!(page.value(smuggled).await, Value::Null);

    service.signal("TERM");
    assert_eq!(service.end().await, Some(0));
    page.becomes("document.getElementById('silent').hidden", json!(false))
        .await;
}
