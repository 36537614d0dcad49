//! `kvant doctor`: reports the machine's capabilities, the kernel of each type, and what a model
//! needs here.

mod evidence;
pub mod fit;

use std::path::PathBuf;

use clap::Args;
use kvant::DeviceChoice;
use kvant::devices::{self, CpuDetails, DeviceReport};
use kvant::gguf::{LoadOnlyType, printable_path};
use kvant::tuning::{self, Trial, Tuned, Unusable, VariantTrial};
use serde_json::{Value, json};

use crate::args::model::ModelSourceArgs;
use crate::args::value::device;
use crate::console;
use crate::failure::Failure;
use crate::gpu;
use crate::output::{self, Format, Row};
use crate::progress;
use fit::{Fit, cpu_memory};

/// Arguments of `kvant doctor`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  kvant doctor\n  kvant doctor bundled")]
pub struct DoctorArgs {
    /// The model to fit
    #[command(flatten)]
    place: ModelSourceArgs,
    /// Number of threads [default: all cores]
    #[arg(short = 't', long, value_name = "N", env = "KVANT_THREADS")]
    threads: Option<usize>,
    /// Time the competing kernel variants on this machine (prefetch, splits, blocks; on a wgpu
    /// adapter codebook lookups and their sharing) and save the best for all later runs
    #[arg(long)]
    tune: bool,
    /// Device that --tune times: cpu, or wgpu:N for an adapter [default: cpu]
    #[arg(long, value_name = "DEVICE", requires = "tune", value_parser = device)]
    device: Option<DeviceChoice>,
    /// Run the conformance suites on every kernel set of this CPU and on its GPUs (minutes), and
    /// write what passed, failed or cannot run here, in JSON
    #[arg(long, value_name = "FILE", conflicts_with_all = ["tune", "word", "model"])]
    evidence: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn doctor(args: DoctorArgs) -> Result<(), Failure> {
    if args.tune {
        return tune(&args);
    }
    if let Some(path) = &args.evidence {
        return evidence::write(path, args.json);
    }
    for Unusable { device, why } in tuning::unusable() {
        let of_device =
            if device == DeviceChoice::Cpu { String::new() } else { format!(" --device {device}") };
        console::eprint_line(format_args!(
            "warning: {why}; not used (kvant doctor --tune{of_device} creates it again)"
        ));
    }
    let gguf = match args.place.is_given() {
        true => Some(args.place.source()?.open(&args.place, args.json)?),
        false => None,
    };
    let mut gpus = gpu::reports();
    let memories = cpu_memory().into_iter().chain(gpus.iter_mut().filter_map(|gpu| gpu.memory.take()));
    let fit = gguf.map(|gguf| Fit::of(&gguf, memories.collect())).transpose()?;
    let DeviceReport { product, details, .. } = devices::cpu_report(args.threads)?;
    let CpuDetails { info, instruction_sets, matrix_unit, kernel_choices } = details;
    let kernels: Vec<Row> = kernel_choices
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
            "cpu": product,
            "instruction_sets": instruction_sets,
            "matrix_unit": matrix_unit,
            "choices": kernels,
            "fit": fit.as_ref().map(Fit::json),
            "unpacked": LoadOnlyType::ALL.map(LoadOnlyType::name),
            "gpus": gpus.into_iter().map(|gpu| gpu.json).collect::<Vec<_>>(),
            "adapters": gpu::adapters().into_iter().map(|adapter| adapter.json).collect::<Vec<_>>(),
        });
        return Ok(console::print_json(&object)?);
    }
    console::print(format_args!("cpu      {}", product.unwrap_or_else(|| "unknown".to_owned())))?;
    console::print(format_args!("isa      {}", instruction_sets.join(", ")))?;
    console::print(format_args!("matrix   {matrix_unit}"))?;
    console::print(format_args!(
        "kernels  {} on {} threads (KVANT_ISA forces a set, -t the threads)",
        info.kernels, info.n_threads
    ))?;
    for gpu in gpus {
        console::print(format_args!("gpu      {}", gpu.line))?;
    }
    for adapter in gpu::adapters() {
        console::print(format_args!("adapter  {}", adapter.line))?;
    }
    if let Some(fit) = fit {
        for line in fit.lines() {
            console::print(line)?;
        }
        console::print("")?;
        return Ok(output::print_rows(fit.rows(), Format::Md)?);
    }
    console::print("memory   kvant doctor MODEL tells what fits\n")?;
    output::print_rows(&kernels, Format::Md)?;
    let types = LoadOnlyType::ALL.map(|packed| (packed, packed.loaded_type()));
    console::print(format_args!("\nunpacked on load: {}", output::unpacked(&types)))?;
    Ok(())
}

/// Times the kernel variants on this machine and prints those that were selected.
fn tune(args: &DoctorArgs) -> Result<(), Failure> {
    let (rows, path) = match args.device {
        None | Some(DeviceChoice::Cpu) => tune_cpu(args.threads)?,
        Some(DeviceChoice::Wgpu(index)) => tune_adapter(index)?,
        Some(other) => {
            return Err(Failure::Usage(format!("--device with --tune: expected cpu or wgpu:N, got {other}")));
        }
    };
    output::print_rows(&rows, if args.json { Format::Json } else { Format::Md })?;
    console::eprint_line(format_args!("saved in {}; KVANT_TUNING=off ignores it", printable_path(&path)));
    Ok(())
}

fn tune_cpu(threads: Option<usize>) -> Result<(Vec<Row>, PathBuf), Failure> {
    console::eprint_line("timing, about ten seconds; other load on this machine distorts it");
    let Tuned { trials, path } = tuning::tune(threads)?;
    let row = |trial: &Trial| {
        let number = [("number", trial.name.into()), ("value", trial.value.into())];
        let number = number.into_iter().map(|(name, cell): (&str, Value)| (name.to_owned(), cell));
        number.chain(outcome(trial.seconds, trial.is_taken)).collect()
    };
    Ok((trials.iter().map(row).collect(), path))
}

fn tune_adapter(index: usize) -> Result<(Vec<Row>, PathBuf), Failure> {
    console::eprint_line("compiling and timing, a minute or more; other load on this machine distorts it");
    let bar = progress::bar("tuning", 1000, false);
    let tuned = tuning::tune_adapter(index, &mut |done| bar.set_position((1000.0 * done) as u64));
    bar.finish_and_clear();
    let Tuned { trials, path } = tuned?;
    let row = |trial: &VariantTrial| {
        gpu::variant_cells(&trial.variant).chain(outcome(trial.seconds, trial.is_selected)).collect()
    };
    Ok((trials.iter().map(row).collect(), path))
}

/// Returns the table cells of a candidate's result.
fn outcome(seconds: f64, is_taken: bool) -> impl Iterator<Item = (String, Value)> {
    let cells: [(&str, Value); 2] =
        [("ms", format!("{:.3}", 1e3 * seconds).into()), ("kept", if is_taken { "yes" } else { "" }.into())];
    cells.into_iter().map(|(name, cell)| (name.to_owned(), cell))
}
