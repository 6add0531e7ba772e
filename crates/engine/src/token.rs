//! The names of a task: what a worker shows with every report.

use std::fmt;
use std::str::FromStr;

use eddyline_machine::{ActId, Fence, RunId};
use uuid::Uuid;

/// Binds a report to its run, activation and attempt, and to the fence that only grows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskToken {
    pub run: RunId,
    pub activation: ActId,
    pub attempt: u32,
    pub fence: Fence,
}

impl TaskToken {
    /// The id of the task, new with each attempt; timelines show it as `jobId`.
    pub fn task_id(&self) -> String {
        format!("{}.{}", self.run, self.fence)
    }
}

impl fmt::Display for TaskToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}.{}", self.run, self.activation, self.attempt, self.fence)
    }
}

/// What was given is not a task's token.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not the token of a task")]
pub struct NotAToken(String);

impl FromStr for TaskToken {
    type Err = NotAToken;

    fn from_str(text: &str) -> Result<TaskToken, NotAToken> {
        let parse = || {
            let mut parts = text.split('.');
            let token = TaskToken {
                run: RunId(Uuid::try_parse(parts.next()?).ok()?),
                activation: ActId(parts.next()?.parse().ok()?),
                attempt: parts.next()?.parse().ok()?,
                fence: Fence(parts.next()?.parse().ok()?),
            };
            parts.next().is_none().then_some(token)
        };
        parse().ok_or_else(|| NotAToken(text.chars().take(120).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_read_as_it_was_written_and_nothing_else_is() {
        let token = TaskToken { run: RunId(Uuid::from_u128(7)), activation: ActId(3), attempt: 2, fence: Fence(9) };
        assert_eq!(token.to_string().parse(), Ok(token));
        for text in ["", "x", "00000000-0000-0000-0000-000000000007.3.2", &format!("{token}.1"), "a.b.c.d"] {
            assert!(text.parse::<TaskToken>().is_err(), "{text}");
        }
    }
}
