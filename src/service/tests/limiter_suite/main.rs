//! What every limiter does, whatever its store: the same cases by name for each.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    missing_docs,
    reason = "a test may stop at the first surprise"
)]

mod cases;
mod model;
#[path = "../stores/mod.rs"]
mod stores;
mod subject;

macro_rules! suite {
    ($($case:ident),+ $(,)?) => {
        mod memory {
            $(#[tokio::test] async fn $case() { super::cases::$case(super::subject::Subject::memory().unwrap()).await; })+
        }
        mod redis {
            $(#[tokio::test] async fn $case() {
                super::cases::$case(super::subject::Subject::store("redis-server").await.unwrap()).await;
            })+
        }
        /// Passes without a look where no such server is installed.
        mod valkey {
            $(#[tokio::test] async fn $case() {
                if let Some(subject) = super::subject::Subject::valkey().await {
                    super::cases::$case(subject).await;
                }
            })+
        }
    };
}

suite!(
    a_window_starts_with_its_first_charge_and_retry_after_is_enough,
    a_denied_request_charges_no_scope,
    one_operation_is_charged_once_however_often_it_is_asked,
    a_cancel_gives_everything_back_whichever_arrives_first,
    a_refund_after_its_window_is_gone_is_a_no_op,
    a_released_slot_is_free_and_only_its_own_holder_frees_it,
    a_lapsed_slot_is_free_and_never_revived,
    a_renewed_slot_lives_on,
    a_batch_of_any_length_is_carried_out,
    a_limit_lowered_below_what_is_used_denies_without_an_underflow,
    a_first_charge_of_zero_starts_a_window_that_ends,
    a_limit_of_zero_denies_even_what_costs_nothing,
    ids_never_meet_in_a_key,
    a_token_hold_is_charged_whole_and_given_back_whole,
    capacity_denies_before_contract,
    the_longest_wait_of_the_denying_gate_is_reported,
    fifty_concurrent_charges_admit_exactly_the_limit,
    fifty_concurrent_charges_of_one_operation_count_once,
    figures_up_to_two_to_the_53_are_exact,
    a_plan_without_entries_is_granted,
    a_ping_is_answered,
);
