//! What `sslmode` means against a server with TLS and one without.

use crate::policies::{UNKNOWABLE, becomes, config, decide, errors, policy, put, state_becomes};
use crate::postgres::Postgres;
use crate::process::Service;
use crate::stores::eventually;

async fn is_encrypted(database: &Postgres) -> bool {
    let rows = database
        .run("SELECT bool_and(ssl) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE application_name = 'portcullis'")
        .await;
    rows[0][0] == "t"
}

#[tokio::test]
async fn a_required_certificate_is_checked_and_a_preferred_one_only_used() {
    let Some((database, certificate)) = Postgres::start_with_tls().await else {
        eprintln!("skipped: openssl is not installed");
        return;
    };
    let url = database.url().replace("127.0.0.1", "localhost");
    put(&url, &policy());
    let roots = format!("sslrootcert={}", certificate.display());
    for mode in [
        String::new(),
        "?sslmode=prefer".to_owned(),
        format!("?sslmode=require&{roots}"),
        format!("?sslmode=verify-full&{roots}"),
    ] {
        let service = Service::start(config(&format!("{url}{mode}"), 2_000)).await;
        becomes(&service, "good", "gpt-4o", "admit").await;
        assert!(is_encrypted(&database).await, "{mode}");
    }
    let service = Service::start(config(&format!("{url}?sslmode=disable"), 2_000)).await;
    becomes(&service, "good", "gpt-4o", "admit").await;
    eventually("not encrypted", async || (!is_encrypted(&database).await).then_some(())).await;

    // A certificate for another name, and one that nobody vouches for.
    let elsewhere = format!("{}?sslmode=require&{roots}", database.url());
    for url in [elsewhere, format!("{url}?sslmode=require")] {
        let settings = [("POSTGRES_DSN", url.as_str())];
        let service = Service::start_with(config("postgres://unused/unused", 2_000), &[], &settings).await;
        assert_eq!(decide(&service, "good", "gpt-4o").await, UNKNOWABLE);
        state_becomes(&service, "down").await;
        assert!(errors(&service, "connection").await > 0);
    }
}

#[tokio::test]
async fn required_tls_is_not_done_without() {
    let database = Postgres::start().await;
    put(&database.url(), &policy());
    let service = Service::start(config(&database.url(), 2_000)).await;
    becomes(&service, "good", "gpt-4o", "admit").await;
    let service = Service::start(config(&format!("{}?sslmode=require", database.url()), 2_000)).await;
    assert_eq!(decide(&service, "good", "gpt-4o").await, UNKNOWABLE);
}
