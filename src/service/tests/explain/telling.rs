//! What `explain` says, to whom, and what it never says.

use std::io::Write as _;
use std::process::Stdio;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::process::{ended, file, portcullis};

const OWNER: [&str; 2] = ["-H", "x-admission-owner-id: o"];
const POLICY: &str = r#"{
  "providers": {"gpt-4o": "openai"},
  "plans": {
    "team": {
      "requests": 60,
      "monthly_runs": 10
    }
  },
  "orgs": {
    "org-1": {"status": "active", "plan": "team", "models": ["gpt-4o"]},
    "org-2": {"status": "suspended", "plan": "team", "models": ["gpt-4o"]}
  }
}"#;

struct Place(TempDir);

impl Place {
    fn with(files: &[(&str, &str)]) -> Self {
        let folder = TempDir::new().unwrap();
        for (name, text) in files {
            file(folder.path(), name, text);
        }
        Self(folder)
    }

    fn run(&self, arguments: &[&str]) -> (Option<i32>, String, String) {
        ended(
            portcullis(&[])
                .current_dir(self.0.path())
                .arg("explain")
                .args(arguments),
        )
    }

    fn text(&self, arguments: &[&str]) -> String {
        let (code, out, err) = self.run(arguments);
        assert_eq!((code, err.as_str()), (Some(0), ""), "{arguments:?}");
        out
    }

    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.text(&[&["--json"], arguments].concat())).unwrap()
    }

    fn faults(&self, arguments: &[&str]) -> String {
        let (code, out, err) = self.run(arguments);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{arguments:?}");
        err
    }
}

#[test]
fn a_spent_contract_is_told_with_its_gate_its_line_and_the_reply_as_on_the_wire() {
    let place = Place::with(&[]);
    let request = [
        &[
            "--rules",
            "contract-limits",
            "--spent",
            "org:g:requests=60@41",
            "-X",
            "POST",
            "--path",
            "/v1/chat?key=hunter2",
        ][..],
        &OWNER,
        &[
            "-H",
            "x-admission-org-id: g",
            "-H",
            "x-admission-org-rate-limit-requests: 60",
        ],
        &["-H", "Authorization: Bearer hunter2", "-H", "cookie: hunter2"],
    ]
    .concat();
    let text = place.text(&request);
    let rules = include_str!("../../../../rules/contract-limits.json");
    let line = 1 + rules.lines().position(|line| line.contains("\"contract\"")).unwrap();
    for expected in [
        "POST /v1/chat (0 bytes of body)\n",
        "  authorization: (not shown)\n",
        "  cookie: (not shown)\n",
        "  x-admission-org-rate-limit-requests: 60\n",
        "DENIED                                     org requests 60 of 60\n",
        "  not listed: org_status, model_policy, concurrency, launch_rate, capacity, monthly_quota, cost_cap, metering\n",
        "verdict: refused: RATE_LIMITED quota_exhausted\n",
        &format!("decided by: gates[0] (line {line} of rules/contract-limits.json)\n"),
        "  from x-admission-org-rate-limit-requests: 60\n",
        "upstream: sees nothing\n",
        "  HTTP 429\n  x-portcullis-class: quota_exhausted\n  retry-after: 41\n",
        "  content-type: application/json\n",
        r#"{"error":{"code":"RATE_LIMITED","type":"quota_exhausted","message":"shared inference rate limit exceeded","scope":"org","retry_after":41}}"#,
        "counted: portcullis_callouts, portcullis_rejected_quota_exhausted\n",
        "logged: {\"action\":\"reject\"",
    ] {
        assert!(text.contains(expected), "{expected:?} is not in\n{text}");
    }
    assert!(!text.contains("hunter2"), "{text}");
    let one_less = place.json(&[&request[..], &["--spent", "org:h:requests=60"]].concat());
    assert_eq!(
        one_less["reply"]["status"], 429,
        "another org's counter is another counter"
    );
    let spared = place.json(&[&request[..2], &["--spent", "org:g:requests=59"], &request[4..]].concat());
    assert_eq!(
        (&spared["reply"], &spared["upstream"]["reached"]),
        (&Value::Null, &json!(true))
    );
    assert_eq!(
        spared["gates"][0]["limits"][0],
        json!({"scope": "org", "resource": "requests", "limit": 60, "used": 60, "resets_in_s": 60})
    );
}

#[test]
fn an_outage_is_told_with_the_choice_that_opened_or_closed_it() {
    let config = r#"{
  "profile": "development",
  "rules": {
    "name": "mine",
    "envelope": {"when_missing": "reject"},
    "gates": [
      {"gate": "org_status", "when_unavailable": "admit"},
      {
        "gate": "contract",
        "when_unavailable": "reject"
      }
    ],
    "decision": {"when_unavailable": {"admit": {"max_per_minute": 2}}}
  },
  "decision": {"upstream": "portcullis"}
}"#;
    let place = Place::with(&[("filter.json", config), ("policy.json", POLICY)]);
    let request = [
        &[
            "--config",
            "filter.json",
            "--policy",
            "policy.json",
            "-H",
            "x-admission-org-id: org-1",
        ][..],
        &OWNER,
        &["-H", "x-admission-org-rate-limit-requests: 60"],
    ]
    .concat();
    let told = |more: &[&str]| place.json(&[&request[..], more].concat());
    let report = told(&["--down", "limiter,policy"]);
    assert_eq!(
        (&report["gates"][0]["outcome"], &report["gates"][0]["class"]),
        (&json!("opened"), &json!("policy_unavailable"))
    );
    assert_eq!(
        (&report["gates"][1]["outcome"], &report["ending"]),
        (&json!("closed"), &json!("unavailable"))
    );
    assert_eq!(
        report["decided_by"]["rule"],
        json!({"path": "rules.gates[1].when_unavailable", "file": "filter.json", "line": 10})
    );
    let report = told(&["--down", "policy"]);
    assert_eq!(report["decided_by"]["rule"]["path"], "rules.gates[0].when_unavailable");
    assert_eq!(
        (&report["decided_by"]["rule"]["line"], &report["ending"]),
        (&json!(7), &json!("admitted"))
    );
    let report = told(&["--down", "decision", "--times", "2"]);
    assert_eq!(
        (&report["ending"], &report["gates"][0]["outcome"]),
        (&json!("admitted"), &json!("not_run"))
    );
    assert_eq!(
        report["decided_by"]["rule"],
        json!({"path": "rules.decision.when_unavailable", "file": "filter.json", "line": 13})
    );
    let report = told(&["--down", "decision", "--times", "3"]);
    assert_eq!(
        (&report["ending"], &report["class"]),
        (&json!("unavailable"), &json!("decision_unavailable")),
        "the allowance is spent"
    );
}

#[test]
fn the_policy_that_denied_is_named_by_its_line_and_without_one_its_store_is_unavailable() {
    let place = Place::with(&[("policy.json", POLICY)]);
    let of = |org: &str, more: &[&str]| {
        let org = format!("x-admission-org-id: {org}");
        place.json(&[&["--rules", "launch-gate", "-H", &org][..], &OWNER, more].concat())
    };
    let report = of("org-2", &["--policy", "policy.json"]);
    assert_eq!(
        (&report["code"], &report["gates"][0]["why"]),
        (&json!("ORG_SUSPENDED"), &json!("the org is suspended"))
    );
    assert_eq!(
        report["decided_by"]["source"],
        json!({"path": "orgs.org-2.status", "file": "policy.json", "line": 11})
    );
    assert_eq!(report["gates"][1]["outcome"], "not_reached");
    let month = [
        "--policy",
        "policy.json",
        "--spent",
        "org:org-1:runs=10",
        "--at",
        "2026-02-28T23:59:18Z",
    ];
    let report = of("org-1", &month);
    assert_eq!(
        (&report["code"], &report["decided_by"]["source"]["line"]),
        (&json!("RUN_QUOTA_EXCEEDED"), &json!(6))
    );
    let retry_after: Vec<_> = report["reply"]["headers"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|h| h[0] == "retry-after")
        .collect();
    assert_eq!(
        retry_after,
        [&json!(["retry-after", "42"])],
        "to the end of the month that --at is in"
    );
    let report = of("org-1", &[]);
    assert_eq!(report["gates"][0]["outcome"], "opened");
    assert!(
        report["hints"]
            .to_string()
            .contains("no --policy was given: the policy store counts as unavailable")
    );
}

#[test]
fn what_is_not_guarded_or_has_no_envelope_says_why() {
    let config = r#"{"profile": "production", "rules": "contract-limits", "decision": {"upstream": "portcullis"},
        "routes": [{"path_prefix": "/v1/", "methods": ["POST"]}, {"path_prefix": "/v2/"}]}"#;
    let place = Place::with(&[("filter.json", config)]);
    let text = place.text(&["--config", "filter.json", "--path", "/v1/../v1/models"]);
    for expected in [
        "verdict: not guarded\ndecided by: routes (line 2 of filter.json)\n",
        "routes[0] missed: the path matches \"/v1/\", and GET is not among POST\n",
        "routes[1] missed: \"/v1/models\" does not begin with \"/v2/\"\n",
        "upstream: is reached\n",
    ] {
        assert!(text.contains(expected), "{expected:?} is not in\n{text}");
    }
    let text = place.text(&["--config", "filter.json", "-X", "POST", "--path", "/v1/chat"]);
    assert!(
        text.contains("decided by: envelope.when_missing (line ") && text.contains("of rules/contract-limits.json"),
        "{text}"
    );
    assert!(
        text.contains("hint: an envelope is an owner id (x-admission-owner-id) or a limit"),
        "{text}"
    );
    let report = place.json(&[
        "--rules",
        "contract-limits",
        "-H",
        "x-admission-owner-rate-limit-requests: +5",
    ]);
    assert_eq!(
        (&report["code"], &report["decided_by"]["rule"]),
        (&json!("ENVELOPE_MALFORMED"), &Value::Null)
    );
    assert!(
        report["decided_by"]["why"]
            .as_str()
            .unwrap()
            .ends_with("no rule can open that"),
        "{report}"
    );
}

#[test]
fn shadow_mode_lets_the_request_go_on_and_tells_what_enforcing_would_answer() {
    let config = r#"{"profile": "production", "rules": "contract-limits", "mode": "shadow", "decision": {"upstream": "portcullis"},
        "reply": {"limit_headers": "always"}}"#;
    let place = Place::with(&[("filter.json", config)]);
    let request = [
        &[
            "--config",
            "filter.json",
            "-H",
            "x-admission-owner-rate-limit-requests: 2",
        ][..],
        &OWNER,
    ]
    .concat();
    let report = place.json(&[&request[..], &["--times", "3"]].concat());
    assert_eq!(
        (&report["enforced"], &report["upstream"]["reached"], &report["reply"]),
        (&json!(false), &json!(true), &Value::Null)
    );
    assert_eq!(report["shadow_reply"]["status"], 429);
    assert!(
        report["counted"]
            .to_string()
            .contains("portcullis_shadow_rejected_quota_exhausted"),
        "{report}"
    );
    let report = place.json(&request);
    assert!(
        report["upstream"]["response_headers"]
            .to_string()
            .contains("x-ratelimit-remaining-requests"),
        "{report}"
    );
    assert_eq!(
        report["upstream"]["removed"],
        json!(["x-admission-owner-rate-limit-requests", "x-admission-owner-id"])
    );
}

#[test]
fn a_curl_line_from_an_argument_or_standard_input_is_the_request_with_its_body() {
    let config = r#"{"profile": "development", "rules": "fail-closed", "model": {"from": "body"}, "decision": {"upstream": "portcullis"}}"#;
    let place = Place::with(&[("filter.json", config), ("policy.json", POLICY)]);
    let line = "curl -sS https://api.example.com/v1/chat/completions -u me:hunter2 -H 'Authorization: Bearer hunter2' \\\n \
                -H 'x-admission-owner-id: o' -H 'x-admission-org-id: org-1' --json '{\"model\": \"MODEL\"}'";
    let scene = [
        "explain",
        "--json",
        "--config",
        "filter.json",
        "--policy",
        "policy.json",
    ];
    for (model, code) in [("gpt-4o", Value::Null), ("gpt-5", json!("MODEL_NOT_ALLOWED"))] {
        let line = line.replace("MODEL", model);
        let mut command = portcullis(&[]);
        let (_, argued, _) = ended(command.current_dir(place.0.path()).args(scene).arg("--curl").arg(&line));
        let mut command = portcullis(&[]);
        command.current_dir(place.0.path()).args(scene);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(line.as_bytes()).unwrap();
        let piped = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
        for text in [argued, piped] {
            let report: Value = serde_json::from_str(&text).unwrap();
            assert_eq!(
                (&report["code"], &report["request"]["path"]),
                (&code, &json!("/v1/chat/completions")),
                "{report}"
            );
            assert!(!text.contains("hunter2"), "{text}");
        }
    }
}

#[test]
fn a_grpc_call_is_answered_as_grpc_and_a_service_of_another_profile_answers_nobody() {
    let service = r#"{"profile": "development", "listen": "127.0.0.1:1", "limiter": {"url": "memory:"},
        "capacity": {"platform": {"requests": 1}}}"#;
    let production =
        r#"{"profile": "production", "rules": "operator-admission", "decision": {"upstream": "portcullis"}}"#;
    let place = Place::with(&[("service.json", service), ("filter.json", production)]);
    let report = place.json(
        &[
            &[
                "--rules",
                "operator-admission",
                "--service",
                "service.json",
                "--times",
                "2",
            ][..],
            &OWNER,
            &["-H", "content-type: application/grpc"],
        ]
        .concat(),
    );
    assert_eq!(
        (&report["code"], &report["reply"]["status"]),
        (&json!("CAPACITY_EXHAUSTED"), &json!(200))
    );
    assert!(
        report["reply"]["headers"]
            .as_array()
            .unwrap()
            .contains(&json!(["grpc-status", "14"])),
        "{report}"
    );
    assert_eq!(
        report["decided_by"]["source"],
        json!({"path": "capacity.platform.requests", "file": "service.json", "line": 2})
    );
    let report = place.json(&[&["--config", "filter.json", "--service", "service.json"][..], &OWNER].concat());
    assert!(
        report["counted"]
            .to_string()
            .contains("portcullis_bypassed_decision_unavailable"),
        "{report}"
    );
    assert!(
        report["hints"]
            .to_string()
            .contains("the filter's profile is production, the service's is development")
    );
}

#[test]
fn bad_arguments_are_named_with_their_option_and_end_with_2() {
    let faulty = r#"{"profile": "development", "rules": "contract-limit", "decision": {"upstream": ""}}"#;
    let place = Place::with(&[
        ("faulty.json", faulty),
        (
            "counters.json",
            r#"[{"scope": "org", "resource": "requests", "used": 1}]"#,
        ),
        (
            "negative.json",
            r#"[{"scope": "platform", "resource": "requests", "used": -5}]"#,
        ),
    ]);
    for (arguments, faults) in [
        (
            &["--path", "/"][..],
            &["--config FILE or --rules NAME|FILE is needed; the shipped rules are contract-limits, "][..],
        ),
        (
            &["--config", "faulty.json", "--path", "/"],
            &[
                "--config faulty.json: rules: no shipped rule file is named",
                "did you mean \"contract-limits\"?",
                "--config faulty.json: decision.upstream: ",
            ],
        ),
        (
            &["--config", "nowhere.json"],
            &["--config nowhere.json: cannot be read: "],
        ),
        (
            &["--rules", "nowhere"],
            &["--rules \"nowhere\" is no shipped rule file (contract-limits, "],
        ),
        (
            &["--rules", "contract-limits", "--down", "limitr"],
            &[
                "invalid value 'limitr' for '--down <DEPENDENCY>'",
                "a similar value exists: 'limiter'",
            ],
        ),
        (
            &[
                "--rules",
                "contract-limits",
                "--spent",
                "org:g:requests=1@61",
                "--path",
                "/",
            ],
            &["org:g: a window of 60 s can't end in 61 s"],
        ),
        (
            &["--rules", "contract-limits", "--spent", "orgs:g:requests=1"],
            &[
                "invalid value 'orgs:g:requests=1' for '--spent <COUNTER>'",
                "is no scope",
            ],
        ),
        (
            &["--rules", "contract-limits", "--counters", "counters.json"],
            &["--counters counters.json: [0]: the scope \"org\" has 1 ids, not 0"],
        ),
        (
            &["--rules", "contract-limits", "--counters", "negative.json"],
            &["--counters negative.json: [0]: invalid value: integer `-5`, expected u64\n"],
        ),
        (
            &["--rules", "contract-limits", "--counters", "faulty.json"],
            &["--counters faulty.json: must be a list of counters: "],
        ),
        (
            &["--rules", "contract-limits", "--at", "yesterday"],
            &["invalid value 'yesterday' for '--at <TIME>'"],
        ),
        (
            &["--rules", "contract-limits", "-H", "Authorization Bearer hunter2"],
            &["-H \"Authorization\" must be \"Name: value\""],
        ),
        (
            &["--rules", "contract-limits", "--body", "@nowhere"],
            &["--body @nowhere: cannot be read"],
        ),
        (
            &["--rules", "contract-limits", "--path", "v1"],
            &["--path \"v1\" must begin with \"/\""],
        ),
        (
            &["--rules", "contract-limits", "--curl", "curl -F a=b http://h/"],
            &["--curl: the option -F of curl is not understood here"],
        ),
        (
            &[
                "--rules",
                "contract-limits",
                "--after",
                "faulty.json",
                "--path",
                "/",
                "--at",
                "0",
            ],
            &[],
        ),
    ] {
        if faults.is_empty() {
            place.text(arguments);
            continue;
        }
        let err = place.faults(arguments);
        for fault in faults {
            assert!(err.contains(fault), "{fault:?} is not in\n{err}");
        }
        assert!(!err.contains("hunter2"), "{err}");
    }
}

#[test]
fn shipped_rules_that_need_a_model_take_it_from_the_body_without_a_configuration() {
    let place = Place::with(&[("policy.json", POLICY)]);
    for rules in ["fail-closed", "fail-closed-metered"] {
        let asked = [
            "--rules",
            rules,
            "--policy",
            "policy.json",
            "-H",
            "x-admission-org-id: org-1",
        ];
        let asked = [&asked[..], &OWNER, &["--body"]].concat();
        let admitted = place.json(&[&asked[..], &[r#"{"model": "gpt-4o"}"#]].concat());
        assert_eq!(admitted["ending"], "admitted", "{admitted}");
        assert!(
            admitted["hints"].to_string().contains("the model from the body"),
            "{admitted}"
        );
        let denied = place.json(&[&asked[..], &[r#"{"model": "other"}"#]].concat());
        assert_eq!(denied["code"], "MODEL_NOT_ALLOWED", "{denied}");
    }
    let (code, out, err) = ended(portcullis(&[]).args(["replay", "/dev/null", "--rules", "fail-closed"]));
    assert_eq!(code, Some(0), "{out}{err}");
}
