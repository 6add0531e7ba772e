//! Problems of a definition, as shown to its author.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A position in the text: lines and columns from 1, columns in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub line: u32,
    pub column: u32,
}

impl Place {
    pub const START: Place = Place { line: 1, column: 1 };
}

/// An error or a warning.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// Path in the definition: `steps.pay.retry.attempts`; empty for the text as a whole.
    pub path: String,
    pub line: u32,
    pub column: u32,
    /// What was found and what was expected.
    pub message: String,
    /// What to write instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub help: Option<String>,
}

impl Problem {
    pub(super) fn new(path: &str, at: Place, message: impl Into<String>) -> Problem {
        Problem { path: path.to_owned(), line: at.line, column: at.column, message: message.into(), help: None }
    }

    pub(super) fn help(self, help: impl Into<String>) -> Problem {
        Problem { help: Some(help.into()), ..self }
    }

    /// The problem with its source line and a caret under the position.
    pub fn render(&self, text: &str) -> String {
        let (shown, caret) = excerpt(text, self);
        let number = self.line.to_string();
        let margin = " ".repeat(number.len());
        let path = if self.path.is_empty() { String::new() } else { format!("{}: ", self.path) };
        let mut out = format!(
            "{path}{}\n{margin}--> {}:{}\n{number} | {shown}\n{margin} | {}^\n",
            self.message,
            self.line,
            self.column,
            " ".repeat(caret)
        );
        if let Some(help) = &self.help {
            out.push_str(&format!("{margin} = {help}\n"));
        }
        out
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{} ", self.line, self.column)?;
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        f.write_str(&self.message)?;
        match &self.help {
            Some(help) => write!(f, "; {help}"),
            None => Ok(()),
        }
    }
}

/// All problems of a definition, in text order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Problems(pub Vec<Problem>);

impl Problems {
    /// Every problem with its source line.
    pub fn render(&self, text: &str) -> String {
        self.0.iter().map(|problem| problem.render(text)).collect::<Vec<_>>().join("\n")
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, problem) in self.0.iter().enumerate() {
            let end = if at == 0 { "" } else { "\n" };
            write!(f, "{end}{problem}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

/// The part of the line around the problem (a JSON definition may be one long line), and the caret's column in it.
fn excerpt(text: &str, problem: &Problem) -> (String, usize) {
    const BEFORE: usize = 60;
    const WIDTH: usize = 110;
    let line = text.lines().nth((problem.line as usize).saturating_sub(1)).unwrap_or("");
    let column = (problem.column as usize).saturating_sub(1);
    let skipped = if column > WIDTH - 20 { column - BEFORE } else { 0 };
    let mut shown: String = if skipped > 0 { "…".into() } else { String::new() };
    let clean = |c: char| if c.is_control() { ' ' } else { c };
    shown.extend(line.chars().skip(skipped).take(WIDTH).map(clean));
    if line.chars().nth(skipped + WIDTH).is_some() {
        shown.push('…');
    }
    (shown, column - skipped + usize::from(skipped > 0))
}
