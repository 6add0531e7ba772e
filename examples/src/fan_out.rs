//! Work for a pool: a document is split, each part is scored by whichever worker has a GPU, and the result is the sum.

use std::time::Duration;

use eddyline::{FlowError, Retry, RunCtx, StepCtx, StepError, Worker};
use futures_util::future::try_join_all;

/// The queue of the pool.
pub const POOL: &str = "gpu";

pub async fn score(ctx: RunCtx, text: String) -> Result<u64, FlowError> {
    // All calls go to the server in one message, and the function waits without using a slot of its worker.
    let parts = text.split_whitespace().enumerate().map(|(at, word)| {
        ctx.call::<u64>("score_part", &word)
            .name(("part", at))
            .queue(POOL)
            .retry(Retry::attempts(3))
            .timeout(Duration::from_secs(300))
    });
    Ok(try_join_all(parts).await?.into_iter().sum())
}

async fn score_part(ctx: StepCtx, word: String) -> Result<u64, StepError> {
    ctx.log(format!("scoring {word}"));
    Ok(word.len() as u64)
}

/// In production the pool is another program: `worker.queue(POOL).handler("score_part", score_part)`.
pub fn staff(worker: Worker) -> Worker {
    worker.queue("default").queue(POOL).flow("score", score).handler("score_part", score_part)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use eddyline::testing::TestEngine;

    #[tokio::test]
    async fn the_parts_are_scored_by_the_pool_even_if_a_worker_of_it_dies() {
        let t = TestEngine::start(staff).await;
        t.lose_worker_after("score_part");
        let text = (0..100).map(|_| "word").collect::<Vec<_>>().join(" ");
        let run = t.run("score", text).await;
        assert_eq!(run.result::<u64>().await.unwrap(), 400);
        let calls = run.steps().await.into_iter().filter(|step| step.kind == "call").count();
        assert_eq!(calls, 100);
        t.stop().await;
    }
}
