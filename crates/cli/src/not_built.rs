//! Planned commands: they fail with "not built yet" instead of "unknown command".

use super::trouble::Trouble;

/// All arguments after the command.
#[derive(Debug, clap::Args)]
pub struct NotBuilt {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true, value_name = "…")]
    _rest: Vec<String>,
}

impl NotBuilt {
    pub fn refuse(&self, command: &str) -> Result<(), Trouble> {
        Err(Trouble::usage(format!("`eddy {command}` is not built yet")).help("`eddy --help` lists the commands"))
    }
}
