//! Commands that are planned and not there yet: they say so, instead of being taken for another.

use super::trouble::Trouble;

/// Whatever is written behind the command.
#[derive(Debug, clap::Args)]
pub struct NotBuilt {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true, value_name = "…")]
    rest: Vec<String>,
}

impl NotBuilt {
    pub fn refuse(&self, command: &str) -> Result<(), Trouble> {
        // Of `store` it is the command behind it that is planned.
        let command = match (command, self.rest.first()) {
            ("store", Some(what)) if !what.starts_with('-') => format!("store {what}"),
            _ => command.to_owned(),
        };
        Err(Trouble::usage(format!("`eddy {command}` is not built yet")).help("`eddy --help` lists what there is"))
    }
}
