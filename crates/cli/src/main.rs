//! `eddy`: the command line and the server in one binary. One file for each group of commands.

mod backup;
mod connect;
mod demo;
mod dev;
mod doctor;
mod event;
mod flow;
mod init;
mod input;
mod instance;
mod key;
mod limit;
mod migrate;
mod moment;
mod namespace;
mod not_built;
mod processes;
mod queue;
mod run;
mod run_id;
mod screen;
mod start;
mod store;
mod tail;
mod trouble;
mod unreached;
mod usage;
mod worker;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser};

use connect::{Remote, Where};
use not_built::NotBuilt;
use screen::{Color, Screen};
use trouble::{EXIT_CODES, Exit, Trouble};

/// jemalloc: one thread decides a transition, others write and answer it, so memory is often freed by another thread than
/// the one that allocated it. mimalloc kept two to four times as much of it resident.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Durable flows: start them, watch them, understand them.
#[derive(Debug, Parser)]
#[command(name = "eddy", version, after_help = EXIT_CODES, subcommand_required = true, arg_required_else_help = true)]
struct Eddy {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    at: Where,
    /// Print JSON: one document, or one per line for `tail` and `run watch`
    #[arg(long, global = true)]
    json: bool,
    /// When to use colours
    #[arg(long, global = true, value_enum, default_value_t, value_name = "WHEN")]
    color: Color,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Watch an order survive a SIGKILL of its engine, in 15 seconds
    Demo,
    /// Create a folder with a flow, a worker and a README
    Init(init::Init),
    /// Run a server that registers flows and restarts the worker when their files change
    Dev(dev::Dev),
    /// Run a server
    Serve(Box<eddyline_server::ServeArgs>),
    /// Flows: apply, validate, show, graph, diff, list, delete
    #[command(subcommand)]
    Flow(flow::FlowCommand),
    /// Start a run of a flow
    Start(start::Start),
    /// Runs: list, show, watch, and act on them
    #[command(subcommand)]
    Run(run::RunCommand),
    /// Show the timeline of a run, record by record
    Tail(tail::Tail),
    /// Workers: list, drain, or run one
    #[command(subcommand)]
    Worker(worker::WorkerCommand),
    /// Queues: list, set bounds, pause, resume
    #[command(subcommand)]
    Queue(queue::QueueCommand),
    /// Limits across queues: list, set, delete
    #[command(subcommand)]
    Limit(limit::LimitCommand),
    /// Gates: list, open, cancel
    #[command(subcommand)]
    Gate(event::GateCommand),
    /// Events: publish
    #[command(subcommand)]
    Event(event::EventCommand),
    /// Keys: create, list, revoke
    #[command(subcommand)]
    Key(key::KeyCommand),
    /// Namespaces: list, create, set
    #[command(subcommand)]
    Namespace(namespace::NamespaceCommand),
    /// Instances: list the servers that share a store
    #[command(subcommand)]
    Instance(instance::InstanceCommand),
    /// Create or update the tables of a PostgreSQL store
    Migrate(migrate::Migrate),
    /// Stores: copy to another store
    #[command(subcommand)]
    Store(store::StoreCommand),
    /// Back up an embedded store
    Backup(backup::Backup),
    /// Check a server, or a store's directory, for problems
    Doctor(doctor::Doctor),
    /// Print a completion script for your shell
    Completions { shell: clap_complete::Shell },
    #[command(hide = true)]
    Schedule(NotBuilt),
    #[command(hide = true)]
    Trigger(NotBuilt),
    #[command(hide = true)]
    Bench(NotBuilt),
    #[command(hide = true)]
    Verify(NotBuilt),
    #[command(hide = true)]
    Export(NotBuilt),
    #[command(hide = true)]
    Import(NotBuilt),
}

/// What every command gets.
#[derive(Debug, Clone)]
struct Context {
    screen: Screen,
    at: Where,
}

impl Context {
    fn remote(&self) -> Result<Remote, Trouble> {
        Remote::new(&self.at)
    }
}

impl Eddy {
    fn read() -> Result<Eddy, clap::Error> {
        let matches = usage::colored(Eddy::command()).try_get_matches().map_err(as_typed)?;
        let mut eddy = Eddy::from_arg_matches(&matches).map_err(|error| error.format(&mut Eddy::command()))?;
        eddy.at.remember_sources(&matches);
        Ok(eddy)
    }
}

/// Parses again without the environment: clap's usage line lists what the environment sets as if it had been typed.
fn as_typed(error: clap::Error) -> clap::Error {
    fn without_environment(command: clap::Command) -> clap::Command {
        let command = command.mut_args(|arg| arg.env(clap::builder::Resettable::Reset));
        command.mut_subcommands(without_environment)
    }
    match without_environment(usage::colored(Eddy::command())).try_get_matches() {
        Err(typed) if error.use_stderr() && typed.kind() == error.kind() => typed,
        // The environment caused the error, or it is a help text, which shows what the environment sets.
        _ => error,
    }
}

fn main() -> ExitCode {
    let eddy = match Eddy::read() {
        Ok(eddy) => eddy,
        Err(error) => return usage::print(&error),
    };
    let ctx = Context { screen: Screen::new(eddy.json, eddy.color), at: eddy.at };
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            ctx.screen.aside(format!("error: cannot start threads: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let ended = runtime.block_on(run(&ctx, eddy.command));
    // A thread may still be blocked on standard input.
    runtime.shutdown_background();
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(trouble) => {
            match (trouble.exit(), ctx.screen.json) {
                (Exit::Unread, _) => {}
                (_, true) => ctx.screen.aside(trouble.json()),
                (_, false) => ctx.screen.aside(trouble.text().trim_end()),
            }
            trouble.code()
        }
    }
}

/// Logs warnings and errors, or what `EDDY_LOG` selects.
fn warnings_only(screen: &Screen) {
    match std::env::var_os("EDDY_LOG") {
        Some(_) => eddyline_server::logs(false, screen.log_colors),
        None => {
            let logs = tracing_subscriber::fmt().with_max_level(tracing::Level::WARN).with_target(false);
            let logs = logs.with_ansi(screen.log_colors);
            // Fails if logging is already set up, which is fine.
            let _ = logs.with_writer(std::io::stderr).try_init();
        }
    }
}

async fn run(ctx: &Context, command: Command) -> Result<(), Trouble> {
    match command {
        Command::Demo => demo::run(ctx).await,
        Command::Init(init) => init::run(ctx, &init),
        Command::Dev(dev) => dev::run(ctx, dev).await,
        Command::Serve(args) => Ok(eddyline_server::serve(*args, ctx.screen.log_colors).await?),
        Command::Flow(command) => flow::run(ctx, command).await,
        Command::Start(start) => start::run(ctx, start).await,
        Command::Run(command) => run::run(ctx, command).await,
        Command::Tail(tail) => tail::run(ctx, tail).await,
        Command::Worker(command) => worker::run(ctx, command).await,
        Command::Queue(command) => queue::run(ctx, command).await,
        Command::Limit(command) => limit::run(ctx, command).await,
        Command::Gate(command) => event::gate(ctx, command).await,
        Command::Event(command) => event::event(ctx, command).await,
        Command::Key(command) => key::run(ctx, command).await,
        Command::Store(command) => store::run(ctx, command).await,
        Command::Backup(backup) => backup::run(ctx, backup).await,
        Command::Doctor(doctor) => doctor::run(ctx, doctor).await,
        Command::Completions { shell } => completions(ctx, shell),
        Command::Namespace(command) => namespace::run(ctx, command).await,
        Command::Instance(command) => instance::run(ctx, command).await,
        Command::Schedule(command) => command.refuse("schedule"),
        Command::Trigger(command) => command.refuse("trigger"),
        Command::Bench(command) => command.refuse("bench"),
        Command::Verify(command) => command.refuse("verify"),
        Command::Export(command) => command.refuse("export"),
        Command::Import(command) => command.refuse("import"),
        Command::Migrate(migrate) => migrate::run(ctx, migrate).await,
    }
}

fn completions(ctx: &Context, shell: clap_complete::Shell) -> Result<(), Trouble> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Eddy::command(), "eddy", &mut script);
    ctx.screen.say(String::from_utf8_lossy(&script).trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commands_do_not_contradict_each_other() {
        Eddy::command().debug_assert();
    }
}
