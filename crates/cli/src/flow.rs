//! `eddy flow`: definitions in files and on the server.

mod difference;
mod markup;
mod terminal;

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use eddyline_engine::parse_definition;
use eddyline_language::definition::{Parsed, Problem, Problems, parse_named, wrong_name};
use eddyline_machine::Flow;
use eddyline_protocol::{FlowBuilds, FlowInfo, FlowRegistered};
use serde_json::{Value, json};

use super::Context;
use super::connect::{Remote, segment, understood};
use super::screen::{Ink, Line, counted, table};
use super::trouble::Trouble;
use difference::{Side, difference};

/// File extensions of definitions.
const ENDINGS: [&str; 3] = ["yaml", "yml", "json"];

#[derive(Debug, clap::Subcommand)]
pub enum FlowCommand {
    /// Register the flows in files (or in all files of a directory)
    Apply {
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
    },
    /// Check the flows in files, without a server
    Validate {
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
    },
    /// Show a registered flow: its definition and its runs
    Show {
        name: String,
        /// A version other than the current one
        #[arg(long)]
        version: Option<String>,
    },
    /// Draw a flow from a file, or a registered flow
    Graph {
        #[arg(value_name = "FILE|NAME")]
        flow: String,
        /// Print Mermaid
        #[arg(long, conflicts_with = "dot")]
        mermaid: bool,
        /// Print DOT, for Graphviz
        #[arg(long)]
        dot: bool,
    },
    /// Show what a file would change in the registered flow, or in another file
    Diff {
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// What to compare with: a registered flow or a file [default: the registered flow of the same name]
        #[arg(value_name = "NAME|FILE")]
        with: Option<String>,
    },
    /// List the registered flows
    List,
    /// Delete a flow that has no unfinished runs; its ended runs are kept
    Delete { name: String },
    /// Show which builds of a code flow still have runs
    Builds { name: String },
}

pub async fn run(ctx: &Context, command: FlowCommand) -> Result<(), Trouble> {
    match command {
        FlowCommand::Apply { files } => apply(ctx, &files).await,
        FlowCommand::Validate { files } => validate(ctx, &files),
        FlowCommand::Show { name, version } => show(ctx, &name, version.as_deref()).await,
        FlowCommand::Graph { flow, mermaid, dot } => graph(ctx, &flow, mermaid, dot).await,
        FlowCommand::Diff { file, with } => diff(ctx, &file, with.as_deref()).await,
        FlowCommand::List => list(ctx).await,
        FlowCommand::Delete { name } => delete(ctx, &name).await,
        FlowCommand::Builds { name } => builds(ctx, &name).await,
    }
}

async fn delete(ctx: &Context, name: &str) -> Result<(), Trouble> {
    let remote = ctx.remote()?;
    match remote.delete(&format!("/v1/flows/{}", segment(name)), &[]).await {
        Err(trouble) => Err(remote.name_near(name, trouble).await),
        Ok(answer) if ctx.screen.json => ctx.screen.document(&answer),
        Ok(_) => ctx.screen.say(format!("{name} deleted")),
    }
}

async fn builds(ctx: &Context, name: &str) -> Result<(), Trouble> {
    let remote = ctx.remote()?;
    let answer: Value = match remote.get(&format!("/v1/flows/{}/builds", segment(name)), &[]).await {
        Err(trouble) => return Err(remote.name_near(name, trouble).await),
        Ok(answer) => answer,
    };
    if ctx.screen.json {
        return ctx.screen.document(&answer);
    }
    let found: FlowBuilds = understood(answer)?;
    let row = |build: &eddyline_protocol::FlowBuild| {
        let name = build.build.as_deref().unwrap_or("none");
        vec![Line::plain(name), Line::plain(build.runs.to_string()), Line::plain(build.workers.to_string())]
    };
    let rows: Vec<Vec<Line>> = found.items.iter().map(row).collect();
    ctx.screen.say(format!("{} ({})", found.flow, found.policy))?;
    match rows.is_empty() {
        true => ctx.screen.say("no runs that have not ended, and no workers"),
        false => ctx.screen.rows(table(&["BUILD", "RUNS", "WORKERS"], &rows)),
    }
}

/// The text of a definition and its file.
#[derive(Debug)]
pub struct Source {
    pub path: PathBuf,
    pub text: String,
}

impl Source {
    pub fn read(path: &Path) -> Result<Source, Trouble> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| Trouble::usage(format!("cannot read {}: {error}", path.display())))?;
        Ok(Source { path: path.to_owned(), text })
    }

    /// A definition without a `name` is named after its file.
    pub fn parse(&self) -> Result<Parsed, Problems> {
        let nameless = |problems: &Problems| problems.0.iter().any(|p| p.message.contains("a flow needs a name"));
        match parse_definition(None, &self.text) {
            Err(problems) if nameless(&problems) => match self.path.file_stem().and_then(|stem| stem.to_str()) {
                Some(stem) => parse_definition(Some(stem), &self.text),
                None => Err(problems),
            },
            result => result,
        }
    }

    pub fn content_type(&self) -> &'static str {
        match self.path.extension().is_some_and(|ending| ending == "json") {
            true => "application/json",
            false => "application/yaml",
        }
    }

    /// The problem of a valid definition whose flow is also defined in another file.
    pub fn also_in(&self, flow: &str, other: &Path) -> Problems {
        // Parsing it under another name fails at the position of `name`. Without a `name`, the position is 1:1.
        let renamed = parse_named(Some("another"), &self.text).err();
        let place = renamed.and_then(|problems| problems.0.into_iter().find(|problem| problem.path == "name"));
        Problems(vec![Problem {
            path: "name".to_owned(),
            line: place.as_ref().map_or(1, |place| place.line),
            column: place.as_ref().map_or(1, |place| place.column),
            message: format!("the flow `{flow}` is also in {}", other.display()),
            help: Some("rename one of them".to_owned()),
        }])
    }

    /// The problems with their source lines, under the name of the file.
    pub fn render(&self, problems: &Problems) -> String {
        let count = counted(problems.0.len() as u64, "problem");
        format!("{}: {count}\n\n{}", self.path.display(), problems.render(&self.text))
    }
}

/// Whether a file has the extension of a definition.
pub fn is_definition(path: &Path) -> bool {
    path.extension().and_then(|ending| ending.to_str()).is_some_and(|ending| ENDINGS.contains(&ending))
}

/// Reads the files, and the definitions in the directories; each file once.
fn sources(paths: &[PathBuf]) -> Result<Vec<Source>, Trouble> {
    let mut files = Vec::new();
    for path in paths {
        if !path.is_dir() {
            files.push(path.clone());
            continue;
        }
        let unreadable = |error| Trouble::usage(format!("cannot read {}: {error}", path.display()));
        let mut inside = Vec::new();
        for entry in std::fs::read_dir(path).map_err(unreadable)? {
            let file = entry.map_err(unreadable)?.path();
            if is_definition(&file) && file.is_file() {
                inside.push(file);
            }
        }
        inside.sort();
        files.extend(inside);
    }
    let mut seen = BTreeSet::new();
    // A file without a canonical path cannot be read: reading it reports the error.
    files.retain(|file| file.canonicalize().map_or(true, |file| seen.insert(file)));
    files.iter().map(|file| Source::read(file)).collect()
}

/// Parses all definitions, and rejects a second file with the same flow: which one wins would depend on their order.
fn parse_all(sources: &[Source]) -> Vec<Result<Parsed, Problems>> {
    let mut files = BTreeMap::new();
    let parse = |source| {
        let parsed = Source::parse(source)?;
        match files.entry(parsed.flow.name.clone()) {
            Entry::Vacant(free) => free.insert(&source.path),
            Entry::Occupied(taken) => return Err(source.also_in(taken.key(), taken.get())),
        };
        Ok(parsed)
    };
    sources.iter().map(parse).collect()
}

/// Registers one definition.
pub async fn register(remote: &Remote, source: &Source, flow: &Flow) -> Result<FlowRegistered, Trouble> {
    let path = format!("/v1/flows/{}", segment(&flow.name));
    remote.put_text(&path, source.content_type(), &source.text).await
}

/// Checks all files before it registers the first one: if one has errors, nothing is registered.
async fn apply(ctx: &Context, files: &[PathBuf]) -> Result<(), Trouble> {
    let sources = sources(files)?;
    let parsed = all_valid(ctx, &sources).map_err(|trouble| trouble.help("nothing was registered"))?;
    let remote = ctx.remote()?;
    let mut answers = Vec::new();
    for (source, parsed) in sources.iter().zip(&parsed) {
        let answer = register(&remote, source, &parsed.flow).await?;
        if !ctx.screen.json {
            let what = if answer.changed { "registered" } else { "is already registered" };
            ctx.screen.say(format!("{} {} {what}", answer.name, answer.version))?;
            warn(ctx, source, parsed);
        }
        answers.push(answer);
    }
    if ctx.screen.json { ctx.screen.document(&answers) } else { Ok(()) }
}

fn validate(ctx: &Context, files: &[PathBuf]) -> Result<(), Trouble> {
    let sources = sources(files)?;
    if ctx.screen.json {
        let parsed = sources.iter().zip(parse_all(&sources));
        let results: Vec<Value> = parsed.map(|(source, parsed)| verdict(source, parsed)).collect();
        ctx.screen.document(&results)?;
        return match results.iter().all(|result| result["valid"] == true) {
            true => Ok(()),
            false => Err(Trouble::refused("some flows have errors")),
        };
    }
    for (source, parsed) in sources.iter().zip(all_valid(ctx, &sources)?) {
        let steps = parsed.flow.graph().map_or(0, |graph| graph.scope(eddyline_machine::Graph::ROOT).steps.len());
        let steps = match steps {
            0 => "code".to_owned(),
            n => counted(n as u64, "step"),
        };
        let path = source.path.display();
        ctx.screen.line(
            &Line::default()
                .with(Ink::Good, "✓ ")
                .with(Ink::Plain, format!("{path}: {} {} ({steps})", parsed.flow.name, parsed.flow.version)),
        )?;
        warn(ctx, source, &parsed);
    }
    Ok(())
}

fn verdict(source: &Source, parsed: Result<Parsed, Problems>) -> Value {
    match parsed {
        Ok(parsed) => json!({"file": source.path, "valid": true, "name": parsed.flow.name,
            "version": parsed.flow.version, "warnings": parsed.warnings}),
        Err(problems) => json!({"file": source.path, "valid": false, "problems": problems}),
    }
}

fn warn(ctx: &Context, source: &Source, parsed: &Parsed) {
    for warning in &parsed.warnings {
        ctx.screen.aside(format!("warning: {}", warning.render(&source.text)));
    }
}

/// Parses all files; prints every problem of every file to standard error.
fn all_valid(ctx: &Context, sources: &[Source]) -> Result<Vec<Parsed>, Trouble> {
    if sources.is_empty() {
        return Err(Trouble::usage("no definitions found: expected files that end in .yaml, .yml or .json"));
    }
    let mut valid = Vec::new();
    for (source, parsed) in sources.iter().zip(parse_all(sources)) {
        match parsed {
            Ok(parsed) => valid.push(parsed),
            Err(problems) => ctx.screen.aside(source.render(&problems)),
        }
    }
    match sources.len() - valid.len() {
        0 => Ok(valid),
        1 => Err(Trouble::refused("1 flow has errors")),
        bad => Err(Trouble::refused(format!("{bad} flows have errors"))),
    }
}

/// The flow in the file of that name if it exists, otherwise the registered flow.
async fn flow_of(ctx: &Context, named: &str) -> Result<Side, Trouble> {
    let path = Path::new(named);
    if path.is_file() {
        // It could also be the name of a flow.
        if !is_definition(path) && wrong_name(named).is_none() {
            ctx.screen.aside(format!("{named} is a file here: using the file, not a registered flow"));
        }
        return Ok(Side { flow: one(ctx, path)?, file: Some(named.to_owned()) });
    }
    if is_definition(path) {
        return Err(Trouble::usage(format!("there is no file {named}")));
    }
    registered(ctx, named).await
}

fn one(ctx: &Context, path: &Path) -> Result<Flow, Trouble> {
    let source = Source::read(path)?;
    match source.parse() {
        Ok(parsed) => Ok(parsed.flow),
        Err(problems) => {
            ctx.screen.aside(source.render(&problems));
            Err(Trouble::refused(format!("{} has errors", path.display())))
        }
    }
}

async fn registered(ctx: &Context, name: &str) -> Result<Side, Trouble> {
    let info = ctx.remote()?.flow(name, None).await?;
    Ok(Side { flow: flow_from(&info)?, file: None })
}

/// Parses a registered definition.
pub fn flow_from(info: &FlowInfo) -> Result<Flow, Trouble> {
    let parsed = parse_named(Some(&info.name), &info.definition.to_string());
    parsed.map(|parsed| parsed.flow).map_err(|problems| {
        Trouble::refused(format!("this version of eddy cannot parse the definition of {}: {problems}", info.name))
    })
}

async fn graph(ctx: &Context, named: &str, mermaid: bool, dot: bool) -> Result<(), Trouble> {
    let flow = flow_of(ctx, named).await?.flow;
    let (title, analysis) = (format!("{} {}", flow.name, flow.version), eddyline_server::analysis(&flow));
    if ctx.screen.json {
        return ctx.screen.document(&json!({"name": flow.name, "version": flow.version, "analysis": analysis}));
    }
    match (mermaid, dot) {
        (true, _) => ctx.screen.say(markup::mermaid(&title, &analysis).trim_end()),
        (_, true) => ctx.screen.say(markup::dot(&title, &analysis).trim_end()),
        _ => ctx.screen.lines(&terminal::draw(&title, &analysis, ctx.screen.width())),
    }
}

async fn diff(ctx: &Context, file: &Path, with: Option<&str>) -> Result<(), Trouble> {
    let new = Side { flow: one(ctx, file)?, file: Some(file.display().to_string()) };
    let old = match with {
        Some(with) => flow_of(ctx, with).await?,
        None => registered(ctx, &new.flow.name).await?,
    };
    let difference = difference(&old, &new);
    if ctx.screen.json {
        return ctx.screen.document(&difference);
    }
    ctx.screen.lines(&difference.lines())?;
    // Only a comparison with the registered flow of the same name says anything about runs.
    if old.file.is_none() && old.flow.name == new.flow.name && old.flow.version != new.flow.version {
        ctx.screen.say(format!(
            "\nRuns that are under way keep {}; runs started after `eddy flow apply` get {}.",
            old.flow.version, new.flow.version
        ))?;
    }
    Ok(())
}

async fn show(ctx: &Context, name: &str, version: Option<&str>) -> Result<(), Trouble> {
    let info = ctx.remote()?.flow(name, version).await?;
    if ctx.screen.json {
        return ctx.screen.document(&info);
    }
    let title = format!("{} {}", info.name, info.version);
    ctx.screen.lines(&terminal::draw(&title, &info.analysis, ctx.screen.width()))?;
    ctx.screen.say("")?;
    ctx.screen.line(&runs_of(&info))
}

fn runs_of(info: &FlowInfo) -> Line {
    let stats = &info.stats;
    let counts = [
        ("pending", stats.pending),
        ("running", stats.running),
        ("waiting", stats.waiting),
        ("paused", stats.paused),
        ("completed", stats.completed),
        ("failed", stats.failed),
        ("cancelled", stats.cancelled),
    ];
    let mut line = Line::default();
    for (status, count) in counts.into_iter().filter(|(_, count)| *count > 0) {
        let text = if line == Line::default() { format!("{count} {status}") } else { format!(", {count} {status}") };
        line = line.with(Ink::of_status(status), text);
    }
    if line == Line::default() { Line::default().with(Ink::Faint, "no runs") } else { line }
}

async fn list(ctx: &Context) -> Result<(), Trouble> {
    let flows = ctx.remote()?.list("/v1/flows", &[], None).await?;
    if ctx.screen.json {
        return ctx.screen.document(&flows);
    }
    let mut rows = Vec::new();
    for flow in flows {
        let info: FlowInfo = understood(flow)?;
        let steps = info.analysis.levels.iter().map(Vec::len).sum::<usize>();
        let steps = if info.kind == "code" { "code".to_owned() } else { steps.to_string() };
        rows.push(vec![Line::plain(&info.name), Line::plain(&info.version), Line::plain(steps), runs_of(&info)]);
    }
    match rows.is_empty() {
        true => ctx.screen.say("no flow is registered yet: `eddy flow apply FILE`"),
        false => ctx.screen.rows(table(&["FLOW", "VERSION", "STEPS", "RUNS"], &rows)),
    }
}
