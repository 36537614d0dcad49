//! `kvant convert`: converts a Hugging Face folder to a GGUF file.

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use kvant::gguf::{TensorInfo, printable_path};
use kvant::hf;
use kvant_quantize::{Recipe, main_type};

use crate::failure::Failure;
use crate::files::check_model_output_path;
use crate::quantize::print_types;
use crate::{console, output, progress};

/// Arguments of `kvant convert`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  kvant convert SmolLM2-135M-Instruct smollm2-q8_0.gguf q8_0\n\n\
    Folders run as they are, too: kvant run SmolLM2-135M-Instruct \"Hello\" --weights q8_0")]
pub struct ConvertArgs {
    /// Folder with config.json, tokenizer.json and safetensors files
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// GGUF file to write; replaced atomically
    #[arg(value_name = "OUT")]
    out: PathBuf,
    /// Type of the weight matrices, as in kvant quantize [default: that of the folder]
    #[arg(value_name = "TYPE")]
    recipe: Option<Recipe>,
    /// Disable mixtures: quantize all weight matrices to the type that most have
    #[arg(long)]
    pure: bool,
    /// Print neither progress nor summary
    #[arg(long)]
    quiet: bool,
}

/// Runs the command.
pub fn convert(args: ConvertArgs) -> Result<(), Failure> {
    let ConvertArgs { folder, out, recipe, pure, quiet } = args;
    if folder.is_file() {
        let line =
            format!("{}: expected a folder (kvant quantize takes GGUF files)", printable_path(&folder));
        return Err(Failure::Usage(line));
    }
    check_model_output_path(&out, Some(&folder))?;
    let started = Instant::now();
    let gguf = hf::open(&folder).map_err(kvant::Error::from)?;
    let recipe = recipe.unwrap_or_else(|| main_type(&gguf).into());
    let recipe = if pure { Recipe::from(recipe.dtype()) } else { recipe };
    let bar = progress::bar("converting", gguf.tensors().len() as u64, quiet);
    let written = kvant_quantize::quantize(&gguf, &out, recipe, &mut |_: &TensorInfo| {
        bar.inc(1);
        // The weights are written by now: they need not stay in memory.
        gguf.release();
    })?;
    bar.finish_and_clear();
    if !quiet {
        let sizes = [gguf.file_bytes(), written.n_bytes].map(|n_bytes| output::bytes(n_bytes as usize));
        print_sizes(&folder, &out, &sizes, started.elapsed().as_secs_f64());
        print_types(&written.types);
    }
    Ok(())
}

fn print_sizes(folder: &Path, out: &Path, [before, after]: &[String; 2], seconds: f64) {
    let (folder, out) = (printable_path(folder), printable_path(out));
    console::eprint_line(format_args!("{folder}: {before} -> {out}: {after}, {seconds:.1} s"));
}
