//! The order of claims: priority with ageing, and fairness between keys.

use eddyline_machine::{RunId, Start};
use serde_json::{Value, json};

use super::drive::runs_of;
use super::{ONE, Trial};
use crate::*;

const KEYED: &str = "{name: keyed, steps: {work: {key: input.k}}}";

pub async fn tasks_go_in_the_order_in_which_they_were_queued(t: &mut Trial<'_>) {
    t.flow(ONE);
    let mut runs = t.start_all("one", (0..10).map(|n| json!(n))).await;
    t.advance(1);
    runs.extend(t.start_all("one", (0..10).map(|n| json!(n))).await);
    let mut got = Vec::new();
    for max in [1, 3, 7, 9] {
        got.extend(runs_of(&t.take(max).await));
    }
    assert_eq!(got, runs);
}

pub async fn tasks_of_one_commit_go_in_its_order(t: &mut Trial<'_>) {
    t.flow("{name: wide, steps: {each: {spread: 'range(12)', run: item}}}");
    t.start("wide", json!(null)).await;
    let names: Vec<String> = t.take(12).await.iter().map(|claimed| claimed.task.name.clone()).collect();
    assert_eq!(names, (0..12).map(|n| format!("each[{n}]")).collect::<Vec<_>>());
}

pub async fn a_step_of_priority_is_worth_its_waiting_time(t: &mut Trial<'_>) {
    t.flow(ONE);
    let low = with_priority(t, 0).await;
    t.advance(2 * AGE_MS - 1);
    let high = with_priority(t, 2).await;
    let highest = with_priority(t, 3).await;
    let below = with_priority(t, -1).await;
    assert_eq!(runs_of(&t.take(4).await), [highest, high, low, below]);

    let low = with_priority(t, 0).await;
    t.advance(2 * AGE_MS + 1);
    let high = with_priority(t, 2).await;
    assert_eq!(runs_of(&t.take(4).await), [low, high], "a task that has waited long enough goes first");
}

pub async fn a_step_adds_its_priority_to_that_of_the_run(t: &mut Trial<'_>) {
    t.flow("{name: steps, steps: {a: {}, b: {priority: 5}, c: {priority: -5}}}");
    t.start("steps", json!(null)).await;
    let names: Vec<String> = t.take(3).await.iter().map(|claimed| claimed.task.name.clone()).collect();
    assert_eq!(names, ["b", "a", "c"]);
}

pub async fn the_few_of_one_key_are_not_behind_the_many_of_another(t: &mut Trial<'_>) {
    t.flow(KEYED);
    t.start_all("keyed", of_key("a", 100)).await;
    t.advance(1);
    let few = t.start_all("keyed", of_key("b", 3)).await;
    let first: Vec<RunId> = runs_of(&t.take(6).await);
    assert!(few.iter().all(|run| first.contains(run)), "the 3 are served within the first 6");
}

pub async fn keys_take_turns_over_many_claims(t: &mut Trial<'_>) {
    t.flow(KEYED);
    let mut of = Vec::new();
    for (key, count) in [("a", 40), ("b", 20), ("c", 10)] {
        for run in t.start_all("keyed", of_key(key, count)).await {
            of.push((run, key));
        }
    }
    let mut served = Vec::new();
    for _ in 0..30 {
        let run = t.take_one().await.run;
        served.push(of.iter().find(|(other, _)| *other == run).expect("a run of a key").1);
    }
    for (at, turn) in served.chunks(3).enumerate() {
        let mut turn = turn.to_vec();
        turn.sort_unstable();
        assert_eq!(turn, ["a", "b", "c"], "turn {at}");
    }
    assert_eq!(t.take(1_000).await.len(), 40);
}

pub async fn within_a_key_priority_decides(t: &mut Trial<'_>) {
    t.flow(KEYED);
    let mut runs = Vec::new();
    for (key, priority) in [("a", 0), ("a", 9), ("b", 0), ("a", 5)] {
        let start = Start { input: Some(json!({"k": key}).into()), priority, ..Start::default() };
        runs.push(t.start_with("keyed", start).await);
    }
    let order = runs_of(&t.take(4).await);
    let of_a: Vec<&RunId> = order.iter().filter(|run| **run != runs[2]).collect();
    assert_eq!(of_a, [&runs[1], &runs[3], &runs[0]]);
    assert!(order[..2].contains(&runs[2]), "the other key has its turn before the second task of this one");
}

pub async fn a_key_that_comes_back_gets_no_more_than_its_turn(t: &mut Trial<'_>) {
    t.flow(KEYED);
    t.start_all("keyed", of_key("a", 50)).await;
    // "b" always has one task and returns as soon as it is claimed, so it could take every turn.
    let mut served = (0, 0);
    let mut back = t.start_all("keyed", of_key("b", 1)).await[0];
    for _ in 0..20 {
        let claimed = t.take_one().await;
        if claimed.run == back {
            served.1 += 1;
            t.complete(&claimed, json!(null)).await;
            back = t.start_all("keyed", of_key("b", 1)).await[0];
        } else {
            served.0 += 1;
        }
    }
    assert!((9..=11).contains(&served.0), "{served:?}");
}

pub async fn a_new_key_does_not_catch_up_on_what_it_missed(t: &mut Trial<'_>) {
    t.flow(KEYED);
    t.start_all("keyed", of_key("a", 60)).await;
    t.take(30).await;
    let new = t.start_all("keyed", of_key("b", 20)).await;
    let next = runs_of(&t.take(10).await);
    let of_new = next.iter().filter(|run| new.contains(run)).count();
    assert!((4..=6).contains(&of_new), "{of_new} of 10");
}

pub async fn turns_are_taken_across_handlers(t: &mut Trial<'_>) {
    t.flow("{name: pay, steps: {pay: {key: input.k}}}");
    t.flow("{name: mail, steps: {mail: {key: input.k}}}");
    t.start_all("pay", of_key("a", 20)).await;
    t.start_all("mail", of_key("a", 20)).await;
    let other = t.start_all("mail", of_key("b", 5)).await;
    let first = runs_of(&t.take(10).await);
    assert_eq!(first.iter().filter(|run| other.contains(run)).count(), 5, "a key has one turn across all handlers");
}

async fn with_priority(t: &Trial<'_>, priority: i32) -> RunId {
    t.start_with("one", Start { priority, ..Start::default() }).await
}

fn of_key(key: &str, count: usize) -> Vec<Value> {
    (0..count).map(|_| json!({"k": key})).collect()
}
