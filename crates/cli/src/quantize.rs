//! `kvant quantize`: rewrites a model with its weight matrices in another type.

use std::path::Path;

use clap::Args;
use kvant::gguf::{TensorInfo, printable_path};
use kvant_quantize::{Recipe, TypeCount};

use crate::args::model::ModelSourceArgs;
use crate::failure::Failure;
use crate::files::check_model_output_path;
use crate::{console, output, progress};

/// Arguments of `kvant quantize`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  kvant quantize bundled pocket-q4_K_M.gguf q4_K_M\n\n\
    Types are llama.cpp's mixes: what gives the logits is q6_K, and _S, _M and _L give more bits to ever more of the\n\
    matrices where errors cost most. q3_K, q4_K and q5_K stand for _M. --pure makes all matrices one type.")]
pub struct QuantizeArgs {
    #[command(flatten)]
    place: ModelSourceArgs,
    /// GGUF file to write (replaced atomically), and the type of its weight matrices: f32 f16 bf16
    /// q8_0 q4_0 q4_1 q5_0 q5_1 q2_K q2_K_S q3_K_S q3_K_M q3_K_L q4_K_S q4_K_M q5_K_S q5_K_M q6_K
    /// iq4_nl iq4_xs mxfp4 nvfp4 tq3_1s tq4_1s
    #[arg(value_names = ["OUT", "TYPE"], num_args = 1..)]
    words: Vec<String>,
    /// Disable mixtures: quantize all weight matrices to the type that most have
    #[arg(long)]
    pure: bool,
    /// Print neither progress nor summary
    #[arg(long)]
    quiet: bool,
}

/// Runs the command.
pub fn quantize(mut args: QuantizeArgs) -> Result<(), Failure> {
    args.place.move_first_word(&mut args.words);
    let [out, recipe] = &args.words[..] else {
        let line = "expected exactly a model, an output file and a type".to_owned();
        return Err(Failure::Usage(line));
    };
    let recipe: Recipe = recipe.parse().map_err(|error| Failure::Usage(format!("{recipe}: {error}")))?;
    let recipe = if args.pure { Recipe::from(recipe.dtype()) } else { recipe };
    let (place, out) = (args.place.source()?, Path::new(out));
    check_model_output_path(out, place.path())?;
    let gguf = place.open(&args.place, args.quiet)?;
    let bar = progress::bar("quantising", gguf.tensors().len() as u64, args.quiet);
    let written = kvant_quantize::quantize(&gguf, out, recipe, &mut |_: &TensorInfo| bar.inc(1))?;
    bar.finish_and_clear();
    if !args.quiet {
        let [before, after] =
            [gguf.file_bytes(), written.n_bytes].map(|n_bytes| output::bytes(n_bytes as usize));
        console::eprint_line(format_args!("{place}: {before} -> {}: {after}", printable_path(out)));
        print_types(&written.types);
    }
    Ok(())
}

/// Prints the number of matrices per type.
pub fn print_types(types: &[TypeCount]) {
    for count in types {
        let noun = if count.n == 1 { "matrix" } else { "matrices" };
        console::eprint_line(format_args!("{}: {} {noun}{}", count.used, count.n, substitution(count)));
    }
}

/// Returns the reason for a substituted type, if any.
fn substitution(TypeCount { requested, used, .. }: &TypeCount) -> String {
    if requested == used {
        return String::new();
    }
    format!(
        " instead of {requested}, as their rows are not a multiple of its blocks of {}",
        requested.block_len()
    )
}
