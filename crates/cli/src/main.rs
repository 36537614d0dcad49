//! The `kvant` command line: parses arguments, calls the library, prints.
//!
//! Results go to stdout, progress and logs to stderr. Exit codes: 0 done, 1 the work failed, 2 wrong usage.
#![forbid(unsafe_code)]

mod args;
mod bench;
mod chat;
mod console;
mod doctor;
mod eval;
mod failure;
mod gpu;
mod hints;
mod inspect;
mod output;
mod progress;
mod quantize;
mod run;
mod template;

use std::panic::{catch_unwind, set_hook};
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Parser, Subcommand};

use crate::failure::Failure;

/// Run large language models on a compressed KV cache.
#[derive(Parser)]
#[command(name = "kvant", version, arg_required_else_help = true, after_help = EXAMPLE)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLE: &str = "Example:\n  kvant run -p \"What is the capital of France?\" -ctk turbo3 -ctv turbo3";

#[derive(Subcommand)]
enum Command {
    /// Answer a prompt
    Run(run::RunArgs),
    /// Talk with a model in the terminal
    Chat(chat::ChatArgs),
    /// Show what is in a GGUF file, and what its KV cache would take
    Inspect(inspect::InspectArgs),
    /// Show what this machine can do, and which kernel runs for each type
    Doctor(doctor::DoctorArgs),
    /// Measure speed: prompts and generation, at any depth, for lists of cache types
    Bench(bench::BenchArgs),
    /// Measure what a compressed cache does to a model's output
    Eval(eval::EvalArgs),
    /// Write a GGUF file with its weights in another type
    Quantize(quantize::QuantizeArgs),
}

fn main() -> ExitCode {
    // A panic is a bug of ours, but still no reason to show a user a stack trace.
    set_hook(Box::new(|panic| {
        let place = panic.location().map(|l| format!(" ({}:{})", l.file(), l.line())).unwrap_or_default();
        console::say(format_args!("error: internal error{place}; please report it"));
    }));
    let cli = match Cli::try_parse_from(args::with_long_cache_flags(std::env::args_os())) {
        Ok(cli) => cli,
        Err(error)
            if error.use_stderr() && error.kind() != ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand =>
        {
            return Failure::from(error).report();
        }
        Err(help) => return show(&help),
    };
    match catch_unwind(|| dispatch(cli.command).and_then(|()| Ok(console::flush()?))) {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(failure)) => failure.report(),
        Err(_) => ExitCode::from(1),
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
        Command::Inspect(args) => inspect::inspect(args),
        Command::Doctor(args) => doctor::doctor(args),
        Command::Bench(args) => bench::bench(args),
        Command::Eval(args) => eval::eval(args),
        Command::Quantize(args) => quantize::quantize(args),
    }
}
