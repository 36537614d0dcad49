//! `kvant lab`: judges changes to kernels.

mod eval;
mod targets;
mod worker;

use clap::{Args, Subcommand};

use crate::failure::Failure;

/// Arguments of `kvant lab`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  kvant lab targets")]
pub struct LabArgs {
    #[command(subcommand)]
    command: LabCommand,
}

#[derive(Subcommand, Debug)]
enum LabCommand {
    /// Judge this checkout against a commit: better, equal, worse, wrong or broken
    Eval(Box<eval::EvalArgs>),
    /// List what can be made faster
    Targets(targets::TargetsArgs),
    /// Run a case of this build for a judge, on stdin and stdout
    #[command(hide = true)]
    Worker(worker::WorkerArgs),
}

/// Runs the command.
pub fn lab(args: LabArgs) -> Result<(), Failure> {
    match args.command {
        LabCommand::Eval(args) => eval::eval(*args),
        LabCommand::Targets(args) => targets::targets(args),
        LabCommand::Worker(args) => worker::worker(args),
    }
}
