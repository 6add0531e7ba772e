//! Prints usage errors as `--color` and `--json` demand. The arguments may not parse, so these flags are searched for
//! in the raw arguments.

use std::process::ExitCode;

use clap::ColorChoice;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use super::trouble::Trouble;

/// The command with the colours that `--color` selects.
pub fn colored(command: clap::Command) -> clap::Command {
    let typed = typed();
    let after = |flag: &str| typed.iter().skip_while(|arg| *arg != flag).nth(1).cloned();
    let joined = typed.iter().find_map(|arg| arg.strip_prefix("--color=").map(str::to_owned));
    match joined.or_else(|| after("--color")).as_deref() {
        Some("never") => command.color(ColorChoice::Never),
        Some("always") => command.color(ColorChoice::Always),
        _ => command,
    }
}

/// Prints a usage error, or the requested help.
pub fn print(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() || !typed().iter().any(|arg| arg == "--json") {
        // This fails only if the stream is closed.
        let _ = error.print();
        return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
    }
    let trouble = trouble(error);
    eprintln!("{}", trouble.json());
    trouble.code()
}

fn trouble(error: &clap::Error) -> Trouble {
    if matches!(error.kind(), ErrorKind::MissingSubcommand | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand) {
        return Trouble::usage("a command is missing").help("`eddy --help` lists the commands");
    }
    let text = error.render().to_string();
    let (message, rest) = text.split_once("\n\n").unwrap_or((text.as_str(), ""));
    let message: Vec<&str> = message.trim_start_matches("error: ").lines().map(str::trim).collect();
    let trouble = Trouble::usage(message.join(" "));
    match (tip(error), rest.lines().find(|line| line.starts_with("Usage: "))) {
        (Some(tip), _) => trouble.help(tip),
        (None, Some(usage)) => trouble.help(usage.to_owned()),
        (None, None) => trouble,
    }
}

fn tip(error: &clap::Error) -> Option<String> {
    let meant = [ContextKind::SuggestedSubcommand, ContextKind::SuggestedArg, ContextKind::SuggestedValue];
    let meant = meant.into_iter().find_map(|kind| error.get(kind))?;
    match meant {
        ContextValue::String(one) => Some(format!("did you mean {one}?")),
        ContextValue::Strings(several) if !several.is_empty() => {
            Some(format!("did you mean {}?", several.join(" or ")))
        }
        _ => None,
    }
}

/// The raw arguments, up to `--`: what follows belongs to another command.
fn typed() -> Vec<String> {
    let arguments = std::env::args_os().skip(1).map(|arg| arg.to_string_lossy().into_owned());
    arguments.take_while(|arg| arg != "--").collect()
}
