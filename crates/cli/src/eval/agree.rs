//! `kvant eval agree`.

use std::path::PathBuf;

use clap::Args;
use kvant::DType;
use kvant_eval::{AgreeOptions, Agreement, Chunks, QUESTIONS, agree, question_prompts, text_prompts};
use serde_json::Value;

use super::{ConfigArgs, OutputArgs, bar, context_length, follow, row, text};
use crate::args::model::ModelArgs;
use crate::args::value::positive;
use crate::failure::Failure;
use crate::files::read_text;
use crate::log;
use crate::output::Row;

/// Arguments of `kvant eval agree`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  kvant eval agree --chunks 2 -n 32 -ctk q8_0,turbo3")]
pub struct AgreeArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    configs: ConfigArgs,
    #[command(flatten)]
    results: OutputArgs,
    /// Text whose chunks are continued; - for stdin [default: built-in]
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Questions, one per line, in the model's chat template [default: 32 built-in ones]
    #[arg(long, value_name = "FILE")]
    questions: Option<PathBuf>,
    /// Tokens per chunk, 0 for the model's training context
    #[arg(short, long, value_name = "N", default_value_t = 256)]
    ctx_size: usize,
    /// Maximum number of chunks
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = positive)]
    chunks: usize,
    /// Maximum tokens per answer
    #[arg(short = 'n', long, value_name = "N", default_value_t = 128, value_parser = positive)]
    predict: usize,
}

/// Default configurations: f32 shows the effect of the arithmetic alone.
const DEFAULT: [(DType, DType); 5] = [
    (DType::F32, DType::F32),
    (DType::Q8_0, DType::Q8_0),
    (DType::Turbo4, DType::Turbo4),
    (DType::Turbo3, DType::Turbo3),
    (DType::Turbo2, DType::Turbo2),
];

/// Runs the command.
pub fn run(args: AgreeArgs) -> Result<(), Failure> {
    let configs = args.configs.configs(&DEFAULT)?;
    let text = text(args.file.as_deref())?;
    let question_text = args.questions.as_deref().map(read_text).transpose()?;
    let model = args.model.open(args.results.quiet)?;
    let configs = args.configs.with_plan(configs, &model)?;
    let options = AgreeOptions { configs, max_tokens: args.predict };
    let pieces =
        text_prompts(&Chunks::new(&model, &text, context_length(args.ctx_size, &model), Some(args.chunks))?);
    let questions = match question_prompts(&model, question_text.as_deref().unwrap_or(QUESTIONS)) {
        // The questions are the default, not a request.
        Err(error) if question_text.is_none() => {
            log::note(format_args!("questions are skipped: {error}"));
            Vec::new()
        }
        prompts => prompts?,
    };
    let bar = bar("agree", &args.results);
    let mut rows = Vec::new();
    for (name, prompts) in [("text", pieces), ("questions", questions)] {
        if prompts.is_empty() {
            continue;
        }
        bar.set_prefix(name);
        let results = agree(&model, &prompts, &options, &mut follow(&bar))?;
        rows.extend(results.iter().map(|result| (short_row(name, result), full_row(name, result))));
    }
    bar.finish_and_clear();
    let (short, full): (Vec<Row>, Vec<Row>) = rows.into_iter().unzip();
    args.results.print(&short, &full)
}

fn short_row(prompts: &str, result: &Agreement) -> Row {
    let share = |x: f64| Value::from(format!("{:.2} %", 100.0 * x));
    row([
        ("prompts", format!("{prompts} ({})", result.answers.len()).into()),
        ("K / V", result.kv.name().into()),
        ("bits", format!("{:.3}", result.kv.bpv()).into()),
        ("alike for, tokens", format!("{:.1}", result.alike()).into()),
        ("unchanged", share(result.unchanged())),
        ("same token, led", share(result.same())),
    ])
}

fn full_row(prompts: &str, result: &Agreement) -> Row {
    row([
        ("prompts", prompts.into()),
        ("type_k", result.kv.type_k.clone().into()),
        ("type_v", result.kv.type_v.clone().into()),
        ("bpv", result.kv.bpv().into()),
        ("n", result.answers.len().into()),
        ("alike", result.alike().into()),
        ("unchanged", result.unchanged().into()),
        ("same", result.same().into()),
    ])
}
