//! `kvant lab worker`.

use std::io;

use clap::Args;
use kvant_lab::subject::Settings;
use kvant_lab::worker::serve;

use crate::args::value::positive;
use crate::console;
use crate::failure::Failure;

/// Arguments of `kvant lab worker`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  kvant lab worker --device cpu < /dev/null")]
pub struct WorkerArgs {
    /// Device: cpu, wgpu:N or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: String,
    /// Threads of a CPU
    #[arg(short, long, value_name = "N", default_value_t = 1, value_parser = positive)]
    threads: usize,
}

/// Runs the command.
pub fn worker(args: WorkerArgs) -> Result<(), Failure> {
    let settings = Settings { device: args.device, isa: None, threads: args.threads };
    serve(&settings, &mut io::stdin().lock(), &mut console::results()).map_err(Failure::Work)
}
