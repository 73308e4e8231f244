//! Which model a request names: read from its body or path without doubt, judged by the policy, and forwarded byte for byte
//! as it was judged.

use portcullis_wasm_tests::{
    Answer, Call, Connection, Envelope, Gateway, GatewayPlan, Http2, Provider, Service, development_service,
};
use serde_json::{Value, json};
use tempfile::NamedTempFile;

use crate::backed::patient;
use crate::expect::{Refusal, refused};
use crate::llm_world::post;

const fn unreadable(status: u16, code: &'static str) -> Refusal {
    Refusal {
        status,
        code,
        class: "request_malformed",
        retry_after: None,
        message: None,
    }
}

pub(crate) const MODEL_REQUIRED: Refusal = unreadable(400, "MODEL_REQUIRED");
pub(crate) const MODEL_AMBIGUOUS: Refusal = unreadable(400, "MODEL_AMBIGUOUS");
pub(crate) const BODY_UNREADABLE: Refusal = unreadable(400, "BODY_UNREADABLE");
pub(crate) const BODY_TOO_LARGE: Refusal = unreadable(413, "BODY_TOO_LARGE");
const MODEL_NOT_ALLOWED: Refusal = crate::backed::MODEL_NOT_ALLOWED;

const CHAT: &str = "/v1/chat/completions";

/// The policy judges models: `good` and Gemini's are allowed and served.
pub(crate) struct Judged {
    pub(crate) gateway: Gateway,
    pub(crate) provider: Provider,
    _service: Service,
    _policy: NamedTempFile,
}

impl Judged {
    pub(crate) async fn start(model: Value, change: impl FnOnce(GatewayPlan) -> GatewayPlan) -> Self {
        let policy = NamedTempFile::with_suffix(".json").expect("a temporary file");
        let text = json!({
            "providers": {"good": "openai", "gemini-*": "google", "good-too": "openai"},
            "plans": {"team": {}},
            "orgs": {"g": {"status": "active", "plan": "team", "models": ["good", "gemini-*", "good-too"]}}
        });
        std::fs::write(policy.path(), text.to_string()).expect("the policy can be written");
        let mut config = development_service(Value::Null);
        config["policy"] = json!({"url": format!("file:{}", policy.path().display())});
        let (service, provider) = tokio::join!(Service::start(config), Provider::start());
        let plan = GatewayPlan::new("fail-closed", provider.address).decision(service.address);
        let plan = plan
            .patient_connects()
            .plugin(patient())
            .plugin(json!({"model": {"from": "body"}}))
            .plugin(json!({"model": model}));
        Self {
            gateway: change(plan).start().await,
            provider,
            _service: service,
            _policy: policy,
        }
    }

    /// The provider got exactly these bytes.
    #[track_caller]
    pub(crate) fn forwarded(&self, answer: &Answer, body: &[u8], before: usize) {
        assert_eq!(
            (answer.status, self.provider.hits()),
            (200, before + 1),
            "{:.200} {}",
            String::from_utf8_lossy(body),
            answer.text()
        );
        assert!(self.provider.last_body() == body, "other bytes than the client's");
    }

    pub(crate) async fn passes(&self, path: &str, body: impl AsRef<[u8]>) {
        let before = self.provider.hits();
        let answer = self.gateway.call(&call(path, body.as_ref())).await;
        self.forwarded(&answer, body.as_ref(), before);
    }

    /// Refused so, and the provider saw nothing.
    pub(crate) async fn refuses(&self, call: &Call, refusal: Refusal) {
        let before = self.provider.hits();
        let answer = self.gateway.call(call).await;
        assert_eq!(answer.code(), refusal.code, "{call:?}: {}", answer.text());
        refused(&answer, refusal);
        assert_eq!(self.provider.hits(), before, "{call:?}");
    }
}

pub(crate) fn envelope() -> Envelope {
    Envelope::owner("o").org("g")
}

fn call(path: &str, body: impl Into<Vec<u8>>) -> Call {
    post(path, body).envelope(&envelope())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_model_is_what_the_body_or_the_path_names() {
    let mut world = Judged::start(json!({}), |plan| plan).await;
    for path in [
        CHAT,
        "/v1/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/messages",
    ] {
        world.passes(path, r#"{"model":"good"}"#).await;
        world
            .refuses(&call(path, r#"{"model":"bad"}"#), MODEL_NOT_ALLOWED)
            .await;
        world.refuses(&call(path, r#"{"input":"x"}"#), MODEL_REQUIRED).await;
    }
    world
        .passes("/v1beta/models/gemini-x:generateContent", r#"{"contents":[]}"#)
        .await;
    world
        .passes(
            "/v1beta/models/gemini-x:generateContent",
            r#"{"model":"models/gemini-x"}"#,
        )
        .await;
    let other = call("/v1beta/models/other:generateContent", r#"{"contents":[]}"#);
    world.refuses(&other, MODEL_NOT_ALLOWED).await;
    let both = call("/v1beta/models/gemini-x:generateContent", r#"{"model":"good"}"#);
    world.refuses(&both, MODEL_AMBIGUOUS).await;
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_two_readers_might_read_differently_is_refused() {
    let mut world = Judged::start(json!({}), |plan| plan).await;
    let bodies = [
        (r#"{"model":"good","model":"bad"}"#, MODEL_AMBIGUOUS),
        (r#"{"model":"good","model":"good"}"#, MODEL_AMBIGUOUS),
        (r#"{"model":"good","mod\u0065l":"bad"}"#, MODEL_AMBIGUOUS),
        (r#"{"mod\u0065l":"bad","x":[],"model":"good"}"#, MODEL_AMBIGUOUS),
        (r#"{"model":"good","Model":"bad"}"#, MODEL_AMBIGUOUS),
        (r#"{"mod\u0065l":"bad"}"#, MODEL_NOT_ALLOWED),
        (r#"{"model":"good "}"#, MODEL_NOT_ALLOWED),
        (r#"{"model":"GOOD"}"#, MODEL_NOT_ALLOWED),
        (r#"{"model":null}"#, MODEL_REQUIRED),
        (r#"{"model":""}"#, MODEL_REQUIRED),
        (r#"{"messages":[{"model":"good"}]}"#, MODEL_REQUIRED),
        (r"{}", MODEL_REQUIRED),
        (r#"{"model":5}"#, BODY_UNREADABLE),
        (r#"{"model":["good"]}"#, BODY_UNREADABLE),
        (r#"{"model":"go\u0000od"}"#, BODY_UNREADABLE),
        (r#"{"model":"good""#, BODY_UNREADABLE),
        (r#"{"model":"good"} x"#, BODY_UNREADABLE),
        (r#"{"model":"good"}{"model":"bad"}"#, BODY_UNREADABLE),
        (r#"{"model":"good",}"#, BODY_UNREADABLE),
        (r#"{'model':'good'}"#, BODY_UNREADABLE),
        (r#"[{"model":"good"}]"#, BODY_UNREADABLE),
        (r#""good""#, BODY_UNREADABLE),
        ("\u{FEFF}{\"model\":\"good\"}", BODY_UNREADABLE),
        ("model=good", BODY_UNREADABLE),
        (" ", BODY_UNREADABLE),
    ];
    for (body, refusal) in bodies {
        world.refuses(&call(CHAT, body), refusal).await;
    }
    let bytes = [&b"{\"model\":\"good\",\"x\":\""[..], b"\xC0\xA7", b"\"}"].concat();
    world.refuses(&call(CHAT, bytes), BODY_UNREADABLE).await;
    let deep = format!("{{\"model\":\"good\",\"x\":{}{}}}", "[".repeat(200), "]".repeat(200));
    world.refuses(&call(CHAT, deep), BODY_UNREADABLE).await;
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_content_type_changes_nothing() {
    let world = Judged::start(json!({}), |plan| plan).await;
    for kind in [
        "application/json",
        "text/plain",
        "multipart/form-data; boundary=x",
        "application/x-www-form-urlencoded",
        "",
    ] {
        let typed = |body: &str| {
            Call::post(CHAT, body)
                .envelope(&envelope())
                .header("content-type", kind)
        };
        let before = world.provider.hits();
        let body = r#"{"model":"good"}"#;
        let answer = world.gateway.call(&typed(body)).await;
        world.forwarded(&answer, body.as_bytes(), before);
        world.refuses(&typed(r#"{"model":"bad"}"#), MODEL_NOT_ALLOWED).await;
        world.refuses(&typed("--x\r\n\r\ngood\r\n--x--"), BODY_UNREADABLE).await;
    }
    let packed = [0x1F, 0x8B, 8, 0, 0, 0, 0, 0, 0, 3, 1, 2, 3];
    let call = call(CHAT, packed).header("content-encoding", "gzip");
    world.refuses(&call, BODY_UNREADABLE).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn odd_json_is_forwarded_byte_for_byte() {
    let mut world = Judged::start(json!({}), |plan| plan).await;
    let odd = [
        " \r\n\t{ \"model\" :\r\n\"good\"\t}\r\n ".to_owned(),
        r#"{"mod\u0065l":"g\u006Fod"}"#.to_owned(),
        r#"{"a":1,"a":2,"b":{"c":1,"c":2},"model":"good"}"#.to_owned(),
        r#"{"model":"good","x":1.0000000000000000000000000001e+5,"y":-0,"z":1E400}"#.to_owned(),
        "{\"model\":\"good\",\"x\":\"\u{1F642}\u{7F}\u{2028}\\/\\ud83d\\ude42\"}".to_owned(),
        format!(
            r#"{{"model":"good","{}":"{}"}}"#,
            "k".repeat(5_000),
            "v\\n".repeat(5_000)
        ),
        format!(r#"{{"x":{}1{},"model":"good"}}"#, "[".repeat(100), "]".repeat(100)),
        r#"{"model":"good","stream":true,"messages":[{"role":"user","content":"model"}]}"#.to_owned(),
    ];
    for body in odd {
        let before = world.provider.hits();
        let answer = world.gateway.call(&call(CHAT, body.clone())).await;
        // The provider itself refuses what its own reader can't take; what counts is what it was sent.
        assert_eq!(answer.header("x-portcullis-class"), None, "{}", answer.text());
        assert_eq!(world.provider.hits(), before + 1, "{body:.100}");
        assert!(world.provider.last_body() == body.as_bytes(), "{body:.100}");
    }
    world.gateway.assert_sound();
}

fn chunked(pieces: &[&[u8]]) -> Vec<Vec<u8>> {
    let framed = pieces
        .iter()
        .map(|piece| [format!("{:x}\r\n", piece.len()).as_bytes(), piece, b"\r\n"].concat());
    framed.chain([b"0\r\n\r\n".to_vec()]).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_may_come_in_any_pieces() {
    let mut world = Judged::start(json!({}), |plan| plan).await;
    let text = "{\"messages\":[{\"content\":\"\u{1F642} one\"}],\"mod\\u0065l\":\"good\"}";
    let body = text.as_bytes();
    let head = Call::new("POST", CHAT)
        .envelope(&envelope())
        .header("transfer-encoding", "chunked")
        .head();
    for size in [1, 2, 7, 23, body.len()] {
        let before = world.provider.hits();
        let mut connection = Connection::open(world.gateway.address()).await;
        connection.send(&head).await;
        for piece in chunked(&body.chunks(size).collect::<Vec<_>>()) {
            connection.send(&piece).await;
            tokio::task::yield_now().await;
        }
        let answer = connection.answer("POST").await;
        world.forwarded(&answer, body, before);
    }
    let client = Http2::open(world.gateway.address()).await;
    for size in [1, 11, body.len()] {
        let before = world.provider.hits();
        let mut stream = client.begin(&call(CHAT, body), true).await;
        for piece in body.chunks(size) {
            stream.data(piece, false);
            tokio::task::yield_now().await;
        }
        stream.data(&[], true);
        world.forwarded(&stream.answer().await, body, before);
    }
    // Trailers end a body too.
    let before = world.provider.hits();
    let answer = client.call(&call(CHAT, body).trailer("x-end", "yes")).await;
    world.forwarded(&answer, body, before);
    let before = world.provider.hits();
    for trailer in [false, true] {
        let bad = call(CHAT, r#"{"model":"bad"}"#);
        let bad = if trailer { bad.trailer("x-end", "yes") } else { bad };
        refused(&client.call(&bad).await, MODEL_NOT_ALLOWED);
    }
    assert_eq!(world.provider.hits(), before);
    world.gateway.assert_sound();
}

/// A request of exactly this many bytes.
fn of_length(bytes: usize) -> String {
    let body = |filling: usize| format!(r#"{{"x":"{}","model":"good"}}"#, "y".repeat(filling));
    body(bytes - body(0).len())
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_up_to_the_limit_pass_whole_and_longer_ones_are_too_large() {
    let world = Judged::start(json!({}), |plan| plan).await;
    for length in [900_000, 1_048_576] {
        let body = of_length(length);
        world.passes(CHAT, &body).await;
        let before = world.provider.hits();
        let client = Http2::open(world.gateway.address()).await;
        let answer = client.call(&call(CHAT, body.clone())).await;
        world.forwarded(&answer, body.as_bytes(), before);
    }
    world.refuses(&call(CHAT, of_length(1_048_577)), BODY_TOO_LARGE).await;
    drop(world);

    let mut small = Judged::start(json!({"max_body_bytes": 1000}), |plan| plan).await;
    small.passes(CHAT, of_length(1_000)).await;
    small.refuses(&call(CHAT, of_length(1_001)), BODY_TOO_LARGE).await;
    small.refuses(&call(CHAT, of_length(200_000)), BODY_TOO_LARGE).await;
    // Without a length the limit is met on the way, and faults are told in the order of the bytes.
    let mut connection = Connection::open(small.gateway.address()).await;
    let head = Call::new("POST", CHAT)
        .envelope(&envelope())
        .header("transfer-encoding", "chunked")
        .head();
    connection.send(&head).await;
    for piece in chunked(&of_length(1_001).as_bytes().chunks(100).collect::<Vec<_>>()) {
        connection.send(&piece).await;
    }
    refused(&connection.answer("POST").await, BODY_TOO_LARGE);
    assert_eq!(small.provider.hits(), 1);
    small.gateway.assert_sound();
}
