//! Checks a definition like a registration: `cargo run --example validate -- flow.yaml`.

// The machine reads no files, but this example does.
#![allow(clippy::disallowed_methods)]

use std::process::ExitCode;

use eddyline_language::definition::{analysis, parse};

fn main() -> ExitCode {
    let Some(path) = std::env::args().nth(1) else {
        eprintln!("usage: validate FLOW.yaml");
        return ExitCode::from(2);
    };
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) => {
            eprintln!("{path}: {error}");
            return ExitCode::from(2);
        }
    };
    match parse(&text) {
        Ok(parsed) => {
            for warning in &parsed.warnings {
                println!("warning: {}", warning.render(&text));
            }
            println!("{} {}", parsed.flow.name, parsed.flow.version);
            for (level, steps) in analysis(&parsed.flow).levels.iter().enumerate() {
                println!("  {level}: {}", steps.join(", "));
            }
            ExitCode::SUCCESS
        }
        Err(problems) => {
            print!("{}", problems.render(&text));
            ExitCode::FAILURE
        }
    }
}
