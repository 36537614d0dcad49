//! `kvant plan`: searches the best KV cache types of a model and saves them beside it.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use kvant::gguf::printable_path;
use kvant::{Certificate, Gguf, KvBalance, KvOptions, KvPlan, Model, Policies, Requirements};
use kvant_eval::report::{Part, PlanReport};
use kvant_eval::{Goal, MIXTURE, PlanOptions, Planned};
use serde_json::json;

use crate::args::{ModelArgs, ModelRequirements, check_output_path, positive, read_text};
use crate::bench::COMMIT;
use crate::eval::{StateArgs, Switch, about, add_to_report, check_report, follow};
use crate::failure::Failure;
use crate::{console, log, output, progress};

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
    /// Length of the texts to calibrate and evaluate on, in tokens; the plan holds for four times
    /// as many. Default: calibrated for the training context, evaluated at 512
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
pub fn plan(args: PlanArgs) -> Result<(), Failure> {
    if args.output.is_none() && !args.model.lora.is_empty() {
        let line =
            "--lora: the file beside the model is its plan without adapters: expected -o FILE for this one";
        return Err(Failure::Usage(line.to_owned()));
    }
    check_output_path(args.output.as_deref())?;
    check_report(args.report.as_deref())?;
    args.state.check()?;
    let text = match &args.file {
        Some(path) => read_text(path)?,
        None => MIXTURE.to_owned(),
    };
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
    let n_train = model.config().n_ctx_train;
    let n_ctx = args.context.unwrap_or(DEFAULT_EVAL_CONTEXT).min(n_train);
    let reach = args.context.map_or(n_train, |n| n.saturating_mul(CONTEXT_MULTIPLE).min(n_train));
    let options = PlanOptions { goal, n_ctx, reach, tail: args.kv_tail == Switch::On };
    let Planned { plan, frontier } =
        kvant_eval::plan(&model, &text, options, args.state.path(), &mut follow(&bar))?;
    bar.finish_and_clear();
    let certificate = Certificate { commit: COMMIT.map(str::to_owned), ..plan.certificate };
    let plan = KvPlan { certificate, ..plan };
    check_goal(goal, &plan.certificate)?;
    plan.write(&path).map_err(kvant::Error::from)?;
    print(&plan, &path, args.json)?;
    let about = about(&args.model, Some(&model), args.file.as_deref());
    let report = PlanReport::new(about, &Planned { plan, frontier }, &model.config().kv_shape())?;
    add_to_report(args.report.as_deref(), || Part::Plan(report))
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

/// Returns the plan's path of a model: `M.kvplan` beside the file `M.gguf` and beside the folder
/// `M`; `None` for a model in memory.
pub fn path_for(gguf: &Gguf) -> Option<PathBuf> {
    let path = gguf.path()?;
    if !path.is_dir() {
        return Some(path.with_extension("kvplan"));
    }
    // `.` and `..` have no file name of their own.
    let whole = if path.file_name().is_some() { path.to_owned() } else { path.canonicalize().ok()? };
    // The text after a dot belongs to a folder's name.
    let mut name = whole.file_name()?.to_owned();
    name.push(".kvplan");
    Some(whole.with_file_name(name))
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

/// Selects the plan of a cache.
#[derive(Args, Debug, Clone)]
pub struct KvPlanArgs {
    /// Plan of kvant plan: its types where neither -ctk nor -ctv is set, and with any types its
    /// factors on K and V
    #[arg(long, value_name = "FILE", env = "KVANT_KV_PLAN")]
    kv_plan: Option<PathBuf>,
    /// Factors on K and V before quantization (SmoothQuant): off, weights (derived from the model's
    /// weights) or plan [default: plan if one is used, else weights]
    #[arg(long, value_name = "FROM", env = "KVANT_KV_BALANCE")]
    kv_balance: Option<BalanceArg>,
}

/// Source of the factors on K and V.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BalanceArg {
    /// No factors
    Off,
    /// From the model's weights
    Weights,
    /// From the plan
    Plan,
}

impl KvPlanArgs {
    /// Returns the options of the given plan, if any.
    ///
    /// # Errors
    ///
    /// An invalid plan, or one of another model.
    pub fn open(&self, model: &Model) -> Result<Option<KvOptions>, Failure> {
        let Some(path) = &self.kv_plan else { return Ok(None) };
        let plan = KvPlan::open(path, model.gguf())?;
        note_weights(&plan.certificate, model);
        Ok(Some(plan.kv_options()?))
    }

    /// Returns `kv` with the requested factors.
    ///
    /// # Errors
    ///
    /// `plan` was requested without a plan.
    pub fn balanced(&self, kv: KvOptions) -> Result<KvOptions, Failure> {
        let balance = match self.kv_balance {
            None => return Ok(kv),
            Some(BalanceArg::Plan) if matches!(kv.balance, KvBalance::Plan(_)) => return Ok(kv),
            Some(BalanceArg::Plan) => {
                let problem =
                    "--kv-balance plan: no plan is in use; kvant plan creates one, --kv-plan FILE selects it";
                return Err(Failure::Usage(problem.to_owned()));
            }
            Some(BalanceArg::Off) => KvBalance::Off,
            Some(BalanceArg::Weights) => KvBalance::Weights,
        };
        Ok(KvOptions { balance, ..kv })
    }

    /// Returns the caches with the factors of the given plan, or the plan's own cache in their
    /// place where no type was named.
    ///
    /// # Errors
    ///
    /// Those of [`KvPlanArgs::open`].
    pub fn applied(
        &self,
        caches: Vec<KvOptions>,
        has_types: bool,
        policies: &Policies,
        model: &Model,
    ) -> Result<Vec<KvOptions>, Failure> {
        let caches = match self.open(model)? {
            None => caches,
            Some(plan) if has_types => {
                caches.into_iter().map(|kv| KvOptions { balance: plan.balance.clone(), ..kv }).collect()
            }
            Some(plan) => vec![with_policies(plan, policies)],
        };
        caches.into_iter().map(|kv| self.balanced(kv)).collect()
    }
}

/// Returns the plan beside a model, with its file's name. An unusable plan is noted and ignored.
pub fn beside(model: &Model) -> Option<(String, KvOptions)> {
    let path = path_for(model.gguf())?;
    let name = printable_path(Path::new(path.file_name()?));
    let unused = |why: &dyn std::fmt::Display| {
        log::note(format_args!("{why}; the plan is not used"));
        None
    };
    let plan = match path.exists().then(|| KvPlan::open(&path, model.gguf()))? {
        Ok(plan) => plan,
        Err(error) => return unused(&error),
    };
    let mut types = plan.types.iter().flatten().flat_map(|heads| [heads.k, heads.v]);
    if let Some(dtype) = types.find(|&dtype| !model.supports_kv_type(dtype)) {
        return unused(&format_args!("{name} has {dtype}, which {} does not support", model.device().name));
    }
    note_weights(&plan.certificate, model);
    plan.kv_options().map_or_else(|error| unused(&error), |options| Some((name, options)))
}

/// Notes that a plan was measured with other weight types: its KV types remain suitable, its
/// figures may differ.
fn note_weights(measured: &Certificate, model: &Model) {
    let of = |weights: Option<&str>| {
        weights.map_or_else(|| "as the file has them".to_owned(), |name| format!("in {name}"))
    };
    let (measured, here) = (measured.weights.as_deref(), model.weights().map(|dtype| dtype.name()));
    if measured != here {
        log::note(format_args!(
            "the plan was measured with weights {}, and these are {}",
            of(measured),
            of(here)
        ));
    }
}

/// Adds the explicit rules of `--kv-policy` to a plan's options; the default rules are skipped,
/// since the plan supersedes them.
pub fn with_policies(mut plan: KvOptions, policies: &Policies) -> KvOptions {
    if *policies != Policies::default() {
        plan.policies.0.extend(policies.0.iter().cloned());
    }
    plan
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
