//! The `kvant` command line: parses arguments, calls the library, prints. A library of two functions, so that a fuzzer can
//! call what the program does first.
//!
//! Results go to stdout, progress and logs to stderr. Exit codes: 0 done, 1 the work failed, 2 wrong usage.
#![forbid(unsafe_code)]

mod args;
mod argv;
mod bench;
mod chat;
#[cfg(feature = "otel")]
mod collector;
mod completions;
mod console;
mod convert;
mod doctor;
mod eval;
mod failure;
mod gpu;
mod habits;
mod hints;
#[cfg(feature = "hub")]
mod hub;
mod inspect;
mod interrupt;
mod log;
mod lora;
mod output;
mod place;
mod plan;
mod progress;
mod quantize;
mod run;
mod serve;
mod sight;
mod template;
mod variables;
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
    /// Answer a prompt
    Run(run::RunArgs),
    /// Talk with a model in the terminal
    Chat(chat::ChatArgs),
    /// Answer requests as OpenAI's API does, many at once
    Serve(Box<serve::ServeArgs>),
    /// Show what is in a GGUF file, and what its KV cache would take
    Inspect(inspect::InspectArgs),
    /// Show what this machine can do, and which kernel runs for each type
    Doctor(doctor::DoctorArgs),
    /// Measure speed: prompts and generation, at any depth, for lists of cache types
    Bench(bench::BenchArgs),
    /// Measure what a compressed cache does to a model's output
    Eval(eval::EvalArgs),
    /// Find out what a model's cache should store, and keep that beside the model
    Plan(plan::PlanArgs),
    /// Write a Hugging Face folder as a GGUF file
    Convert(convert::ConvertArgs),
    /// Write a GGUF file with its weights in another type
    Quantize(quantize::QuantizeArgs),
    /// Print a script that completes commands and options in a shell
    Completions(completions::CompletionsArgs),
    /// Print a manual page
    Man(completions::ManArgs),
}

/// The program: does what the arguments ask for and says how it went.
pub fn main() -> ExitCode {
    // A panic is a bug of ours, but still no reason to show a user a stack trace.
    set_hook(Box::new(|panic| {
        let place = panic.location().map(|l| format!(" ({}:{})", l.file(), l.line())).unwrap_or_default();
        console::say(format_args!("error: internal error{place}; please report it"));
    }));
    // A write beyond the largest file that the process may make fails then, as on a full disk, and ends nobody.
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

/// Reads the arguments and begins to log.
///
/// # Errors
/// The exit code of a program that has said all there was to say: help, the version, or what is wrong with the arguments.
fn start() -> Result<(Cli, Option<Collector>), ExitCode> {
    let (argv, cli) = parse(std::env::args_os()).map_err(|end| match end {
        End::Shown(help) => show(&help),
        End::Refused(failure) => failure.report(),
    })?;
    let (collector, spans) = collector(&cli.command).map_err(Failure::report)?.unzip();
    log::start(&cli.log, spans);
    argv.notes.into_iter().for_each(log::note);
    Ok((cli, collector))
}

#[cfg(feature = "otel")]
use collector::Collector;

/// Told what requests did: nobody without the feature `otel`.
#[cfg(not(feature = "otel"))]
enum Collector {}

/// Whoever wants to know what requests do, and what is listened to for that.
fn collector(command: &Command) -> Result<Option<(Collector, log::Spans)>, Failure> {
    match command {
        #[cfg(feature = "otel")]
        Command::Serve(args) => args.collector.open(),
        _ => Ok(None),
    }
}

/// Why nothing is to be done.
enum End {
    /// Help or the version was asked for, or nothing at all.
    Shown(clap::Error),
    /// The arguments make no sense.
    Refused(Failure),
}

fn parse(args: impl Iterator<Item = OsString>) -> Result<(argv::Argv, Cli), End> {
    let mut root = Cli::command();
    root.build();
    let mut argv = argv::read(&root, args).map_err(End::Refused)?;
    let matches = root.try_get_matches_from_mut(&argv.args);
    let parsed = matches.and_then(|matches| Ok((Cli::from_arg_matches(&matches)?, matches)));
    match parsed {
        Ok((cli, matches)) => {
            argv.notes.extend(variables::note(&root, &matches, |name| {
                std::env::var_os(name).is_some_and(|value| !value.is_empty())
            }));
            Ok((argv, cli))
        }
        Err(error) if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            Err(End::Shown(error))
        }
        Err(error) if error.use_stderr() => Err(End::Refused(error.into())),
        Err(error) => Err(End::Shown(error)),
    }
}

/// Arguments, beginning with the program's name, as they are obeyed: each option by its own name, and none that nothing is done
/// for. `None` where help or the version is shown.
///
/// # Errors
/// The line that says what is wrong with them.
pub fn read_arguments(args: impl Iterator<Item = OsString>) -> Result<Option<Vec<OsString>>, String> {
    match parse(args) {
        Ok((argv, _)) => Ok(Some(argv.args)),
        Err(End::Shown(_)) => Ok(None),
        Err(End::Refused(failure)) => Err(failure.line().unwrap_or_default()),
    }
}

/// Shows a help text, or the version.
fn show(help: &clap::Error) -> ExitCode {
    match help.print().and_then(|()| console::flush()) {
        // Whoever asked for nothing is told on stderr what there is to ask for.
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
