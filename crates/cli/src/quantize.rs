//! `kvant quantize`: the same model with its weight matrices in another type.

use std::path::PathBuf;

use clap::Args;
use kvant::gguf::TensorInfo;
use kvant::{DType, Gguf, quantize};

use crate::args::check_target;
use crate::failure::Failure;
use crate::{console, output, progress};

/// Arguments of `kvant quantize`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  kvant quantize assets/model/pocket-q8_0.gguf /tmp/pocket-q4_0.gguf q4_0")]
pub struct QuantizeArgs {
    /// GGUF file to read
    input: PathBuf,
    /// GGUF file to write; replaced whole or not at all
    output: PathBuf,
    /// Type of the weight matrices: f32 f16 bf16 q8_0 q4_0 q4_1 q5_0 q5_1 q2_K q3_K q4_K q5_K q6_K tq3_1s tq4_1s
    #[arg(value_parser = weight_type)]
    dtype: DType,
    /// No progress and no summary
    #[arg(long)]
    quiet: bool,
}

/// Runs the command.
pub fn quantize(args: QuantizeArgs) -> Result<(), Failure> {
    check_target(Some(&args.output))?;
    let gguf = Gguf::open(&args.input).map_err(kvant::Error::from)?;
    let bar = progress::bar("quantising", gguf.tensors().len() as u64, args.quiet);
    let written = quantize::quantize(&gguf, &args.output, args.dtype, &mut |_: &TensorInfo| bar.inc(1))?;
    bar.finish_and_clear();
    if !args.quiet {
        let (from, to) = (args.input.display(), args.output.display());
        let (before, after) =
            (output::bytes(gguf.file_bytes() as usize), output::bytes(written.n_bytes as usize));
        console::say(format_args!("{from}: {before} -> {to}: {after}"));
        for (dtype, n) in written.types {
            let why = if dtype == args.dtype { String::new() } else { instead_of(args.dtype) };
            console::say(format_args!("{dtype}: {n} matrices{why}"));
        }
    }
    Ok(())
}

/// Why a type stands in for `dtype`.
fn instead_of(dtype: DType) -> String {
    format!(" instead of {dtype}, as their rows are no multiple of its blocks of {}", dtype.block_len())
}

fn weight_type(text: &str) -> Result<DType, String> {
    let weights = || DType::ALL.into_iter().filter(|dtype| dtype.ggml_id().is_some());
    match text.parse::<DType>() {
        Ok(dtype) if dtype.ggml_id().is_some() => Ok(dtype),
        _ => Err(format!(
            "not a weight type; known: {}",
            weights().map(DType::name).collect::<Vec<_>>().join(" ")
        )),
    }
}
