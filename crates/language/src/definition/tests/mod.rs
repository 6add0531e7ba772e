//! Accepted flows, and the problems reported for the others.

mod accepted;
mod any_text;
mod problems;
mod readable;
mod syntax;
mod versions;

use super::*;

/// The problems of a text, rendered for people.
fn rendered(text: &str) -> String {
    match parse(text) {
        Ok(_) => "no problems\n".into(),
        Err(problems) => problems.render(text),
    }
}

/// The problems of a flow `f` with these steps, one per line.
fn of_steps(steps: &str) -> String {
    of(&format!("name: f\nsteps:\n{}", indent(steps)))
}

fn of(text: &str) -> String {
    match parse(text) {
        Ok(parsed) if parsed.warnings.is_empty() => "fine".into(),
        Ok(parsed) => {
            let warnings = parsed.warnings.iter().map(|warning| format!("warning: {warning}"));
            warnings.collect::<Vec<_>>().join("\n")
        }
        Err(problems) => problems.to_string(),
    }
}

fn indent(text: &str) -> String {
    text.lines().map(|line| format!("  {line}\n")).collect()
}

/// Each case as written, followed by what `say` returns for it.
fn cases<'a>(texts: impl IntoIterator<Item = &'a str>, say: impl Fn(&str) -> String) -> String {
    let mut out = String::new();
    for text in texts {
        let text = text.trim_matches('\n');
        out.push_str(&format!("{text}\n{}\n", indent(&say(text)).replace("  ", "    ")));
    }
    out
}
