//! A headless Chromium for tests, spoken to over two pipes in its debugging protocol (`--remote-debugging-pipe`): no port that
//! others could reach, and nothing that has to be downloaded.
//!
//! Left out on purpose: what is looked at with it.
#![allow(dead_code, reason = "every test binary uses a part of it")]

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::unix::pipe;
use tokio::time::{Instant, sleep, timeout};

use crate::stores::is_installed;

/// A browser on a busy machine takes its time.
const PATIENCE: Duration = Duration::from_secs(60);

/// A browser with one page.
pub(crate) struct Chromium {
    child: Child,
    _folder: TempDir,
    to: pipe::Sender,
    from: BufReader<pipe::Receiver>,
    next: u64,
    session: Option<String>,
    /// Addresses that the page has asked for.
    pub(crate) asked: Vec<String>,
}

impl Drop for Chromium {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Chromium {
    /// Starts it; `None` where it is not installed.
    pub(crate) async fn start() -> Option<Self> {
        if !is_installed("chromium") {
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let [to, from] = ["in", "out"].map(|name| folder.path().join(name));
        let made = Command::new("mkfifo").args([&to, &from]).status();
        assert!(made.is_ok_and(|status| status.success()), "mkfifo makes no pipes");
        let options = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-extensions \
                       --disable-component-update --disable-background-networking --remote-debugging-pipe";
        let line =
            format!("exec chromium {options} --user-data-dir=\"$1/profile\" about:blank 3<>\"$1/in\" 4<>\"$1/out\"");
        let child = Command::new("sh")
            .args(["-c", &line, "sh"])
            .arg(folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("sh starts");
        let from = pipe::OpenOptions::new().open_receiver(&from).unwrap();
        let end = Instant::now() + PATIENCE;
        let to = loop {
            // There is no reader before the browser has opened it.
            match pipe::OpenOptions::new().open_sender(&to) {
                Ok(to) => break to,
                Err(error) => assert!(Instant::now() < end, "{error}"),
            }
            sleep(Duration::from_millis(10)).await;
        };
        let mut chromium = Self {
            child,
            _folder: folder,
            to,
            from: BufReader::new(from),
            next: 1,
            session: None,
            asked: Vec::new(),
        };
        let page = chromium
            .call("Target.createTarget", json!({"url": "about:blank"}))
            .await;
        let attached = json!({"targetId": page["targetId"], "flatten": true});
        let attached = chromium.call("Target.attachToTarget", attached).await;
        chromium.session = attached["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page.enable", "Runtime.enable", "Network.enable"] {
            chromium.call(domain, json!({})).await;
        }
        Some(chromium)
    }

    /// Runs a command of the protocol, and notes what the page asks for meanwhile.
    pub(crate) async fn call(&mut self, method: &str, parameters: Value) -> Value {
        let id = self.next;
        self.next += 1;
        let mut message = json!({"id": id, "method": method, "params": parameters});
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        let text = message.to_string() + "\0";
        self.to.write_all(text.as_bytes()).await.expect("the browser reads");
        loop {
            let mut bytes = Vec::new();
            let read = timeout(PATIENCE, self.from.read_until(0, &mut bytes)).await;
            read.unwrap_or_else(|_| panic!("the browser does not answer {method}"))
                .unwrap();
            bytes.pop();
            let said: Value = serde_json::from_slice(&bytes).expect("the browser speaks JSON");
            if said["method"] == "Network.requestWillBeSent" {
                self.asked
                    .extend(said["params"]["request"]["url"].as_str().map(str::to_owned));
            }
            if said["id"] == id {
                assert!(said["error"].is_null(), "{method}: {said}");
                return said["result"].clone();
            }
        }
    }

    /// The size of the window, and whether it is dark.
    pub(crate) async fn looks(&mut self, width: u32, height: u32, is_dark: bool) {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600});
        self.call("Emulation.setDeviceMetricsOverride", size).await;
        let scheme = if is_dark { "dark" } else { "light" };
        let media = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.call("Emulation.setEmulatedMedia", media).await;
    }

    /// Goes to an address.
    pub(crate) async fn open(&mut self, address: &str) {
        let went = self.call("Page.navigate", json!({"url": address})).await;
        assert!(went["errorText"].is_null(), "{address}: {went}");
    }

    /// The value of an expression in the page.
    pub(crate) async fn value(&mut self, expression: &str) -> Value {
        let asked = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let said = self.call("Runtime.evaluate", asked).await;
        assert!(said["exceptionDetails"].is_null(), "{expression}: {said}");
        said["result"]["value"].clone()
    }

    /// Asks until an expression has this value; how long that took.
    pub(crate) async fn becomes(&mut self, expression: &str, expected: Value) -> Duration {
        let start = Instant::now();
        loop {
            let value = self.value(expression).await;
            if value == expected {
                return start.elapsed();
            }
            if start.elapsed() > PATIENCE / 2 {
                let page = self.value("document.body.innerText").await;
                panic!(
                    "{expression} is {value}, not {expected}, in the page:\n{}",
                    page.as_str().unwrap_or_default()
                );
            }
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// A picture of the whole page, written to `file`.
    pub(crate) async fn picture(&mut self, file: &Path) {
        use base64ct::{Base64, Encoding as _};
        let size = self.call("Page.getLayoutMetrics", json!({})).await["cssContentSize"].clone();
        let clip = json!({"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1});
        let taken = json!({"format": "png", "captureBeyondViewport": true, "clip": clip});
        let taken = self.call("Page.captureScreenshot", taken).await;
        let png = Base64::decode_vec(taken["data"].as_str().unwrap()).unwrap();
        assert!(
            png.starts_with(b"\x89PNG") && png.len() > 10_000,
            "{} bytes are no picture of it",
            png.len()
        );
        std::fs::write(file, png).unwrap();
    }
}
