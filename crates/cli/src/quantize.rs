//! `kvant quantize`: rewrites a model with its weight matrices in another type.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use kvant::gguf::{TensorInfo, printable_path};
use kvant_quantize::{ImportanceMatrix, QuantizeOptions, Recipe, TypeCount, stored_name};

use crate::args::model::ModelSourceArgs;
use crate::failure::Failure;
use crate::files::{check_model_output_path, read_text};
use crate::{console, output, progress};

/// Arguments of `kvant quantize`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  kvant quantize bundled pocket-q4_K_M.gguf q4_K_M\n\n\
    Types are llama.cpp's mixes: what gives the logits is q6_K, and _S, _M and _L give more bits to ever more of the\n\
    matrices where errors cost most. q3_K, q4_K and q5_K stand for _M. --pure makes all matrices one type.\n\n\
    A recipe is a text: each line has a type and the matrices that have it, the last line that has one counts.\n  \
    q4_K *                  # all, first\n  \
    q6_K ffn_down attn_v    # as parts of tensor names begin\n  \
    q8_0 first:2 last:2     # layers")]
pub struct QuantizeArgs {
    #[command(flatten)]
    place: ModelSourceArgs,
    /// GGUF file to write (replaced atomically), and the type of its weight matrices: f32 f16 bf16
    /// q8_0 q4_0 q4_1 q5_0 q5_1 q2_K q2_K_S q3_K_S q3_K_M q3_K_L q4_K_S q4_K_M q5_K_S q5_K_M q6_K
    /// iq3_s iq4_nl iq4_xs mxfp4 nvfp4 tq3_1s tq4_1s tq3t config_i
    #[arg(value_names = ["OUT", "TYPE"], num_args = 0..)]
    words: Vec<String>,
    /// Importance matrix (see kvant imatrix): errors count where inputs are large
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
    /// Recipe file, instead of TYPE
    #[arg(long, value_name = "FILE", conflicts_with = "pure")]
    recipe: Option<PathBuf>,
    /// Print the known types, with the bits of most weights
    #[arg(long)]
    list: bool,
    /// Disable mixtures: quantize all weight matrices to the type that most have
    #[arg(long)]
    pure: bool,
    /// Print neither progress nor summary
    #[arg(long)]
    quiet: bool,
}

/// Runs the command.
pub fn quantize(mut args: QuantizeArgs) -> Result<(), Failure> {
    if args.list {
        return Ok(list_recipes()?);
    }
    args.place.move_first_word(&mut args.words);
    let (out, recipe) = match (&args.words[..], &args.recipe) {
        ([out, name], None) => {
            (out, name.parse().map_err(|error| Failure::Usage(format!("{name}: {error}")))?)
        }
        ([out], Some(path)) => {
            let name = printable_path(path);
            let recipe = Recipe::parse_file(&name, &read_text(path)?);
            (out, recipe.map_err(|error| Failure::Usage(format!("{name}: {error}")))?)
        }
        (_, recipe) => {
            let kind = if recipe.is_none() { "an output file and a type" } else { "and an output file" };
            return Err(Failure::Usage(format!("expected exactly a model, {kind}")));
        }
    };
    let recipe: Recipe = if args.pure { recipe.dtype().into() } else { recipe };
    let importance = args.imatrix.as_ref().map(ImportanceMatrix::read).transpose()?;
    let (place, out) = (args.place.source()?, Path::new(out));
    check_model_output_path(out, place.path())?;
    let gguf = place.open(&args.place, args.quiet)?;
    let bar = progress::bar("quantising", gguf.tensors().len() as u64, args.quiet);
    let options = QuantizeOptions { recipe, importance: importance.as_ref() };
    let written = kvant_quantize::quantize(&gguf, out, options, &mut |_: &TensorInfo| bar.inc(1))?;
    bar.finish_and_clear();
    if !args.quiet {
        let [before, after] =
            [gguf.file_bytes(), written.n_bytes].map(|n_bytes| output::bytes(n_bytes as usize));
        console::eprint_line(format_args!("{place}: {before} -> {}: {after}", printable_path(out)));
        print_types(&written.types);
        let n: usize = written.types.iter().map(|count| count.n).sum();
        if importance.is_some() {
            let n_weighted = written.n_weighted;
            console::eprint_line(format_args!("importance: used in {n_weighted} of {n} matrices"));
        }
    }
    Ok(())
}

/// Prints the recipes.
fn list_recipes() -> std::io::Result<()> {
    let mut out = console::results();
    for name in Recipe::names() {
        let recipe: Recipe = name.parse().expect("a name of the list");
        writeln!(out, "{name:<9} {:>8.4} bits", recipe.main_bits())?;
    }
    Ok(())
}

/// Prints the number of matrices per type.
pub fn print_types(types: &[TypeCount]) {
    for count in types {
        let noun = if count.n == 1 { "matrix" } else { "matrices" };
        let used = stored_name(count.used);
        console::eprint_line(format_args!("{used}: {} {noun}{}", count.n, substitution(count)));
    }
}

/// Returns the reason for a substituted type, if any.
fn substitution(TypeCount { requested, used, .. }: &TypeCount) -> String {
    if requested == used {
        return String::new();
    }
    format!(
        " instead of {}, as their rows are not a multiple of its blocks of {}",
        stored_name(*requested),
        requested.block_len()
    )
}
