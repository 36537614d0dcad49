//! `kvant doctor`: what this machine can do, and which kernel runs for each type.

use clap::Args;
use kvant::Device;
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::gpu;
use crate::output::{self, Format, Row};

/// Arguments of `kvant doctor`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  kvant doctor")]
pub struct DoctorArgs {
    /// Threads; all cores when not given
    #[arg(short = 't', long, value_name = "N", env = "KVANT_THREADS")]
    threads: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn doctor(args: DoctorArgs) -> Result<(), Failure> {
    let device = Device::open(args.threads)?;
    let info = device.info();
    let kernels: Vec<Row> = device
        .kernel_choices()
        .into_iter()
        .map(|choice| {
            let cells = [("op", choice.op), ("type", choice.dtype.name()), ("kernel", &choice.kernel)];
            cells.into_iter().map(|(name, cell)| (name.to_owned(), Value::from(cell))).collect()
        })
        .collect();
    if args.json {
        let object = json!({
            "device": info.name,
            "kernels": info.kernels,
            "n_threads": info.n_threads,
            "cpu": cpu_name(),
            "instruction_sets": device.instruction_sets(),
            "choices": kernels,
            "gpus": gpu::reports().into_iter().map(|gpu| gpu.json).collect::<Vec<_>>(),
        });
        println!("{object}");
        return Ok(());
    }
    println!("cpu      {}", cpu_name().unwrap_or_else(|| "unknown".to_owned()));
    println!("can run  {}", device.instruction_sets().join(", "));
    println!(
        "runs     {} on {} threads (KVANT_ISA forces a set, -t the threads)",
        info.kernels, info.n_threads
    );
    for gpu in gpu::reports() {
        println!("gpu      {}", gpu.line);
    }
    println!();
    output::print_rows(&kernels, Format::Md)?;
    Ok(())
}

/// The processor's own name, where the system tells it.
fn cpu_name() -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}
