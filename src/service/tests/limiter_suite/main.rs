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

mod blocks;
mod cases;
mod model;
mod settling;
#[path = "../stores/mod.rs"]
mod stores;
mod subject;

macro_rules! suite {
    ($($file:ident { $($case:ident),+ $(,)? })+) => {
        mod memory {
            $($(#[tokio::test] async fn $case() {
                super::$file::$case(super::subject::Subject::memory().unwrap()).await;
            })+)+
        }
        mod redis {
            $($(#[tokio::test] async fn $case() {
                super::$file::$case(super::subject::Subject::store("redis-server").await.unwrap()).await;
            })+)+
        }
        mod cluster {
            $($(#[tokio::test] async fn $case() {
                super::$file::$case(super::subject::Subject::cluster().await.unwrap()).await;
            })+)+
        }
        /// Passes without a look where no such server is installed.
        mod valkey {
            $($(#[tokio::test] async fn $case() {
                if let Some(subject) = super::subject::Subject::valkey().await {
                    super::$file::$case(subject).await;
                }
            })+)+
        }
    };
}

suite! {
    cases {
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
    }
    settling {
        a_settlement_gives_the_difference_back_in_its_window,
        a_settlement_above_the_hold_charges_the_difference_over_the_limit_if_need_be,
        a_settlement_of_all_that_was_held_changes_nothing,
        a_settlement_is_made_once,
        fifty_concurrent_settlements_of_one_operation_count_once,
        a_stream_that_ends_without_a_word_about_tokens_keeps_its_hold_charged,
        a_settlement_after_its_window_is_gone_is_a_no_op,
        a_settlement_never_takes_a_counter_below_zero,
        a_settlement_frees_the_slots_of_its_operation_and_a_renewal_does_not_revive_them,
        a_lapsed_slot_does_not_keep_its_operation_from_being_settled,
        a_cancel_after_a_settlement_gives_back_what_it_charged,
        a_settlement_of_a_cancelled_or_unknown_operation_changes_nothing,
        a_settlement_leaves_windows_of_requests_alone,
        every_token_window_of_an_operation_is_settled,
        a_batch_settles_each_operation_for_itself,
        fifty_concurrent_charges_of_forty_against_a_hundred_tokens_left_admit_exactly_two,
        settlements_up_to_two_to_the_53_are_exact_and_none_goes_over,
        a_settlement_while_the_slot_is_renewed_is_the_last_word,
    }
    blocks {
        a_block_is_charged_whole_to_every_window,
        the_size_follows_what_is_left_of_the_tightest_window_and_the_number_of_parts,
        a_block_that_would_be_small_is_one_admission,
        one_gateway_gets_exactly_what_the_limit_allows,
        ahead_charges_nothing_where_a_block_would_be_small_and_is_denied_where_nothing_fits,
        the_same_operation_again_is_answered_the_same_block,
        a_block_asked_for_again_after_its_window_is_none_any_more,
        a_plan_that_takes_a_slot_has_no_block,
        a_cancel_gives_all_of_a_block_back,
        a_settlement_replaces_the_requests_own_hold_and_leaves_its_block,
        a_return_is_made_once_and_for_every_window_of_the_block,
        no_more_goes_back_than_the_block_has_and_what_is_charged_may_go_over_a_limit,
        a_cancel_after_returns_gives_back_the_rest,
        a_return_to_an_operation_without_a_block_changes_nothing,
        a_return_after_its_window_is_gone_is_a_no_op,
        a_batch_of_returns_is_carried_out,
        fifty_concurrent_blocks_never_exceed_the_limit,
        blocks_and_returns_at_the_same_time_never_exceed_the_limit,
        blocks_up_to_two_to_the_53_are_exact,
    }
}
