//! Which builds of a code flow's function still have runs, so that a deployment knows which workers it must keep.

use std::collections::BTreeMap;

use eddyline_machine::{Body, Builds, Status};
use eddyline_store::{MAX_PAGE, Namespace, Page, RunFilter};

use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::workers::{WorkerFilter, WorkerStatus};

/// The most runs that are counted: each is read.
pub const MAX_COUNTED_RUNS: usize = 100_000;

/// The builds of a code flow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlowBuilds {
    /// A run is offered only to the build that began it.
    pub pinned: bool,
    /// By build: runs that have not ended, and workers online.
    pub builds: BTreeMap<Option<String>, BuildUse>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BuildUse {
    pub runs: u64,
    pub workers: u64,
}

impl Engine {
    /// Counts the runs of a code flow that have not ended, by the build that runs them.
    pub async fn flow_builds(&self, ns: &Namespace, name: &str) -> Result<FlowBuilds> {
        let flow = self.flow(ns, name, None).await?;
        let Body::Code(code) = &flow.flow.body else {
            return Err(EngineError::invalid(format!("{name} is a graph; only code flows have builds")));
        };
        let mut builds: BTreeMap<Option<String>, BuildUse> = BTreeMap::new();
        let going = Status::ALL.into_iter().filter(|status| !status.is_end()).collect();
        let filter = RunFilter { flow: Some(name.to_owned()), status: going, ..RunFilter::default() };
        let (mut after, mut counted) = (None, 0);
        loop {
            let page = self.instance.store.runs(Some(ns), &filter, Page { after, limit: MAX_PAGE }).await?;
            counted += page.len();
            for summary in &page {
                let build = summary.header.code.as_ref().and_then(|code| code.build.clone());
                builds.entry(build).or_default().runs += 1;
            }
            match page.last() {
                Some(last) if page.len() == MAX_PAGE && counted < MAX_COUNTED_RUNS => after = Some(last.position),
                Some(_) if page.len() == MAX_PAGE => {
                    let limit = MAX_COUNTED_RUNS;
                    return Err(EngineError::TooLarge { what: "the number of runs to count", bytes: counted, limit });
                }
                _ => break,
            }
        }
        let online = WorkerFilter { queue: None, status: vec![WorkerStatus::Online, WorkerStatus::Draining] };
        let mut after = None;
        loop {
            let (workers, next) = self.find_workers(ns, &online, after, MAX_PAGE).await?;
            for worker in workers {
                if worker.spec.offer.flows.contains_key(name) {
                    let build = worker.spec.offer.build_of(name).map(str::to_owned);
                    builds.entry(build).or_default().workers += 1;
                }
            }
            match next {
                Some(next) => after = Some(next),
                None => break,
            }
        }
        Ok(FlowBuilds { pinned: code.builds == Builds::Pinned, builds })
    }
}
