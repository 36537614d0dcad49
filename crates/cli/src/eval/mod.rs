//! `kvant eval`: measures the effect of a compressed KV cache on a model.

mod agree;
mod distortion;
mod kld;
mod niah;
mod ppl;

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand, ValueEnum};
use indicatif::ProgressBar;
use kvant::gguf::printable_path;
use kvant::{DType, KvOptions, Model, Policies};
use kvant_eval::report::{About, Part};
use kvant_eval::{EvalError, MIXTURE, Progress, SAMPLE};
use serde_json::Value;

use crate::args::cache::KvPlanArgs;
use crate::args::model::ModelArgs;
use crate::args::value::{kv_type, policies};
use crate::failure::Failure;
use crate::files::{check_output_path, read_text};
use crate::kv_cache::with_type_table;
use crate::output::{self, Format, Row};
use crate::{console, hints, log, progress};

/// Arguments of `kvant eval`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  kvant eval kld --chunks 1 -ctk q8_0,turbo3 --report report")]
pub struct EvalArgs {
    #[command(subcommand)]
    command: EvalCommand,
}

#[derive(Subcommand, Debug)]
enum EvalCommand {
    /// Perplexity of a text, by llama.cpp's method
    Ppl(ppl::PplArgs),
    /// KL divergence of KV cache types from the f16 cache
    Kld(kld::KldArgs),
    /// Agreement of greedy answers with those of the f16 cache: tokens until they differ
    Agree(agree::AgreeArgs),
    /// Needle in a haystack: retrieval of a sentence from a long text
    Niah(niah::NiahArgs),
    /// Distortion of the KV cache codecs, beside the theoretical bounds
    Distortion(distortion::DistortionArgs),
}

/// Runs the command.
pub fn eval(args: EvalArgs) -> Result<(), Failure> {
    match args.command {
        EvalCommand::Ppl(args) => ppl::ppl(args),
        EvalCommand::Kld(args) => kld::kld(args),
        EvalCommand::Agree(args) => agree::run(args),
        EvalCommand::Niah(args) => niah::niah(args),
        EvalCommand::Distortion(args) => distortion::distortion(args),
    }
}

impl From<EvalError> for Failure {
    fn from(error: EvalError) -> Self {
        Self::Work(hints::of_eval(&error))
    }
}

/// `on` or `off`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    On,
    Off,
}

/// Returns the text of a file, or the built-in one.
fn text(file: Option<&Path>) -> Result<String, Failure> {
    match file {
        Some(path) => read_text(path),
        None => {
            log::note("no -f: measured on the built-in text, five chapters of Frankenstein");
            Ok(SAMPLE.to_owned())
        }
    }
}

/// Returns the calibration text of `-f`, or a built-in mixture.
pub(crate) fn calibration_text(file: Option<&Path>) -> Result<String, Failure> {
    file.map_or_else(|| Ok(MIXTURE.to_owned()), read_text)
}

/// Resolves the length of `-c`: 0 is the model's training context.
fn context_length(requested: usize, model: &Model) -> usize {
    if requested == 0 { model.config().n_ctx_train } else { requested }
}

/// Selects the KV caches to measure.
#[derive(Args, Debug, Clone)]
struct ConfigArgs {
    /// KV cache types of K (-ctk), a comma-separated list
    #[arg(long, value_name = "TYPES", value_delimiter = ',', value_parser = kv_type)]
    cache_type_k: Vec<DType>,
    /// KV cache types of V (-ctv), paired with those of K [default: the same as K]
    #[arg(long, value_name = "TYPES", value_delimiter = ',', value_parser = kv_type)]
    cache_type_v: Vec<DType>,
    /// KV cache policies, as in `run`
    #[arg(long, value_name = "RULES", env = "KVANT_KV_POLICY", default_value_t, value_parser = policies)]
    kv_policy: Policies,
    /// Table of KV types per layer, head and side, as in `run`
    #[arg(long, value_name = "FILE", env = "KVANT_KV_TYPES")]
    kv_types: Option<PathBuf>,
    #[command(flatten)]
    plan: KvPlanArgs,
    /// Whether recent tokens stay in f16; off measures the types alone
    #[arg(long, value_name = "SWITCH", default_value = "on")]
    kv_tail: Switch,
}

impl ConfigArgs {
    /// Returns the given configurations, or `default`. A single type of K or V pairs with every one
    /// of the other list.
    fn configs(&self, default: &[(DType, DType)]) -> Result<Vec<KvOptions>, Failure> {
        let (k, v) = (&self.cache_type_k, &self.cache_type_v);
        let pairs = match (k.len(), v.len()) {
            (0, 0) => default.to_vec(),
            (_, 0) => k.iter().map(|&k| (k, k)).collect(),
            (0, _) => v.iter().map(|&v| (v, v)).collect(),
            (1, _) => v.iter().map(|&v| (k[0], v)).collect(),
            (_, 1) => k.iter().map(|&k| (k, v[0])).collect(),
            (n, m) if n == m => k.iter().copied().zip(v.iter().copied()).collect(),
            (n, m) => {
                return Err(Failure::Usage(format!("-ctk has {n} types, -ctv has {m}: they are paired")));
            }
        };
        let mut policies = self.kv_policy.clone();
        if let Some(path) = &self.kv_types {
            policies = with_type_table(policies, path)?;
        }
        let tail = self.kv_tail == Switch::On;
        Ok(pairs
            .into_iter()
            .map(|(k, v)| KvOptions { k, v, policies: policies.clone(), tail, ..Default::default() })
            .collect())
    }

    /// Returns the configurations with the given plan for `model`: its own in their place where no
    /// type is named.
    fn with_plan(&self, configs: Vec<KvOptions>, model: &Model) -> Result<Vec<KvOptions>, Failure> {
        let has_types =
            !self.cache_type_k.is_empty() || !self.cache_type_v.is_empty() || self.kv_types.is_some();
        let tail = self.kv_tail == Switch::On;
        let caches = self.plan.applied(configs, has_types, &self.kv_policy, model)?;
        Ok(caches.into_iter().map(|kv| KvOptions { tail, ..kv }).collect())
    }
}

/// Configures the output of results.
#[derive(Args, Debug, Clone)]
struct OutputArgs {
    /// Output format of the table
    #[arg(short, long, value_name = "FORMAT", default_value = "md")]
    output: Format,
    /// The same as -o json
    #[arg(long, conflicts_with = "output")]
    json: bool,
    /// Hide the progress bar
    #[arg(short, long)]
    quiet: bool,
}

impl OutputArgs {
    fn format(&self) -> Format {
        if self.json { Format::Json } else { self.output }
    }

    /// Prints `short` as Markdown, `full` in the other formats.
    fn print(&self, short: &[Row], full: &[Row]) -> Result<(), Failure> {
        let rows = if self.format() == Format::Md { short } else { full };
        Ok(output::print_rows(rows, self.format())?)
    }
}

/// State file of a resumable run.
#[derive(Args, Debug, Clone)]
pub(crate) struct StateArgs {
    /// Save finished steps to this file, and resume from it
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,
}

impl StateArgs {
    /// Returns the file.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.state.as_deref()
    }

    /// Checks that the file can be written, before the measurement.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        check_output_path(self.state.as_deref())
    }
}

/// Returns a callback that moves the bar with a measurement and shows the time left.
pub(crate) fn follow(bar: &ProgressBar) -> impl FnMut(&Progress) + '_ {
    move |step| {
        bar.set_length(step.total as u64);
        bar.set_position(step.done as u64);
        bar.set_message(step.note.clone());
        if step.done == step.resumed {
            // Steps of an earlier run do not count for the time left.
            bar.reset_eta();
        }
    }
}

fn bar(label: &'static str, results: &OutputArgs) -> ProgressBar {
    let bar = progress::bar(label, 0, results.quiet);
    bar.enable_steady_tick(std::time::Duration::from_millis(500));
    bar
}

/// Returns the provenance of this run's numbers.
pub(crate) fn about(model: &ModelArgs, loaded: Option<&Model>, text: Option<&Path>) -> About {
    let device = loaded.map(|model| {
        let device = model.device();
        format!("{} ({}, {} {})", device.name, device.kernels, device.n_threads, device.thread_unit)
    });
    let built_in = if loaded.is_some() { "built-in" } else { "" };
    About {
        model: loaded.map_or_else(String::new, |_| model.label()),
        text: text.map_or_else(|| built_in.to_owned(), printable_path),
        device: device.unwrap_or_default(),
        command: std::env::args().collect::<Vec<_>>().join(" "),
    }
}

/// Checks that a requested report can be written, before the measurement.
pub(crate) fn check_report(folder: Option<&Path>) -> Result<(), Failure> {
    Ok(folder.map_or(Ok(()), kvant_eval::report::check)?)
}

/// Adds a part to a requested report and prints its path.
pub(crate) fn add_to_report(folder: Option<&Path>, part: impl FnOnce() -> Part) -> Result<(), Failure> {
    if let Some(folder) = folder {
        let page = kvant_eval::report::update(folder, &part())?;
        console::eprint_line(format_args!("report: {}", printable_path(&page)));
    }
    Ok(())
}

fn row<const N: usize>(cells: [(&str, Value); N]) -> Row {
    cells.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Returns the fields of a serializable value as a row.
fn row_of(value: &impl serde::Serialize) -> Row {
    match serde_json::to_value(value).expect("results are plain JSON") {
        Value::Object(row) => row,
        _ => unreachable!("a result is an object"),
    }
}
