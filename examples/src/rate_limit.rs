//! An API that allows each tenant one request a second: the runs of all tenants share it, and none waits for another's
//! limit. The rate is set once, with `eddy limit set tenant-api --rate 1/1s`.

use eddyline::{FlowError, Retry, RunCtx, StepCtx, StepError, Worker};
use futures_util::future::try_join_all;
use serde::{Deserialize, Serialize};

/// The limit, which counts separately for each tenant.
pub const LIMIT: &str = "tenant-api";

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Sync {
    pub tenant: String,
    pub records: u32,
}

pub async fn sync(ctx: RunCtx, sync: Sync) -> Result<u32, FlowError> {
    let requests = (0..sync.records).map(|record| {
        ctx.call::<u32>("fetch_record", &record)
            .name(("record", record))
            .limit_by(LIMIT, &sync.tenant)
            .retry(Retry::attempts(10))
    });
    Ok(try_join_all(requests).await?.into_iter().sum())
}

/// A handler that finds the API busy slows its limit down, for everybody who shares it, without using up an attempt.
async fn fetch_record(_: StepCtx, record: u32) -> Result<u32, StepError> {
    Ok(record)
}

pub fn staff(worker: Worker) -> Worker {
    worker.flow("sync", sync).handler("fetch_record", fetch_record)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use eddyline::testing::TestEngine;
    use std::time::Duration;

    #[tokio::test]
    async fn two_tenants_share_the_api_and_each_has_its_own_rate() {
        let t = TestEngine::start(staff).await;
        t.limit_rate(LIMIT, 1, Duration::from_secs(1)).await;
        let began = t.now();
        let a = t.run("sync", Sync { tenant: "a".to_owned(), records: 5 }).await;
        let b = t.run("sync", Sync { tenant: "b".to_owned(), records: 5 }).await;
        assert_eq!((a.result::<u32>().await.unwrap(), b.result::<u32>().await.unwrap()), (10, 10));
        let took = t.now().duration_since(began).unwrap().as_secs_f64();
        assert!((3.9..15.0).contains(&took), "five requests at one a second, both at the same time: {took} s");
        t.stop().await;
    }
}
