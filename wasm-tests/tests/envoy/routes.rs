//! Which requests are guarded. A blocked owner tells: 429 where the filter guards, 200 where it doesn't. Envoy's own path
//! normalisation is off, so every spelling reaches the filter as it was sent.

use portcullis_wasm_tests::{Call, Decision, Envelope, GatewayPlan};
use serde_json::json;

use crate::expect::{RATE_LIMITED, refused, served};
use crate::world::{Scripted, strict};

fn blocked(method: &str, path: &str) -> Call {
    Call::new(method, path).envelope(&Envelope::owner("o").requests("owner", 0))
}

async fn check(change: impl FnOnce(GatewayPlan) -> GatewayPlan, guarded: &[(&str, &str)], free: &[(&str, &str)]) {
    let deny = json!({"code": "RATE_LIMITED", "gate": "contract", "retry_after_s": 60});
    let mut world = Scripted::with(strict(), Decision::Deny(deny), |plan| change(plan.paths_as_received())).await;
    for (method, path) in guarded {
        let answer = world.gateway.call(&blocked(method, path)).await;
        assert_eq!(answer.status, 429, "{method} {path} has to be guarded");
        if *method != "HEAD" {
            refused(&answer, RATE_LIMITED);
        }
    }
    assert_eq!(world.upstream.hits(), 0);
    for (method, path) in free {
        let answer = world.gateway.call(&blocked(method, path)).await;
        assert_eq!(answer.status, 200, "{method} {path} is not guarded");
        served(&answer);
    }
    assert_eq!(world.upstream.hits(), free.len());
    world.gateway.assert_sound();
}

#[tokio::test(flavor = "multi_thread")]
async fn without_routes_everything_but_options_is_guarded() {
    let guarded = [
        ("GET", "/"),
        ("POST", "/v1/x"),
        ("DELETE", "/any?q=1"),
        ("PATCH", "/a/b"),
        ("HEAD", "/"),
    ];
    check(|plan| plan, &guarded, &[("OPTIONS", "/"), ("OPTIONS", "/v1/x")]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn routes_match_the_path_whatever_its_spelling() {
    let routes = json!({"routes": [{"path_prefix": "/v1/", "methods": ["POST"]}]});
    let guarded = [
        "/v1/x",
        "/v1/x?y=/v2",
        "//v1/x",
        "/v1//x",
        "/v1/./x",
        "/./v1/x",
        "/v2/../v1/x",
        "/%76%31/x",
        "/v1%2Fx",
        "/v2/%2e%2e/v1/x",
        "/v2/%2E./v1/x",
        "/v1/%zz",
        "/%zz",
        "/v2/%",
        "/%ff",
    ];
    let guarded: Vec<_> = guarded.iter().map(|path| ("POST", *path)).collect();
    let free = [
        ("GET", "/v1/x"),
        ("POST", "/v2/x"),
        ("POST", "/v1x"),
        ("POST", "/v1/../v2"),
        ("POST", "/v2?a=/v1/"),
    ];
    check(|plan| plan.plugin(routes), &guarded, &free).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_not_guarded_keeps_its_envelope_to_itself() {
    let routes = json!({"routes": [{"path_prefix": "/v1/"}]});
    let world = Scripted::with(strict(), Decision::Admit, |plan| plan.plugin(routes)).await;
    served(&world.gateway.call(&blocked("GET", "/free")).await);
    served(
        &world
            .gateway
            .call(&Call::get("/free").header("x-admission-owner-rate-limit-requests", "bad"))
            .await,
    );
    assert_eq!((world.upstream.hits(), world.decision.decides().len()), (2, 0));
}
