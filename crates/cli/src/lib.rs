//! The `kvant` command line: parses arguments, calls the library, prints results. A library, so
//! that the wheel's library contains the command and a fuzzer can call the argument parser.
//!
//! Results go to stdout, progress and logs to stderr. Exit codes: 0 success, 1 failure, 2 wrong
//! usage; `kvant lab eval` has more.
#![forbid(unsafe_code)]

mod args;
mod argv;
mod bench;
mod chat;
mod commands;
mod completions;
mod console;
mod convert;
mod doctor;
mod embed;
mod env_var;
mod eval;
mod failure;
mod files;
mod foreign_env;
mod foreign_flags;
mod gpu;
mod hints;
#[cfg(feature = "hub")]
mod hub;
mod imatrix;
mod inspect;
mod interrupt;
mod kv_cache;
mod lab;
mod log;
mod media;
mod model_source;
mod open;
#[cfg(feature = "otel")]
mod otlp;
mod output;
mod plan;
mod progress;
mod quantize;
mod run;
mod serve;

use std::ffi::OsString;
use std::panic::{catch_unwind, set_hook};
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches};

use crate::commands::{Cli, Command};
use crate::failure::Failure;

/// Runs the program: executes the command of the process's arguments.
pub fn main() -> ExitCode {
    ExitCode::from(execute(std::env::args_os()))
}

/// Executes the command that `args`, beginning with the program's name, describe, and returns its
/// exit code. The process is the command's from then on: its panic hook, its handlers of signals
/// and, on a second Ctrl-C, its end.
pub fn execute(args: impl Iterator<Item = OsString>) -> u8 {
    // A panic is a bug in Kvant, but a user does not need its stack trace.
    set_hook(Box::new(|panic| {
        let place = panic.location().map(|l| format!(" ({}:{})", l.file(), l.line())).unwrap_or_default();
        console::eprint_line(format_args!("error: internal error{place}; please report it"));
    }));
    // Beyond the process's file size limit, writes then fail as on a full disk instead of ending
    // the process.
    #[cfg(unix)]
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, std::sync::Arc::default());
    let code = match start(args) {
        Ok((cli, _collector)) => {
            match catch_unwind(|| commands::dispatch(cli.command).and_then(|()| Ok(console::flush()?))) {
                Ok(Ok(())) => 0,
                Ok(Err(failure)) => failure.report(),
                Err(_) => 1,
            }
        }
        Err(code) => code,
    };
    // What was printed before a failure; only the end of a Rust program flushes it by itself.
    let _ = console::flush();
    code
}

/// Parses the arguments and starts logging.
///
/// # Errors
///
/// The exit code if no command follows: help, the version, or invalid arguments.
fn start(args: impl Iterator<Item = OsString>) -> Result<(Cli, Option<Collector>), u8> {
    let (argv, cli) = parse(args).map_err(|end| match end {
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
fn show(help: &clap::Error) -> u8 {
    match help.print().and_then(|()| console::flush()) {
        // Without arguments, the help goes to stderr with clap's exit code.
        Ok(()) => help.exit_code() as u8,
        Err(_) if help.use_stderr() => 2,
        Err(error) => Failure::from(error).report(),
    }
}
