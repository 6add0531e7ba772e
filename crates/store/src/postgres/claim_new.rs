//! Tasks that a call adds and claims at once. They are inserted as claimed, which costs less than half of inserting them
//! first and claiming them then.
//!
//! The claims that a new task may go to are found here, in the order in which claims after the commit would take it. The
//! database (`claim_new_v1`) gives it to one of them unless a rule, an older task or a full worker says otherwise.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use eddyline_machine::{Claim, Millis, Task, TaskChange};

use super::body::escaped;
use super::claims::ClaimRows;
use super::encode::Batch;
use crate::claim::{ClaimRequest, Claimed, Held};
use crate::commit::{Command, RunCommit};

/// With more classes of new tasks in a call, claims are made after the commit.
const MOST_CLASSES: usize = 64;

/// New tasks of one class, the first one to be claimed at the front.
struct Pool<'a> {
    ns: &'a str,
    task: &'a Task,
    waiting: VecDeque<usize>,
}

/// Notes for each task of the batch which group of claims may have it. `commands` are those of the batch, in its order.
pub(super) fn match_new(batch: &mut Batch, commands: &[&RunCommit], claims: &[ClaimRequest], rows: &ClaimRows) {
    // Commits that add keyed tasks lock queues, and those locks come before the locks of claims.
    if batch.tasks.key.iter().any(|key| !key.is_empty()) {
        return;
    }
    let Some(mut pools) = pools(batch, commands) else { return };
    let mut suitable: HashMap<i32, Vec<usize>> = HashMap::new();
    for (claim, group) in claims.iter().zip(&rows.requests.group) {
        let suitable = suitable.entry(*group).or_insert_with(|| {
            let takes = |pool: &Pool<'_>| {
                let Task { kind, handler, requires, build, queue, .. } = pool.task;
                pool.ns == claim.ns.as_str()
                    && claim.queues.contains(queue)
                    && claim.offer.takes(*kind, handler, requires, build.as_deref())
            };
            (0..pools.len()).filter(|at| takes(&pools[*at])).collect()
        });
        for _ in 0..claim.max.min(claim.most_held.unwrap_or(usize::MAX)) {
            let first =
                |at: &usize| pools[*at].waiting.front().map(|task| (Reverse(pools[*at].task.priority), *task, *at));
            let Some((_, task, pool)) = suitable.iter().filter_map(first).min() else { break };
            pools[pool].waiting.pop_front();
            batch.tasks.group[task] = *group;
            batch.tasks.build[task] = claim.offer.build_of(&pools[pool].task.handler).map(escaped);
        }
    }
}

fn pools<'a>(batch: &Batch, commands: &[&'a RunCommit]) -> Option<Vec<Pool<'a>>> {
    let tasks = &batch.tasks;
    let mut places: HashMap<(&str, &str, i64), usize> = HashMap::new();
    let mut pools: Vec<Pool<'a>> = Vec::new();
    for at in 0..tasks.c.len() {
        let c = tasks.c[at] as usize - 1;
        if tasks.closed[at] || !tasks.limits[at].is_empty() || batch.commits.paused[c] {
            continue;
        }
        let Some(task) = new_task(commands[c], tasks.fence[at]) else { continue };
        let ns = commands[c].ns.as_str();
        let place = *places.entry((ns, &task.queue, tasks.class[at])).or_insert_with(|| {
            pools.push(Pool { ns, task, waiting: VecDeque::new() });
            pools.len() - 1
        });
        pools[place].waiting.push_back(at);
        if pools.len() > MOST_CLASSES {
            return None;
        }
    }
    Some(pools)
}

fn new_task(commit: &RunCommit, fence: i64) -> Option<&Task> {
    commit.transition.tasks.iter().find_map(|change| match change {
        TaskChange::Add(task) if task.fence.0 as i64 == fence => Some(&**task),
        _ => None,
    })
}

/// A task that was inserted as claimed. `at` is the time of its commit.
pub(super) fn claimed(
    batch: &Batch,
    commit: &RunCommit,
    task: usize,
    request: &ClaimRequest,
    at: Millis,
) -> Option<Claimed> {
    let header = &commit.transition.header;
    let task = new_task(commit, *batch.tasks.fence.get(task)?)?;
    let build = request.offer.build_of(&task.handler).map(str::to_owned);
    let held = Held {
        worker: request.worker.clone(),
        request: request.request,
        since: at,
        lease_ms: request.lease_ms,
        lease_until: at + request.lease_ms,
        deadline: task.timeout_ms.map(|ms| at + ms),
        claim: Claim { build, memo: header.code.as_ref().map_or(0, |code| code.n) },
    };
    let (ns, flow) = (request.ns.clone(), header.flow.clone());
    Some(Claimed { ns, run: header.run, flow, task: Arc::new(task.clone()), held })
}

/// The commits of a batch, in its order.
pub(super) fn commits<'a>(commands: &'a [Command], of: &[usize]) -> Vec<&'a RunCommit> {
    let commit = |at: &usize| match &commands[*at] {
        Command::Run(commit) => Some(commit),
        Command::Documents(_) => None,
    };
    of.iter().filter_map(commit).collect()
}
