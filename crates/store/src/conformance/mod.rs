//! The test suite that every backend must pass, as a list of cases.
//!
//! A backend implements [`Backend`] and writes `eddyline_store::conformance_tests!(MyBackend)` in a test file, which
//! makes one test of each case and one of [`random_histories`]. `EDDYLINE_CASES` sets the number of histories,
//! `EDDYLINE_SEED` their seed.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_debug_implementations)]

mod claims;
mod commits;
mod documents;
mod drive;
mod due;
mod everything;
mod feeds;
mod gates;
mod histories;
mod leases;
mod limits;
mod loads;
mod namespaces;
mod records;
mod reopening;
mod runs;
mod starts;
mod takes;
mod tasks;
mod trims;
mod turns;
mod uniques;
mod watching;

use std::future::Future;
use std::ops::Deref;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use eddyline_machine::Millis;

use crate::*;
use drive::Drive;
use everything::{Everything, Looked, assert_same, everything};

pub use histories::random_histories;

/// Creates empty stores for the cases. The cases own the clock.
#[async_trait]
pub trait Backend: Send + Sync {
    async fn open(&self, clock: Arc<ManualClock>) -> Arc<dyn Store>;

    /// Closes the store and opens it again; none if the store is not durable.
    async fn reopen(&self, store: Arc<dyn Store>, clock: Arc<ManualClock>) -> Option<Arc<dyn Store>>;

    /// A lease ends when it would have ended had the store stayed open. Otherwise each has its full time when the store is
    /// opened again.
    fn keeps_leases(&self) -> bool {
        false
    }
}

/// The wall clock at the start of every case.
const BEGINNING: Millis = 1_767_323_045_678;

/// The timeout of a case. Only a safety net: no case waits for real time.
const ENDLESS: Duration = Duration::from_secs(240);

const ONE: &str = "{name: one, steps: {work: {}}}";
const CHAIN: &str = "{name: chain, steps: {a: {}, b: {after: [a]}, c: {after: [b]}}}";
const NAP: &str = "{name: nap, steps: {nap: {await: {time: 10s}}}}";

type Running<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

/// One guarantee, by its name.
pub struct Case {
    pub name: &'static str,
    run: for<'a, 'b> fn(&'a mut Trial<'b>) -> Running<'a>,
}

impl Case {
    pub async fn check(&self, backend: &dyn Backend) {
        let clock = ManualClock::at(BEGINNING);
        let store = backend.open(clock.clone()).await;
        let mut trial = Trial { backend, drive: Drive::new(store, clock) };
        let ended = tokio::time::timeout(ENDLESS, (self.run)(&mut trial)).await;
        assert!(ended.is_ok(), "{} timed out", self.name);
    }
}

/// Runs every case against one backend.
pub async fn run_all(backend: &dyn Backend) {
    for case in cases() {
        case.check(backend).await;
    }
}

/// Runs the case of that name.
pub async fn check(backend: &dyn Backend, name: &str) {
    let cases = cases();
    let case = cases.iter().find(|case| case.name == name).expect("a case of that name");
    case.check(backend).await;
}

/// A store under test.
pub struct Trial<'a> {
    backend: &'a dyn Backend,
    drive: Drive,
}

impl Deref for Trial<'_> {
    type Target = Drive;

    fn deref(&self) -> &Drive {
        &self.drive
    }
}

impl Trial<'_> {
    /// Closes the store and opens it again. False if the store is not durable, which ends the case.
    async fn reopen(&mut self) -> bool {
        let nothing: Arc<dyn Store> = Arc::new(Memory::with_clock(self.drive.clock.clone()));
        let store = std::mem::replace(&mut self.drive.store, nothing);
        match self.backend.reopen(store, self.drive.clock.clone()).await {
            Some(store) => {
                self.drive.store = store;
                true
            }
            None => false,
        }
    }

    async fn everything(&self) -> Everything {
        self.look(Looked { numbers: true, leases: true }).await
    }

    async fn look(&self, looked: Looked) -> Everything {
        everything(&*self.store, &[Namespace::default(), Namespace::new("other")], &[], looked).await
    }

    async fn assert_unchanged(&self, before: &Everything, why: &str) {
        assert_same(before, &self.everything().await, why);
    }

    /// The state of a queue; empty if it is not known.
    async fn queue(&self, name: &str) -> QueueState {
        let queues = self.store.queues(&self.ns).await.unwrap();
        let empty = QueueState { name: name.to_owned(), ..QueueState::default() };
        queues.into_iter().find(|queue| queue.name == name).unwrap_or(empty)
    }
}

/// Defines the list of the cases, and the macro that makes tests of them.
macro_rules! suite {
    (($d:tt) $($area:ident: $($case:ident)+;)+) => {
        pub fn cases() -> Vec<Case> {
            vec![$($(Case { name: stringify!($case), run: |trial| Box::pin($area::$case(trial)) },)+)+]
        }

        /// One test for each case of the suite, and one for random histories. The backend is an expression, evaluated
        /// for each test.
        #[macro_export]
        macro_rules! conformance_tests {
            ($d backend:expr) => {
                $($(
                    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                    async fn $case() {
                        $crate::conformance::check(&$d backend, stringify!($case)).await;
                    }
                )+)+

                #[test]
                fn random_histories() {
                    $crate::conformance::random_histories(&$d backend);
                }
            };
        }
    };
}

suite! { ($)
    commits:
        a_stale_commit_is_refused_with_the_version_and_writes_nothing
        a_start_of_a_run_that_exists_is_refused
        a_commit_on_a_run_that_is_not_there_is_refused
        of_many_racing_commits_on_one_run_exactly_one_wins
        one_refused_command_does_not_sink_the_others
        the_commands_of_a_call_are_carried_out_in_order
        a_command_that_was_carried_out_is_answered_as_the_first_time
        a_start_that_was_carried_out_is_answered_as_the_first_time
        a_document_command_that_was_carried_out_is_answered_as_the_first_time
        a_command_that_is_submitted_by_many_at_once_is_carried_out_once
        a_command_that_was_refused_can_be_submitted_again
        a_commit_says_when_it_was_and_where_its_records_begin
        a_commit_without_a_transition_uses_up_what_it_takes
        runs_that_start_at_once_all_start;
    takes:
        a_message_is_used_up_once
        of_many_who_take_one_message_one_gets_it
        a_message_to_another_run_is_not_there
        a_message_that_is_waiting_is_not_sent_twice
        messages_that_cannot_be_delivered_are_dropped
        a_timer_that_was_set_for_another_moment_is_gone
        a_lease_ends_only_when_its_time_is_up_by_the_stores_clock
        an_attempts_time_is_up_at_its_deadline_however_long_the_lease
        the_time_to_be_claimed_is_up_only_for_a_task_that_nobody_has
        the_time_to_be_claimed_ends_an_unclaimed_task
        a_lease_that_is_extended_at_the_moment_it_ends_is_kept
        a_task_that_was_never_delivered_is_released;
    tasks:
        a_closed_task_is_not_offered_but_who_has_it_keeps_it
        a_closed_task_whose_lease_ends_is_due
        a_removed_task_is_gone
        an_ended_run_has_no_tasks_and_no_timers
        tasks_of_a_paused_run_are_offered_in_their_old_order_after_it
        a_task_that_a_paused_run_adds_waits_for_its_resume
        a_run_that_is_paused_and_resumed_offers_its_tasks_once
        what_is_being_cancelled_is_not_offered_meanwhile
        a_new_attempt_is_a_new_task;
    claims:
        a_task_is_claimed_at_most_once_by_many_at_once
        a_claim_gets_no_more_than_it_asks_for
        a_worker_never_has_more_tasks_than_it_may
        a_claim_gets_tasks_of_its_queues_only
        a_worker_is_offered_what_it_can_do
        a_pinned_run_goes_to_its_build_only
        a_claim_says_how_the_worker_has_the_task
        a_claim_of_a_code_run_says_how_new_the_memo_is
        a_claim_is_recorded_with_its_worker
        a_claim_sees_what_the_commands_of_its_call_added
        a_claim_repeated_gets_the_same_tasks_and_no_more
        a_claim_repeated_from_another_namespace_gets_nothing_of_it
        of_a_claim_that_is_repeated_at_once_all_get_the_same
        a_queue_says_how_it_is;
    turns:
        tasks_go_in_the_order_in_which_they_were_queued
        tasks_of_one_commit_go_in_its_order
        a_step_of_priority_is_worth_its_waiting_time
        a_step_adds_its_priority_to_that_of_the_run
        the_few_of_one_key_are_not_behind_the_many_of_another
        keys_take_turns_over_many_claims
        within_a_key_priority_decides
        a_key_that_comes_back_gets_no_more_than_its_turn
        a_new_key_does_not_catch_up_on_what_it_missed
        turns_are_taken_across_handlers;
    limits:
        a_paused_queue_offers_nothing
        a_queue_has_no_more_claimed_than_its_concurrency
        a_queue_has_no_more_claimed_of_a_flow_than_its_bound
        a_queue_gives_out_no_more_than_its_rate
        a_rate_of_a_queue_is_not_spent_by_another
        a_limit_bounds_each_of_its_keys
        a_limit_bounds_across_queues_and_flows
        a_limit_without_a_key_is_one_limit
        a_limit_lets_no_more_pass_than_its_rate
        a_limit_that_was_slowed_down_lets_nothing_pass_until_then
        a_limit_that_was_slowed_down_stays_so_when_the_store_is_opened_again
        a_limit_that_was_slowed_down_is_listed_and_opened_by_a_change_of_its_rules
        rules_that_cannot_be_read_let_nothing_pass
        a_task_that_waits_says_what_keeps_it_back
        bounds_hold_at_every_moment_under_concurrent_claims;
    leases:
        a_lease_is_extended_by_who_has_it_only
        a_look_at_leases_tells_who_has_them_and_extends_none
        of_an_extension_and_an_expiry_at_once_one_wins
        an_extended_lease_ends_later_and_its_deadline_stays
        a_lease_that_nobody_extends_is_due_at_its_end
        an_attempt_is_due_at_its_deadline
        a_task_that_nobody_takes_is_due_at_the_end_of_its_time
        a_claimed_task_has_no_time_to_be_claimed
        a_lease_follows_the_stores_clock_and_not_the_wall
        a_due_lease_says_how_it_was_held
        time_in_which_nobody_asked_is_not_held_against_workers
        time_in_which_nobody_asked_is_not_held_against_unclaimed_tasks
        a_short_while_in_which_nobody_asked_counts
        time_before_anybody_asked_is_not_held_against_workers
        leases_have_their_full_time_when_the_store_is_opened_again
        a_lease_is_not_extended_from_another_namespace;
    due:
        timers_follow_the_stores_clock
        timers_for_a_moment_follow_the_wall_clock
        documents_are_due_by_the_wall_clock
        a_due_item_is_handed_out_once_until_the_hold_is_over
        a_due_item_goes_to_one_of_many_who_ask
        due_items_come_in_bounded_parts
        items_of_skipped_namespaces_stay_due
        what_was_used_up_is_never_due_again
        the_longest_due_come_first
        the_next_is_never_later_than_it_is
        a_timer_that_is_cleared_or_set_anew_is_not_due
        messages_of_one_target_come_together_and_in_order
        messages_of_one_target_come_in_bounded_parts
        large_messages_come_in_bounded_parts
        newer_messages_wait_for_those_that_are_being_delivered
        messages_that_were_dropped_make_way
        a_message_carries_what_was_sent
        a_document_that_changed_is_due_as_it_is_now;
    starts:
        of_many_starts_under_one_id_one_happens
        of_many_starts_under_one_key_one_happens_and_all_are_told_which
        starts_under_one_key_in_one_call_start_one_run
        a_start_whose_key_is_taken_writes_nothing
        a_key_is_of_one_flow_and_one_namespace
        a_key_is_free_again_when_its_run_is_deleted;
    uniques:
        of_many_starts_under_one_unique_key_one_goes_on
        a_unique_key_is_free_when_its_run_has_ended
        a_unique_key_is_of_one_flow_and_one_namespace
        a_run_that_ends_in_its_first_commit_leaves_its_unique_key_free
        runs_in_line_go_on_one_after_the_other
        a_turn_that_was_not_delivered_is_still_due
        a_run_that_waits_for_nobody_gets_its_turn_at_once
        a_run_that_ends_while_it_waits_gives_its_place_up
        a_run_that_replaces_others_tells_everybody_before_it
        a_line_has_a_bound
        a_line_is_there_when_the_store_is_opened_again
        a_continued_run_has_the_unique_key_of_the_run_before_it
        a_continued_run_that_never_starts_gives_its_unique_key_up;
    records:
        records_are_numbered_without_gaps_while_claims_and_commits_race
        the_times_of_records_never_go_back
        records_are_read_in_pages
        a_page_of_records_has_a_bound
        logs_are_found_by_their_activation
        records_of_runs_are_numbered_apart;
    loads:
        a_run_is_loaded_as_it_was_written
        what_a_retry_takes_over_is_loaded_as_it_was_written
        what_is_still_to_be_taken_over_is_kept
        a_run_that_has_not_moved_is_not_read_again
        a_summary_says_when_things_happened
        a_value_is_written_once
        a_large_value_comes_back_as_it_was;
    runs:
        every_filter_finds_what_it_says
        retries_are_found_by_the_run_that_they_retry
        runs_that_go_on_are_counted_by_flow_and_status
        descendants_are_found_and_counted_by_their_root
        a_list_follows_the_status_of_its_runs
        pages_of_runs_go_from_the_newest_to_the_oldest
        a_page_misses_no_run_while_others_are_started_and_change
        a_page_of_runs_has_a_bound;
    gates:
        a_token_finds_its_gate_in_every_state
        a_token_that_was_never_given_finds_nothing
        gates_are_listed_by_run_reason_and_event
        a_gate_closes_when_it_opens_times_out_or_is_cancelled
        pages_of_gates_miss_none_while_others_come_and_go;
    documents:
        a_document_changes_only_as_expected
        a_revision_is_never_given_twice
        of_many_who_change_one_revision_one_does
        a_commit_of_documents_is_a_whole
        documents_are_found_by_id_prefix_and_place
        documents_of_all_namespaces_are_read_in_pages
        a_document_comes_back_as_it_was_written;
    feeds:
        a_reader_that_follows_the_runs_gets_each_once
        a_reader_that_follows_the_events_gets_each_once
        a_reader_that_follows_one_key_gets_each_once
        an_event_with_an_id_that_is_kept_changes_nothing
        a_run_that_publishes_writes_its_event_with_its_commit
        a_feed_is_read_in_pages_and_by_name_and_key
        events_of_a_moment_or_later_are_a_feed
        the_runs_of_a_flow_are_a_feed
        an_event_knows_how_many_gates_it_has_opened
        a_feed_goes_on_after_what_was_trimmed;
    trims:
        a_run_that_has_not_ended_is_left_alone
        a_trimmed_run_has_its_header_left
        a_deleted_run_leaves_nothing
        places_are_not_given_twice
        a_trimmed_run_is_not_changed
        events_go_by_their_age
        an_event_is_deleted_by_its_id
        traces_go_by_their_age;
    namespaces:
        nothing_of_a_namespace_is_seen_from_another
        a_commit_to_a_run_of_another_namespace_is_refused
        the_rules_of_a_namespace_bind_no_other
        documents_of_namespaces_are_apart;
    watching:
        a_hint_comes_for_each_kind_of_change
        a_hint_comes_when_there_is_room_again
        a_hint_comes_when_a_limit_has_room_again_in_another_queue
        a_hint_comes_when_a_limit_changes
        a_hint_says_that_a_run_has_ended
        a_hint_comes_when_a_run_is_resumed
        a_hint_does_not_come_before_what_it_hints_at;
    reopening:
        everything_is_there_when_the_store_is_opened_again
        tasks_keep_their_order_when_the_store_is_opened_again
        bounds_count_what_is_held_when_the_store_is_opened_again
        what_was_due_is_due_when_the_store_is_opened_again
        a_worker_has_what_it_had_when_the_store_is_opened_again
        time_does_not_go_back_when_the_store_is_opened_again;
}
