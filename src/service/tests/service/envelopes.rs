//! `portcullis envelope`, and the code of docs/envelope-signature.md in the languages that it is written in.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::process::{ended, file, portcullis};

const SECRET: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
const VARIABLE: &str = "PORTCULLIS_ENVELOPE_SECRET";
const OWNER: &str = "x-admission-owner-id: owner-1";
const SIGNED: &str = "x-admission-signature: v1;key=edge-1;ts=1764000000;sig=\
                      e8e323bd41a13bc6be52695fc8664aa1be90694c514671c610eb22a1196bab33";
/// The first vector of the document.
const REQUEST: [&str; 10] = [
    "--method",
    "POST",
    "--path",
    "/v1/chat/completions",
    "-H",
    OWNER,
    "-H",
    "X-Admission-Org-Id:org-1",
    "-H",
    "x-admission-owner-rate-limit-requests:  30\t",
];

fn envelope(command: &str, settings: &[(&str, &str)], arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut asked = portcullis(settings);
    asked.args(["envelope", command]).args(arguments);
    let answer = ended(&mut asked);
    assert!(
        !answer.1.contains("AAECAwQF") && !answer.2.contains("AAECAwQF"),
        "{answer:?}"
    );
    answer
}

fn verified(arguments: &[&str]) -> (Option<i32>, String) {
    let key = ["--key-id", "edge-1", "--at", "1764000003"];
    let arguments = [&key[..], arguments].concat();
    let (code, out, err) = envelope("verify", &[(VARIABLE, SECRET)], &arguments);
    assert_eq!(err, "");
    (code, out.trim_end().to_owned())
}

#[test]
fn sign_prints_the_header_by_a_secret_of_a_file_of_standard_input_or_of_the_environment() {
    let folder = TempDir::new().unwrap();
    let secret = file(folder.path(), "secret", &format!("{SECRET}\n"));
    let key = ["--key-id", "edge-1", "--at", "1764000000"];
    let expected = format!("{SIGNED}\n");
    let by_file = [&key[..], &["--secret-file", secret.to_str().unwrap()], &REQUEST[..]].concat();
    assert_eq!(
        envelope("sign", &[], &by_file),
        (Some(0), expected.clone(), String::new())
    );
    let by_variable = [&key[..], &REQUEST[..]].concat();
    assert_eq!(
        envelope("sign", &[(VARIABLE, SECRET)], &by_variable),
        (Some(0), expected.clone(), String::new())
    );
    let mut asked = portcullis(&[]);
    asked.args(["envelope", "sign", "--secret-file", "-"]).args(by_variable);
    let mut asked = asked.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    asked.stdin.take().unwrap().write_all(SECRET.as_bytes()).unwrap();
    assert_eq!(
        String::from_utf8(asked.wait_with_output().unwrap().stdout).unwrap(),
        expected
    );
}

#[test]
fn verify_says_valid_or_exactly_why_not() {
    let signed = [&REQUEST[..], &["-H", SIGNED]].concat();
    assert_eq!(
        verified(&signed),
        (Some(0), "valid: signed by edge-1, 3 s ago".to_owned())
    );
    let stale = [&signed[..], &["--max-age-s", "2"]].concat();
    let replaced = |at: usize, with: &'static str| {
        let mut arguments = signed.clone();
        arguments[at] = with;
        arguments
    };
    let altered = "ENVELOPE_UNTRUSTED: altered: the signature by the key \"edge-1\" is not that of this method, path, time \
                   and envelope";
    for (arguments, why) in [
        (
            REQUEST.to_vec(),
            "ENVELOPE_UNTRUSTED: unsigned: there are headers of the envelope and no x-admission-signature",
        ),
        (stale, "ENVELOPE_UNTRUSTED: signed 3 s ago, and 2 are allowed"),
        (replaced(1, "GET"), altered),
        (replaced(3, "/v1/chat/completions?"), altered),
        (replaced(5, "x-admission-owner-id: owner-2"), altered),
        (
            replaced(5, "x_admission_owner_id: owner-1"),
            "ENVELOPE_UNTRUSTED: the header name x_admission_owner_id looks like one of the envelope's, with _ for -",
        ),
        (
            vec!["--path", "/"],
            "ENVELOPE_MISSING: no header under x-admission-: when_missing of the rules decides",
        ),
    ] {
        assert_eq!(verified(&arguments), (Some(1), why.to_owned()), "{arguments:?}");
    }
}

#[test]
fn verify_judges_by_a_filters_configuration_as_the_filter_does() {
    let folder = TempDir::new().unwrap();
    let config = json!({
        "profile": "production", "rules": "fail-closed", "model": {"from": "header"}, "decision": {"upstream": "p"},
        "envelope": {"prefix": "x-saturn-", "signature": {"keys": {"edge-1": {"secret": SECRET}}, "max_age_s": 5}},
    });
    let path = file(folder.path(), "filter.json", &config.to_string());
    let key = [
        "--key-id",
        "edge-1",
        "--prefix",
        "x-saturn-",
        "--at",
        "1764000000",
        "--path",
        "/",
    ];
    let judged = |headers: &[&str], at: &str| {
        let (_, signature, _) = envelope("sign", &[(VARIABLE, SECRET)], &[&key[..], headers].concat());
        let given = [
            "--config",
            path.to_str().unwrap(),
            "--path",
            "/",
            "--at",
            at,
            "-H",
            signature.trim_end(),
        ];
        let (code, out, err) = envelope("verify", &[], &[&given[..], headers].concat());
        assert_eq!(err, "");
        (code, out.trim_end().to_owned())
    };
    let whole = ["-H", "x-saturn-owner-id: o", "-H", "x-saturn-org-id: g"];
    assert_eq!(
        judged(&whole, "1764000005"),
        (Some(0), "valid: signed by edge-1, 5 s ago".to_owned())
    );
    assert_eq!(
        judged(&whole, "1763999999"),
        (Some(0), "valid: signed by edge-1, 1 s ahead of this clock".to_owned())
    );
    assert_eq!(
        judged(&whole, "1764000006"),
        (
            Some(1),
            "ENVELOPE_UNTRUSTED: signed 6 s ago, and 5 are allowed".to_owned()
        )
    );
    assert_eq!(
        judged(&whole[..2], "1764000000"),
        (
            Some(1),
            "ENVELOPE_PARTIAL: well signed, and no x-saturn-org-id, which a listed gate needs".to_owned()
        )
    );
    let malformed = [&whole[..], &["-H", "x-saturn-owner-rate-limit-requests: 05"]].concat();
    let (code, why) = judged(&malformed, "1764000000");
    assert!(
        code == Some(1) && why.starts_with("ENVELOPE_MALFORMED: well signed, and x-saturn-owner-rate-limit"),
        "{why}"
    );
    let (code, why) = judged(&[], "1764000000");
    assert!(
        code == Some(1) && why.starts_with("ENVELOPE_MISSING: well signed, and no owner id or limit"),
        "{why}"
    );
}

#[test]
fn a_fault_of_the_arguments_is_exit_code_2_and_tells_no_secret() {
    let folder = TempDir::new().unwrap();
    let plain = file(
        folder.path(),
        "filter.json",
        r#"{"profile": "staging", "rules": "contract-limits", "decision": {"upstream": "p"}}"#,
    );
    let plain = plain.to_str().unwrap();
    let key = ["--key-id", "k", "--path", "/"];
    for (command, secret, arguments, why) in [
        (
            "sign",
            None,
            key.to_vec(),
            "no secret: give --secret-file FILE (- for standard input) or PORTCULLIS_ENVELOPE_SECRET",
        ),
        (
            "sign",
            Some("hunter2!"),
            key.to_vec(),
            "PORTCULLIS_ENVELOPE_SECRET: must be base64 (with + and /, padded or not); its value is not shown",
        ),
        (
            "sign",
            Some("aHVudGVyMg=="),
            key.to_vec(),
            "PORTCULLIS_ENVELOPE_SECRET: must be 32 to 1024 bytes once decoded, is 7: `openssl rand -base64 32` makes one",
        ),
        (
            "sign",
            Some(SECRET),
            vec!["--key-id", SECRET, "--path", "/"],
            "--key-id: must be 1 to 32 letters, digits, \".\", \"_\" or \"-\"; it is not shown",
        ),
        (
            "sign",
            Some(SECRET),
            vec!["--key-id", "k", "--path", "v1"],
            "--path: must start with \"/\", is \"v1\"",
        ),
        (
            "sign",
            Some(SECRET),
            [&key[..], &["-H", "no colon"]].concat(),
            "--header: must be \"name: value\", is \"no colon\"",
        ),
        (
            "sign",
            Some(SECRET),
            [&key[..], &["-H", OWNER, "-H", OWNER]].concat(),
            "x-admission-owner-id stands twice: what would be refused is not signed",
        ),
        (
            "sign",
            Some(SECRET),
            [&key[..], &["-H", SIGNED]].concat(),
            "x-admission-signature stands twice: what would be refused is not signed",
        ),
        (
            "sign",
            None,
            [&key[..], &["--secret-file", "no/such"]].concat(),
            "no/such: cannot be read: No such file or directory (os error 2)",
        ),
        (
            "verify",
            None,
            vec!["--config", plain, "--path", "/"],
            "has no envelope.signature, so that every envelope is trusted",
        ),
    ] {
        let settings: Vec<(&str, &str)> = secret.iter().map(|secret| (VARIABLE, *secret)).collect();
        let (code, out, err) = envelope(command, &settings, &arguments);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{err}");
        assert!(err.ends_with(&format!("{why}\n")), "{err}\nis not {why}");
        assert!(!err.contains("hunter2") && !err.contains("aHVudGVy"), "{err}");
    }
}

#[test]
fn the_help_of_envelope_teaches() {
    let (code, out, _) = envelope("sign", &[], &["--help"]);
    assert_eq!(code, Some(0));
    assert!(
        out.contains("openssl rand -base64 32") && out.contains("never from an argument"),
        "{out}"
    );
    let (_, out, _) = envelope("verify", &[], &["--help"]);
    assert!(out.contains("or exactly why not") && out.contains("--config"), "{out}");
}

/// The first block of a language after a heading.
fn block<'a>(document: &'a str, after: &str, language: &str) -> &'a str {
    let (_, rest) = document.split_once(after).unwrap();
    let (_, rest) = rest.split_once(&format!("```{language}\n")).unwrap();
    rest.split_once("```").unwrap().0
}

fn document() -> String {
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/envelope-signature.md");
    fs::read_to_string(path).unwrap()
}

/// Runs the document's code in another language over the document's vectors.
fn signed_by(program: &str, name: &str, code: &str, vectors: &Value) -> Vec<String> {
    let folder = TempDir::new().unwrap();
    let script = file(folder.path(), name, code);
    let output = Command::new(program).arg(script).arg(vectors.to_string()).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(str::to_owned)
        .collect()
}

#[test]
fn the_documents_python_and_javascript_sign_its_vectors() {
    let document = document();
    let vectors: Value = serde_json::from_str(block(&document, "## Test vectors", "json")).unwrap();
    let expected: Vec<String> = vectors
        .as_array()
        .unwrap()
        .iter()
        .map(|vector| {
            format!(
                "{}signature {}",
                vector["prefix"].as_str().unwrap(),
                vector["signature"].as_str().unwrap()
            )
        })
        .collect();
    assert_eq!(expected.len(), 4);
    let python = block(&document, "# Signed envelopes", "python").to_owned()
        + "\nimport json, sys\nfor v in json.loads(sys.argv[1]):\n    print(*sign(v['secret'], v['key'], v['seconds'], \
           v['method'], v['path'], v['headers'], v['prefix']))\n";
    assert_eq!(signed_by("python3", "sign.py", &python, &vectors), expected);
    let javascript = block(&document, "# Signed envelopes", "js").to_owned()
        + "\nfor (const v of JSON.parse(process.argv[2]))\n  console.log(...sign(v.secret, v.key, v.seconds, v.method, \
           v.path, v.headers, v.prefix));\n";
    assert_eq!(signed_by("node", "sign.mjs", &javascript, &vectors), expected);
}

#[test]
fn the_documents_configuration_has_no_fault() {
    let folder = TempDir::new().unwrap();
    let config = block(&document(), "# Signed envelopes", "json").to_owned();
    let path = file(folder.path(), "filter.json", &config);
    let (code, out, err) = ended(portcullis(&[]).arg("check").arg(path));
    assert_eq!((code, err.as_str()), (Some(0), ""));
    assert!(out.ends_with(": ok (filter configuration)\n"), "{out}");
}

#[test]
fn what_the_configuration_would_refuse_is_refused_here_in_its_words() {
    let refused = |command, arguments: &[&str], says: &str| {
        let arguments = [&["--path", "/"], arguments].concat();
        let (code, out, err) = envelope(command, &[(VARIABLE, SECRET)], &arguments);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{arguments:?}");
        assert!(err.contains(says), "{says} is not in {err}");
    };
    let key = ["--key-id", "edge-1"];
    for command in ["sign", "verify"] {
        refused(command, &[], "--key-id ID is needed\n");
        refused(command, &["--key-id", ""], "--key-id: must be 1 to ");
        for prefix in ["X-Foo", "X-Foo-", "x-foo", "-", ""] {
            let says = format!(
                "--prefix: must be 2 to 64 lower-case header-name characters that end in \"-\", is {prefix:?}\n"
            );
            refused(command, &[&key[..], &["--prefix", prefix]].concat(), &says);
        }
    }
    for age in ["0", "3601", "999999999"] {
        refused(
            "verify",
            &[&key[..], &["--max-age-s", age]].concat(),
            &format!("{age} is not in 1..=3600"),
        );
    }
}
