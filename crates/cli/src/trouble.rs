//! The error of a command: an exit code, a message, and advice.

use std::fmt::Write as _;
use std::process::ExitCode;

use eddyline_protocol::ApiError;
use eddyline_server::StartError;
use serde_json::{Value, json};

/// Exit codes. They are part of the contract: scripts depend on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// The run that the command waited for failed, or a check did.
    Failed = 1,
    Usage = 2,
    Unreachable = 3,
    NotFound = 4,
    Refused = 5,
    Denied = 6,
    Unavailable = 7,
    Interrupted = 130,
    /// The reader closed the pipe, which is no failure: `eddy run list | head`.
    Unread = 0,
}

pub const EXIT_CODES: &str = "Exit codes:
  0    done
  1    failed: the run you waited for failed or was cancelled, or a check failed
  2    wrong usage, or a file that cannot be read
  3    the server cannot be reached
  4    not found
  5    refused: a conflict, or invalid input
  6    not allowed: no key, an invalid key, another namespace, or a missing scope
  7    the server is temporarily unavailable; try again
  130  interrupted";

#[derive(Debug)]
pub struct Trouble {
    exit: Exit,
    message: String,
    details: Vec<Value>,
    help: Option<String>,
}

impl Trouble {
    fn new(exit: Exit, message: impl Into<String>) -> Trouble {
        Trouble { exit, message: message.into(), details: Vec::new(), help: None }
    }

    pub fn failed(message: impl Into<String>) -> Trouble {
        Trouble::new(Exit::Failed, message)
    }

    pub fn usage(message: impl Into<String>) -> Trouble {
        Trouble::new(Exit::Usage, message)
    }

    pub fn not_found(message: impl Into<String>) -> Trouble {
        Trouble::new(Exit::NotFound, message)
    }

    pub fn refused(message: impl Into<String>) -> Trouble {
        Trouble::new(Exit::Refused, message)
    }

    pub fn unavailable(message: impl Into<String>) -> Trouble {
        Trouble::new(Exit::Unavailable, message)
    }

    pub fn interrupted() -> Trouble {
        Trouble::new(Exit::Interrupted, "interrupted")
    }

    pub fn unreachable(message: impl Into<String>) -> Trouble {
        Trouble::new(Exit::Unreachable, message)
    }

    pub fn from_api(status: u16, error: ApiError) -> Trouble {
        let exit = match status {
            404 => Exit::NotFound,
            401 | 403 => Exit::Denied,
            408 | 429 | 500.. => Exit::Unavailable,
            _ => Exit::Refused,
        };
        Trouble { exit, message: error.message, details: error.details, help: None }
    }

    pub fn help(self, help: impl Into<String>) -> Trouble {
        Trouble { help: Some(help.into()), ..self }
    }

    pub fn exit(&self) -> Exit {
        self.exit
    }

    pub fn code(&self) -> ExitCode {
        ExitCode::from(self.exit as u8)
    }

    pub fn message(&self) -> &str {
        &self.message
    }

    /// As text: the message, each detail that adds to it on a line, the advice.
    pub fn text(&self) -> String {
        let mut text = format!("error: {}\n", self.message);
        let repeats = |detail: &Value| detail["message"].as_str().is_some_and(|said| self.message.ends_with(said));
        for detail in self.details.iter().filter(|detail| !repeats(detail)) {
            let _ = writeln!(text, "  - {}", detail_text(detail));
        }
        if let Some(help) = &self.help {
            let _ = writeln!(text, "  = {help}");
        }
        text
    }

    pub fn json(&self) -> Value {
        let mut error = json!({"exit": self.exit as u8, "message": self.message, "details": self.details});
        if let Some(help) = &self.help {
            error["help"] = json!(help);
        }
        json!({ "error": error })
    }
}

fn detail_text(detail: &Value) -> String {
    let Some(message) = detail.get("message").and_then(Value::as_str) else {
        return detail.as_str().map_or_else(|| detail.to_string(), str::to_owned);
    };
    let mut text = String::new();
    if let (Some(line), Some(column)) = (detail["line"].as_u64(), detail["column"].as_u64()) {
        let _ = write!(text, "{line}:{column} ");
    }
    match detail["path"].as_str() {
        Some(path) if !path.is_empty() => text.push_str(&format!("{path}: {message}")),
        _ => text.push_str(message),
    }
    if let Some(help) = detail["help"].as_str() {
        let _ = write!(text, "; {help}");
    }
    text
}

impl From<StartError> for Trouble {
    fn from(error: StartError) -> Trouble {
        let exit = if error.is_usage() { Exit::Usage } else { Exit::Failed };
        Trouble::new(exit, error.to_string())
    }
}

impl From<std::io::Error> for Trouble {
    /// Errors of standard output. Errors of files are created where the name of the file is known.
    fn from(error: std::io::Error) -> Trouble {
        match error.kind() {
            std::io::ErrorKind::BrokenPipe => Trouble::new(Exit::Unread, ""),
            _ => Trouble::failed(format!("cannot write to standard output: {error}")),
        }
    }
}
