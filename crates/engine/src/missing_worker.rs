//! Why no online worker can take a waiting task: the queue, handler, label or build that is missing.

use std::collections::BTreeMap;

use eddyline_machine::explain::Lack;
use eddyline_machine::{Fence, Task};
use eddyline_store::{MAX_PAGE, Namespace};

use crate::engine::Engine;
use crate::error::Result;
use crate::workers::{WorkerRecord, WorkerSpec, WorkerStatus};

impl Engine {
    /// What is missing, by task. Only registered workers are known. If there are more than fit on a page, nothing is
    /// reported.
    pub(crate) async fn lacks<'a>(
        &self,
        ns: &Namespace,
        mut tasks: impl Iterator<Item = &'a Task>,
    ) -> Result<BTreeMap<Fence, Lack>> {
        let Some(first) = tasks.next() else { return Ok(BTreeMap::new()) };
        let workers = self.list_workers(ns, None, MAX_PAGE).await?;
        if workers.len() == MAX_PAGE {
            return Ok(BTreeMap::new());
        }
        let now = self.now().await?;
        let is_online = |worker: &&WorkerRecord| self.worker_status(worker, now) == WorkerStatus::Online;
        let online: Vec<&WorkerSpec> = workers.iter().filter(is_online).map(|worker| &*worker.spec).collect();
        let all = std::iter::once(first).chain(tasks);
        Ok(all.filter_map(|task| Some((task.fence, lack(task, &online)?))).collect())
    }
}

fn lack(task: &Task, online: &[&WorkerSpec]) -> Option<Lack> {
    let there: Vec<_> = online.iter().filter(|worker| worker.queues.contains(&task.queue)).collect();
    let takes = |requires: &[String], build: Option<&str>| {
        there.iter().any(|worker| worker.offer.takes(task.kind, &task.handler, requires, build))
    };
    match &task.build {
        _ if there.is_empty() => Some(Lack::Queue),
        _ if !takes(&[], None) => Some(Lack::Handler),
        _ if !takes(&task.requires, None) => Some(Lack::Labels { labels: task.requires.clone() }),
        Some(build) if !takes(&task.requires, Some(build)) => Some(Lack::Build { build: build.clone() }),
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeMap;

    use eddyline_machine::Data;
    use eddyline_store::Offer;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_pinned_run_lacks_its_build_where_others_have_another() {
        let task: Task = serde_json::from_value(json!({
            "fence": 1, "activation": 0, "name": "@run", "step": "job", "handler": "job", "queue": "q", "kind": "run",
            "attempt": 1, "input": Data::null(), "build": "b7"
        }))
        .unwrap();
        let worker = |build: &str| WorkerSpec {
            queues: vec!["q".to_owned()],
            offer: Offer { flows: BTreeMap::from([("job".to_owned(), Some(build.to_owned()))]), ..Offer::default() },
            ..WorkerSpec::default()
        };
        let (old, new) = (worker("b7"), worker("b8"));
        assert_eq!(lack(&task, &[&new]), Some(Lack::Build { build: "b7".to_owned() }));
        assert_eq!(lack(&task, &[&new, &old]), None);
    }
}
