//! `portcullis policy apply` and `show`, as an operator runs them.

use serde_json::{Value, json};

use crate::policies::{apply, policy};
use crate::postgres::{PASSWORD, Postgres};
use crate::process::{ended, portcullis};
use crate::stores::free_port;

fn show(url: &str) -> Value {
    let (code, out, err) = ended(portcullis(&[("POSTGRES_DSN", url)]).args(["policy", "show"]));
    assert_eq!(code, Some(0), "{err}");
    serde_json::from_str(&out).unwrap()
}

#[tokio::test]
async fn a_policy_is_applied_shown_and_applied_again_to_no_effect() {
    let database = Postgres::start().await;
    let url = database.url();
    let (code, out, _) = apply(&url, &policy(), &["--dry-run"]);
    assert_eq!(
        (
            code,
            out.ends_with("9 added, 0 changed, 0 removed (dry run: nothing was changed)\n")
        ),
        (Some(0), true),
        "{out}"
    );
    assert_eq!(database.run("SELECT to_regclass('portcullis_orgs')").await, [["NULL"]]);

    let (code, out, err) = apply(&url, &policy(), &[]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    assert!(
        out.contains("+ orgs \"reader\": {\"models\":[\"gpt-4o\"],\"status\":\"read_only\"}\n"),
        "{out}"
    );
    assert!(out.ends_with("9 added, 0 changed, 0 removed\n"), "{out}");
    assert_eq!(show(&url), policy());
    assert_eq!(
        apply(&url, &show(&url), &[]),
        (Some(0), "nothing to change\n".to_owned(), String::new())
    );
    assert_eq!(apply(&url, &policy(), &["--prune"]).1, "nothing to change\n");
}

#[tokio::test]
async fn what_the_file_lacks_is_removed_only_when_asked_for_and_otherwise_nothing_changes() {
    let database = Postgres::start().await;
    let url = database.url();
    assert_eq!(apply(&url, &policy(), &[]).0, Some(0));
    let mut other = policy();
    other["orgs"] =
        json!({"good": {"status": "suspended", "models": []}, "new": {"status": "active", "models": ["*"]}});
    other["plans"] = json!({});
    let (code, out, err) = apply(&url, &other, &[]);
    assert_eq!((code, out.as_str()), (Some(2), ""));
    assert!(
        err.contains("lacks 5 entries that the database has; nothing was changed"),
        "{err}"
    );
    assert_eq!(show(&url), policy());

    let (code, out, _) = apply(&url, &other, &["--dry-run", "--prune"]);
    assert_eq!(code, Some(0));
    assert!(
        out.contains("- plans \"team\"") && out.contains("1 added, 1 changed, 5 removed"),
        "{out}"
    );
    assert_eq!(show(&url), policy());

    let (code, out, _) = apply(&url, &other, &["--prune"]);
    assert_eq!(code, Some(0));
    assert!(
        out.contains("~ orgs \"good\": ") && out.ends_with("1 added, 1 changed, 5 removed\n"),
        "{out}"
    );
    assert_eq!(show(&url), other);
}

#[tokio::test]
async fn figures_up_to_the_largest_and_every_name_come_back_as_they_went_in() {
    let database = Postgres::start().await;
    let largest = 9_007_199_254_740_991_u64;
    let policy = json!({
        "providers": {"*": "p'\"\\ é"},
        "prices": {"m*": {"input": largest, "cached_input": 0, "output": 1}},
        "plans": {"": {}, "π": {"concurrency": 0, "requests": largest, "tokens": 1, "monthly_runs": 2, "monthly_cost": largest}},
        "orgs": {"a b'c": {"status": "active", "plan": "π", "models": ["z", "a", "m*"]}}
    });
    let (code, _, err) = apply(&database.url(), &policy, &[]);
    assert_eq!(code, Some(2), "an empty name is a fault");
    assert!(err.contains("a name must be 1 to 256 bytes"), "{err}");
    let mut policy = policy;
    policy["plans"].as_object_mut().unwrap().remove("");
    assert_eq!(apply(&database.url(), &policy, &[]).0, Some(0));
    assert_eq!(show(&database.url()), policy);
}

#[tokio::test]
async fn all_faults_of_a_file_are_listed_before_the_database_is_asked() {
    let url = format!("postgres://u:{PASSWORD}@127.0.0.1:{}/d", free_port());
    let faulty = json!({"orgs": {"a": {"status": "activ"}, "b": {"status": "active", "plan": "x", "models": ["a*b"]}}});
    let (code, out, err) = apply(&url, &faulty, &[]);
    assert_eq!((code, out.as_str()), (Some(2), ""));
    assert_eq!(err.lines().count(), 3, "{err}");
    assert!(err.contains("did you mean") && !err.contains(PASSWORD), "{err}");
}

#[tokio::test]
async fn trouble_with_the_database_is_exit_code_1_and_shows_no_secret() {
    let database = Postgres::start().await;
    let cases = [
        (
            database.url().replace(PASSWORD, "wrong-secret"),
            "(access_denied): the password is wrong",
        ),
        (
            format!("postgres://u:wrong-secret@127.0.0.1:{}/d", free_port()),
            "(connection): the connection was refused: nothing listens",
        ),
        (
            "postgres://u:wrong-secret@no-such-host.invalid/d".to_owned(),
            "(connection): the host's name can't be resolved",
        ),
    ];
    let url = database.url();
    let elsewhere = format!("{}no-such-database", url.strip_suffix("postgres").unwrap());
    let missing = "the connection failed (connection): the database that the address names does not exist\n";
    for command in ["show", "apply"] {
        let (code, _, err) = if command == "show" {
            ended(portcullis(&[("POSTGRES_DSN", &elsewhere)]).args(["policy", "show"]))
        } else {
            apply(&elsewhere, &policy(), &[])
        };
        assert_eq!(code, Some(1), "{err}");
        assert_eq!(err, format!("the database failed: {missing}"));
    }
    for (url, kind) in cases {
        for arguments in [&[][..], &["--dry-run"]] {
            let (code, out, err) = apply(&url, &policy(), arguments);
            assert_eq!((code, out.as_str()), (Some(1), ""), "{err}");
            assert!(
                err.contains(kind) && !err.contains("wrong-secret") && !err.contains("FATAL"),
                "{err}"
            );
        }
    }
}

#[test]
fn an_address_that_is_missing_or_no_database_is_exit_code_2_and_is_not_shown() {
    for url in [
        "",
        "mysql://u:wrong-secret@h/d",
        "file:policy.json",
        "postgres://u:wrong-secret@h:port/d",
    ] {
        let (code, _, err) = apply(url, &policy(), &[]);
        assert_eq!(code, Some(2), "{url}: {err}");
        assert!(err.contains("POSTGRES_DSN") && !err.contains("wrong-secret"), "{err}");
        assert!(!err.contains("policy.json"), "no fault of the file: {err}");
        let (code, out, shown) = ended(portcullis(&[("POSTGRES_DSN", url)]).args(["policy", "show"]));
        assert_eq!((code, out.as_str(), shown), (Some(2), "", err));
    }
    let (_, _, err) = ended(portcullis(&[]).args(["policy", "show"]));
    assert_eq!(err, "no database: give --database postgres://… or set POSTGRES_DSN\n");
}
