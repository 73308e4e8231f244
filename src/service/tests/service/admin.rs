//! The operators' listener: who is let in, and what is shown.

use std::net::SocketAddr;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpStream;

use crate::process::{Service, ended, file, in_memory, is_faulty, portcullis, until};
use crate::wire::{Answer, Client, request};

pub(crate) const TOKEN: &str = "operator-token-0123456789-abcdefgh";
const OTHER: &str = "operator-token-9876543210-hgfedcba";

/// One request to the operators' listener, with these lines in its head.
pub(crate) async fn ask(address: SocketAddr, method: &str, path: &str, lines: &[&str]) -> Answer {
    let mut client = Client::connect(address).await;
    let lines = lines.join("\r\n");
    client
        .write(&format!(
            "{method} {path} HTTP/1.1\r\n{lines}\r\ncontent-length: 0\r\n\r\n"
        ))
        .await;
    client.answer().await
}

/// Where the operators' listener is.
pub(crate) async fn address(service: &Service) -> SocketAddr {
    let line = service.line("admin_listening").await;
    line["listen"].as_str().unwrap().parse().unwrap()
}

fn with_token(folder: &TempDir) -> Value {
    let tokens = file(folder.path(), "tokens", &format!("# the operators\n{TOKEN}\n"));
    let mut config = in_memory();
    config["admin"] = json!({"listen": "127.0.0.1:0", "token_file": tokens});
    config
}

#[tokio::test]
async fn the_state_is_for_whoever_brings_the_token_and_for_nobody_else() {
    let folder = TempDir::new().unwrap();
    let service = Service::start_with(with_token(&folder), &[], &[("RUST_LOG", "trace")]).await;
    let address = address(&service).await;
    let good = format!("authorization: Bearer {TOKEN}");
    let answer = ask(address, "GET", "/admin/v1/state", &["host: localhost", &good]).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(answer.head.contains("content-type: application/json"), "{answer:?}");
    assert!(answer.head.contains("cache-control: no-store"), "{answer:?}");
    let state = answer.json();
    assert_eq!(state["service"]["profile"], "development");
    assert_eq!(
        state["service"]["config_hash"],
        service.line("started").await["config_hash"]
    );
    for line in [
        vec!["host: localhost"],
        vec!["host: localhost", "authorization: Bearer "],
        vec![
            "host: localhost",
            "authorization: Bearer operator-token-0123456789-abcdefgX",
        ],
        vec!["host: localhost", "authorization: Basic b3BlcmF0b3I="],
    ] {
        for path in ["/admin/v1/state", "/admin/v1/nothing", "/admin/"] {
            let answer = ask(address, "GET", path, &line).await;
            assert_eq!(answer.status, 401, "{line:?} {path}");
            assert!(answer.head.contains("www-authenticate: bearer\r\n"), "{answer:?}");
            assert_eq!(answer.json(), json!({"error": "a token of admin.token_file is needed"}));
        }
    }
    let absent = ask(address, "GET", "/admin/v1/nothing", &["host: localhost", &good]).await;
    assert_eq!((absent.status, absent.json()), (404, json!({"error": "no such path"})));
    let wrong_way = ask(address, "DELETE", "/admin/v1/state", &["host: localhost", &good]).await;
    assert_eq!(wrong_way.status, 405);
    // The gateways' listener shows none of it.
    assert_eq!(service.get("/admin/v1/state").await.status, 404);
    assert!(!service.log().contains(TOKEN), "{}", service.log());
}

#[tokio::test]
async fn a_foreign_host_or_page_is_turned_away_also_with_the_token() {
    let folder = TempDir::new().unwrap();
    let service = Service::start(with_token(&folder)).await;
    let address = address(&service).await;
    let good = format!("authorization: Bearer {TOKEN}");
    for host in [
        "host: evil.example",
        "host: 10.0.0.1:8182",
        "host: localhost.evil.example",
    ] {
        assert_eq!(
            ask(address, "GET", "/admin/v1/state", &[host, &good]).await.status,
            421,
            "{host}"
        );
    }
    let two = ["host: localhost", "host: evil.example", good.as_str()];
    assert!(ask(address, "GET", "/admin/v1/state", &two).await.status >= 400);
    let own = format!("host: {address}");
    for (origin, status) in [
        (format!("origin: http://{address}"), 200),
        ("origin: http://evil.example".to_owned(), 403),
        ("origin: null".to_owned(), 403),
    ] {
        let answer = ask(address, "GET", "/admin/v1/state", &[&own, &origin, &good]).await;
        assert_eq!(answer.status, status, "{origin}");
    }
}

#[tokio::test]
async fn tokens_are_replaced_while_it_runs_and_a_broken_file_changes_nothing() {
    let folder = TempDir::new().unwrap();
    let service = Service::start(with_token(&folder)).await;
    let address = address(&service).await;
    let status = async |token: &str| {
        let line = format!("authorization: Bearer {token}");
        ask(address, "GET", "/admin/v1/state", &["host: localhost", &line])
            .await
            .status
    };
    assert_eq!((status(TOKEN).await, status(OTHER).await), (200, 401));
    file(folder.path(), "tokens", &format!("{TOKEN}\n{OTHER}\n"));
    until("both tokens", async || (status(OTHER).await == 200).then_some(())).await;
    assert_eq!(status(TOKEN).await, 200);
    for broken in ["", "# none\n", "short\n", &format!("{OTHER}\nshort\n")] {
        let before = service.lines().len();
        file(folder.path(), "tokens", broken);
        until("a line about the file", async || {
            let lines = service.lines();
            let told = lines
                .iter()
                .skip(before)
                .find(|line| line["event"] == "tokens_unusable")?;
            assert_eq!(told["level"], "ERROR");
            assert!(
                told["message"].as_str().unwrap().starts_with("admin.token_file: "),
                "{told}"
            );
            Some(())
        })
        .await;
        assert_eq!((status(TOKEN).await, status(OTHER).await), (200, 200), "{broken:?}");
        // Good again, so that the next fault is told at once.
        file(folder.path(), "tokens", &format!("{TOKEN}\n{OTHER}\n#{before}\n"));
        until("a good file", async || {
            let lines = service.lines();
            lines
                .iter()
                .skip(before)
                .any(|line| line["event"] == "tokens_loaded")
                .then_some(())
        })
        .await;
    }
    file(folder.path(), "tokens", &format!("{OTHER}\n"));
    until("the old token's end", async || {
        (status(TOKEN).await == 401).then_some(())
    })
    .await;
    assert_eq!(status(OTHER).await, 200);
    std::fs::remove_file(folder.path().join("tokens")).unwrap();
    service.line("tokens_unusable").await;
    assert_eq!(status(OTHER).await, 200);
    assert!(
        !service.log().contains(OTHER) && !service.log().contains(TOKEN),
        "{}",
        service.log()
    );
}

#[tokio::test]
async fn the_state_names_dependencies_backlogs_and_leases() {
    let mut config = in_memory();
    config["admin"] = json!({"listen": "[::1]:0"});
    // A database that nobody listens at: what passes unmetered has to wait.
    config["metering"] = json!({"url": "postgres://user:hunter2@127.0.0.1:1/metering"});
    let service = Service::start(config).await;
    let address = address(&service).await;
    let gates = json!([{"gate": "metering", "when_unavailable": "admit"}]);
    let subject = json!({"owner": "o", "org": "g"});
    for _ in 0..3 {
        let answer = service
            .post("/v1/decide", &request(json!({"gates": gates, "subject": subject})))
            .await;
        assert_eq!(answer.json()["verdict"], "admit");
    }
    let own = format!("host: {address}");
    let state = ask(address, "GET", "/admin/v1/state", &[&own]).await;
    assert!(!state.body.contains("hunter2"), "{state:?}");
    let state = state.json();
    assert_eq!(state["dependencies"]["limiter"]["state"], "embedded");
    assert_eq!(state["dependencies"]["metering"]["state"], "down");
    assert_eq!(state["dependencies"]["policy"]["state"], "absent");
    assert_eq!(state["gates"]["metering"]["state"], "bypassing");
    assert_eq!(state["gates"]["launch_rate"]["state"], "never_seen");
    assert_eq!(state["service"]["ready"], false);
    assert_eq!(state["service"]["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(state["backlogs"]["unmetered"], 3, "{state:#}");
    assert_eq!(
        (&state["backlogs"]["bills"], &state["backlogs"]["give_backs"]["limiter"]),
        (&json!(0), &json!(0))
    );
    assert_eq!(
        (&state["leases"]["wanted"], &state["leases"]["gateways"]),
        (&json!(false), &json!(0))
    );
    let gateway = "000000000000000000000000000000a1";
    let lease = json!({"max_requests": 64, "max_age_ms": 1000, "gateway": gateway});
    service.post("/v1/decide", &request(json!({"lease": lease}))).await;
    let state = ask(address, "GET", "/admin/v1/state", &[&own]).await.json();
    assert_eq!(
        (&state["leases"]["wanted"], &state["leases"]["gateways"]),
        (&json!(true), &json!(1))
    );
}

#[tokio::test]
async fn the_operators_listener_ends_with_the_service() {
    let mut config = in_memory();
    config["admin"] = json!({"listen": "127.0.0.1:0"});
    let mut service = Service::start(config).await;
    let address = address(&service).await;
    // A kept connection does not hold up the end.
    let mut kept = Client::connect(address).await;
    kept.write("GET /admin/v1/state HTTP/1.1\r\nhost: localhost\r\n\r\n")
        .await;
    assert_eq!(kept.answer().await.status, 200);
    service.signal("TERM");
    assert_eq!(service.end().await, Some(0));
    assert_eq!(service.line("stopped").await["level"], "INFO");
    assert!(TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn an_operators_address_in_use_is_exit_code_1_and_names_its_key() {
    let mut config = in_memory();
    config["admin"] = json!({"listen": "127.0.0.1:0"});
    let service = Service::start(config.clone()).await;
    let address = address(&service).await;
    let folder = TempDir::new().unwrap();
    config["admin"]["listen"] = json!(address.to_string());
    let config = file(folder.path(), "second.json", &config.to_string());
    let (code, _, err) = ended(portcullis(&[]).arg("serve").arg("--config").arg(&config));
    assert_eq!(code, Some(1), "{err}");
    assert!(
        err.contains(&format!("admin.listen: cannot listen on {address}: ")),
        "{err}"
    );
}

#[test]
fn an_address_that_others_reach_and_a_missing_token_are_exit_code_2() {
    let folder = TempDir::new().unwrap();
    file(folder.path(), "short", "hunter2\n");
    file(folder.path(), "empty", "# nobody\n");
    let production = json!({"profile": "production", "listen": "127.0.0.1:0", "limiter": {"url": "redis://127.0.0.1:1"},
        "policy": null, "metering": null});
    for (admin, expected) in [
        (
            json!({"listen": "0.0.0.0:8182", "token_file": "t"}),
            "admin.listen: must be a loopback address with a port, such as \"127.0.0.1:8182\", is \"0.0.0.0:8182\"",
        ),
        (
            json!({"listen": "localhost:8182", "token_file": "t"}),
            "admin.listen: must be a loopback address",
        ),
        (
            json!({"listen": "127.0.0.1", "token_file": "t"}),
            "admin.listen: must be a loopback address",
        ),
        (json!({"token_file": "t"}), "admin.listen: required, and missing"),
        (
            json!({"listen": "127.0.0.1:0"}),
            "admin.token_file: required in production: a file with one token a line",
        ),
        (
            json!({"listen": "127.0.0.1:0", "token_file": ""}),
            "admin.token_file: must be the path of a file, is empty",
        ),
        (
            json!({"listen": "127.0.0.1:0", "token_fil": "t"}),
            "admin.token_fil: unknown key; did you mean \"token_file\"?",
        ),
        (
            json!({"listen": "127.0.0.1:0", "token_file": "absent"}),
            "admin.token_file: cannot be read: No such file or directory (os error 2)",
        ),
        (
            json!({"listen": "127.0.0.1:0", "token_file": "empty"}),
            "admin.token_file: has no token: at least one line must hold one",
        ),
        (
            json!({"listen": "127.0.0.1:0", "token_file": "short"}),
            "admin.token_file: line 1 must be 32 to 512 of A-Z, a-z, 0-9 and -._~+/= ; its value is not shown",
        ),
    ] {
        let mut config = production.clone();
        config["admin"] = admin;
        is_faulty(folder.path(), &config, expected, &["hunter2"]);
    }
}

#[tokio::test]
async fn the_page_is_for_whoever_reaches_it_and_holds_nothing_from_elsewhere() {
    let folder = TempDir::new().unwrap();
    let service = Service::start(with_token(&folder)).await;
    let address = address(&service).await;
    let page = ask(address, "GET", "/", &["host: localhost"]).await;
    assert_eq!(page.status, 200);
    assert!(page.head.contains("content-type: text/html"), "{}", page.head);
    let policy = page
        .head
        .lines()
        .find(|line| line.starts_with("content-security-policy: "))
        .unwrap();
    assert!(
        policy.contains("default-src 'none'") && policy.contains("connect-src 'self'"),
        "{policy}"
    );
    assert!(!policy.contains("unsafe"), "{policy}");
    let nonce = policy
        .split("script-src 'nonce-")
        .nth(1)
        .and_then(|rest| rest.split('\'').next())
        .unwrap();
    assert_eq!(page.body.matches(&format!("nonce=\"{nonce}\"")).count(), 2);
    assert_eq!(
        page.body.matches("://").count(),
        1,
        "the request of the form's example, and no other address"
    );
    let again = ask(address, "GET", "/", &["host: localhost"]).await;
    assert!(!again.head.contains(nonce), "a nonce of its own each time");
    assert_eq!(ask(address, "GET", "/", &["host: evil.example"]).await.status, 421);
}

#[tokio::test]
async fn a_pasted_request_is_explained_and_nothing_of_the_disk_is_read() {
    let folder = TempDir::new().unwrap();
    let service = Service::start(with_token(&folder)).await;
    let address = address(&service).await;
    let secret = file(folder.path(), "secret", "hunter2");
    let post = async |body: &Value, token: bool| {
        let mut client = Client::connect(address).await;
        let (body, length) = (body.to_string(), body.to_string().len());
        let token = if token {
            format!("authorization: Bearer {TOKEN}\r\n")
        } else {
            String::new()
        };
        let head = "POST /admin/v1/explain HTTP/1.1\r\nhost: localhost\r\n";
        client
            .write(&format!("{head}{token}content-length: {length}\r\n\r\n{body}"))
            .await;
        client.answer().await
    };
    let curl = "curl -X POST http://h/v1/x -H 'x-admission-owner-id: o' -H 'x-admission-owner-rate-limit-requests: 0'";
    let asked = json!({"curl": curl, "rules": "contract-limits"});
    let answer = post(&asked, true).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    let said = answer.json();
    assert_eq!(
        (&said["report"]["code"], &said["report"]["rules"]),
        (&json!("RATE_LIMITED"), &json!("contract-limits"))
    );
    assert!(said["text"].as_str().unwrap().contains("RATE_LIMITED"), "{said}");
    assert_eq!(post(&asked, false).await.status, 401);
    let reading = format!("curl http://h/ -d @{}", secret.display());
    for (body, expected) in [
        (json!({"curl": reading, "rules": "fail-closed"}), "would read a file"),
        (
            json!({"curl": curl, "rules": secret}),
            "rules must be one of contract-limits",
        ),
        (
            json!({"curl": "curl 'http://h/", "rules": "fail-closed"}),
            "the request: ",
        ),
        (
            json!({"curl": curl, "rules": "fail-closed", "down": ["everything"]}),
            "unknown variant",
        ),
        (
            json!({"curl": curl, "rules": "fail-closed", "config": "x"}),
            "unknown field",
        ),
    ] {
        let answer = post(&body, true).await;
        assert_eq!(answer.status, 400, "{answer:?}");
        let error = answer.json()["error"].as_str().unwrap().to_owned();
        assert!(error.contains(expected) && !error.contains("hunter2"), "{error}");
    }
    let large = json!({"curl": "x".repeat(70_000), "rules": "fail-closed"});
    assert_eq!(post(&large, true).await.status, 413);
    // Nothing of it was decided or counted.
    let metrics = service.get("/metrics").await.body;
    assert!(metrics.contains("portcullis_decide_seconds_count 0"), "{metrics}");
}
