//! `kvant eval ppl`.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use kvant::DType;
use kvant_eval::{Chunks, PplOptions};

use super::{ConfigArgs, OutputArgs, StateArgs, bar, context_length, follow, row_of, text};
use crate::args::model::ModelArgs;
use crate::args::value::positive;
use crate::console;
use crate::failure::Failure;
use crate::files::check_output_path;
use crate::output::{self, Format};

/// Arguments of `kvant eval ppl`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  kvant eval ppl --chunks 4 -ctk turbo3")]
pub struct PplArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    configs: ConfigArgs,
    #[command(flatten)]
    results: OutputArgs,
    #[command(flatten)]
    state: StateArgs,
    /// Evaluation text; - for stdin [default: built-in]
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Tokens per chunk, 0 for the model's training context
    #[arg(short, long, value_name = "N", default_value_t = 512)]
    ctx_size: usize,
    /// Maximum number of chunks [default: all]
    #[arg(long, value_name = "N", value_parser = positive)]
    chunks: Option<usize>,
    /// Tokens per batch (-ub); a batch reads its own keys from the cache
    #[arg(long, value_name = "N", value_parser = positive)]
    ubatch_size: Option<usize>,
    /// Write the log-probabilities to a file that llama-perplexity --kl-divergence reads
    #[arg(long, value_name = "FILE", conflicts_with = "state")]
    save_base: Option<PathBuf>,
}

/// Runs the command.
pub fn ppl(args: PplArgs) -> Result<(), Failure> {
    check_output_path(args.save_base.as_deref())?;
    args.state.check()?;
    let text = text(args.file.as_deref())?;
    let configs = args.configs.configs(&[(DType::F16, DType::F16)])?;
    if configs.len() > 1 {
        return Err(Failure::Usage("-ctk, -ctv: expected one type each; eval kld takes lists".to_owned()));
    }
    let model = args.model.open(args.results.quiet)?;
    let kv = args.configs.with_plan(configs, &model)?.remove(0);
    let chunks = Chunks::new(&model, &text, context_length(args.ctx_size, &model), args.chunks)?;
    let options = PplOptions { kv, step: args.ubatch_size };
    let bar = bar("ppl", &args.results);
    let mut progress = follow(&bar);
    let result = match &args.save_base {
        Some(path) => kvant_eval::ppl_saving_base(&model, &chunks, &options, path, &mut progress),
        None => kvant_eval::ppl(&model, &chunks, &options, args.state.path(), &mut progress),
    };
    drop(progress);
    bar.finish_and_clear();
    let result = result?;
    let mut out = console::results();
    match args.results.format() {
        Format::Md => {
            let running = result.running.iter().enumerate().map(|(i, ppl)| format!("[{}]{ppl:.4},", i + 1));
            writeln!(out, "{}\n{}", running.collect::<String>(), result.final_line())?;
        }
        Format::Json => {
            writeln!(out, "{}", serde_json::to_string_pretty(&result).expect("results are plain JSON"))?;
        }
        format => {
            drop(out);
            output::print_rows(&[row_of(&result)], format)?;
        }
    }
    Ok(())
}
