//! The `kvant` command line: parses arguments, calls the library, prints results. A library of two
//! functions, so that a fuzzer can call the argument parser.
//!
//! Results go to stdout, progress and logs to stderr. Exit codes: 0 success, 1 failure, 2 wrong
//! usage.
#![forbid(unsafe_code)]

mod args;
mod argv;
mod bench;
mod chat;
mod completions;
mod console;
mod convert;
mod doctor;
mod eval;
mod failure;
mod foreign_env;
mod foreign_flags;
mod gpu;
mod hints;
#[cfg(feature = "hub")]
mod hub;
mod inspect;
mod interrupt;
mod log;
mod lora;
mod model_source;
#[cfg(feature = "otel")]
mod otlp;
mod output;
mod plan;
mod progress;
mod quantize;
mod run;
mod serve;
mod template;
mod vision;
mod weight_type;

use std::ffi::OsString;
use std::panic::{catch_unwind, set_hook};
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::failure::Failure;

/// Run large language models on a compressed KV cache.
#[derive(Parser)]
#[command(name = "kvant", version, arg_required_else_help = true, after_help = EXAMPLE)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    log: log::LogArgs,
}

const EXAMPLE: &str =
    "Examples:\n  kvant run \"What is the capital of France?\" -ctk turbo3 -ctv turbo3\n  kvant chat";

#[derive(Subcommand)]
enum Command {
    /// Generate the answer to a prompt
    Run(run::RunArgs),
    /// Chat with a model in the terminal
    Chat(chat::ChatArgs),
    /// Serve OpenAI-compatible requests, with continuous batching
    Serve(Box<serve::ServeArgs>),
    /// Show the contents of a GGUF file and the size of its KV cache
    Inspect(inspect::InspectArgs),
    /// Show the machine's capabilities and the kernel of each type
    Doctor(doctor::DoctorArgs),
    /// Measure tok/s of prefill and decode, at any depth, for lists of KV cache types
    Bench(bench::BenchArgs),
    /// Measure the effect of a compressed KV cache on a model's output
    Eval(eval::EvalArgs),
    /// Search the best KV cache types of a model and save them beside it
    Plan(plan::PlanArgs),
    /// Convert a Hugging Face folder to a GGUF file
    Convert(convert::ConvertArgs),
    /// Quantize the weights of a model to another type
    Quantize(quantize::QuantizeArgs),
    /// Print a shell completion script
    Completions(completions::CompletionsArgs),
    /// Print a manual page
    Man(completions::ManArgs),
}

/// Runs the program: executes the command and returns its exit code.
pub fn main() -> ExitCode {
    // A panic is a bug in Kvant, but a user does not need its stack trace.
    set_hook(Box::new(|panic| {
        let place = panic.location().map(|l| format!(" ({}:{})", l.file(), l.line())).unwrap_or_default();
        console::eprint_line(format_args!("error: internal error{place}; please report it"));
    }));
    // Beyond the process's file size limit, writes then fail as on a full disk instead of ending
    // the process.
    #[cfg(unix)]
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, std::sync::Arc::default());
    match start() {
        Ok((cli, _collector)) => {
            match catch_unwind(|| dispatch(cli.command).and_then(|()| Ok(console::flush()?))) {
                Ok(Ok(())) => ExitCode::SUCCESS,
                Ok(Err(failure)) => failure.report(),
                Err(_) => ExitCode::from(1),
            }
        }
        Err(code) => code,
    }
}

/// Parses the arguments and starts logging.
///
/// # Errors
///
/// The exit code if no command follows: help, the version, or invalid arguments.
fn start() -> Result<(Cli, Option<Collector>), ExitCode> {
    let (argv, cli) = parse(std::env::args_os()).map_err(|end| match end {
        ParseOutcome::Shown(help) => show(&help),
        ParseOutcome::Refused(failure) => failure.report(),
    })?;
    let (collector, spans) = collector(&cli.command).map_err(Failure::report)?.unzip();
    log::start(&cli.log, spans);
    argv.notes.into_iter().for_each(log::note);
    Ok((cli, collector))
}

#[cfg(feature = "otel")]
use otlp::Collector;

/// Placeholder without the feature `otel`.
#[cfg(not(feature = "otel"))]
enum Collector {}

/// Returns the trace collector of a command, and the span layer that feeds it.
fn collector(command: &Command) -> Result<Option<(Collector, log::Spans)>, Failure> {
    match command {
        #[cfg(feature = "otel")]
        Command::Serve(args) => args.collector.open(),
        _ => Ok(None),
    }
}

/// Why no command runs.
enum ParseOutcome {
    /// Help or the version was requested, or no arguments were given.
    Shown(clap::Error),
    /// The arguments are invalid.
    Refused(Failure),
}

fn parse(args: impl Iterator<Item = OsString>) -> Result<(argv::Argv, Cli), ParseOutcome> {
    let mut root = Cli::command();
    root.build();
    let mut argv = argv::read(&root, args).map_err(ParseOutcome::Refused)?;
    let matches = root.try_get_matches_from_mut(&argv.args);
    let parsed = matches.and_then(|matches| Ok((Cli::from_arg_matches(&matches)?, matches)));
    match parsed {
        Ok((cli, matches)) => {
            argv.notes.extend(foreign_env::note(&root, &matches, |name| {
                std::env::var_os(name).is_some_and(|value| !value.is_empty())
            }));
            Ok((argv, cli))
        }
        Err(error) if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            Err(ParseOutcome::Shown(error))
        }
        Err(error) if error.use_stderr() => Err(ParseOutcome::Refused(error.into())),
        Err(error) => Err(ParseOutcome::Shown(error)),
    }
}

/// Parses arguments, beginning with the program's name, and returns them in canonical form: each
/// option by its own name, without those that have no effect. `None` where help or the version is
/// shown.
///
/// # Errors
///
/// The line that names the invalid argument.
pub fn read_arguments(args: impl Iterator<Item = OsString>) -> Result<Option<Vec<OsString>>, String> {
    match parse(args) {
        Ok((argv, _)) => Ok(Some(argv.args)),
        Err(ParseOutcome::Shown(_)) => Ok(None),
        Err(ParseOutcome::Refused(failure)) => Err(failure.line().unwrap_or_default()),
    }
}

/// Shows a help text, or the version.
fn show(help: &clap::Error) -> ExitCode {
    match help.print().and_then(|()| console::flush()) {
        // Without arguments, the help goes to stderr with clap's exit code.
        Ok(()) => ExitCode::from(help.exit_code() as u8),
        Err(_) if help.use_stderr() => ExitCode::from(2),
        Err(error) => Failure::from(error).report(),
    }
}

fn dispatch(command: Command) -> Result<(), Failure> {
    match command {
        Command::Run(args) => run::run(args),
        Command::Chat(args) => chat::chat(args),
        Command::Serve(args) => serve::run(*args),
        Command::Inspect(args) => inspect::inspect(args),
        Command::Doctor(args) => doctor::doctor(args),
        Command::Bench(args) => bench::bench(args),
        Command::Eval(args) => eval::eval(args),
        Command::Plan(args) => plan::plan(args),
        Command::Convert(args) => convert::convert(args),
        Command::Quantize(args) => quantize::quantize(args),
        Command::Completions(args) => completions::completions(&args, Cli::command()),
        Command::Man(args) => completions::man(&args, Cli::command()),
    }
}
