//! Wrong usage, told as the flags ask for: in colours or without, as text or as JSON. They may be the very part of the line
//! that cannot be read, so they are looked for in it as it was typed.

use std::process::ExitCode;

use clap::ColorChoice;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use super::trouble::Trouble;

/// The command with the colours that are asked for.
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

/// Tells what is wrong with the line, or shows the help that was asked for.
pub fn tell(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() || !typed().iter().any(|arg| arg == "--json") {
        // Writing fails if standard error is closed: there is nobody to tell.
        let _ = error.print();
        return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
    }
    let trouble = trouble(error);
    eprintln!("{}", trouble.json());
    trouble.code()
}

fn trouble(error: &clap::Error) -> Trouble {
    if matches!(error.kind(), ErrorKind::MissingSubcommand | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand) {
        return Trouble::usage("a command is missing").help("`eddy --help` lists what there is");
    }
    let text = error.render().to_string();
    let (said, rest) = text.split_once("\n\n").unwrap_or((text.as_str(), ""));
    let said: Vec<&str> = said.trim_start_matches("error: ").lines().map(str::trim).collect();
    let trouble = Trouble::usage(said.join(" "));
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

/// The line as it was typed, up to what is passed on to another command.
fn typed() -> Vec<String> {
    let arguments = std::env::args_os().skip(1).map(|arg| arg.to_string_lossy().into_owned());
    arguments.take_while(|arg| arg != "--").collect()
}
