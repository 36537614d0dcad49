//! `kvant quantize`: the same model with its weight matrices in another type.

use std::path::Path;

use clap::Args;
use kvant::gguf::{TensorInfo, printable_path};
use kvant::{DType, quantize};

use crate::args::check_target;
use crate::failure::Failure;
use crate::place::PlaceArgs;
use crate::weight_type::weight_type;
use crate::{console, output, progress};

/// Arguments of `kvant quantize`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  kvant quantize bundled pocket-q4_0.gguf q4_0")]
pub struct QuantizeArgs {
    #[command(flatten)]
    place: PlaceArgs,
    /// GGUF file to write, replaced whole or not at all; and the type of its weight matrices: f32 f16 bf16 q8_0 q4_0 q4_1
    /// q5_0 q5_1 q2_K q3_K q4_K q5_K q6_K iq4_nl iq4_xs mxfp4 nvfp4 tq3_1s tq4_1s
    #[arg(value_names = ["OUT", "TYPE"], num_args = 1..)]
    words: Vec<String>,
    /// No progress and no summary
    #[arg(long)]
    quiet: bool,
}

/// Runs the command.
pub fn quantize(mut args: QuantizeArgs) -> Result<(), Failure> {
    args.place.leave_word(&mut args.words);
    let [out, dtype] = &args.words[..] else {
        let line = "expected a model, a file to write and a type, and nothing else".to_owned();
        return Err(Failure::Usage(line));
    };
    let dtype = weight_type(dtype).map_err(|error| Failure::Usage(format!("{dtype}: {error}")))?;
    let (place, out) = (args.place.place()?, Path::new(out));
    check_target(Some(out))?;
    let gguf = place.open(&args.place, args.quiet)?;
    let bar = progress::bar("quantising", gguf.tensors().len() as u64, args.quiet);
    let written = quantize::quantize(&gguf, out, dtype, &mut |_: &TensorInfo| bar.inc(1))?;
    bar.finish_and_clear();
    if !args.quiet {
        let [before, after] =
            [gguf.file_bytes(), written.n_bytes].map(|n_bytes| output::bytes(n_bytes as usize));
        console::say(format_args!("{place}: {before} -> {}: {after}", printable_path(out)));
        say_types(dtype, written.types);
    }
    Ok(())
}

/// Says how many matrices have become what, where `dtype` was wanted.
pub fn say_types(dtype: DType, types: Vec<(DType, usize)>) {
    for (used, n) in types {
        let why = if used == dtype { String::new() } else { instead_of(dtype) };
        console::say(format_args!("{used}: {n} matrices{why}"));
    }
}

/// Why a type stands in for `dtype`.
fn instead_of(dtype: DType) -> String {
    format!(" instead of {dtype}, as their rows are no multiple of its blocks of {}", dtype.block_len())
}
