//! A crawl: pages are fetched a few at a time, level by level, each page once.

use std::collections::BTreeSet;
use std::time::Duration;

use eddyline::{FlowError, Retry, RunCtx, StepError, Worker};
use serde::{Deserialize, Serialize};

/// How many pages are fetched at the same time.
const AT_ONCE: usize = 4;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Crawl {
    pub start: String,
    pub depth: u32,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Found {
    pub pages: usize,
    /// Pages that could not be fetched.
    pub broken: Vec<String>,
}

pub async fn crawl(ctx: RunCtx, crawl: Crawl) -> Result<Found, FlowError> {
    let mut known = BTreeSet::from([crawl.start.clone()]);
    let (mut level, mut broken) = (vec![crawl.start], Vec::new());
    for _ in 0..crawl.depth {
        let fetched = ctx
            .map("page", level.clone(), fetch)
            // By address: each page is remembered, whatever order it is found in.
            .key(String::clone)
            .limit(AT_ONCE)
            .retry(Retry::attempts(2))
            .timeout(Duration::from_secs(20))
            .settled()
            .await?;
        let mut next = Vec::new();
        for (url, links) in level.into_iter().zip(fetched) {
            match links {
                Ok(links) => next.extend(links.into_iter().filter(|link| known.insert(link.clone()))),
                Err(_) => broken.push(url),
            }
        }
        level = next;
    }
    Ok(Found { pages: known.len(), broken })
}

/// Stands for a web server: page `n` links to `2n` and `2n + 1`, and page 5 is gone.
async fn fetch(url: String) -> Result<Vec<String>, StepError> {
    let number: u32 = url.rsplit('/').next().unwrap_or_default().parse()?;
    if number == 5 {
        return Err(StepError::permanent("404").kind("NotFound"));
    }
    Ok(vec![format!("site/{}", 2 * number), format!("site/{}", 2 * number + 1)])
}

pub fn staff(worker: Worker) -> Worker {
    worker.flow("crawl", crawl)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use eddyline::testing::TestEngine;

    #[tokio::test]
    async fn every_page_is_fetched_once_and_a_broken_one_is_no_reason_to_stop() {
        let t = TestEngine::start(staff).await;
        t.fail("page[site\\/3]", [1], || StepError::new("busy"));
        let run = t.run("crawl", Crawl { start: "site/1".to_owned(), depth: 4 }).await;
        let found: Found = run.result().await.unwrap();
        assert_eq!(found, Found { pages: 25, broken: vec!["site/5".to_owned()] });
        let steps = run.steps().await;
        let three = steps.iter().find(|step| step.name == "page[site\\/3]").unwrap();
        assert_eq!(three.attempts, 2);
        t.stop().await;
    }
}
