//! `kvant doctor`: what this machine can do, and which kernel runs for each type.

use clap::Args;
use kvant::Device;
use kvant::gguf::{Packed, printable_path};
use kvant::tuning::{self, cpu_name};
use serde_json::{Value, json};

use crate::console;
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
    /// Time the kernels' numbers (prefetch, splits, blocks) on this machine and keep the best for all later runs
    #[arg(long)]
    tune: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn doctor(args: DoctorArgs) -> Result<(), Failure> {
    if args.tune {
        return tune(&args);
    }
    if let Some(why) = tuning::unusable() {
        console::say(format_args!("warning: {why}; not used (kvant doctor --tune makes it anew)"));
    }
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
            "matrix_unit": device.matrix_unit(),
            "choices": kernels,
            "unpacked": Packed::ALL.map(Packed::name),
            "gpus": gpu::reports().into_iter().map(|gpu| gpu.json).collect::<Vec<_>>(),
            "adapters": gpu::adapters().into_iter().map(|adapter| adapter.json).collect::<Vec<_>>(),
        });
        return Ok(console::print_json(&object)?);
    }
    console::print(format_args!("cpu      {}", cpu_name().unwrap_or_else(|| "unknown".to_owned())))?;
    console::print(format_args!("can run  {}", device.instruction_sets().join(", ")))?;
    console::print(format_args!("matrices {}", device.matrix_unit()))?;
    console::print(format_args!(
        "runs     {} on {} threads (KVANT_ISA forces a set, -t the threads)",
        info.kernels, info.n_threads
    ))?;
    for gpu in gpu::reports() {
        console::print(format_args!("gpu      {}", gpu.line))?;
    }
    for adapter in gpu::adapters() {
        console::print(format_args!("adapter  {}", adapter.line))?;
    }
    console::print("")?;
    output::print_rows(&kernels, Format::Md)?;
    console::print(format_args!(
        "\nread, but without kernels: {} are unpacked to {} when loaded, and as large and slow as that",
        Packed::ALL.map(Packed::name).join(", "),
        Packed::UNPACKED
    ))?;
    Ok(())
}

/// Times what competes on this machine and tells what was kept.
fn tune(args: &DoctorArgs) -> Result<(), Failure> {
    console::say("timing, about ten seconds; other work on this machine blurs it");
    let tuned = tuning::tune(args.threads)?;
    let rows: Vec<Row> = tuned
        .trials
        .iter()
        .map(|trial| {
            let cells: [(&str, Value); 4] = [
                ("number", trial.name.into()),
                ("value", trial.value.into()),
                ("ms", format!("{:.3}", 1e3 * trial.seconds).into()),
                ("kept", if trial.is_taken { "yes" } else { "" }.into()),
            ];
            cells.into_iter().map(|(name, cell)| (name.to_owned(), cell)).collect()
        })
        .collect();
    output::print_rows(&rows, if args.json { Format::Json } else { Format::Md })?;
    console::say(format_args!("kept in {}; KVANT_TUNING=off leaves it out", printable_path(&tuned.path)));
    Ok(())
}
