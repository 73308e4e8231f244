//! The real `.wasm` in a real Envoy with the real decision service. One binary, so that the harness is linked once.
#![allow(
    missing_docs,
    clippy::arithmetic_side_effects,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "tests: a panic is a failure, with its message"
)]

mod backed;
mod cancels;
mod capacity;
mod cases;
#[path = "../../../src/service/tests/stores/certificates.rs"]
mod certificates;
mod clients;
mod clocks;
#[path = "../../../src/service/tests/collector/mod.rs"]
mod collector;
mod compose;
mod config_faults;
mod contract_limits;
mod drill;
mod drill_red;
mod drill_world;
mod envelope_headers;
mod expect;
#[path = "../../../src/service/tests/explain/case.rs"]
mod explained;
mod ext_authz;
mod gateway_killed;
mod grpc;
mod harness;
mod istio;
mod leases;
mod leases_chaos;
mod leases_ends;
mod leases_tokens;
mod lifecycle;
mod limiter_cluster;
mod llm_cost;
mod llm_holds;
mod llm_model;
mod llm_passing;
mod llm_slots;
mod llm_usage;
mod llm_waits;
mod llm_world;
mod migration;
mod observability;
mod outages;
mod policy_in_force;
#[path = "../../../src/service/tests/stores/postgres.rs"]
mod postgres;
#[path = "../../../src/service/tests/stores/proxy.rs"]
#[allow(dead_code, reason = "shared with the tests of the service, which use more of it")]
mod proxy;
mod replayed;
mod routes;
mod service_door;
mod shadow;
mod signatures;
#[path = "../../../src/service/tests/stores/mod.rs"]
mod stores;
mod stores_limiter;
mod stores_postgres;
#[path = "../../../src/decision/tests/table/mod.rs"]
mod table;
mod tracing;
mod unenforced;
mod withholding;
mod world;
