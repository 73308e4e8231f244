//! Flapping, and what is ready.

use portcullis_decision::config::Environment;

use super::*;

#[test]
fn one_result_against_the_state_changes_nothing_and_two_in_a_row_do() {
    let mut hysteresis = Hysteresis::default();
    assert!(hysteresis.take(true), "the first success counts at once");
    let states = [false, true, false, false, true, false, true, true].map(|good| hysteresis.take(good));
    assert_eq!(states, [true, true, true, false, false, false, false, true]);
}

#[test]
fn a_dependency_that_fails_at_the_start_needs_two_successes() {
    let mut hysteresis = Hysteresis::default();
    assert_eq!(
        [false, true, true].map(|good| hysteresis.take(good)),
        [false, false, true]
    );
}

fn readiness(text: &str, limiter: Option<&dyn Limiter>) -> Readiness {
    let config = ServiceConfig::parse(text.as_bytes(), &Environment::default()).unwrap();
    Readiness::new(&config, limiter, Arc::default())
}

#[test]
fn only_a_shared_limiter_that_answers_is_ready() {
    let text = r#"{"profile": "development", "listen": "127.0.0.1:0"}"#;
    let memory = crate::limiter::memory::MemoryLimiter::default();
    let embedded = readiness(text, Some(&memory));
    assert_eq!(embedded.report().1["dependencies"]["limiter"]["state"], "embedded");
    assert!(!embedded.report().0);
    let state = readiness(text, None);
    assert_eq!(state.report().1["dependencies"]["limiter"]["state"], "absent");
    state.dependency_is(Dependency::Limiter, true, "answers".to_owned());
    assert!(state.report().0);
    state.dependency_is(Dependency::Limiter, false, "no answer in time".to_owned());
    let (ready, body) = state.report();
    assert!(!ready);
    assert_eq!(body["dependencies"]["limiter"]["detail"], "no answer in time");
}

#[test]
fn a_configured_policy_that_is_not_loaded_is_not_ready_and_a_null_one_does_not_matter() {
    let text = r#"{"profile": "development", "listen": "127.0.0.1:0", "policy": {"url": "file:policy.json"}}"#;
    let state = readiness(text, None);
    state.dependency_is(Dependency::Limiter, true, "answers".to_owned());
    let (ready, body) = state.report();
    assert!(!ready);
    assert_eq!(body["dependencies"]["policy"]["state"], "down");
    assert_eq!(body["dependencies"]["metering"]["state"], "absent");
    let since = body["dependencies"]["policy"]["since"].as_str().unwrap();
    assert!(
        since.len() >= 20 && since.ends_with('Z') && since.as_bytes()[10] == b'T',
        "{since}"
    );
}

#[test]
fn metering_is_named_and_decides_nothing() {
    let text = r#"{"profile": "development", "listen": "127.0.0.1:0", "metering": {"url": "postgres://127.0.0.1/x"}}"#;
    let state = readiness(text, None);
    state.dependency_is(Dependency::Limiter, true, "answers".to_owned());
    let (ready, body) = state.report();
    assert!(ready);
    assert_eq!(body["dependencies"]["metering"]["state"], "down");
    state.dependency_is(Dependency::Metering, true, "answers".to_owned());
    assert_eq!(state.report().1["dependencies"]["metering"]["state"], "up");
    let embedded = readiness(&text.replace("postgres://127.0.0.1/x", "memory:"), None);
    assert_eq!(embedded.report().1["dependencies"]["metering"]["state"], "embedded");
}
