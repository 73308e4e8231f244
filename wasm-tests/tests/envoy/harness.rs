//! The harness against an Envoy without the filter: what the other modules rely on.

use portcullis_wasm_tests::{Call, Connection, Envelope, Gateway, GatewayPlan, Http2, Reply, Upstream};

async fn plain(upstream: &Upstream) -> Gateway {
    GatewayPlan::new("contract-limits", upstream.address)
        .without_filter()
        .upstream_http2()
        .start()
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_pass_and_are_counted() {
    let upstream = Upstream::start().await;
    let mut gateway = plain(&upstream).await;
    let envelope = Envelope::owner("o").requests("owner", 3);
    let answer = gateway
        .call(
            &Call::post("/v1/a?b=c", "hello")
                .envelope(&envelope)
                .header("x-raw", [0xC0, 0xA7]),
        )
        .await;
    assert_eq!((answer.status, answer.text().as_str()), (200, "served"));
    assert_eq!(upstream.hits(), 1);
    let seen = upstream.last();
    assert_eq!(
        (seen.method.as_str(), seen.path.as_str(), seen.body.as_slice()),
        ("POST", "/v1/a?b=c", &b"hello"[..])
    );
    assert_eq!(seen.headers["x-admission-owner-rate-limit-requests"], "3");
    let answer = gateway.call(&Call::get("/").header("x-route", "special")).await;
    assert_eq!(answer.header("x-by-header"), Some("yes"));
    assert_eq!(gateway.metric("portcullis_admitted").await, None);
    assert!(gateway.envoy_stat("http.ingress.downstream_rq_2xx").await >= 2);
    gateway.assert_sound();
    gateway.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_connection_carries_several_requests_and_heads_and_resets() {
    let upstream = Upstream::start().await;
    let gateway = plain(&upstream).await;
    let mut connection = Connection::open(gateway.address()).await;
    assert_eq!(connection.call(&Call::new("HEAD", "/")).await.status, 200);
    upstream.reply(Reply {
        status: 204,
        body: String::new(),
        ..Reply::default()
    });
    assert_eq!(connection.call(&Call::get("/")).await.status, 204);
    upstream.reply(Reply {
        hold: true,
        ..Reply::default()
    });
    connection.send(&Call::get("/").bytes()).await;
    upstream.await_hits(3).await;
    connection.reset();
    upstream.release();
    assert_eq!(gateway.call(&Call::get("/")).await.text(), "served");
}

#[tokio::test(flavor = "multi_thread")]
async fn http2_carries_trailers_and_resets() {
    let upstream = Upstream::start().await;
    let gateway = plain(&upstream).await;
    let client = Http2::open(gateway.address()).await;
    upstream.reply(Reply {
        trailers: vec![("grpc-status".into(), "0".into())],
        ..Reply::default()
    });
    let answer = client.call(&Call::post("/s/m", "ping").trailer("x-end", "yes")).await;
    assert_eq!(
        (answer.status, answer.text().as_str(), answer.trailer("grpc-status")),
        (200, "served", Some("0"))
    );
    assert_eq!(upstream.last().trailers["x-end"], "yes");
    upstream.reply(Reply {
        stream: true,
        ..Reply::default()
    });
    let mut open = client.begin(&Call::get("/"), false).await;
    assert_eq!(open.head().await, 200);
    open.reset();
    upstream.release();
    assert_eq!(client.call(&Call::get("/")).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_tests_send_is_refused_by_nobody_else() {
    let upstream = Upstream::start().await;
    let plan = GatewayPlan::new("contract-limits", upstream.address)
        .without_filter()
        .paths_as_received();
    let gateway = plan.start().await;
    let long = "i".repeat(257);
    let values: [&[u8]; 8] = [
        b"",
        b"  ",
        b"a\tb",
        b"a\xC0\xA7b",
        b"5, 5",
        b"\"5\"",
        "\u{665}".as_bytes(),
        long.as_bytes(),
    ];
    for value in values {
        let answer = gateway
            .call(&Call::get("/").header("x-odd", value).header("x-odd", value))
            .await;
        assert_eq!(answer.status, 200, "{value:?}");
    }
    for path in [
        "//v1/x",
        "/v2/../v1/x",
        "/%76%31/x",
        "/v1%2Fx",
        "/v1/%zz",
        "/v2/%",
        "/%ff",
        "/v1/?a=/../b",
    ] {
        let answer = gateway.call(&Call::new("POST", path)).await;
        assert_eq!((answer.status, upstream.last().path.as_str()), (200, path));
    }
}
