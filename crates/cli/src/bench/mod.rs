//! `kvant bench`: tok/s of prefill and decode, at any depth, for lists of KV cache types, of one
//! sequence or of several in shared steps.
//!
//! The tests and columns are those of llama-bench; the times exclude tokenization and sampling.

mod list;
mod measure;
mod profile;
mod rows;

pub use rows::COMMIT;

use clap::Args;
use kvant::devices::memory_bandwidth;
use kvant::limits::{MAX_TOKENS, check_size};
use kvant::{DType, KvOptions, KvUse, Model, Policies, SessionOptions};
use kvant_quantize::synthetic::Shape;

use crate::args::cache::KvPlanArgs;
use crate::args::model::ModelArgs;
use crate::console;
use crate::failure::Failure;
use crate::output::{self, Format};
use measure::{Bench, Outcome, Test};

/// Arguments of `kvant bench`.
#[derive(Args, Debug)]
#[command(
    after_help = "Example:\n  kvant bench --synthetic tiny:q4_0 -p 64 -n 16 -d 0,256 -ctk f16,turbo3 -ctv f16,turbo3"
)]
pub struct BenchArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Random weights in a real shape, SHAPE:TYPE; shapes: qwen2.5-1.5b qwen2.5-7b llama-7b
    /// llama-3-8b mistral-24b qwen3moe-3b qwen35-2b deepseek-v2-lite tiny
    #[arg(long, value_name = "SHAPE:TYPE", conflicts_with_all = ["model", "word"])]
    synthetic: Option<String>,
    /// Prompt lengths (pp); lists as 512,1024, ranges as 128-512+128 or 128-1024*2; 0 for none
    #[arg(short = 'p', long, value_name = "LIST", default_value = "512", value_parser = list::numbers)]
    n_prompt: list::Numbers,
    /// Numbers of tokens to generate (tg)
    #[arg(short = 'n', long, value_name = "LIST", default_value = "128", value_parser = list::numbers)]
    n_gen: list::Numbers,
    /// Context depths: tokens in the cache before each test
    #[arg(short = 'd', long, value_name = "LIST", default_value = "0", value_parser = list::numbers)]
    n_depth: list::Numbers,
    /// Numbers of sequences that decode together (tg)
    #[arg(long, value_name = "LIST", default_value = "1", value_parser = list::numbers, conflicts_with = "profile")]
    parallel: list::Numbers,
    /// KV cache types of K (-ctk), a list [default: f16]
    #[arg(long, value_name = "TYPES", value_parser = list::types)]
    cache_type_k: Option<list::Types>,
    /// KV cache types of V (-ctv), a list paired with the K types; a single type applies to all
    /// [default: f16]
    #[arg(long, value_name = "TYPES", value_parser = list::types)]
    cache_type_v: Option<list::Types>,
    /// KV cache policies, as in `run`
    #[arg(long, value_name = "RULES", default_value = "none", value_parser = |text: &str| text.parse::<Policies>().map_err(|e| e.to_string()))]
    kv_policy: Policies,
    #[command(flatten)]
    plan: KvPlanArgs,
    /// Repetitions of each test
    #[arg(short = 'r', long, value_name = "N", default_value_t = 5)]
    repetitions: usize,
    /// Fill the cache to each depth by prefill (slow) instead of with random keys and values
    #[arg(long)]
    real_fill: bool,
    /// Also measure memory bandwidth and report the share that decode uses
    #[arg(long, conflicts_with = "n_gpu_layers")]
    roofline: bool,
    /// Profile decode attention at each depth by omitting stages of the KV cache read one by one,
    /// and the kernels of a token on devices that time them (wgpu)
    #[arg(long, conflicts_with_all = ["roofline", "real_fill"])]
    profile: bool,
    /// Output format of the table
    #[arg(short = 'o', long, value_enum, default_value = "md")]
    output: Format,
}

/// Bound on sequences: the rows of a step.
const MAX_PARALLEL: usize = 512;
/// Bound on repetitions, so that all results fit in memory and output.
const MAX_REPETITIONS: usize = 1_000_000;

/// Runs the command.
pub fn bench(args: BenchArgs) -> Result<(), Failure> {
    let (pairs, tests) = (args.pairs()?, args.tests());
    if tests.is_empty() && !args.profile {
        return Err(Failure::Usage("nothing to do: -p and -n are both 0".to_owned()));
    }
    for &n in &args.parallel.0 {
        check_size("--parallel", n, 1..=MAX_PARALLEL).map_err(kvant::Error::from)?;
    }
    check_size("repetitions", args.repetitions, 0..=MAX_REPETITIONS).map_err(kvant::Error::from)?;
    let n_ctx = tests.iter().map(Test::tokens).max().unwrap_or(0).max(1);
    check_size("-p, -n, -d", n_ctx, 1..=MAX_TOKENS).map_err(kvant::Error::from)?;
    let bandwidth = match args.roofline {
        true => Some(args.bandwidth()?),
        false => None,
    };
    let (name, model) = args.open()?;
    if args.profile {
        return profile::profile(&args, pairs, &name, &model);
    }
    let bench = Bench { repetitions: args.repetitions.max(1), real_fill: args.real_fill };
    let mut rows = Vec::new();
    for kv in args.caches(pairs, &model)? {
        let open = || model.session(SessionOptions { n_ctx: Some(n_ctx), kv: kv.clone() });
        let mut sessions = vec![open()?];
        let KvUse { type_k, type_v, .. } = sessions[0].kv();
        for &test in &tests {
            console::eprint_line(format_args!("{type_k}/{type_v} {}", test.name()));
            let outcome = match model.max_sessions(&kv, test.tokens())?.max(1) {
                n_fit if n_fit < test.n_parallel => Outcome::TooLarge { n_fit },
                _ => {
                    while sessions.len() < test.n_parallel {
                        sessions.push(open()?);
                    }
                    Outcome::Measured(bench.run(&mut sessions[..test.n_parallel], test)?)
                }
            };
            rows.push(rows::Measured {
                name: &name,
                model: &model,
                test,
                type_k,
                type_v,
                outcome,
                is_batched: args.parallel.0 != [1],
                bandwidth,
                real_fill: args.real_fill,
            });
        }
    }
    let rows: Vec<_> = match args.output {
        Format::Md => rows.iter().map(rows::Measured::short).collect(),
        _ => rows.iter().map(rows::Measured::full).collect(),
    };
    output::print_rows(&rows, args.output)?;
    Ok(())
}

impl BenchArgs {
    /// Measures the memory bandwidth of the device.
    fn bandwidth(&self) -> Result<f64, Failure> {
        match *self.model.device.devices() {
            [device] => Ok(memory_bandwidth(device, self.model.threads)?),
            _ => Err(Failure::Usage(format!("--roofline: expected one device, got {}", self.model.device))),
        }
    }

    fn pairs(&self) -> Result<Vec<(DType, DType)>, Failure> {
        let types = |given: &Option<list::Types>| {
            given.as_ref().map_or_else(|| vec![DType::F16], |types| types.0.clone())
        };
        let (k, v) = (types(&self.cache_type_k), types(&self.cache_type_v));
        match (k.len(), v.len()) {
            (n, m) if n == m => Ok(k.iter().copied().zip(v.iter().copied()).collect()),
            (_, 1) => Ok(k.iter().map(|&k| (k, v[0])).collect()),
            (1, _) => Ok(v.iter().map(|&v| (k[0], v)).collect()),
            (n, m) => Err(Failure::Usage(format!(
                "-ctk has {n} types, -ctv {m}: expected equal numbers, or one of either"
            ))),
        }
    }

    /// Returns the KV cache options to measure: these pairs of types, or the plan's own.
    fn caches(&self, pairs: Vec<(DType, DType)>, model: &Model) -> Result<Vec<KvOptions>, Failure> {
        let cache = |(k, v)| KvOptions { k, v, policies: self.kv_policy.clone(), ..Default::default() };
        let has_types = self.cache_type_k.is_some() || self.cache_type_v.is_some();
        self.plan.applied(pairs.into_iter().map(cache).collect(), has_types, &self.kv_policy, model)
    }

    fn tests(&self) -> Vec<Test> {
        let depths = || self.n_depth.0.iter().copied();
        let prompts = self.n_prompt.0.iter().copied().filter(|&n| n > 0);
        let prompts = prompts.flat_map(|n| {
            depths().map(move |n_depth| Test { n_prompt: n, n_gen: 0, n_depth, n_parallel: 1 })
        });
        let gens = self.n_gen.0.iter().copied().filter(|&n| n > 0);
        let gens = gens.flat_map(|n_gen| depths().map(move |n_depth| (n_gen, n_depth)));
        let of_gen = |(n_gen, n_depth)| {
            let test = move |&n_parallel| Test { n_prompt: 0, n_gen, n_depth, n_parallel };
            self.parallel.0.iter().map(test)
        };
        prompts.chain(gens.flat_map(of_gen)).collect()
    }

    fn open(&self) -> Result<(String, Model), Failure> {
        let Some(synthetic) = &self.synthetic else {
            return Ok((self.model.label(), self.model.open(false)?));
        };
        let Some((shape, dtype)) = synthetic.split_once(':') else {
            return Err(Failure::Usage(format!("--synthetic: expected SHAPE:TYPE, got '{synthetic}'")));
        };
        let shape = Shape::named(shape).map_err(|error| Failure::Usage(format!("--synthetic: {error}")))?;
        let dtype: DType = dtype.parse().map_err(|error| Failure::Usage(format!("--synthetic: {error}")))?;
        let gguf = shape.model(dtype, 1 << 17)?;
        let lora = &self.model.lora;
        let options = self.model.options(lora.open(&self.model.place, &gguf, false)?, None);
        let name = format!("{} {} (synthetic){}", shape.name, dtype.name(), lora.label());
        Ok((name, Model::from_gguf(gguf, options)?))
    }
}
