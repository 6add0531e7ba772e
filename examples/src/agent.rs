//! An agent: a model chooses tools until it has an answer. A person may send messages at any time; one of them interrupts
//! the tool that is running.

use eddyline::{FlowError, Inbox, Retry, RunCtx, StepError, Worker};
use serde::{Deserialize, Serialize};

/// An agent that needs more turns than this is going round in circles.
const MAX_TURNS: usize = 20;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Task {
    pub chat: String,
    pub question: String,
}

/// What the model wants to do next.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Move {
    Tool { name: String, input: String },
    Answer(String),
}

pub async fn agent(ctx: RunCtx, task: Task) -> Result<String, FlowError> {
    let mut inbox: Inbox<String> = ctx.inbox("message", &task.chat);
    let mut history = vec![format!("user: {}", task.question)];
    for _ in 0..MAX_TURNS {
        let next: Move = ctx.call("think", &history).retry(Retry::attempts(3)).await?;
        let (name, input) = match next {
            Move::Answer(answer) => return Ok(answer),
            Move::Tool { name, input } => (name, input),
        };
        // The same branch in every execution; the tool that lost is let go.
        tokio::select! {
            result = ctx.call::<String>("use_tool", &(&name, &input)).name(("tool", &name)) => {
                history.push(match result {
                    Ok(output) => format!("{name}: {output}"),
                    // The model may try something else.
                    Err(error) => format!("{name} failed: {error}"),
                });
            }
            message = inbox.receive() => history.push(format!("user interrupts: {}", message?)),
        }
    }
    Err(FlowError::permanent("no answer after too many turns").kind("TooManyTurns"))
}

/// Stands for a model: it looks things up until it knows something.
async fn think(_: eddyline::StepCtx, history: Vec<String>) -> Result<Move, StepError> {
    Ok(match history.last() {
        Some(line) if line.starts_with("search: ") => Move::Answer(line.replacen("search: ", "I found ", 1)),
        Some(line) if line.contains("interrupts") => Move::Answer(format!("as you say ({line})")),
        _ => Move::Tool { name: "search".to_owned(), input: "eddyline".to_owned() },
    })
}

async fn use_tool(_: eddyline::StepCtx, (name, input): (String, String)) -> Result<String, StepError> {
    match name.as_str() {
        "search" => Ok(format!("3 pages about {input}")),
        other => Err(StepError::permanent(format!("there is no tool {other}"))),
    }
}

pub fn staff(worker: Worker) -> Worker {
    worker.flow("agent", agent).handler("think", think).handler("use_tool", use_tool)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;
    use eddyline::Error;
    use eddyline::testing::TestEngine;
    use serde_json::json;

    fn task() -> Task {
        Task { chat: "c-1".to_owned(), question: "what is a durable flow?".to_owned() }
    }

    #[tokio::test]
    async fn the_agent_uses_tools_until_it_has_an_answer() {
        let t = TestEngine::shaking(staff).await;
        let run = t.run("agent", task()).await;
        assert_eq!(run.result::<String>().await.unwrap(), "I found 3 pages about eddyline");
        assert!(run.names().await.contains(&"tool[search]".to_owned()));
        t.stop().await;
    }

    #[tokio::test]
    async fn a_person_interrupts_a_tool_that_never_ends() {
        // The tool is on a queue that nobody serves.
        let staff = |worker: Worker| worker.flow("agent", agent).handler("think", think);
        let t = TestEngine::start(staff).await;
        let run = t.run("agent", task()).await;
        run.waits_at("tool[search]").await;
        t.publish("message", "c-1", "never mind").await;
        assert_eq!(run.result::<String>().await.unwrap(), "as you say (user interrupts: never mind)");
        t.stop().await;
    }

    #[tokio::test]
    async fn an_agent_that_goes_round_in_circles_is_stopped() {
        let t = TestEngine::start(staff).await;
        t.stub("think", |_| async { Ok(json!({"tool": {"name": "broken", "input": ""}})) });
        let Err(Error::RunFailed { failure, .. }) = t.run("agent", task()).await.result::<String>().await else {
            panic!("it fails")
        };
        assert_eq!(failure.kind, "TooManyTurns");
        t.stop().await;
    }
}
