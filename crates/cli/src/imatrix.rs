//! `kvant imatrix`: measures how large the inputs of each column of a model's matrices are.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use kvant::gguf::printable_path;
use kvant::{DeviceChoice, InputStatistics, Requirements};
use kvant_eval::{Chunks, feed_chunks};
use kvant_quantize::{ImportanceMatrix, InputSums};

use crate::args::model::ModelArgs;
use crate::args::value::positive;
use crate::eval::{calibration_text, follow};
use crate::failure::Failure;
use crate::files::check_output_path;
use crate::open::ModelRequirements;
use crate::{console, log, output, progress};

/// Arguments of `kvant imatrix`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  kvant imatrix bundled -o pocket.imatrix.gguf\n\n\
    kvant quantize --imatrix reads the file, which is that of llama-imatrix. Texts like those that the model will read serve best; 100 to 200 chunks suffice.")]
pub struct ImatrixArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Calibration text; - for stdin [default: a built-in mixture of prose, code, dialogue and
    /// other scripts]
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// File to write (replaced atomically)
    #[arg(short, long, visible_alias = "output-file", value_name = "FILE", default_value = "imatrix.gguf")]
    output: PathBuf,
    /// Importance matrices of the same model from other texts, to add
    #[arg(long, value_name = "FILE")]
    in_file: Vec<PathBuf>,
    /// Tokens per chunk
    #[arg(short, long, value_name = "N", default_value_t = 512)]
    ctx_size: usize,
    /// Maximum number of chunks [default: all]
    #[arg(long, value_name = "N", value_parser = positive)]
    chunks: Option<usize>,
    /// Print neither progress nor summary
    #[arg(short, long)]
    quiet: bool,
}

/// Runs the command.
pub fn imatrix(mut args: ImatrixArgs) -> Result<(), Failure> {
    // Only the CPU has statistics of inputs.
    if args.model.device == DeviceChoice::Auto {
        args.model.device = DeviceChoice::Cpu.into();
    }
    check_output_path(Some(&args.output))?;
    let mut matrix = ImportanceMatrix::new(args.ctx_size as u32);
    for path in &args.in_file {
        matrix.merge(ImportanceMatrix::read(path)?)?;
    }
    let text = calibration_text(args.file.as_deref())?;
    let statistics = Arc::new(InputStatistics::default());
    let requirements = ModelRequirements {
        needs: Requirements::Tokenizer,
        input_statistics: Some(Arc::clone(&statistics)),
        ..ModelRequirements::default()
    };
    let model = args.model.open_with(args.quiet, requirements)?;
    let chunks = Chunks::new(&model, &text, args.ctx_size, args.chunks)?;
    let bar = progress::bar("imatrix", chunks.len() as u64, args.quiet);
    feed_chunks(&model, &chunks, &mut follow(&bar))?;
    bar.finish_and_clear();
    let n_unused = add_inputs(&mut matrix, &statistics)?;
    if n_unused > 0 {
        let line = format_args!("{n_unused} experts got no token of the text: a longer one reaches more");
        log::note(line);
    }
    matrix.datasets.push(args.file.as_deref().map_or_else(|| "built-in".to_owned(), printable_path));
    matrix.chunk_count += chunks.len() as u32;
    matrix.write(&args.output)?;
    if !args.quiet {
        let size = output::bytes(std::fs::metadata(&args.output).map_or(0, |meta| meta.len()) as usize);
        let (n, chunks) = (matrix.len(), matrix.chunk_count);
        let path = printable_path(&args.output);
        console::eprint_line(format_args!("{n} tensors, {chunks} chunks -> {path}: {size}"));
    }
    Ok(())
}

/// Adds what the model received; returns the number of matrices that received nothing.
fn add_inputs(matrix: &mut ImportanceMatrix, statistics: &InputStatistics) -> Result<usize, Failure> {
    let mut n_unused = 0;
    for (tensor, squares) in statistics.tensors() {
        let of = squares.matrices();
        n_unused += of.iter().filter(|of| of.n_rows == 0).count();
        let sums = of.iter().flat_map(|of| of.sums.iter().map(|&sum| sum as f32)).collect();
        let counts = of.iter().map(|of| of.n_rows as f32).collect();
        matrix.add(&tensor, InputSums { sums, counts })?;
    }
    Ok(n_unused)
}
