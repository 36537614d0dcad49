//! `kvant plan`: searches the best KV cache types of a model and saves them beside it.

use std::path::{Path, PathBuf};

use clap::Args;
use indicatif::ProgressBar;
use kvant::gguf::printable_path;
use kvant::{Certificate, DType, KvPlan, Model, Requirements};
use kvant_eval::report::{Part, PlanReport};
use kvant_eval::{Goal, MemoryBudget, MemoryCosts, PlanOptions, Planned, WeightChoice, WeightCost};
use serde_json::json;

use crate::args::model::ModelArgs;
use crate::args::value::positive;
use crate::bench::COMMIT;
use crate::eval::{StateArgs, Switch, about, add_to_report, calibration_text, check_report, follow};
use crate::failure::Failure;
use crate::files::check_output_path;
use crate::kv_cache::path_for;
use crate::open::ModelRequirements;
use crate::{console, output, progress};

/// Arguments of `kvant plan`.
#[derive(Args, Debug)]
#[command(after_help = "Takes about two minutes for a model of 135 million parameters, \
                  three for each billion.\n\nExample:\n  kvant plan bundled --budget 3.25 -o bundled.kvplan")]
pub struct PlanArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Calibration and evaluation text; - for stdin [default: a built-in mixture of prose, code,
    /// dialogue and other scripts]
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Mean bits per value, scales included: minimize the KL divergence within this budget
    #[arg(long, value_name = "BITS", conflicts_with = "max_kld", value_parser = number)]
    budget: Option<f64>,
    /// Maximum mean KL divergence from the f16 cache in nats, less that of an f32 cache: minimize
    /// the bits within this bound. If no plan meets it, none is written
    #[arg(long, value_name = "NATS", default_value = "0.01", value_parser = number)]
    max_kld: f64,
    /// Memory for weights and cache together, such as 6G, with --context tokens in the cache: tries
    /// types of weights, plans the cache that fits beside those that lose least, and prints how to
    /// run both. Buffers of a step are not counted
    #[arg(long, value_name = "BYTES", conflicts_with_all = ["budget", "max_kld", "weights", "state"], requires = "context", value_parser = output::parse_bytes)]
    memory: Option<usize>,
    /// Length of the texts to calibrate and evaluate on, in tokens; the plan holds for four times
    /// as many. Default: calibrated for the training context, evaluated at 512. With --memory, the
    /// tokens of the cache
    #[arg(short = 'c', long, value_name = "N", value_parser = positive)]
    context: Option<usize>,
    /// Whether the plan is evaluated with the recent tokens in f16, as in run; off evaluates the
    /// types alone
    #[arg(long, value_name = "SWITCH", default_value = "on")]
    kv_tail: Switch,
    /// Plan file to write [default: beside the model]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    state: StateArgs,
    /// Add the bits of each head and the candidates to a page in this folder
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Hide the progress bar
    #[arg(short, long)]
    quiet: bool,
}

/// Default length of the evaluation texts, in tokens.
const DEFAULT_EVAL_CONTEXT: usize = 512;
/// A plan that is calibrated at some length holds for this multiple of it.
const CONTEXT_MULTIPLE: usize = 4;

fn number(text: &str) -> Result<f64, String> {
    let expected = || "expected a number above 0".to_owned();
    text.parse().ok().filter(|x: &f64| *x > 0.0 && x.is_finite()).ok_or_else(expected)
}

/// Runs the command.
pub fn plan(mut args: PlanArgs) -> Result<(), Failure> {
    if args.output.is_none() && !args.model.lora.is_empty() {
        let line =
            "--lora: the file beside the model is its plan without adapters: expected -o FILE for this one";
        return Err(Failure::Usage(line.to_owned()));
    }
    check_output_path(args.output.as_deref())?;
    check_report(args.report.as_deref())?;
    args.state.check()?;
    let text = calibration_text(args.file.as_deref())?;
    let quiet = args.quiet || args.json;
    let model = args.model.open_with(
        quiet,
        ModelRequirements { needs: Requirements::Tokenizer, ..ModelRequirements::default() },
    )?;
    let path = args.output.clone().map_or_else(|| target(&model), Ok)?;
    check_output_path(Some(&path))?;
    let bar = progress::bar("plan", 0, quiet);
    bar.enable_steady_tick(std::time::Duration::from_millis(500));
    let goal = args.budget.map_or(Goal::Kld(args.max_kld), Goal::Bits);
    let (model, options) = model_and_options(&mut args, model, &text, goal, &bar)?;
    let goal = options.goal;
    let Planned { plan, frontier } =
        kvant_eval::plan(&model, &text, options, args.state.path(), &mut follow(&bar))?;
    bar.finish_and_clear();
    let certificate = Certificate { commit: COMMIT.map(str::to_owned), ..plan.certificate };
    let plan = KvPlan { certificate, ..plan };
    check_goal(goal, &plan.certificate)?;
    plan.write(&path).map_err(kvant::Error::from)?;
    print(&plan, &path, args.json)?;
    if args.memory.is_some() {
        note_command(&args.model, &model, options.reach);
    }
    let about = about(&args.model, Some(&model), args.file.as_deref());
    let report = PlanReport::new(about, &Planned { plan, frontier }, &model.config().kv_shape())?;
    add_to_report(args.report.as_deref(), || Part::Plan(report))
}

/// Returns the options of the search, and with a budget of memory the model in other weights.
fn model_and_options(
    args: &mut PlanArgs,
    model: Model,
    text: &str,
    goal: Goal,
    bar: &ProgressBar,
) -> Result<(Model, PlanOptions), Failure> {
    let n_train = model.config().n_ctx_train;
    let tail = args.kv_tail == Switch::On;
    if let (Some(bytes), Some(tokens)) = (args.memory, args.context) {
        let budget = MemoryBudget { bytes, tokens: tokens.min(n_train) };
        let n_ctx = DEFAULT_EVAL_CONTEXT.min(n_train);
        let options = PlanOptions { goal, n_ctx, reach: budget.tokens, tail };
        let (model, bits) = share_memory(&mut args.model, model, text, options, budget, bar)?;
        return Ok((model, PlanOptions { goal: Goal::Bits(bits), ..options }));
    }
    let n_ctx = args.context.unwrap_or(DEFAULT_EVAL_CONTEXT).min(n_train);
    let reach = args.context.map_or(n_train, |n| n.saturating_mul(CONTEXT_MULTIPLE).min(n_train));
    Ok((model, PlanOptions { goal, n_ctx, reach, tail }))
}

/// Shares a budget of memory: prints what each type of weights leaves for the cache, and returns
/// the model with the weights that lose least and the bits per value of its cache.
fn share_memory(
    args: &mut ModelArgs,
    model: Model,
    text: &str,
    options: PlanOptions,
    budget: MemoryBudget,
    bar: &ProgressBar,
) -> Result<(Model, f64), Failure> {
    let open = |dtype| with_weights(args, dtype);
    let choices = MemoryCosts::measure(&model, text, options, open, &mut follow(bar))?.choices(budget);
    bar.suspend(|| choices.iter().for_each(|choice| console::eprint_line(format_args!("{}", line(choice)))));
    let least = choices.iter().min_by(|a, b| a.kld().total_cmp(&b.kld()));
    let Some((weights, (bits, _))) = least.and_then(|choice| Some((choice.weights.weights, choice.cache?)))
    else {
        return Err(Failure::Work(format!(
            "--memory {}: a cache of {} tokens fits beside none of these weights",
            output::bytes(budget.bytes),
            budget.tokens
        )));
    };
    args.weights = None;
    let model = weights.map_or(Ok(model), |dtype| with_weights(args, dtype))?;
    Ok((model, bits))
}

/// Opens the model with its weights in another type.
fn with_weights(args: &mut ModelArgs, dtype: DType) -> Result<Model, Failure> {
    args.weights = Some(dtype);
    args.open_with(true, ModelRequirements { needs: Requirements::Tokenizer, ..Default::default() })
}

/// Formats the weights of a choice and the cache beside them.
fn line(choice: &WeightChoice) -> String {
    let WeightCost { weights, bytes, kld } = choice.weights;
    let weights = weights.map_or("as in the file", DType::name);
    let cache = choice.cache.map_or_else(
        || "no cache fits".to_owned(),
        |(bits, kld)| format!("cache of {bits:.2} bits, KLD {kld:.4}"),
    );
    format!("weights {weights:14} {:>9}, KLD {kld:.4}; {cache}", output::bytes(bytes))
}

/// Notes how to run the model with its plan, with `context` tokens.
fn note_command(args: &ModelArgs, model: &Model, context: usize) {
    let name = model.gguf().path().map_or_else(|| args.name(), printable_path);
    let weights = args.weights.map(|weights| format!(" --weights {weights}")).unwrap_or_default();
    console::eprint_line(format_args!("run it: kvant run {name}{weights} -c {context}"));
}

/// Rejects a plan that missed its goal, so that `run` never finds one below the requested quality.
fn check_goal(goal: Goal, found: &Certificate) -> Result<(), Failure> {
    match goal {
        Goal::Kld(max) if found.added_kld() > max => Err(Failure::Work(format!(
            "--max-kld {max}: the best plan adds {:.6} nats (at {:.3} bits); none is written",
            found.added_kld(),
            found.bits
        ))),
        _ => Ok(()),
    }
}

/// Returns the default path of a model's plan.
fn target(model: &Model) -> Result<PathBuf, Failure> {
    path_for(model.gguf())
        .ok_or_else(|| Failure::Usage("the model has no file: expected -o FILE for its plan".to_owned()))
}

fn print(plan: &KvPlan, path: &Path, json: bool) -> Result<(), Failure> {
    if json {
        let types =
            plan.types.iter().map(|heads| heads.iter().map(|t| [t.k.name(), t.v.name()]).collect::<Vec<_>>());
        let types = types.collect::<Vec<_>>();
        let object =
            json!({ "path": path, "sink": plan.sink, "types": types, "certificate": plan.certificate });
        return Ok(console::print_json(&object)?);
    }
    console::print(certificate(&plan.certificate))?;
    console::eprint_line(format_args!("plan: {}", printable_path(path)));
    Ok(())
}

/// Formats a certificate, one line per figure.
pub fn certificate(c: &Certificate) -> String {
    let share = |x: f64| format!("{:.2} %", 100.0 * x);
    let needle = c.needle.map_or_else(
        || "not measured".to_owned(),
        |[plan, f16]| format!("{} of the tokens of {} answers (f16: {})", share(plan), c.needles, share(f16)),
    );
    let tail = if c.tail { "" } else { ", all of them quantized" };
    let weights = c.weights.as_ref().map_or_else(String::new, |weights| format!(", weights in {weights}"));
    let commit = c.commit.as_ref().map_or_else(String::new, |commit| format!(", commit {commit}"));
    [
        format!("bits per value   {:.3}", c.bits),
        format!(
            "memory           {} per 1K tokens, f16 {}",
            output::bytes(c.bytes_per_1k),
            output::bytes(c.bytes_per_1k_f16)
        ),
        format!(
            "KLD              mean {:.6} ± {:.6}, 99 % {:.5}, max {:.4}",
            c.mean_kld, c.mean_kld_stderr, c.p99_kld, c.max_kld
        ),
        format!("of which noise   {:.6}, as for an f32 cache", c.noise_kld),
        format!("same top         {}", share(c.same_top)),
        format!("perplexity ratio {:.5} ± {:.5}", c.ppl_ratio, c.ppl_ratio_stderr),
        format!("needle           {needle}"),
        format!(
            "measured on      {} tokens in chunks of {}{tail}{weights}, text {}",
            c.tokens, c.n_ctx, c.text
        ),
        format!("made by          kvant {}{commit}", c.version),
    ]
    .join("\n")
}
